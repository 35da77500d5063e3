"""What a recorded call costs on a GPU, through a hook on a layer, counted with fake CUDA tensors."""

from __future__ import annotations

import importlib.util
import itertools

import pytest
import torch
from launches import Counted, recorded, recorded_steps

from recorders.ring import ring as codecs
from reducers import Activity, Extremes, Mean, Moments, Norm, PerObservation, Reducer, Sparsity, Summary

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton (extra gpu-tests)", allow_module_level=True)

COPIES, MOST = codecs.COPIES.most, codecs.PARTIAL.most
KINDS = (Summary, Moments, lambda pattern: Moments(pattern, order=4), Norm, Extremes, Mean, Sparsity, Activity)
LAYOUTS = {
    "everything": ("... ->", (64, 1024, 768)),
    "last axis": ("... d -> d", (16, 512, 768)),
    "channels": ("b c h w -> c", (32, 64, 28, 28)),
}
SWEEP, EACH, JOIN = "sweep", "join_each", "join"


@pytest.fixture(autouse=True)
def first_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rings are as if no others had been before."""
    monkeypatch.setattr(codecs.PARTIAL, "_turns", itertools.count())


def slots_of(costs: list[Counted]) -> int:
    """How many calls lie between two joins; asserts that all others are one launch, and allocate nothing.

    If slots are in parts, a launch joins the parts of all slots before another joins the slots.
    """
    both = [EACH, JOIN] if any(EACH in cost.names for cost in costs) else [JOIN]
    joins = [number for number, cost in enumerate(costs) if JOIN in cost.names]
    assert costs[0].names == [SWEEP, JOIN]  # the first observation is reduced at once
    # A table is made. What joins it is compiled before anything is in it: for one slot, and for several.
    assert costs[1].names == [JOIN, *(both if EACH in both else ()), SWEEP]
    number = joins[2] - joins[1] + 1
    assert joins[2:] == [*range(number, len(costs), number)]
    for call, cost in enumerate(costs):
        assert (cost.temporaries, cost.waits) == (0, 0)
        if call > 1:
            assert cost.names == ([SWEEP, *both] if call in joins else [SWEEP])
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
    assert sum(cost.launches for cost in steady) <= slots + 2
    assert sum(cost.allocations for cost in steady) <= 9  # the tensors of a state, and a table of what each slot holds


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int32, torch.bool], ids=str)
def test_no_dtype_costs_more(dtype: torch.dtype) -> None:
    assert slots_of(recorded(Summary(), 1 + 2 * MOST, (64, 1024), dtype=dtype)) == MOST


def test_two_leaves_are_two_launches() -> None:
    costs = recorded(Summary(), 2 + MOST, (64, 1024), (32, 1024))
    assert {tuple(cost.names) for cost in costs[2:MOST]} == {(SWEEP, SWEEP)}
    assert costs[MOST].names == [SWEEP, SWEEP, EACH, JOIN, EACH, JOIN]
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


def joins_of(costs: list[Counted]) -> list[int]:
    return [cost.names.count(JOIN) for cost in costs]


@pytest.mark.parametrize("room", [64 * 1024 * 1024, 5 * 8 * 8 * 1024], ids=["as many slots as there may be", "room for 5"])
def test_layers_that_begin_together_are_not_joined_in_the_same_step(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecs.PARTIAL, "most", 8)  # the test takes less time than with 32
    monkeypatch.setattr(codecs.PARTIAL, "enough", room)
    layers, slots = 64, 8 if room > 1 << 20 else 5
    joins = joins_of(recorded_steps(Summary("b c -> c"), layers, (16, 1024), [torch.float32] * (2 + 2 * slots)))
    assert joins[0] == layers  # the first observation is reduced at once
    assert joins[1] <= layers + layers / slots + 2  # tables are made
    assert max(joins[2:]) <= layers / slots + 2


def test_layers_whose_tables_begin_anew_together_are_spread_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another dtype has a ring of its own, with which that from before shares the memory: both are empty then."""
    monkeypatch.setattr(codecs.PARTIAL, "most", 8)
    before = 4
    dtypes = [torch.float32] * before + [torch.float64] + [torch.float32] * 16
    joins = joins_of(recorded_steps(Moments("b c -> c"), 32, (1024, 32), dtypes))
    assert max(joins[2:before] + joins[before + 2 :]) <= 32 / 8 + 3


def test_rings_whose_bits_depend_on_when_they_are_joined_are_not_spread() -> None:
    over_observations = joins_of(recorded_steps(PerObservation(Norm()), 4, (64, 1024), [torch.float32] * (1 + MOST)))
    assert not any(over_observations[2:MOST])
    small = joins_of(recorded_steps(Summary(), 4, (8, 32), [torch.float32] * (1 + COPIES)))
    assert not any(small[1:COPIES])
