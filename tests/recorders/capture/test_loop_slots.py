"""Observations on a CPU that wait in slots, as the loop in C++ writes them: the bits of one update after another."""

from __future__ import annotations

import itertools
import pickle
from typing import Any

import laws
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from recorders import ForwardMonitor, Monitor, Recorder
from recorders.ring import ring as codecs
from recorders.ring.ring import Copies
from reducers import Activity, Extremes, Mean, Min, Moments, Norm, Quantile, Sparsity, State, Statistic, Sum, Summary
from reducers.kernels.cpp import library
from reducers.kernels.cpp.loop_slots import LoopSlots
from reducers.kernels.merging import stack

pytestmark = pytest.mark.skipif(not library.in_order(), reason="no C++ compiler")

MOST = codecs.PARTIAL_ON["cpu"].most
KINDS: list[Statistic] = [
    *(Summary("b c w -> c"), Moments("b c w -> c", order=4), Moments(), Mean("b c w -> w"), Sum("b c w -> c")),
    *(Norm("b c w -> c"), Norm(p=1), Norm("b c w -> c", p=float("inf")), Min("b c w -> c"), Extremes("b c w -> b c")),
    *(Sparsity(eps=0.5), Activity("b c w -> c", eps=0.5)),
]
DATA = ("normal", "mean 1e4", "not finite", "nothing finite")


def drawn(seed: int, *shape: int) -> Tensor:
    """Numbers of one kind after another; too many to wait as they are, unless a shape is given."""
    x = torch.randn(shape or (7, 3, Copies.largest // 64), generator=torch.Generator().manual_seed(seed))
    kind = DATA[seed % len(DATA)]
    if kind == "not finite":
        x.view(-1)[::7], x.view(-1)[::11], x.view(-1)[::5] = torch.nan, -torch.inf, 0
    return torch.full_like(x, torch.nan) if kind == "nothing finite" else x + 1e4 if kind == "mean 1e4" else x


def updated(reducer: Statistic, xs: list[Tensor]) -> State:
    state: State = {}
    for x in xs:
        state = reducer.update(state, x)
    return state


def waiting(monitor: Monitor) -> list[int]:
    return [ring.count for ring in monitor.buffer.stored.rings().values() if isinstance(ring.codec, codecs.PartialStates)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("reducer", KINDS, ids=str)
def test_slots_joined_in_any_groups_are_one_update_after_another(reducer: Statistic, dtype: torch.dtype) -> None:
    xs = [drawn(seed, 6, 5, 40).to(dtype) for seed in range(6)]
    slots = reducer.slots_for(xs[0])
    assert isinstance(slots, LoopSlots)
    table = slots.new_table(len(xs) + 1, xs[0].device)
    assert table[0].nbytes == slots.size
    table.fill_(-7)
    for slot, x in enumerate(xs, start=1):
        assert slots.write(table, x, slot)
        assert (table[0] == -7).all()
        assert (table[slot + 1 :] == -7).all()
    for borders in ((1, 7), (1, 2, 7), (1, 4, 5, 7)):
        state: State = {}
        for first, last in itertools.pairwise(borders):
            before = {key: value.clone() for key, value in state.items()}
            after = reducer.update_slots(state, slots, table, first, last)
            laws.same_bits(state, before)
            state = after
        laws.same_bits(state, updated(reducer, xs))
    if reducer.columns:
        laws.same_bits(reducer.lifted_slots(slots, table, 1, 7), stack([reducer.update({}, x) for x in xs]))


@pytest.mark.parametrize("reducer", KINDS, ids=str)
def test_observations_that_wait_have_the_bits_of_updates(reducer: Statistic) -> None:
    layer = nn.Identity()
    monitor, looked = (ForwardMonitor(reducer, layer) for _ in range(2))
    xs = [drawn(seed) for seed in range(2 * MOST)]
    for number, x in enumerate(xs):
        layer(x)
        if number % 5 == 2:
            looked.peek()
        if number % 7 == 3:
            looked.snapshot()
    assert len(waiting(monitor)) == len(waiting(looked)) == 1
    for one in (monitor, looked):
        assert one.samples == len(xs)
        laws.same_bits(one.state, updated(reducer, xs))


ACTS = ("observe", "observe", "other shape", "turned", "look", "snapshot", "reset", "pickle")


@pytest.mark.filterwarnings("ignore:.*elements not finite")  # saving says so
@settings(max_examples=30)
@given(acts=st.lists(st.sampled_from(ACTS), min_size=1, max_size=25))
def test_no_bit_depends_on_what_is_done_in_between(acts: list[str]) -> None:
    recorder = Recorder(ForwardMonitor(Summary("b c w -> c"))).modules(nn.Sequential(layer := nn.Identity()), leaves=True)
    xs: list[Tensor] = []
    for seed, act in enumerate(acts):
        if act == "look":
            recorder.compute()
        elif act == "snapshot":
            recorder.snapshot()
        elif act == "reset":
            recorder.reset()
            xs.clear()
        elif act == "pickle":
            laws.same_bits(pickle.loads(pickle.dumps(recorder))["0"].state, updated(Summary("b c w -> c"), xs))
        else:
            x = drawn(seed, *((9, 3, 300) if act == "other shape" else ()))
            xs.append(x.transpose(0, 2).contiguous().transpose(0, 2) if act == "turned" else x)
            layer(xs[-1])
    assert recorder["0"].samples == len(xs)
    laws.same_bits(recorder["0"].state, updated(Summary("b c w -> c"), xs))


def test_merge_and_state_dict_in_the_middle() -> None:
    recorder = Recorder(ForwardMonitor(Summary("b c w -> c"))).modules(nn.Sequential(layer := nn.Identity()), leaves=True)
    xs = [drawn(seed) for seed in range(6)]
    for x in xs[:3]:
        layer(x)
    held, again = recorder.state_dict(), pickle.loads(pickle.dumps(recorder))
    again.merge(recorder)
    assert again["0"].samples == 6
    for _ in range(2):
        for x in xs[3:]:
            layer(x)
        assert waiting(recorder["0"])
        laws.same_bits(recorder["0"].state, updated(Summary("b c w -> c"), xs))
        recorder.load_state_dict(held)


def test_several_leaves_wait_together() -> None:
    monitor = ForwardMonitor(Summary(), layer := nn.Identity())
    pairs = [(drawn(seed), drawn(seed + 1, 90, 90).bfloat16()) for seed in range(5)]
    for pair in pairs:
        layer(pair)
    assert waiting(monitor) == [4]
    for place in range(2):
        laws.same_bits(monitor.states[str(place)], updated(Summary(), [pair[place] for pair in pairs]))


class Allocations(TorchDispatchMode):
    """How many operations make tensors."""

    number = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += not operation.is_view and operation is not torch.ops.aten.detach.default
        return operation(*args, **(kwargs or {}))


@pytest.fixture
def allocations(monkeypatch: pytest.MonkeyPatch) -> Allocations:
    """Monitors do not switch off this mode."""
    monkeypatch.setattr("recorders._torch._user_dispatch_modes", lambda: 0)
    monkeypatch.setattr("recorders.capture.context.outside_modes", lambda call, *args: call(*args))
    monkeypatch.setattr("recorders.monitors.record.is_plain_moment", lambda _: True)
    return Allocations()


def test_an_observation_that_waits_makes_no_tensor(allocations: Allocations) -> None:
    monitor = ForwardMonitor(Summary(), layer := nn.Identity())
    xs = [drawn(seed) for seed in range(MOST + 1)]
    layer(xs[0])
    layer(xs[1])  # makes the table
    with allocations:
        for x in xs[2:-1]:
            layer(x)
        assert (waiting(monitor), allocations.number) == ([MOST - 1], 0)
        layer(xs[-1])
    assert (waiting(monitor), allocations.number) == ([0], len(monitor.state))  # a new one, joined by one call


def test_small_observations_wait_in_slots_if_there_is_no_room_for_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecs.COPIES, "together", 1)
    monitor = ForwardMonitor(Moments(), layer := nn.Identity())
    xs = [drawn(seed, 8, 64) for seed in range(5)]
    for x in xs:
        layer(x)
    assert waiting(monitor) == [4]
    laws.same_bits(monitor.state, updated(Moments(), xs))


def test_memory_is_bounded_for_one_monitor_and_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    room = codecs.PARTIAL_ON["cpu"]
    enough, together = room.enough, room.together
    wide = ForwardMonitor(Summary("a b -> b"), layer := nn.Identity())
    for seed in range(3):
        layer(drawn(seed, 9, 1000))
    (pending,) = wide.buffer.stored.pending.values()
    assert 1 < pending.capacity == enough // (8 * 8 * 1000)
    monkeypatch.setattr(room, "together", 1)
    crowded = ForwardMonitor(Summary(), layer := nn.Identity())
    xs = [drawn(seed) for seed in range(3)]
    for x in xs:
        layer(x)
    assert waiting(crowded) == []
    assert enough < together
    laws.same_bits(crowded.state, updated(Summary(), xs))


def test_what_the_loop_does_not_take_does_not_wait() -> None:
    x = drawn(0)
    assert Summary().slots_for(x) is not None
    assert Summary().slots_for(x.double()) is None
    assert Summary().slots_for(x[..., ::9]) is None
    assert Summary("b c w -> w").slots_for(x[..., :5]) is None
    monitor = ForwardMonitor(Quantile(), layer := nn.Identity())
    layer(x)
    layer(x)
    assert waiting(monitor) == []


def test_a_loop_that_lacks_memory_costs_no_observation(monkeypatch: pytest.MonkeyPatch) -> None:
    monitor = ForwardMonitor(Moments(), layer := nn.Identity())
    xs = [drawn(seed) for seed in range(4)]
    layer(xs[0])
    layer(xs[1])
    monkeypatch.setattr("reducers.kernels.cpp.loop_slots.in_threads", lambda *_: 1)
    layer(xs[2])
    layer(xs[3])
    assert (monitor.samples, monitor.last_error) == (4, None)
    laws.same_bits(monitor.state, updated(Moments(), xs))
