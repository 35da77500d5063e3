"""Stopwatch: in a measured step, the seconds that the work of each monitor takes, on the host and on the device.

The guard at every entrance from PyTorch (`recorders.capture.entering`) calls what this file gives it, or reads no clock at all.
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Any, TypeAlias

import torch

from recorders.capture import entering
from recorders.graphs.ring import GraphRing
from recorders.graphs.sinks import find_sink
from reducers.kernels.locks import new_lock

__all__ = ["Stopwatch", "now", "time_joins"]

Key: TypeAlias = "int | str"  # the `id` of a monitor, or the name of an entrance that no monitor owns


def now() -> float:
    """The time in seconds."""
    return perf_counter()


class _Wanted(dict[int, "weakref.ref[Any]"]):
    """Those who want to know how long something takes, held weakly. As long as anybody does, the guard calls a function for it."""

    def __init__(self, what: str, function: Callable[..., Any]) -> None:
        super().__init__()
        self._what, self._function = what, function

    def change(self, by: Any, wanted: bool) -> None:
        """Adds somebody, or takes somebody out, who is taken out anyway if it is freed."""
        key = id(by)
        if wanted:
            self[key] = weakref.ref(by, lambda _: self._drop(key))
            setattr(entering, self._what, self._function)
        else:
            self._drop(key)

    def _drop(self, key: int) -> None:
        self.pop(key, None)
        if not self:
            setattr(entering, self._what, None)

    def now(self) -> list[Any]:
        """Those who are there."""
        return [found for ref in list(self.values()) if (found := ref()) is not None]


class _Call:
    """Work that a thread does now.

    Attributes:
        keys: whose it is; several monitors share it equally.
        owned: whether it is that of monitors. What is called within it is part of it then.
        outer: the work within which it is done.
        inner: the seconds of it that count elsewhere.
    """

    __slots__ = ("inner", "keys", "outer", "owned", "started")

    def __init__(self, owner: Any, outer: _Call | None) -> None:
        found = owner if isinstance(owner, list) else [owner if isinstance(owner, str) else getattr(owner, "__self__", owner)]
        found = [find_sink(each) if isinstance(each, int) else each for each in found]
        self.keys: list[Key] = [each if isinstance(each, str) else id(getattr(each, "monitor", each)) for each in found]
        self.owned, self.outer, self.inner = not isinstance(owner, str), outer, 0.0
        self.started = perf_counter()


class _Here(threading.local):
    call: _Call | None = None


_here, _lock = _Here(), new_lock()


class Stopwatch:
    """Times the work of all monitors, from `start` until `stop`.

    Attributes:
        seconds: by the `id` of a monitor, or by the name of an entrance that no monitor owns.
        pairs: device events, before and after the work of a thread.
    """

    def __init__(self) -> None:
        self.seconds: defaultdict[Key, float] = defaultdict(float)
        self.pairs: list[tuple[Any, Any]] = []
        self._rings: dict[GraphRing, tuple[float, list[Key]]] = {}

    def start(self, monitors: Iterable[Any]) -> float:
        """Starts; returns the time. What graphs hand over without any Python is timed for these monitors."""
        for monitor in monitors:
            for ring in monitor.buffer.graph_rings:
                ring.time(True)
                self._rings.setdefault(ring, (ring.seconds, []))[1].append(id(monitor))
        _running.change(self, True)
        self._started = perf_counter()
        return self._started

    def stop(self) -> float:
        """Stops; returns the time. Of work that goes on in this thread, what was done until now counts."""
        ended, later, call = perf_counter(), 0.0, _here.call
        _running.change(self, False)
        while call is not None:
            lasted = ended - max(call.started, self._started)
            self._add(call.keys, lasted - call.inner - later)
            later, call = lasted, call.outer
        for ring, (before, keys) in self._rings.items():
            ring.time(False)
            self._add(keys, ring.seconds - before)
        return ended

    def end(self, call: _Call, ended: float, *events: Any) -> None:
        """Adds a call that has ended, and the events before and after it."""
        self._add(call.keys, ended - max(call.started, self._started) - call.inner)
        if None not in events:
            self.pairs.append(events)

    def _add(self, keys: list[Key], seconds: float) -> None:
        with _lock:
            for key in keys:
                self.seconds[key] += max(0.0, seconds) / len(keys)


def _time(owner: Any, run: Callable[..., Any], *args: Any) -> Any:
    """Calls `run(*args)` and returns its result; adds its seconds to `owner`, without those of monitors that it calls."""
    outer = _here.call
    if outer is not None and outer.owned:
        return run(*args)
    event = None if outer is not None else _new_event()
    call = _here.call = _Call(owner, outer)
    try:
        return run(*args)
    finally:
        ended, _here.call = perf_counter(), outer
        if outer is not None:
            outer.inner += ended - call.started
        after = None if event is None else _new_event()
        for stopwatch in _running.now():
            stopwatch.end(call, ended, event, after)


_running = _Wanted("timing", _time)


def _new_event() -> Any:
    """A CUDA event on the current stream, without waiting; None without a device, or if what runs is only captured."""
    if not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
        return None
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def time_joins(meter: Any, on: bool) -> None:
    """Times the reduction of pending observations. It is seldom and long, so it counts in no step, but for all of them."""
    _meters.change(meter, on)


def _join(buffer: Any, run: Callable[..., Any], *args: Any) -> Any:
    started = perf_counter()
    try:
        return run(*args)
    finally:
        seconds = perf_counter() - started
        buffer.flush_seconds += seconds
        if _here.call is not None:
            _here.call.inner += seconds
        for meter in _meters.now():
            meter.joined += seconds


_meters = _Wanted("joining", _join)
