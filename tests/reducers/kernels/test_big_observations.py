"""A big observation is as exact as promised, whatever the numbers are, and however it lies in memory."""

from __future__ import annotations

import pytest
import torch
from big_tensors import KINDS, SIZE, drawn
from torch import Tensor

from reducers import Activity, Count, Extremes, Max, Mean, Min, Moments, Norm, Reducer, Sparsity, Sum, Summary
from reducers.kernels.chunks import BIG, CHUNK

pytestmark = pytest.mark.usefixtures("with_and_without_a_compiler")


PATTERNS = {(0, 1): "... ->", (0,): "b c -> c", (1,): "b c -> b"}


def squared_deviations(wide: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Their sum in two passes: `var` adds them one by one, with an error above 1e-11."""
    return (wide - wide.mean(axes, keepdim=True)).square().sum(axes)


@pytest.mark.parametrize("axes", [(0, 1), (0,)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_errors_are_those_of_float64(kind: str, axes: tuple[int, ...]) -> None:
    x = drawn(kind)
    found = Summary(PATTERNS[axes]).update({}, x)
    wide = x.double()
    mean, m2 = wide.mean(axes), squared_deviations(wide, axes)
    std = (m2 / wide.numel() * mean.numel()).sqrt()
    rtol = 1e-10 + 2.3e-15 * mean.abs() / std
    assert ((found["mean"] - mean).abs() <= rtol * std).all()
    assert ((found["m2"] - m2).abs() <= rtol * m2).all()
    assert found["min"].equal(x.amin(axes))
    assert found["max"].equal(x.amax(axes))
    assert found["zeros"].equal((x == 0).sum(axes))


@pytest.mark.parametrize("value", [0.0, 0.1, -1e-9, 1e30])
def test_what_is_all_equal_has_no_variance_at_all(value: float) -> None:
    state = Moments().update({}, torch.full((SIZE,), value))
    assert state["m2"].item() == 0
    assert state["mean"].item() == torch.tensor(value).double().item()


@pytest.mark.parametrize(
    "x",
    [
        torch.full((SIZE,), torch.nan),
        torch.cat((torch.zeros(SIZE), torch.tensor([torch.inf]))),
        torch.randn(SIZE) * 1e30,  # the squares overflow
        torch.randn(SIZE) * 1e-30,  # the squares vanish
        1e-3 + torch.randn(SIZE) * 1e-10,  # all but equal
        torch.randn(SIZE).double(),
        torch.arange(SIZE),
        torch.randn(BIG - 1),
    ],
    ids=["nan", "inf", "large", "small", "all but equal", "float64", "integers", "few"],
)
def test_what_float32_cannot_hold_is_no_trouble(x: Tensor) -> None:
    result = Summary().compute(Summary().update({}, x))
    wide = x.double()[x.double().isfinite()]
    if len(wide):
        torch.testing.assert_close(result["var"], wide.var(), rtol=1e-9, atol=0)


@pytest.mark.parametrize("scale", [1.0, 1e30, 1e-30])
def test_norms_are_as_exact_and_know_what_is_zero(scale: float) -> None:
    x = torch.randn(SIZE, 3, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, scale, 0.0])
    norm = Norm("b c -> c")
    exact = torch.linalg.vector_norm(x.double(), dim=0)
    torch.testing.assert_close(norm.compute(norm.update({}, x)), exact, rtol=1e-12, atol=0)


FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SINGLE: tuple[Reducer, ...] = (
    Count(),
    Sum(),
    Mean(),
    Min(),
    Max(),
    Extremes(),
    Norm(),
    Norm(p=1),
    Norm(p=float("inf")),
    Activity(),
    Activity("... ->", eps=0.5, death=True),
    Sparsity("b c -> c"),
    Min("b c -> c"),
    Norm("b c -> c"),
    Norm("b c -> c", p=1),
    Extremes("b c -> c"),
)


def turned(x: Tensor, how: str) -> Tensor:
    """The same numbers, laid out in memory in another way."""
    return {
        "contiguous": lambda: x,
        "turned": lambda: x.t().contiguous().t(),
        "every other": lambda: x.repeat_interleave(2, 0)[::2],
    }[how]()


@pytest.mark.slow
@pytest.mark.parametrize("axes", [(0, 1), (0,)], ids=str)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "half precision"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_sums_are_as_exact_as_in_float64(kind: str, axes: tuple[int, ...], dtype: torch.dtype) -> None:
    x, pattern = drawn(kind).to(dtype), PATTERNS[axes]
    x = torch.where(x.isfinite(), x, 0)  # of the heavy tails float16 holds no more
    wide = x.double()
    bound = 1e-12 * wide.abs().sum(axes)
    for found, exact in (
        (Mean(pattern).update({}, x)["sum"], wide.sum(axes)),
        (Sum(pattern).update({}, x)["sum"], wide.sum(axes)),
        (Norm(pattern, p=1).update({}, x)["power"], wide.abs().sum(axes)),
    ):
        assert ((found - exact).abs() <= bound).all()


@pytest.mark.parametrize("value", [0.1, 1 / 3, 0.7, 1.1, 1.3, 1.7, 1.9, 1e4])
def test_equal_numbers_whose_rounding_adds_up(value: float) -> None:
    x = torch.full((1 << 20, 3), value)
    exact = x[0, 0].double().item()
    for pattern in ("... ->", "b c -> c"):
        for reducer in (Mean(pattern), Norm(pattern, normalize=True), Norm(pattern, p=1, normalize=True)):
            found = torch.as_tensor(reducer.compute(reducer.update({}, x)))
            assert (found / exact - 1).abs().max().item() < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(8192, 3, 49), (8192, 3, 7, 14), (512, 3, 1024)], ids=str)
@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("value", [0.3, 0.7, 1 / 3, 1.7])
def test_runs_of_memory_are_as_exact(shape: tuple[int, ...], last: bool, value: float) -> None:
    signs = torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.5
    x = torch.where(signs, value, -value)
    if last:
        x = x.movedim(1, -1).contiguous().movedim(-1, 1)
    gapped = torch.full((*shape[:-1], 2 * shape[-1]), value)[..., ::2]
    every, kept = tuple(range(x.ndim)), (0, *range(2, x.ndim))
    for axes, pattern in ((every, "... ->"), (kept, "b c ... -> c")):
        found, wide = Moments(pattern).update({}, x), x.double()
        count = x.numel() // found["m2"].numel()
        assert (found["m2"] / squared_deviations(wide, axes) - 1).abs().max().item() < 1e-12
        assert (found["mean"] - wide.mean(axes)).abs().max().item() < 1e-12 * value
        for y in (x.abs(), gapped):
            one = y.double().max().item()
            added, squares = Mean(pattern).update({}, y)["sum"], Norm(pattern).update({}, y)["power"]
            assert (added / count / one - 1).abs().max().item() < 1e-12
            assert (squares / count / one**2 - 1).abs().max().item() < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("how", ["contiguous", "turned", "every other"])
@pytest.mark.parametrize("axes", [(0, 1), (0,), (1,)], ids=str)
@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64, torch.int32, torch.int8, torch.bool])
def test_extremes_of_all_layouts_are_exact(dtype: torch.dtype, axes: tuple[int, ...], how: str) -> None:
    x = turned(torch.randn(SIZE + 7, 5, generator=torch.Generator().manual_seed(0)).mul(9).to(dtype), how)
    for reducer, names in ((Extremes, ("min", "max")), (Min, ("min",)), (Max, ("max",))):
        found = reducer(PATTERNS[axes]).update({}, x)
        for name in names:
            assert found[name].equal(x.amin(axes) if name == "min" else x.amax(axes))
            assert found[name].dtype == dtype
            assert found[name].is_contiguous()


@pytest.mark.parametrize("how", ["contiguous", "turned", "every other"])
@pytest.mark.parametrize("axes", [(0, 1), (0,), (1,)], ids=str)
@pytest.mark.parametrize("dtype", FLOATS)
def test_counts_and_squares_of_all_layouts_are_exact(dtype: torch.dtype, axes: tuple[int, ...], how: str) -> None:
    x = turned(torch.randn(1 << 18, 7, generator=torch.Generator().manual_seed(0)).relu().to(dtype), how)
    counted, squares = Activity(PATTERNS[axes]).update({}, x)["active"], Norm(PATTERNS[axes]).update({}, x)["power"]
    assert counted.dtype == torch.int64
    assert counted.equal((x > 0).sum(axes))
    torch.testing.assert_close(squares, x.double().square().sum(axes), rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("step", [-1e-9, 0.0, 1e-9])
def test_what_counts_as_zero_is_told_as_exactly_as_in_float64(dtype: torch.dtype, step: float) -> None:
    x = torch.full((BIG,), 0.5, dtype=dtype)
    active = Activity("... ->", eps=0.5 + step).update({}, x)["active"]
    assert active.item() == (BIG if step < 0 else 0)


@pytest.mark.parametrize("hole", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("reducer", SINGLE, ids=str)
def test_holes_in_big_observations_are_kept_out(reducer: Reducer, hole: float) -> None:
    x = torch.randn(1 << 17, 3, generator=torch.Generator().manual_seed(0)).relu()
    x[1234, 1] = hole
    rest = torch.cat((x[:1234], x[1235:]))
    holed = reducer.merge(reducer.update({}, x[1234:1235]), reducer.update({}, rest))
    whole = reducer.update({}, x)
    for key in whole.keys() - {"deaths", "observations"}:
        torch.testing.assert_close(whole[key], holed[key], rtol=1e-12, atol=0)


def test_death_is_told_of_an_observation_and_not_of_its_parts() -> None:
    x = torch.zeros(1 << 18, 4)
    x[0, 0] = x[-1, 1] = 1.0  # alive in one part only
    for hole in (0.0, torch.nan):
        x[5, 3] = hole
        state = Activity("b c -> c", death=True).update({}, x)
        assert state["deaths"].item() == 0.5
        assert state["observations"].item() == 1
        assert state["active"].tolist() == [1, 1, 0, 0]


def most_at_once(reducer: Reducer, x: Tensor) -> int:
    """The most bytes beyond `x` that one update holds."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        reducer.update({}, x)
    held = most = 0
    for event in profile.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


@pytest.mark.slow
@pytest.mark.parametrize("hole", [0.0, torch.nan])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("reducer", SINGLE, ids=str)
def test_no_more_than_8_mb_are_held_beside_an_observation(reducer: Reducer, dtype: torch.dtype, hole: float) -> None:
    x = torch.ones((1 << 20, 12), dtype=dtype)
    x[77, 7] = hole
    assert 0 < most_at_once(reducer, x) <= 8e6


def test_no_temporary_is_as_big_as_the_observation() -> None:
    x = torch.randn(1 << 22)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        Summary().update({}, x)
    assert max(event.cpu_memory_usage for event in profile.events()) <= 4 * 8 * CHUNK
