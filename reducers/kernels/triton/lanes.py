"""How a tensor is cut for the sweep: tiles in which each lane, a thread of the GPU, adds what it reads by itself.

A tile is of shape [lanes * vector, unroll]: a lane reads `unroll` pieces of `vector` neighbours in memory, of 16 bytes if it can.
All that a lane adds lies in its own registers, and the lanes of a program are joined once, when it has read its part.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from reducers.kernels.axes import Axis
from reducers.kernels.triton.tiling import JOINED, MAX_DIMS, TilePlan, cut_axes, merged_axes, power_of_two, tiled

_LANES = 128  # threads of a program
_EACH = 32  # elements that a lane reads of a tile before it adds them to its sums
_BYTES = 16  # the most that a thread reads at once
_KEPT = 4  # kept positions of a lane at most: each has sums of its own, in registers
_PIECES = 8  # of a lane along a reduced axis at least, if neighbours are kept: fewer are few numbers to add at once
_ROW = 128  # bytes of a row that lanes read together
_PROGRAMS = 2048  # at most, so that each processor of a GPU has about as much to do as the others
_TILES = 8  # of a program, or there are fewer programs
_GROUP = 2  # lanes at least along a reduced axis, so that they read whole sectors of 32 bytes
MOST_PARTS = JOINED // 2  # of one of many tensors: one program joins them
_PART_TILES = 8  # of a part of one of many tensors, unless that makes too many parts


@dataclass(frozen=True)
class LanePlan(TilePlan):
    """The tiles of one tensor, and the lanes of a tile. Neighbours in memory are neighbours in the piece of a lane.

    If they are reduced (`axis` is 1), a tile has `lanes // columns` lanes for each kept position, and `rows` is
    `unroll * lanes // columns * vector`. If they are kept, a row of a tile has `columns // vector` lanes, and a lane has `vector`
    kept positions.

    Attributes:
        unroll: pieces of a lane.
        lanes: threads of a program.
        vector: neighbours of a piece.
    """

    unroll: int
    lanes: int
    vector: int

    @property
    def across(self) -> int:
        """The number of lanes that have the same kept positions."""
        return self.rows // self.unroll if self.axis == 0 else self.rows // (self.unroll * self.vector)


def lane_plan(
    x: Tensor, axes: tuple[int, ...], other: Tensor | None = None, double: bool = False, shared: bool = False
) -> LanePlan | None:
    """Return how the reduction of `x` over `axes` is cut; None if more than `MAX_DIMS` axes cannot be merged.

    Args:
        other: a mask or weights in the shape of `x`, of any strides. Axes merge if the strides of both allow it.
        double: all is computed in float64, as integers always are.
        shared: lanes have as many elements as without `other` if neighbours share what is read of it.
    """
    found = merged_axes(x, axes, other)
    if found is None:
        return None
    kept, reduced, paired = *found, other is not None
    positions = math.prod(size for size, _, _ in kept)
    each = _each(x.dtype, double)
    nearest = kept[-1] if kept[-1][1] < reduced[-1][1] else reduced[-1]
    if paired and not (shared and nearest[2] == 0):
        each //= 2
    reduced = _parted(reduced, x.element_size())
    outer, run, inner = cut_axes(reduced, paired, _LANES * each if reduced[-1][1] <= kept[-1][1] else _LANES // 4)
    inner_rows = power_of_two(inner[0], _LANES * each)
    length = run[0] * inner_rows
    near = run if inner_rows == 1 else inner
    if kept[-1][1] < near[1]:
        apart = [*kept[:-1], *outer, run, inner]
        vector = min(_KEPT if each == _EACH else _KEPT // 2, neighbours_at_once(x, kept[-1], apart)) if len(kept) == 1 else 1
        columns = power_of_two(positions, min(_LANES * vector, max(_ROW // x.element_size(), 32)))
        vector = min(vector, columns)
        across = _LANES * vector // columns
        rows = power_of_two(length, across * max(_PIECES, each // vector))
        across = min(across, rows)
        unroll, lanes, axis = rows // across, across * columns // vector, 0
    else:
        apart = [*kept, *outer] if near is run else [*kept, *outer, run]
        rows = power_of_two(length, _LANES * each)
        if (positions > 1 or outer) and rows * _PART_TILES > length:  # else one tile in all is cut off
            rows = min(rows, max(_factor(length), _LANES // 2))
        # The neighbours of a piece lie together along the short axis only.
        vector = min(neighbours_at_once(x, near, apart), inner_rows if inner_rows > 1 else rows, each)
        unroll = max(1, min(each // vector, rows // (vector * _GROUP)))
        across = rows // (unroll * vector)
        columns, axis = power_of_two(positions, max(1, _LANES // across)), 1
        lanes = across * columns
    count = math.prod(size for size, _, _ in outer) * -(-run[0] // (rows // inner_rows)) * -(-positions // columns)
    cut = tiled(x, kept, outer, run, inner, rows, inner_rows, columns, axis, min(_PROGRAMS, count // _TILES))
    return LanePlan(**vars(cut), unroll=unroll, lanes=lanes, vector=vector)


def lane_plan_of_many(dtype: torch.dtype, parts: int) -> LanePlan:
    """Return the tiles of many tensors of one dtype, which lie in memory without gaps and are cut into so many parts in all."""
    axis, no_axes = (1,), ()
    each = _each(dtype)
    vector = min(_BYTES // dtype.itemsize, each)
    tile = TilePlan(axis, axis, 1, 1, 1, 1, no_axes, no_axes, _LANES * each, 1, 1, 1, parts, 1, False, axis, 1, 1, no_axes)
    return LanePlan(**vars(tile), unroll=each // vector, lanes=_LANES, vector=vector)


def cut_many(lengths: Sequence[int], dtype: torch.dtype) -> tuple[int, list[int]]:
    """Return into how many parts tensors of these numbers of elements are cut, and the table of it that the kernels read.

    How a tensor is cut depends on its own length only. Big ones have more parts than small ones, each of about equal length.
    """
    tile = _LANES * _each(dtype)
    owners: list[int] = []
    firsts: list[int] = []
    sizes: list[int] = []
    starts: list[int] = []
    for owner, length in enumerate(lengths):
        starts.append(len(owners))
        size = tile * max(_PART_TILES, -(-length // (tile * MOST_PARTS)))
        found = range(0, length, size)
        owners += [owner] * len(found)
        firsts += found
        sizes += [min(size, length - first) for first in found]
    numbers = [stop - start for start, stop in zip(starts, [*starts[1:], len(owners)], strict=True)]
    assert max(numbers, default=0) <= MOST_PARTS <= JOINED, "a tensor has more parts than are joined"
    return len(owners), [*owners, *firsts, *sizes, *starts, *numbers]


def _each(dtype: torch.dtype, double: bool = False) -> int:
    """Return how many elements a lane reads of a tile: half as many if they are computed in float64, as integers are."""
    return _EACH if dtype.is_floating_point and dtype.itemsize <= 4 and not double else _EACH // 2


def _factor(number: int) -> int:
    """Return the greatest power of two that divides a number."""
    return number & -number


def _parted(reduced: list[Axis], itemsize: int) -> list[Axis]:
    """Return the axes with the last cut, if it is not a power of two, so that the new last is: tiles of it are full."""
    *others, (size, stride, other) = reduced
    factor = _factor(size)
    if not others or len(reduced) == MAX_DIMS or factor == size or factor * itemsize < _ROW:
        return reduced
    return [(size // factor, stride * factor, other * factor), *others, (factor, stride, other)]


def neighbours_at_once(x: Tensor, near: Axis, others: Iterable[Axis]) -> int:
    """Return how many neighbours along an axis are read at once: they must lie together, and where a piece may begin."""
    vector = _BYTES // x.element_size()
    if near[1] != 1 or any(size > 1 and stride % vector for size, stride, _ in others):
        return 1
    return vector
