"""How often elements fall into bins, counted where it costs least: in memory that the threads of a program share.

A program has `WORDS` counts, for all kept positions of its tiles. If the bins are more, they are a window on the bins in which most
elements of a sample of its part fall. What falls outside of the window is added to the state, one by one. Counts are integers that
are added atomically, so the order of threads and of programs changes no bit.

Triton has no atomic addition in shared memory, so a few instructions of PTX do it: this kernel is for NVIDIA's GPUs only.
"""

from __future__ import annotations

import triton
import triton.language as tl

from reducers.kernels.triton.bins_kernel import number_of
from reducers.kernels.triton.lane_sums import (
    column_greatest,
    column_least,
    column_sum,
    lane_greatest,
    lane_least,
    lane_sum,
    tile_place,
)
from reducers.kernels.triton.places import offset_of
from reducers.kernels.triton.words import as_ordered

WORDS = 8192  # as `_shared` reserves them; of 32 KB several programs fit into a multiprocessor


@triton.jit
def _shared():
    """Return the address of the counts that the threads of this program share."""
    return tl.inline_asm_elementwise(
        "{ .shared .align 16 .b32 shared_counts[8192]; mov.u32 $0, shared_counts; }",
        "=r,r",
        [tl.program_id(0)],
        tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _clear(address):
    return tl.inline_asm_elementwise("st.shared.u32 [$1], 0; mov.u32 $0, 0;", "=r,r", [address], tl.int32, is_pure=False, pack=1)


@triton.jit
def _increase(address):
    return tl.inline_asm_elementwise(
        "red.shared.add.u32 [$1], 1; mov.u32 $0, 0;", "=r,r", [address], tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _add_there(target, taken):
    """Add 1 to each of the int64 in global memory that are taken. An atomic addition of Triton may want another layout."""
    return tl.inline_asm_elementwise(
        "{ .reg .pred %p; setp.ne.s32 %p, $2, 0; @%p red.relaxed.gpu.global.add.u64 [$1], 1; mov.u32 $0, 0; }",
        "=r,l,r",
        [target.to(tl.int64), taken.to(tl.int32)],
        tl.int32,
        is_pure=False,
        pack=1,
    )


_COUNT = """{
            .reg .pred %p;
            .reg .b32 %bin;
            .reg .b64 %place;
            red.shared.add.u32 [$1], ADDED;
            setp.ne.s32 %p, $4, $5;
            @%p bra DONE;
            setp.ge.s32 %p, $6, $10;
            @%p bra DONE;
            sub.s32 %bin, $6, $8;
            min.s32 %bin, %bin, $9;
            xor.b32 %bin, %bin, $7;
            sub.s32 %bin, %bin, $7;
            mad.wide.s32 %place, %bin, 8, $3;
            red.relaxed.gpu.global.add.u64 [%place], 1;
            DONE: mov.u32 $0, 0;
            }"""
_COUNT_NUMBER = tl.constexpr(_COUNT.replace("ADDED", "$2"))
_COUNT_ONE = tl.constexpr(_COUNT.replace("ADDED", "1"))


@triton.jit
def _count_once(address, number, target, slot, nowhere, magnitude, sign, below, most, infinite, PACKED: tl.constexpr):
    """Add a number to the count of its slot; and if it has none, and is finite, 1 to its bin. `target` is the bin of zero.

    All of it is in PTX, so that a thread jumps over the rest: few numbers have no slot. It is in one piece, so that what is
    computed of an element is in registers for a short time.
    """
    arguments = [address, number, target.to(tl.int64), slot, nowhere, magnitude, sign, below, most, infinite]
    # Of 1 the threads of a warp add the sum at once.
    return tl.inline_asm_elementwise(
        _COUNT_NUMBER if PACKED else _COUNT_ONE, "=r,r,r,l,r,r,r,r,r,r,r", arguments, tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _read(address):
    return tl.inline_asm_elementwise("ld.shared.u32 $0, [$1];", "=r,r", [address], tl.int32, is_pure=False, pack=1)


@triton.jit
def _are_even(bounds, edges, first, scale, BLOCK: tl.constexpr):
    """Return whether the place of each bound, as `_by_even` computes it, is less than 1/4 from its number."""
    wrong = tl.zeros([BLOCK], tl.int32)
    if edges <= 1 << 21:
        for block in range((edges + BLOCK - 1) // BLOCK):
            number = block * BLOCK + tl.arange(0, BLOCK)
            bound = tl.load(bounds + number, mask=number < edges, other=0)
            off = tl.abs((bound - first) * scale - number.to(bound.dtype))
            wrong += ((number < edges) & ((off < 0.25) == 0)).to(tl.int32)
    else:
        wrong += 1
    return tl.max(wrong, 0) == 0


@triton.jit
def _by_even(number, bounds, edges, first, scale, DOUBLE: tl.constexpr):
    """Return how many bounds are not above each number: the bound that is nearest by its place, or one more.

    The place of a number grows with the number, whatever the rounding. So between two neighbouring bounds, whose places are less
    than 1/4 from their numbers, the nearest is one of the two.
    """
    place = tl.minimum(tl.maximum((number - first) * scale, 0.0), (edges - 1).to(number.dtype))
    # In float32 the lowest bits of so big a number, which is quicker than a conversion.
    nearest = (place + 0.5).to(tl.int32) if DOUBLE else (place + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    nearest = tl.where(number != number, 0, nearest)
    return nearest + (tl.load(bounds + nearest) <= number).to(tl.int32)


@triton.jit
def _halved(number, bounds, edges, STEPS: tl.constexpr):
    """Return how many bounds are not above each number, by bisection."""
    found = tl.zeros(number.shape, tl.int32)
    for step in range(STEPS):
        reach = found + (1 << (STEPS - 1 - step))
        within = reach <= edges
        bound = tl.load(bounds + reach - 1, mask=within, other=0)
        found = tl.where(within & (bound <= number), reach, found)
    return found


@triton.jit
def _bits(value):
    """Return the bits of a number."""
    return value.to(tl.int64, bitcast=True) if value.dtype == tl.float64 else value.to(tl.int32, bitcast=True)


@triton.jit
def _magnitude(bits, shift):
    """Return the bits of the exponent and of the mantissa that select a bin."""
    return ((bits & 0x7FFFFFFFFFFFFFFF) >> shift).to(tl.int32) if bits.dtype == tl.int64 else (bits & 0x7FFFFFFF) >> shift


@triton.jit
def _by_place(value, bounds, even, scale, bins, edges, STEPS: tl.constexpr, DOUBLE: tl.constexpr):
    """Return the bin of each number between bounds; the last is for NaN."""
    if even:  # noqa: SIM108  # it is computed, and both would be
        bin = _by_even(value, bounds, edges, tl.load(bounds), scale, DOUBLE)
    else:
        bin = _halved(value, bounds, edges, STEPS)
    return tl.where(value != value, bins - 1, bin)


@triton.jit
def _slot(value, start, zero, cap, shift, INTEGER: tl.constexpr, CAPPED: tl.constexpr, SLOTS: tl.constexpr):
    """Return the slot of each number by its magnitude: -1 for zero, `SLOTS` for what is not in the window; and its magnitude."""
    magnitude = _magnitude(_bits(value), shift)
    slot = tl.minimum(magnitude, cap) - start if CAPPED else magnitude - start
    slot = tl.minimum(slot.to(tl.uint32), SLOTS).to(tl.int32)
    slot = tl.where(magnitude < zero, -1, slot)
    if CAPPED and not INTEGER:
        slot = tl.where(tl.abs(value) < float("inf"), slot, SLOTS)
    return slot, magnitude


@triton.jit
def _sign(bits):
    """Return -1 for numbers with a sign, and 0."""
    return (bits >> 63).to(tl.int32) if bits.dtype == tl.int64 else bits >> 31


@triton.jit
def _count_number(
    own, target, slot, magnitude, bits, shift, zero, middle, INFINITE: tl.constexpr, PACKED: tl.constexpr, SLOTS: tl.constexpr
):
    """Add a number to the count of its slot, for its sign; or to that of its bin."""
    sign = _sign(bits)
    number = (sign & 65535) + 1
    address = own + 4 * slot
    if not PACKED:
        address += sign & (4 * (SLOTS + 2))
    infinite = (tl.cast(INFINITE, bits.dtype) >> shift).to(tl.int32)
    _count_once(address, number, target, slot, SLOTS, magnitude, sign, zero - 1, middle, infinite, PACKED)


@triton.jit
def _word(raw, value, INTEGER: tl.constexpr, WORD: tl.constexpr):
    """Return integers in the order of the numbers."""
    return raw.to(WORD) if INTEGER else as_ordered(value)


@triton.jit
def _window(
    sample,
    inside,
    bounds,
    bins,
    edges,
    shift,
    zero,
    middle,
    STEPS: tl.constexpr,
    EDGES: tl.constexpr,
    DOUBLE: tl.constexpr,
    CAPPED: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Return where a window begins that has most of the elements of a sample: about the mean of their bins."""
    value = sample.to(tl.float64 if DOUBLE else tl.float32)
    if EDGES:
        place = _halved(value, bounds, edges, STEPS)
        inside = inside & (place > 0) & (place < edges)
        usual = edges // 2
        begin = 0
        end = bins
        below = SLOTS // 2
    else:
        place = _magnitude(_bits(value), shift)
        inside = inside & (place >= zero) & (tl.abs(value) < float("inf"))
        usual = zero + middle // 2
        begin = zero
        end = zero + middle if CAPPED else zero + middle - 1  # what is not finite is not in the window
        below = SLOTS * 11 // 16  # normal numbers are farther from the mean of their logarithms below it than above
    number = tl.sum(tl.sum(inside.to(tl.int32), 1), 0)
    total = tl.sum(tl.sum(tl.where(inside, place, 0).to(tl.float32), 1), 0)
    mean = tl.where(number > 0, (total / tl.maximum(number, 1).to(tl.float32)).to(tl.int32), usual)
    return tl.maximum(tl.minimum(mean - below, end - SLOTS), begin)


# Whether these are 1, or multiples of 16, makes no other kernel.
_PLAIN = [
    *("run_tiles", "all_tiles", "tiles", "parts", "kept_0", "kept_1", "kept_2"),
    *("outer_0", "outer_1", "bins", "edges", "shift", "zero", "middle"),
]


@triton.jit(do_not_specialize=_PLAIN)
def count_shared(
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
    CAPPED: tl.constexpr,
    PACKED: tl.constexpr,
    WHOLE: tl.constexpr,
    SLOTS: tl.constexpr,
    OWN: tl.constexpr,
    KEPT_DIMS: tl.constexpr,
    OUTER_DIMS: tl.constexpr,
    AXIS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDE: tl.constexpr,
    UNROLL: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Add the elements of part `program_id(1)` of the kept positions of column `program_id(0)` of tiles to `counts`.

    What is read and written is as for `count`.

    Args:
        CAPPED: finite numbers may be beyond the last bin but one.
        PACKED: a word has two counts, in its lower half of the positive numbers and in its upper half of the negative ones.
        WHOLE: the window has all bins.
        SLOTS: bins of the window, for each kept position; if the bits of a number select its bin, for each sign.
        OWN: words for each kept position, of which one or two more than `SLOTS` are used.
    """
    INDEX: tl.constexpr = tl.int64 if WIDE else tl.int32
    NEAR: tl.constexpr = LANES * VECTOR
    FOLD: tl.constexpr = VECTOR if AXIS == 1 else 1
    ACROSS: tl.constexpr = NEAR // COLUMNS
    LONG: tl.constexpr = x.dtype.element_ty.primitive_bitwidth == 64 if INTEGER else DOUBLE
    WORD: tl.constexpr = tl.int64 if LONG else tl.int32
    LAST: tl.constexpr = 0x7FFFFFFFFFFFFFFF if LONG else 0x7FFFFFFF  # in order, it is beyond inf
    INFINITE: tl.constexpr = 0x7FF0000000000000 if DOUBLE else 0x7F800000
    BLOCK: tl.constexpr = 1024
    near = tl.arange(0, NEAR).to(INDEX)[:, None]
    unrolled = tl.arange(0, UNROLL).to(INDEX)[None, :]
    first_column = tl.program_id(0).to(INDEX) * COLUMNS
    if AXIS == 1:
        near_row = near % ACROSS
        near_column = near // ACROSS
    else:
        near_row = near // COLUMNS
        near_column = near % COLUMNS
    column = first_column + near_column
    place = (unrolled * ACROSS + near_row) * run_stride
    kept_place = tl.zeros([NEAR, 1], INDEX)
    if KEPT_DIMS > 0:
        kept_place = offset_of(
            column, kept_0, kept_1, kept_2, kept_stride_0, kept_stride_1, kept_stride_2, kept_stride_3, KEPT_DIMS
        )
        place += kept_place
    if VECTOR > 1:
        place = tl.max_contiguous(place, [VECTOR, 1])
    # What is read again is read by fewer pieces at a time.
    LIMIT: tl.constexpr = 4 // FOLD if AXIS == 1 else 1
    PIECES: tl.constexpr = 1 if LIMIT < 1 else LIMIT if LIMIT < UNROLL else UNROLL
    begin = tl.program_id(1).to(INDEX) * tiles
    stop = tl.minimum(begin + tiles, all_tiles)

    own = _shared()
    for block in range(COLUMNS * OWN // BLOCK):
        _clear(own + 4 * (block * BLOCK + tl.arange(0, BLOCK)))
    tl.debug_barrier()

    start = 0
    even = True
    scale = 0.0
    if EDGES:
        first = tl.load(bounds)
        scale = (edges - 1).to(first.dtype) / (tl.load(bounds + edges - 1) - first)
        even = _are_even(bounds, edges, first, scale, 1024)
    if not WHOLE:
        several = tl.arange(0, 4).to(INDEX)[None, :]
        position, offset = tile_place(
            begin + several * (stop - begin) // 4,
            run_tiles,
            run_stride,
            outer_0,
            outer_1,
            outer_stride_0,
            outer_stride_1,
            outer_stride_2,
            ROWS,
            OUTER_DIMS,
        )
        inside = (position + near_row < run) & (column < kept)
        sampled = kept_place + near_row * run_stride
        if VECTOR > 1:
            sampled = tl.max_contiguous(sampled, [VECTOR, 1])
        sample = tl.load(x + offset + sampled, mask=inside, other=0)
        start = _window(sample, inside, bounds, bins, edges, shift, zero, middle, STEPS, EDGES, DOUBLE, CAPPED, SLOTS)

    # The words of a kept position are the zeros, the window, and what is not in it; and the same again for negative numbers.
    own_column = own + 4 * OWN * near_column.to(tl.int32) + (0 if EDGES else 4)
    entry = counts + column.to(tl.int64) * bins
    cap = middle + zero - 1
    like = tl.zeros([NEAR // FOLD], tl.int32)
    others = like
    low = tl.full([NEAR // FOLD], LAST, WORD)
    high = tl.full([NEAR // FOLD], -LAST - 1, WORD)
    some = tl.arange(0, PIECES).to(INDEX)[None, :]
    quickly = first_column + COLUMNS <= kept
    position, offset = tile_place(
        begin, run_tiles, run_stride, outer_0, outer_1, outer_stride_0, outer_stride_1, outer_stride_2, ROWS, OUTER_DIMS
    )
    full = quickly & even & (begin < stop) & (position + ROWS <= run)
    coming = tl.load(x + offset + place, mask=full)
    for tile in range(begin, tl.where(quickly & even, stop, begin)):
        # The next tile is on its way while one is counted.
        raw = coming
        is_full = full
        position, offset = tile_place(
            tile + 1, run_tiles, run_stride, outer_0, outer_1, outer_stride_0, outer_stride_1, outer_stride_2, ROWS, OUTER_DIMS
        )
        full = (tile + 1 < stop) & (position + ROWS <= run)
        coming = tl.load(x + offset + place, mask=full)
        if is_full:
            value = raw.to(tl.float64 if DOUBLE else tl.float32)
            if EDGES:
                bin = _by_even(value, bounds, edges, tl.load(bounds), scale, DOUBLE)
                bin = tl.where(value != value, bins - 1, bin)
                if WHOLE:
                    _increase(own_column + 4 * bin)
                else:
                    slot = tl.minimum((bin - start).to(tl.uint32), SLOTS).to(tl.int32)
                    _increase(own_column + 4 * slot)
                    _add_there(entry + bin, slot == SLOTS)
            else:
                slot, magnitude = _slot(value, start, zero, cap, shift, INTEGER, CAPPED, SLOTS)
                _count_number(
                    own_column, entry + middle, slot, magnitude, _bits(value), shift, zero, middle, INFINITE, PACKED, SLOTS
                )
                word = _word(raw, value, INTEGER, WORD)
                low = tl.minimum(low, lane_least(word, FOLD))
                high = tl.maximum(high, lane_greatest(word, FOLD))

    # If there was something that is not finite, all is read again for the extremes of the rest.
    again = False
    if not EDGES and not INTEGER:
        again = tl.max(((high >= INFINITE) | (low < -INFINITE)).to(tl.int32), 0) != 0
        if again:
            low = tl.full([NEAR // FOLD], LAST, WORD)
            high = tl.full([NEAR // FOLD], -LAST - 1, WORD)
    for tile in range(begin, stop):
        position, offset = tile_place(
            tile, run_tiles, run_stride, outer_0, outer_1, outer_stride_0, outer_stride_1, outer_stride_2, ROWS, OUTER_DIMS
        )
        uncounted = (quickly & even & (position + ROWS <= run)) == 0
        if again | uncounted:
            for piece in range(UNROLL // PIECES):
                row = (piece * PIECES + some) * ACROSS + near_row
                there = (position + row < run) & (column < kept)
                where = kept_place + row * run_stride
                if VECTOR > 1:
                    where = tl.max_contiguous(where, [VECTOR, 1])
                raw = tl.load(x + offset + where, mask=there, other=0)
                value = raw.to(tl.float64 if DOUBLE else tl.float32)
                if EDGES:
                    bin = _by_place(value, bounds, even, scale, bins, edges, STEPS, DOUBLE)
                    slot = tl.where(there, bin, SLOTS)
                    if not WHOLE:
                        slot = tl.where(there, tl.minimum((bin - start).to(tl.uint32), SLOTS).to(tl.int32), SLOTS)
                        _add_there(entry + bin, there & (slot == SLOTS))
                    _increase(own_column + 4 * slot)
                else:
                    if uncounted:
                        slot, magnitude = _slot(value, start, zero, cap, shift, INTEGER, CAPPED, SLOTS)
                        slot = tl.where(there, slot, SLOTS)
                        magnitude = tl.where(there, magnitude, 0x7FFFFFFF)  # as what is not finite, which is in no bin
                        _count_number(
                            own_column, entry + middle, slot, magnitude, _bits(value), shift, zero, middle, INFINITE, PACKED, SLOTS
                        )
                    if not INTEGER:
                        finite = tl.abs(value) < float("inf")
                        others += lane_sum((there & (finite == 0)).to(tl.int32), FOLD)
                        there = there & finite
                    word = _word(raw, value, INTEGER, WORD)
                    low = tl.minimum(low, lane_least(tl.where(there, word, LAST), FOLD))
                    high = tl.maximum(high, lane_greatest(tl.where(there, word, -LAST - 1), FOLD))

    tl.debug_barrier()
    for block in range(COLUMNS * OWN // BLOCK):
        at = block * BLOCK + tl.arange(0, BLOCK)
        number = _read(own + 4 * at)
        of_column = first_column.to(tl.int64) + at // OWN
        slot = at % OWN
        wanted = (of_column < kept) & (number != 0)
        target = counts + of_column * bins
        if EDGES:
            tl.atomic_add(target + (start + slot), number.to(tl.int64), mask=wanted & (slot < SLOTS), sem="relaxed")
        else:
            negative = slot >= SLOTS + 2
            slot = tl.where(negative, slot - (SLOTS + 2), slot) - 1
            wanted = wanted & (slot != SLOTS)
            bin = tl.where(slot < 0, 0, start + slot + 1 - zero)
            if PACKED:
                upper = (number >> 16) & 0xFFFF
                tl.atomic_add(target + (middle - bin), upper.to(tl.int64), mask=wanted & (upper > 0), sem="relaxed")
                number = number & 0xFFFF
                wanted = wanted & (number > 0)
            bin = tl.where(negative, middle - bin, middle + bin)
            tl.atomic_add(target + bin, number.to(tl.int64), mask=wanted, sem="relaxed")
    if not EDGES:
        of_column = first_column + tl.arange(0, COLUMNS).to(INDEX)
        inside = of_column < kept
        if not INTEGER:
            others = column_sum(others, COLUMNS, AXIS)
            tl.atomic_add(nonfinite + of_column, others.to(tl.int64), mask=inside & (others > 0), sem="relaxed")
        low = column_least(low, COLUMNS, AXIS)
        high = column_greatest(high, COLUMNS, AXIS)
        tl.atomic_min(table + of_column, low.to(tl.int64), mask=inside, sem="relaxed")
        tl.atomic_max(table + kept + of_column, high.to(tl.int64), mask=inside, sem="relaxed")
        tl.debug_barrier()  # all threads of this program have added theirs before it says that it is done
        done = tl.atomic_add(table + kept + kept + tl.program_id(0), 1, sem="acq_rel")
        if done == parts - 1:
            lowest = tl.load(table + of_column, mask=inside, other=0, cache_modifier=".cg")
            highest = tl.load(table + kept + of_column, mask=inside, other=0, cache_modifier=".cg")
            if INTEGER:
                tl.store(low_out + of_column, lowest.to(low_out.dtype.element_ty), mask=inside)
                tl.store(high_out + of_column, highest.to(high_out.dtype.element_ty), mask=inside)
            else:
                tl.store(low_out + of_column, number_of(lowest, low_out, DOUBLE), mask=inside)
                tl.store(high_out + of_column, number_of(highest, high_out, DOUBLE), mask=inside)
