"""Notifies monitors of the optimizer steps that change the parameters of their modules."""

from __future__ import annotations

import itertools
import operator
import sys
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any, ClassVar, Protocol
from weakref import WeakKeyDictionary

from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from recorders._torch import STEP_CODE, step_was_skipped
from recorders._torch.compiler import break_graph, compile_always, never_trace, skip_frames
from recorders.capture.batching import StepBatch
from recorders.capture.entering import failure_of, guarded
from recorders.capture.switching import SWITCHING
from recorders.schedule import standing
from recorders.schedule.forgotten import tell_forgotten, warnings_due
from recorders.schedule.listeners import Listeners
from recorders.schedule.planned import StepPlans
from recorders.schedule.readings import Reading
from recorders.schedule.under_way import Step, StepCounter, StepsUnderWay
from reducers._torch import constant_in_graphs

__all__ = [
    "StepHandle",
    "StepMonitor",
    "count_steps",
    "monitors_of_steps",
    "parameters_watched",
    "stop_counting",
    "watch_for_standing",
]


class StepMonitor(Protocol):
    """A monitor of optimizer steps.

    `mine` are the ids of the optimizer's parameters. Observations that are put into `step_batch` are reduced when all monitors were
    notified.

    Attributes:
        counts: the number of calls, and by reason the number of calls that were not recorded.
        absence: why nothing is recorded of a parameter of which there is nothing to read.
    """

    counts: dict[str, int]
    absence: ClassVar[str]

    def _reading(self, moment: str) -> Reading | None:
        """Returns what is read at the moment that a method of this name is called for; None if it has to be called."""

    def _before_step(self, module: nn.Module, optimizer: Optimizer, mine: set[int], step_batch: StepBatch) -> None:
        """Is called before the optimizer changes the parameters of `mine`."""

    def _at_gradients(self, module: nn.Module, optimizer: Optimizer, mine: set[int], step_batch: StepBatch) -> None:
        """Is called when the gradients of `mine` are final: before a step, or after a step with a closure."""

    def _after_step(self, module: nn.Module, optimizer: Optimizer, mine: set[int], step_batch: StepBatch) -> None:
        """Is called when the optimizer has changed the parameters of `mine`."""


class _Steps:
    """One pair of hooks on all optimizers of the process, which do nothing while no monitor and no clock needs them.

    Monitors live as long as their modules: this object keeps them alive, and they hold their modules weakly.

    The hooks are put on once, for good: PyTorch walks through the dictionary of hooks, and raises in the user's `step` if another
    thread, or a hook, puts one in or takes one out meanwhile.

    The hooks are plain Python in a compiled training too. `torch.compile(optimizer.step)` would trace the function of PyTorch that
    calls them, and so the hooks. While the hooks are on, that function runs as plain Python, and the `step` that it wraps is
    compiled. If the user compiles a function that calls `step`, its graph ends before that call, as it does in any case for those
    optimizers of PyTorch that break the graph. If the user demands one graph, nothing of the step is recorded; the report says so.
    """

    def __init__(self) -> None:
        self.monitors: WeakKeyDictionary[nn.Module, list[StepMonitor]] = WeakKeyDictionary()
        self.listeners = Listeners()
        self.clocks: list[tuple[weakref.ref[Optimizer], weakref.ref[StepCounter]]] = []
        self.active = False  # whether the hooks do anything
        self._installed = False
        self._plans = StepPlans()
        self._seen: set[type[Optimizer]] = set()

    def add(self, module: nn.Module, monitor: StepMonitor) -> None:
        with SWITCHING:
            self.monitors.setdefault(module, []).append(monitor)
            self._activate()

    def count(self, optimizer: Optimizer, clock: StepCounter) -> None:
        with SWITCHING:
            if not any(counted() is optimizer and counter() is clock for counted, counter in self.clocks):
                self.clocks = [*self.clocks, (weakref.ref(optimizer), weakref.ref(clock))]
            self._activate()

    def stop_counting(self, clock: StepCounter) -> None:
        with SWITCHING:
            self.clocks = [pair for pair in self.clocks if pair[1]() is not clock]
            self._deactivate_unused()

    def install(self) -> None:
        """Puts the hooks on, which do nothing by themselves."""
        if not self._installed:
            self._installed = True
            register_optimizer_step_pre_hook(self.before)
            register_optimizer_step_post_hook(self.after)

    def _activate(self) -> None:
        self.install()
        if not self.active:
            self.active = True
            skip_frames(STEP_CODE, True)

    def drop(self, module: nn.Module | None, monitor: StepMonitor) -> None:
        with SWITCHING:
            found = None if module is None else self.monitors.get(module)
            if module is not None and found is not None and monitor in found:
                found.remove(monitor)
                if not found:
                    del self.monitors[module]
            self._deactivate_unused()

    def _deactivate_unused(self) -> None:
        """Lets the hooks do nothing if no monitor and no clock is left: modules, optimizers and clocks may have been freed."""
        with SWITCHING:
            if any(optimizer() is None or clock() is None for optimizer, clock in self.clocks):
                self.clocks = [pair for pair in self.clocks if pair[0]() is not None and pair[1]() is not None]
            if self.active and not self.monitors and not self.clocks:
                self.active = False
                skip_frames(STEP_CODE, False)

    def before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self.active:
            return
        if is_dynamo_compiling():
            if not break_graph():
                _count_lost_steps()
            return
        _pass_on(guarded(_HERE, self._begin, optimizer, sys._getframe(1), args, kwargs))

    def _begin(self, optimizer: Optimizer, frame: FrameType, args: Any, kwargs: Any) -> Exception | None:
        """Begins a step; returns what a monitor raised because the user asks for it."""
        steps, failed = _under_way.steps, None
        if steps or self.listeners or type(optimizer) not in self._seen:
            failed = self._before(optimizer, frame, args, kwargs)
        else:  # only clocks are attached; no further call, because every step of every optimizer would pay for it
            steps.append(Step(optimizer=weakref.ref(optimizer), frame=id(frame)))
        return failed

    def _before(self, optimizer: Optimizer, frame: FrameType, args: Any, kwargs: Any) -> Exception | None:
        if type(optimizer) not in self._seen:
            self._seen.add(type(optimizer))
            compile_always(type(optimizer).step)
        step = _under_way.begin(optimizer, frame)
        if self.listeners and step.own and not step_was_skipped(optimizer):
            return self._notify(step.own, optimizer, "_before_step", *([] if _has_closure(args, kwargs) else ["_at_gradients"]))
        return None

    def after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not (self.active or standing.clocks) or is_dynamo_compiling():
            return
        failed = guarded(_HERE, self._end, optimizer, sys._getframe(1), args, kwargs) if self.active else None
        if standing.clocks:
            failed = failed or failure_of(_HERE, standing.tell, optimizer)
        _pass_on(failed)

    def _end(self, optimizer: Optimizer, frame: FrameType, args: Any, kwargs: Any) -> Exception | None:
        """Ends a step, for all monitors and clocks; returns what one of them raised because the user asks for it."""
        clocks, failed, steps = list[StepCounter](), None, _under_way.steps
        if self.listeners or len(steps) != 1 or steps[0].frame != id(frame) or step_was_skipped(optimizer):
            failed = self._after(optimizer, frame, args, kwargs, clocks)
        else:
            clocks += self._clocks_of(optimizer, steps.pop().clocks)
        for clock in clocks:  # after the monitors, whose observations belong to the step that ends
            failed = failure_of(_HERE, clock.advance) or failed
        if not clocks:
            self._deactivate_unused()
        if warnings_due:
            failed = failure_of(_HERE, tell_forgotten, optimizer) or failed
        return failed

    def _after(self, optimizer: Optimizer, frame: FrameType, args: Any, kwargs: Any, clocks: list[StepCounter]) -> Exception | None:
        """Notifies the monitors of the end of the step; adds the clocks that advance now to `clocks`."""
        failed = None
        step = _under_way.end(optimizer, frame)
        skipped = step_was_skipped(optimizer)
        if not skipped:
            step.clocks = self._clocks_of(optimizer, step.clocks)
        owner = step.owner if step.outer else None
        if owner is not None:
            owner.absorb(step, optimizer)
        elif self.listeners and not skipped:
            if _has_closure(args, kwargs):
                failed = self._notify(step.own, optimizer, "_at_gradients")
            inner = None if step.inner is None else step.inner()
            failed = self._notify(step.own, inner or optimizer, "_after_step") or failed  # the inner optimizer keeps the state
        clocks += step.clocks
        return failed

    def _clocks_of(self, optimizer: Optimizer, found: Sequence[StepCounter]) -> Sequence[StepCounter]:
        """Returns `found` and the clocks of `optimizer`, or of an optimizer that shares its parameter groups, as wrappers do."""
        clocks = list(found)
        for counted, counter in self.clocks:
            other = counted()
            if other is optimizer or (other is not None and _share_groups(other, optimizer)):
                clock = counter()
                if clock is not None and clock not in clocks:
                    clocks.append(clock)
        return clocks

    def _notify(self, mine: set[int], optimizer: Optimizer, *moments: str) -> Exception | None:
        """Notifies all monitors; returns what the first of them raised because the user asks for it. After an interrupt, none."""
        failed: Exception | None = None
        step_batch, listeners = StepBatch(), self.listeners.now()
        for number in guarded(_HERE, self._plans.gather, listeners, mine, optimizer, moments, step_batch) or ():
            module_ref, monitor_ref = listeners[number]
            module, monitor = module_ref(), monitor_ref()
            if module is None or monitor is None:
                self.listeners.drop(number)
                continue
            for moment in moments:
                notify = getattr(monitor, moment)
                error = failure_of(monitor._fail, notify, module, optimizer, mine, step_batch)
                failed = failed or error
        recorded = failure_of(_HERE, step_batch.record)
        return failed or recorded


class StepHandle:
    """Notifies a monitor of the steps of all optimizers, until `remove` is called. It is used like the handle of a hook.

    While an entry is taken out of the dictionary that `hooks_dict_ref` returns, its monitor is not notified.
    """

    def __init__(self, module: nn.Module, monitor: StepMonitor) -> None:
        self.module, self.monitor = weakref.ref(module), weakref.ref(monitor)
        self.id = next(_numbers)
        _steps.add(module, monitor)
        with SWITCHING:
            _steps.listeners[self.id] = self.module, self.monitor

    @staticmethod  # a static method holds no monitor
    def hooks_dict_ref() -> OrderedDict[int, Any]:
        return _steps.listeners

    def remove(self) -> None:
        _steps.listeners.drop(self.id)
        monitor = self.monitor()
        if monitor is not None:
            _steps.drop(self.module(), monitor)


def count_steps(optimizer: Optimizer, clock: StepCounter) -> None:
    """Advances `clock` after every step of `optimizer` from now on. Both are held weakly."""
    _steps.count(optimizer, clock)


def stop_counting(clock: StepCounter) -> None:
    """Advances `clock` no longer after steps of any optimizer."""
    _steps.stop_counting(clock)


def monitors_of_steps(module: nn.Module) -> list[Any]:
    """The monitors that are told of the optimizer steps which change parameters of `module`."""
    with SWITCHING:
        return list(_steps.monitors.get(module, ()))


def parameters_watched() -> list[tuple[Any, int]]:
    """The monitors that are told of optimizer steps, and the elements of the parameters that each of them watches."""
    with SWITCHING:
        found: list[tuple[nn.Module, list[Any]]] = [(module, [*monitors]) for module, monitors in _steps.monitors.items()]
    return [
        (monitor, sum(parameter.numel() for _, parameter in monitor._parameters(module)))
        for module, monitors in found
        for monitor in monitors
    ]


def watch_for_standing(clock: StepCounter, net: nn.Module) -> None:
    """Warns if `net` trains, and this clock, whose steps monitors wait for, stands still; both are held weakly."""
    _steps.install()
    standing.add(clock, net)


_HERE = "the hook on optimizers"
IN_ONE_GRAPH = "its optimizer steps inside a graph made with fullgraph=True"
_steps = _Steps()
_numbers = itertools.count()
_under_way = StepsUnderWay()

never_trace(_Steps.before)
never_trace(_Steps.after)


@constant_in_graphs
def _count_lost_steps() -> None:
    """Counts, for the report, a graph whose steps cannot be recorded. Dynamo runs it as plain Python, once for each graph."""
    with SWITCHING:
        found = [monitor for monitors in _steps.monitors.values() for monitor in monitors]
    for monitor in found:
        monitor.counts[IN_ONE_GRAPH] = monitor.counts.get(IN_ONE_GRAPH, 0) + 1


def _pass_on(failed: Exception | None) -> None:
    """Raises what the user asks for, if there is anything."""
    if failed is not None:
        try:
            raise failed
        finally:
            del failed  # otherwise its traceback would hold it, and the net, until the cycle collector comes


def _share_groups(one: Optimizer, other: Optimizer) -> bool:
    mine, theirs = one.param_groups, other.param_groups
    return len(mine) == len(theirs) and all(map(operator.is_, mine, theirs))


def _has_closure(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether `step` was given a closure. A closure computes the gradients within the step, so they are final after it."""
    return kwargs.get("closure") is not None or any(argument is not None for argument in args[1:2])
