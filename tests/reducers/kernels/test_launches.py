"""Launches, temporaries, waits and allocations of an update on a GPU, counted with fake CUDA tensors."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from cases import CASES, Case
from launches import counted

from reducers import Moments, Norm, Quantile, Reducer, Statistic, Summary
from reducers.core.patterns import arrange
from reducers.kernels import dispatch

with_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton (extra gpu-tests)")
SIZE = 1 << 16
IN_ONE_SWEEP = [case for case in CASES if isinstance(case.reducer, Statistic) and case.reducer.columns]


def inputs(case: Case) -> tuple[tuple[int, ...], torch.dtype]:
    return (SIZE, *case.trailing), torch.float32 if case.takes_floats else torch.int64


@with_triton
@pytest.mark.parametrize("case", IN_ONE_SWEEP, ids=str)
def test_an_update_is_two_launches_without_a_temporary(case: Case) -> None:
    shape, dtype = inputs(case)
    found = counted(case.reducer.update, shape, dtype=dtype)
    assert found.names == ["reducers.sweep.default", "reducers.join.default"]
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


@with_triton
@pytest.mark.parametrize("case", IN_ONE_SWEEP, ids=str)
def test_accumulating_in_place_is_two_launches_and_allocates_nothing(case: Case) -> None:
    """What a graph on a GPU calls for each observation: the memory is there after the first."""
    from reducers.kernels.triton import accumulating

    shape, dtype = inputs(case)
    reducer: Any = case.reducer
    columns = ",".join(reducer.columns.values())
    memory: dict[str, Any] = {}

    def update(state: dict[str, torch.Tensor], x: torch.Tensor) -> dict[str, torch.Tensor]:
        arranged, axes = arrange(x, reducer.pattern)
        if not memory:
            memory["handle"] = torch.zeros(16, dtype=torch.int64, device="cuda")  # addresses are no part of what is counted
        accumulating.accumulate(arranged, axes, columns, reducer.threshold, memory["handle"], 0)
        return state

    accumulating._scratch.clear()
    found = counted(update, shape, dtype=dtype)
    accumulating._scratch.clear()  # of fake tensors
    assert found.names == ["reducers.sweep.default", "reducers.join_in_place.default"]
    assert (found.temporaries, found.waits, found.allocations) == (0, 0, 0)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_update_waits_for_the_device(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "SWEEPS", {})
    shape, dtype = inputs(case)
    assert counted(case.reducer.update, shape, dtype=dtype).waits == 0


@pytest.mark.parametrize(("reducer", "launches"), [(Summary(), 45), (Moments(), 26), (Norm(), 12)], ids=str)
def test_without_triton_an_update_takes_no_more_than_before(
    reducer: Reducer, launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "SWEEPS", {})
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
    assert counted(Quantile().update, (SIZE,)).launches > 10
