"""Launches, temporaries, waits and allocations of an update on a GPU, counted with fake CUDA tensors."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from cases import CASES, Case
from launches import _WithoutGuards, counted
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from reducers import (
    Activity,
    BottomK,
    Digest,
    Extremes,
    Histogram,
    Masked,
    Mean,
    Moments,
    Norm,
    Quantile,
    Reducer,
    Sketch,
    Statistic,
    Summary,
    TopK,
    WeightedMean,
    WeightedMoments,
)
from reducers.core.patterns import arrange
from reducers.kernels import counting, digests, dispatch, sketches
from reducers.kernels.failing import failures

with_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton (extra gpu-tests)")
SIZE = 1 << 16
BY_BINS = [case for case in CASES if isinstance(case.reducer, (Histogram, Quantile))]
IN_ONE_SWEEP = [case for case in CASES if isinstance(case.reducer, Statistic) and case.reducer.columns]


def inputs(case: Case) -> tuple[tuple[int, ...], torch.dtype]:
    return (SIZE, *case.trailing), torch.float32 if case.takes_floats else torch.int64


@with_triton
@pytest.mark.parametrize("case", IN_ONE_SWEEP, ids=str)
def test_an_update_is_two_launches_without_a_temporary(case: Case) -> None:
    shape, dtype = inputs(case)
    found = counted(case.reducer.update, shape, dtype=dtype)
    assert found.names == ["sweep", "join"]
    assert (found.temporaries, found.waits) == (0, 0)
    state = case.reducer.specimen((1,), dtype, "meta")
    assert found.allocations <= len(state) + 1  # what the result holds, and the table of partial statistics


LAYOUTS = {
    "everything": ("... ->", (64, 32, 28, 28)),
    "last axis": ("... d -> d", (64, 32, 768)),
    "channels": ("b c h w -> c", (64, 32, 28, 28)),
    "two axes": ("b c h w -> c w", (64, 32, 28, 28)),
}


@with_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.bool], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_layout_and_no_dtype_takes_more(layout: str, dtype: torch.dtype) -> None:
    pattern, shape = LAYOUTS[layout]
    for reducer in (Summary(pattern), Moments(pattern, order=4), Norm(pattern)):
        found = counted(reducer.update, shape, dtype=dtype)
        assert (found.launches, found.temporaries, found.waits) == (2, 0, 0)


IMAGES = (64, 32, 28, 28)
SELECTIONS = {"elements": IMAGES, "samples": IMAGES[:1], "channels": (1, 32), "rows": (64, 32, 28, 1)}


@with_triton
@pytest.mark.parametrize("selected", SELECTIONS)
@pytest.mark.parametrize("kind", [Mean, Moments, Summary, Norm, Extremes, Activity])
def test_a_masked_update_is_two_launches_without_a_temporary(kind: type[Statistic], selected: str) -> None:
    for pattern, dtype in (("... ->", torch.bfloat16), ("b c ... -> c", torch.float32), ("b c h w -> w c", torch.int32)):
        reducer = kind(pattern)
        found = counted(Masked(reducer).update, IMAGES, SELECTIONS[selected], dtype=dtype, second=torch.bool)
        assert found.names == ["sweep", "join"]
        assert (found.temporaries, found.waits) == (0, 0)
        assert found.allocations <= len(reducer.columns) + 1


@with_triton
@pytest.mark.parametrize("selected", SELECTIONS)
@pytest.mark.parametrize("kind", [WeightedMean, WeightedMoments])
def test_a_weighted_update_is_two_launches_without_a_temporary(kind: type[WeightedMean], selected: str) -> None:
    for pattern, weights in (("... ->", torch.bfloat16), ("b c ... -> c", torch.float64), ("b c h w -> w c", torch.bool)):
        reducer = kind(pattern)
        found = counted(reducer.update, IMAGES, SELECTIONS[selected], second=weights)
        assert found.names == ["weigh", "join_weighted"]
        assert (found.temporaries, found.waits) == (0, 0)
        assert found.allocations <= len(reducer.columns) + 1


@with_triton
@pytest.mark.parametrize("case", BY_BINS, ids=str)
def test_bins_are_counted_in_two_launches_without_a_temporary(case: Case) -> None:
    shape, dtype = inputs(case)
    found = counted(case.reducer.update, shape, dtype=dtype)
    assert found.names in (["start", "count"], ["start", "count_shared"])
    assert (found.temporaries, found.waits) == (0, 0)
    assert found.allocations == (
        1 if isinstance(case.reducer, Histogram) else 5
    )  # the result, its counts, and a table for extremes


@with_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.bool], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_layout_and_no_dtype_takes_more_to_count_bins(layout: str, dtype: torch.dtype) -> None:
    pattern, shape = LAYOUTS[layout]
    few = Quantile(pattern, low=2.0**-4, high=2.0**4)  # of all bins, the result itself is bigger than the observation
    for reducer in (Histogram(pattern, bins=64, low=-4.0, high=4.0), Histogram(pattern, edges=(0.0, 1.0, 5.0)), few):
        found = counted(reducer.update, shape, dtype=dtype)
        assert (found.launches, found.temporaries, found.waits) == (2, 0, 0)


@with_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.bool], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_best_are_chosen_in_two_launches_without_a_temporary(layout: str, dtype: torch.dtype) -> None:
    pattern, shape = LAYOUTS[layout]
    for reducer in (TopK(pattern, k=10), BottomK(pattern, k=1)):
        found = counted(reducer.update, shape, dtype=dtype)
        assert found.names == ["choose", "rank"]
        assert (found.temporaries, found.waits, found.allocations) == (0, 0, 8)  # the entries of the state, twice


@with_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.bool], ids=str)
def test_digests_and_sketches_read_an_observation_once_without_a_temporary(dtype: torch.dtype) -> None:
    found = counted(Digest().update, (SIZE, 5), dtype=dtype)
    assert found.names == ["hash_parts", "finish", "absorb"]
    assert (found.temporaries, found.waits, found.allocations) == (0, 0, 5)
    found = counted(Sketch().update, (SIZE, 5), dtype=dtype)
    assert found.names[:3] == ["make_signs", "sketch_parts", "join_parts"]
    assert (found.temporaries, found.waits) == (0, 0)
    assert len(found.names[3:]) <= 14  # of single numbers


@with_triton
@pytest.mark.parametrize("case", IN_ONE_SWEEP, ids=str)
def test_accumulating_in_place_is_two_launches_and_allocates_nothing(case: Case) -> None:
    """What a graph on a GPU calls for each observation: the memory is there after the first."""
    from reducers.kernels.triton import accumulate

    shape, dtype = inputs(case)
    reducer: Any = case.reducer
    columns = ",".join(reducer.columns.values())
    memory: dict[str, Any] = {}

    def update(state: dict[str, torch.Tensor], x: torch.Tensor) -> dict[str, torch.Tensor]:
        arranged, axes = arrange(x, reducer.pattern)
        if not memory:
            memory["handle"] = torch.zeros(16, dtype=torch.int64, device="cuda")  # addresses are no part of what is counted
        accumulate.accumulate(arranged, axes, columns, reducer.threshold, memory["handle"], 0)
        return state

    accumulate._scratch.clear()
    found = counted(update, shape, dtype=dtype)
    accumulate._scratch.clear()  # of fake tensors
    assert found.names == ["sweep", "join_in_place"]
    assert (found.temporaries, found.waits, found.allocations) == (0, 0, 0)


@with_triton
def test_a_fake_tensor_is_left_to_plain_operations() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True), _WithoutGuards():
        x = torch.empty(SIZE, 3, device="cuda")
        for reducer in (Summary(), Quantile(), TopK(k=3), Masked(Mean()), WeightedMean(), Sketch()):
            state = reducer.update({}, x, *[x[:, :1] > 0] * (reducer in (Masked(Mean()), WeightedMean())))
            assert all(isinstance(value, FakeTensor) for value in state.values())
    assert failures() == []


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton is missing."""
    monkeypatch.setattr(dispatch, "SWEEPS", {})
    monkeypatch.setattr(dispatch, "WEIGHTED", {})
    monkeypatch.setattr(counting, "BINS", {})
    monkeypatch.setattr(counting, "BEST", {})
    monkeypatch.setattr(digests, "DIGESTS", {})
    monkeypatch.setattr(sketches, "SKETCHES", {})


@pytest.mark.parametrize(
    "reducer", [Masked(Summary("b c -> c")), Masked(Norm()), WeightedMoments(), WeightedMean("b c -> c")], ids=str
)
def test_neither_masks_nor_weights_wait_for_the_device_without_triton(reducer: Reducer, plain: None) -> None:
    found = counted(reducer.update, (SIZE, 3), (SIZE,), second=torch.bool)
    assert found.waits == 0
    assert found.launches > 10


@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_update_waits_for_the_device(case: Case, plain: None) -> None:
    shape, dtype = inputs(case)
    assert counted(case.reducer.update, shape, dtype=dtype).waits == 0


# What is not finite is counted by one subtraction, and one addition to the state.
@pytest.mark.parametrize(("reducer", "launches"), [(Summary(), 45), (Moments(), 28), (Norm(), 14), (Quantile(), 32)], ids=str)
def test_without_triton_an_update_takes_no_more_than_before(reducer: Reducer, launches: int, plain: None) -> None:
    assert counted(reducer.update, (SIZE, 3)).launches <= launches


def test_what_looks_at_numbers_is_counted_or_raises() -> None:
    def copied(state: dict[str, torch.Tensor], x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"sum": x.sum().cpu()}

    assert counted(copied, (8,)).waits == 1

    def looked(state: dict[str, torch.Tensor], x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"sum": x if x.sum().item() > 0 else -x}

    with pytest.raises(torch._subclasses.fake_tensor.DataDependentOutputException):
        counted(looked, (8,))


def test_a_temporary_is_counted_as_one() -> None:
    found = counted(lambda state, x: {"sum": (x * x).sum()}, (64,))
    assert (found.launches, found.temporaries, found.allocations) == (2, 1, 2)
    assert counted(Norm(p=3.5).update, (SIZE,)).launches > 10
