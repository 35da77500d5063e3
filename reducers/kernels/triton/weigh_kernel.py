"""The two launches for weighted sums: partial sums of the parts of a tensor and its weights, and their join with a state.

All is computed in float64, as weights may differ by any factor. Deviations are taken from the mean of a heavy tile: the mean of a
light one may be so far from the others that the sum of squares would lose them. Everything is added in an order that depends on
shapes only.
"""

from __future__ import annotations

import triton
import triton.language as tl

from reducers.kernels.triton.places import offset_of
from reducers.kernels.triton.sums import moments_of, moved

__all__ = ["join_weighted", "weigh"]


# Whether these are 1, or multiples of 16, makes no other kernel.
_PLAIN = [
    *("run_tiles", "all_tiles", "tiles", "parts", "kept_0", "kept_1", "kept_2", "outer_0", "outer_1"),
    *("kept_stride_0", "kept_stride_1", "kept_stride_2", "kept_stride_3", "outer_stride_0", "outer_stride_1", "outer_stride_2"),
    *("inner", "weight_inner_stride", "weight_run_stride"),
    *("weight_kept_stride_0", "weight_kept_stride_1", "weight_kept_stride_2", "weight_kept_stride_3"),
    *("weight_outer_stride_0", "weight_outer_stride_1", "weight_outer_stride_2"),
]


@triton.jit
def _wide(value):
    """Return a number of any dtype as float64."""
    if value.dtype == tl.bfloat16:
        value = value.to(tl.float32)
    return value.to(tl.float64)


@triton.jit(do_not_specialize=_PLAIN)
def weigh(
    x,
    partials,
    kept,
    run,
    run_stride,
    run_tiles,
    all_tiles,
    tiles,
    parts,
    kept_0,
    kept_1,
    kept_2,
    kept_stride_0,
    kept_stride_1,
    kept_stride_2,
    kept_stride_3,
    outer_0,
    outer_1,
    outer_stride_0,
    outer_stride_1,
    outer_stride_2,
    weights,
    inner,
    inner_stride,
    weight_inner_stride,
    weight_run_stride,
    weight_kept_stride_0,
    weight_kept_stride_1,
    weight_kept_stride_2,
    weight_kept_stride_3,
    weight_outer_stride_0,
    weight_outer_stride_1,
    weight_outer_stride_2,
    MOMENTS: tl.constexpr,
    KEPT_DIMS: tl.constexpr,
    OUTER_DIMS: tl.constexpr,
    AXIS: tl.constexpr,
    ROWS: tl.constexpr,
    INNER: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Write the weighted sums of part `program_id(1)` of the kept positions of column `program_id(0)` of tiles.

    `partials` is float64 of shape [fields, parts, kept]. The fields are the sum of the weights, then the weighted sum; or with
    moments that of the squared weights, then a centre, and the weighted sums of deviations from it and of their squares. The last
    field is the number of elements that are not finite, or whose weights are not.
    """
    INDEX: tl.constexpr = tl.int64 if WIDE else tl.int32
    column = tl.program_id(0).to(INDEX) * COLUMNS + tl.arange(0, COLUMNS).to(INDEX)
    inside = column < kept
    offset = offset_of(column, kept_0, kept_1, kept_2, kept_stride_0, kept_stride_1, kept_stride_2, kept_stride_3, KEPT_DIMS)
    weight_offset = offset_of(
        column,
        kept_0,
        kept_1,
        kept_2,
        weight_kept_stride_0,
        weight_kept_stride_1,
        weight_kept_stride_2,
        weight_kept_stride_3,
        KEPT_DIMS,
    )
    row = tl.arange(0, ROWS).to(INDEX) // INNER
    within = tl.arange(0, ROWS).to(INDEX) % INNER
    lane = tl.expand_dims(row * run_stride + within * inner_stride, 1 - AXIS) + tl.expand_dims(offset, AXIS)
    weight_row = row * weight_run_stride + within * weight_inner_stride
    weight_lane = tl.expand_dims(weight_row, 1 - AXIS) + tl.expand_dims(weight_offset, AXIS)
    wanted = tl.expand_dims(within < inner, 1 - AXIS) & tl.expand_dims(inside, AXIS)

    total = tl.zeros([COLUMNS], tl.float64)
    squares = tl.zeros([COLUMNS], tl.float64)
    others = tl.zeros([COLUMNS], tl.int32)
    heaviest = tl.zeros([COLUMNS], tl.float64)
    centre = tl.zeros([COLUMNS], tl.float64)
    first = tl.zeros([COLUMNS], tl.float64)
    second = tl.zeros([COLUMNS], tl.float64)

    start = tl.program_id(1).to(INDEX) * tiles
    stop = tl.minimum(start + tiles, all_tiles)
    for tile in range(start, stop):
        outer = tile // run_tiles
        position = (tile - outer * run_tiles) * (ROWS // INNER)
        place = x + position * run_stride + lane
        weight_place = weights + position * weight_run_stride + weight_lane
        if OUTER_DIMS > 0:
            place += offset_of(outer, outer_0, outer_1, 1, outer_stride_0, outer_stride_1, outer_stride_2, 0, OUTER_DIMS)
            weight_place += offset_of(
                outer, outer_0, outer_1, 1, weight_outer_stride_0, weight_outer_stride_1, weight_outer_stride_2, 0, OUTER_DIMS
            )
        there = tl.expand_dims(position + row < run, 1 - AXIS) & wanted
        value = _wide(tl.load(place, mask=there, other=0))
        weight = _wide(tl.load(weight_place, mask=there, other=0))
        # An element without weight is as if it were not there; its distance from the others must not count for the centre.
        finite = (tl.abs(weight) < float("inf")) & (tl.abs(value) < float("inf"))
        others += tl.sum(tl.where(finite, 0, 1), AXIS)
        used = (weight != 0) & finite
        value = tl.where(used, value, 0.0)
        weight = tl.where(used, weight, 0.0)
        tile_total = tl.sum(weight, AXIS)
        added = tl.sum(weight * value, AXIS)
        if MOMENTS:
            squares += tl.sum(weight * weight, AXIS)
            # Equal numbers have exactly themselves as the centre.
            middle = added / tl.where(tile_total > 0, tile_total, 1.0)
            middle = tl.maximum(middle, tl.min(tl.where(used, value, float("inf")), AXIS))
            middle = tl.minimum(middle, tl.max(tl.where(used, value, float("-inf")), AXIS))
            heavier = tile_total > heaviest
            heaviest = tl.where(heavier, tile_total, heaviest)
            shift = tl.where(heavier, centre - middle, 0.0)
            first, second, _, _ = moved(total, first, second, 0.0, 0.0, shift, 2)
            centre = tl.where(heavier, middle, centre)
            distance = tl.where(used, value - tl.expand_dims(centre, AXIS), 0.0)
            first += tl.sum(weight * distance, AXIS)
            second += tl.sum(weight * distance * distance, AXIS)
        else:
            first += added
        total += tile_total

    place = partials + tl.program_id(1).to(tl.int64) * kept + column
    field = parts.to(tl.int64) * kept
    tl.store(place, total, mask=inside)
    if MOMENTS:
        tl.store(place + field, squares, mask=inside)
        tl.store(place + 2 * field, centre, mask=inside)
        tl.store(place + 3 * field, first, mask=inside)
        tl.store(place + 4 * field, second, mask=inside)
    else:
        tl.store(place + field, first, mask=inside)
    tl.store(place + (5 if MOMENTS else 2) * field, others.to(tl.float64), mask=inside)


@triton.jit(do_not_specialize=["parts"])
def join_weighted(
    partials,
    nonfinite_out,
    weight_out,
    second_out,
    mean_out,
    m2_out,
    nonfinite_old,
    weight_old,
    second_old,
    mean_old,
    m2_old,
    kept,
    parts,
    MOMENTS: tl.constexpr,
    STATE: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write the weighted statistics of all parts, joined with those of a state, for the columns of block `program_id(0)`.

    `second_out` is the sum of the squared weights; without moments it is the weighted sum, and there is neither mean nor `m2`.
    """
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < kept
    part = tl.arange(0, PARTS)
    there = (part < parts)[:, None] & inside[None, :]
    place = partials + part[:, None].to(tl.int64) * kept + column[None, :]
    field = parts.to(tl.int64) * kept
    totals = tl.load(place, mask=there, other=0)
    weight = tl.sum(totals, 0)
    added = tl.sum(tl.load(place + field, mask=there, other=0), 0)
    others = tl.sum(tl.load(place + (5 if MOMENTS else 2) * field, mask=there, other=0).to(tl.int64), 0)
    before = weight
    if STATE:
        others += tl.load(nonfinite_old + column, mask=inside, other=0)
        before = tl.load(weight_old + column, mask=inside, other=0)
        added += tl.load(second_old + column, mask=inside, other=0)
    if MOMENTS:
        centres = tl.load(place + 2 * field, mask=there, other=0)
        firsts = tl.load(place + 3 * field, mask=there, other=0)
        seconds = tl.load(place + 4 * field, mask=there, other=0)
        heaviest = there & (totals == tl.max(totals, 0)[None, :])
        centre = tl.max(tl.where(heaviest, centres, float("-inf")), 0)
        centre = tl.where(inside, centre, 0.0)
        shifts = tl.where(there, centres - centre[None, :], 0.0)
        firsts, seconds, _, _ = moved(totals, firsts, seconds, 0.0, 0.0, shifts, 2)
        mean, m2, _, _ = moments_of(weight, centre, tl.sum(firsts, 0), tl.sum(seconds, 0), 0.0, 0.0, 2)
        if STATE:
            both = before + weight
            share = weight / tl.where(both > 0, both, 1.0)
            earlier = tl.load(mean_old + column, mask=inside, other=0)
            delta = mean - earlier
            mean = earlier + delta * share
            m2 += tl.load(m2_old + column, mask=inside, other=0) + delta * delta * share * before
        tl.store(mean_out + column, mean, mask=inside)
        tl.store(m2_out + column, m2, mask=inside)
    tl.store(nonfinite_out + column, others, mask=inside)
    tl.store(weight_out + column, weight + before if STATE else weight, mask=inside)
    tl.store(second_out + column, added, mask=inside)
