"""StateStack: the states of many monitors as rows, which are joined together at every optimizer step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from recorders.ring.ring import Pending
from reducers import Reducer, State
from reducers.combinators.rows import RowSweep

__all__ = ["Moment", "Rows", "StackRow", "StateStack", "kinds", "restack"]

Rows = tuple[State, Sequence[int]]
"""States as rows, and the number of observations of each."""


class Moment:
    """A moment at which many monitors were notified, such as the end of an optimizer step.

    Attributes:
        recorded: whether the observations of this moment count. Stacks read it, so setting it makes the new rows of all stacks
            valid at once.
    """

    __slots__ = ("recorded",)

    def __init__(self) -> None:
        self.recorded = False


class StateStack:
    """Rows of states that are joined together, with the number of observations in each row.

    Attributes:
        sweep: writes the rows of the next step on a GPU.
        left: how often monitors have left any stack. If it changes, rows that were looked up before may be out of use.
    """

    left: ClassVar[int] = 0

    def __init__(self) -> None:
        self.sweep = RowSweep()
        self._before: Rows = {}, ()
        self._after: tuple[Moment, Rows] = Moment(), ({}, ())

    @property
    def now(self) -> Rows:
        """The rows after the last recorded moment."""
        moment, rows = self._after
        return rows if moment.recorded else self._before

    def rows(self, moment: Moment) -> Rows:
        """Returns the rows prepared for `moment`, if there are any, otherwise the rows now."""
        prepared, rows = self._after
        return rows if prepared is moment else self.now

    def prepare(self, moment: Moment, rows: Rows) -> None:
        """Sets the rows that are valid once `moment` is recorded. If it never is, the rows before stay valid."""
        self._before = self.now
        self._after = moment, rows

    def forget(self) -> None:
        """Frees the rows from before the last recorded moment."""
        self._before = self.now


class StackRow(Pending):
    """Observations that are merged in a row of a stack already. It takes none itself, and is never full.

    Attributes:
        stack: the stack.
        index: the row of the leaf in it.
        base: the state of the leaf from before the stack.
    """

    __slots__ = ("base", "index", "key", "paths", "stack")

    def __init__(self, path: str, stack: StateStack, index: int, base: State) -> None:
        self.key = self.paths = (path,)
        self.stack, self.index, self.base = stack, index, base

    @property
    def count(self) -> int:
        counts = self.stack.now[1]
        return counts[self.index] if counts else 0

    def joined(self, reducer: Reducer, states: Mapping[str, State], start: int, stop: int) -> dict[str, State]:
        """Returns the state of the leaf: that from before the stack, merged with the row."""
        row = {key: value[self.index].clone() for key, value in self.stack.now[0].items()}
        return {self.paths[0]: reducer.merge(self.base, row)}

    def observation(self, position: int) -> Any:
        """Returns the stack, because a row does not keep single observations."""
        return self.stack.now[0]


def kinds(stacked: State) -> dict[str, Any]:
    """Returns the shape of a row, the dtype and the device of each tensor."""
    return {key: (value.shape[1:], value.dtype, value.device) for key, value in stacked.items()}


def restack(leaves: Sequence[tuple[str, State, int]]) -> list[StackRow]:
    """Returns rows that go on from these states, as if they had been in one stack from the beginning.

    Args:
        leaves: the path, the state and the number of observations of each; equal keys, shapes, dtypes and devices.
    """
    stack, moment = StateStack(), Moment()
    states = [state for _, state, _ in leaves]
    stacked = {key: torch.stack([state[key] for state in states]) for key in states[0]}
    stack.prepare(moment, (stacked, [count for _, _, count in leaves]))
    moment.recorded = True
    stack.forget()
    return [StackRow(path, stack, index, {}) for index, (path, _, _) in enumerate(leaves)]
