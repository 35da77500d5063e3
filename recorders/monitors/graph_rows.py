"""Observations that a compiled graph hands over for many monitors at once, added to a buffer that they share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor

from recorders.capture.context import as_monitor
from recorders.capture.graph_buffers import GraphBuffer
from recorders.capture.layouts import in_use
from recorders.capture.operands import recomputing
from recorders.monitors.record import report_failures

__all__ = ["add_together"]

_buffers: WeakValueDictionary[Any, GraphBuffer] = WeakValueDictionary()
"""The buffer of the monitors of a graph, as long as one of them has it."""


def add_together(monitors: Sequence[Any], layouts: list[str], spans: list[str], packs: list[Tensor]) -> bool:
    """Adds one observation of each monitor to their buffer, if all of them record it.

    Returns:
        whether it was added; if not, each monitor decides for itself.
    """
    if in_use() or not all(map(_takes, monitors)) or len(set(map(id, monitors))) < len(monitors):
        return False
    if recomputing() and not monitors[0].records_recomputed:  # all are of one class
        return False
    key = (*map(id, monitors), *layouts)
    try:
        full = as_monitor(_add, key, monitors, layouts, spans, packs)
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


def _takes(monitor: Any) -> bool:
    """Whether the monitor exists and records all that comes in this step, without a placement or a shape to check."""
    return monitor is not None and monitor.gate.on and monitor.gate.active and monitor.buffer.takes_rows


def _add(key: Any, monitors: Sequence[Any], layouts: list[str], spans: list[str], packs: list[Tensor]) -> bool | None:
    buffer = _buffers.get(key)
    if buffer is not None:
        buffer = buffer.successor()
    if buffer is None or not all(monitor.buffer.waits_in(buffer, index) for index, monitor in enumerate(monitors)):
        buffer = GraphBuffer(layouts, spans, packs)
        if buffer.capacity < 2:
            return None
        for index, monitor in enumerate(monitors):
            monitor.buffer.wait_in(buffer, index)
    _buffers[key] = buffer
    return buffer.add(packs)
