"""How a tensor is cut into tiles for a GPU: its axes merged as far as its strides allow, and a number of parts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from reducers.errors import ArgumentError
from reducers.kernels.axes import Axis, merged

MAX_DIMS = 4  # kept axes, and reduced axes besides the one along which tiles lie, that are left after merging
JOINED = 512  # partial statistics that one program joins at once: of more, registers are spilled
_MAX_PARTS = JOINED  # programs for one column of tiles: independent of the GPU, as results must be; one program joins all of them
_TILE = 1 << 12  # numbers of a tile: 16 for each of 256 threads
_NEIGHBOURS = 32  # threads that read neighbours in memory together
_COLUMNS = 8  # kept positions of a tile if neighbours in memory are reduced; each costs the threads registers


@dataclass(frozen=True)
class TilePlan:
    """The tiles of one tensor. A tile has `rows` positions along the run, a reduced axis, and `columns` kept positions.

    Attributes:
        kept_sizes: lengths of the merged kept axes, outermost first.
        kept_strides: their strides, in elements.
        run: length of the reduced axis along which tiles lie.
        run_stride: its stride.
        inner: length of a short reduced axis, all of which each position along the run has in a tile; 1 without one.
        inner_stride: its stride.
        outer_sizes: lengths of the other merged reduced axes, outermost first.
        outer_strides: their strides.
        rows: positions of a tile along the run, a power of two, times `inner_rows`.
        inner_rows: the power of two that is not below `inner`.
        columns: kept positions of a tile, a power of two.
        axis: the axis of a tile along which it is reduced: neighbours in memory are neighbours along axis 1.
        parts: number of programs that share the tiles of one column.
        tiles: number of tiles of a part; the last part may have fewer.
        wide: whether an offset may not fit into 32 bits.
        other_kept_strides, other_run_stride, other_inner_stride, other_outer_strides: the same strides of the tensor that is read
            along with it.
    """

    kept_sizes: tuple[int, ...]
    kept_strides: tuple[int, ...]
    run: int
    run_stride: int
    inner: int
    inner_stride: int
    outer_sizes: tuple[int, ...]
    outer_strides: tuple[int, ...]
    rows: int
    inner_rows: int
    columns: int
    axis: int
    parts: int
    tiles: int
    wide: bool
    other_kept_strides: tuple[int, ...]
    other_run_stride: int
    other_inner_stride: int
    other_outer_strides: tuple[int, ...]

    @property
    def kept(self) -> int:
        """The number of kept positions."""
        return math.prod(self.kept_sizes)

    @property
    def grid(self) -> tuple[int, int, int]:
        """The programs of a launch."""
        return -(-self.kept // self.columns), self.parts, 1

    def arguments(self) -> tuple[int, ...]:
        """Return what a kernel is told: numbers of positions and tiles, then sizes and strides, innermost first, 1 if missing."""
        run_tiles = -(-self.run // (self.rows // self.inner_rows))
        return (
            *(self.kept, self.run, self.run_stride, run_tiles, run_tiles * math.prod(self.outer_sizes), self.tiles, self.parts),
            *_innermost_first(self.kept_sizes, MAX_DIMS - 1),
            *_innermost_first(self.kept_strides, MAX_DIMS),
            *_innermost_first(self.outer_sizes, MAX_DIMS - 2),
            *_innermost_first(self.outer_strides, MAX_DIMS - 1),
        )

    def other_arguments(self) -> tuple[int, ...]:
        """Return the rest, if another tensor is read too: of the inner axis, and its strides of the run, kept and outer axes."""
        return (
            *(self.inner, self.inner_stride, self.other_inner_stride, self.other_run_stride),
            *_innermost_first(self.other_kept_strides, MAX_DIMS),
            *_innermost_first(self.other_outer_strides, MAX_DIMS - 1),
        )


def plan(x: Tensor, axes: tuple[int, ...], other: Tensor | None = None, double: bool = False) -> TilePlan | None:
    """Return how the reduction of `x` over `axes` is cut into tiles; None if more than `MAX_DIMS` axes cannot be merged.

    Args:
        other: a mask or weights in the shape of `x`, of any strides. Axes merge if the strides of both allow it.
        double: all is computed in float64, as integers always are.
    """
    found = merged_axes(x, axes, other)
    if found is None:
        return None
    kept, reduced, paired = *found, other is not None
    tile = _tile(torch.float64 if double else x.dtype, paired)
    positions = math.prod(size for size, _, _ in kept)
    most = max(1, tile // power_of_two(positions, _NEIGHBOURS)) if kept[-1][1] < reduced[-1][1] else tile
    outer, run, inner = cut_axes(reduced, paired, most)
    inner_rows = power_of_two(inner[0], most)
    length = run[0] * inner_rows
    if kept[-1][1] < (run if inner_rows == 1 else inner)[1]:
        axis, columns = 0, power_of_two(positions, _NEIGHBOURS)
        rows = power_of_two(length, max(1, tile // columns))
    else:
        axis, rows = 1, power_of_two(length, tile)
        columns = power_of_two(positions, min(_COLUMNS, max(1, tile // rows)))
    return tiled(x, kept, outer, run, inner, rows, inner_rows, columns, axis)


def merged_axes(x: Tensor, axes: tuple[int, ...], other: Tensor | None) -> tuple[list[Axis], list[Axis]] | None:
    """Return the kept and the reduced axes, merged; None if there are more than `MAX_DIMS` of either."""
    other = x if other is None else other
    merging = [(x.shape[axis], x.stride(axis), other.stride(axis)) for axis in range(x.ndim)]
    kept = merged([merging[axis] for axis in range(x.ndim) if axis not in axes])
    # A sum does not depend on the order of its axes, so they are merged in the order of memory.
    ordered = sorted((merging[axis] for axis in axes if x.shape[axis] > 1), key=lambda axis: axis[1:], reverse=True)
    reduced = merged(ordered)
    return None if len(kept) > MAX_DIMS or len(reduced) > MAX_DIMS else (kept, reduced)


def cut_axes(reduced: Sequence[Axis], paired: bool, most: int) -> tuple[list[Axis], Axis, Axis]:
    """Return the outer axes, the one along which tiles lie, and a short one within it, of length 1 without one.

    What does not merge because of a mask is often short, and the axis before it long: the rows of a tile, at most `most`, are of
    both.
    """
    outer = list(reduced)
    if paired and len(outer) > 1 and 2 * outer[-1][0] <= most:
        inner = outer.pop()
        return outer, outer.pop(), inner
    run = outer.pop(_run(reduced))
    return outer, run, (1, 1, 1)


def tiled(
    x: Tensor,
    kept: Sequence[Axis],
    outer: Sequence[Axis],
    run: Axis,
    inner: Axis,
    rows: int,
    inner_rows: int,
    columns: int,
    axis: int,
    programs: int = 0,
) -> TilePlan:
    """Return the plan for tiles of this size, along the axes that `merged_axes` and `cut_axes` found.

    Args:
        programs: how many share the tiles at most, if more than usual.
    """
    positions, step = math.prod(size for size, _, _ in kept), rows // inner_rows
    count = math.prod(size for size, _, _ in outer) * -(-run[0] // step)
    most = max(programs, _MAX_PARTS) // -(-positions // columns)
    tiles = -(-count // min(count, JOINED, max(1, most)))
    parts = -(-count // tiles)
    assert parts <= JOINED, f"{parts} parts of shape {tuple(x.shape)} are more than the {JOINED} that are joined"
    last = max(
        sum((one[0] - 1) * one[which] for one in (*kept, *outer))
        + (run[0] + rows) * run[which]
        + inner_rows * inner[which]
        + columns * max(one[which] for one in kept)
        for which in (1, 2)
    )
    return TilePlan(
        tuple(size for size, _, _ in kept),
        tuple(stride for _, stride, _ in kept),
        *run[:2],
        *inner[:2],
        tuple(size for size, _, _ in outer),
        tuple(stride for _, stride, _ in outer),
        rows,
        inner_rows,
        columns,
        axis,
        parts,
        tiles,
        # The numbers of tiles and positions, too: strides of 0 have many of them in little memory.
        last >= 2**31 or positions + columns >= 2**31 or run[0] + rows >= 2**31 or count + tiles >= 2**31,
        tuple(stride for _, _, stride in kept),
        run[2],
        inner[2],
        tuple(stride for _, _, stride in outer),
    )


def join_tile(parts: int, kept: int) -> tuple[int, int]:
    """Return how many parts, and how many kept positions, one program joins: all parts.

    Raises:
        ArgumentError: there are more parts than a program joins. No plan has so many.
    """
    if parts > JOINED:
        raise ArgumentError(f"{parts} parts cannot be joined: a program joins at most {JOINED}")
    rows = power_of_two(parts, JOINED)
    return rows, power_of_two(kept, max(1, JOINED // rows))


def _tile(dtype: torch.dtype, paired: bool = False) -> int:
    """Return the numbers of a tile: as many as threads hold without spilling registers."""
    if dtype.is_floating_point and dtype.itemsize <= 4:
        return _TILE
    return _TILE // (4 if paired else 2)  # integers are computed in float64, too


def _run(reduced: Sequence[Axis]) -> int:
    """Return the axis along which tiles lie: the last, whose elements are closest, unless it is short and another is not."""
    if reduced[-1][0] >= 32:
        return len(reduced) - 1
    return max(range(len(reduced)), key=lambda axis: (reduced[axis][0], axis))


def power_of_two(number: int, most: int) -> int:
    """Return the smallest power of two that is not below `number`, or `most` if that is smaller."""
    power = 1
    while power < most and power < number:  # a comparison for each bit, which dynamic sizes allow
        power *= 2
    return power


def _innermost_first(sizes: tuple[int, ...], length: int) -> tuple[int, ...]:
    """Return so many of the sizes, innermost first, and 1 for those that are missing."""
    return (*reversed(sizes), *(1,) * length)[:length]
