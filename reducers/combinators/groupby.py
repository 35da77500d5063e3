"""Statistics per group: per class label, per expert."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from reducers.core.inputs import observation_with
from reducers.core.reducer import Reducer, check_reducer
from reducers.core.states import check_states, require_state, to_device, tree_map
from reducers.errors import ReducerTypeError
from reducers.state import Result, State
from reducers.temporal.ring import check_length

__all__ = ["GroupBy"]


@dataclass(frozen=True)
class GroupBy(Reducer):
    """The inner reducer over the elements of each group; which group they are in is the second input.

    `update(state, x, labels)`: integers from 0 up, whose axes are the first ones of x, and repeated where it lacks them: `[batch]`
    beside `[batch, channels]`. What has another label, such as -100 for "ignore", is in no group. Integers in x are taken as
    in `Masked`. Each tensor of the state has one more axis in front, the groups.

    An update passes over the observation once per group: meant for ten classes or a hundred experts, not for a vocabulary.

    Args:
        reducer: a reducer with a pattern, or a product of such, whose state keeps its shape.
        groups: how many groups there are; labels from there up are in none. None lets the groups grow with the largest label:
            then each update waits for the device to read it, and cannot be compiled into one graph.

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
    groups: int | None = None

    def __post_init__(self) -> None:
        check_reducer(self.reducer, "GroupBy")
        if self.groups is not None:
            check_length(self, "groups")

    @property
    def ordered(self) -> bool:  # type: ignore[override]
        return self.reducer.ordered

    def update(self, state: State, *xs: Tensor) -> State:
        x, labels = observation_with(self, xs, "labels")
        if labels.is_floating_point() or labels.is_complex():
            raise ReducerTypeError(f"{self!r} takes labels that are integers and got {labels.dtype}")
        if x.numel() == 0:
            return state
        # where groups grow, the last is one that nothing is in: those that come later start from it
        rows = max(int(labels.max()) + 1, 0) + 1 if self.groups is None else self.groups
        masks = [(labels == group).expand(x.shape) for group in range(rows)]
        return self.merge(to_device(state, x.device), _stack([self.reducer.update_masked({}, x, mask) for mask in masks]))

    def merge(self, a: State, b: State) -> State:
        if not a or not b:
            return a or b
        if self.groups is None:
            rows = max(map(_count, (a, b)))
            a, b = _padded(a, rows), _padded(b, rows)
        check_states(self, a, b)
        b = to_device(b, next(iter(a.values())).device)
        return _stack([self.reducer.merge(_row(a, group), _row(b, group)) for group in range(_count(a))])

    def compute(self, state: State) -> Result:
        require_state(self, state)
        results = [self.reducer.compute(_row(state, group)) for group in range(_count(state))]
        return tree_map(_groups if self.groups is None else _all, *results)


def _all(*rows: Tensor) -> Tensor:
    return torch.stack(rows)


def _groups(*rows: Tensor) -> Tensor:
    return torch.stack(rows)[:-1]


def _count(state: State) -> int:
    return len(next(iter(state.values())))


def _padded(state: State, rows: int) -> State:
    return {key: torch.cat((value, value[-1:].expand(rows - len(value), *value.shape[1:]))) for key, value in state.items()}


def _row(state: State, group: int) -> State:
    return {key: value[group] for key, value in state.items()}


def _stack(states: list[State]) -> State:
    return {key: torch.stack([state[key] for state in states]) for key in states[0]}
