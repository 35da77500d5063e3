"""A step that is timed: what monitors do in it, on the host and on the device.

For that step, timed versions stand in for the entrances of the monitors: what hooks call, what takes gradients, pushes, lifts of
compiled graphs and optimizer steps. In all others nothing is timed, and no time is read.

What PyTorch takes to call a hook cannot be timed by the hook. It is measured on modules of our own, once at the end of each timed
step.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from recorders._torch import has_global_hooks
from recorders.capture.hooks import Hook
from recorders.capture.switching import hook_of

if TYPE_CHECKING:
    from recorders.capture.batching import StepBatch

__all__ = ["Sample", "Seconds", "CallCost", "CallCounts", "hook_started", "hook_ended", "now"]

CLOCK = "\0"  # stands for the clock among the names of subrecorders
ENTRANCES = ("_arrived", "_arrived_at_graph", "_pushed", "take", "take_leaves", "take_call", "tick")
MOMENTS = ("_before_step", "_at_gradients", "_after_step")


def now() -> float:
    """The time in seconds."""
    return perf_counter()


class Seconds(defaultdict[str, float]):
    """Seconds by name."""

    def __init__(self) -> None:
        super().__init__(float)

    def add(self, other: Mapping[str, float]) -> None:
        """More of them."""
        for name, seconds in other.items():
            self[name] += seconds


class CallCounts(defaultdict[str, "tuple[int, int]"]):
    """By name how often PyTorch called a hook that was the first of its module, and others."""

    def __init__(self) -> None:
        super().__init__(lambda: (0, 0))

    def add(self, other: Mapping[str, tuple[int, int]]) -> None:
        """More of them."""
        for name, (first, further) in other.items():
            mine = self[name]
            self[name] = mine[0] + first, mine[1] + further


class CallCost:
    """What PyTorch takes to call a hook: the first of a module, which it calls another way from then on, and any other."""

    def __init__(self) -> None:
        self._times: tuple[deque[float], ...] = tuple(deque(maxlen=32) for _ in range(3))
        self._turn = 0

    def probed(self) -> CallCost:
        """Times one call more, of a module with no hook, with one, or with two; returns itself.

        One, for the next would find in the caches what this one left there. A call from within a training takes several times what
        it takes in a loop.
        """
        if not has_global_hooks():  # type: ignore[no-untyped-call]  # of the user, who knows nothing of these modules
            self._turn = (self._turn + 1) % 3
            module = _modules()[self._turn]
            started = perf_counter()
            module(None)
            self._times[self._turn].append(perf_counter() - started)
        return self

    def cost(self, first: int, further: int) -> float:
        """Seconds of so many calls."""
        if not all(self._times):
            return 0.0
        none, one, two = map(median, self._times)
        lone = max(0.0, one - none)
        return first * lone + further * min(lone, max(0.0, two - one))


def _modules() -> list[nn.Module]:
    if not _probes:
        for hooks in range(3):
            _probes.append(nn.Identity())
            for _ in range(hooks):
                _probes[-1].register_forward_hook(Hook(_nothing), with_kwargs=True)
    return _probes


_probes: list[nn.Module] = []


def _nothing(*_: Any) -> None:
    """A hook."""


class Sample:
    """A step that is being measured: the timed versions, what they found, and how to take them away again."""

    def __init__(self, busy: bool) -> None:
        self.busy, self.open = busy, True
        self._started: float | None = None
        self.ended = self.upkeep = 0.0
        self.seconds, self.ways = Seconds(), CallCounts()
        self.pairs: list[tuple[Any, Any]] = []
        self._mark = _event_maker()
        self._lock = threading.Lock()
        self._undo: list[tuple[weakref.ref[Any], str]] = []

    def begin(self, monitors: Mapping[str, Any], counting: Any = None) -> float:
        """The step begins with the moment that is returned; `counting` is the handle of the clock's own hook."""
        watched: set[int] = set()
        if counting is not None and isinstance(hook := hook_of(counting), Hook):
            self._stand_in(hook, "run", self._timed(CLOCK, hook.usual, (1, 0)))
        for name, monitor in monitors.items():
            for handle in monitor.all_handles():
                hook = hook_of(handle)
                if isinstance(hook, Hook):
                    first = handle in monitor._handles and id(monitor.module) not in watched
                    watched.add(id(monitor.module))
                    self._stand_in(hook, "run", self._timed(name, hook.usual, (1, 0) if first else (0, 1)))
            for entrance in ENTRANCES:
                if hasattr(monitor, entrance):
                    way = (0, 1) if entrance == "_arrived" else (0, 0)
                    self._stand_in(monitor, entrance, self._timed_method(name, monitor, entrance, way))
            for moment in MOMENTS:
                if hasattr(monitor, moment):
                    self._stand_in(monitor, moment, self._timed_moment(name, monitor, moment))
        _open.add(self)
        self._started = perf_counter()
        return self._started

    def end(self) -> float | None:
        """Seconds that the step took; None where its beginning was interrupted."""
        self.ended = perf_counter()
        self.close()
        return None if self._started is None else self.ended - self._started

    def close(self) -> None:
        """Takes all timed versions away."""
        self.open = False
        _open.discard(self)
        for ref, attr in self._undo:
            owner = ref()
            if isinstance(owner, Hook):
                owner.run = owner.usual
            elif owner is not None:
                vars(owner).pop(attr, None)

    def _stand_in(self, owner: Any, attr: str, timed: Callable[..., Any]) -> None:
        self._undo.append((weakref.ref(owner), attr))
        setattr(owner, attr, timed)

    def _timed(self, name: str, call: Callable[..., Any], way: tuple[int, int] = (0, 0)) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            outer = _inside.sample
            if not self.open or (outer is not None and outer.open):  # a hook within a hook's work is part of it
                return call(*args)
            _inside.sample = self
            started, mark = perf_counter(), self.begun()
            try:
                return call(*args)
            finally:
                _inside.sample = outer
                self.spent({name: 1.0}, started, mark, way)

        return timed

    def _timed_method(self, name: str, monitor: Any, attr: str, way: tuple[int, int] = (0, 0)) -> Callable[..., Any]:
        method, ref = getattr(type(monitor), attr), weakref.ref(monitor)  # a monitor is freed without the cycle collector
        return self._timed(name, lambda *args: method(ref(), *args), way)

    def _timed_moment(self, name: str, monitor: Any, moment: str) -> Callable[..., Any]:
        timed = self._timed_method(name, monitor, moment)

        def told(*args: Any) -> None:
            step_batch = args[-1]
            gathered = _gathered.get(step_batch)
            if gathered is None:
                gathered = _gathered[step_batch] = _Gathered(step_batch)
            gathered.giver = self, name
            try:
                timed(*args)
            finally:
                gathered.giver = None

        return told

    def begun(self) -> Any:
        """Marks this moment on the device, where there is one."""
        return None if self._mark is None else self._mark()

    def spent(self, shares: Mapping[str, float], started: float, mark: Any, way: tuple[int, int] = (0, 0)) -> None:
        """Shares out what was spent since then, by name."""
        seconds, ended = perf_counter() - started, None if mark is None else self.begun()
        with self._lock:
            for name, share in shares.items():
                if any(way):
                    self.ways.add({name: way})
                if name == CLOCK:
                    self.upkeep += seconds * share
                else:
                    self.seconds[name] += seconds * share
            if ended is not None and shares:
                self.pairs.append((mark, ended))


class _Gathered:
    """What is gathered at one moment, to be reduced together. The time that takes is shared out by elements.

    Timed versions of what gathers and what reduces stand in until it is reduced.
    """

    def __init__(self, step_batch: StepBatch) -> None:
        self.giver: tuple[Sample, str] | None = None  # whose monitor is told now; None for what is not measured
        self._elements: Counter[tuple[Sample, str] | None] = Counter()
        self._together = weakref.ref(step_batch)
        vars(step_batch).update(accepts=self._accepts, record=self._record)

    def _accepts(self, x: Tensor) -> bool:
        step_batch = self._together()
        taken = step_batch is not None and type(step_batch).accepts(step_batch, x)
        if taken:
            self._elements[self.giver] += x.numel()
        return taken

    def _record(self) -> None:
        step_batch = self._together()
        if step_batch is None:
            return
        givers = {giver[0]: giver[0].begun() for giver in self._elements if giver is not None}
        outer, _inside.sample = _inside.sample, next(iter(givers), None)
        started = perf_counter()
        try:
            type(step_batch).record(step_batch)
        finally:
            _inside.sample = outer
            for attr in ("record", "accepts"):
                vars(step_batch).pop(attr, None)
            total = self._elements.total()
            for sample, mark in givers.items():
                mine = {giver[1]: count / total for giver, count in self._elements.items() if giver and giver[0] is sample}
                sample.spent(mine, started, mark)


_gathered: WeakKeyDictionary[StepBatch, _Gathered] = WeakKeyDictionary()


class _Inside(threading.local):
    """The sample for which this thread is being timed."""

    sample: Sample | None = None


_inside = _Inside()


_open: WeakSet[Sample] = WeakSet()


def hook_started() -> tuple[float, dict[Sample, float]] | None:
    """An optimizer begins to tell of its step; None unless that is timed."""
    return (perf_counter(), {sample: sum(sample.seconds.values()) for sample in _open}) if len(_open) else None


def hook_ended(entry: tuple[float, dict[Sample, float]] | None) -> None:
    """It ends: what that took beyond what its monitors did."""
    if entry is not None:
        took = perf_counter() - entry[0]
        for sample, before in entry[1].items():
            sample.upkeep += max(0.0, took - sum(sample.seconds.values()) + before)
            sample.ways.add({CLOCK: (0, 1)})


def _event_maker() -> Callable[[], Any] | None:
    """Makes what marks this moment on the CUDA stream in use, without waiting for it; None where no device is."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None

    def mark() -> Any:
        if torch.cuda.is_current_stream_capturing():  # what is captured does not run now
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    return mark
