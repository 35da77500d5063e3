"""Observations that a compiled graph hands over for many monitors at once, added to a buffer that they share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor

from recorders.capture.changes import latest_change
from recorders.capture.context import as_monitor
from recorders.capture.gathering import Together
from recorders.capture.graph_buffers import GraphBuffer
from recorders.capture.layouts import in_use
from recorders.capture.operands import recomputing
from recorders.monitors.record import report_failures
from reducers.kernels.loop.together import read_into

__all__ = ["add_to_known", "add_together", "known_buffer"]

_buffers: WeakValueDictionary[Any, GraphBuffer] = WeakValueDictionary()
"""The buffer of the monitors of a graph, by the numbers of their receivers, as long as one of them has it."""


def known_buffer(numbers: Sequence[int], together: Together) -> GraphBuffer | None:
    """Returns the buffer of the monitors if all of them are known to record, and there is room for more than one observation.

    No memory of a monitor is looked at: when a forward ends the caches hold that of the net, and each look takes microseconds.
    """
    shared = _buffers.get((together, *numbers))
    if shared is None or shared.unchanged_since != latest_change() or shared.count + 1 >= shared.capacity:
        return None
    return None if in_use() or recomputing() else shared


def add_to_known(shared: GraphBuffer, packs: Sequence[Tensor], kept: Sequence[Tensor], together: Together) -> bool:
    """Reads what the graph kept, and adds one observation of each monitor to their buffer; returns False if nothing was added."""

    def read(out: Sequence[Tensor]) -> None:
        read_into(out, kept, together.readings)

    try:
        added = shared.add(packs, read) is not None
    except Exception:  # it is tried again, and reported then
        return False
    shared.calls += added
    return added


def add_together(numbers: Sequence[int], monitors: Sequence[Any], packs: Sequence[Tensor], together: Together) -> bool:
    """Adds one observation of each monitor to their buffer, if all of them record it.

    Returns:
        whether it was added; if not, each monitor decides for itself.
    """
    if in_use() or None in monitors or len(set(map(id, monitors))) < len(monitors):
        return False
    if recomputing() and not monitors[0].records_recomputed:  # all are of one class
        return False
    try:
        full = as_monitor(_add, (together, *numbers), monitors, packs)
    except Exception:  # then each monitor reports what fails for it
        return False
    if full is None:
        return False
    for monitor in monitors:
        monitor.counts["calls"] = monitor.counts.get("calls", 0) + 1
        monitor.compiled = True
        if full:
            monitor.buffer.flush()
            report_failures(monitor)
    return True


def _add(key: tuple[Any, ...], monitors: Sequence[Any], packs: Sequence[Tensor]) -> bool | None:
    change, together = latest_change(), key[0]
    buffer = _buffers.get(key)
    if buffer is not None:
        _count_calls(buffer, monitors)
        buffer = buffer.successor()
    if not all(map(_records, monitors)):
        return None
    if buffer is None or not all(monitor.buffer.waits_in(buffer, index) for index, monitor in enumerate(monitors)):
        buffer = GraphBuffer(together.layouts, together.spans, packs)
        if buffer.capacity < 2:
            return None
        for index, monitor in enumerate(monitors):
            monitor.buffer.wait_in(buffer, index)
    elif all(monitor.timer is None for monitor in monitors):
        buffer.unchanged_since = change
    _buffers[key] = buffer
    return buffer.add(packs)


def _records(monitor: Any) -> bool:
    """Whether the monitor records all that comes in this step, without a placement or a shape to check."""
    return bool(monitor.gate.on and monitor.gate.active and monitor.buffer.takes_rows)


def _count_calls(buffer: GraphBuffer, monitors: Sequence[Any]) -> None:
    """Counts for each monitor the calls that were not counted yet."""
    for index, monitor in enumerate(monitors):
        if buffer.calls and monitor.buffer.waits_in(buffer, index):
            monitor.counts["calls"] = monitor.counts.get("calls", 0) + buffer.calls
    buffer.calls = 0
