"""A step that is timed: what monitors do in it, on the host and on the device.

For that step, timed versions stand in for the entrances of the monitors: what hooks call, what takes gradients, pushes, lifts of
compiled graphs and optimizer steps. In all others nothing is timed, and no time is read.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from recorders.constructor import Hook

if TYPE_CHECKING:
    from recorders.batched import Together
    from recorders.monitor import Monitor

__all__ = ["Sample", "Seconds"]

ENTRANCES = ("_arrived", "_observed", "_pushed", "take", "tick")
MOMENTS = ("_before_step", "_at_gradients", "_after_step")


class Seconds(defaultdict[str, float]):
    """Seconds by name."""

    def __init__(self) -> None:
        super().__init__(float)

    def add(self, other: Mapping[str, float]) -> None:
        """More of them."""
        for name, seconds in other.items():
            self[name] += seconds


class Sample:
    """A step that is being measured: the timed versions, what they found, and how to take them away again."""

    def __init__(self, busy: bool) -> None:
        self.busy, self.open = busy, True
        self._started: float | None = None
        self.seconds = Seconds()
        self.pairs: list[tuple[Any, Any]] = []
        self._mark = _event_maker()
        self._lock = threading.Lock()
        self._undo: list[tuple[weakref.ref[Any], str]] = []

    def begin(self, monitors: Mapping[str, Monitor]) -> None:
        for name, monitor in monitors.items():
            for handle in [*monitor._handles, *getattr(monitor, "_hooked", {}).values()]:
                hook = _hook_of(handle)
                if hook is not None:
                    self._stand_in(hook, "run", self._timed(name, hook.usual))
            for entrance in ENTRANCES:
                if hasattr(monitor, entrance):
                    self._stand_in(monitor, entrance, self._timed_method(name, monitor, entrance))
            for moment in MOMENTS:
                if hasattr(monitor, moment):
                    self._stand_in(monitor, moment, self._timed_moment(name, monitor, moment))
        self._started = perf_counter()

    def end(self) -> float | None:
        """Seconds that the step took; None where its beginning was interrupted."""
        seconds = None if self._started is None else perf_counter() - self._started
        self.close()
        return seconds

    def close(self) -> None:
        """Takes all timed versions away."""
        self.open = False
        for ref, attr in self._undo:
            owner = ref()
            if isinstance(owner, Hook):
                owner.run = owner.usual
            elif owner is not None:
                vars(owner).pop(attr, None)

    def _stand_in(self, owner: Any, attr: str, timed: Callable[..., Any]) -> None:
        self._undo.append((weakref.ref(owner), attr))
        setattr(owner, attr, timed)

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
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
                self.spent({name: 1.0}, started, mark)

        return timed

    def _timed_method(self, name: str, monitor: Monitor, attr: str) -> Callable[..., Any]:
        method, ref = getattr(type(monitor), attr), weakref.ref(monitor)  # a monitor is freed without the cycle collector
        return self._timed(name, lambda *args: method(ref(), *args))

    def _timed_moment(self, name: str, monitor: Monitor, moment: str) -> Callable[..., Any]:
        timed = self._timed_method(name, monitor, moment)

        def told(*args: Any) -> None:
            together = args[-1]
            gathered = _gathered.get(together)
            if gathered is None:
                gathered = _gathered[together] = _Gathered(together)
            gathered.giver = self, name
            try:
                timed(*args)
            finally:
                gathered.giver = None

        return told

    def begun(self) -> Any:
        """Marks this moment on the device, where there is one."""
        return None if self._mark is None else self._mark()

    def spent(self, shares: Mapping[str, float], started: float, mark: Any) -> None:
        """Shares out what was spent since then."""
        seconds, ended = perf_counter() - started, None if mark is None else self.begun()
        with self._lock:
            for name, share in shares.items():
                self.seconds[name] += seconds * share
            if ended is not None and shares:
                self.pairs.append((mark, ended))


class _Gathered:
    """What is gathered at one moment, to be reduced together. The time that takes is shared out by elements.

    Timed versions of what batchable and what reduces stand in until it is reduced.
    """

    def __init__(self, together: Together) -> None:
        self.giver: tuple[Sample, str] | None = None  # whose monitor is told now; None for what is not measured
        self._elements: Counter[tuple[Sample, str] | None] = Counter()
        self._together = weakref.ref(together)
        vars(together).update(takes=self._takes, record=self._record)

    def _takes(self, x: Tensor) -> bool:
        together = self._together()
        taken = together is not None and type(together).takes(together, x)
        if taken:
            self._elements[self.giver] += x.numel()
        return taken

    def _record(self) -> None:
        together = self._together()
        if together is None:
            return
        givers = {giver[0]: giver[0].begun() for giver in self._elements if giver is not None}
        outer, _inside.sample = _inside.sample, next(iter(givers), None)
        started = perf_counter()
        try:
            type(together).record(together)
        finally:
            _inside.sample = outer
            for attr in ("record", "takes"):
                vars(together).pop(attr, None)
            total = self._elements.total()
            for sample, mark in givers.items():
                mine = {giver[1]: count / total for giver, count in self._elements.items() if giver and giver[0] is sample}
                sample.spent(mine, started, mark)


_gathered: WeakKeyDictionary[Together, _Gathered] = WeakKeyDictionary()


class _Inside(threading.local):
    """The sample for which this thread is being timed."""

    sample: Sample | None = None


_inside = _Inside()


def _hook_of(handle: Any) -> Hook | None:
    """The hook object behind the handle that PyTorch gave for it; there is none behind that of optimizer steps."""
    hooks = handle.hooks_dict_ref() if hasattr(handle, "hooks_dict_ref") else None
    hook = None if hooks is None else hooks.get(handle.id)
    return hook if isinstance(hook, Hook) else None


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
