"""StepsUnderWay: the optimizer steps that run in a thread. An optimizer may step within the step of another."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from itertools import chain
from operator import itemgetter
from types import FrameType, SimpleNamespace
from typing import Any

from torch.optim import Optimizer

__all__ = ["Step", "StepsUnderWay"]


class Step(SimpleNamespace):
    """A running call of `step`. All changes of the optimizer's parameters during the call belong to this step.

    An optimizer that wraps another one, or calls the step of its base class, steps within a step that holds the same parameters.
    The outermost step counts. The ids of the parameters are collected only if they are needed.

    Attributes:
        optimizer: the optimizer that steps.
        frame: the `id` of the frame of the call.
        outer: the steps within which this one runs, the outermost first.
        clocks: the clocks that advance at the end of this step: its own, and those of the steps within it that have ended.
        inner: the optimizer within this step that changes the parameters in the end, and keeps their state.
        closure: whether it was given a closure; None if it was not seen to begin.
        ids: the ids of `own`, if it was seen to begin.
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
    ids: set[int] | None = None
    usable: bool = False
    table: Any = None
    copied: Sequence[Any] = ()
    notified: Sequence[Any] = ()
    _mine: set[int] | None = None

    @property
    def mine(self) -> set[int]:
        """The ids of the optimizer's parameters."""
        if self._mine is None:
            optimizer = self.optimizer()
            groups = [] if optimizer is None else optimizer.param_groups
            self._mine = {*map(id, chain.from_iterable(map(_params, groups)))}
        return self._mine

    @property
    def own(self) -> set[int]:
        """The ids of the optimizer's parameters that no outer step holds."""
        return self.mine.difference(*(step.mine for step in self.outer)) if self.outer else self.mine

    @property
    def owner(self) -> Step | None:
        """The outermost step that shares parameters with this one, if outer steps hold all parameters of this one."""
        if not self.outer or self.own:
            return None
        return next((step for step in self.outer if not self.mine.isdisjoint(step.mine)), None)

    def absorb(self, step: Step, optimizer: Optimizer) -> None:
        """Takes over the clocks of `step`, which ran within this one and has ended; they advance at the end of this one."""
        self.clocks, step.clocks = list(dict.fromkeys([*self.clocks, *step.clocks])), ()
        if self.inner is None and self.mine <= step.mine:
            self.inner = weakref.ref(optimizer)


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
            steps[:] = [other for other in steps if other.frame in calls]
            step.outer = tuple(steps)
        steps.append(step)
        return step

    def end(self, optimizer: Optimizer, frame: FrameType) -> Step:
        """Removes the step whose call has this frame; returns it. If hooks were put on during the step, the step is added first."""
        steps, call = self.steps, id(frame)
        if len(steps) == 1 and steps[0].frame == call:
            return steps.pop()
        while steps and steps[-1].frame != call and any(step.frame == call for step in steps):
            steps.pop()  # a step within this one, which was interrupted
        if not steps or steps[-1].frame != call:
            self.begin(optimizer, frame)
        return steps.pop()


def _calls_around(frame: FrameType) -> set[int]:
    """Returns the ids of the frames of those callers of `frame` that run the same function."""
    found, outer = set(), frame.f_back
    while outer is not None:
        if outer.f_code is frame.f_code:
            found.add(id(outer))
        outer = outer.f_back
    return found


_params = itemgetter("params")
