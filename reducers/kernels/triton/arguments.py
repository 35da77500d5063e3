"""What the kernels are given: which statistics they compute, of which dtypes, and the numbers and constants of a launch."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from reducers.kernels.columns import COLUMNS, Needs, joinable, needs_of
from reducers.kernels.precision import float32_threshold
from reducers.kernels.triton.lanes import LanePlan, lane_plan, lane_plan_of_many
from reducers.kernels.triton.tiling import TilePlan

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
DTYPES = (*FLOATS, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool)
WARPS = 8

_TOTALS = frozenset(name for name, column in COLUMNS.items() if column.is_total)
_COUNTED = frozenset(("zeros", "nan", "inf"))

Arguments = tuple[tuple[int, int, int], tuple[int | None, ...], dict[str, Any]]
"""The grid of a launch, and the numbers and the constants that its kernel is given."""


def takes_columns(dtype: torch.dtype, columns: Iterable[str]) -> bool:
    """Return whether the kernels compute these columns of a dtype: a `sum` of int32 or int64 may exceed their int64."""
    return dtype in DTYPES and are_computed({*columns}) and not (dtype in (torch.int32, torch.int64) and "sum" in columns)


def are_computed(columns: set[str]) -> bool:
    """Return whether one launch computes these columns, and the next joins them with those of a state."""
    # Graphs are traced through this, so no cache is asked. What is counted beside the others is counted together.
    return len(columns & _TOTALS) <= 1 and len(columns & _COUNTED) in (0, 3) and columns <= COLUMNS.keys() and joinable(columns)


def sweep_arguments(x: Tensor, axes: Sequence[int], columns: str, threshold: float, mask: Tensor | None = None) -> Arguments:
    """Return what the sweep is given for all tensors and masks that have the shapes, strides and dtype of these."""
    tiles = sweep_plan(x, axes, mask)
    assert tiles is not None
    return _arguments(tiles, swept_dtype(x, mask), columns, threshold, masked=mask is not None)


def sweep_plan(x: Tensor, axes: Sequence[int], mask: Tensor | None = None) -> LanePlan | None:
    """Return how the sweep of `x` over these axes is cut; None if too many axes are left after merging."""
    dtype = swept_dtype(x, mask)
    return lane_plan(x, tuple(axes), mask, double=dtype is torch.float64)


def many_arguments(dtype: torch.dtype, parts: int, columns: str, threshold: float, aligned: bool) -> Arguments:
    """Return what the sweep of many tensors of one dtype is given, which are cut into so many parts in all.

    Args:
        aligned: whether each of them begins at a multiple of 16 bytes.
    """
    _, numbers, constants = _arguments(lane_plan_of_many(dtype, parts), dtype, columns, threshold, many=True)
    constants["ALIGNED"] = aligned
    return (parts, 1, 1), numbers, constants


def _arguments(
    tiles: LanePlan, dtype: torch.dtype, columns: str, threshold: float, masked: bool = False, many: bool = False
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
        "ALIGNED": False,
        "MASK": masked,
        "INNER": tiles.inner_rows,
        **tile_constants(tiles),
        "KEPT_DIMS": len(tiles.kept_sizes) if tiles.kept > 1 else 0,
        "UNROLL": tiles.unroll,
        "LANES": tiles.lanes,
        "VECTOR": tiles.vector,
        "num_warps": max(1, tiles.lanes // 32),
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
    names = tuple(columns.split(","))
    needs = needs_of(names)
    order = max(COLUMNS[name].power for name in names)
    total = next((name for name in names if COLUMNS[name].is_total), "")
    if total == "sum" and dtype.is_floating_point:
        order = max(order, 1)
    return order, int(bool(needs & Needs.EXTREMES)), int(bool(needs & Needs.ZEROS)), total


def join_constants(columns: str, dtype: torch.dtype) -> dict[str, Any]:
    """Return the constants of the launches that join partial statistics of these columns."""
    order, extremes, counts, total = family(columns, dtype)
    names = columns.split(",")
    lowest, highest = range_of(dtype)
    return {
        "ORDER": order,
        "EXTREMES": extremes,
        "COUNTS": counts,
        "TOTAL": total,
        "INTEGER": not dtype.is_floating_point,
        "LOWEST": lowest,
        "HIGHEST": highest,
        **{f"WITH_{name.upper()}": name in names for name in ("mean", "min", "max")},
    }


def fields(columns: str, dtype: torch.dtype) -> int:
    """Return how many partial statistics a part has."""
    order, extremes, counts, total = family(columns, dtype)
    return 1 + order + 2 * extremes + 3 * counts + (total not in ("", "peak"))


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
