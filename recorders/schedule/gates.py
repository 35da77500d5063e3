"""In which steps monitors record: what may be given for it, and the gate of those that record in the same steps."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Collection
from typing import Any, Protocol, TypeAlias
from weakref import WeakSet

from recorders.capture.switching import SwitchedHooks
from recorders.errors import MonitorError

__all__ = ["Chosen", "StepChooser", "StepGroup", "Steps", "as_steps", "shown_steps"]

Steps: TypeAlias = "range | slice | Collection[int] | Callable[[int], bool]"
Chosen: TypeAlias = "range | tuple[int, ...] | Callable[[int], bool] | None"


class ChoosesSteps(Protocol):
    """What says in which steps to record."""

    steps: Chosen
    every_step: int


class StepChooser(Protocol):
    """A monitor, which may record in some steps only."""

    @property
    def gate(self) -> ChoosesSteps:
        """Says in which."""
        ...

    def switch(self, active: bool, error: Exception | None) -> None:
        """Whether to record from now on; `error` is what asking for that raised."""

    def switchable(self) -> tuple[list[Any], bool]:
        """The handles of its hooks that may be taken out now, and whether these will stay the same."""


class StepGroup:
    """The monitors that record in the same steps, held weakly. In other steps their hooks are out, where that can be."""

    def __init__(self, steps: Chosen, every_step: int) -> None:
        self.steps, self.every_step = steps, every_step
        self.monitors: WeakSet[Any] = WeakSet()
        self.due = True
        self.told: bool | None = True
        self.hooks = SwitchedHooks()
        self._ago = 0  # steps chosen since the last one in which they recorded, itself included; 0 before the first
        self.error: Exception | None = None

    def ask(self, step: int, cadence: int) -> None:
        """Finds out whether `step` is one of theirs, one in so many of them."""
        self.due, self.error = False, None
        try:
            chosen = self.steps is None or (self.steps(step) if callable(self.steps) else step in self.steps)
            if chosen and step % self.every_step == 0:
                self.due = self._ago == 0 or self._ago >= cadence
                self._ago = 1 if self.due else self._ago + 1
        except Exception as error:
            self.error = error

    def undue_steps(self, step: int, cadence: int) -> int:
        """The number of steps after `step`, which is not due, before the next one that is due; 0 if that is not known."""
        if self.due or self.told is not False or self.error is not None or self.steps is not None:
            return 0
        chosen = max(0, cadence - self._ago)  # of these, before the one that is due
        due = (step // self.every_step + 1 + chosen) * self.every_step
        return max(0, min(due, self.hooks.again) - step - 1)

    def skip(self, step: int, count: int) -> None:
        """Makes up for `count` steps after `step` in which it was not asked, because none is due."""
        self._ago += (step + count) // self.every_step - step // self.every_step

    def tell(self, step: int) -> MonitorError | None:
        """Switches the monitors and their hooks; returns what the first of them raised."""
        failed: MonitorError | None = None
        self.told = None  # if this is interrupted the next step tells them again
        if self.due:
            self.hooks.on()
        for monitor in list(self.monitors):
            try:
                monitor.switch(self.due, self.error)
            except MonitorError as error:
                failed = failed or error
        if not self.due:
            self.hooks.off(self.monitors, step)
        self.told = self.due
        return failed


def as_steps(steps: Steps | None) -> Chosen:
    """`steps` in a form that compares, pickles and has a hash: a slice becomes a range, a collection a sorted tuple.

    Raises:
        ValueError: it can hold no step.
        TypeError: it is of another kind.

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
        raise TypeError(f"steps={steps!r}: give range(100, 200), slice(100, None), the steps themselves, or a function of the step")
    if isinstance(found, (range, tuple)) and (not found or min(found[0], found[-1]) < 0):
        raise ValueError(f"steps={steps!r}: steps are counted from 0 on, and there must be one")
    return found


def shown_steps(steps: Chosen, every_step: int, cadence: int = 1) -> str:
    """In words, "" for all steps; `cadence` is that of a budget.

    >>> shown_steps(range(100, 200), 10)
    'steps 100 to 199, every 10 steps'
    """
    parts = []
    if isinstance(steps, range):
        begin = f"from {steps[0]} on" if steps.stop == sys.maxsize else f"{steps[0]} to {steps[-1]}"
        parts = [f"steps {begin}"] + ([f"{steps.step} apart"] if steps.step != 1 else [])
    elif isinstance(steps, tuple):
        parts = [f"steps {', '.join(map(str, steps[:8]))}{' and more' if len(steps) > 8 else ''}"]
    elif steps is not None:
        parts = [f"steps chosen by {getattr(steps, '__name__', type(steps).__name__)}"]
    parts += [f"every {every_step} steps"] if every_step != 1 else []
    return ", ".join(parts + ([f"one in {cadence} of these for the budget"] if cadence != 1 else []))
