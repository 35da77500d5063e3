"""What a graph hands over for many monitors at once, added to a buffer that they share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Protocol
from weakref import WeakValueDictionary

from torch import Tensor

from recorders.capture.context import as_monitor
from recorders.capture.gathering import Together
from recorders.capture.layouts import CHANGES, Told, from_text, is_placed
from recorders.capture.operands import recomputing
from recorders.capture.packs import leaf_paths, leaves_of
from recorders.graphs.rows import GraphRing, Packs, Rows, capacity_for, parts
from recorders.monitors.record import report_failures
from reducers.kernels.locks import new_lock
from reducers.kernels.loop.reading import reader_of
from reducers.kernels.loop.tables import Table, has_filled

__all__ = ["Handed", "Lifted", "Read", "add_at_once", "add_together", "flush_filled", "let_wait"]

_buffers: WeakValueDictionary[Any, GraphRing] = WeakValueDictionary()
"""The buffer of the monitors of a graph, by the numbers of their receivers, as long as one of them has it."""

_lock = new_lock()  # two threads may run a graph at once, and would give its monitors two buffers


class Handed(Protocol):
    """One observation of each of several monitors, as a graph hands it over.

    Attributes:
        together: what the graph tells of it.
        observation: what rows take of it.
    """

    together: Together
    observation: Any

    def hand_to(self, receiver: Any, index: int) -> None:
        """Hands the part of one monitor over to its receiver."""

    def new_rows(self, numbers: Sequence[int], recomputed: bool) -> Rows:
        """Rows for observations like this one, of receivers with these numbers.

        Args:
            recomputed: whether calls inside a backward count.
        """


class Lifted:
    """What the graph lifted. See `Handed`."""

    def __init__(self, together: Together, packs: Sequence[Tensor]) -> None:
        self.together, self.observation = together, list(packs)

    def hand_to(self, receiver: Any, index: int) -> None:
        told = self.together
        receiver.receive(told.layouts[index], parts(told.spans[index], self.observation), told.streams[index], _told(told, index))

    def new_rows(self, numbers: Sequence[int], recomputed: bool) -> Rows:
        return Packs(self.observation, len(numbers))


def _told(together: Together, index: int) -> Mapping[str, Told]:
    """What the graph told of the tensors of one observation."""
    return from_text(together.told[index])


class Read:
    """What the loops in C++ read of tensors. See `Handed`."""

    def __init__(self, together: Together, tensors: Sequence[Tensor]) -> None:
        self.together, self._reader = together, reader_of(together.readings)
        self.observation = self._reader.read(tensors)

    def hand_to(self, receiver: Any, index: int) -> None:
        told = self.together
        own = parts(told.spans[index], [pack[0] for pack in self._reader.packs(self.observation.unsqueeze(0))])
        if told.copies:
            receiver.receive_leaves(leaves_of(told.layouts[index], own), told.streams[index], _told(told, index))
        else:
            receiver.receive(told.layouts[index], own, told.streams[index], _told(told, index))

    def new_rows(self, numbers: Sequence[int], recomputed: bool) -> Rows:
        return Table(self._reader, numbers, self.together.key, capacity_for(self._reader.size, len(numbers)), recomputed)


def add_at_once(numbers: Sequence[int], together: Together, packs: Sequence[Tensor]) -> bool:
    """Adds what a graph lifted to the buffer of the monitors if all of them are known to record; returns whether it was added.

    No memory of a monitor is looked at: when a forward ends the caches hold that of the net, and each look takes microseconds.
    """
    shared = _buffers.get((together, *numbers))
    if shared is None or not isinstance(shared.rows, Packs) or recomputing():
        return False
    return shared.rows.add_at_once(packs)


def flush_filled(numbers: Sequence[int], monitors: Sequence[Any], together: Together) -> bool:
    """Lets the monitors reduce what waits if the operator in C++ has just filled their buffer; returns whether it has."""
    if not has_filled():
        return False
    with _lock:
        buffer = _buffers.get((together, *numbers))
        if buffer is not None:
            _count_calls(buffer, monitors)
        del buffer  # the next one takes over its memory
        _flush(numbers, [monitor for monitor in monitors if monitor is not None], together)
    return True


def add_together(numbers: Sequence[int], monitors: Sequence[Any], handed: Handed) -> bool:
    """Adds one observation of each monitor to their buffer, if all of them record it.

    Returns:
        whether it was added; if not, each monitor decides for itself.
    """
    if None in monitors or len(set(map(id, monitors))) < len(monitors):
        return False
    if recomputing() and not monitors[0].records_recomputed:  # all are of one class
        return False
    with _lock:
        try:
            full = as_monitor(_add, numbers, monitors, handed)
        except Exception:  # then each monitor reports what fails for it
            return False
        if full is None:
            return False
        for monitor in monitors:
            monitor.counts["calls"] = monitor.counts.get("calls", 0) + 1
            monitor.compiled = True
        if full:
            _flush(numbers, monitors, handed.together)
    return True


def _add(numbers: Sequence[int], monitors: Sequence[Any], handed: Handed) -> bool | None:
    """Returns whether the buffer is full then; None if nothing was added."""
    key = (handed.together, *numbers)
    buffer = _buffers.get(key)
    if buffer is not None:
        _count_calls(buffer, monitors)
        buffer = buffer.successor()
    if not all(map(_records, monitors)):
        return None
    if buffer is None or not _all_wait_in(buffer, monitors):
        buffer = None if handed.together.copies else _new_buffer(numbers, monitors, handed)
        if buffer is None:
            return None
    _buffers[key] = buffer
    if not buffer.rows.add(handed.observation):
        return None
    if not buffer.is_full:
        _rely_on(monitors, buffer)
    return buffer.is_full


def _flush(numbers: Sequence[int], monitors: Sequence[Any], together: Together) -> None:
    """Lets the monitors reduce what waits in a full buffer, and makes the next one ready."""
    for monitor in monitors:
        monitor.buffer.flush()
        report_failures(monitor)
    if len(monitors) < len(numbers):
        return
    key, waiting = (together, *numbers), monitors[0].buffer.graph_buffers
    if len(waiting) == 1 and waiting[0].layouts is together.layouts and _all_wait_in(waiting[0], monitors):
        _buffers[key] = waiting[0]
        _rely_on(monitors, waiting[0])


def _new_buffer(numbers: Sequence[int], monitors: Sequence[Any], handed: Handed) -> GraphRing | None:
    """Returns a buffer in which observations like this one wait from now on; None if it would hold only one."""
    rows = handed.new_rows(numbers, monitors[0].records_recomputed)
    if rows.capacity < 2:
        return None
    buffer = GraphRing(handed.together, rows)
    for index, monitor in enumerate(monitors):
        monitor.buffer.wait_in(buffer, index)
    return buffer


def let_wait(numbers: Sequence[int], monitors: Sequence[Any], handed: Handed) -> None:
    """Lets the next observations wait, if all monitors could reduce this one by itself: what fails is told at once, not later."""
    if None in monitors or len(set(map(id, monitors))) < len(monitors):
        return
    with _lock:
        if all(map(_reduced, monitors, handed.together.layouts)) and all(map(_records, monitors)):
            key, buffer = (handed.together, *numbers), as_monitor(_new_buffer, numbers, monitors, handed)
            if buffer is not None:
                _buffers[key] = buffer


def _reduced(monitor: Any, layout: str) -> bool:
    """Whether the monitor has reduced an observation of these leaves."""
    return all(path in monitor.buffer.stored.states for path in leaf_paths(layout))


def _rely_on(monitors: Sequence[Any], buffer: GraphRing) -> None:
    """Makes the rows ready, until one of the monitors changes."""
    with ExitStack() as locks:
        for monitor in monitors:
            locks.enter_context(monitor.buffer.lock)  # held by whoever reduces what waits, or lets it wait elsewhere
        buffer.rows.ready = True
        CHANGES.tell(buffer.rows)
        for monitor in monitors:
            for changes in (monitor.gate.changes, monitor.buffer.changes):
                changes.tell(buffer.rows)
        if not (all(map(_records, monitors)) and _all_wait_in(buffer, monitors)):  # another thread changed one in the meantime
            buffer.rows.ready = False


def _all_wait_in(buffer: GraphRing, monitors: Sequence[Any]) -> bool:
    return all(monitor.buffer.waits_in(buffer, index) for index, monitor in enumerate(monitors))


def _records(monitor: Any) -> bool:
    """Whether the monitor records all that comes in this step, without a placement or a shape to check."""
    rows = monitor.gate.on and monitor.gate.active and monitor.buffer.takes_rows
    return bool(rows and not is_placed(monitor.module, monitor.side))


def _count_calls(buffer: GraphRing, monitors: Sequence[Any]) -> None:
    """Counts for each monitor the calls that were not counted yet."""
    calls = buffer.rows.take_calls()
    for index, monitor in enumerate(monitors):
        if calls and monitor is not None and monitor.buffer.waits_in(buffer, index):
            monitor.counts["calls"] = monitor.counts.get("calls", 0) + calls
