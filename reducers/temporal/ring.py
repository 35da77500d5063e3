"""The last few states of a reducer, side by side in one tensor per key, newest first: what windows and histories hold.

A ring is a State: `ring/<key>` has one more axis in front, the slots, and `observed` (int64) says how many states were put in, of
which the last are there. Slots that were not reached yet hold copies, so that shapes stay the same from the first state on.
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
    """Raises `ArgumentError` where the field `name` of `reducer` is not a whole number above 0."""
    value = getattr(reducer, name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ArgumentError(f"{type(reducer).__name__} takes {name}, a whole number from 1 up, and got {value!r}")


def push(owner: Reducer, ring: State, state: State, size: int) -> State:
    """The ring with `state` as its newest slot; the oldest is dropped.

    Raises:
        StateMismatchError: the state has other keys or shapes than those in the ring.
    """
    if not ring:
        copies = {f"{_PREFIX}{key}": torch.stack([value] * size) for key, value in state.items()}
        return {**copies, "observed": torch.ones((), dtype=torch.int64, device=next(iter(state.values())).device)}
    check(owner, slot(ring, 0), state)
    pushed = {f"{_PREFIX}{key}": torch.cat((value[None], ring[f"{_PREFIX}{key}"][:-1])) for key, value in state.items()}
    return {**pushed, "observed": ring["observed"] + 1}


def join(owner: Reducer, a: State, b: State, size: int) -> State:
    """The newest slots of two rings, of which `b` came later."""
    check_states(owner, a, b)
    newer = b["observed"].clamp(max=size)
    index = torch.arange(size, device=newer.device)
    index = torch.where(index < newer, index, size + index - newer)
    joined = {key: torch.cat((b[key], a[key])).index_select(0, index) for key in a if key != "observed"}
    return {**joined, "observed": a["observed"] + b["observed"]}


def slot(ring: State, index: int) -> State:
    """The state in one slot, as views."""
    return {key[len(_PREFIX) :]: value[index] for key, value in ring.items() if key != "observed"}


def select(ring: State, index: Tensor) -> State:
    """The ring with its slots in the order of `index`, which stays on the device."""
    return {key: value if key == "observed" else value.index_select(0, index) for key, value in ring.items()}


def stack(owner: Reducer, states: Sequence[State], observed: Tensor) -> State:
    """The ring of these states.

    Raises:
        StateMismatchError: keys or shapes differ between them.
    """
    for state in states[1:]:
        check(owner, states[0], state)
    return {**{f"{_PREFIX}{key}": torch.stack([state[key] for state in states]) for key in states[0]}, "observed": observed}


def choose(owner: Reducer, condition: Tensor, a: State, b: State) -> State:
    """`a` where the condition, 0-d, is True, and `b` elsewhere."""
    check(owner, a, b)
    return {key: torch.where(condition, a[key], b[key]) for key in a}


def check(owner: Reducer, a: State, b: State) -> None:
    """Raises `StateMismatchError` where two states do not fit into one ring."""
    try:
        check_states(owner, a, b)
    except StateMismatchError as error:
        name = type(owner).__name__
        raise StateMismatchError(f"{error} ({name} holds states of one shape; a reducer that grows has none)") from None
