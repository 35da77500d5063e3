"""How a tensor is cut into tiles for a GPU: its axes merged as far as its strides allow, and a number of parts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["MAX_DIMS", "MOST_PARTS", "Plan", "cut_many", "fills_memory", "plan", "plan_of_many", "power_of_two"]

MAX_DIMS = 4  # kept axes, and reduced axes besides the one along which tiles lie, that are left after merging
_MAX_PARTS = 1024  # programs for one column of tiles: enough for any GPU, and independent of it, as results must be
_TILE = 1 << 12  # numbers of a tile: 16 for each of 256 threads
_NEIGHBOURS = 32  # threads that read neighbours in memory together
_COLUMNS = 8  # kept positions of a tile if neighbours in memory are reduced; each costs the threads registers
MOST_PARTS = 256  # of one of many tensors: one program joins them
_PART_TILES = 8  # of a part of one of many tensors, unless that makes too many parts

_Axis = tuple[int, int]  # length and stride


@dataclass(frozen=True)
class Plan:
    """The tiles of one tensor. A tile has `rows` positions along the run, a reduced axis, and `columns` kept positions.

    Attributes:
        kept_sizes: lengths of the merged kept axes, outermost first.
        kept_strides: their strides, in elements.
        run: length of the reduced axis along which tiles lie.
        run_stride: its stride.
        outer_sizes: lengths of the other merged reduced axes, outermost first.
        outer_strides: their strides.
        rows: positions of a tile along the run, a power of two.
        columns: kept positions of a tile, a power of two.
        axis: the axis of a tile along which it is reduced: neighbours in memory are neighbours along axis 1.
        parts: number of programs that share the tiles of one column.
        tiles: number of tiles of a part; the last part may have fewer.
        wide: whether an offset may not fit into 32 bits.
    """

    kept_sizes: tuple[int, ...]
    kept_strides: tuple[int, ...]
    run: int
    run_stride: int
    outer_sizes: tuple[int, ...]
    outer_strides: tuple[int, ...]
    rows: int
    columns: int
    axis: int
    parts: int
    tiles: int
    wide: bool

    @property
    def kept(self) -> int:
        """The number of kept positions."""
        return _product(self.kept_sizes)


def plan(x: Tensor, axes: tuple[int, ...]) -> Plan | None:
    """Return how the reduction of `x` over `axes` is cut into tiles; None if more than `MAX_DIMS` axes cannot be merged."""
    tile = _tile(x.dtype)
    kept = _merged([(x.shape[axis], x.stride(axis)) for axis in range(x.ndim) if axis not in axes])
    # A sum does not depend on the order of its axes, so they are merged in the order of memory.
    ordered = sorted((axis for axis in axes if x.shape[axis] > 1), key=x.stride, reverse=True)
    reduced = _merged([(x.shape[axis], x.stride(axis)) for axis in ordered])
    if len(kept) > MAX_DIMS or len(reduced) > MAX_DIMS:
        return None
    run = _run(reduced)
    length, stride = reduced.pop(run)
    sizes = [size for size, _ in kept]
    positions = _product(sizes)
    if kept[-1][1] < stride:
        axis, columns = 0, power_of_two(positions, _NEIGHBOURS)
        rows = power_of_two(length, max(1, tile // columns))
    else:
        axis, rows = 1, power_of_two(length, tile)
        columns = power_of_two(positions, min(_COLUMNS, max(1, tile // rows)))
    count = _product(size for size, _ in reduced) * -(-length // rows)
    parts = min(count, max(1, _MAX_PARTS // -(-positions // columns)))
    tiles = -(-count // parts)
    last = sum((size - 1) * stride for size, stride in (*kept, *reduced)) + (length + rows) * stride
    return Plan(
        tuple(sizes),
        tuple(stride for _, stride in kept),
        length,
        stride,
        tuple(size for size, _ in reduced),
        tuple(stride for _, stride in reduced),
        rows,
        columns,
        axis,
        -(-count // tiles),
        tiles,
        last + columns * max(stride for _, stride in kept) >= 2**31 or positions + columns >= 2**31,
    )


def plan_of_many(dtype: torch.dtype, parts: int) -> Plan:
    """Return the tiles of many tensors of one dtype, which lie in memory without gaps and are cut into so many parts in all."""
    return Plan((1,), (1,), 1, 1, (), (), rows=_tile(dtype), columns=1, axis=1, parts=parts, tiles=1, wide=False)


def cut_many(lengths: Sequence[int], dtype: torch.dtype) -> tuple[int, list[int]]:
    """Return into how many parts tensors of these numbers of elements are cut, and the table of it that the kernels read.

    How a tensor is cut depends on its own length only. Big ones have more parts than small ones, each of about equal length.
    """
    tile = _tile(dtype)
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
    return len(owners), [*owners, *firsts, *sizes, *starts, *numbers]


def fills_memory(x: Tensor) -> bool:
    """Return whether the elements lie in memory without gaps, each once, in any order of the axes."""
    reach = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and stride != reach:
            return False
        reach *= size
    return True


def _tile(dtype: torch.dtype) -> int:
    narrow = dtype.is_floating_point and dtype.itemsize <= 4
    return _TILE if narrow else _TILE // 2  # of float64, in which integers are computed, threads hold half as many


def _merged(axes: list[_Axis]) -> list[_Axis]:
    """Return the axes with neighbours merged if one stride reaches all their elements; at least one axis."""
    merged: list[_Axis] = []
    for size, stride in axes:
        if size == 1:
            continue
        if merged and merged[-1][1] == size * stride:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    return merged or [(1, 1)]


def _run(reduced: list[_Axis]) -> int:
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


def _product(sizes: Iterable[int]) -> int:
    result = 1
    for size in sizes:  # math.prod cannot be traced with dynamic sizes
        result *= size
    return result
