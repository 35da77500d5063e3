"""A ring of the last states of a reducer, newest first, stacked in one tensor per key; used by windows and histories.

A ring is a State: `ring/<key>` has a new first axis, the slots, and `observed` (int64) counts all states pushed so far. Unused
slots hold copies, so that the shapes are the same from the first state on.

Big slots are a view of a buffer of twice their size, with free rows before the newest. A push writes one of these and returns a
view that starts there, so what earlier states show never changes. When no free row is left, the slots are copied into a new
buffer; n pushes onto n slots copy them once, so the mean cost of a push does not depend on n.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from reducers.core.checks import check_cost, check_keys, check_shape
from reducers.core.reducer import Reducer
from reducers.core.states import check_states
from reducers.errors import StateError, StateMismatchError
from reducers.kernels.precision import aligned
from reducers.samples.slots import apply_indexing
from reducers.state import State

_PREFIX = "ring/"
_BIG = 1 << 18  # the least bytes of slots for which a buffer costs less than copying them

# For the slots of a newest state, the buffer that they are a view of, and the number of free rows before them.
_free_rows: MutableMapping[Tensor, tuple[Tensor, int]] = WeakTensorKeyDictionary()


def check_ring(owner: Reducer, inner: Reducer, ring: State, size: int) -> None:
    """Raise `StateError` if this is no ring of `size` states of the reducer `inner`."""
    check_keys(owner, ring, ("observed",), [key for key in ring if key.startswith(_PREFIX)])
    check_shape(owner, ring, "observed", (), torch.int64)
    for key, value in ring.items():
        if key != "observed":
            check_shape(owner, ring, key, (size, *value.shape[1:]))
    newest = slot(ring, 0)
    if not newest:
        raise StateError(f"{owner!r:.200} has no such state: it has no slots")
    inner.check(newest)
    check_cost(inner, newest, times=size)


def push(owner: Reducer, ring: State, state: State, size: int) -> State:
    """Return the ring with `state` as its newest slot and without the oldest.

    Raises:
        StateMismatchError: the keys or shapes of `state` differ from those in the ring.
    """
    if ring:
        check(owner, slot(ring, 0), state)
    rows = {key: ring[f"{_PREFIX}{key}"] if ring else value.expand(size, *value.shape) for key, value in state.items()}
    observed = ring["observed"] + 1 if ring else torch.ones((), dtype=torch.int64, device=next(iter(state.values())).device)
    return {**{f"{_PREFIX}{key}": _push_row(rows[key], value) for key, value in state.items()}, "observed": observed}


def _push_row(rows: Tensor, row: Tensor) -> Tensor:
    """Return `row`, followed by `rows` without the last."""
    if torch.compiler.is_compiling() or rows.dtype != row.dtype or rows.nbytes < _BIG:  # `cat` promotes other dtypes
        return torch.cat(aligned(row[None], rows[:-1]))
    size = len(rows)
    # `pop` is atomic: if several threads push onto one state, only one gets the free rows, and the others copy
    buffer, free = _free_rows.pop(rows, (rows, 0))
    if not free or buffer.is_inference() is not torch.is_inference_mode_enabled():  # the other mode may not write into it
        buffer, free = rows.new_empty((2 * size, *row.shape)), size + 1
        buffer[free:].copy_(rows[:-1])
    free -= 1
    buffer.data[free].copy_(row)  # through `data`, since this is no change of the states that are views of the buffer
    pushed = buffer[free : free + size]
    _free_rows[pushed] = buffer, free
    return pushed


def join(owner: Reducer, a: State, b: State, size: int) -> State:
    """Return a ring with the newest slots of two rings; `b` is the later one."""
    check(owner, a, b)
    newer = b["observed"].clamp(0, size)  # a forged count may be negative
    index = torch.arange(size, device=newer.device)
    index = torch.where(index < newer, index, size + index - newer)
    joined = {key: _chosen(torch.cat(aligned(b[key], a[key])), index) for key in a if key != "observed"}
    return {**joined, "observed": a["observed"] + b["observed"]}


def slot(ring: State, index: int) -> State:
    """Return the state in one slot, as views."""
    return {key[len(_PREFIX) :]: value[index] for key, value in ring.items() if key != "observed"}


def select(ring: State, index: Tensor) -> State:
    """Return the ring with its slots in the order of `index`, without synchronising the device."""
    return {key: value if key == "observed" else _chosen(value, index) for key, value in ring.items()}


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
    return {key: torch.where(condition, *aligned(a[key], b[key])) for key in a}


def check(owner: Reducer, a: State, b: State) -> None:
    """Raise `StateMismatchError` if two states cannot be slots of one ring."""
    try:
        check_states(owner, a, b)
        for key, value in a.items():
            if value.dtype != b[key].dtype and any(x.is_floating_point() and x.dtype.itemsize == 1 for x in (value, b[key])):
                raise StateMismatchError(f"{owner!r} keeps {value.dtype} for {key!r} so far and now met {b[key].dtype}")
    except StateMismatchError as error:
        name = type(owner).__name__
        raise StateMismatchError(f"{error} ({name} needs states of one shape; a reducer that grows has none)") from None


def _chosen(rows: Tensor, index: Tensor) -> Tensor:
    return apply_indexing(rows, lambda part: part.index_select(0, index))
