"""Whole: all observations, each kept in its own shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from reducers.core.inputs import observation
from reducers.core.reducer import Reducer
from reducers.core.states import require_state
from reducers.exemplars.collect import keep
from reducers.state import Result, State

__all__ = ["Whole"]


@dataclass(frozen=True)
class Whole(Reducer):
    """All observations, each in its own shape and dtype: both may change from one to the next.

    `Collect` concatenates observations, so it loses where one ends and the next begins. The state has a tensor for each
    observation, so memory grows without bound, and `torch.compile` compiles every update anew (monitors in compiled graphs do not).
    For the last n observations use `Window(Whole(), n)`, for a bounded number of samples `Reservoir`.

    Returns:
        a mapping from "0", "1", ... to the observations in order; observations without elements are left out.

    >>> import torch
    >>> whole = Whole()
    >>> state = whole.update(whole.update({}, torch.ones(2, 3)), torch.tensor([1, 2]))
    >>> {name: tuple(x.shape) for name, x in whole.compute(state).items()}
    {'0': (2, 3), '1': (2,)}
    """

    ordered: ClassVar[bool] = True

    def update(self, state: State, *xs: Tensor) -> State:
        x = observation(self, xs)
        return {**state, str(len(state)): keep(x)} if x.numel() else state

    def merge(self, a: State, b: State) -> State:
        return {**a, **{str(len(a) + index): keep(b[str(index)]) for index in range(len(b))}}

    def compute(self, state: State) -> Result:
        require_state(self, state)
        return {str(index): state[str(index)].clone() for index in range(len(state))}  # a file may list the keys in any order
