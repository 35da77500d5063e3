"""Reducers over a subset of the observations: the last n, or every n-th."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from reducers.core.reducer import Reducer, check_reducer, check_size
from reducers.core.states import require_state, to_device
from reducers.state import Nonfinite, Result, State
from reducers.temporal import ring


@dataclass(frozen=True)
class _RingReducer(Reducer):
    reducer: Reducer
    n: int

    ordered: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_reducer(self.reducer, type(self).__name__)
        check_size(self, "n")

    def _check(self, state: State) -> None:
        ring.check_ring(self, self.reducer, state, self.n)

    @abstractmethod
    def _counting(self, state: State) -> State:
        """Return the inner state of the observations that count."""

    def nonfinite(self, state: State) -> Nonfinite | None:
        """Return how many elements of the observations that count were left out."""
        return self.reducer.nonfinite(self._counting(state)) if state else None


@dataclass(frozen=True)
class Window(_RingReducer):
    """The inner reducer over the last `n` observations.

    The state stores one inner state per observation, not the observations; `compute` merges them. It needs `n` times the memory
    of the inner state, up to twice that if they are big, and merges `n` states per result. The cost of an observation does not
    depend on `n`.

    Args:
        reducer: the inner reducer; its state must keep its shape, so not `Collect`.
        n: number of observations in the window; until there are `n`, the result covers all of them.

    Returns:
        The result of the inner reducer.

    Raises:
        ReducerTypeError: `reducer` is not a reducer instance.
        ArgumentError: `n` is not an integer from 1 up.
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
        return self.reducer.compute(self._counting(state))

    def _counting(self, state: State) -> State:
        merged = ring.slot(state, self.n - 1)
        for index in reversed(range(self.n - 1)):
            newer = ring.slot(state, index)
            merged = ring.choose(self, state["observed"] > index + 1, self.reducer.merge(merged, newer), newer)
        return merged


@dataclass(frozen=True)
class EveryNth(_RingReducer):
    """The inner reducer over the observations 0, `n`, 2 `n` and so on; it thins out a correlated stream.

    The result does not depend on how the stream was split. Since a part does not know the number of earlier observations, the
    state stores an inner state for each of the `n` possible offsets, and reduces every observation. To save that work too,
    capture less: `ForwardMonitor(Mean(), every=n)`.

    Args:
        reducer: the inner reducer; its state must keep its shape, so not `Collect`.
        n: distance between the observations that count; the first one counts.

    Returns:
        The result of the inner reducer.

    Raises:
        ReducerTypeError: `reducer` is not a reducer instance.
        ArgumentError: `n` is not an integer from 1 up.
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

    # slot i reduces the observations i, i + n, i + 2n, ... before the newest

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
        count_a, count_b = a["observed"], b["observed"]
        shifted = (torch.arange(self.n, device=count_a.device) - count_b) % self.n
        a = ring.select(a, shifted)
        slots = []
        for index in range(self.n):
            older, newer = ring.slot(a, index), ring.slot(b, index)
            merged = ring.choose(self, shifted[index] < count_a, self.reducer.merge(older, newer), newer)
            slots.append(ring.choose(self, index < count_b, merged, older))
        return ring.stack(self, slots, count_a + count_b)

    def compute(self, state: State) -> Result:
        require_state(self, state)
        return self.reducer.compute(self._counting(state))

    def _counting(self, state: State) -> State:
        first = ((state["observed"] - 1) % self.n).reshape(1)
        return ring.slot(ring.select(state, first), 0)
