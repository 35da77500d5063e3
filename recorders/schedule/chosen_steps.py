"""The steps in which monitors record: how a user gives them, and `StepGroup`, the monitors that record in the same steps."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Collection
from typing import Any, TypeAlias
from weakref import WeakSet

from recorders.capture.entering import PASSED_ON
from recorders.capture.switching import SwitchedHooks

Steps: TypeAlias = "range | slice | Collection[int] | Callable[[int], bool]"
Chosen: TypeAlias = "range | tuple[int, ...] | Callable[[int], bool] | None"


class StepGroup:
    """The monitors that record in the same steps, held weakly. In other steps their hooks are taken out if possible.

    Attributes:
        due: whether the monitors record in the present step.
        notified: the value of `due` that the monitors were given last; None if that was interrupted.
        error: the exception that the choice of steps raised for the present step.
    """

    def __init__(self, steps: Chosen, every_step: int) -> None:
        self.steps, self.every_step = steps, every_step
        self.monitors: WeakSet[Any] = WeakSet()
        self.due = True
        self.notified: bool | None = True
        self.hooks = SwitchedHooks()
        self._since = 0  # chosen steps since the last due one, which counts too; 0 before the first
        self.error: Exception | None = None

    def decide(self, step: int, cadence: int) -> None:
        """Sets `due` for `step`: one in `cadence` of the chosen steps is due."""
        self.due, self.error = False, None
        try:
            chosen = self.steps is None or (self.steps(step) if callable(self.steps) else step in self.steps)
            if chosen and step % self.every_step == 0:
                self.due = self._since == 0 or self._since >= cadence
                self._since = 1 if self.due else self._since + 1
        except Exception as error:
            self.error = error

    def undue_steps(self, step: int, cadence: int) -> int:
        """Returns the number of steps between `step` and the next due one; 0 if `step` is due, or the number is not known."""
        if self.due or self.notified is not False or self.error is not None:
            return 0
        if self.steps is None:
            chosen = max(0, cadence - self._since) if self._since else 0  # chosen steps before the next due one; the first is due
            due = (step // self.every_step + 1 + chosen) * self.every_step
        elif cadence == self.every_step == 1 and hasattr(self.steps, "pause_after"):  # a choice that says when it chooses next
            due = step + 1 + self.steps.pause_after(step)
        else:
            return 0
        return max(0, min(due, self.hooks.again) - step - 1)

    def skip(self, step: int, count: int) -> None:
        """Counts `count` steps after `step` for which `decide` was not called, because none of them is due."""
        if self.steps is None:
            self._since += (step + count) // self.every_step - step // self.every_step

    def notify(self, step: int) -> Exception | None:
        """Switches the monitors and their hooks; returns the first error that a monitor raised."""
        failed: Exception | None = None
        self.notified = None  # if this call is interrupted, the next step notifies the monitors again
        if self.due:
            self.hooks.on()
        for monitor in list(self.monitors):
            try:
                monitor.switch(self.due, self.error)
            except PASSED_ON as error:
                failed = failed or error
        if not self.due:
            self.hooks.off(self.monitors, step)
        self.notified = self.due
        return failed


def as_steps(steps: Steps | None) -> Chosen:
    """Returns `steps` in a form with equality and a hash that pickles: a slice becomes a range, a collection a sorted tuple.

    Raises:
        ValueError: `steps` is empty, or contains a negative step.
        TypeError: `steps` is not a range, a slice, a collection of whole numbers, a function or None.

    >>> as_steps({3, 1}), as_steps(slice(10, 20))
    ((1, 3), range(10, 20))
    """
    found: Chosen
    if steps is None or isinstance(steps, range) or callable(steps):
        found = steps
    elif isinstance(steps, slice):
        found = range(steps.start or 0, sys.maxsize if steps.stop is None else steps.stop, 1 if steps.step is None else steps.step)
    elif isinstance(steps, Collection) and all(hasattr(step, "__index__") and not isinstance(step, bool) for step in steps):
        found = tuple(sorted(set(map(operator.index, steps))))
    else:
        raise TypeError(f"steps={steps!r}: give range(100, 200), slice(100, None), some whole numbers, or a function of the step")
    if isinstance(found, (range, tuple)) and (not found or min(found[0], found[-1]) < 0):
        raise ValueError(f"steps={steps!r}: steps are counted from 0, and at least one must be given")
    return found


def shown_steps(steps: Chosen, every_step: int, cadence: int = 1) -> str:
    """Returns a description of the steps; "" for all steps. `cadence` is the cadence that a budget sets.

    >>> shown_steps(range(100, 200), 10)
    'steps 100 to 199, every 10 steps'
    """
    parts = []
    if isinstance(steps, range):
        span = f"from {steps[0]} on" if steps.stop == sys.maxsize else f"{steps[0]} to {steps[-1]}"
        parts = [f"steps {span}"] + ([f"{steps.step} apart"] if steps.step != 1 else [])
    elif isinstance(steps, tuple):
        parts = [f"steps {', '.join(map(str, steps[:8]))}{' and more' if len(steps) > 8 else ''}"]
    elif steps is not None:
        parts = [f"steps chosen by {getattr(steps, '__name__', type(steps).__name__)}"]
    parts += [f"every {every_step} steps"] if every_step != 1 else []
    return ", ".join(parts + ([f"one in {cadence} of these for the budget"] if cadence != 1 else []))
