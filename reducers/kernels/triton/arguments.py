"""What the kernels are given: which statistics they compute, of which dtypes, and the numbers and constants of a launch."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from reducers.kernels.precision import float32_threshold
from reducers.kernels.triton.tiling import TilePlan, plan, plan_of_many

__all__ = [
    "COLUMNS",
    "DTYPES",
    "OUTPUTS",
    "WARPS",
    "Arguments",
    "bytes_of",
    "dtype_of",
    "family",
    "fields",
    "kept_shape",
    "many_arguments",
    "output_of",
    "range_of",
    "sweep_arguments",
    "swept_dtype",
    "takes_columns",
    "tile_constants",
]

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
DTYPES = (*FLOATS, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool)
WARPS = 8

TOTALS = ("sum", "exact", "magnitudes", "squares", "active", "peak")
_COUNTS = ("count", "nonfinite", "zeros", "nan", "inf", "active")
OUTPUTS = ("count", "nonfinite", "mean", "m2", "m3", "m4", "min", "max", "zeros", "nan", "inf")
COLUMNS = (*OUTPUTS, *TOTALS)
"""What the kernels compute of the finite elements: a reducer says which of these its state holds.

`sum` is as exact as `mean`, `exact` is added in float64; `magnitudes` and `squares` are sums of |x| and x^2; `active` counts
elements of |x| above a threshold; `peak` is the largest |x|. `nan`, `inf` and `nonfinite`, which is both, count what is not finite.
"""


Arguments = tuple[tuple[int, int, int], tuple[int | None, ...], dict[str, Any]]
"""The grid of a launch, and the numbers and the constants that its kernel is given."""


def takes_columns(dtype: torch.dtype, columns: Iterable[str]) -> bool:
    """Return whether the kernels compute these columns of a dtype: a `sum` of int64 may exceed int64, in which they add."""
    return dtype in DTYPES and not (dtype is torch.int64 and "sum" in columns)


def sweep_arguments(x: Tensor, axes: Sequence[int], columns: str, threshold: float, mask: Tensor | None = None) -> Arguments:
    """Return what the sweep is given for all tensors and masks that have the shapes, strides and dtype of these."""
    tiles = plan(x, tuple(axes), mask)
    assert tiles is not None
    return _arguments(tiles, swept_dtype(x, mask), columns, threshold, masked=mask is not None)


def many_arguments(dtype: torch.dtype, parts: int, columns: str, threshold: float) -> Arguments:
    """Return what the sweep of many tensors of one dtype is given, which are cut into so many parts in all."""
    _, numbers, constants = _arguments(plan_of_many(dtype, parts), dtype, columns, threshold, many=True)
    return (parts, 1, 1), numbers, constants


def _arguments(
    tiles: TilePlan, dtype: torch.dtype, columns: str, threshold: float, masked: bool = False, many: bool = False
) -> Arguments:
    order, extremes, counts, total = family(columns, dtype)
    integer = not dtype.is_floating_point
    others = tiles.other_arguments()
    numbers = (*tiles.arguments(), _bits(threshold, dtype), *(others if masked else (None,) * len(others)))
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
        "MASK": masked,
        "INNER": tiles.inner_rows,
        **tile_constants(tiles),
    }
    return tiles.grid, numbers, constants


def tile_constants(tiles: TilePlan) -> dict[str, Any]:
    """Return the constants of a launch that say what a tile is."""
    return {
        "KEPT_DIMS": len(tiles.kept_sizes),
        "OUTER_DIMS": len(tiles.outer_sizes),
        "AXIS": tiles.axis,
        "ROWS": tiles.rows,
        "COLUMNS": tiles.columns,
        "WIDE": tiles.wide,
        "num_warps": max(1, min(WARPS, tiles.rows * tiles.columns // 128)),
    }


def swept_dtype(x: Tensor, mask: Tensor | None) -> torch.dtype:
    """Return the dtype of the elements as they are reduced: under a mask integers are float64, as on a CPU."""
    return x.dtype if mask is None or x.dtype.is_floating_point else torch.float64


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
    if name in _COUNTS or (name in ("sum", "exact") and not dtype.is_floating_point):
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
    """Return the bits of the threshold as a float64, in which every float that the kernel compares with can be written."""
    if dtype.is_floating_point and dtype is not torch.float64:
        threshold = float32_threshold(threshold, dtype)
    (bits,) = struct.unpack("q", struct.pack("d", threshold))
    return int(bits)
