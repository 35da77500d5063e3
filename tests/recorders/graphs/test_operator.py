"""Rings that an operator fills in C++: which observations it takes by itself, and what it leaves to the slow operator."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from collections.abc import Iterator

import pytest
import torch
from test_reading import check, ring_of, states, updated
from torch import Tensor

from recorders._torch import graph_task_address
from recorders.graphs import operators
from recorders.graphs.operators import can_record
from recorders.graphs.reading import add_to_operator, has_filled, reading_library
from recorders.graphs.ring import GraphRing
from recorders.graphs.sinks import KEY
from reducers import Mean, Moments, Summary
from reducers.kernels.cpp import library

pytestmark = pytest.mark.skipif(not library.in_order(), reason="no C++ compiler")

NAME = "k" * KEY
X = torch.linspace(-1, 2, 60).view(6, 10)
REDUCERS = [Summary("b c -> c"), Moments()]


def call(ring: GraphRing, *tensors: Tensor, name: str = NAME, sinks: list[int] | None = None) -> bool:
    """Calls the operator; returns whether it added a row. The sinks do not exist, so the slow operator does nothing."""
    before, found = ring.count, [*map(torch.tensor, ring.numbers if sinks is None else sinks)]
    torch.ops.torch_recorders.record(found, list(tensors), f"{name}((), (), (), False)")
    return ring.count > before


def ready(ring: GraphRing, *tensors: Tensor) -> GraphRing:
    """The ring, which knows tensors like these from now on."""
    assert can_record()
    assert ring.add(tensors)
    ring.ready = True
    return ring


@pytest.fixture
def ring() -> Iterator[GraphRing]:
    yield ready(ring_of(REDUCERS, [X, X]), X, X)
    gc.collect()


def test_rows_hold_what_updates_give(ring: GraphRing) -> None:
    tensors = [(X * factor, X + factor) for factor in (2.0, -3.0, 0.5)]
    assert all(call(ring, *pair) for pair in tensors)
    for row, pair in enumerate([(X, X), *tensors]):
        wanted = [updated(reducer, x) for reducer, x in zip(REDUCERS, pair, strict=True)]
        check(states(ring, REDUCERS, row, row + 1), wanted)
    assert ring.seconds == 0
    ring.time(True)
    assert call(ring, *tensors[0])
    assert ring.seconds > 0


def test_what_the_operator_leaves_to_the_slow_one(ring: GraphRing) -> None:
    first, second = ring.numbers
    assert call(ring, X, X)
    assert not call(ring, X, X[:5])  # another shape
    assert not call(ring, X, X.t().contiguous().t())  # other strides
    assert not call(ring, X, X.bfloat16())
    assert not call(ring, X)
    assert not call(ring, X, X, X)
    assert not call(ring, X, X, name="j" * KEY)
    assert not call(ring, X, X, sinks=[first])
    assert not call(ring, X, X, sinks=[second, first])
    assert not call(ring, X, X, sinks=[first, 1 << 40])
    ring.ready = False
    assert not call(ring, X, X)
    ring.ready = True
    assert call(ring, X, X)


def test_the_slow_operator_knows_that_a_ring_was_filled(ring: GraphRing, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bool] = []
    monkeypatch.setattr(operators, "_record", lambda *_: told.append(has_filled()))
    room = ring.capacity - 1
    assert sum(call(ring, X, X) for _ in range(room + 2)) == room
    assert ring.count == ring.capacity
    assert not ring.ready
    assert told == [True, False, False]
    assert not has_filled()
    assert not ring.add([X, X])


def test_other_strides_are_taken_once_the_ring_knows_them(ring: GraphRing) -> None:
    turned = (X + 1).t().contiguous().t()
    assert ring.add([X, turned])
    assert call(ring, X, turned)
    check(states(ring, REDUCERS, 2, 3), [updated(reducer, x) for reducer, x in zip(REDUCERS, (X, turned), strict=True)])


def test_graphs_of_two_dtypes_have_rings_of_their_own() -> None:
    narrow = X.bfloat16()
    wide, other = ready(ring_of(REDUCERS, [X, X]), X, X), ready(ring_of(REDUCERS, [narrow, narrow]), narrow, narrow)
    assert call(wide, X, X)
    assert not call(wide, narrow, narrow)
    assert call(other, narrow * 2, narrow)
    (state, _) = states(other, REDUCERS, 1, 2)
    assert state["max"].dtype is torch.bfloat16
    assert torch.equal(state["max"], (narrow * 2).amax(0))


@pytest.mark.parametrize("anywhere", [False, True])
def test_calls_inside_a_backward(anywhere: bool) -> None:
    ring = ready(ring_of(REDUCERS, [X, X], anywhere=anywhere), X, X)
    added: list[bool] = []
    x = torch.ones(3, requires_grad=True)
    x.register_hook(lambda _: added.append(call(ring, X, X)))
    x.sum().backward()
    assert added == [anywhere]


def test_its_successor_takes_the_place_of_a_full_ring(ring: GraphRing) -> None:
    assert ring.successor() is ring
    ring.seal()
    assert (ring.ready, ring.count) == (False, ring.capacity)
    other = ring.successor()
    assert other is ring.successor()
    assert other is not ring
    assert not call(ring, X, X)
    other.ready = True
    assert not call(other, X, X[:5])
    assert call(other, X, X)  # what reads them knows tensors like these
    assert (ring.count, other.count) == (1, 1)


def test_a_ring_that_was_freed_is_not_found() -> None:
    ring = ready(ring_of(REDUCERS, [X, X]), X, X)
    sinks = [*map(torch.tensor, ring.numbers)]
    del ring
    gc.collect()
    torch.ops.torch_recorders.record(sinks, [X, X], f"{NAME}((), (), (), False)")


def test_a_ring_that_is_not_ready_is_added_to_by_no_other_thread() -> None:
    """Setting it waits for a thread that is in the middle of reading."""
    x = torch.randn(1 << 20)
    ring = ready(ring_of([Mean()] * 16, [x] * 16), *[x] * 16)
    going, sinks = True, [*map(torch.tensor, ring.numbers)]

    def run() -> None:
        while going:
            torch.ops.torch_recorders.record(sinks, [x] * 16, f"{NAME}((), (), (), False)")

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        while ring.count < ring.capacity // 2:
            before = ring.count
            ring.ready = True
            while ring.count == before:
                pass
            ring.ready = False
            count = ring.count
            assert all(ring.count == count for _ in range(100))
    finally:
        going = False
        for thread in threads:
            thread.join()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # threads and a fork, which is what is tested
def test_a_fork_while_another_thread_reads() -> None:
    x = torch.randn(1 << 20)
    ring, going = ready(ring_of([Mean()], [x]), x), True
    addresses = (ctypes.c_void_p * 1)(x.data_ptr())

    def run() -> None:
        while going:
            ring._struct.count = 0  # so that there is room for as many as come
            reading_library().reducers_add(ctypes.byref(ring._struct), 0, addresses)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        for _ in range(30):
            child = os.fork()
            if child == 0:
                ring.ready = False  # which waits for whoever reads
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        going = False
        thread.join()


def test_the_operator_is_left_to_python_if_pytorch_does_not_tell_of_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    assert graph_task_address() is not None
    assert not add_to_operator("torch_recorders::record", "torch_recorders::record_slowly", None)
    monkeypatch.setattr("recorders._torch.ctypes.CDLL", lambda *_: object())
    assert graph_task_address() is None
