"""What the kernels do with a tile of lanes: where it begins, what each lane adds of it, and lanes joined for each kept position.

A tile is of shape [lanes * vector, unroll]; see `lanes.py`. What is reduced over axis 1, and over the neighbours of a piece, is in
the registers of one lane.
"""

from __future__ import annotations

import triton
import triton.language as tl

from reducers.kernels.triton.places import offset_of


@triton.jit
def tile_place(
    tile,
    run_tiles,
    run_stride,
    outer_0,
    outer_1,
    outer_stride_0,
    outer_stride_1,
    outer_stride_2,
    STEP: tl.constexpr,
    OUTER_DIMS: tl.constexpr,
):
    """Return at which position of the run a tile begins, and where it is in memory."""
    if OUTER_DIMS == 0:
        position = tile * STEP
        offset = position * run_stride
    else:
        outer = tile // run_tiles
        position = (tile - outer * run_tiles) * STEP
        offset = position * run_stride
        offset += offset_of(outer, outer_0, outer_1, 1, outer_stride_0, outer_stride_1, outer_stride_2, 0, OUTER_DIMS)
    return position, offset


@triton.jit
def _folded(x, FOLD: tl.constexpr):
    return tl.reshape(x, [x.shape[0] // FOLD, FOLD])


@triton.jit
def lane_sum(x, FOLD: tl.constexpr):
    """Return the sums of what each lane has of a tile; without a fold, of each of its neighbours in memory for itself."""
    x = tl.sum(x, 1)
    return tl.sum(_folded(x, FOLD), 1) if FOLD > 1 else x


@triton.jit
def lane_least(x, FOLD: tl.constexpr):
    """Return the least of what each lane has of a tile; see `lane_sum`."""
    x = tl.min(x, 1)
    return tl.min(_folded(x, FOLD), 1) if FOLD > 1 else x


@triton.jit
def lane_greatest(x, FOLD: tl.constexpr):
    """Return the greatest of what each lane has of a tile; see `lane_sum`."""
    x = tl.max(x, 1)
    return tl.max(_folded(x, FOLD), 1) if FOLD > 1 else x


@triton.jit
def to_tile(x, FOLD: tl.constexpr):
    """Return what lanes have in the shape of a tile."""
    if FOLD > 1:
        x = tl.reshape(tl.broadcast_to(x[:, None], [x.shape[0], FOLD]), [x.shape[0] * FOLD])
    return x[:, None]


@triton.jit
def _of_columns(x, COLUMNS: tl.constexpr, AXIS: tl.constexpr):
    """Return what lanes have, with those of the same kept positions along axis 1."""
    ACROSS: tl.constexpr = x.shape[0] // COLUMNS
    return tl.reshape(x, [COLUMNS, ACROSS, 1]) if AXIS == 1 else tl.reshape(x, [1, ACROSS, COLUMNS])


@triton.jit
def column_sum(x, COLUMNS: tl.constexpr, AXIS: tl.constexpr):
    """Return the sum over the lanes for each kept position."""
    return tl.reshape(tl.sum(_of_columns(x, COLUMNS, AXIS), 1), [COLUMNS])


@triton.jit
def column_least(x, COLUMNS: tl.constexpr, AXIS: tl.constexpr):
    """Return the least over the lanes for each kept position."""
    return tl.reshape(tl.min(_of_columns(x, COLUMNS, AXIS), 1), [COLUMNS])


@triton.jit
def column_greatest(x, COLUMNS: tl.constexpr, AXIS: tl.constexpr):
    """Return the greatest over the lanes for each kept position."""
    return tl.reshape(tl.max(_of_columns(x, COLUMNS, AXIS), 1), [COLUMNS])
