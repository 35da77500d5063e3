"""The weighted loop against float64: layouts, dtypes of weights, what is not finite, and centres that prove far from the mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_loop import DATA, LAYOUTS
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from reducers import Reducer, WeightedMean, WeightedMoments
from reducers.errors import DTypeError
from reducers.kernels import dispatch
from reducers.kernels.cpp import library, weighting
from reducers.kernels.cpp.task import task_of
from reducers.kernels.cpp.weighting import looped_weights

pytestmark = pytest.mark.skipif(not library.in_order(), reason="no C++ compiler")

COLUMNS = ("weight", "squares", "mean", "m2", "sum")
WEIGHTS = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.bool]


def drawn(x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Weights in the layout of x, a third of which is 0."""
    weights = torch.empty_strided(x.shape, x.stride()).uniform_(-0.5, 1.0).clamp(min=0)
    return weights > 0 if dtype is torch.bool else weights.to(dtype)


def reference(x: Tensor, weights: Tensor, axes: tuple[int, ...]) -> dict[str, Tensor]:
    wide, heavy = x.double(), weights.double()
    good = wide.isfinite() & heavy.isfinite()
    wide, heavy = torch.where(good, wide, 0.0), torch.where(good, heavy, 0.0)
    weight = heavy.sum(axes, keepdim=True)
    mean = (heavy * wide).sum(axes, keepdim=True) / torch.where(weight > 0, weight, 1.0)
    return {
        "weight": weight.squeeze(axes),
        "squares": heavy.square().sum(axes),
        "mean": mean.squeeze(axes),
        "m2": (heavy * (wide - mean).square()).sum(axes),
        "sum": (heavy * wide).sum(axes),
        "scale": ((heavy * wide.square()).sum(axes) / torch.where(weight > 0, weight, 1.0).squeeze(axes)).sqrt(),
    }


def check(x: Tensor, weights: Tensor, axes: tuple[int, ...]) -> None:
    wanted = reference(x, weights, axes)
    found = looped_weights(x, weights, axes, COLUMNS)
    assert found is not None
    assert tuple(found) == COLUMNS
    for name, value in found.items():
        assert value.dtype is torch.float64
        assert value.shape == wanted[name].shape
        if name in ("mean", "sum"):
            size = wanted["scale"] * (wanted["weight"] if name == "sum" else 1)
            assert ((value - wanted[name]).abs() <= 1e-12 * size).all(), name
        elif name == "m2":
            floor = 1e-22 * wanted["weight"] * wanted["scale"].square()  # rounding of the reference, if the mean is far from 0
            assert ((value - wanted[name]).abs() <= 1e-9 * wanted[name] + floor).all()
        else:
            torch.testing.assert_close(value, wanted[name], rtol=1e-12, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(layout: str, data: str) -> None:
    make, axes = LAYOUTS[layout]
    x = DATA[data](make())
    check(x, drawn(x), axes)


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_dtype(dtype: torch.dtype, weights: torch.dtype) -> None:
    x = torch.randn(60, 131).to(dtype)
    for axes in ((0, 1), (0,), (1,)):
        check(x, drawn(x, weights), axes)


@pytest.mark.parametrize("kept", [(), (0,), (1,), (2,), (0, 2), (0, 1), (1, 2)], ids=str)
@pytest.mark.parametrize("shape", [(12, 1, 1), (12, 40, 1), (1, 40, 33), (1, 1, 33), (1, 1, 1)], ids=str)
def test_weights_that_are_broadcast(shape: tuple[int, ...], kept: tuple[int, ...]) -> None:
    x = torch.randn(12, 40, 33)
    weights = torch.rand(shape).expand(x.shape)
    axes = tuple(axis for axis in range(3) if axis not in kept)
    if task_of(tuple(x.shape), x.stride(), axes, weights.stride()) is None:
        assert looped_weights(x, weights, axes, COLUMNS) is None
    else:
        check(x, weights, axes)


@pytest.mark.parametrize("axes", [(0, 1), (0,), (1,)], ids=str)
def test_what_is_not_finite_is_excluded(axes: tuple[int, ...]) -> None:
    x, weights = torch.randn(300, 517), torch.rand(300, 517)
    x[::7, ::5], x[1, 3], x[2] = torch.nan, torch.inf, -torch.inf
    weights[5:8], weights[9, ::2], weights[20] = torch.inf, torch.nan, 0.0
    x[20, 4] = torch.inf  # of no weight
    check(x, weights, axes)
    check(x, torch.zeros_like(weights), axes)
    check(torch.full_like(x, torch.nan), weights, axes)
    check(x, torch.full_like(weights, torch.inf), axes)


@pytest.mark.parametrize("axes", [(0, 1), (0,), (1,)], ids=str)
@pytest.mark.parametrize("finite", [True, False], ids=["finite", "not finite"])
def test_a_centre_far_from_the_mean_costs_no_digits(axes: tuple[int, ...], finite: bool) -> None:
    """The first elements are far from all others, and weigh next to nothing."""
    x, weights = torch.randn(300, 517), torch.rand(300, 517)
    x[0] = x[:, 0] = 1e6
    weights[0] = weights[:, 0] = 1e-14
    if not finite:
        x[33, 55] = torch.nan
    check(x, weights, axes)


@pytest.mark.parametrize("axes", [(0, 1), (0,), (1,)], ids=str)
@pytest.mark.parametrize("some", ["a few", "most", "all", "the first rows", "the last rows", "those that outweigh the others"])
def test_weights_below_zero_give_what_plain_calls_give(some: str, axes: tuple[int, ...]) -> None:
    """They have no meaning, but a big observation is no other than a small one."""
    x, weights = torch.randn(300, 517) + 3, torch.rand(300, 517)
    rows, chance = torch.arange(300)[:, None], torch.rand(300, 517)
    negative = {
        "a few": chance < 0.1,
        "most": chance < 0.7,
        "all": chance < 2,
        "the first rows": rows < 100,
        "the last rows": rows > 200,
        "those that outweigh the others": rows < 151,
    }[some]
    weights = torch.where(negative, -weights, weights)
    found = looped_weights(x, weights, axes, COLUMNS)
    assert found is not None
    plain = WeightedMoments().lift(x.double(), weights.double(), axes)
    kept = [1 if axis in axes else size for axis, size in enumerate(x.shape)]
    sizes, distance = weights.double().abs(), x.double() - plain["mean"].reshape(kept)
    total = (10 * sizes).sum(axes)  # of the elements' magnitudes, about
    divisor = torch.where(plain["weight"] > 0, plain["weight"], 1.0)
    bounds = {"weight": total, "squares": total, "mean": total / divisor, "m2": 1e3 * (sizes * distance.square()).sum(axes)}
    for name, value in plain.items():
        assert ((found[name] - value).abs() <= 1e-12 * bounds[name]).all(), name


@pytest.mark.parametrize("reducer", [WeightedMean(), WeightedMoments()], ids=repr)
def test_complex_weights_are_refused(reducer: Reducer) -> None:
    with pytest.raises(DTypeError, match="real weights"):
        reducer.update({}, torch.randn(5, 3), torch.rand(5) + 1j)


def test_threads_do_not_change_a_bit(at_several_threads: Callable[[Callable[[], Any]], list[Any]]) -> None:
    x = torch.randn(40, 50, 96) * 100
    weights = drawn(x)
    found = at_several_threads(lambda: [looped_weights(x, weights, axes, COLUMNS) for axes in ((0, 1, 2), (0, 1), (2,))])
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            assert one is not None
            assert two is not None
            assert all(torch.equal(one[key], two[key]) for key in COLUMNS)


REDUCERS = [WeightedMean(), WeightedMean("b c -> c"), WeightedMoments(), WeightedMoments("b c -> b", correction=0)]


@pytest.mark.parametrize("reducer", REDUCERS, ids=repr)
def test_reducers_without_a_compiler_give_the_same(reducer: Reducer, with_and_without_a_compiler: str) -> None:
    xs = [torch.randn(50, 600), torch.randn(50, 600).bfloat16(), torch.randn(9, 5)]
    state = wanted = dict[str, Tensor]()
    xs = [x if reducer.pattern != "b c -> c" else x[:, :5].repeat(40, 1) for x in xs]  # type: ignore[attr-defined]
    xs = [x if reducer.pattern != "b c -> b" else x[:9] for x in xs]  # type: ignore[attr-defined]
    for x in xs:
        state = reducer.update(state, x, weights := torch.rand(len(x)))
        wanted = reducer.update(wanted, x.double(), weights.double())
    torch.testing.assert_close(reducer.compute(state), reducer.compute(wanted), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("reducer", REDUCERS, ids=repr)
def test_an_update_is_one_call(reducer: Reducer, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    run = weighting._run
    monkeypatch.setattr(weighting, "_run", lambda *args: made.append(tuple(args[2].shape)) or run(*args))
    reducer.update({}, torch.randn(100, 100), torch.rand(100))
    reducer.update({}, torch.randn(4, 8), torch.rand(4))
    reducer.update({}, torch.randn(2, 3), torch.rand(2))  # the neighbours are too few
    assert made == [(100, 100), (4, 8)]


def test_what_the_loop_does_not_take_is_left_to_others() -> None:
    x, weights = torch.randn(100, 100), torch.rand(100, 100)
    with FakeTensorMode() as mode:
        assert looped_weights(mode.from_tensor(x), weights, (0, 1), COLUMNS) is None
        assert looped_weights(x, weights, (0, 1), COLUMNS) is None
    assert looped_weights(x.to("meta"), weights, (0, 1), COLUMNS) is None
    assert looped_weights(x.double(), weights, (0, 1), COLUMNS) is None
    assert looped_weights(x, weights.long(), (0, 1), COLUMNS) is None
    strided = weights.repeat_interleave(2, 1)[:, ::2]
    assert looped_weights(x[:50], strided[:50], (0, 1), COLUMNS) is None
    check(x, strided, (0, 1))  # big ones are copied
    assert dispatch.weigh(x.to_sparse(), weights, (0, 1), COLUMNS, {}, WeightedMoments().merge) is None
    parameter = looped_weights(nn.Parameter(x), nn.Parameter(weights), (0, 1), COLUMNS)
    assert parameter is not None
    assert not parameter["sum"].requires_grad
    whole = torch._neg_view(-x)
    assert whole.is_neg()
    check(whole, torch._neg_view(-weights), (0, 1))


def test_inside_vmap_it_is_left_to_others() -> None:
    x, weights = torch.randn(3, 100, 100), torch.rand(3, 100, 100)
    assert torch.vmap(lambda one, heavy: torch.tensor(looped_weights(one, heavy, (0,), COLUMNS) is None))(x, weights).all()
