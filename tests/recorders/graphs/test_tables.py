"""Tables that an operator fills in C++: which observations it takes by itself, and what it leaves to the slow operator."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from collections.abc import Iterator

import pytest
import torch
from test_reading import observed, states, told
from torch import Tensor

from recorders._torch import graph_task_address
from recorders.graphs import operators
from recorders.graphs.operators import can_record
from recorders.graphs.reading import Pack, TensorReading, as_text, reader_of, reading_library
from recorders.graphs.tables import KEY, OperatorTable, add_to_operator, has_filled
from reducers import Mean, Moments, Summary
from reducers.kernels.loop import building

pytestmark = pytest.mark.skipif(building.build(1, "Float32") is None, reason="no C++ compiler")

NAME = "k" * KEY
X = torch.linspace(-1, 2, 60).view(6, 10)


class Operator:
    """The operator, with a table for two receivers, and what it left to the slow one."""

    def __init__(self, *, capacity: int = 10, anywhere: bool = False) -> None:
        assert can_record()
        self.parts = [*observed(Summary("b c -> c"), X), *observed(Moments(), X)]
        self.text = told(self.parts)
        reader_of.cache_clear()
        self.receivers = [torch.tensor(-7), torch.tensor(-8)]  # numbers of no receiver, so that the slow operator does nothing
        self.table = OperatorTable(reader_of(self.text), [-7, -8], NAME, capacity, anywhere)
        self.table.add(self.table.reader.read([X, X]))  # from then on it knows tensors like these
        self.table.ready = True

    def __call__(self, *tensors: Tensor, name: str = NAME, receivers: list[Tensor] | None = None) -> bool:
        """Calls the operator; returns whether it added a row."""
        before = self.table.count
        torch.ops.torch_recorders.record(receivers or self.receivers, list(tensors), f"{name}((), (), (), '')")
        return self.table.count > before


@pytest.fixture
def operator() -> Iterator[Operator]:
    found = Operator()
    yield found
    del found.table
    gc.collect()


def test_rows_hold_what_updates_give(operator: Operator) -> None:
    tensors = [(X * factor, X + factor) for factor in (2.0, -3.0, 0.5)]
    assert all(operator(*pair) for pair in tensors)
    packs = operator.table.packs(0, operator.table.count)
    for row, pair in enumerate([(X, X), *tensors]):
        found = states(operator.parts, [pack[row] for pack in packs])
        for state, reducer, x in zip(found, (Summary("b c -> c"), Moments()), pair, strict=True):
            for key, value in reducer.update({}, x).items():
                torch.testing.assert_close(state[key], value, rtol=1e-12, atol=1e-12)
    assert operator.table.calls == 3
    assert operator.table.seconds == 0
    operator.table.time(True)
    assert operator(*tensors[0])
    assert operator.table.seconds > 0
    assert (operator.table.take_calls(), operator.table.calls) == (4, 0)


def test_what_the_operator_leaves_to_the_slow_one(operator: Operator) -> None:
    assert operator(X, X)
    assert not operator(X, X[:5])  # another shape
    assert not operator(X, X.t().contiguous().t())  # other strides
    assert not operator(X)
    assert not operator(X, X, X)
    assert not operator(X, X, name="j" * KEY)
    assert not operator(X, X, receivers=[torch.tensor(-7)])
    assert not operator(X, X, receivers=[torch.tensor(-8), torch.tensor(-7)])
    assert not operator(X, X, receivers=[torch.tensor(-7), torch.tensor(-9)])
    operator.table.ready = False
    assert not operator(X, X)
    operator.table.ready = True
    assert operator(X, X)


def test_the_slow_operator_knows_that_a_table_was_filled(operator: Operator, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bool] = []
    monkeypatch.setattr(operators, "_call_sinks", lambda *_: told.append(has_filled()))
    assert sum(operator(X, X) for _ in range(12)) == 9
    assert operator.table.count == 10
    assert not operator.table.ready
    assert told == [True, False, False, False]
    assert not has_filled()
    assert not operator.table.add(operator.table.reader.read([X, X]))


@pytest.mark.slow
def test_the_next_table_takes_over_memory_if_the_one_before_was_freed(operator: Operator) -> None:
    first = operator.table.packs(0, 1)[0].data_ptr()
    for free in (True, False):
        before = operator.table
        operator.table = operator.table.another()
        if free:
            del before
            gc.collect()
        operator.table.ready = True
        assert (operator.table.packs(0, 1)[0].data_ptr() == first) == free


def test_tensors_are_kept_as_they_are() -> None:
    tensors = [
        torch.randn(3, 4, 5),
        torch.randn(5, 4).t(),
        torch.randn(2, 8, 3).transpose(1, 2),
        torch.arange(6)[::2],
        torch.tensor(2.0),
    ]
    tensors += [
        torch.randn(7).bfloat16(),
        torch.randn(4, 4) > 0,
        torch.randn(3, dtype=torch.complex128),
        torch.randn(4, 1).expand(4, 3),
    ]
    packs = [Pack(1, tuple(x.shape), x.dtype) for x in tensors]
    readings = [TensorReading((), (), 0.0, ((index, 0),)) for index in range(len(tensors))]
    reader = reader_of(as_text(readings, packs))
    table = OperatorTable(reader, [-12], NAME, 4, anywhere=False)
    table.add(reader.read(tensors))
    table.ready = True
    torch.ops.torch_recorders.record([torch.tensor(-12)], tensors, f"{NAME}((), (), (), '')")
    assert table.count == 2
    for pack, x in zip(table.packs(0, 2), tensors, strict=True):
        assert pack.dtype is x.dtype
        assert torch.equal(pack[0, 0], x)
        assert torch.equal(pack[1, 0], x)


def test_other_strides_are_taken_once_the_reader_knows_them(operator: Operator) -> None:
    turned = (X + 1).t().contiguous().t()
    operator.table.reader.read([X, turned])
    assert operator(X, turned)
    (pack,) = (pack for pack in operator.table.packs(1, 2) if pack.shape[2:] == () and pack.dtype is torch.float64)
    torch.testing.assert_close(pack[0, 0], turned.double().mean(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tensors_of_another_dtype_are_taken_once_the_reader_knows_them(operator: Operator, dtype: torch.dtype) -> None:
    narrow = (X + 1).to(dtype)
    assert not operator(X, narrow)
    operator.table.reader.read([X, narrow])
    assert operator(X, narrow)
    assert operator(X, X + 1)
    (pack,) = (pack for pack in operator.table.packs(1, 3) if pack.shape[2:] == () and pack.dtype is torch.float64)
    for row, x in enumerate([narrow, X + 1]):
        torch.testing.assert_close(pack[row, 0], x.double().mean(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("anywhere", [False, True])
def test_calls_inside_a_backward(anywhere: bool) -> None:
    operator = Operator(anywhere=anywhere)
    added: list[bool] = []
    x = torch.ones(3, requires_grad=True)
    x.register_hook(lambda _: added.append(operator(X, X)))
    x.sum().backward()
    assert added == [anywhere]


@pytest.mark.slow
def test_another_table_takes_the_place_of_the_first(operator: Operator) -> None:
    first, other = operator.table, operator.table.another()
    assert not operator(X, X)
    other.ready = True
    operator(X, X)
    assert (first.count, other.count) == (1, 1)
    del first
    operator.table = other
    gc.collect()
    assert operator(X, X)


def test_a_table_that_was_freed_is_not_found() -> None:
    operator = Operator()
    numbers = operator.table.count
    del operator.table
    gc.collect()
    torch.ops.torch_recorders.record(operator.receivers, [X, X], f"{NAME}((), (), (), '')")
    assert numbers == 1


@pytest.mark.parametrize("other", [torch._neg_view(X), torch.randn(12, 20)[::2, ::2]], ids=["negated", "scattered"])
def test_a_reader_that_met_copies_leaves_all_to_the_slow_operator(other: Tensor) -> None:
    operator = Operator()
    operator.table.reader.read([other, X])
    operator.table.ready = True
    assert not operator.table.ready
    assert not operator(X, X)


def test_narrow_floats_are_told_in_their_own_dtype() -> None:
    x = X.bfloat16()
    (part,) = observed(Summary("b c -> c"), x)
    table = OperatorTable(reader_of(told([part])), [-9], NAME, 4, anywhere=False)
    table.add(table.reader.read([x]))
    table.ready = True
    torch.ops.torch_recorders.record([torch.tensor(-9)], [x * 2], f"{NAME}((), (), (), '')")
    assert table.count == 2
    (state,) = states([part], [pack[1] for pack in table.packs(0, 2)])
    assert state["max"].dtype is torch.bfloat16
    assert torch.equal(state["max"], (x * 2).amax(0))


def test_a_table_that_is_not_ready_is_added_to_by_no_other_thread() -> None:
    """Setting it waits for a thread that is in the middle of reading."""
    (part,) = observed(Mean(), torch.randn(1 << 20))
    table = OperatorTable(reader_of(told([part])), [-10], NAME, 1 << 16, anywhere=False)
    x, receivers = torch.randn(1 << 20), [torch.tensor(-10)]
    table.add(table.reader.read([x]))
    going = True

    def run() -> None:
        while going:
            torch.ops.torch_recorders.record(receivers, [x], f"{NAME}((), (), (), '')")

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(200):
            table.ready = True
            while not table.calls:
                pass
            table.ready = False
            count = table.count
            table.take_calls()
            assert all(table.count == count for _ in range(100))
    finally:
        going = False
        for thread in threads:
            thread.join()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # threads and a fork, which is what is tested
def test_a_fork_while_another_thread_reads() -> None:
    library, (part,) = reading_library(), observed(Mean(), torch.randn(1 << 20))
    table = OperatorTable(reader_of(told([part])), [-11], NAME, 2, anywhere=False)
    x = torch.randn(1 << 20)
    row = table.reader.read([x])
    addresses, going = (ctypes.c_void_p * 1)(x.data_ptr()), True

    def run() -> None:
        while going:
            library.reducers_read(ctypes.byref(table.reader.struct), 0, addresses, row.data_ptr())

    thread = threading.Thread(target=run)
    thread.start()
    try:
        for _ in range(30):
            child = os.fork()
            if child == 0:
                os._exit(table.take_calls())  # which waits for whoever reads
            assert os.waitpid(child, 0)[1] == 0
    finally:
        going = False
        thread.join()


def test_the_operator_is_left_to_python_if_pytorch_does_not_tell_of_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    assert graph_task_address() is not None
    assert not add_to_operator("torch_recorders::record", "torch_recorders::record_slowly", None)
    monkeypatch.setattr("recorders._torch.ctypes.CDLL", lambda *_: object())
    assert graph_task_address() is None
