"""Steps of optimizers under way, which may step within each other."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from types import FrameType, SimpleNamespace
from typing import Protocol

from torch.optim import Optimizer

__all__ = ["Step", "StepCounter", "StepsUnderWay"]


class StepCounter(Protocol):
    """What counts the steps of an optimizer."""

    def advance(self) -> None:
        """A step has ended."""


class Step(SimpleNamespace):
    """A call of `step` under way. What happens in it to the parameters that its optimizer holds is part of this step.

    Optimizers step within steps of others that hold the same parameters: those that wrap another one, or call the step of their
    base class. The outermost step counts. Which parameters these are is only looked up if somebody asks.

    Attributes:
        optimizer: whose step it is.
        frame: the `id` of the frame of the call.
        outer: the steps in which this one happens, the outermost first.
        clocks: those that advance at its end, its own and those of the steps within it that have ended.
        inner: the optimizer within this one that steps the parameters in the end, and keeps their state.
    """

    # A step is made at every step of every optimizer while any has a clock: by code in C, with what is seldom set on the class.
    optimizer: weakref.ref[Optimizer]
    frame: int
    outer: Sequence[Step] = ()
    clocks: Sequence[StepCounter] = ()
    inner: weakref.ref[Optimizer] | None = None
    _mine: set[int] | None = None

    @property
    def mine(self) -> set[int]:
        """The ids of the parameters that the optimizer holds."""
        if self._mine is None:
            optimizer = self.optimizer()
            groups = [] if optimizer is None else optimizer.param_groups
            self._mine = {id(parameter) for group in groups for parameter in group["params"]}
        return self._mine

    @property
    def own(self) -> set[int]:
        """Those that no outer step holds."""
        return self.mine.difference(*(step.mine for step in self.outer)) if self.outer else self.mine

    @property
    def owner(self) -> Step | None:
        """The outermost of the outer steps that shares parameters with this one, if outer steps hold all of them."""
        if not self.outer or self.own:
            return None
        return next((step for step in self.outer if not self.mine.isdisjoint(step.mine)), None)

    def take(self, step: Step, optimizer: Optimizer) -> None:
        """A step within this one has ended: its clocks advance at the end of this one."""
        self.clocks, step.clocks = list(dict.fromkeys([*self.clocks, *step.clocks])), ()
        if self.inner is None and self.mine <= step.mine:
            self.inner = weakref.ref(optimizer)


class StepsUnderWay(threading.local):
    """The steps under way in this thread, the outermost first.

    PyTorch calls no hook after a step that raises, so its entry stays. It is dropped when the next step begins, which looks whether
    the calls of the entries are among those that it happens in. An entry knows its call by the `id` of the frame, which keeps
    nothing alive. Another call may be given the same one only after the first has ended, and drops the entry as it begins.
    """

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def begin(self, optimizer: Optimizer, frame: FrameType) -> Step:
        """Adds the step whose call has this frame."""
        steps, step = self.steps, Step(optimizer=weakref.ref(optimizer), frame=id(frame))
        if steps:
            calls = _calls_around(frame)
            steps[:] = [other for other in steps if other.frame in calls]
            step.outer = tuple(steps)
        steps.append(step)
        return step

    def end(self, optimizer: Optimizer, frame: FrameType) -> Step:
        """Removes it; hooks may have been put on in the middle of it, so that it was never added."""
        steps, call = self.steps, id(frame)
        if len(steps) == 1 and steps[0].frame == call:
            return steps.pop()
        while steps and steps[-1].frame != call and any(step.frame == call for step in steps):
            steps.pop()  # a step within this one that was interrupted
        if not steps or steps[-1].frame != call:
            self.begin(optimizer, frame)
        return steps.pop()


def _calls_around(frame: FrameType) -> set[int]:
    """The ids of the frames of the calls of the same function that the one of `frame` happens in."""
    found, outer = set(), frame.f_back
    while outer is not None:
        if outer.f_code is frame.f_code:
            found.add(id(outer))
        outer = outer.f_back
    return found
