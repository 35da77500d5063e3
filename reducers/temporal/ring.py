"""A ring of the last states of a reducer, newest first, stacked in one tensor per key; used by windows and histories.

A ring is a State: `ring/<key>` has a new first axis, the slots, and `observed` (int64) counts all states pushed so far. Unused
slots hold copies, so that the shapes are the same from the first state on.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from reducers.core.reducer import Reducer
from reducers.core.states import check_states
from reducers.errors import ArgumentError, StateMismatchError
from reducers.state import State

__all__ = ["check_length", "choose", "join", "push", "select", "slot", "stack"]

_PREFIX = "ring/"


def check_length(reducer: Reducer, name: str) -> None:
    """Raise `ArgumentError` if the field `name` of `reducer` is not an integer above 0."""
    value = getattr(reducer, name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ArgumentError(f"{type(reducer).__name__} takes {name}, an integer from 1 up, and got {value!r}")


def push(owner: Reducer, ring: State, state: State, size: int) -> State:
    """Return the ring with `state` as its newest slot and without the oldest.

    Raises:
        StateMismatchError: the keys or shapes of `state` differ from those in the ring.
    """
    if not ring:
        copies = {f"{_PREFIX}{key}": torch.stack([value] * size) for key, value in state.items()}
        return {**copies, "observed": torch.ones((), dtype=torch.int64, device=next(iter(state.values())).device)}
    check(owner, slot(ring, 0), state)
    pushed = {f"{_PREFIX}{key}": torch.cat((value[None], ring[f"{_PREFIX}{key}"][:-1])) for key, value in state.items()}
    return {**pushed, "observed": ring["observed"] + 1}


def join(owner: Reducer, a: State, b: State, size: int) -> State:
    """Return a ring with the newest slots of two rings; `b` is the later one."""
    check_states(owner, a, b)
    newer = b["observed"].clamp(max=size)
    index = torch.arange(size, device=newer.device)
    index = torch.where(index < newer, index, size + index - newer)
    joined = {key: torch.cat((b[key], a[key])).index_select(0, index) for key in a if key != "observed"}
    return {**joined, "observed": a["observed"] + b["observed"]}


def slot(ring: State, index: int) -> State:
    """Return the state in one slot, as views."""
    return {key[len(_PREFIX) :]: value[index] for key, value in ring.items() if key != "observed"}


def select(ring: State, index: Tensor) -> State:
    """Return the ring with its slots in the order of `index`, without synchronising the device."""
    return {key: value if key == "observed" else value.index_select(0, index) for key, value in ring.items()}


def stack(owner: Reducer, states: Sequence[State], observed: Tensor) -> State:
    """Return the ring of the given states.

    Raises:
        StateMismatchError: their keys or shapes differ.
    """
    for state in states[1:]:
        check(owner, states[0], state)
    return {**{f"{_PREFIX}{key}": torch.stack([state[key] for state in states]) for key in states[0]}, "observed": observed}


def choose(owner: Reducer, condition: Tensor, a: State, b: State) -> State:
    """Return `a` if the condition, a 0-d bool tensor, is True, else `b`, without synchronising the device."""
    check(owner, a, b)
    return {key: torch.where(condition, a[key], b[key]) for key in a}


def check(owner: Reducer, a: State, b: State) -> None:
    """Raise `StateMismatchError` if two states cannot be slots of one ring."""
    try:
        check_states(owner, a, b)
    except StateMismatchError as error:
        name = type(owner).__name__
        raise StateMismatchError(f"{error} ({name} needs states of one shape; a reducer that grows has none)") from None
