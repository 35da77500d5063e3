"""Notifies monitors of the optimizer steps that change the parameters of their modules."""

from __future__ import annotations

import itertools
import operator
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from operator import itemgetter
from types import FrameType, SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from recorders._torch import HOOKS_BEFORE_STEP, SCALED, STEP_CODE, hooks_ref, step_was_skipped
from recorders._torch.compiler import break_graph, compile_always, never_trace, skip_frames
from recorders.capture.entering import failure_of, guarded
from recorders.capture.switching import SWITCHING
from recorders.schedule.notices import notices, tell
from recorders.schedule.table import CHANGE, GRADIENTS, HERE, VALUES, Tables
from reducers._torch import constant_in_graphs


class Step(SimpleNamespace):
    """A running call of `step`. All changes of the optimizer's parameters during the call belong to this step.

    An optimizer that wraps another one, or calls the step of its base class, steps within a step that holds the same parameters.
    The outermost step counts. The parameters are collected only if they are needed, and none is kept.

    Attributes:
        optimizer: a weak reference to the optimizer that steps.
        frame: the `id` of the frame of the call.
        outer: the steps within which this one runs, the outermost first.
        clocks: the clocks that advance at the end of this step: its own, and those of the steps within it that have ended.
        inner: a weak reference to the optimizer within this step that changes the parameters in the end, and keeps their state.
        closure: whether it was given a closure; None if it was not seen to begin.
        handle: that of the hook on the optimizer which observes after all others before the step; None if there are no others.
        usable: whether parameters may be reduced together in it.
        table: the table of the optimizer, and in `copied` and `notified` of which parameters the change is read at the end; see
            `recorders.schedule.table`.
    """

    # While a clock is attached, every step of every optimizer makes a Step. So C code makes it, and defaults are on the class.
    optimizer: weakref.ref[Optimizer]
    frame: int
    outer: Sequence[Step] = ()
    clocks: Sequence[Any] = ()
    inner: weakref.ref[Optimizer] | None = None
    closure: bool | None = None
    handle: RemovableHandle | None = None
    usable = False
    table: Any = None
    copied: Sequence[Any] = ()
    notified: Sequence[Any] = ()

    def all(self) -> list[Any]:
        """Returns the optimizer's parameters."""
        optimizer = self.optimizer()
        return [] if optimizer is None else [*chain.from_iterable(map(_params, optimizer.param_groups))]

    def own(self) -> list[Any]:
        """Returns the optimizer's parameters that no outer step holds."""
        if not self.outer:
            return self.all()
        theirs = {id(parameter) for step in self.outer for parameter in step.all()}
        return [parameter for parameter in self.all() if id(parameter) not in theirs]

    def owner(self) -> Step | None:
        """Returns the outermost step that shares parameters with this one, if outer steps hold all parameters of this one."""
        if not self.outer or self.own():
            return None
        mine = {*map(id, self.all())}
        return next((step for step in self.outer if not mine.isdisjoint(map(id, step.all()))), None)

    def absorb(self, step: Step) -> None:
        """Takes over the clocks of `step`, which ran within this one and has ended; they advance at the end of this one."""
        self.clocks, step.clocks = list(dict.fromkeys([*self.clocks, *step.clocks])), ()
        if self.inner is None and {*map(id, self.all())}.issubset(map(id, step.all())):
            self.inner = step.optimizer


class StepsUnderWay(threading.local):
    """The steps that run in this thread, the outermost first.

    PyTorch calls no hook after a step that raised, so the entry of that step stays. The next step drops it when it begins: it keeps
    only entries whose calls are among its own callers. An entry identifies its call by the `id` of the frame, which keeps nothing
    alive. Another call can get the same `id` only after the first has ended; if that call is a step, it drops the old entry.
    """

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def begin(self, optimizer: Optimizer, frame: FrameType) -> Step:
        """Adds the step whose call has this frame; returns it."""
        steps, step = self.steps, Step(optimizer=weakref.ref(optimizer), frame=id(frame))
        if steps:
            calls = _calls_around(frame)
            for other in steps:
                if other.frame not in calls and other.handle is not None:
                    other.handle.remove()
            steps[:] = [other for other in steps if other.frame in calls]
            step.outer = (*steps,)
        steps.append(step)
        return step

    def end(self, optimizer: Optimizer, frame: FrameType) -> Step:
        """Removes the step whose call has this frame; returns it. If hooks were put on during the step, the step is added first."""
        steps, call = self.steps, id(frame)
        if not steps or (steps[-1].frame != call and all(step.frame != call for step in steps)):
            self.begin(optimizer, frame)
        while True:
            step = steps.pop()
            if step.handle is not None:
                step.handle.remove()
            if step.frame == call:
                return step  # those before it were within this one, and were interrupted


def _calls_around(frame: FrameType) -> list[int]:
    """Returns the ids of the frames of those callers of `frame` that run the same function, the outermost first."""
    found, caller = list[int](), frame.f_back
    while caller is not None:
        if caller.f_code is frame.f_code:
            found.insert(0, id(caller))
        caller = caller.f_back
    return found


class _Quiet:
    """The steps of an optimizer of which only one clock needs to know, which gave their number: no more than that is counted.

    The caches hold what the training needs. So each object that is looked at takes time: ten more take 2 % of a step of 0.25 ms.

    Attributes:
        optimizer: a weak reference to it.
        steps: the coming steps, see `recorders.schedule.clock.QuietSteps`.
        begun: whether one of them has begun.
    """

    __slots__ = ("begun", "optimizer", "steps")

    def __init__(self, optimizer: weakref.ref[Optimizer], steps: Any) -> None:
        self.optimizer, self.steps, self.begun = optimizer, steps, False


class _Listeners(OrderedDict[int, None]):
    """The numbers of the monitors that are notified of steps. Like hooks, they are taken out in steps in which they are not due."""

    ordered = False  # see recorders.capture.switching


class _Steps:
    """One pair of hooks on all optimizers of the process, which do nothing while no monitor and no clock needs them.

    Monitors live as long as their modules: this object keeps them alive, and they hold their modules weakly.

    The hooks are put on once, for good: PyTorch walks through the dictionary of hooks, and raises in the user's `step` if another
    thread, or a hook, puts one in or takes one out meanwhile.

    Hooks before a step may clip the gradients, and those of one optimizer run after those of all. So if others follow, the hook
    before a step puts one on that optimizer behind them, which observes and is taken off when the step ends.

    The hooks are plain Python in a compiled training too. `torch.compile(optimizer.step)` would trace the function of PyTorch that
    calls them, and so the hooks. While the hooks are on, that function runs as plain Python, and the `step` that it wraps is
    compiled. If the user compiles a function that calls `step`, its graph ends before that call, as it does in any case for those
    optimizers of PyTorch that break the graph. If the user demands one graph, nothing of the step is recorded; the report says so.
    """

    def __init__(self) -> None:
        self.monitors: WeakKeyDictionary[nn.Module, list[Any]] = WeakKeyDictionary()
        self.listeners = _Listeners()  # `SWITCHING` is held while it changes
        self.tables = Tables(self.listeners)
        self.clocks: list[tuple[weakref.ref[Optimizer], weakref.ref[Any]]] = []
        self.told: Sequence[weakref.ref[Any]] = ()  # what counts the steps of all optimizers
        self.active = False  # whether the hooks do anything
        self.quiet: _Quiet | None = None
        self._hooks: Mapping[int, Any] = {}  # those before a step of any optimizer
        self._number = 0  # that of ours
        self._seen: set[type[Optimizer]] = set()

    def add(self, module: nn.Module, monitor: Any, number: int) -> None:
        with SWITCHING:
            self.monitors.setdefault(module, []).append(monitor)
            self.tables.register(number, module, monitor)
            self.listeners[number] = None
            self._activate()

    def count(self, optimizer: Optimizer, clock: Any) -> bool:
        """Advances `clock` after every step of `optimizer` from now on. Both are held weakly.

        Returns whether it advances after those of another optimizer too, which holds none of the same parameters.
        """
        with SWITCHING:
            counted_by = [counted() for counted, counter in self.clocks if counter() is clock]
            if not any(counted() is optimizer and counter() is clock for counted, counter in self.clocks):
                self.clocks, self.quiet = [*self.clocks, (weakref.ref(optimizer), weakref.ref(clock))], None
            self._activate()
        mine = {id(parameter) for group in optimizer.param_groups for parameter in _params(group)}
        others = (other.param_groups for other in counted_by if other is not None)
        return any(mine.isdisjoint(id(parameter) for group in groups for parameter in _params(group)) for groups in others)

    def stop_counting(self, clock: Any) -> None:
        """Advances `clock` no longer after steps of any optimizer."""
        with SWITCHING:
            self.clocks, self.quiet = [pair for pair in self.clocks if pair[1]() is not clock], None
            self._deactivate_unused()

    def tell(self, monitor: Any) -> None:
        """Calls `monitor.stepped` with each optimizer that has stepped, from now on. The monitor is held weakly."""
        with SWITCHING:
            self.told = (*self.told, weakref.ref(monitor))
            self._activate()

    def tell_no_longer(self, monitor: Any = None) -> None:
        """Calls it no longer, nor what was freed."""
        with SWITCHING:
            self.told = (*(one for one in self.told if (told := one()) is not None and told is not monitor),)

    def _tell(self, optimizer: Optimizer) -> None:
        for one in self.told:
            monitor = one()
            if monitor is None:
                self.tell_no_longer()
            else:
                monitor.stepped(optimizer)

    def install(self) -> None:
        """Puts the hooks on, which do nothing by themselves."""
        if not self._hooks:
            handle = register_optimizer_step_pre_hook(self.before)
            self._hooks, self._number = hooks_ref(handle)(), handle.id
            register_optimizer_step_post_hook(self.after)

    def _activate(self) -> None:
        self.install()
        if not self.active:
            self.active = True
            skip_frames(STEP_CODE, True)

    def drop(self, module: nn.Module | None, monitor: Any, number: int) -> None:
        with SWITCHING:
            self.tables.remove(number)
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
        quiet = self.quiet
        if (
            quiet is not None
            and quiet.optimizer() is optimizer
            and not (quiet.begun or self.listeners)
            and SCALED not in vars(optimizer)
        ):
            quiet.begun = True
            return
        failed = guarded(HERE, self._begin, optimizer, sys._getframe(1), args, kwargs)
        if failed is not None:
            _pass_on(failed)

    def _begin(self, optimizer: Optimizer, frame: FrameType, args: Any, kwargs: Any) -> Exception | None:
        """Begins a step; returns what a monitor raised because the user asks for it."""
        if self.quiet is not None:
            self._end_quiet(optimizer, frame)
        if type(optimizer) not in self._seen:
            self._seen.add(type(optimizer))
            compile_always(type(optimizer).step)
        step = _under_way.begin(optimizer, frame)
        if not self.listeners or step_was_skipped(optimizer):
            return None
        step.closure = _has_closure(args, kwargs)
        moments = (CHANGE,) if step.closure else (CHANGE, GRADIENTS)
        if vars(optimizer).get(HOOKS_BEFORE_STEP, True) or next(reversed(self._hooks)) != self._number:
            step.handle = optimizer.register_step_pre_hook(partial(self.begun, step, moments))
            return None
        return failure_of(HERE, self.tables.observe, step, optimizer, optimizer, moments)

    def begun(self, step: Step, moments: Sequence[str], optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Observes what `step` begins with, after all other hooks before it."""
        if any(running is step for running in _under_way.steps):  # not one that raised in another thread
            guarded(HERE, self.tables.observe, step, optimizer, optimizer, moments)

    def _end_quiet(self, optimizer: Optimizer, frame: FrameType) -> None:
        """Takes up a quiet step within which another one begins now, if there is one."""
        quiet, calls = self.quiet, _calls_around(frame)
        if quiet is not None and (calls or quiet.optimizer() is optimizer):
            self.quiet = None
            known = {step.frame for step in _under_way.steps}
            if quiet.begun:
                _under_way.steps += [Step(optimizer=quiet.optimizer, frame=call) for call in calls if call not in known]

    def after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if is_dynamo_compiling() or not (self.active or notices):  # in this order: the compiler guards what is read before it
            return
        if self.told:
            guarded(HERE, self._tell, optimizer)
        quiet = self.quiet
        if quiet is not None and quiet.begun and quiet.optimizer() is optimizer and not (self.listeners or notices):
            steps = quiet.steps
            if steps.left and not steps.over:  # no lock, which takes 4 us here: Python changes threads at calls and loops only
                quiet.begun = False
                steps.left -= 1
                return
        failed = guarded(HERE, self._end, optimizer, sys._getframe(1), args, kwargs) if self.active else None
        if notices:
            failed = failure_of(HERE, tell, optimizer) or failed
        if failed is not None:
            _pass_on(failed)

    def _end(self, optimizer: Optimizer, frame: FrameType, args: Any, kwargs: Any) -> Exception | None:
        """Ends a step, for all monitors and clocks; returns what one of them raised because the user asks for it."""
        step, failed = _under_way.end(optimizer, frame), None
        skipped = step_was_skipped(optimizer)
        if self.clocks and not skipped:
            step.clocks = self._clocks_of(optimizer, step.clocks)
        owner = step.owner() if step.outer else None
        if owner is not None:
            owner.absorb(step)
        elif self.listeners and not skipped:
            inner = None if step.inner is None else step.inner()  # which keeps the state
            closure = _has_closure(args, kwargs) if step.closure is None else step.closure
            moments = (GRADIENTS, VALUES) if closure else (VALUES,)
            failed = failure_of(HERE, self.tables.observe, step, optimizer, inner or optimizer, moments)
        for clock in step.clocks:  # after the monitors, whose observations belong to the step that ends
            failed = failure_of(HERE, clock.advance) or failed
        if not step.clocks and (self.clocks or not self.listeners):
            self._deactivate_unused()
        if step.clocks:
            alone = len(step.clocks) == 1 and step.inner is None and not (step.outer or self.listeners)
            self.quiet = _Quiet(step.optimizer, step.clocks[0].quiet) if alone and step.clocks[0].quiet.left else None
        return failed

    def _clocks_of(self, optimizer: Optimizer, found: Sequence[Any]) -> Sequence[Any]:
        """Returns `found` and the clocks of `optimizer`, or of an optimizer that shares its parameter groups, as wrappers do."""
        clocks = list(found)
        for counted, counter in self.clocks:
            other = counted()
            if other is optimizer or (other is not None and _share_groups(other, optimizer)):
                clock = counter()
                if clock is not None and clock not in clocks:
                    clocks.append(clock)
        return clocks


class StepHandle:
    """Notifies a monitor of the steps of all optimizers, until `remove` is called. It is used like the handle of a hook.

    While an entry is taken out of the dictionary that `hooks_dict_ref` returns, its monitor is not notified.
    """

    def __init__(self, module: nn.Module, monitor: Any) -> None:
        self.module, self.monitor = weakref.ref(module), weakref.ref(monitor)
        self.id = next(_numbers)
        _steps.add(module, monitor, self.id)

    @staticmethod  # a static method holds no monitor
    def hooks_dict_ref() -> OrderedDict[int, Any]:
        return _steps.listeners

    def remove(self) -> None:
        _steps.drop(self.module(), self.monitor(), self.id)


def monitors_of_steps(module: nn.Module) -> list[Any]:
    """The monitors that are told of the optimizer steps which change parameters of `module`."""
    with SWITCHING:
        return list(_steps.monitors.get(module, ()))


IN_ONE_GRAPH = "its optimizer steps inside a graph made with fullgraph=True"
_steps = _Steps()
_numbers = itertools.count()
_under_way = StepsUnderWay()
count_steps, stop_counting, notice_steps = _steps.count, _steps.stop_counting, _steps.install
tell_of_each_step, tell_no_longer = _steps.tell, _steps.tell_no_longer

never_trace(_Steps.before)
never_trace(_Steps.begun)
never_trace(_Steps.after)


@constant_in_graphs
def _count_lost_steps() -> None:
    """Counts, for the report, a graph whose steps cannot be recorded. Dynamo runs it as plain Python, once for each graph."""
    with SWITCHING:
        found = [monitor for monitors in _steps.monitors.values() for monitor in monitors]
    for monitor in found:
        monitor.counts[IN_ONE_GRAPH] = monitor.counts.get(IN_ONE_GRAPH, 0) + 1


def _pass_on(failed: Exception) -> None:
    """Raises what the user asks for."""
    try:
        raise failed
    finally:
        del failed  # otherwise its traceback would hold it, and the net, until the cycle collector comes


def _share_groups(one: Optimizer, other: Optimizer) -> bool:
    mine, theirs = one.param_groups, other.param_groups
    return len(mine) == len(theirs) and all(map(operator.is_, mine, theirs))


def _has_closure(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether `step` was given a closure. A closure computes the gradients within the step, so they are final after it."""
    return kwargs.get("closure") is not None or (len(args) > 1 and args[1] is not None)


_params = itemgetter("params")
