"""Wrapper: the base class of reducers that wrap one inner reducer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from reducers.core.fields import Reduction
from reducers.core.reducer import Reducer, check_reducer
from reducers.state import Nonfinite, Result, State


@dataclass(frozen=True)
class Wrapper(Reducer):
    """A reducer with the state of its inner reducer; forwards every method that a subclass does not override."""

    reducer: Reducer

    def __post_init__(self) -> None:
        check_reducer(self.reducer, type(self).__name__)

    @property
    def ordered(self) -> bool:  # type: ignore[override]
        return self.reducer.ordered

    @property
    def bounded(self) -> bool:  # type: ignore[override]
        return self.reducer.bounded

    @property
    def batchable(self) -> bool:
        return self.reducer.batchable

    def update(self, state: State, *xs: Tensor) -> State:
        return self.reducer.update(state, *xs)

    def update_all(self, state: State, xs: Tensor) -> State:
        return self.reducer.update_all(state, xs)

    def update_masked(self, state: State, x: Tensor, mask: Tensor) -> State:
        return self.reducer.update_masked(state, x, mask)

    def merge(self, a: State, b: State) -> State:
        return self.reducer.merge(a, b)

    def merge_all(self, states: Sequence[State]) -> State:
        return self.reducer.merge_all(states)

    def reductions_of(self, state: State) -> Mapping[str, Reduction]:
        return self.reducer.reductions_of(state)

    def _check(self, state: State) -> None:
        self.reducer.check(state)

    def compute(self, state: State) -> Result:
        return self.reducer.compute(state)

    def nonfinite(self, state: State) -> Nonfinite | None:
        return self.reducer.nonfinite(state)


@dataclass(frozen=True)
class InputWrapper(Wrapper):
    """A wrapper that changes the input of the inner reducer, so it supports neither stacked nor masked observations."""

    @property
    def batchable(self) -> bool:
        return False

    def update_all(self, state: State, xs: Tensor) -> State:
        return Reducer.update_all(self, state, xs)

    def update_masked(self, state: State, x: Tensor, mask: Tensor) -> State:
        return Reducer.update_masked(self, state, x, mask)
