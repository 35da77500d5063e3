"""Joins many states in few calls: an element-wise `join` also works on stacked states, two halves at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

_State: TypeAlias = dict[str, Tensor]


def same_layout(states: Sequence[_State]) -> bool:
    """Return whether all states have the same keys, shapes, dtypes and devices, so that they can be stacked."""
    first, *others = ({key: (value.shape, value.dtype, value.device) for key, value in state.items()} for state in states)
    return all(first == other for other in others)


def stack(states: Sequence[_State]) -> _State:
    """Stack states of the same layout along a new first axis."""
    return {key: torch.stack([state[key] for state in states]) for key in states[0]}


def join_stacked(join: Callable[[_State, _State], _State], stacked: _State) -> _State:
    """Join stacked states in order, by pairwise reduction: about log2(n) calls of `join` for n states."""
    while (count := len(next(iter(stacked.values())))) > 1:
        even = count - count % 2
        left, right = ({key: value[start:even:2] for key, value in stacked.items()} for start in (0, 1))
        joined = join(left, right)
        stacked = joined if even == count else {key: torch.cat((value, stacked[key][even:])) for key, value in joined.items()}
    return {key: value[0].clone() for key, value in stacked.items()}
