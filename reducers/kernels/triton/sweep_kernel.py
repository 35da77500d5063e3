"""The first launch: partial statistics of the parts of a tensor, which is read once.

Each lane adds the elements that it reads, a group of at most 32 at a time, and joins the groups in float64; lanes are joined at the
end of a part. Numbers narrower than float64 are summed in float32 within a group, about its own mean, so that the mean costs no
precision: sums are off by less than 1e-6 of the sum of the magnitudes of what is added.

A part is read quickly at first, as if every number were finite and no power of a distance left the range of float32. Sums show
whether that was so. If not, the part is read again, carefully: what is not finite is left out and counted, and each group is scaled
by a power of two. Tiles that are not full, and what a mask leaves out, are always read carefully. Everything is added in an order
that depends on shapes, strides and alignment only: a result is the same in every run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from reducers.kernels.triton.lane_sums import (
    column_greatest,
    column_least,
    column_sum,
    lane_greatest,
    lane_least,
    lane_sum,
    tile_place,
    to_tile,
)
from reducers.kernels.triton.places import offset_of
from reducers.kernels.triton.sums import moments_of, moved
from reducers.kernels.triton.words import as_word

# Whether these are 1, or multiples of 16, makes no other kernel.
_PLAIN = [
    *("run_tiles", "all_tiles", "tiles", "parts", "kept_0", "kept_1", "kept_2"),
    *("outer_0", "outer_1", "threshold"),
    "slot",
    *("inner", "mask_inner_stride", "mask_run_stride"),
    *("mask_kept_stride_0", "mask_kept_stride_1", "mask_kept_stride_2", "mask_kept_stride_3"),
    *("mask_outer_stride_0", "mask_outer_stride_1", "mask_outer_stride_2"),
]


@triton.jit(do_not_specialize=_PLAIN, do_not_specialize_on_alignment=["partials", "due", "addresses", "cuts"])
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
    ALIGNED: tl.constexpr,
    MASK: tl.constexpr,
    INNER: tl.constexpr,
    KEPT_DIMS: tl.constexpr,
    OUTER_DIMS: tl.constexpr,
    AXIS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    UNROLL: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
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
    NEAR: tl.constexpr = LANES * VECTOR
    FOLD: tl.constexpr = VECTOR if AXIS == 1 else 1
    GROUP: tl.constexpr = UNROLL * FOLD
    near = tl.arange(0, NEAR).to(INDEX)[:, None]
    unrolled = tl.arange(0, UNROLL).to(INDEX)[None, :]
    if MANY:
        part = tl.program_id(0)
        first_column = tl.zeros([], INDEX)
        address = tl.load(addresses + tl.load(cuts + part))
        x = address.to(x.dtype) + tl.load(cuts + parts + part)
        if ALIGNED:
            x = tl.multiple_of(x, 16)
        run = tl.where(address == 0, 0, tl.load(cuts + 2 * parts.to(tl.int64) + part)).to(INDEX)
        all_tiles = (run + ROWS - 1) // ROWS
        tiles = all_tiles
    else:
        part = tl.program_id(1)
        first_column = tl.program_id(0).to(INDEX) * COLUMNS
    ACROSS: tl.constexpr = NEAR // COLUMNS
    if AXIS == 1:
        near_row = near % ACROSS
        column = first_column + near // ACROSS
    else:
        near_row = near // COLUMNS
        column = first_column + near % COLUMNS
    place = (unrolled * ACROSS + near_row) * run_stride
    kept_place = tl.zeros([NEAR, 1], INDEX)
    if KEPT_DIMS > 0:
        kept_place = offset_of(
            column, kept_0, kept_1, kept_2, kept_stride_0, kept_stride_1, kept_stride_2, kept_stride_3, KEPT_DIMS
        )
        place += kept_place
    if VECTOR > 1:  # or a lane might read wider pieces, and others would have to read the rest
        place = tl.max_contiguous(place, [VECTOR, 1])
    if MASK:
        mask_kept_place = tl.zeros([NEAR, 1], INDEX)
        if KEPT_DIMS > 0:
            mask_kept_place = offset_of(
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
    # What is read carefully takes more registers, so that it is read by fewer pieces at a time.
    LIMIT: tl.constexpr = 8 // FOLD if AXIS == 1 else 2
    PIECES: tl.constexpr = 1 if LIMIT < 1 else LIMIT if LIMIT < UNROLL else UNROLL
    some = tl.arange(0, PIECES).to(INDEX)[None, :]

    like = tl.zeros([NEAR // FOLD], tl.int32)
    nothing = like.to(tl.float64)
    limit = threshold.to(tl.int64).to(tl.float64, bitcast=True).to(COMPUTE)

    start = tl.program_id(1).to(INDEX) * tiles
    stop = tl.minimum(start + tiles, all_tiles)
    # A tile with kept positions beyond the last is read carefully.
    quickly = (first_column + COLUMNS <= kept).to(tl.int32) * (1 - MASK)
    count = like  # of one part, which has fewer than 2**31 numbers of a column
    others = like
    zeros = like
    infinite = like
    missing = like
    centre = nothing
    first = nothing
    second = nothing
    third = nothing
    fourth = nothing
    added = nothing
    counted = like.to(tl.int64)
    if INTEGER:
        low = tl.full(like.shape, HIGHEST, x.dtype.element_ty)
        high = tl.full(like.shape, LOWEST, x.dtype.element_ty)
    else:
        low = tl.full(like.shape, float("inf"), COMPUTE)
        high = tl.full(like.shape, float("-inf"), COMPUTE)
    check = like.to(COMPUTE)  # NaN if a sum is not finite
    reach = like.to(COMPUTE)  # the greatest magnitude of what is raised to a power
    done = 0
    if MASK == 0:
        # The next tile is on its way while one is added.
        position, offset = tile_place(
            start,
            run_tiles,
            run_stride,
            outer_0,
            outer_1,
            outer_stride_0,
            outer_stride_1,
            outer_stride_2,
            ROWS // INNER,
            OUTER_DIMS,
        )
        full = (quickly != 0) & (start < stop) & (position + ROWS <= run)
        coming = tl.load(x + offset + place, mask=full)
        for tile in range(start, tl.where(quickly != 0, stop, start)):
            raw = coming
            is_full = full
            position, offset = tile_place(
                tile + 1,
                run_tiles,
                run_stride,
                outer_0,
                outer_1,
                outer_stride_0,
                outer_stride_1,
                outer_stride_2,
                ROWS // INNER,
                OUTER_DIMS,
            )
            full = (tile + 1 < stop) & (position + ROWS <= run)
            coming = tl.load(x + offset + place, mask=full)
            if is_full:
                value = raw.to(COMPUTE)
                if COUNTS:
                    zeros += lane_sum((value == 0).to(tl.int32), FOLD)
                if INTEGER:
                    if EXTREMES:
                        low = tl.minimum(low, lane_least(raw, FOLD).to(low.dtype))
                        high = tl.maximum(high, lane_greatest(raw, FOLD).to(high.dtype))
                    if TOTAL == "sum" or TOTAL == "exact":
                        counted += lane_sum(raw.to(tl.int64), FOLD)
                elif EXTREMES:
                    low = tl.minimum(low, lane_least(value, FOLD))
                    high = tl.maximum(high, lane_greatest(value, FOLD))
                if TOTAL == "active":
                    counted += lane_sum((tl.abs(value) > limit).to(tl.int32), FOLD)
                if TOTAL == "exact" and not INTEGER:
                    seen = lane_sum(value.to(tl.float64), FOLD)
                    added += seen
                    check += (seen * 0.0).to(COMPUTE)
                if TOTAL == "magnitudes":
                    seen = lane_sum(tl.abs(value), FOLD)
                    added += seen.to(tl.float64)
                    check += seen * 0.0
                if TOTAL == "squares":
                    seen = lane_sum(value * value, FOLD)
                    added += seen.to(tl.float64)
                    check += seen * 0.0
                    if not DOUBLE:
                        reach = tl.maximum(reach, lane_greatest(tl.abs(value), FOLD))
                if ORDER > 0:
                    middle = lane_sum(value, FOLD) * (1.0 / GROUP)
                    distance = value - to_tile(middle, FOLD)
                    seen = lane_sum(distance, FOLD)
                    power_1 = seen.to(tl.float64)
                    power_2 = nothing
                    power_3 = nothing
                    power_4 = nothing
                    if ORDER > 1:
                        square = distance * distance
                        seen = lane_sum(square, FOLD)
                        power_2 = seen.to(tl.float64)
                        if ORDER > 2:
                            power_3 = lane_sum(square * distance, FOLD).to(tl.float64)
                            if ORDER > 3:
                                seen = lane_sum(square * square, FOLD)
                                power_4 = seen.to(tl.float64)
                            else:
                                seen = lane_sum(square * tl.abs(distance), FOLD)
                        if not DOUBLE and not EXTREMES:
                            reach = tl.maximum(reach, lane_greatest(tl.abs(distance), FOLD))
                    check += seen * 0.0
                    tile_centre = middle.to(tl.float64)
                    centre = tl.where(done == 0, tile_centre, centre)
                    power_1, power_2, power_3, power_4 = moved(
                        GROUP, power_1, power_2, power_3, power_4, tile_centre - centre, ORDER
                    )
                    first += power_1
                    if ORDER > 1:
                        second += power_2
                    if ORDER > 2:
                        third += power_3
                    if ORDER > 3:
                        fourth += power_4
                elif not INTEGER and (TOTAL == "" or TOTAL == "active" or TOTAL == "peak"):
                    check += lane_sum(value * 0.0, FOLD)
                done += 1
    count += done * GROUP
    again = 1 - quickly
    if not INTEGER:
        bad = check != check
        if not DOUBLE:
            # So small a distance has no accurate power in float32. If nothing was read quickly it is 0.
            if ORDER > 1 and EXTREMES:
                reach = tl.where(high > low, high - low, 0.0)
            if ORDER > 1 or TOTAL == "squares":
                LEAST: tl.constexpr = 2.0**-25 if ORDER == 4 else 2.0**-34 if ORDER == 3 else 2.0**-50
                bad = bad | ((reach > 0) & (reach < LEAST))
        again += tl.max(bad.to(tl.int32), 0)
        if again != 0:
            count = like
            zeros = like
            centre = nothing
            first = nothing
            second = nothing
            third = nothing
            fourth = nothing
            added = nothing
            counted = like.to(tl.int64)
            low = tl.full(like.shape, float("inf"), COMPUTE)
            high = tl.full(like.shape, float("-inf"), COMPUTE)

    for tile in range(start, stop):
        position, offset = tile_place(
            tile, run_tiles, run_stride, outer_0, outer_1, outer_stride_0, outer_stride_1, outer_stride_2, ROWS // INNER, OUTER_DIMS
        )
        if (again != 0) | (position + ROWS > run):
            for piece in range(UNROLL // PIECES):
                row = (piece * PIECES + some) * ACROSS + near_row
                there = column < kept
                where = kept_place
                if INNER > 1:
                    within = row % INNER
                    row = row // INNER
                    there = there & (within < inner)
                    where += within * inner_stride
                there = (position + row < run) & there
                where += row * run_stride
                if VECTOR > 1:
                    where = tl.max_contiguous(where, [VECTOR, 1])
                raw = tl.load(x + offset + where, mask=there, other=0)
                if MASK:
                    chosen = mask_kept_place
                    if INNER > 1:
                        chosen += within * mask_inner_stride
                    # It is called close, but of no alignment, so that it is read by the lanes that read the elements, one by one.
                    chosen = tl.multiple_of(tl.max_contiguous(chosen + row * mask_run_stride, [2, 1]), [1, 1])
                    chosen = mask + position * mask_run_stride + chosen
                    if OUTER_DIMS > 0:
                        chosen += offset_of(
                            tile // run_tiles,
                            outer_0,
                            outer_1,
                            1,
                            mask_outer_stride_0,
                            mask_outer_stride_1,
                            mask_outer_stride_2,
                            0,
                            OUTER_DIMS,
                        )
                    there = there & (tl.load(chosen, mask=there, other=0) != 0)
                value = raw.to(COMPUTE)
                finite = there
                if not INTEGER:
                    finite = there & (tl.abs(value) < float("inf"))
                    value = tl.where(there, value, 0.0)
                clean = tl.where(finite, value, 0.0)
                number = lane_sum(finite.to(tl.int32), FOLD)
                if not INTEGER:
                    others += lane_sum((there & (finite == 0)).to(tl.int32), FOLD)
                if COUNTS:
                    zeros += lane_sum((there & (value == 0)).to(tl.int32), FOLD)
                    if not INTEGER:
                        infinite += lane_sum((tl.abs(value) == float("inf")).to(tl.int32), FOLD)
                        missing += lane_sum((value != value).to(tl.int32), FOLD)
                if INTEGER:
                    if EXTREMES:
                        low = tl.minimum(low, lane_least(tl.where(there, raw, HIGHEST), FOLD).to(low.dtype))
                        high = tl.maximum(high, lane_greatest(tl.where(there, raw, LOWEST), FOLD).to(high.dtype))
                    if TOTAL == "sum" or TOTAL == "exact":
                        counted += lane_sum(tl.where(there, raw, 0).to(tl.int64), FOLD)
                if TOTAL == "active":
                    counted += lane_sum((tl.abs(clean) > limit).to(tl.int32), FOLD)
                if TOTAL == "exact" and not INTEGER:
                    added += lane_sum(clean.to(tl.float64), FOLD)
                if ORDER > 0 or EXTREMES or TOTAL == "magnitudes" or TOTAL == "squares":
                    least = lane_least(tl.where(finite, value, float("inf")), FOLD)
                    greatest = lane_greatest(tl.where(finite, value, float("-inf")), FOLD)
                    if EXTREMES and not INTEGER:
                        low = tl.minimum(low, least)
                        high = tl.maximum(high, greatest)
                    # The power of two that brings the largest magnitude of a float32 group near 1, and its inverse.
                    if not DOUBLE:
                        magnitude = tl.where(number > 0, tl.maximum(-least, greatest), 1.0)
                        exponent = ((magnitude.to(tl.int32, bitcast=True) >> 23) & 255) - 127
                        exponent = tl.minimum(tl.maximum(exponent, -120), 120)
                        down = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
                        up = ((exponent.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)
                    else:
                        down = like.to(COMPUTE) + 1.0
                        up = nothing + 1.0
                    scaled = clean * to_tile(down, FOLD)
                    if TOTAL == "magnitudes":
                        added += lane_sum(tl.abs(scaled), FOLD).to(tl.float64) * up
                    if TOTAL == "squares":
                        added += lane_sum(scaled * scaled, FOLD).to(tl.float64) * up * up
                    if ORDER > 0:
                        # About the mean of the group, or a number near it; equal numbers have exactly themselves as the centre.
                        middle = lane_sum(scaled, FOLD) / tl.maximum(number, 1).to(COMPUTE)
                        middle = tl.minimum(tl.maximum(middle, least * down), greatest * down)
                        middle = tl.where(number > 0, middle, 0.0)
                        distance = tl.where(finite, scaled - to_tile(middle, FOLD), 0.0)
                        tile_centre = middle.to(tl.float64) * up
                        centre = tl.where(count == 0, tile_centre, centre)
                        power_1 = lane_sum(distance, FOLD).to(tl.float64) * up
                        power_2 = nothing
                        power_3 = nothing
                        power_4 = nothing
                        if ORDER > 1:
                            square = distance * distance
                            power_2 = lane_sum(square, FOLD).to(tl.float64) * up * up
                            if ORDER > 2:
                                power_3 = lane_sum(square * distance, FOLD).to(tl.float64) * up * up * up
                                if ORDER > 3:
                                    power_4 = lane_sum(square * square, FOLD).to(tl.float64) * up * up * up * up
                        weight = number.to(tl.float64)
                        power_1, power_2, power_3, power_4 = moved(
                            weight, power_1, power_2, power_3, power_4, tile_centre - centre, ORDER
                        )
                        first += power_1
                        if ORDER > 1:
                            second += power_2
                        if ORDER > 2:
                            third += power_3
                        if ORDER > 3:
                            fourth += power_4
                count += number

    if ORDER > 0:
        # About the centre of one lane, so that equal numbers have exactly themselves as the mean.
        weight = count.to(tl.float64)
        common = column_greatest(tl.where(count > 0, centre, float("-inf")), COLUMNS, AXIS)
        common = tl.where(common > float("-inf"), common, 0.0)
        if AXIS == 1:
            shift = tl.reshape(tl.broadcast_to(common[:, None], [COLUMNS, ACROSS // FOLD]), like.shape)
        else:
            shift = tl.reshape(tl.broadcast_to(common[None, :], [ACROSS, COLUMNS]), like.shape)
        shift = tl.where(count > 0, centre - shift, 0.0)
        first, second, third, fourth = moved(weight, first, second, third, fourth, shift, ORDER)
        centre = common
        first = column_sum(first, COLUMNS, AXIS)
        if ORDER > 1:
            second = column_sum(second, COLUMNS, AXIS)
        if ORDER > 2:
            third = column_sum(third, COLUMNS, AXIS)
        if ORDER > 3:
            fourth = column_sum(fourth, COLUMNS, AXIS)
    count = column_sum(count, COLUMNS, AXIS)
    others = column_sum(others, COLUMNS, AXIS)
    if EXTREMES:
        low = column_least(low, COLUMNS, AXIS)
        high = column_greatest(high, COLUMNS, AXIS)
    if COUNTS:
        zeros = column_sum(zeros, COLUMNS, AXIS)
        infinite = column_sum(infinite, COLUMNS, AXIS)
        missing = column_sum(missing, COLUMNS, AXIS)
    if TOTAL != "":
        added = column_sum(added, COLUMNS, AXIS)
        counted = column_sum(counted, COLUMNS, AXIS)
    kept_column = first_column + tl.arange(0, COLUMNS).to(INDEX)
    inside = kept_column < kept

    field = parts.to(tl.int64) * kept
    FIELDS: tl.constexpr = 1 + ORDER + 2 * EXTREMES + 3 * COUNTS + (TOTAL != "" and TOTAL != "peak")
    target = slot * (FIELDS * field) + part.to(tl.int64) * kept + kept_column
    tl.store(partials + target, count.to(tl.int64) + (others.to(tl.int64) << 32), mask=inside)
    if ORDER > 0:
        mean, m2, m3, m4 = moments_of(count.to(tl.float64), centre, first, second, third, fourth, ORDER)
        tl.store(partials + field + target, as_word(mean), mask=inside)
        if ORDER > 1:
            tl.store(partials + 2 * field + target, as_word(tl.maximum(m2, 0.0)), mask=inside)
        if ORDER > 2:
            tl.store(partials + 3 * field + target, as_word(m3), mask=inside)
        if ORDER > 3:
            tl.store(partials + 4 * field + target, as_word(tl.maximum(m4, 0.0)), mask=inside)
    if EXTREMES:
        if INTEGER:
            tl.store(partials + (1 + ORDER) * field + target, low.to(tl.int64), mask=inside)
            tl.store(partials + (2 + ORDER) * field + target, high.to(tl.int64), mask=inside)
        else:
            tl.store(partials + (1 + ORDER) * field + target, as_word(low), mask=inside)
            tl.store(partials + (2 + ORDER) * field + target, as_word(high), mask=inside)
    if COUNTS:
        base = 1 + ORDER + 2 * EXTREMES
        tl.store(partials + base * field + target, zeros.to(tl.int64), mask=inside)
        tl.store(partials + (base + 1) * field + target, infinite.to(tl.int64), mask=inside)
        tl.store(partials + (base + 2) * field + target, missing.to(tl.int64), mask=inside)
    if TOTAL != "":
        base = 1 + ORDER + 2 * EXTREMES + 3 * COUNTS
        if TOTAL == "active" or (INTEGER and (TOTAL == "sum" or TOTAL == "exact")):
            tl.store(partials + base * field + target, counted, mask=inside)
        elif TOTAL == "sum":
            tl.store(partials + base * field + target, as_word(centre * count.to(tl.float64) + first), mask=inside)
        elif TOTAL != "peak":
            tl.store(partials + base * field + target, as_word(added), mask=inside)
