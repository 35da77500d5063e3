"""The two launches for weighted sums: partial sums of the parts of a tensor and its weights, and their join with a state.

Each lane adds the elements that it reads by itself, and lanes are joined at the end of a part. All is added in float64, as weights
may differ by any factor. Deviations are taken from an element of a great weight: from one of little weight the others may be so far
that the sum of squares would lose them. If a tile has a greater weight than those before, its element is the next centre.

A part is read quickly at first, as if all were finite. Sums show whether that was so. If not, the part is read again, carefully:
what is not finite, or has such a weight, is left out and counted. Tiles that are not full are always read carefully. Everything is
added in an order that depends on shapes, strides and alignment only.
"""

from __future__ import annotations

import triton
import triton.language as tl

from reducers.kernels.triton.lane_sums import column_greatest, column_sum, lane_greatest, lane_sum, tile_place, to_tile
from reducers.kernels.triton.places import offset_of
from reducers.kernels.triton.sums import moments_of, moved

# Whether these are 1, or multiples of 16, makes no other kernel.
_PLAIN = ["run_tiles", "all_tiles", "tiles", "parts", "kept_0", "kept_1", "kept_2", "outer_0", "outer_1", "inner"]


@triton.jit
def _wide(value):
    """Return a number of any dtype as float64."""
    if value.dtype == tl.bfloat16:
        value = value.to(tl.float32)
    return value.to(tl.float64)


@triton.jit
def _at(near, ACROSS: tl.constexpr, COLUMNS: tl.constexpr, AXIS: tl.constexpr):
    """Return the row and the column of a tile that the first piece of a lane has."""
    return (near % ACROSS, near // ACROSS) if AXIS == 1 else (near // COLUMNS, near % COLUMNS)


@triton.jit
def _place(
    row,
    kept_place,
    run_stride,
    inner_stride,
    INNER: tl.constexpr,
    KEPT_DIMS: tl.constexpr,
    VECTOR: tl.constexpr,
    CLOSE: tl.constexpr,
):
    """Return where the rows of a tile are, from where the tile begins. `CLOSE` says that neighbours are so in memory, too."""
    place = row // INNER * run_stride
    if INNER > 1:
        place += row % INNER * inner_stride
    if KEPT_DIMS > 0:  # what is added to 0 is no operation, and would keep nothing of what is said here
        place += kept_place
    # Without the first a lane might read wider pieces, and others would have to read the rest. What is as far apart along both axes
    # would go to other threads than neighbours, in some versions of Triton. So it is called close, but of no alignment, without
    # which each number is read by itself.
    return tl.max_contiguous(place, [VECTOR, 1]) if CLOSE else tl.multiple_of(tl.max_contiguous(place, [2, 1]), [1, 1])


@triton.jit
def _kept_place(column, kept_0, kept_1, kept_2, stride_0, stride_1, stride_2, stride_3, DIMS: tl.constexpr):
    """Return where kept positions are; without kept axes there is one."""
    return offset_of(column, kept_0, kept_1, kept_2, stride_0, stride_1, stride_2, stride_3, DIMS) if DIMS > 0 else column * 0


@triton.jit
def _tile_places(
    tile,
    run_tiles,
    outer_0,
    outer_1,
    run_stride,
    outer_stride_0,
    outer_stride_1,
    outer_stride_2,
    weight_run_stride,
    weight_outer_stride_0,
    weight_outer_stride_1,
    weight_outer_stride_2,
    STEP: tl.constexpr,
    DIMS: tl.constexpr,
):
    """Return at which position of the run a tile begins, and where it is in both tensors."""
    position, offset = tile_place(
        tile, run_tiles, run_stride, outer_0, outer_1, outer_stride_0, outer_stride_1, outer_stride_2, STEP, DIMS
    )
    _, weight_offset = tile_place(
        tile,
        run_tiles,
        weight_run_stride,
        outer_0,
        outer_1,
        weight_outer_stride_0,
        weight_outer_stride_1,
        weight_outer_stride_2,
        STEP,
        DIMS,
    )
    return position, offset, weight_offset


@triton.jit
def _of_pieces(x, VECTOR: tl.constexpr):
    """Return a tile with the neighbours of a piece along axis 1."""
    return tl.reshape(x, [x.shape[0] // VECTOR, VECTOR, x.shape[1]])


@triton.jit
def _of_each(x, VECTOR: tl.constexpr):
    """Return what each lane has as what each of its neighbours has."""
    if VECTOR > 1:
        x = tl.reshape(tl.broadcast_to(x[:, None], [x.shape[0], VECTOR]), [x.shape[0] * VECTOR])
    return x


@triton.jit
def _of_tile(x, VECTOR: tl.constexpr):
    """Return what each piece has as what each of its neighbours has."""
    return tl.reshape(tl.broadcast_to(x[:, None, :], [x.shape[0], VECTOR, x.shape[1]]), [x.shape[0] * VECTOR, x.shape[1]])


@triton.jit
def _centred(top, element, heaviest, centre, total, first, second, EACH: tl.constexpr):
    """Return the greatest weight of a lane, an element that has it, and the sums about this element.

    `EACH` says how many kept positions a lane has if they share its weights.
    """
    heavier = top > heaviest
    here = _of_each(heavier, EACH)
    shift = tl.where(here, _wide(centre) - _wide(element), 0.0)
    first, second, _, _ = moved(_of_each(total, EACH), first, second, 0.0, 0.0, shift, 2)
    return tl.where(heavier, top, heaviest), tl.where(here, element, centre), first, second


@triton.jit
def _add(value, weight, heaviest, centre, total, squares, first, second, MOMENTS: tl.constexpr, FOLD: tl.constexpr):
    """Return the sums with those of a tile. Elements of a lane have each a weight of its own."""
    wide = _wide(weight)
    if MOMENTS:
        top = lane_greatest(weight, FOLD)
        element = lane_greatest(tl.where(weight == to_tile(top, FOLD), value, float("-inf")), FOLD)
        heaviest, centre, first, second = _centred(top, element, heaviest, centre, total, first, second, 1)
        distance = _wide(value) - to_tile(_wide(centre), FOLD)
        product = wide * distance
        first += lane_sum(product, FOLD)
        second += lane_sum(product * distance, FOLD)
        squares += lane_sum(wide * wide, FOLD)
    else:
        first += lane_sum(wide * _wide(value), FOLD)
    total += lane_sum(wide, FOLD)
    return heaviest, centre, total, squares, first, second


@triton.jit
def _add_pieces(
    value,
    weight,
    heaviest,
    centre,
    total,
    squares,
    first,
    second,
    MOMENTS: tl.constexpr,
    AXIS: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Return the sums with those of a full tile. Each piece of a lane has one weight."""
    NUMBER: tl.constexpr = VECTOR if AXIS == 1 else 1
    wide = _wide(weight)
    if AXIS == 1:
        if MOMENTS:
            top = tl.max(weight, 1)
            greatest = tl.max(_of_pieces(value, VECTOR), 1)
            element = tl.max(tl.where(weight == top[:, None], greatest, float("-inf")), 1)
            heaviest, centre, first, second = _centred(top, element, heaviest, centre, total, first, second, 1)
            distance = _wide(value) - to_tile(_wide(centre), VECTOR)
            second += tl.sum(wide * tl.sum(_of_pieces(distance * distance, VECTOR), 1), 1)
        else:
            distance = _wide(value)
        first += tl.sum(wide * tl.sum(_of_pieces(distance, VECTOR), 1), 1)
    else:
        each = _of_tile(wide, VECTOR)
        if MOMENTS:
            top = tl.max(weight, 1)
            element = tl.max(tl.where(_of_tile(weight == top[:, None], VECTOR), value, float("-inf")), 1)
            heaviest, centre, first, second = _centred(top, element, heaviest, centre, total, first, second, VECTOR)
            distance = _wide(value) - _wide(centre)[:, None]
            product = each * distance
            second += tl.sum(product * distance, 1)
        else:
            product = each * _wide(value)
        first += tl.sum(product, 1)
    total += tl.sum(wide, 1) * NUMBER
    if MOMENTS:
        squares += tl.sum(wide * wide, 1) * NUMBER
    return heaviest, centre, total, squares, first, second


@triton.jit
def _about_mean(weight, heaviest, centre, first, second):
    """Return the mean as the centre, and the sums about it; as they were if weights below 0 have used up those above."""
    usable = (weight > 0) & (weight >= heaviest)
    shift = tl.where(usable, first / tl.where(usable, weight, 1.0), 0.0)
    first, second, _, _ = moved(weight, first, second, 0.0, 0.0, -shift, 2)
    return centre + shift, first, second


@triton.jit
def _of_lanes(x, LANES: tl.constexpr, AXIS: tl.constexpr):
    """Return what kept positions have, as what their lanes have."""
    COLUMNS: tl.constexpr = x.shape[0]
    if AXIS == 1:
        return tl.reshape(tl.broadcast_to(x[:, None], [COLUMNS, LANES // COLUMNS]), [LANES])
    return tl.reshape(tl.broadcast_to(x[None, :], [LANES // COLUMNS, COLUMNS]), [LANES])


@triton.jit(do_not_specialize=_PLAIN, do_not_specialize_on_alignment=["partials"])
def weigh(
    x,
    partials,
    weights,
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
    DOUBLE: tl.constexpr,
    WEIGHTS_DOUBLE: tl.constexpr,
    QUICK: tl.constexpr,
    SHARED: tl.constexpr,
    CLOSE: tl.constexpr,
    KEPT_DIMS: tl.constexpr,
    OUTER_DIMS: tl.constexpr,
    AXIS: tl.constexpr,
    ROWS: tl.constexpr,
    INNER: tl.constexpr,
    COLUMNS: tl.constexpr,
    UNROLL: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Write the weighted sums of part `program_id(1)` of the kept positions of column `program_id(0)` of tiles.

    `partials` is float64 of shape [fields, parts, kept]. The fields are the sum of the weights, then the weighted sum; or with
    moments that of the squared weights, then a centre, and the weighted sums of deviations from it and of their squares. The last
    field is the number of elements that are not finite, or whose weights are not.

    `QUICK` says that tiles may be full, `SHARED` that each piece of a lane has one weight, `CLOSE` that the weights of a piece are
    neighbours in memory.
    """
    INDEX: tl.constexpr = tl.int64 if WIDE else tl.int32
    COMPUTE: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    WEIGHT: tl.constexpr = tl.float64 if WEIGHTS_DOUBLE else tl.float32
    NEAR: tl.constexpr = LANES * VECTOR
    FOLD: tl.constexpr = VECTOR if AXIS == 1 else 1
    ACROSS: tl.constexpr = NEAR // COLUMNS
    STEP: tl.constexpr = ROWS // INNER

    first_column = tl.program_id(0).to(INDEX) * COLUMNS
    near_row, column = _at(tl.arange(0, NEAR).to(INDEX)[:, None], ACROSS, COLUMNS, AXIS)
    column += first_column
    kept_place = _kept_place(column, kept_0, kept_1, kept_2, kept_stride_0, kept_stride_1, kept_stride_2, kept_stride_3, KEPT_DIMS)
    weight_kept_place = _kept_place(
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

    like = tl.zeros([NEAR // FOLD], tl.int32)
    nothing = like.to(tl.float64)
    others = like
    heaviest = like.to(WEIGHT)
    centre = like.to(COMPUTE)
    total = nothing
    squares = nothing
    first = nothing
    second = nothing
    again = 1

    start = tl.program_id(1).to(INDEX) * tiles
    stop = tl.minimum(start + tiles, all_tiles)
    if QUICK:
        if SHARED:
            by_lane = tl.zeros([LANES], tl.int32)
            heaviest = by_lane.to(WEIGHT)
            total = by_lane.to(tl.float64)
            squares = total
            lane_row, lane_column = _at(tl.arange(0, LANES).to(INDEX)[:, None] * VECTOR, ACROSS, COLUMNS, AXIS)
            lane_place = _kept_place(
                first_column + lane_column,
                kept_0,
                kept_1,
                kept_2,
                weight_kept_stride_0,
                weight_kept_stride_1,
                weight_kept_stride_2,
                weight_kept_stride_3,
                KEPT_DIMS,
            )
        else:
            lane_row = near_row
            lane_place = weight_kept_place
        unrolled = tl.arange(0, UNROLL).to(INDEX)[None, :] * ACROSS
        place = _place(unrolled + near_row, kept_place, run_stride, inner_stride, INNER, KEPT_DIMS, VECTOR, VECTOR > 1)
        weight_place = _place(
            unrolled + lane_row, lane_place, weight_run_stride, weight_inner_stride, INNER, KEPT_DIMS, VECTOR, CLOSE
        )
        position, offset, weight_offset = _tile_places(
            start,
            run_tiles,
            outer_0,
            outer_1,
            run_stride,
            outer_stride_0,
            outer_stride_1,
            outer_stride_2,
            weight_run_stride,
            weight_outer_stride_0,
            weight_outer_stride_1,
            weight_outer_stride_2,
            STEP,
            OUTER_DIMS,
        )
        # The next tile is on its way while one is added.
        whole = first_column + COLUMNS <= kept
        full = whole & (start < stop) & (position + STEP <= run)
        coming = tl.load(x + offset + place, mask=full)
        weight_coming = tl.load(weights + weight_offset + weight_place, mask=full)
        for tile in range(start, tl.where(whole, stop, start)):
            value = coming
            weight = weight_coming
            is_full = full
            position, offset, weight_offset = _tile_places(
                tile + 1,
                run_tiles,
                outer_0,
                outer_1,
                run_stride,
                outer_stride_0,
                outer_stride_1,
                outer_stride_2,
                weight_run_stride,
                weight_outer_stride_0,
                weight_outer_stride_1,
                weight_outer_stride_2,
                STEP,
                OUTER_DIMS,
            )
            full = (tile + 1 < stop) & (position + STEP <= run)
            coming = tl.load(x + offset + place, mask=full)
            weight_coming = tl.load(weights + weight_offset + weight_place, mask=full)
            if is_full:
                if SHARED:
                    heaviest, centre, total, squares, first, second = _add_pieces(
                        value.to(COMPUTE),
                        weight.to(WEIGHT),
                        heaviest,
                        centre,
                        total,
                        squares,
                        first,
                        second,
                        MOMENTS,
                        AXIS,
                        VECTOR,
                    )
                else:
                    heaviest, centre, total, squares, first, second = _add(
                        value.to(COMPUTE), weight.to(WEIGHT), heaviest, centre, total, squares, first, second, MOMENTS, FOLD
                    )
        if SHARED and AXIS == 0:
            heaviest = _of_each(heaviest, VECTOR)
            total = _of_each(total, VECTOR)
            squares = _of_each(squares, VECTOR)
        check = (total + squares + first + second) * 0.0  # NaN if something was not finite
        again = 1 - whole.to(tl.int32) + tl.max((check != check).to(tl.int32), 0)
        if again != 0:
            heaviest = like.to(WEIGHT)
            centre = like.to(COMPUTE)
            total = nothing
            squares = nothing
            first = nothing
            second = nothing

    # What is read carefully takes more registers, so that it is read by fewer pieces at a time.
    LIMIT: tl.constexpr = 8 // FOLD if AXIS == 1 else 2
    PIECES: tl.constexpr = 1 if LIMIT < 1 else LIMIT if LIMIT < UNROLL else UNROLL
    some = tl.arange(0, PIECES).to(INDEX)[None, :]
    for tile in range(start, stop):
        position, offset, weight_offset = _tile_places(
            tile,
            run_tiles,
            outer_0,
            outer_1,
            run_stride,
            outer_stride_0,
            outer_stride_1,
            outer_stride_2,
            weight_run_stride,
            weight_outer_stride_0,
            weight_outer_stride_1,
            weight_outer_stride_2,
            STEP,
            OUTER_DIMS,
        )
        if (again != 0) | (position + STEP > run):
            for piece in range(UNROLL // PIECES):
                row = (piece * PIECES + some) * ACROSS + near_row
                there = (position + row // INNER < run) & (column < kept)
                if INNER > 1:
                    there = there & (row % INNER < inner)
                where = _place(row, kept_place, run_stride, inner_stride, INNER, KEPT_DIMS, VECTOR, VECTOR > 1)
                weight_where = _place(
                    row, weight_kept_place, weight_run_stride, weight_inner_stride, INNER, KEPT_DIMS, VECTOR, CLOSE
                )
                value = tl.load(x + offset + where, mask=there, other=0).to(COMPUTE)
                weight = tl.load(weights + weight_offset + weight_where, mask=there, other=0).to(WEIGHT)
                finite = (tl.abs(weight) < float("inf")) & (tl.abs(value) < float("inf"))
                others += lane_sum((finite == 0).to(tl.int32), FOLD)
                # An element without weight is as if it were not there; how far it is away must not count.
                used = (weight != 0) & finite
                value = tl.where(used, value, 0.0)
                weight = tl.where(used, weight, 0.0)
                heaviest, centre, total, squares, first, second = _add(
                    value, weight, heaviest, centre, total, squares, first, second, MOMENTS, FOLD
                )

    kept_column = first_column + tl.arange(0, COLUMNS).to(INDEX)
    inside = kept_column < kept
    target = partials + tl.program_id(1).to(tl.int64) * kept + kept_column
    field = parts.to(tl.int64) * kept
    if MOMENTS:
        # About the means of lanes, then that of a heavy lane, then their own: sums lose nothing by centres that are far away.
        mean, first, second = _about_mean(total, _wide(heaviest), _wide(centre), first, second)
        most = _of_lanes(column_greatest(total, COLUMNS, AXIS), NEAR // FOLD, AXIS)
        common = column_greatest(tl.where(total == most, mean, float("-inf")), COLUMNS, AXIS)
        shift = mean - _of_lanes(common, NEAR // FOLD, AXIS)
        first, second, _, _ = moved(total, first, second, 0.0, 0.0, shift, 2)
        weight = column_sum(total, COLUMNS, AXIS)
        top = _wide(column_greatest(heaviest, COLUMNS, AXIS))
        mean, first, second = _about_mean(weight, top, common, column_sum(first, COLUMNS, AXIS), column_sum(second, COLUMNS, AXIS))
        tl.store(target, weight, mask=inside)
        tl.store(target + field, column_sum(squares, COLUMNS, AXIS), mask=inside)
        tl.store(target + 2 * field, mean, mask=inside)
        tl.store(target + 3 * field, first, mask=inside)
        tl.store(target + 4 * field, second, mask=inside)
    else:
        tl.store(target, column_sum(total, COLUMNS, AXIS), mask=inside)
        tl.store(target + field, column_sum(first, COLUMNS, AXIS), mask=inside)
    tl.store(target + (5 if MOMENTS else 2) * field, column_sum(others, COLUMNS, AXIS).to(tl.float64), mask=inside)


_PLACES = [
    "partials",
    *(f"{name}_{which}" for which in ("out", "old") for name in ("nonfinite", "weight", "second", "mean", "m2")),
]


# Where tensors begin makes no other kernel.
@triton.jit(do_not_specialize=["parts"], do_not_specialize_on_alignment=_PLACES)
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
            m2 += tl.load(m2_old + column, mask=inside, other=0) + delta * (share * before) * delta
        tl.store(mean_out + column, mean, mask=inside)
        tl.store(m2_out + column, m2, mask=inside)
    tl.store(nonfinite_out + column, others, mask=inside)
    tl.store(weight_out + column, weight + before if STATE else weight, mask=inside)
    tl.store(second_out + column, added, mask=inside)
