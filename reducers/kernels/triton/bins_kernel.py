"""How often elements fall into bins, counted straight into the new state: one launch prepares it, and one reads the elements.

Counts are integers that are added atomically, and extremes are integers in the order of the numbers, so the order of programs
changes no bit. If the bins of a tile are few, each program counts in bins of its own, in registers, and adds them to the state at
its end. If they are many, a copy for each program would be bigger than most tensors: programs then add each element to the state.
Only what shares a bin most often is counted before: zeros, and the first and the last bin of a tile, as constants and bounded
numbers have. Otherwise all programs would wait for one address.
"""

from __future__ import annotations

import triton
import triton.language as tl

from reducers.kernels.triton.places import offset_of
from reducers.kernels.triton.words import as_ordered


@triton.jit
def number_of(word, out, DOUBLE: tl.constexpr):
    """Return the number that an ordered integer stands for, in the dtype of `out`."""
    if DOUBLE:
        number = (word ^ ((word >> 63) & 0x7FFFFFFFFFFFFFFF)).to(tl.float64, bitcast=True)
        if out.dtype.element_ty != tl.float64:
            number = number.to(tl.float32)  # there is no conversion from float64 to bfloat16
    else:
        short = word.to(tl.int32)
        number = (short ^ ((short >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return number.to(out.dtype.element_ty)


@triton.jit
def _word(raw, INTEGER: tl.constexpr, DOUBLE: tl.constexpr):
    """Return what was loaded from a tensor as an ordered int64."""
    if INTEGER:
        word = raw.to(tl.int64)
    elif DOUBLE:
        word = as_ordered(raw.to(tl.float64))
    else:
        word = as_ordered(raw.to(tl.float32)).to(tl.int64)
    return word


@triton.jit(do_not_specialize=["entries", "kept", "lowest", "highest"])
def start(
    counts,
    table,
    nonfinite,
    counts_old,
    low_old,
    high_old,
    others_old,
    entries,
    kept,
    lowest,
    highest,
    STATE: tl.constexpr,
    EXTREMES: tl.constexpr,
    INTEGER: tl.constexpr,
    DOUBLE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the counts of a state, or zeros; and into `table`, int64 of shape [3, kept], its extremes in order, and zeros.

    `lowest` and `highest` stand for the extremes of no elements.
    """
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < entries
    found = tl.zeros([BLOCK], tl.int64)
    if STATE:
        found = tl.load(counts_old + place, mask=inside, other=0)
    tl.store(counts + place, found, mask=inside)
    if EXTREMES:
        inside = place < kept
        if STATE:
            low = _word(tl.load(low_old + place, mask=inside, other=0), INTEGER, DOUBLE)
            high = _word(tl.load(high_old + place, mask=inside, other=0), INTEGER, DOUBLE)
        else:
            low = tl.zeros([BLOCK], tl.int64) + lowest
            high = tl.zeros([BLOCK], tl.int64) + highest
        tl.store(table + place, low, mask=inside)
        tl.store(table + kept + place, high, mask=inside)
        tl.store(table + 2 * kept + place, tl.zeros([BLOCK], tl.int64), mask=inside)
        others = tl.zeros([BLOCK], tl.int64)
        if STATE:
            others = tl.load(others_old + place, mask=inside, other=0)
        tl.store(nonfinite + place, others, mask=inside)


@triton.jit
def _by_edges(number, bounds, edges, there, STEPS: tl.constexpr):
    """Return how many bounds are not above each number, by bisection; 0 for NaN."""
    found = tl.zeros(number.shape, tl.int32)
    for step in tl.static_range(STEPS):
        reach = found + (1 << (STEPS - 1 - step))
        within = there & (reach <= edges)
        bound = tl.load(bounds + reach - 1, mask=within, other=0)
        found = tl.where(within & (bound <= number), reach, found)
    return found


@triton.jit
def _by_bits(word, shift, zero, middle):
    """Return the bin that the sign, the exponent and the first bits of the mantissa select; zero is in bin `middle`."""
    word = word >> shift
    word = word - tl.minimum(tl.maximum(word, -zero), zero - 1)
    return (tl.minimum(tl.maximum(word, -middle), middle) + middle).to(tl.int32)


@triton.jit
def _extremes(word, there, low, high, LAST: tl.constexpr, AXIS: tl.constexpr):
    """Return the least and the greatest so far. Called where the fewest registers are in use, so that none is spilled."""
    low = tl.minimum(low, tl.min(tl.where(there, word, LAST), AXIS))
    high = tl.maximum(high, tl.max(tl.where(there, word, -LAST - 1), AXIS))
    return low, high


# Whether these are 1, or multiples of 16, makes no other kernel.
_PLAIN = [
    *("run_tiles", "all_tiles", "tiles", "parts", "kept_0", "kept_1", "kept_2", "kept_stride_0", "kept_stride_1"),
    *("kept_stride_2", "kept_stride_3", "outer_0", "outer_1", "outer_stride_0", "outer_stride_1", "outer_stride_2"),
    *("bins", "edges", "shift", "zero", "middle", "kept"),
]


@triton.jit(do_not_specialize=_PLAIN)
def count(
    x,
    counts,
    table,
    nonfinite,
    low_out,
    high_out,
    bounds,
    bins,
    edges,
    shift,
    zero,
    middle,
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
    STEPS: tl.constexpr,
    EDGES: tl.constexpr,
    INTEGER: tl.constexpr,
    DOUBLE: tl.constexpr,
    BINS: tl.constexpr,
    KEPT_DIMS: tl.constexpr,
    OUTER_DIMS: tl.constexpr,
    AXIS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Add the elements of part `program_id(1)` of the kept positions of column `program_id(0)` of tiles to `counts`.

    `counts` is int64 of shape [kept, bins]. With `EDGES`, bins lie between `bounds`, and the last is for NaN. Otherwise the bits of
    a number select its bin, what is not finite is left out, and the last program of a column writes the extremes.

    Args:
        table: what `start` wrote: the extremes so far, and how many programs of a column of tiles are done.
        BINS: number of bins that a program counts in by itself, for each kept position of a tile; 0 if it has none.
    """
    INDEX: tl.constexpr = tl.int64 if WIDE else tl.int32
    column = tl.program_id(0).to(INDEX) * COLUMNS + tl.arange(0, COLUMNS).to(INDEX)
    inside = column < kept
    kept_offset = offset_of(column, kept_0, kept_1, kept_2, kept_stride_0, kept_stride_1, kept_stride_2, kept_stride_3, KEPT_DIMS)
    row = tl.arange(0, ROWS).to(INDEX)
    lane = tl.expand_dims(row * run_stride, 1 - AXIS) + tl.expand_dims(kept_offset, AXIS)
    wanted = tl.expand_dims(inside, AXIS)
    target = counts + column.to(tl.int64) * bins
    if BINS > 0:
        own_bins = tl.zeros([COLUMNS * BINS], tl.int32)  # of one part, which has fewer than 2**31 elements of a column
        first_bin = tl.expand_dims(tl.arange(0, COLUMNS) * BINS, AXIS)
    else:
        at_zero = tl.zeros([COLUMNS], tl.int32)
    LONG: tl.constexpr = x.dtype.element_ty.primitive_bitwidth == 64 if INTEGER else DOUBLE
    WORD: tl.constexpr = tl.int64 if LONG else tl.int32
    LAST: tl.constexpr = 0x7FFFFFFFFFFFFFFF if LONG else 0x7FFFFFFF  # in order, it is beyond inf
    low = tl.full([COLUMNS], LAST, WORD)
    high = tl.full([COLUMNS], -LAST - 1, WORD)
    others = tl.zeros([COLUMNS], tl.int32)

    begin = tl.program_id(1).to(INDEX) * tiles
    stop = tl.minimum(begin + tiles, all_tiles)
    for tile in range(begin, stop):
        if OUTER_DIMS == 0:
            position = tile * ROWS
            offset = position * run_stride
        else:
            outer = tile // run_tiles
            position = (tile - outer * run_tiles) * ROWS
            offset = position * run_stride
            offset += offset_of(outer, outer_0, outer_1, 1, outer_stride_0, outer_stride_1, outer_stride_2, 0, OUTER_DIMS)
        there = tl.expand_dims(position + row < run, 1 - AXIS) & wanted
        raw = tl.load(x + offset + lane, mask=there, other=0)
        value = raw.to(tl.float64 if DOUBLE else tl.float32)
        if EDGES:
            bin = _by_edges(value, bounds, edges, there, STEPS)
            bin = tl.where(value != value, bins - 1, bin)
        else:
            word = as_ordered(value)
            bin = _by_bits(word, shift, zero, middle)
            if INTEGER:
                word = raw.to(WORD)
            else:
                finite = tl.abs(value) < float("inf")
                others += tl.sum(tl.where(finite, 0, 1), AXIS)  # outside of the tensor there are zeros
                there = there & finite
        if BINS > 0:
            own_bins += tl.histogram(tl.ravel(first_bin + tl.where(there, bin, bins)), COLUMNS * BINS)
            if not EDGES:
                low, high = _extremes(word, there, low, high, LAST, AXIS)
        else:
            if not EDGES:
                low, high = _extremes(word, there, low, high, LAST, AXIS)
            bin = tl.where(there, bin, -1)
            if not EDGES:
                at_zero += tl.sum((bin == middle).to(tl.int32), AXIS)
                bin = tl.where(bin == middle, -1, bin)
            most = tl.max(bin, AXIS)
            is_most = bin == tl.expand_dims(most, AXIS)
            number = tl.sum(is_most.to(tl.int64), AXIS)
            tl.atomic_add(target + most, number, mask=most >= 0, sem="relaxed")
            bin = tl.where(is_most, -1, bin)
            least = tl.min(tl.where(bin < 0, bins, bin), AXIS)
            is_least = bin == tl.expand_dims(least, AXIS)
            number = tl.sum(is_least.to(tl.int64), AXIS)
            tl.atomic_add(target + least, number, mask=least < bins, sem="relaxed")
            bin = tl.where(is_least, -1, bin)
            one = tl.full(bin.shape, 1, tl.int64)
            tl.atomic_add(tl.expand_dims(target, AXIS) + bin, one, mask=bin >= 0, sem="relaxed")

    if BINS > 0:
        entry = tl.arange(0, COLUMNS * BINS)
        place = tl.program_id(0).to(tl.int64) * COLUMNS + entry // BINS
        bin = entry % BINS
        taken = (own_bins > 0) & (bin < bins) & (place < kept)
        tl.atomic_add(counts + place * bins + bin, own_bins.to(tl.int64), mask=taken, sem="relaxed")
    elif not EDGES:
        tl.atomic_add(target + middle, at_zero.to(tl.int64), mask=inside & (at_zero > 0), sem="relaxed")
    if not EDGES:
        if not INTEGER:
            tl.atomic_add(nonfinite + column, others.to(tl.int64), mask=inside & (others > 0), sem="relaxed")
        tl.atomic_min(table + column, low.to(tl.int64), mask=inside, sem="relaxed")
        tl.atomic_max(table + kept + column, high.to(tl.int64), mask=inside, sem="relaxed")
        tl.debug_barrier()  # all threads of this program have added theirs before it says that it is done
        done = tl.atomic_add(table + 2 * kept.to(tl.int64) + tl.program_id(0), 1, sem="acq_rel")
        if done == parts - 1:
            lowest = tl.load(table + column, mask=inside, other=0, cache_modifier=".cg")
            highest = tl.load(table + kept + column, mask=inside, other=0, cache_modifier=".cg")
            if INTEGER:
                tl.store(low_out + column, lowest.to(low_out.dtype.element_ty), mask=inside)
                tl.store(high_out + column, highest.to(high_out.dtype.element_ty), mask=inside)
            else:
                tl.store(low_out + column, number_of(lowest, low_out, DOUBLE), mask=inside)
                tl.store(high_out + column, number_of(highest, high_out, DOUBLE), mask=inside)
