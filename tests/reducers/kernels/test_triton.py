"""The GPU kernels by Triton's interpreter, on CPU tensors: against float64, and under the laws as one more backend.

Run with triton (extra `gpu-tests`) and TRITON_INTERPRET=1, in a process of their own: the variable changes what triton compiles.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import laws
import pytest
import torch
from cases import CASES, Case
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton (extra gpu-tests) and TRITON_INTERPRET=1", allow_module_level=True)

from reducers import Activity, Max, Mean, Min, Moments, Norm, Statistic, Sum, Summary
from reducers.kernels import dispatch
from reducers.kernels.triton import lanes, sweep, tiling
from reducers.kernels.triton.arguments import DTYPES, takes_columns
from reducers.kernels.triton.join import join_partials
from reducers.kernels.triton.sweep import new_partials, sweep_into, swept

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
ALL = {name: name for name in ("count", "mean", "m2", "m3", "m4", "min", "max", "zeros", "nan", "inf")}
SUMMARY = {name: name for name in ("count", "mean", "m2", "min", "max", "zeros", "nan", "inf")}
TILE = 64


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tensors have many tiles, and several parts of several tiles each."""
    monkeypatch.setattr(lanes, "_LANES", 8)
    monkeypatch.setattr(lanes, "_EACH", 8)
    monkeypatch.setattr(tiling, "_TILE", TILE)
    monkeypatch.setattr(tiling, "_MAX_PARTS", 4)


@pytest.fixture
def on_cpu(without_loops: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Reducers take the kernels for CPU tensors."""
    failed: list[Exception] = []
    monkeypatch.setattr("reducers.kernels.failing._failed", failed)
    monkeypatch.setitem(dispatch.SWEEPS, "cpu", dispatch.SWEEPS["cuda"])
    yield
    assert failed == []


def drawn(kind: str, *shape: int) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(len(kind)))
    flat = x.view(-1)
    if kind == "offset":
        return x + 1e4
    if kind == "holes":
        flat[::7], flat[::11], flat[::13], flat[::5] = torch.nan, torch.inf, -torch.inf, 0
    if kind == "nothing finite":
        flat.fill_(torch.nan)
    if kind == "constant":
        flat.fill_(0.1)
    if kind == "outlier":
        flat[0] = 1e6
    if kind == "huge":
        flat.mul_(1e37)
    if kind == "tiny":  # squares vanish in float32; the interpreter itself loses bits of bfloat16 numbers below 1e-38
        flat.mul_(1e-34)
    return x


LAYOUTS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "everything": (lambda x: x, (0, 1, 2, 3)),
    "last kept": (lambda x: x, (0, 1, 2)),
    "channels": (lambda x: x, (0, 2, 3)),
    "channels last": (lambda x: x.contiguous(memory_format=torch.channels_last), (0, 2, 3)),
    "first kept": (lambda x: x, (1, 2, 3)),
    "two kept": (lambda x: x, (0, 2)),
    "all but one kept": (lambda x: x, (2,)),
    "gaps": (lambda x: x[:, ::2, 1:, ::3], (0, 2)),
    "turned": (lambda x: x.permute(3, 1, 0, 2), (1, 2)),
    "expanded": (lambda x: x[:1].expand(3, *x.shape[1:]), (0, 3)),
}


def reference(x: Tensor, axes: tuple[int, ...]) -> dict[str, Tensor]:
    """Everything that the kernels compute, by plain operations in float64."""
    wide = x.double()
    finite = wide.isfinite()
    clean = torch.where(finite, wide, 0.0)
    count = finite.sum(axes)
    mean = clean.sum(axes) / count.clamp(min=1)
    distance = torch.where(finite, wide - mean.reshape([1 if a in axes else n for a, n in enumerate(x.shape)]), 0.0)
    return {
        "count": count,
        "mean": mean,
        **{f"m{power}": (distance**power).sum(axes) for power in (2, 3, 4)},
        "min": torch.where(finite, wide, torch.inf).amin(axes),
        "max": torch.where(finite, wide, -torch.inf).amax(axes),
        "zeros": (wide == 0).sum(axes),
        "nan": wide.isnan().sum(axes),
        "inf": wide.isinf().sum(axes),
        "m3 of magnitudes": (distance.abs() ** 3).sum(axes),
        "sum": clean.sum(axes),
        "exact": clean.sum(axes),
        "magnitudes": clean.abs().sum(axes),
        "squares": clean.square().sum(axes),
        "active": (clean.abs() > 0.5).sum(axes),
        "peak": clean.abs().amax(axes),
    }


def assert_close(found: dict[str, Tensor], x: Tensor, axes: tuple[int, ...]) -> None:
    """Errors are below a millionth: of the mean in standard deviations, of sums in the sum of what is added."""
    exact = reference(x, axes)
    count = exact["count"].clamp(min=1)
    std = (exact["m2"] / count).sqrt()
    scale = {
        "mean": std + 1e-12 * exact["mean"].abs(),
        "m2": exact["m2"],
        "m3": exact["m3 of magnitudes"],
        "m4": exact["m4"],
        "sum": exact["magnitudes"],
        "magnitudes": exact["magnitudes"],
        "squares": exact["squares"],
        "exact": 1e-6 * exact["magnitudes"],
    }
    for name, value in found.items():
        wanted = exact[name]
        assert value.shape == wanted.shape, name
        assert value.is_contiguous(), name
        if name not in scale:
            assert value.double().equal(wanted.double()), name
        elif x.dtype.is_floating_point and x.dtype is not torch.float64:
            assert ((value - wanted).abs() <= 1e-6 * scale[name]).all(), (name, value, wanted)
        else:
            bound = 1e-11 * (scale[name] + wanted.abs() + std)
            assert ((value - wanted).abs() <= bound).all(), (name, value, wanted)


# Every dtype in three layouts that make different kernels, and every layout in float32.
EACH = [(how, dtype) for how in LAYOUTS for dtype in DTYPES if dtype is torch.float32 or how in ("everything", "last kept", "gaps")]


@pytest.mark.parametrize(("how", "dtype"), EACH, ids=str)
def test_all_layouts_and_dtypes_are_as_exact_as_promised(how: str, dtype: torch.dtype) -> None:
    arranged, axes = LAYOUTS[how]
    x = drawn("holes", 3, 6, 5, 7)
    x = arranged(x.to(dtype) if dtype.is_floating_point else x.mul(3).nan_to_num(1, 2, 3).to(dtype))
    found = swept(x, axes, ALL)
    assert found is not None
    assert found["min"].dtype == found["max"].dtype == dtype
    assert_close(found, x, axes)


@pytest.mark.parametrize("size", [1, 2, TILE - 1, TILE, TILE + 1, 4 * TILE, 4 * TILE + 1, 11 * TILE + 7])
def test_sizes_around_the_borders_of_tiles_and_parts(size: int) -> None:
    x = drawn("normal", size)
    found = swept(x, (0,), SUMMARY)
    assert found is not None
    assert_close(found, x, (0,))


@pytest.mark.parametrize("size", [1, 3, 8, 9])
@pytest.mark.parametrize("kept", [1, 8, 32, 33])
def test_sizes_around_the_borders_of_tiles_with_columns(size: int, kept: int) -> None:
    for x, axes in ((drawn("normal", size, kept), (0,)), (drawn("normal", kept, size), (1,))):
        found = swept(x, axes, {"count": "count", "sum": "sum"})
        assert found is not None
        assert_close(found, x, axes)


KINDS = ("normal", "offset", "holes", "nothing finite", "constant", "outlier", "huge", "tiny")
DRAWN = [(kind, dtype) for kind in KINDS for dtype in FLOATS if dtype is torch.float32 or kind in ("offset", "holes", "constant")]


@pytest.mark.parametrize(("kind", "dtype"), DRAWN, ids=str)
def test_numbers_that_break_careless_sums(kind: str, dtype: torch.dtype) -> None:
    x = drawn(kind, 150, 3).to(dtype)
    for axes in ((0, 1), (0,)):
        found = swept(x, axes, ALL)
        assert found is not None
        assert_close(found, x, axes)
        if kind == "constant":
            assert (found["m2"] == 0).all()


@pytest.mark.parametrize("total", ["sum", "exact", "magnitudes", "squares", "active", "peak"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool], ids=str)
def test_totals(total: str, dtype: torch.dtype) -> None:
    x = drawn("holes", 21, 10)
    x = x.to(dtype) if dtype.is_floating_point else x.mul(40).nan_to_num(0, 0, 0).to(dtype)
    for axes in ((0, 1), (0,)):
        found = swept(x, axes, {"count": "count", total: total}, threshold=0.5)
        assert found is not None
        assert_close(found, x, axes)


def test_big_integers_are_exact() -> None:
    x = torch.tensor([2**62, -(2**62), 2**53 + 1, 7, -(2**63), 2**63 - 1])
    found = swept(x, (0,), {"sum": "exact", "min": "min", "max": "max"})
    assert found is not None
    assert {name: value.item() for name, value in found.items()} == {"sum": 2**53 + 7, "min": -(2**63), "max": 2**63 - 1}


@pytest.mark.parametrize("columns", [ALL, {"count": "count", "sum": "sum"}, {"count": "count", "power": "peak"}], ids=len)
def test_a_state_is_joined_in_the_second_launch(columns: dict[str, str]) -> None:
    parts = [drawn("holes", 50, 4), drawn("offset", 3, 4), drawn("nothing finite", 2, 4), drawn("normal", 100, 4)]
    state: dict[str, Tensor] | None = None
    for part in parts:
        state = swept(part, (0,), columns, state=state)
    assert state is not None
    assert_close({column: state[key] for key, column in columns.items()}, torch.cat(parts), (0,))


def test_results_are_the_same_bits_in_every_run() -> None:
    x = drawn("holes", 20, 5, 30)
    first, second = (swept(x, (0, 2), ALL) for _ in range(2))
    laws.same_bits(first, second)


def test_offsets_beyond_32_bits() -> None:
    storage = torch.empty(2**31 + 5000, dtype=torch.int8)  # only the pages that are touched take memory
    x = storage.as_strided((2, 3), (2**31 + 100, 1))
    x.copy_(torch.tensor([[1, 2, 3], [4, 5, -6]]))
    tiles = lanes.lane_plan(x, (0,))
    assert tiles is not None
    assert tiles.wide
    found = swept(x, (0,), SUMMARY)
    assert found is not None
    assert_close(found, x, (0,))
    everything = swept(x, (0, 1), SUMMARY)
    assert everything is not None
    assert_close(everything, x, (0, 1))


def test_a_step_that_is_not_due_writes_nothing() -> None:
    x, later = drawn("normal", 70, 3), drawn("offset", 70, 3)
    names = ",".join(SUMMARY)
    partials = new_partials(x, (0,), names)
    due = torch.ones((), dtype=torch.int32)
    sweep_into(x, partials, (0,), names, 0.0, due)
    before = partials.clone()
    due.zero_()
    sweep_into(later, partials, (0,), names, 0.0, due)
    assert partials.equal(before)


def test_nothing_is_allocated_beside_the_table_and_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    empty = torch.empty

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        made.append(1)
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", counted)
    x = drawn("normal", 70, 3)
    partials = new_partials(x, (0,), "count,sum")
    assert len(made) == 1
    sweep_into(x, partials, (0,), "count,sum")
    assert len(made) == 1
    join_partials(partials, [3], "count,sum", x.dtype, [])
    assert len(made) == 3


def test_what_the_kernels_do_not_take_is_left_to_plain_operations(on_cpu: None) -> None:
    many = torch.randn(2, 3, 2, 3, 2, 3, 2, 3, 2, 3)[:, ::2, :, ::2, :, ::2, :, ::2, :, ::2]
    assert lanes.lane_plan(many, tuple(range(10))) is None
    assert swept(many, tuple(range(10)), SUMMARY) is None
    assert swept(torch.randn(3, dtype=torch.complex64), (0,), {"sum": "exact"}) is None
    torch.testing.assert_close(Sum().update({}, many)["sum"], many.double().sum())
    torch.testing.assert_close(Mean().compute(Mean().update({}, torch.ones(3) * 1j)), torch.tensor(1j, dtype=torch.complex128))


def test_states_of_other_dtypes_and_shapes_are_joined_as_on_a_cpu(on_cpu: None) -> None:
    low, wide = torch.tensor([1.0, -3.0]).half(), torch.tensor([0.5, 2.0])
    for first, second in ((low, wide), (wide, low)):
        for reducer in (Min(), Max(), Summary()):
            state = reducer.update(reducer.update({}, first), second)
            assert all(value.dtype is torch.float32 for key, value in state.items() if key in ("min", "max"))
    with pytest.raises(laws.reducers.errors.StateMismatchError):
        Mean("b c -> c").update(Mean("b c -> c").update({}, torch.ones(2, 3)), torch.ones(2, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("eps", [0.1, 0.3, 0.5 - 1e-12, 1e-8, float("inf")])
def test_a_threshold_is_compared_as_in_plain_calls(on_cpu: None, eps: float, dtype: torch.dtype) -> None:
    near = torch.tensor(min(eps, 3e4), dtype=dtype).view(torch.int32 if dtype is torch.float32 else torch.int16)
    x = (near + torch.arange(-50, 50, dtype=near.dtype)).view(dtype)
    reducer = Activity("b -> ", eps=eps)
    assert torch.equal(reducer.update({}, x)["active"], reducer.lift(x, (0,))["active"])


def test_big_and_masked_observations_and_deaths(on_cpu: None) -> None:
    x = drawn("holes", 300, 5).relu()
    mask = torch.rand(300, 5, generator=torch.Generator().manual_seed(0)) < 0.5
    for reducer in (Activity(death=True), Summary("b c -> c"), Norm("b c -> c"), Moments("b c -> c", order=3)):
        found, masked = reducer.update({}, x), reducer.update_masked({}, x, mask)
        with pytest.MonkeyPatch.context() as patch:
            patch.delitem(dispatch.SWEEPS, "cpu")
            laws.close(reducer.compute(found), reducer.compute(reducer.update({}, x)), rtol=1e-6, atol=1e-6)
            laws.close(reducer.compute(masked), reducer.compute(reducer.update_masked({}, x, mask)), rtol=1e-6, atol=1e-6)


BY_KERNEL = [case for case in CASES if isinstance(case.reducer, Statistic) and case.reducer.columns]


def observations(case: Case, dtype: torch.dtype) -> list[Tensor]:
    kinds = ("offset", "holes", "nothing finite")
    sizes = (4, 4, 4) if case.same_shape else (4, 3, 4)
    xs = [drawn(kind, size, *case.trailing) for kind, size in zip(kinds, sizes, strict=True)]
    return [x.to(dtype) if dtype.is_floating_point else x.nan_to_num(0, 0, 0).to(dtype) for x in xs]


@pytest.fixture
def taken(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the kernels were asked for, and found; laws are held to their precision."""
    calls: list[Any] = []
    kernel = sweep.swept

    def counted(*args: Any) -> Any:
        calls.append(found := kernel(*args))
        return found

    monkeypatch.setattr(sweep, "swept", counted)
    monkeypatch.setattr(laws, "close", partial(laws.close, rtol=1e-6, atol=1e-6))
    return calls


@pytest.mark.parametrize("case", BY_KERNEL, ids=str)
def test_the_laws_hold_with_the_kernels(case: Case, taken: list[Any]) -> None:
    xs = observations(case, torch.float32)
    laws.matches(case.reducer, xs, case.reference)
    laws.stream_is_merge(case.reducer, xs)
    laws.pure(case.reducer, xs)
    laws.typed(case.reducer, xs)
    assert len(taken) > 10
    assert None not in taken


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.bool], ids=str)
@pytest.mark.parametrize("case", BY_KERNEL, ids=str)
def test_all_laws_hold_with_the_kernels_in_all_dtypes(case: Case, dtype: torch.dtype, taken: list[Any]) -> None:
    xs = observations(case, dtype)
    laws.matches(case.reducer, xs, case.reference)
    laws.identity(case.reducer, xs)
    laws.associative(case.reducer, xs, (1, 2))
    laws.pure(case.reducer, xs)
    laws.typed(case.reducer, xs)
    laws.together(case.reducer, xs)
    assert len(taken) > 10
    assert (None not in taken) == takes_columns(dtype, case.reducer.columns.values())  # sums of int32 may exceed int64


def test_a_kernel_that_cannot_be_compiled_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[Exception] = []
    monkeypatch.setattr("reducers.kernels.failing._failed", failed)

    def broken(*_: Any) -> Any:
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")

    monkeypatch.setitem(dispatch.SWEEPS, "cpu", lambda: SimpleNamespace(swept=broken))
    with pytest.warns(RuntimeWarning, match="failed on .*, which takes longer: RuntimeError: Failed to find C compiler"):
        state = Mean().update({}, torch.ones(3))
    assert Mean().update(state, torch.ones(3))["sum"].item() == 6
    assert len(failed) == 1
