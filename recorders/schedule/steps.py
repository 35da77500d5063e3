"""Optimizer steps, told to the monitors that sit on the modules whose parameters they change."""

from __future__ import annotations

import itertools
import sys
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from recorders.capture.calls import around, keep, kept
from recorders.schedule.stopwatch import entered, left

if TYPE_CHECKING:
    from recorders.capture.batching import Together

__all__ = ["StepHandle", "StepMonitor", "count_steps"]


class StepMonitor(Protocol):
    """What is told of a step.

    `mine` are the ids of the parameters that the optimizer holds; what is given to `together` is reduced once all were told.
    """

    def _before_step(self, module: nn.Module, optimizer: Optimizer, mine: set[int], together: Together) -> None:
        """The optimizer is about to change those of `mine`."""

    def _at_gradients(self, module: nn.Module, optimizer: Optimizer, mine: set[int], together: Together) -> None:
        """The gradients of `mine` are what the optimizer uses: just before its step, or after one that a closure served."""

    def _after_step(self, module: nn.Module, optimizer: Optimizer, mine: set[int], together: Together) -> None:
        """The optimizer has changed those of `mine`."""


class StepCounter(Protocol):
    """What counts the steps of an optimizer."""

    def advance(self) -> None:
        """A step has ended."""


class _Step:
    """A step under way. What happens in it to the parameters that its optimizer holds is part of this step."""

    def __init__(self, mine: set[int], frame: FrameType) -> None:
        self.mine = mine
        self.around: list[_Step] = [outer for outer in around(frame, _STEP) if not mine.isdisjoint(outer.mine)]
        self.own = mine.difference(*(outer.mine for outer in self.around))
        self.clocks: dict[Any, None] = {}
        self.inner: Optimizer | None = None

    def take(self, step: _Step, clocks: dict[Any, None], optimizer: Optimizer) -> None:
        """A step within this one has ended: its clocks advance at the end of this one."""
        self.clocks |= clocks
        if self.inner is None and self.mine <= step.mine:
            self.inner = optimizer


class _Told(OrderedDict[int, tuple["weakref.ref[nn.Module]", "weakref.ref[Any]"]]):
    """Module and monitor by handle. What is taken out of it for a while, as hooks are that are not due, is not told of steps."""

    ordered = False


class _Steps:
    """One pair of hooks on all optimizers of the process, on while any monitor wants them.

    It keeps its monitors alive as long as their modules live; they hold the modules weakly. Optimizers step within steps of others
    that hold the same parameters: those that wrap another one, or call the step of their base class. The outermost step counts.
    """

    def __init__(self) -> None:
        self.monitors: WeakKeyDictionary[nn.Module, list[StepMonitor]] = WeakKeyDictionary()
        self.told = _Told()
        self.clocks: WeakKeyDictionary[Optimizer, WeakSet[Any]] = WeakKeyDictionary()
        self.handles: list[Any] = []

    def add(self, module: nn.Module, monitor: StepMonitor) -> None:
        self.monitors.setdefault(module, []).append(monitor)
        self._wake()

    def count(self, optimizer: Optimizer, clock: StepCounter) -> None:
        self.clocks.setdefault(optimizer, WeakSet()).add(clock)
        self._wake()

    def _wake(self) -> None:
        if not self.handles:
            self.handles = [register_optimizer_step_pre_hook(self.before), register_optimizer_step_post_hook(self.after)]

    def drop(self, module: nn.Module | None, monitor: StepMonitor) -> None:
        if module is not None and module in self.monitors:
            self.monitors[module].remove(monitor)
            if not self.monitors[module]:
                del self.monitors[module]
        self._rest()

    def _rest(self) -> None:
        for optimizer in [optimizer for optimizer, clocks in self.clocks.items() if not clocks]:
            del self.clocks[optimizer]
        if not self.monitors and not self.clocks:
            for handle in self.handles:
                handle.remove()
            self.handles = []

    def before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        entry, frame = entered(), sys._getframe(1)
        step = _Step(_mine(optimizer), frame)
        keep(frame, _STEP, step)
        if step.own:
            self._tell(step.own, optimizer, "_before_step", *([] if _has_closure(args, kwargs) else ["_at_gradients"]))
        left(entry)

    def after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        entry, frame = entered(), sys._getframe(1)
        step = kept(frame, _STEP) or _Step(_mine(optimizer), frame)  # hooks may have been put on in the middle of it
        clocks = step.clocks if _skipped(optimizer) else step.clocks | self._clocks_of(optimizer)
        if step.around and not step.own:
            step.around[-1].take(step, clocks, optimizer)
            return
        if _has_closure(args, kwargs):
            self._tell(step.own, optimizer, "_at_gradients")
        if not _skipped(optimizer):
            self._tell(step.own, step.inner or optimizer, "_after_step")  # the one that steps in the end keeps its state itself
        left(entry)
        for clock in clocks:  # after the monitors: what they saw belongs to the step that ends
            clock.advance()

    def _clocks_of(self, optimizer: Optimizer) -> dict[Any, None]:
        """Those of `optimizer`, and of others that share its groups of parameters: one of them wraps the other."""
        groups = [id(group) for group in optimizer.param_groups]
        return {
            clock: None
            for other, clocks in self.clocks.items()
            if other is optimizer or [id(group) for group in other.param_groups] == groups
            for clock in clocks
        }

    def _tell(self, mine: set[int], optimizer: Optimizer, *moments: str) -> None:
        self._rest()  # the last modules may have died
        if _skipped(optimizer):
            return
        from recorders.capture.batching import Together  # which needs the clock, which counts steps

        together = Together()
        try:
            for number, (module_ref, monitor_ref) in list(self.told.items()):
                module, monitor = module_ref(), monitor_ref()
                if module is None or monitor is None:
                    self.told.pop(number, None)
                    continue
                for moment in moments:
                    getattr(monitor, moment)(module, optimizer, mine, together)
        finally:  # one of them may raise, and the others have seen what they have seen
            together.record()


class StepHandle:
    """Puts a monitor on the steps of all optimizers; like the handle of a hook, `remove` takes it off.

    What is taken out of the dictionary that `hooks_dict_ref` returns is told of no step until it is put back.
    """

    def __init__(self, module: nn.Module, monitor: StepMonitor) -> None:
        self.module, self.monitor = weakref.ref(module), weakref.ref(monitor)
        self.id = next(_numbers)
        _steps.add(module, monitor)
        _steps.told[self.id] = self.module, self.monitor

    @staticmethod  # which holds no monitor
    def hooks_dict_ref() -> OrderedDict[int, Any]:
        return _steps.told

    def remove(self) -> None:
        _steps.told.pop(self.id, None)
        monitor = self.monitor()
        if monitor is not None:
            _steps.drop(self.module(), monitor)


def count_steps(optimizer: Optimizer, clock: StepCounter) -> None:
    """From now on `clock` is advanced after every step of `optimizer`. Both are held weakly."""
    _steps.count(optimizer, clock)


_steps = _Steps()
_numbers = itertools.count()
_STEP = "step of recorders"


def _mine(optimizer: Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _has_closure(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether `step` was given a closure, which makes the gradients itself: they are there only afterwards."""
    return kwargs.get("closure") is not None or any(argument is not None for argument in args[1:2])


def _skipped(optimizer: Optimizer) -> bool:
    """Whether a fused optimizer was told that this step overflowed. Only on the CPU: elsewhere to ask would synchronise."""
    found = getattr(optimizer, "found_inf", None)
    return isinstance(found, Tensor) and found.device.type == "cpu" and bool(found.item())
