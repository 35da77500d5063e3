"""Statistics per group: per class label, per expert."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from reducers import ring
from reducers.core import Reducer, Result, State, check_reducer, check_states, follow, leafwise, require_state
from reducers.errors import ReducerTypeError
from reducers.gates import fit

__all__ = ["GroupBy"]


@dataclass(frozen=True)
class GroupBy(Reducer):
    """The inner reducer over the elements of each group; which group they are in is the second input.

    `update(state, x, labels)`: integers from 0 to `groups - 1`, whose axes are the first ones of x, and repeated where it lacks
    them: `[batch]` beside `[batch, channels]`. What has another label, such as -100 for "ignore", is in no group. Integers in x are
    taken as float64. Each tensor of the state has one more axis in front, the groups.

    An update passes over the observation once per group: meant for ten classes or a hundred experts, not for a vocabulary.

    Args:
        reducer: a reducer with a pattern, or a product of such, whose state keeps its shape.
        groups: how many groups there are.

    Returns:
        What the inner reducer computes, with one more axis in front, the groups.

    Raises:
        ReducerTypeError: `reducer` is none, or takes observations whole, or the labels are no integers.
        ArgumentError: `groups` is no whole number from 1 up, or the shape of the labels does not fit.

    >>> import torch
    >>> from reducers import Mean
    >>> per_class = GroupBy(Mean(), groups=3)
    >>> state = per_class.update({}, torch.tensor([1.0, 3.0, 5.0]), torch.tensor([0, 0, 2]))
    >>> per_class.compute(state)
    tensor([2., nan, 5.], dtype=torch.float64)
    """

    reducer: Reducer
    groups: int

    def __post_init__(self) -> None:
        check_reducer(self.reducer, "GroupBy")
        ring.check_length(self, "groups")

    @property
    def ordered(self) -> bool:  # type: ignore[override]
        return self.reducer.ordered

    def update(self, state: State, *xs: Tensor) -> State:
        x, labels = fit(self, xs, "labels")
        if labels.is_floating_point() or labels.is_complex():
            raise ReducerTypeError(f"{self!r} takes labels that are integers and got {labels.dtype}")
        lifted = [self.reducer.update_masked({}, x, labels == group) for group in range(self.groups)]
        return self.merge(follow(state, x.device), _stack(lifted)) if lifted[0] else state

    def merge(self, a: State, b: State) -> State:
        if not a or not b:
            return a or b
        check_states(self, a, b)
        b = follow(b, next(iter(a.values())).device)
        return _stack([self.reducer.merge(_row(a, group), _row(b, group)) for group in range(self.groups)])

    def compute(self, state: State) -> Result:
        require_state(self, state)
        return leafwise(_rows, *[self.reducer.compute(_row(state, group)) for group in range(self.groups)])


def _rows(*results: Tensor) -> Tensor:
    return torch.stack(results)


def _row(state: State, group: int) -> State:
    return {key: value[group] for key, value in state.items()}


def _stack(states: list[State]) -> State:
    return {key: torch.stack([state[key] for state in states]) for key in states[0]}
