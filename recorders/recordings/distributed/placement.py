"""Placement: which part of a tensor a state is of, if the tensor is spread over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
