"""Masks and weights in the GPU kernels, by Triton's interpreter on CPU tensors: against float64, and under the laws.

Run as `test_triton.py`, with triton (extra `gpu-tests`) and TRITON_INTERPRET=1.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import laws
import pytest
import torch
from cases import CASES, Case
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton (extra gpu-tests) and TRITON_INTERPRET=1", allow_module_level=True)

from reducers import Activity, Extremes, Masked, Mean, Moments, Norm, Reducer, Summary, WeightedMean, WeightedMoments
from reducers.kernels import dispatch
from reducers.kernels.triton import lanes, sweep, tiling, weigh
from reducers.kernels.triton.sweep import swept
from reducers.kernels.triton.weigh import weighted_swept

ALL = {name: name for name in ("count", "mean", "m2", "m3", "m4", "min", "max", "zeros", "nan", "inf")}
MOMENTS = ("nonfinite", "weight", "squares", "mean", "m2")
SHAPE = (2, 3, 4, 5)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "_LANES", 4)
    monkeypatch.setattr(lanes, "_EACH", 8)
    monkeypatch.setattr(tiling, "_MAX_PARTS", 2)


@pytest.fixture
def taken(without_loops: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Reducers take the kernels for CPU tensors; what these found."""
    failed: list[Exception] = []
    calls: list[Any] = []
    monkeypatch.setattr("reducers.kernels.failing._failed", failed)

    def counted(kernel: Any) -> Any:
        def call(*args: Any) -> Any:
            calls.append(found := kernel(*args))
            return found

        return call

    for kernels, room, name in ((dispatch.SWEEPS, sweep, "swept"), (dispatch.WEIGHTED, weigh, "weighted_swept")):
        monkeypatch.setitem(kernels, "cpu", kernels["cuda"])
        monkeypatch.setattr(room, name, counted(getattr(room, name)))
    yield calls
    assert failed == []
    assert None not in calls


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def holes(*shape: int) -> Tensor:
    x = random(*shape)
    flat = x.view(-1)
    flat[::7], flat[::11], flat[::13], flat[::5] = torch.nan, torch.inf, -torch.inf, 0
    return x


LAYOUTS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "everything": (lambda x: x, (0, 1, 2, 3)),
    "last kept": (lambda x: x, (0, 1, 2)),
    "channels": (lambda x: x, (0, 2, 3)),
    "channels last": (lambda x: x.contiguous(memory_format=torch.channels_last), (0, 2, 3)),
    "gaps": (lambda x: x.repeat_interleave(2, 3)[..., ::2], (0, 2)),
}
MASKS: dict[str, Callable[[Tensor], Tensor]] = {
    "elements": lambda mask: mask,
    "tokens": lambda mask: mask[..., :1].expand(SHAPE),
    "channels": lambda mask: mask[:1, :, :1, :1].expand(SHAPE),
    "samples": lambda mask: mask[:, :1, :1, :1].expand(SHAPE),
    "turned": lambda mask: mask.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
    "gaps": lambda mask: mask.repeat_interleave(3, 2)[:, :, ::3],
    "none": lambda mask: torch.zeros((), dtype=torch.bool).expand(SHAPE),
    "one": lambda mask: torch.zeros(SHAPE, dtype=torch.bool).index_put_(
        tuple(torch.tensor([[1], [2], [3], [4]])), mask.new_ones(1)
    ),
}


def reference(x: Tensor, mask: Tensor, axes: tuple[int, ...]) -> dict[str, Tensor]:
    """Everything that the kernels compute of the selected elements, by plain operations in float64."""
    wide = x.double()
    finite = wide.isfinite() & mask
    clean = torch.where(finite, wide, 0.0)
    count = finite.sum(axes, keepdim=True)
    mean = clean.sum(axes, keepdim=True) / count.clamp(min=1)
    distance = torch.where(finite, wide - mean, 0.0)
    return {
        "count": count.squeeze(axes),
        "mean": mean.squeeze(axes),
        **{f"m{power}": (distance**power).sum(axes) for power in (2, 3, 4)},
        "m3 of magnitudes": (distance.abs() ** 3).sum(axes),
        "min": torch.where(finite, wide, torch.inf).amin(axes),
        "max": torch.where(finite, wide, -torch.inf).amax(axes),
        "zeros": ((wide == 0) & mask).sum(axes),
        "nan": (wide.isnan() & mask).sum(axes),
        "inf": (wide.isinf() & mask).sum(axes),
        "sum": clean.sum(axes),
        "exact": clean.sum(axes),
        "magnitudes": clean.abs().sum(axes),
        "squares": clean.square().sum(axes),
        "active": (clean.abs() > 0.5).sum(axes),
        "peak": clean.abs().amax(axes),
    }


def assert_masked(
    x: Tensor, mask: Tensor, axes: tuple[int, ...], columns: dict[str, str] = ALL, seen: Tensor | None = None
) -> None:
    """Errors are below a millionth: of the mean in standard deviations, of sums in the sum of what is added.

    The kernel gets `seen`, if given, in place of `x`.
    """
    found = swept(x if seen is None else seen, axes, columns, 0.5, None, mask)
    assert found is not None
    exact = reference(x, mask, axes)
    std = (exact["m2"] / exact["count"].clamp(min=1)).sqrt()
    scale = {"mean": std, "m2": exact["m2"], "m3": exact["m3 of magnitudes"], "m4": exact["m4"], "squares": exact["squares"]}
    scale |= dict.fromkeys(("sum", "exact", "magnitudes"), exact["magnitudes"])
    for name, column in columns.items():
        value, wanted = found[name], exact[column]
        assert value.shape == wanted.shape, name
        if column in scale:
            assert ((value - wanted).abs() <= 1e-6 * scale[column] + 1e-15 * wanted.abs()).all(), (name, value, wanted)
        else:
            assert value.double().equal(wanted.double()), (name, value, wanted)


def chosen(share: float = 0.6) -> Tensor:
    return torch.rand(SHAPE, generator=torch.Generator().manual_seed(3)) < share


# Every mask in two layouts, and every layout under two masks.
EACH = [(kind, how) for kind in MASKS for how in LAYOUTS if kind in ("elements", "tokens") or how in ("everything", "channels")]


@pytest.mark.parametrize(("kind", "how"), EACH)
def test_masks_of_any_layout_select_what_is_observed(kind: str, how: str) -> None:
    arranged, axes = LAYOUTS[how]
    mask, x = MASKS[kind](chosen()), holes(*SHAPE)
    assert_masked(arranged(x), mask, axes, seen=arranged(torch.where(mask, x, torch.nan)))


DTYPES = [torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.int64, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_masked_dtypes(dtype: torch.dtype) -> None:
    x = holes(*SHAPE).to(dtype) if dtype.is_floating_point else random(*SHAPE).mul(3).to(dtype)
    assert_masked(x, chosen(), (0, 2, 3))
    found = swept(x, (0, 1, 2, 3), {"min": "min"}, 0.0, None, chosen())
    assert found is not None
    assert found["min"].dtype == (dtype if dtype.is_floating_point else torch.float64)  # as on a CPU


@pytest.mark.parametrize("total", ["sum", "exact", "magnitudes", "squares", "active", "peak"])
def test_masked_totals(total: str) -> None:
    for x in (holes(*SHAPE), random(*SHAPE).mul(40).to(torch.int8)):
        for axes in ((0, 1, 2, 3), (0, 1)):
            assert_masked(x, chosen(), axes, {"count": "count", "power": total})


def test_numbers_that_break_careless_sums_and_those_that_are_not_selected() -> None:
    mask = chosen()
    for x in (random(*SHAPE) + 1e4, random(*SHAPE) * 1e-30):
        for other in (torch.nan, 1e38):
            assert_masked(x, mask, (0, 2, 3), seen=torch.where(mask, x, other))
    equal = swept(torch.where(mask, torch.tensor(0.1), random(*SHAPE)), (0, 2, 3), ALL, 0.0, None, mask)
    assert equal is not None
    assert not equal["m2"].any()


def test_masked_observations_join_a_state_and_are_the_same_bits_in_every_run() -> None:
    xs, mask = [holes(*SHAPE), random(*SHAPE) + 1e4], chosen()
    states: list[Any] = [None, None]
    for _ in range(2):
        states = [swept(x, (0, 2, 3), ALL, 0.0, state, mask) for x, state in zip(xs, states, strict=True)]
    for x, state in zip(xs, states, strict=True):
        both, twice = torch.cat([x, x]), torch.cat([mask, mask])
        exact = reference(both, twice, (0, 2, 3))
        torch.testing.assert_close(state["m2"], exact["m2"], rtol=1e-6, atol=0)
        assert state["nan"].equal(exact["nan"])
    laws.same_bits(*(swept(xs[0], (0, 2, 3), ALL, 0.0, states[0], mask) for _ in range(2)))


MASKABLE = (Mean, Moments, Summary, Norm, Extremes, Activity)


@pytest.mark.parametrize("kind", MASKABLE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int32], ids=str)
def test_masked_reducers_give_what_they_give_on_a_cpu(kind: type[Reducer], dtype: torch.dtype, taken: list[Any]) -> None:
    masked = Masked(kind("b c h w -> c"))  # type: ignore[call-arg]
    xs = [holes(*SHAPE), random(*SHAPE, seed=1) + 1e4, torch.full(SHAPE, torch.nan)]
    xs = [x if dtype.is_floating_point else x.nan_to_num(0, 0, 0).to(dtype) for x in xs]
    masks = [chosen(), chosen()[:, :1, :, :1], chosen(0.0)]
    found: Any = {}
    for x, mask in zip(xs, masks, strict=True):
        found = masked.update(found, x, mask)
    assert len(taken) == 3
    dispatch.SWEEPS.pop("cpu")
    wanted: Any = {}
    for x, mask in zip(xs, masks, strict=True):
        wanted = masked.update(wanted, x, mask)
    assert {key: value.dtype for key, value in found.items()} == {key: value.dtype for key, value in wanted.items()}
    laws.close(masked.compute(found), masked.compute(wanted), rtol=1e-6, atol=1e-6)


SELECTING = [case for case in CASES if any(word in str(case) for word in ("Masked(Summary", "Masked(Product", "Weighted"))]


@pytest.mark.parametrize("case", SELECTING, ids=str)
def test_the_laws_hold_with_masks_and_weights(case: Case, taken: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(laws, "close", partial(laws.close, rtol=1e-6, atol=1e-6))
    xs = [random(4, *case.trailing) + 1e4, holes(3, *case.trailing), torch.full((4, *case.trailing), torch.nan)]
    laws.matches(case.reducer, xs, case.reference)
    laws.stream_is_merge(case.reducer, xs)
    laws.associative(case.reducer, xs, (1, 2))
    laws.pure(case.reducer, xs)
    laws.typed(case.reducer, xs)
    assert len(taken) > 10


def weighted(x: Tensor, weights: Tensor, axes: tuple[int, ...]) -> dict[str, Tensor]:
    """Weighted sums of the finite elements with a finite weight, by plain operations in float64."""
    x, weights = x.double(), weights.double().expand(x.shape)
    used = x.isfinite() & weights.isfinite()
    x, weights = torch.where(used, x, 0.0), torch.where(used, weights, 0.0)
    weight = weights.sum(axes, keepdim=True)
    mean = (weights * x).sum(axes, keepdim=True) / torch.where(weight > 0, weight, 1.0)
    sums = {
        "nonfinite": (~used).sum(axes),
        "weight": weight.squeeze(axes),
        "sum": (weights * x).sum(axes),
        "squares": weights.square().sum(axes),
    }
    return {**sums, "mean": mean.squeeze(axes), "m2": (weights * (x - mean).square()).sum(axes)}


def assert_weighted(x: Tensor, weights: Tensor, axes: tuple[int, ...]) -> None:
    exact = weighted(x, weights, axes)
    for columns in (("nonfinite", "weight", "sum"), MOMENTS):
        found = weighted_swept(x, weights.expand(x.shape), axes, columns)
        assert found is not None
        for name in columns:
            atol = 1e-9 * (exact["m2"] / exact["weight"]).abs().sqrt().nan_to_num(0).max().item() if name == "mean" else 0
            torch.testing.assert_close(
                found[name], exact[name], rtol=1e-9, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
            )


def drawn_weights() -> Tensor:
    """Weights of which some are 0, and some not finite."""
    weights = random(*SHAPE, seed=5).abs()
    flat = weights.view(-1)
    flat[::9], flat[::17], flat[::31] = 0, torch.nan, torch.inf
    return weights


@pytest.mark.parametrize(("kind", "how"), [(kind, how) for kind, how in EACH if kind not in ("samples", "none", "one")])
def test_weights_of_any_layout(kind: str, how: str) -> None:
    arranged, axes = LAYOUTS[how]
    assert_weighted(arranged(holes(*SHAPE)), MASKS[kind](drawn_weights()), axes)


SHARED: dict[str, Callable[[Tensor], Tensor]] = {
    "elements": lambda weights: weights,
    "tokens": lambda weights: weights[..., :1],
    "every second token": lambda weights: weights.repeat_interleave(2, 2)[:, :, ::2, :1],
    "samples": lambda weights: weights[:, :1, :1, :1],
    "features": lambda weights: weights[:1, :1, :1],
    "one": lambda weights: weights[:1, :1, :1, :1],
}


@pytest.mark.parametrize("sizes", [(2, 3, 4, 16), (2, 4, 2, 24)], ids=str)
@pytest.mark.parametrize("how", LAYOUTS)
@pytest.mark.parametrize("kind", SHARED)
def test_weights_that_neighbours_share(kind: str, how: str, sizes: tuple[int, ...]) -> None:
    """Many tiles are full, and read quickly; or quickly at first, if something is not finite."""
    arranged, axes = LAYOUTS[how]
    weights = random(*sizes, seed=5).abs()
    weights[:, :, 1::3] = 0
    for x in (random(*sizes) + 100, holes(*sizes)):
        assert_weighted(arranged(x), SHARED[kind](weights).expand(sizes), axes)
    if how == "channels" and kind in ("elements", "tokens"):
        for flat in (weights.to(torch.bfloat16), weights.double(), weights > 1):
            assert_weighted(arranged(random(*sizes)).bfloat16(), SHARED[kind](flat).expand(sizes), axes)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.bool, torch.int64], ids=str)
def test_weights_and_elements_of_any_dtype(dtype: torch.dtype) -> None:
    x, weights = random(*SHAPE) * 3, random(*SHAPE, seed=5).abs() * 3
    assert_weighted(x, weights.to(dtype), (0, 1, 2, 3))
    assert_weighted(x.to(dtype), weights, (0, 2, 3))


HARD: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "mean 1e4": (lambda x: x + 1e4, lambda weights: weights),
    "weights of any size": (lambda x: x, lambda weights: weights**40),
    "vanishing weights": (lambda x: x, lambda weights: weights * 1e-30),
    "no weight": (lambda x: x, lambda weights: weights * 0),
    "some negative weights": (lambda x: x, lambda weights: torch.where(random(*SHAPE, seed=7) > 0.8, -weights / 9, weights)),
    "negative weights": (lambda x: x, lambda weights: -weights),
    "far away without weight": (lambda x: torch.where(chosen(0.5), x, 1e30), lambda weights: torch.where(chosen(0.5), weights, 0)),
    "far away first, of little weight": (
        lambda x: torch.where(torch.arange(2)[:, None, None, None] == 0, 1e8, x),
        lambda weights: torch.where(torch.arange(2)[:, None, None, None] == 0, 1e-30, weights),
    ),
}


@pytest.mark.parametrize("kind", HARD)
def test_weights_that_break_careless_sums(kind: str) -> None:
    elements, weights = HARD[kind]
    for axes in ((0, 1, 2, 3), (0, 2, 3), (0, 1, 2)):
        assert_weighted(elements(random(*SHAPE)), weights(random(*SHAPE, seed=5).abs()), axes)


@pytest.mark.parametrize("axes", [(0, 1, 2), (0, 1), (1, 2)], ids=str)
@pytest.mark.parametrize("share", ["elements", "tokens"])
def test_quick_sums_of_numbers_that_break_careless_ones(share: str, axes: tuple[int, ...]) -> None:
    """Numbers far from 0, others far from them without weight, or of little weight, first; and weights that grow by any factor."""
    sizes = (2, 16, 16)
    x, weights = random(*sizes) + 1e4, random(*sizes, seed=5).abs()
    weights = weights[..., :1].expand(sizes) if share == "tokens" else weights
    rising = torch.logspace(-30, 0, 16)[:, None] * weights
    none, late = torch.arange(16)[:, None] % 3 == 0, torch.arange(16)[:, None] > 4
    cases = [(x, weights), (x, rising), (x * torch.logspace(9, 0, 16)[:, None], rising)]
    cases += [
        (torch.where(none, 1e30, x), torch.where(none, 0, weights)),
        (torch.where(late, x, 1e8), torch.where(late, weights, 1e-30)),
    ]
    for elements, heavy in cases:
        assert_weighted(elements, heavy, axes)
    found = weighted_swept(torch.full(sizes, 0.1), rising, axes, MOMENTS)
    assert found is not None
    assert not found["m2"].any()


def test_equal_elements_have_no_weighted_variance() -> None:
    found = weighted_swept(torch.full(SHAPE, 0.1), drawn_weights(), (0, 2, 3), MOMENTS)
    assert found is not None
    assert not found["m2"].any()
    assert found["mean"].equal(torch.full((3,), 0.1).double())


@pytest.mark.parametrize("reducer", [WeightedMean("b c h w -> w c"), WeightedMoments("b c h w -> w c"), WeightedMoments()], ids=str)
def test_weighted_reducers_give_what_they_give_on_a_cpu(reducer: Reducer, taken: list[Any]) -> None:
    xs = [holes(*SHAPE), random(*SHAPE, seed=1) + 1e4, random(*SHAPE)]
    weights = [drawn_weights(), drawn_weights()[:, :1, :, :1], torch.zeros(2)]
    found: Any = {}
    for x, weight in zip(xs, weights, strict=True):
        found = reducer.update(found, x, weight)
    assert len(taken) == 3
    dispatch.WEIGHTED.pop("cpu")
    wanted: Any = {}
    for x, weight in zip(xs, weights, strict=True):
        wanted = reducer.update(wanted, x.double(), weight)
    laws.close(found, wanted, rtol=1e-12, atol=1e-12)


def test_what_the_weighted_kernels_do_not_take_is_left_to_plain_operations(taken: list[Any]) -> None:
    x, weights = torch.randn(4, 3), torch.rand(4, 3)
    assert weighted_swept(x * 1j, weights, (0,), MOMENTS) is None
    assert weighted_swept(x, weights.to(torch.float8_e5m2), (0,), MOMENTS) is None
    moments = WeightedMoments("b c -> c")
    state = moments.update({}, x * 1j, weights)
    assert state["mean"].is_complex()
    assert moments.update(state, x, weights)["mean"].is_complex()  # a state that the kernels do not join
    taken.clear()


def test_no_weight_beside_numbers_whose_squares_overflow(taken: list[Any]) -> None:
    moments, huge, weights = WeightedMoments("b c -> c"), torch.full((4, 3), 1e160, dtype=torch.float64), torch.ones(4)
    wanted, nothing = moments.update({}, huge, weights), moments.update({}, torch.full_like(huge, float("nan")), weights)
    for found in (moments.update(wanted, huge * float("nan"), weights), moments.update(nothing, huge, weights)):
        assert found["m2"].eq(0).all()
        assert found["mean"].eq(huge[0]).all()
    assert len(taken) == 4
    assert None not in taken
