"""Reducers over some of the observations: the last few, or every few."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from reducers.core.reducer import Reducer, check_reducer
from reducers.core.states import require_state, to_device
from reducers.state import Result, State
from reducers.temporal import ring

__all__ = ["EveryNth", "Window"]


@dataclass(frozen=True)
class _Ring(Reducer):
    reducer: Reducer
    n: int

    ordered: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_reducer(self.reducer, type(self).__name__)
        ring.check_length(self, "n")


@dataclass(frozen=True)
class Window(_Ring):
    """The inner reducer over exactly the last `n` observations.

    The state holds what each of them was reduced to, not the observations; they are merged when the result is asked for. Needs
    `n` times the memory of the inner state, copies that much at each observation, and merges `n` states for a result.

    Args:
        reducer: one whose state keeps its shape: not `Collect`.
        n: how many observations the window is long; before there are as many, it is over those there are.

    Returns:
        What the inner reducer computes.

    Raises:
        ReducerTypeError: `reducer` is none.
        ArgumentError: `n` is no whole number from 1 up.
        StateMismatchError: the inner state changed its shape.

    >>> import torch
    >>> from reducers import Mean
    >>> recent = Window(Mean(), 2)
    >>> state = {}
    >>> for value in (100.0, 1.0, 3.0):
    ...     state = recent.update(state, torch.tensor(value))
    >>> recent.compute(state)
    tensor(2., dtype=torch.float64)
    """

    def update(self, state: State, *xs: torch.Tensor) -> State:
        lifted = self.reducer.update({}, *xs)
        if not lifted:
            return state
        return ring.push(self, to_device(state, next(iter(lifted.values())).device), lifted, self.n)

    def merge(self, a: State, b: State) -> State:
        if not a or not b:
            return a or b
        return ring.join(self, a, to_device(b, a["observed"].device), self.n)

    def compute(self, state: State) -> Result:
        require_state(self, state)
        merged = ring.slot(state, self.n - 1)
        for index in reversed(range(self.n - 1)):
            newer = ring.slot(state, index)
            merged = ring.choose(self, state["observed"] > index + 1, self.reducer.merge(merged, newer), newer)
        return self.reducer.compute(merged)


@dataclass(frozen=True)
class EveryNth(_Ring):
    """The inner reducer over the observations 0, `n`, 2 `n` and so on: a stream whose neighbours resemble one another, thinned.

    Every `n`-th of all that was merged, wherever it was cut: a part does not know how many observations came before it, so the
    state holds what each of the `n` possible choices gives. To spare the work of the others rather than to leave them out, let the
    monitor capture less: `ForwardMonitor(Mean(), every=n)`.

    Args:
        reducer: one whose state keeps its shape: not `Collect`.
        n: every which observation counts; the first does.

    Returns:
        What the inner reducer computes.

    Raises:
        ReducerTypeError: `reducer` is none.
        ArgumentError: `n` is no whole number from 1 up.
        StateMismatchError: the inner state changed its shape.

    >>> import torch
    >>> from reducers import Mean
    >>> thinned = EveryNth(Mean(), 2)
    >>> state = {}
    >>> for value in (1.0, 100.0, 3.0):
    ...     state = thinned.update(state, torch.tensor(value))
    >>> thinned.compute(state)
    tensor(2., dtype=torch.float64)
    """

    # slot i holds the observations i, i + n, i + 2n, ... before the newest

    def update(self, state: State, *xs: torch.Tensor) -> State:
        lifted = self.reducer.update({}, *xs)
        if not lifted:
            return state
        state = to_device(state, next(iter(lifted.values())).device)
        if state:
            merged = self.reducer.merge(ring.slot(state, self.n - 1), lifted)
            lifted = ring.choose(self, state["observed"] >= self.n, merged, lifted)
        return ring.push(self, state, lifted, self.n)

    def merge(self, a: State, b: State) -> State:
        if not a or not b:
            return a or b
        b = to_device(b, a["observed"].device)
        before, after = a["observed"], b["observed"]
        place = torch.arange(self.n, device=before.device)
        moved = (place - after) % self.n
        a = ring.select(a, moved)
        slots = []
        for index in range(self.n):
            older, newer = ring.slot(a, index), ring.slot(b, index)
            both = ring.choose(self, moved[index] < before, self.reducer.merge(older, newer), newer)
            slots.append(ring.choose(self, index < after, both, older))
        return ring.stack(self, slots, before + after)

    def compute(self, state: State) -> Result:
        require_state(self, state)
        first = ((state["observed"] - 1) % self.n).reshape(1)
        return self.reducer.compute(ring.slot(ring.select(state, first), 0))
