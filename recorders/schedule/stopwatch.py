"""Sample: a step in which the work of monitors is timed, on the host and on the device.

A monitor starts to work when a hook, a compiled graph, an optimizer step or the user calls one of its methods. A `Hook` has a timed
version of what it calls; the other methods are marked with `@entrance`. Outside of measured steps no time is read.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from recorders.capture.batching import PlannedRows, StepBatch
from recorders.capture.hooks import Hook
from recorders.capture.switching import hook_of
from recorders.schedule.call_cost import CallCounts
from reducers.kernels.locks import new_lock

__all__ = [
    "HookTiming",
    "Sample",
    "Seconds",
    "TimedStepBatch",
    "Timer",
    "entrance",
    "exclude",
    "now",
    "open_samples",
    "tensor_hook",
    "timed_together",
]

CLOCK = "\0"  # stands for the clock among the names of subrecorders
Method = TypeVar("Method", bound=Callable[..., Any])
Result = TypeVar("Result")


def now() -> float:
    """The time in seconds."""
    return perf_counter()


class Seconds(defaultdict[str, float]):
    """Seconds by name."""

    def __init__(self) -> None:
        super().__init__(float)

    def add(self, other: Mapping[str, float]) -> None:
        """Adds the seconds of `other`."""
        for name, seconds in other.items():
            self[name] += seconds


class Timer(NamedTuple):
    """What a monitor is timed by during a measured step: the step, and the monitor's name in it."""

    sample: Sample
    name: str


def entrance(method: Method) -> Method:
    """Marks a method with which a graph or the user starts the work of a monitor. It is timed while the monitor has a `Timer`."""
    return _timed_method(method, (0, 0))


def tensor_hook(method: Method) -> Method:
    """Like `entrance`, for what a hook on a tensor calls: what PyTorch takes to call the hook is counted too."""
    return _timed_method(method, (0, 1))


def _timed_method(method: Method, calls: tuple[int, int]) -> Method:
    @functools.wraps(method)
    def enter(self: Any, *args: Any) -> Any:
        timer: Timer | None = self.timer
        if timer is None:
            return method(self, *args)
        return timer.sample.time(timer.name, calls, method, self, *args)

    return cast(Method, enter)


def timed_together(timers: Sequence[Timer], function: Callable[..., Result], *args: Any) -> Result:
    """Calls `function(*args)`, the work of several monitors at once, and shares out the seconds; returns what it returns."""
    samples = {timer.sample: timer for timer in timers}
    if not samples or (_inside.sample is not None and _inside.sample.open):
        return function(*args)
    outer, outer_timer = _inside.sample, _inside.timer
    sample, _inside.timer = samples.popitem()
    _inside.sample = sample
    started, event = perf_counter(), sample.new_event()
    try:
        return function(*args)
    finally:
        _inside.sample, _inside.timer = outer, outer_timer
        mine = [timer.name for timer in timers if timer.sample is sample]
        sample.add({name: 1 / len(mine) for name in mine}, started, event)


def exclude(started: float) -> float:
    """The seconds since `started`, in which observations of many steps were reduced; leaves them out of the measured step."""
    seconds = perf_counter() - started
    if _inside.timer is not None:
        _inside.timer.sample.exclude(_inside.timer.name, seconds)
    return seconds


class Sample:
    """A measured step.

    Attributes:
        busy: whether some monitor records in this step.
        open: whether the step goes on.
        seconds: the seconds that monitors took, by name.
        calls: the hooks that PyTorch called, by name.
        excluded: the seconds of the step that count for all steps: see `exclude`.
        upkeep: the seconds that the clock and the hooks on optimizers took.
        pairs: device events, before and after the work of a monitor.
        ended: when the step ended.
    """

    def __init__(self, busy: bool) -> None:
        self.busy, self.open = busy, True
        self.ended = self.upkeep = self.excluded = 0.0
        self.seconds, self.calls = Seconds(), CallCounts()
        self.pairs: list[tuple[Any, Any]] = []
        self._started: float | None = None
        self._new_event, self._lock = _event_maker(), new_lock()
        self._hooks: list[weakref.ref[Hook]] = []
        self._monitors: list[weakref.ref[Any]] = []
        self._rows: dict[Any, tuple[float, list[str]]] = {}  # of graphs: the seconds before, and whose they are
        self._ref = weakref.ref(self, open_samples.discard)
        hash(self._ref)  # while it can be computed: a reference keeps the hash of what it refers to

    def begin(self, monitors: Mapping[str, Any], counting: Any = None) -> float:
        """Begins the step; returns the time. `counting` is the handle of the clock's own hook."""
        modules: set[int] = set()
        if counting is not None:
            self._time_hook(CLOCK, counting, (1, 0))
        for name, monitor in monitors.items():
            self._monitors.append(weakref.ref(monitor))
            monitor.timer = Timer(self, name)
            for buffer in monitor.buffer.graph_buffers:
                self._rows.setdefault(buffer.rows, (buffer.rows.seconds, []))[1].append(name)
            for handle in monitor.all_handles():
                first = handle in monitor.hooks.handles and id(monitor.module) not in modules
                modules.add(id(monitor.module))
                self._time_hook(name, handle, (1, 0) if first else (0, 1))
        open_samples.add(self._ref)
        self._started = perf_counter()
        return self._started

    def _time_hook(self, name: str, handle: Any, calls: tuple[int, int]) -> None:
        hook = hook_of(handle)
        if isinstance(hook, Hook):
            self._hooks.append(weakref.ref(hook))
            hook.run = functools.partial(self.time, name, calls, hook.usual)

    def exclude(self, name: str, seconds: float) -> None:
        """Leaves out seconds of the work of a monitor that are few and long, and counted by themselves."""
        with self._lock:
            self.excluded += seconds
            self.seconds[name] -= seconds

    def end(self) -> float | None:
        """Ends the step; returns its seconds without those excluded, or None if its beginning was interrupted."""
        self.ended = perf_counter()
        self.close()
        return None if self._started is None else self.ended - self._started - self.excluded

    def close(self) -> None:
        """Stops all timing for this step."""
        self.open = False
        open_samples.discard(self._ref)
        for hook in [ref() for ref in self._hooks]:
            if hook is not None:
                hook.run = hook.usual
        for monitor in [ref() for ref in self._monitors]:
            if monitor is not None:
                monitor.timer = None
        for rows, (before, names) in self._rows.items():
            self.seconds.add(dict.fromkeys(names, (rows.seconds - before) / len(names)))
        self._rows = {}

    def time(self, name: str, calls: tuple[int, int], function: Callable[..., Any], *args: Any) -> Any:
        """Calls `function(*args)`, adds the seconds it takes to `name`, and returns what it returns.

        What is called from within other timed work is part of that work. `calls` says how many hooks PyTorch called for it, see
        `CallCounts`.
        """
        outer, outer_timer = _inside.sample, _inside.timer
        if not self.open or (outer is not None and outer.open):
            return function(*args)
        _inside.sample, _inside.timer = self, Timer(self, name)
        started, event = perf_counter(), self.new_event()
        try:
            return function(*args)
        finally:
            _inside.sample, _inside.timer = outer, outer_timer
            self.add({name: 1.0}, started, event, calls)

    def new_event(self) -> Any:
        """An event that marks this moment on the device; None if there is no device."""
        return None if self._new_event is None else self._new_event()

    def add(self, shares: Mapping[str, float], started: float, event: Any, calls: tuple[int, int] = (0, 0)) -> None:
        """Adds the seconds since `started` to several names, to each its share of them."""
        seconds, ended = perf_counter() - started, None if event is None else self.new_event()
        with self._lock:
            for name, share in shares.items():
                if any(calls):
                    self.calls.add({name: calls})
                if name == CLOCK:
                    self.upkeep += seconds * share
                else:
                    self.seconds[name] += seconds * share
            if ended is not None and shares:
                self.pairs.append((event, ended))


class TimedStepBatch(StepBatch):
    """A `StepBatch` of a measured step. The seconds of reducing it are shared out by the number of elements."""

    def __init__(self) -> None:
        super().__init__()
        self._giver: Timer | None = None  # of the monitor that is notified now
        self._elements: Counter[Timer | None] = Counter()

    def notify(self, timer: Timer | None, moment: Callable[..., None], *args: Any) -> None:
        """Calls `moment(*args, self)`, a method of the monitor that has this timer."""
        self._giver = timer
        try:
            if timer is None:
                moment(*args, self)
            else:
                timer.sample.time(timer.name, (0, 0), moment, *args, self)
        finally:
            self._giver = None

    def accepts(self, x: Tensor) -> bool:
        accepted = super().accepts(x)
        if accepted:
            self._elements[self._giver] += x.numel()
        return accepted

    def add_planned(self, planned: PlannedRows, tensors: Sequence[Tensor], afters: Sequence[Tensor] = ()) -> None:
        super().add_planned(planned, tensors, afters)
        self._count(planned, tensors)

    def keep_planned(self, planned: PlannedRows, kept: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        super().keep_planned(planned, kept, tensors)
        self._count(planned, tensors)

    def _count(self, planned: PlannedRows, tensors: Sequence[Tensor]) -> None:
        for monitor, *_, operands, _ in planned.seen(tensors):
            self._elements[getattr(monitor, "timer", None)] += operands[0].numel()

    def record(self) -> None:
        events = {timer.sample: timer.sample.new_event() for timer in self._elements if timer is not None}
        outer, _inside.sample = _inside.sample, next(iter(events), None)
        started = perf_counter()
        try:
            super().record()
        finally:
            _inside.sample = outer
            total = self._elements.total()
            for sample, event in events.items():
                mine = {timer.name: count / total for timer, count in self._elements.items() if timer and timer.sample is sample}
                sample.add(mine, started, event)


class _Inside(threading.local):
    """What times the work that this thread does now: the sample, and the timer of a monitor if it is the work of one."""

    sample: Sample | None = None
    timer: Timer | None = None


_inside = _Inside()

# The measured steps that go on now. It is read at every step of every optimizer, so it is a plain set.
open_samples: set[weakref.ref[Sample]] = set()


class HookTiming:
    """Times a hook on optimizers in the measured steps that go on: what it takes beyond the work of monitors is their upkeep."""

    def __init__(self) -> None:
        self._samples = [sample for sample in [ref() for ref in list(open_samples)] if sample is not None]
        self._before = [sum(sample.seconds.values()) for sample in self._samples]
        self._started = perf_counter()

    def end(self) -> None:
        """The hook has done its work."""
        took = perf_counter() - self._started
        for sample, before in zip(self._samples, self._before, strict=True):
            sample.upkeep += max(0.0, took - sum(sample.seconds.values()) + before)
            sample.calls.add({CLOCK: (0, 1)})


def _event_maker() -> Callable[[], Any] | None:
    """What makes a CUDA event on the current stream, without waiting for the device; None if CUDA is not in use."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None

    def new_event() -> Any:
        if torch.cuda.is_current_stream_capturing():  # what is captured does not run now
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    return new_event
