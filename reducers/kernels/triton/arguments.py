"""What the kernels are given: which statistics they compute, of which dtypes, and the numbers and constants of a launch."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from reducers.kernels.triton.layout import Plan, plan, plan_of_many

__all__ = [
    "COLUMNS",
    "DTYPES",
    "JOINED",
    "OUTPUTS",
    "WARPS",
    "Arguments",
    "bytes_of",
    "dtype_of",
    "family",
    "fields",
    "innermost_first",
    "kept_shape",
    "many_arguments",
    "output_of",
    "range_of",
    "sweep_arguments",
]

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
DTYPES = (*FLOATS, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool)
WARPS = 8
JOINED = 1024  # partial statistics that one program joins

TOTALS = ("sum", "exact", "magnitudes", "squares", "active", "peak")
OUTPUTS = ("count", "mean", "m2", "m3", "m4", "min", "max", "zeros", "nan", "inf")
COLUMNS = (*OUTPUTS, *TOTALS)
"""What the kernels compute of the finite elements: a reducer says which of these its state holds.

`sum` is as exact as `mean`, `exact` is added in float64; `magnitudes` and `squares` are sums of |x| and x^2; `active` counts
elements of |x| above a threshold; `peak` is the largest |x|. `nan` and `inf` count what is not finite.
"""


Arguments = tuple[tuple[int, int, int], tuple[int, ...], dict[str, Any]]
"""The grid of a launch, and the numbers and the constants that its kernel is given."""


def sweep_arguments(x: Tensor, axes: Sequence[int], columns: str, threshold: float) -> Arguments:
    """Return what the sweep is given for all tensors that have the shape, strides and dtype of `x`."""
    tiles = plan(x, tuple(axes))
    assert tiles is not None
    return _arguments(tiles, x.dtype, columns, threshold, many=False)


def many_arguments(dtype: torch.dtype, parts: int, columns: str, threshold: float) -> Arguments:
    """Return what the sweep of many tensors of one dtype is given, which are cut into so many parts in all."""
    _, numbers, constants = _arguments(plan_of_many(dtype, parts), dtype, columns, threshold, many=True)
    return (parts, 1, 1), numbers, constants


def _arguments(tiles: Plan, dtype: torch.dtype, columns: str, threshold: float, many: bool) -> Arguments:
    order, extremes, counts, total = family(columns, dtype)
    integer = not dtype.is_floating_point
    run_tiles = -(-tiles.run // tiles.rows)
    all_tiles = run_tiles
    for size in tiles.outer_sizes:  # math.prod cannot be traced with dynamic sizes
        all_tiles = all_tiles * size
    grid = (-(-tiles.kept // tiles.columns), tiles.parts, 1)
    numbers = (
        tiles.kept,
        tiles.run,
        tiles.run_stride,
        run_tiles,
        all_tiles,
        tiles.tiles,
        tiles.parts,
        *innermost_first(tiles.kept_sizes, 3),
        *innermost_first(tiles.kept_strides, 4),
        *innermost_first(tiles.outer_sizes, 2),
        *innermost_first(tiles.outer_strides, 3),
        _bits(threshold, dtype),
    )
    constants = {
        "ORDER": order,
        "EXTREMES": extremes,
        "COUNTS": counts,
        "TOTAL": total,
        "DOUBLE": integer or dtype is torch.float64,
        "INTEGER": integer,
        "LOWEST": range_of(dtype)[0],
        "HIGHEST": range_of(dtype)[1],
        "MANY": many,
        "KEPT_DIMS": len(tiles.kept_sizes),
        "OUTER_DIMS": len(tiles.outer_sizes),
        "AXIS": tiles.axis,
        "ROWS": tiles.rows,
        "COLUMNS": tiles.columns,
        "WIDE": tiles.wide,
        "num_warps": max(1, min(WARPS, tiles.rows * tiles.columns // 128)),
    }
    return grid, numbers, constants


def kept_shape(x: Tensor, axes: Sequence[int]) -> list[int]:
    """Return the shape of the result."""
    return [size for axis, size in enumerate(x.shape) if axis not in axes]


def family(columns: str, dtype: torch.dtype) -> tuple[int, int, int, str]:
    """Return the highest power, whether extremes are needed, whether counts are, and which total."""
    names = columns.split(",")
    total = next((name for name in TOTALS if name in names), "")
    order = sum(name in names for name in ("mean", "m2", "m3", "m4"))
    if total == "sum" and dtype.is_floating_point:
        order = max(order, 1)
    extremes = any(name in names for name in ("min", "max", "peak"))
    return order, int(extremes), int("zeros" in names), total


def fields(columns: str, dtype: torch.dtype) -> int:
    """Return how many partial statistics a part has."""
    order, extremes, counts, total = family(columns, dtype)
    return 1 + order + 2 * extremes + 3 * counts + (total not in ("", "peak"))


def output_of(name: str) -> str:
    """Return which output of the kernels a column is."""
    return "total" if name in TOTALS else name


def dtype_of(name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a column for tensors of a dtype."""
    if name in ("min", "max"):
        return dtype
    if name in ("count", "zeros", "nan", "inf", "active") or (name in ("sum", "exact") and not dtype.is_floating_point):
        return torch.int64
    return torch.float64


def bytes_of(value: Tensor) -> Tensor:
    """Return the tensor as the kernels take it: bool as bytes, without a copy."""
    return value.view(torch.uint8) if value.dtype is torch.bool else value


def range_of(dtype: torch.dtype) -> tuple[int, int]:
    """Return the smallest and the largest number of an integer dtype; of floats nothing that is used."""
    if dtype.is_floating_point:
        return 0, 0
    return (0, 255) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)


def _bits(threshold: float, dtype: torch.dtype) -> int:
    """Return the bits of the threshold as a float64; for narrower floats, of the largest float32 that is not above it."""
    if dtype.is_floating_point and dtype is not torch.float64:
        (nearest,) = struct.unpack("f", struct.pack("f", min(threshold, torch.finfo(torch.float32).max)))
        threshold = nearest if nearest <= threshold else math.nextafter(nearest, 0.0)
    (bits,) = struct.unpack("q", struct.pack("d", threshold))
    return int(bits)


def innermost_first(sizes: tuple[int, ...], length: int) -> tuple[int, ...]:
    """Return so many of the sizes, innermost first, and 1 for those that are missing."""
    return (*reversed(sizes), *(1,) * length)[:length]
