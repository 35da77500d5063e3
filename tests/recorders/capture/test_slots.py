"""Big observations that wait in slots: here tables of copies stand for the kernels, which test_triton_slots.py has."""

from __future__ import annotations

import copy
import gc
import pickle
from types import SimpleNamespace
from typing import Any

import laws
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_interrupts import Calls, sweep
from torch import Tensor, nn

from recorders import ForwardMonitor, Monitor, Recorder, load
from recorders.ring import ring as codecs
from recorders.ring.ring import Copies, Ring
from reducers import EMA, Mean, Moments, Reducer, State, Statistic, Sum, Summary
from reducers.kernels import waiting

MOST = codecs.PARTIAL.most
SIZE = Copies.largest // 4 + 3
BY_COLUMNS: dict[tuple[str, ...], Statistic] = {
    tuple(kind.columns.values()): kind for kind in (Mean("b c -> c"), Moments("b c -> c"), Summary("b c -> c"), Sum("b c -> c"))
}


class Copies:
    """A table that holds copies of the observations.

    Attributes:
        calls: how often one was written and how often slots were joined, of all tables.
    """

    calls: dict[str, int]

    def __init__(self, x: Tensor, axes: tuple[int, ...], columns: Any, threshold: float) -> None:
        self.like, self.axes, self.columns = torch.empty_like(x, device="meta"), axes, dict(columns)
        self.size, self.form = x.nbytes, (x.shape, x.stride())
        self.reducer = BY_COLUMNS[tuple(self.columns.values())]

    def new_table(self, slots: int, device: torch.device) -> Tensor:
        return torch.full((slots, *self.like.shape), torch.nan, dtype=self.like.dtype)

    def write(self, table: Tensor, x: Tensor, slot: int) -> bool:
        self.calls["written"] += 1
        table[slot].copy_(x.reshape(self.like.shape))
        return True

    def join(self, table: Tensor, state: State, first: int, last: int) -> State:
        self.calls["joined"] += 1
        for slot in range(first, last):
            state = self.reducer.merge(state, self.reducer.observe(table[slot], self.axes))
        return dict(state)


@pytest.fixture(autouse=True)
def calls(without_loops: None, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """CPU tensors wait in slots, and rings have all of them from the first time on; `test_rings.py` is of those that have not."""
    Copies.calls = {"written": 0, "joined": 0}
    failed: list[Exception] = []
    monkeypatch.setattr("reducers.kernels.failing._failed", failed)
    monkeypatch.setitem(waiting.SLOTS, "cpu", lambda: SimpleNamespace(slots_for=Copies))
    monkeypatch.delitem(codecs.PARTIAL_ON, "cpu")
    monkeypatch.setattr(codecs.Room, "first", lambda self, rows: rows)
    return Copies.calls


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape or (SIZE, 1), generator=torch.Generator().manual_seed(seed)) + 100


def slots(monitor: Monitor) -> list[tuple[int, int]]:
    """How many slots are used, and how many of them are in the states."""
    stored = monitor.buffer.stored
    rings = stored.rings().items()
    return [(ring.count, stored.reduced.get(key, 0)) for key, ring in rings if isinstance(ring.codec, codecs.PartialStates)]


def one_by_one(reducer: Reducer, xs: list[Tensor]) -> State:
    state: State = {}
    for x in xs:
        state = reducer.update(state, x)
    return state


def test_the_first_is_reduced_at_once_the_next_wait_and_are_joined_in_one_go(calls: dict[str, int]) -> None:
    monitor = ForwardMonitor(Moments("b c -> c"), layer := nn.Identity())
    xs = [drawn(seed) for seed in range(1 + MOST)]
    for number, x in enumerate(xs[:-1]):
        layer(x)
        assert slots(monitor) == [(number, 0)]
    assert calls == {"written": MOST - 1, "joined": 0}
    layer(xs[-1])
    assert slots(monitor) == [(0, 0)]
    assert calls == {"written": MOST, "joined": 1}
    laws.same_bits(monitor.state, one_by_one(monitor.reducer, xs))
    assert monitor.samples == 1 + MOST


ACTS = ("call", "call", "call", "peek", "state", "snapshot", "samples", "other shape", "merge")


@settings(max_examples=25)
@given(st.lists(st.sampled_from(ACTS), max_size=14))
def test_no_bit_depends_on_who_looks_when(what: list[str]) -> None:
    monitor, plain = (ForwardMonitor(Moments("b c -> c")) for _ in range(2))
    layer, same = nn.Identity(), nn.Identity()
    monitor.register(layer)
    plain.register(same)
    other = ForwardMonitor(Moments("b c -> c"), elsewhere := nn.Identity())
    elsewhere(drawn(99))
    for seed, act in enumerate(what):
        if act == "peek":
            monitor.peek()
        elif act == "state":
            assert monitor.state.keys() == plain.state.keys()
        elif act == "snapshot":
            monitor.snapshot()
        elif act == "samples":
            assert monitor.samples == plain.samples
        elif act == "merge":
            monitor.merge(other)
            plain.merge(other)
        else:
            x = drawn(seed, SIZE + (act == "other shape"), 1)
            layer(x)
            with pytest.MonkeyPatch.context() as patch:
                patch.delitem(waiting.SLOTS, "cpu")
                same(x)
    assert monitor.samples == plain.samples
    laws.same_bits(monitor.state, plain.state)


def test_reading_leaves_the_slots_in_place_and_counts_what_the_states_include(calls: dict[str, int]) -> None:
    monitor = ForwardMonitor(Summary("b c -> c"), layer := nn.Identity())
    for seed in range(4):
        layer(drawn(seed))
    assert monitor.buffer.read().states
    assert slots(monitor) == [(3, 0)]
    assert monitor.states
    assert slots(monitor) == [(3, 3)]
    assert monitor.samples == 4
    layer(drawn(4))
    assert slots(monitor) == [(4, 3)]
    laws.same_bits(monitor.state, one_by_one(monitor.reducer, [drawn(seed) for seed in range(5)]))
    assert calls["joined"] == 3


@pytest.mark.parametrize("change", ["shape", "strides", "dtype", "negative"])
def test_an_observation_of_another_form_joins_those_before(change: str) -> None:
    monitor = ForwardMonitor(Moments("b c -> c"), layer := nn.Identity())
    xs = [drawn(seed, SIZE, 2) for seed in range(3)]
    x = {
        "shape": drawn(3, SIZE + 1, 2),
        "strides": drawn(3, 2, SIZE).T,
        "dtype": drawn(3, SIZE, 2).double(),
        "negative": torch._neg_view(drawn(3, SIZE, 2)),
    }[change]
    for one in (*xs, x):
        layer(one)
    assert sum(count for count, _ in slots(monitor)) == 0
    assert monitor.samples == 4
    laws.same_bits(monitor.state, one_by_one(monitor.reducer, [*xs, x]))
    layer(x)
    assert slots(monitor) == {"negative": [], "dtype": [(0, 0), (1, 0)]}.get(change, [(1, 0)])


def test_several_leaves_wait_together(calls: dict[str, int]) -> None:
    monitor = ForwardMonitor(Moments("b c -> c"), layer := nn.Identity())
    pairs = [(drawn(2 * seed, SIZE, 2), drawn(2 * seed + 1, 3, 5)) for seed in range(6)]
    for number, pair in enumerate(pairs):
        layer(pair)
        assert slots(monitor) == [(number, 0)]
    assert calls == {"written": 10, "joined": 0}
    for place in range(2):
        laws.same_bits(monitor.states[str(place)], one_by_one(monitor.reducer, [pair[place] for pair in pairs]))
    assert calls["joined"] == 2
    assert monitor.samples == 6


def test_clear_merge_pickle_and_resume_in_the_middle(tmp_path: Any) -> None:
    layer = nn.Identity()
    recorder = Recorder(ForwardMonitor(Moments("b c -> c"))).modules(nn.Sequential(layer), leaves=True)
    xs = [drawn(seed) for seed in range(8)]
    for x in xs[:4]:
        layer(x)
    twice = pickle.loads(pickle.dumps(recorder))
    assert twice["0"].samples == 4
    laws.same_bits(twice["0"].state, one_by_one(Moments("b c -> c"), xs[:4]))
    other = copy.deepcopy(recorder)
    other.merge(recorder)
    assert other["0"].samples == 8
    assert recorder.save(f"{tmp_path}/run")
    assert load(f"{tmp_path}/run")["0"].samples == 4
    held = recorder.state_dict()
    for x in xs[4:]:
        layer(x)
    wanted = one_by_one(Moments("b c -> c"), xs)
    laws.same_bits(recorder["0"].state, wanted)
    for again in ("file", "state dict"):
        if again == "file":
            recorder.resume(f"{tmp_path}/run")
        else:
            recorder.load_state_dict(held)
        assert recorder["0"].samples == 4
        for x in xs[4:]:
            layer(x)
        assert recorder["0"].samples == 8
        laws.same_bits(recorder["0"].state, wanted)
    layer(xs[0])
    recorder.reset()
    assert (recorder["0"].samples, recorder["0"].peek(), slots(recorder["0"])) == (0, None, [])


def test_saving_midway_leaves_small_observations_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BY_COLUMNS, tuple(Moments().columns.values()), Moments())
    monitor = ForwardMonitor(Moments(), layer := nn.Identity())
    twin = ForwardMonitor(Moments(), same := nn.Identity())
    for seed in range(40):
        for x in ((drawn(seed, 7), drawn(seed, 3)), drawn(seed, SIZE)):  # both kinds wait, each with its paths
            layer(x)
            same(x)
            monitor.snapshot()
    assert len(monitor.buffer.stored.pending) == 2
    laws.same_bits(monitor.state, twin.state)


@pytest.mark.parametrize("where", ["write", "new_table"])
def test_a_launch_that_fails_costs_one_warning_and_no_observation(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC")

    monitor = ForwardMonitor(Moments("b c -> c"), layer := nn.Identity())
    xs = [drawn(seed) for seed in range(6)]
    healthy = 3 if where == "write" else 1
    for x in xs[:healthy]:
        layer(x)
    monkeypatch.setattr(Copies, where, fails)
    with pytest.warns(RuntimeWarning, match="failed on .*, which takes longer: RuntimeError: Failed to find C compiler") as seen:
        for x in xs[healthy:]:
            layer(x)
    assert len(seen) == 1
    assert (monitor.samples, monitor.last_error, slots(monitor)) == (6, None, [])
    laws.same_bits(monitor.state, one_by_one(monitor.reducer, xs))


def test_no_memory_for_a_table_costs_no_observation(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(Copies, "new_table", fails)
    monitor = ForwardMonitor(Moments("b c -> c"), layer := nn.Identity())
    xs = [drawn(seed) for seed in range(4)]
    for x in xs:
        layer(x)
    assert monitor.samples == 4
    laws.same_bits(monitor.state, one_by_one(monitor.reducer, xs))


@pytest.mark.parametrize(
    "kind",
    [EMA("b c -> c", alpha=0.1), Mean("b c -> (b c)"), Mean("b c -> c").premap(torch.abs)],
    ids=["EMA", "parentheses", "premap"],
)
def test_reducers_that_no_kernel_takes_do_not_wait(kind: Reducer, calls: dict[str, int]) -> None:
    monitor = ForwardMonitor(kind, layer := nn.Identity())
    for seed in range(3):
        layer(drawn(seed))
    assert (calls["written"], slots(monitor)) == (0, [])
    assert monitor.samples == 3


def test_memory_is_bounded_for_one_monitor_and_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()
    together = 40 * 3 * 4 * SIZE
    monkeypatch.setattr(codecs.PARTIAL, "together", together)
    net = nn.Sequential(*[nn.Identity() for _ in range(40)])
    recorder = Recorder(ForwardMonitor(Mean("b c -> c"))).children(net)
    for seed in range(2 * MOST):  # so often that each table was full once, and is of the size that it keeps
        net(drawn(seed))
    places = [place for monitor in recorder.values() for place in monitor.buffer.stored.pending.values()]
    tables = [table.nbytes for ring in places if isinstance(ring, Ring) and ring._memory is not None for table in ring._memory]
    assert len(tables) > 20
    assert max(tables) <= codecs.PARTIAL.enough
    assert sum(tables) <= 2 * together
    assert set(recorder.samples.values()) == {2 * MOST}
    del recorder, net, places
    gc.collect()
    assert not [ring for ring in codecs.PARTIAL.rings if ring.codec.size == 4 * SIZE]


@pytest.mark.parametrize("reads", [False, True], ids=["exception", "reader"])
@pytest.mark.parametrize("warm", [0, 2, 4])
def test_an_exception_or_a_reader_at_every_line(warm: int, reads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BY_COLUMNS, tuple(Moments().columns.values()), Moments())
    monkeypatch.setattr(codecs.PARTIAL, "most", 4)
    sweep(lambda: Calls(200, 300), warm, False, reads)
