"""The first launch: partial statistics of the parts of a tensor, which is read once.

Numbers narrower than float64 are summed in float32 within a tile, about a centre of the tile and scaled by a power of two, so that
neither the mean nor the size of the numbers costs precision; tiles are added in float64. At most 16 numbers of a tile are added one
by one, then in pairs. So sums are off by less than 1e-6 of the sum of the magnitudes of what is added. Everything is added in an
order that depends on shapes only: a result is the same in every run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from reducers.kernels.triton.places import offset_of
from reducers.kernels.triton.sums import moments_of, moved
from reducers.kernels.triton.words import as_word

__all__ = ["sweep"]


# Whether these are 1, or multiples of 16, makes no other kernel.
_PLAIN = [
    *("run_tiles", "all_tiles", "tiles", "parts", "kept_0", "kept_1", "kept_2", "kept_stride_0", "kept_stride_1"),
    *("kept_stride_2", "kept_stride_3", "outer_0", "outer_1", "outer_stride_0", "outer_stride_1", "outer_stride_2", "threshold"),
    "slot",
    *("inner", "mask_inner_stride", "mask_run_stride"),
    *("mask_kept_stride_0", "mask_kept_stride_1", "mask_kept_stride_2", "mask_kept_stride_3"),
    *("mask_outer_stride_0", "mask_outer_stride_1", "mask_outer_stride_2"),
]


@triton.jit(do_not_specialize=_PLAIN)
def sweep(
    x,
    partials,
    due,
    mask,
    addresses,
    cuts,
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
    threshold,
    inner,
    inner_stride,
    mask_inner_stride,
    mask_run_stride,
    mask_kept_stride_0,
    mask_kept_stride_1,
    mask_kept_stride_2,
    mask_kept_stride_3,
    mask_outer_stride_0,
    mask_outer_stride_1,
    mask_outer_stride_2,
    ORDER: tl.constexpr,
    EXTREMES: tl.constexpr,
    COUNTS: tl.constexpr,
    TOTAL: tl.constexpr,
    DOUBLE: tl.constexpr,
    INTEGER: tl.constexpr,
    LOWEST: tl.constexpr,
    HIGHEST: tl.constexpr,
    DUE: tl.constexpr,
    MANY: tl.constexpr,
    MASK: tl.constexpr,
    INNER: tl.constexpr,
    KEPT_DIMS: tl.constexpr,
    OUTER_DIMS: tl.constexpr,
    AXIS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDE: tl.constexpr,
    slot=0,
):
    """Write the statistics of part `program_id(1)` of the kept positions of column `program_id(0)` of tiles.

    `partials` is int64 of shape [fields, parts, kept]. The fields are the count, with the number of what is not finite in the upper
    half of its bits, then mean and central power sums up to `ORDER`,
    then minimum and maximum, then zeros, infinite numbers and NaN, then the total; floats as the bits of a float64. The slot says
    which of several such tables, one after another, is written.
    If there is a mask, elements for which it is 0 are as if they were not there.

    Of many tensors, part `program_id(0)` of all their parts; `x` is one of them, for its dtype. `addresses` has the place of each,
    or 0 if it is left out. `cuts` has, for each part, the number of its tensor, then the first element, then how many there are.
    """
    if DUE:  # noqa: SIM102  # without it nothing may be loaded
        if tl.load(due) == 0:
            return
    COMPUTE: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    INDEX: tl.constexpr = tl.int64 if WIDE else tl.int32
    if MANY:
        part = tl.program_id(0)
        column = tl.arange(0, COLUMNS).to(INDEX)
        address = tl.load(addresses + tl.load(cuts + part))
        x = address.to(x.dtype) + tl.load(cuts + parts + part)
        run = tl.where(address == 0, 0, tl.load(cuts + 2 * parts.to(tl.int64) + part)).to(INDEX)
        all_tiles = (run + ROWS - 1) // ROWS
        tiles = all_tiles
    else:
        part = tl.program_id(1)
        column = tl.program_id(0).to(INDEX) * COLUMNS + tl.arange(0, COLUMNS).to(INDEX)
    inside = column < kept
    kept_offset = offset_of(column, kept_0, kept_1, kept_2, kept_stride_0, kept_stride_1, kept_stride_2, kept_stride_3, KEPT_DIMS)
    row = tl.arange(0, ROWS).to(INDEX)
    if INNER > 1:
        within = row % INNER
        row = row // INNER
    lane = tl.expand_dims(row * run_stride, 1 - AXIS) + tl.expand_dims(kept_offset, AXIS)
    wanted = tl.expand_dims(inside, AXIS)
    if MASK:
        mask_kept = offset_of(
            column,
            kept_0,
            kept_1,
            kept_2,
            mask_kept_stride_0,
            mask_kept_stride_1,
            mask_kept_stride_2,
            mask_kept_stride_3,
            KEPT_DIMS,
        )
        mask_lane = tl.expand_dims(row * mask_run_stride, 1 - AXIS) + tl.expand_dims(mask_kept, AXIS)
    if INNER > 1:
        lane += tl.expand_dims(within * inner_stride, 1 - AXIS)
        mask_lane += tl.expand_dims(within * mask_inner_stride, 1 - AXIS)
        wanted = wanted & tl.expand_dims(within < inner, 1 - AXIS)

    count = tl.zeros([COLUMNS], tl.int32)  # of one part, which has fewer than 2**31 numbers of a column
    others = tl.zeros([COLUMNS], tl.int32)
    centre = tl.zeros([COLUMNS], tl.float64)
    first = tl.zeros([COLUMNS], tl.float64)
    second = tl.zeros([COLUMNS], tl.float64)
    third = tl.zeros([COLUMNS], tl.float64)
    fourth = tl.zeros([COLUMNS], tl.float64)
    zeros = tl.zeros([COLUMNS], tl.int32)
    infinite = tl.zeros([COLUMNS], tl.int32)
    missing = tl.zeros([COLUMNS], tl.int32)
    added = tl.zeros([COLUMNS], tl.float64)
    counted = tl.zeros([COLUMNS], tl.int64)
    if INTEGER:
        low = tl.full([COLUMNS], HIGHEST, x.dtype.element_ty)
        high = tl.full([COLUMNS], LOWEST, x.dtype.element_ty)
    else:
        low = tl.full([COLUMNS], float("inf"), COMPUTE)
        high = tl.full([COLUMNS], float("-inf"), COMPUTE)
    limit = threshold.to(tl.int64).to(tl.float64, bitcast=True).to(COMPUTE)

    start = tl.program_id(1).to(INDEX) * tiles
    stop = tl.minimum(start + tiles, all_tiles)
    for tile in range(start, stop):
        if OUTER_DIMS == 0:
            position = tile * (ROWS // INNER)
            offset = position * run_stride
        else:
            outer = tile // run_tiles
            position = (tile - outer * run_tiles) * (ROWS // INNER)
            offset = position * run_stride
            offset += offset_of(outer, outer_0, outer_1, 1, outer_stride_0, outer_stride_1, outer_stride_2, 0, OUTER_DIMS)
        there = tl.expand_dims(position + row < run, 1 - AXIS) & wanted
        raw = tl.load(x + offset + lane, mask=there, other=0)
        if MASK:
            chosen = mask + position * mask_run_stride + mask_lane
            if OUTER_DIMS > 0:
                chosen += offset_of(
                    outer, outer_0, outer_1, 1, mask_outer_stride_0, mask_outer_stride_1, mask_outer_stride_2, 0, OUTER_DIMS
                )
            there = there & (tl.load(chosen, mask=there, other=0) != 0)
        value = raw.to(COMPUTE)
        finite = there
        if not INTEGER:
            finite = there & (tl.abs(value) < float("inf"))
            value = tl.where(there, value, 0.0)
        clean = tl.where(finite, value, 0.0)
        if INTEGER:
            number = tl.sum(finite.to(tl.int32), AXIS)
        else:  # in one sum: a tile has fewer than 2**15 numbers
            number = tl.sum(tl.where(finite, 1, tl.where(there, 65536, 0)), AXIS)
            others += number >> 16
            number = number & 65535
        if COUNTS:
            zeros += tl.sum((there & (value == 0)).to(tl.int32), AXIS)
            if not INTEGER:
                infinite += tl.sum((tl.abs(value) == float("inf")).to(tl.int32), AXIS)
                missing += tl.sum((value != value).to(tl.int32), AXIS)
        if INTEGER:
            if EXTREMES:
                low = tl.minimum(low, tl.min(tl.where(there, raw, HIGHEST), AXIS).to(low.dtype))
                high = tl.maximum(high, tl.max(tl.where(there, raw, LOWEST), AXIS).to(high.dtype))
            if TOTAL == "sum" or TOTAL == "exact":
                counted += tl.sum(raw.to(tl.int64), AXIS)
        if TOTAL == "active":
            counted += tl.sum((tl.abs(clean) > limit).to(tl.int32), AXIS)
        if TOTAL == "exact" and not INTEGER:
            added += tl.sum(clean.to(tl.float64), AXIS)
        if ORDER > 0 or EXTREMES or TOTAL == "magnitudes" or TOTAL == "squares":
            least = tl.min(tl.where(finite, value, float("inf")), AXIS)
            greatest = tl.max(tl.where(finite, value, float("-inf")), AXIS)
            if EXTREMES and not INTEGER:
                low = tl.minimum(low, least)
                high = tl.maximum(high, greatest)
            # The power of two that brings the largest magnitude of a float32 tile near 1, and its inverse.
            if not DOUBLE:
                magnitude = tl.where(number > 0, tl.maximum(-least, greatest), 1.0)
                exponent = ((magnitude.to(tl.int32, bitcast=True) >> 23) & 255) - 127
                exponent = tl.minimum(tl.maximum(exponent, -120), 120)
                down = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
                up = ((exponent.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)
            else:
                down = tl.full([COLUMNS], 1.0, COMPUTE)
                up = tl.full([COLUMNS], 1.0, tl.float64)
            scaled = clean * tl.expand_dims(down, AXIS)
            if TOTAL == "magnitudes":
                added += tl.sum(tl.abs(scaled), AXIS).to(tl.float64) * up
            if TOTAL == "squares":
                added += tl.sum(scaled * scaled, AXIS).to(tl.float64) * up * up
            if ORDER > 0:
                # About the mean of the tile, or a number near it; equal numbers have exactly themselves as the centre.
                middle = tl.sum(scaled, AXIS) / tl.maximum(number, 1).to(COMPUTE)
                middle = tl.minimum(tl.maximum(middle, least * down), greatest * down)
                middle = tl.where(number > 0, middle, 0.0)
                distance = tl.where(finite, scaled - tl.expand_dims(middle, AXIS), 0.0)
                tile_centre = middle.to(tl.float64) * up
                centre = tl.where(count == 0, tile_centre, centre)
                shift = tile_centre - centre
                weight = number.to(tl.float64)
                power_1 = tl.sum(distance, AXIS).to(tl.float64) * up
                power_2 = tl.zeros([COLUMNS], tl.float64)
                power_3 = tl.zeros([COLUMNS], tl.float64)
                power_4 = tl.zeros([COLUMNS], tl.float64)
                if ORDER > 1:
                    square = distance * distance
                    power_2 = tl.sum(square, AXIS).to(tl.float64) * up * up
                    if ORDER > 2:
                        power_3 = tl.sum(square * distance, AXIS).to(tl.float64) * up * up * up
                        if ORDER > 3:
                            power_4 = tl.sum(square * square, AXIS).to(tl.float64) * up * up * up * up
                power_1, power_2, power_3, power_4 = moved(weight, power_1, power_2, power_3, power_4, shift, ORDER)
                first += power_1
                second += power_2
                third += power_3
                fourth += power_4
        count += number

    field = parts.to(tl.int64) * kept
    FIELDS: tl.constexpr = 1 + ORDER + 2 * EXTREMES + 3 * COUNTS + (TOTAL != "" and TOTAL != "peak")
    place = slot * (FIELDS * field) + part.to(tl.int64) * kept + column
    tl.store(partials + place, count.to(tl.int64) + (others.to(tl.int64) << 32), mask=inside)
    if ORDER > 0:
        mean, m2, m3, m4 = moments_of(count.to(tl.float64), centre, first, second, third, fourth, ORDER)
        tl.store(partials + field + place, as_word(mean), mask=inside)
        if ORDER > 1:
            tl.store(partials + 2 * field + place, as_word(tl.maximum(m2, 0.0)), mask=inside)
        if ORDER > 2:
            tl.store(partials + 3 * field + place, as_word(m3), mask=inside)
        if ORDER > 3:
            tl.store(partials + 4 * field + place, as_word(tl.maximum(m4, 0.0)), mask=inside)
    if EXTREMES:
        if INTEGER:
            tl.store(partials + (1 + ORDER) * field + place, low.to(tl.int64), mask=inside)
            tl.store(partials + (2 + ORDER) * field + place, high.to(tl.int64), mask=inside)
        else:
            tl.store(partials + (1 + ORDER) * field + place, as_word(low), mask=inside)
            tl.store(partials + (2 + ORDER) * field + place, as_word(high), mask=inside)
    if COUNTS:
        base = 1 + ORDER + 2 * EXTREMES
        tl.store(partials + base * field + place, zeros.to(tl.int64), mask=inside)
        tl.store(partials + (base + 1) * field + place, infinite.to(tl.int64), mask=inside)
        tl.store(partials + (base + 2) * field + place, missing.to(tl.int64), mask=inside)
    if TOTAL != "":
        base = 1 + ORDER + 2 * EXTREMES + 3 * COUNTS
        if TOTAL == "active" or (INTEGER and (TOTAL == "sum" or TOTAL == "exact")):
            tl.store(partials + base * field + place, counted, mask=inside)
        elif TOTAL == "sum":
            tl.store(partials + base * field + place, as_word(centre * count.to(tl.float64) + first), mask=inside)
        elif TOTAL != "peak":
            tl.store(partials + base * field + place, as_word(added), mask=inside)
