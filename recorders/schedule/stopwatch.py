"""Stopwatch: in a measured step, the seconds that the work of each monitor takes, on the host and on the device.

The guard at every entrance from PyTorch (`recorders.capture.entering`) calls what this file gives it, or reads no clock at all.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from time import perf_counter
from typing import Any, TypeAlias
from weakref import WeakSet

import torch

from recorders.capture import entering
from recorders.graphs.ring import GraphRing
from recorders.graphs.sinks import find_sink
from reducers.kernels.locks import new_lock

Key: TypeAlias = "int | str"  # the `id` of a monitor, or the name of an entrance that no monitor owns


class _Here(threading.local):
    """Whose work this thread does, and since when: a name of an entrance, within which monitors may work, or that of monitors."""

    owner: Any = None
    since = 0.0


_here, _lock = _Here(), new_lock()
_running: WeakSet[Stopwatch] = WeakSet()
_measuring: WeakSet[Any] = WeakSet()  # the meters that want to know how long pending observations take


def now() -> float:
    """The time in seconds."""
    return perf_counter()


class Stopwatch:
    """Times the work of all monitors, from `start` until `stop`.

    Attributes:
        seconds: by the `id` of a monitor, or by the name of an entrance that no monitor owns.
        events: device events, before and after the work of a thread.
        elements: of the parameters that monitors read at the steps of optimizers, by the `id` of the monitor.
    """

    def __init__(self) -> None:
        self.seconds: defaultdict[Key, float] = defaultdict(float)
        self.events: list[tuple[Any, Any]] = []
        self.elements: dict[int, int] = {}
        self._rings: dict[GraphRing, tuple[float, list[Key]]] = {}

    def start(self, monitors: Iterable[Any]) -> float:
        """Starts; returns the time. What graphs hand over without any Python is timed for these monitors."""
        for monitor in monitors:
            for ring in monitor.buffer.graph_rings:
                ring.time(True)
                self._rings.setdefault(ring, (ring.seconds, []))[1].append(id(monitor))
        started = _turn_to(_here.owner)
        _running.add(self)
        _switch()
        return started

    def stop(self) -> float:
        """Stops; returns the time. Of work that goes on in this thread, what was done until now counts."""
        stopped = _turn_to(_here.owner)
        _running.discard(self)
        _switch()
        for ring, (before, keys) in self._rings.items():
            ring.time(False)
            self.add(keys, ring.seconds - before)
        return stopped

    def add(self, keys: list[Key], seconds: float) -> None:
        """Adds the seconds of some work, which several monitors share equally."""
        with _lock:
            for key in keys:
                self.seconds[key] += seconds / len(keys)


def note_elements(elements: Mapping[int, int]) -> None:
    """Notes how many elements of parameters monitors read at a step of an optimizer, by the `id` of the monitor."""
    for stopwatch in list(_running):
        stopwatch.elements.update(elements)


def time_joins(meter: Any, on: bool) -> None:
    """Times the reduction of pending observations. It is seldom and long, so it counts in no step, but for all of them."""
    (_measuring.add if on else _measuring.discard)(meter)
    _switch()


def _switch() -> None:
    """Lets the guard call what times, if anybody is there for whom."""
    entering.timing = _time if _running else None
    entering.joining = _join if _measuring else None


def _turn_to(owner: Any) -> float:
    """Lets the time count for `owner` in this thread from now on; returns the time."""
    before, since = _here.owner, _here.since
    _here.since = time = perf_counter()
    _here.owner = owner
    if before is not None and _running:
        found = [find_sink(each) if isinstance(each, int) else each for each in (before if isinstance(before, list) else [before])]
        found = [each if isinstance(each, str) else getattr(each, "__self__", each) for each in found]
        keys = [each if isinstance(each, str) else id(getattr(each, "monitor", each)) for each in found]
        for stopwatch in list(_running):
            stopwatch.add(keys, time - since)
    return time


def _time(owner: Any, run: Callable[..., Any], *args: Any) -> Any:
    """Calls `run(*args)` and returns its result; its seconds are those of `owner`, unless it is part of a monitor's work."""
    outer = _here.owner
    if not _running:  # a recorder was freed while it measured
        _switch()
    if outer is not None and (not isinstance(outer, str) or isinstance(owner, str)):
        return run(*args)
    before = _new_event() if outer is None else None
    try:
        _turn_to(owner)
        return run(*args)
    finally:
        _turn_to(outer)
        after = None if before is None else _new_event()
        if after is not None:
            for stopwatch in list(_running):
                stopwatch.events.append((before, after))


def _join(buffer: Any, run: Callable[..., Any], *args: Any) -> Any:
    if not _measuring:
        _switch()
    outer = _here.owner
    started = _turn_to(None)
    try:
        return run(*args)
    finally:
        seconds = _turn_to(outer) - started
        buffer.flush_seconds += seconds
        for meter in list(_measuring):
            meter.joined += seconds


def _new_event() -> Any:
    """A CUDA event on the current stream, without waiting; None without a device, or if what runs is only captured."""
    if not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
        return None
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
