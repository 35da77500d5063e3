"""What a recorded call costs on a GPU, through a hook on a layer, counted with fake CUDA tensors."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from launches import Counted, recorded

from recorders.ring import ring as codecs
from reducers import Activity, Extremes, Mean, Moments, Norm, Reducer, Sparsity, Summary

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton (extra gpu-tests)", allow_module_level=True)

COPIES, MOST = codecs.COPIES.most, codecs.PARTIAL.most
KINDS = (Summary, Moments, lambda pattern: Moments(pattern, order=4), Norm, Extremes, Mean, Sparsity, Activity)
LAYOUTS = {
    "everything": ("... ->", (64, 1024, 768)),
    "last axis": ("... d -> d", (16, 512, 768)),
    "channels": ("b c h w -> c", (32, 64, 28, 28)),
}
SWEEP, JOIN = "reducers.sweep.default", "reducers.join.default"


def slots_of(costs: list[Counted]) -> int:
    """How many calls lie between two joins; asserts that all others are one launch, and allocate nothing."""
    joins = [number for number, cost in enumerate(costs) if JOIN in cost.names]
    assert costs[0].names == [SWEEP, JOIN]  # the first observation is reduced at once
    assert costs[1].names == [JOIN, SWEEP]  # a table is made; what joins it is compiled before anything is in it
    number = joins[2] - joins[1] + 1
    assert joins[2:] == [*range(number, len(costs), number)]
    for call, cost in enumerate(costs):
        assert (cost.temporaries, cost.waits) == (0, 0)
        if call > 1:
            assert cost.names == ([SWEEP, JOIN] if call in joins else [SWEEP])
            assert call in joins or cost.allocations == 0
    return number


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: str(kind("... ->")))
def test_a_recorded_call_is_one_launch_and_no_allocation_between_joins(kind: type[Reducer], layout: str) -> None:
    pattern, shape = LAYOUTS[layout]
    costs = recorded(kind(pattern), 1 + 2 * MOST, shape)  # type: ignore[call-arg]
    slots = slots_of(costs)
    assert slots == MOST if layout == "everything" else 4 <= slots <= MOST
    steady = costs[1 + slots : 1 + 2 * slots]
    assert sum(cost.launches for cost in steady) <= slots + 1
    assert sum(cost.allocations for cost in steady) <= 8  # the tensors of a state


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int32, torch.bool], ids=str)
def test_no_dtype_costs_more(dtype: torch.dtype) -> None:
    assert slots_of(recorded(Summary(), 1 + 2 * MOST, (64, 1024), dtype=dtype)) == MOST


def test_two_leaves_are_two_launches() -> None:
    costs = recorded(Summary(), 2 + MOST, (64, 1024), (32, 1024))
    assert {tuple(cost.names) for cost in costs[2:MOST]} == {(SWEEP, SWEEP)}
    assert costs[MOST].names == [SWEEP, SWEEP, JOIN, JOIN]
    assert {(cost.allocations, cost.temporaries, cost.waits) for cost in costs[2:MOST]} == {(0, 0, 0)}


def test_without_room_for_two_slots_a_call_is_two_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecs.PARTIAL, "enough", 1 << 10)
    assert {tuple(cost.names) for cost in recorded(Summary(), 5, (64, 1024, 768))} == {(SWEEP, JOIN)}


def test_small_observations_are_copied_and_reduced_in_two_launches() -> None:
    costs = recorded(Summary("b c -> c"), 2 * COPIES, (8, 32))
    assert costs[0].names == [SWEEP, JOIN]
    for call, cost in enumerate(costs[2:], 2):
        full = call % COPIES == 0
        assert cost.names == ["aten.copy_.default"] + full * [SWEEP, JOIN]
        assert full or (cost.allocations, cost.temporaries, cost.waits) == (0, 0, 0)
