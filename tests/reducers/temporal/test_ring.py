"""Rings of big slots: a push writes one slot that no state shows yet, so its cost does not grow, and no state ever changes."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Callable
from functools import reduce

import laws
import pytest
import torch
from cases import CASES, Case
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from recorders import Cell, ForwardMonitor
from reducers import EMA, EveryNth, History, Last, Mean, Product, Reducer, State, Window
from reducers.temporal import ring

RINGS = [case for case in CASES if isinstance(case.reducer, (EveryNth, History, Window))]
RECORD = History(Last(), duration=4.0)


@pytest.fixture(autouse=True)
def small_slots_are_big(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "_BIG", 0)


def steps(count: int, size: int = 2, start: int = 0) -> list[Tensor]:
    return [torch.full((size,), float(start + step)) for step in range(count)]


@pytest.mark.parametrize("case", RINGS, ids=str)
def test_laws_of_rings_in_buffers(case: Case) -> None:
    generator = torch.Generator().manual_seed(0)
    xs = [torch.randn(4, *case.trailing, generator=generator) for _ in range(11)]
    laws.pure(case.reducer, xs)
    laws.identity(case.reducer, xs)
    laws.associative(case.reducer, xs, (3, 8))
    laws.stream_is_merge(case.reducer, xs)
    laws.resumable(case.reducer, xs, 5)
    laws.never_looks(case.reducer, xs)
    laws.matches(case.reducer, xs, case.reference)


def shown(state: State) -> list[float]:
    return RECORD.dump(state)[:, 0].tolist()


def test_states_that_somebody_holds_never_change() -> None:
    states = [laws.run(RECORD, steps(count)) for count in range(1, 20)]
    state: State = {}
    held = []
    for x in steps(30):
        state = RECORD.update(state, x)
        held.append(state)
        fork = RECORD.update(state, torch.tensor([-1.0, -1.0]))  # writes the free slot that the next update would have had
        assert shown(RECORD.update(fork, torch.tensor([-2.0, -2.0])))[:2] == [-2, -1]
    for count, early in enumerate(held, 1):
        assert shown(early) == [float(step) for step in range(count - 1, max(count - 5, -1), -1)]
    for built, early in zip(states, held, strict=False):
        laws.same_bits(built, early)


class Copied(TorchDispatchMode):
    """Counts the elements that are copied."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.cat, torch.ops.aten.clone, torch.ops.aten.copy_, torch.ops.aten.stack):
            self.elements += result.numel()
        return result


@pytest.mark.parametrize("make", [lambda n: History(Last(), duration=n), lambda n: Window(Mean("a -> a"), n)])
def test_what_a_push_copies_does_not_grow(make: Callable[[int], Reducer]) -> None:
    each = []
    for slots in (8, 64, 512):
        state = laws.run(make(slots), steps(slots + 1, 50))
        with Copied() as copied:
            laws.run(make(slots), steps(2 * slots, 50), state)
        each.append(copied.elements / 2 / slots)
    assert 50 < max(each) < 1.1 * min(each)


def test_threads_that_push_onto_one_state() -> None:
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        start = laws.run(RECORD, steps(6))
        made: dict[int, list[State]] = {}

        def push(number: int) -> None:
            made[number] = [RECORD.update(start, torch.full((2,), float(number))) for _ in range(200)]

        threads = [threading.Thread(target=push, args=(number,)) for number in range(10, 14)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(switch)
    assert all(shown(state) == [number, 5, 4, 3] for number, states in made.items() for state in states)


def test_states_of_inference_mode_go_on_outside_and_back() -> None:
    with torch.inference_mode():
        state = laws.run(RECORD, steps(3))
    state = laws.run(RECORD, steps(3, start=3), state)
    with torch.inference_mode():
        state = laws.run(RECORD, steps(3, start=6), state)
    assert shown(state) == [8, 7, 6, 5]


def test_other_dtypes_are_promoted() -> None:
    state = reduce(RECORD.update, [torch.ones(2), torch.full((2,), 0.1, dtype=torch.float64), torch.ones(2)], {})
    assert RECORD.dump(state).dtype == torch.float64
    assert shown(state) == [1, 0.1, 1]


@pytest.mark.parametrize("ring", [Window(Last(), 3), History(Last(), duration=3.0), EveryNth(Last(), 2)], ids=str)
def test_integers_in_a_ring_beside_floats_are_not_rounded(ring: Reducer) -> None:
    xs = [torch.tensor([number]) for number in (2**24 + 1, 1.5, 2**24 + 3, 2.5, 2**24 + 5)]
    for cut in range(6):
        state = ring.merge(laws.run(ring, xs[:cut]), laws.run(ring, xs[cut:]))
        kept = {float(number) for key, value in state.items() if key != "observed" for number in value.flatten().tolist()}
        assert kept <= {float(x) for x in [2**24 + 1, 1.5, 2**24 + 3, 2.5, 2**24 + 5]}


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("ring", [Window(Last(), 2), History(Last(), duration=2.0), EveryNth(Last(), 3)], ids=str)
def test_rings_of_numbers_that_pytorch_does_not_index(ring: Reducer, dtype: torch.dtype) -> None:
    xs = [torch.tensor(number).to(dtype) for number in range(6)]
    wanted = ring.compute(laws.run(ring, xs)).float()
    for cut in range(7):
        assert ring.compute(ring.merge(laws.run(ring, xs[:cut]), laws.run(ring, xs[cut:]))).float().equal(wanted)


def test_the_slots_of_inner_keys_are_their_own() -> None:
    history = History(Product(last=Last(), average=EMA(alpha=0.5)), duration=3.0)
    state = laws.run(history, steps(9))
    assert history.dump(state)["last"][:, 0].tolist() == [8, 7, 6]
    assert len({value.untyped_storage().data_ptr() for value in state.values()}) == len(state)


def test_graphs_hand_over_observations_rather_than_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    def merge(*_: object) -> State:
        raise AssertionError("the lift of one observation has all slots")

    monkeypatch.setattr(History, "merge", merge)
    reducer = Product(past=RECORD, mean=Mean())
    layer = nn.Identity()
    monitor = ForwardMonitor(reducer, layer)
    run = torch.compile(layer, backend="eager", fullgraph=True)
    for x in steps(6):
        run(x)
    assert shown({key.removeprefix("past/"): value for key, value in monitor.state.items() if key.startswith("past/")}) == [
        5,
        4,
        3,
        2,
    ]


def test_files_of_cells_have_no_free_slots() -> None:
    cell = Cell(RECORD)
    for x in steps(9, 10_000):
        cell.push(x)
    buffer = io.BytesIO()
    torch.save(cell.state_dict(), buffer)
    assert buffer.tell() < 1.2 * 4 * 10_000 * 4
