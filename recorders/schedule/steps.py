"""Optimizer steps, told to the monitors that sit on the modules whose parameters they change."""

from __future__ import annotations

import itertools
import operator
import sys
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from recorders._torch import break_graph, compile_always, never_trace, outside_modes, skip_frames
from recorders.capture.batching import StepBatch
from recorders.schedule.stopwatch import HookTiming, TimedStepBatch, Timer, open_samples
from recorders.schedule.under_way import Step, StepCounter, StepsUnderWay

__all__ = ["StepHandle", "StepMonitor", "count_steps", "stop_counting"]


class StepMonitor(Protocol):
    """A monitor of optimizer steps.

    `mine` are the ids of the parameters that the optimizer holds. What is put into `step_batch` is reduced once all monitors were
    notified.

    Attributes:
        counts: how often it was called, and why nothing was recorded.
        timer: set while a measured step times it.
    """

    counts: dict[str, int]
    timer: Timer | None

    def _before_step(self, module: nn.Module, optimizer: Optimizer, mine: set[int], step_batch: StepBatch) -> None:
        """The optimizer is about to change those of `mine`."""

    def _at_gradients(self, module: nn.Module, optimizer: Optimizer, mine: set[int], step_batch: StepBatch) -> None:
        """The gradients of `mine` are what the optimizer uses: just before its step, or after one that a closure served."""

    def _after_step(self, module: nn.Module, optimizer: Optimizer, mine: set[int], step_batch: StepBatch) -> None:
        """The optimizer has changed those of `mine`."""


class _Listeners(OrderedDict[int, tuple["weakref.ref[nn.Module]", "weakref.ref[Any]"]]):
    """Module and monitor by handle. Like hooks, they are taken out in steps in which their monitor is not due."""

    ordered = False


class _Steps:
    """One pair of hooks on all optimizers of the process, on while any monitor wants them.

    It keeps its monitors alive as long as their modules live; they hold the modules weakly.

    The hooks are plain Python in a compiled training too. `torch.compile(optimizer.step)` would trace the function of PyTorch that
    calls them, and with it the hooks; while they are on that function runs as plain Python, and what is compiled is the `step` that
    it wraps. If a function of the user that calls `step` is compiled, the graph ends before that call, as it does anyway with those
    optimizers of PyTorch that break the graph. If the user demands one graph, nothing is recorded in it, and the report says so.
    """

    def __init__(self) -> None:
        self.monitors: WeakKeyDictionary[nn.Module, list[StepMonitor]] = WeakKeyDictionary()
        self.listeners = _Listeners()
        self.clocks: list[tuple[weakref.ref[Optimizer], weakref.ref[StepCounter]]] = []
        self.handles: list[Any] = []
        self._seen: set[type[Optimizer]] = set()

    def add(self, module: nn.Module, monitor: StepMonitor) -> None:
        self.monitors.setdefault(module, []).append(monitor)
        self._install_hooks()

    def count(self, optimizer: Optimizer, clock: StepCounter) -> None:
        if not any(counted() is optimizer and counter() is clock for counted, counter in self.clocks):
            self.clocks = [*self.clocks, (weakref.ref(optimizer), weakref.ref(clock))]
        self._install_hooks()

    def stop_counting(self, clock: StepCounter) -> None:
        self.clocks = [pair for pair in self.clocks if pair[1]() is not clock]
        self._remove_unused_hooks()

    def _install_hooks(self) -> None:
        if not self.handles:
            self.handles = [register_optimizer_step_pre_hook(self.before), register_optimizer_step_post_hook(self.after)]
            skip_frames(_STEP_CALL, True)

    def drop(self, module: nn.Module | None, monitor: StepMonitor) -> None:
        if module is not None and module in self.monitors:
            self.monitors[module].remove(monitor)
            if not self.monitors[module]:
                del self.monitors[module]
        self._remove_unused_hooks()

    def _remove_unused_hooks(self) -> None:
        """Takes the hooks off if nobody wants them any more: modules, optimizers and clocks may have died."""
        if any(optimizer() is None or clock() is None for optimizer, clock in self.clocks):
            self.clocks = [pair for pair in self.clocks if pair[0]() is not None and pair[1]() is not None]
        if not self.monitors and not self.clocks:
            for handle in self.handles:
                handle.remove()
            self.handles = []
            skip_frames(_STEP_CALL, False)

    def before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if is_dynamo_compiling():
            if not break_graph():
                _tell_of_one_graph()
            return
        timing = HookTiming() if open_samples else None
        steps = _under_way.steps
        if steps or self.listeners or type(optimizer) not in self._seen:
            self._before(optimizer, sys._getframe(1), args, kwargs)
        else:  # only clocks are attached; what a call costs here, every step of every optimizer pays
            steps.append(Step(optimizer=weakref.ref(optimizer), frame=id(sys._getframe(1))))
        if timing is not None:
            timing.end()

    def _before(self, optimizer: Optimizer, frame: FrameType, args: Any, kwargs: Any) -> None:
        if type(optimizer) not in self._seen:
            compile_always(type(optimizer).step)
            self._seen.add(type(optimizer))
        step = _under_way.begin(optimizer, frame)
        if self.listeners and step.own and not _skipped(optimizer):
            self._notify(step.own, optimizer, "_before_step", *([] if _has_closure(args, kwargs) else ["_at_gradients"]))

    def after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if is_dynamo_compiling():
            return
        timing = HookTiming() if open_samples else None
        frame, steps = sys._getframe(1), _under_way.steps
        if self.listeners or len(steps) != 1 or steps[0].frame != id(frame) or "found_inf" in vars(optimizer):
            clocks = self._after(optimizer, frame, args, kwargs)
        else:
            clocks = self._clocks_of(optimizer, steps.pop().clocks)
        if timing is not None:
            timing.end()
        for clock in clocks:  # after the monitors: what they saw belongs to the step that ends
            clock.advance()
        if not clocks:
            self._remove_unused_hooks()

    def _after(self, optimizer: Optimizer, frame: FrameType, args: Any, kwargs: Any) -> Sequence[StepCounter]:
        """Returns the clocks that the step advances."""
        step = _under_way.end(optimizer, frame)
        skipped = _skipped(optimizer)
        if not skipped:
            step.clocks = self._clocks_of(optimizer, step.clocks)
        owner = step.owner if step.outer else None
        if owner is not None:
            owner.take(step, optimizer)
        elif self.listeners and not skipped:
            if _has_closure(args, kwargs):
                self._notify(step.own, optimizer, "_at_gradients")
            inner = None if step.inner is None else step.inner()
            self._notify(step.own, inner or optimizer, "_after_step")  # the one that steps in the end keeps its state itself
        return step.clocks

    def _clocks_of(self, optimizer: Optimizer, found: Sequence[StepCounter]) -> Sequence[StepCounter]:
        """Those found, and those attached to `optimizer` or to one that shares its parameter groups, as wrappers do."""
        clocks = list(found)
        for counted, counter in self.clocks:
            other = counted()
            if other is optimizer or (other is not None and _share_groups(other, optimizer)):
                clock = counter()
                if clock is not None and clock not in clocks:
                    clocks.append(clock)
        return clocks

    def _notify(self, mine: set[int], optimizer: Optimizer, *moments: str) -> None:
        outside_modes(self._notify_all, mine, optimizer, moments)

    def _notify_all(self, mine: set[int], optimizer: Optimizer, moments: tuple[str, ...]) -> None:
        step_batch = TimedStepBatch() if open_samples else StepBatch()
        try:
            for number, (module_ref, monitor_ref) in list(self.listeners.items()):
                module, monitor = module_ref(), monitor_ref()
                if module is None or monitor is None:
                    self.listeners.pop(number, None)
                    continue
                for moment in moments:
                    notify = getattr(monitor, moment)
                    if isinstance(step_batch, TimedStepBatch):
                        step_batch.notify(monitor.timer, notify, module, optimizer, mine)
                    else:
                        notify(module, optimizer, mine, step_batch)
        except Exception:  # one of them may raise, and the others have seen what they have seen; nothing if the user interrupts
            step_batch.record()
            raise
        step_batch.record()


class StepHandle:
    """Puts a monitor on the steps of all optimizers; like the handle of a hook, `remove` takes it off.

    What is taken out of the dictionary that `hooks_dict_ref` returns is told of no step until it is put back.
    """

    def __init__(self, module: nn.Module, monitor: StepMonitor) -> None:
        self.module, self.monitor = weakref.ref(module), weakref.ref(monitor)
        self.id = next(_numbers)
        _steps.add(module, monitor)
        _steps.listeners[self.id] = self.module, self.monitor

    @staticmethod  # which holds no monitor
    def hooks_dict_ref() -> OrderedDict[int, Any]:
        return _steps.listeners

    def remove(self) -> None:
        _steps.listeners.pop(self.id, None)
        monitor = self.monitor()
        if monitor is not None:
            _steps.drop(self.module(), monitor)


def count_steps(optimizer: Optimizer, clock: StepCounter) -> None:
    """From now on `clock` is advanced after every step of `optimizer`. Both are held weakly."""
    _steps.count(optimizer, clock)


def stop_counting(clock: StepCounter) -> None:
    """No optimizer advances `clock` any more."""
    _steps.stop_counting(clock)


IN_ONE_GRAPH = "its optimizer steps inside a graph made with fullgraph=True"
_steps = _Steps()
_numbers = itertools.count()
_under_way = StepsUnderWay()
_STEP_CALL = Optimizer.profile_hook_step(lambda: None).__code__  # what PyTorch wraps each `step` in, and calls the hooks

never_trace(_Steps.before)
never_trace(_Steps.after)


def _tell_of_one_graph() -> None:
    """Called while Dynamo traces, which runs it as plain Python, once a graph."""
    for monitors in _steps.monitors.values():
        for monitor in monitors:
            monitor.counts[IN_ONE_GRAPH] = monitor.counts.get(IN_ONE_GRAPH, 0) + 1


_tell_of_one_graph._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as torch._dynamo.assume_constant_result does


def _share_groups(one: Optimizer, other: Optimizer) -> bool:
    mine, theirs = one.param_groups, other.param_groups
    return len(mine) == len(theirs) and all(map(operator.is_, mine, theirs))


def _has_closure(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether `step` was given a closure, which makes the gradients itself: they are there only afterwards."""
    return kwargs.get("closure") is not None or any(argument is not None for argument in args[1:2])


def _skipped(optimizer: Optimizer) -> bool:
    """Whether a fused optimizer was told that this step overflowed. Only on the CPU: elsewhere to ask would synchronise."""
    found = vars(optimizer).get("found_inf")
    return isinstance(found, Tensor) and found.device.type == "cpu" and bool(found.item())
