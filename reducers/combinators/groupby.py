"""GroupBy: one statistic per group, such as a class label or an expert."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from reducers.core.checks import check_cost, check_shape
from reducers.core.fields import Reduction
from reducers.core.inputs import observation_with
from reducers.core.reducer import MAX_SIZE, Reducer, check_reducer, check_size
from reducers.core.states import check_states, require_state, to_device, tree_map
from reducers.errors import ArgumentError, ReducerTypeError
from reducers.kernels.merging import stack
from reducers.state import Nonfinite, Result, State


@dataclass(frozen=True)
class GroupBy(Reducer):
    """The inner reducer applied to each group of elements; the labels of the groups are a second input.

    `update(state, x, labels)`: labels are integers from 0 up. Their axes are the leading axes of `x`, and they broadcast over
    the others: `[batch]` with `[batch, channels]`. Elements with any other label, such as -100 for "ignore", are in no group.
    Integers in `x` are converted as in `Masked`, and neither ids nor a payload are passed on. Each tensor of the state has a new
    first axis, the groups.

    An update reads the observation once per group: use it for tens of classes or a hundred experts, not for a vocabulary.

    Args:
        reducer: a reducer with a pattern, or a `Product` of such reducers; its state must keep its shape.
        groups: number of groups; larger labels are in no group. With None, the number grows with the largest label: then each
            update synchronises the device to read it, and cannot be compiled into one graph.

    Returns:
        The result of the inner reducer, with a new first axis, the groups.

    Raises:
        ReducerTypeError: `reducer` is not a reducer instance, or takes observations whole, or the labels are not integers.
        ArgumentError: `groups` is not an integer from 1 up, the labels do not broadcast to the observation, or without `groups`
            there is one from 2**31 - 1 up, such as -100 as uint32.

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
            check_size(self, "groups")

    @property
    def ordered(self) -> bool:  # type: ignore[override]
        return self.reducer.ordered

    @property
    def bounded(self) -> bool:  # type: ignore[override]
        return self.reducer.bounded

    def update(self, state: State, *xs: Tensor) -> State:
        x, labels = observation_with(self, xs, "labels")
        if labels.is_floating_point() or labels.is_complex():
            raise ReducerTypeError(f"{self!r} takes labels that are integers and got {labels.dtype}")
        if x.numel() == 0:
            return state
        unsigned = labels.dtype is torch.uint64
        labels = labels.to(torch.int64)  # uint64 beyond it becomes negative, which is in no group either
        rows = self._rows(labels, unsigned) if self.groups is None else self.groups
        masks = [(labels == group).expand(x.shape) for group in range(rows)]
        return self.merge(to_device(state, x.device), stack([self.reducer.update_masked({}, x, mask) for mask in masks]))

    def _rows(self, labels: Tensor, unsigned: bool) -> int:
        """Return one more than there are groups: later groups start from an empty last one."""
        highest = int(labels.max())
        if unsigned and len(beyond := labels[labels < 0]):
            highest = 2**64 + int(beyond.max())
        if highest >= MAX_SIZE:
            raise ArgumentError(f"{self!r} got the label {highest}: give `groups`, and labels from there on are in no group")
        return max(highest + 1, 0) + 1

    def merge(self, a: State, b: State) -> State:
        if not a or not b:
            return a or b
        if self.groups is None:
            rows = max(map(_group_count, (a, b)))
            a, b = _padded(a, rows), _padded(b, rows)
        check_states(self, a, b)
        b = to_device(b, next(iter(a.values())).device)
        return stack([self.reducer.merge(_group_state(a, group), _group_state(b, group)) for group in range(_group_count(a))])

    def reductions_of(self, state: State) -> Mapping[str, Reduction]:
        return self.reducer.reductions_of(state)

    def _check(self, state: State) -> None:
        groups = self.groups or max(_group_count(state), 1)
        for key, value in state.items():
            check_shape(self, state, key, (groups, *value.shape[1:]))
        first = _group_state(state, 0)
        self.reducer.check(first)
        check_cost(self.reducer, first, times=groups)

    def nonfinite(self, state: State) -> Nonfinite | None:
        found = [self.reducer.nonfinite(_group_state(state, group)) for group in range(_group_count(state))]
        numbers = [one.number for one in found if one is not None]
        totals = [one.of for one in found if one is not None and one.of is not None]
        return Nonfinite(torch.stack(numbers).sum(), torch.stack(totals).sum() if totals else None) if numbers else None

    def compute(self, state: State) -> Result:
        require_state(self, state)
        results = [self.reducer.compute(_group_state(state, group)) for group in range(_group_count(state))]
        end = -1 if self.groups is None else None
        return tree_map(lambda *rows: torch.stack(rows)[:end], *results)


def _group_count(state: State) -> int:
    return len(next(iter(state.values())))


def _padded(state: State, rows: int) -> State:
    return {key: torch.cat((value, value[-1:].expand(rows - len(value), *value.shape[1:]))) for key, value in state.items()}


def _group_state(state: State, group: int) -> State:
    return {key: value[group] for key, value in state.items()}
