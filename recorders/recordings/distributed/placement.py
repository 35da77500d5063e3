"""Placement: which part of a tensor a state is of, if the tensor is spread over ranks; and how states of parts become one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import Any

import torch
from torch import Tensor

from recorders.recordings.storage.stored import as_bytes
from reducers import Product, Reducer, State

__all__ = ["Placement", "equal_states", "from_plain", "is_plain_placement", "join_parts", "to_plain"]

MOST = 64
"""Axes of a tensor, or dimensions of a mesh: PyTorch's operations take no more."""


@dataclass(frozen=True)
class Placement:
    """Which part of a tensor one rank has recorded.

    Attributes:
        rank: the global rank that recorded it.
        shared: whether the tensor is one of the net, so that ranks outside the mesh may hold copies of it: a parameter, its
            gradient after the reduction, its update, its state in the optimizer.
        home: the lowest rank of the device mesh over which the tensor is spread; None if it is no DTensor.
        axes: the number of axes of the tensor; None if a function of the user was applied to its parts.
        parts: for each dimension of the mesh that cuts the tensor: the axis, the index of the part, and the number of parts.
    """

    rank: int
    shared: bool = False
    home: int | None = None
    axes: int | None = None
    parts: tuple[tuple[int, int, int], ...] = ()

    def __str__(self) -> str:
        what = ", ".join(f"part {index} of {count} along axis {axis}" for axis, index, count in self.parts) or "a replica"
        return f"{what} on rank {self.rank}"


def to_plain(place: Placement) -> list[Any]:
    """The placement as data for JSON."""
    return [place.rank, place.shared, place.home, place.axes, [list(part) for part in place.parts]]


def from_plain(data: Sequence[Any]) -> Placement:
    """The placement of which `to_plain` made this, if `is_plain_placement`."""
    rank, shared, home, axes, parts = data
    return Placement(rank, shared, home, axes, tuple((axis, index, count) for axis, index, count in parts))


def is_plain_placement(value: Any) -> bool:
    """Whether this may be what `to_plain` returned."""
    if not isinstance(value, list) or len(value) != 5:
        return False
    rank, shared, home, axes, parts = value
    counts = [rank, *(number for number in (home, axes) if number is not None)]
    if not all(type(number) is int and 0 <= number < 2**62 for number in counts) or type(shared) is not bool:
        return False
    return isinstance(parts, list) and len(parts) <= MOST and (axes or 0) <= MOST and all(_is_part(part, axes) for part in parts)


def _is_part(value: Any, axes: int | None) -> bool:
    if not isinstance(value, list) or len(value) != 3 or not all(type(number) is int for number in value):
        return False
    axis, index, count = value
    return bool(0 <= axis < (MOST if axes is None else axes) and 0 <= index < count < 2**62)


def equal_states(a: State, b: State) -> bool:
    """Whether two states are equal, bit for bit."""
    return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)


def _equal(a: Tensor, b: Tensor) -> bool:
    if a is b:
        return True
    if a.shape != b.shape or a.dtype is not b.dtype:
        return False
    x, y = (as_bytes(tensor.detach().resolve_conj().resolve_neg().contiguous().cpu()) for tensor in (a, b))
    return bool(torch.equal(x, y))


def join_parts(reducer: Reducer, cells: Mapping[Placement, State]) -> State | None:
    """The state of a whole tensor from those of its parts, which may be empty; None if parts are missing, or do not make it."""
    if isinstance(reducer, Product):  # each reducer of it in its own way
        product: dict[str, Tensor] = {}
        for name, part in reducer.parts:
            joined = join_parts(part, {place: _beneath(state, f"{name}/") for place, state in cells.items()})
            if joined is None:
                return None
            product |= {f"{name}/{key}": value for key, value in joined.items()}
        return product
    held = {tuple(index for _, index, _ in place.parts): state for place, state in cells.items()}
    first = next(iter(cells))
    if len(held) < math.prod(count for _, _, count in first.parts):
        return None
    states = [held[index] for index in sorted(held) if held[index]]
    if len(states) < 2:
        return states[0] if states else {}
    if first.axes is None:
        return None
    ways = [_way(reducer, first.axes, axis) for axis, _, _ in first.parts]
    if all(way == {} for way in ways):
        return reduce(reducer.merge, states)
    if len(ways) > 1 or ways[0] is None:
        return None
    return _side_by_side(states, ways[0])


def _beneath(state: State, prefix: str) -> State:
    return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}


def _side_by_side(states: Sequence[State], along: Mapping[str, int | None]) -> State | None:
    """The states joined along an axis of each tensor; None if a tensor without that axis is not the same in all."""
    if any(state.keys() != along.keys() for state in states):
        return None
    first, joined = states[0], {}
    for key, axis in along.items():
        if axis is None and not all(_equal(state[key], first[key]) for state in states[1:]):
            return None
        joined[key] = first[key] if axis is None else torch.cat([state[key] for state in states], axis)
    return joined


def _way(reducer: Reducer, axes: int, axis: int) -> Mapping[str, int | None] | None:
    """How states of the parts of tensors cut along `axis` become that of the whole.

    Returns:
        {} if they merge; the axis of each tensor of the state along which they are put side by side (None if it is the same in
        all); or None if neither is right.
    """
    try:
        return _found_way(reducer, axes, axis)
    except TypeError:  # a reducer with a field that cannot be hashed
        return _found_way.__wrapped__(reducer, axes, axis)


@lru_cache(maxsize=256)
def _found_way(reducer: Reducer, axes: int, axis: int) -> Mapping[str, int | None] | None:
    # A reducer need not say how it treats parts: two observations, once whole and once in parts, show it. Numbers of any size are
    # in them, so that nothing is right by chance. Patterns may ask for axes of a certain length, so several are tried.
    with torch.random.fork_rng(devices=[]):
        for length in (2, 4, 8, 3):
            try:
                return _tried(reducer, axes, axis, length)
            except Exception:
                continue
    return None


def _tried(reducer: Reducer, axes: int, axis: int, length: int) -> Mapping[str, int | None] | None:
    sizes = [length] * axes
    sizes[axis] = 3 * length
    generator = torch.Generator().manual_seed(0)
    draws = [torch.randn((2, *sizes), dtype=torch.float64, generator=generator, device="cpu") for _ in range(2)]
    seen = draws[0] * 10 ** draws[1]

    def state(start: int, stop: int) -> State:
        return reduce(reducer.update, seen.narrow(axis + 1, start, stop - start).clone().unbind(), reducer.init())

    whole, (left, right) = state(0, 3 * length), (state(0, length), state(length, 3 * length))
    if _close(_or_none(lambda: reducer.merge(left, right)), whole):
        return {}
    along = {key: _cut(left[key].shape, right[key].shape, whole[key].shape) for key in whole}
    return along if _close(_or_none(lambda: _side_by_side([left, right], along)), whole) else None


def _or_none(make: Any) -> State | None:
    try:
        state: State | None = make()
    except Exception:
        return None
    return state


def _cut(left: Sequence[int], right: Sequence[int], whole: Sequence[int]) -> int | None:
    """The axis along which tensors of the first two shapes make one of the third; None if there is none."""
    longer = [axis for axis, sizes in enumerate(zip(left, right, whole, strict=True)) if len(set(sizes)) > 1]
    return longer[0] if len(longer) == 1 and left[longer[0]] + right[longer[0]] == whole[longer[0]] else None


def _close(a: State | None, b: State) -> bool:
    return a is not None and a.keys() == b.keys() and all(_near(a[key], b[key]) for key in b)


def _near(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype is not b.dtype:
        return False
    return bool(torch.equal(a, b) or (a.dtype.is_floating_point and torch.allclose(a, b, rtol=1e-9, atol=0.0, equal_nan=True)))
