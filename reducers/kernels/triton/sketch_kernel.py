"""Sums of elements with random signs: one launch makes the signs, one adds up parts of tensors, and one joins them.

`reducers/kernels/sketches.py` has the definition. Sums are float64, added in an order that depends on sizes only. A program keeps
its sums in registers, and of each block reads what is added to each of them, so threads exchange nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from reducers.kernels.triton.digest_kernel import mix

__all__ = ["join_parts", "make_signs", "sketch_parts"]

FACTS = tl.constexpr(5)


@triton.jit
def _block_of(slot, start, stride, a_run, BUCKETS: tl.constexpr, RUNS: tl.constexpr):
    """Return the run of each slot, and where its block begins: from the begin of this run, which may be within the block."""
    if RUNS:
        run = slot // a_run
        begin = start + run * stride
        return run, (begin // BUCKETS + (slot - run * a_run)) * BUCKETS - begin
    return slot * 0, slot * BUCKETS - start % BUCKETS


@triton.jit(do_not_specialize=["slots", "length", "start", "stride", "a_run"])
def make_signs(
    signs,
    turns,
    origins,
    slots,
    length,
    start,
    stride,
    a_run,
    BUCKETS: tl.constexpr,
    RUNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write of the block of each slot which of its elements is added to its first bucket, int32, and the signs of what it adds.

    Args:
        signs: int64 [slots, BUCKETS // 64]: bit i is set if what is added to bucket i of these 64 is negative.
        origins: if there is more than one run, int64 [slots, 2]: where in the memory of a tensor the block begins, and which places
            of it are there, the first in the upper half of the word, and the one after the last in the lower.
        slots, length, start, stride, a_run, RUNS: see `sketch_parts`.
    """
    GROUPS: tl.constexpr = BUCKETS // 64
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    slot = place // GROUPS
    group = place % GROUPS
    start = start.to(tl.int64)
    run, origin = _block_of(slot, start, stride, a_run, BUCKETS, RUNS)
    block = (start + run * stride + origin) // BUCKETS
    word = mix((block * GROUPS + group).to(tl.uint64), 7)
    tl.store(signs + place, word.to(tl.int64, bitcast=True), mask=slot < slots)
    turn = mix(block.to(tl.uint64), 8)
    turn = ((((turn >> 32) * GROUPS) >> 32) * 64 + (turn & 63)).to(tl.int32)
    is_first = (slot < slots) & (group == 0)
    tl.store(turns + slot, turn, mask=is_first)
    if RUNS:
        tl.store(origins + slot * 2, run * length + origin, mask=is_first)
        there = tl.maximum(-origin, 0) << 32 | tl.maximum(tl.minimum(length - origin, BUCKETS), 0)
        tl.store(origins + slot * 2 + 1, there, mask=is_first)


@triton.jit
def _added_before(slot, length, start, stride, a_run, BUCKETS: tl.constexpr, RUNS: tl.constexpr):
    """Return how many elements the slots before one have."""
    run, origin = _block_of(slot, start, stride, a_run, BUCKETS, RUNS)
    return run * length + tl.minimum(tl.maximum(origin, 0), length)


@triton.jit
def _read(
    x, signs, turns, origins, first, stop, length, before, bucket, NUMBER: tl.constexpr, WHOLE: tl.constexpr, SLOTS: tl.constexpr
):
    """Return what is added to each bucket of some slots, 0 if it is not there; whether it is there; and the signs, 32 in a word.

    Args:
        WHOLE: all blocks are there as a whole, in the only run.
    """
    BUCKETS: tl.constexpr = bucket.shape[0]
    number = tl.arange(0, SLOTS)
    slot = first + number
    turn = tl.load(turns + slot) if WHOLE else tl.load(turns + slot, mask=slot < stop, other=0)
    place = ((bucket[None, :] + (turn & -64)[:, None]) & (BUCKETS - 1)) ^ (turn & 63)[:, None]
    # Places of neighbouring buckets are called close, but of no alignment, so that the threads of a warp have such buckets, and not
    # other blocks, and read one by one. Compilers take this only of sums, in the function that computes them.
    half = number[:, None] * (BUCKETS // 32) + (bucket >> 5)[None, :]
    half = signs + first * (BUCKETS // 32) + tl.multiple_of(tl.max_contiguous(half, [1, 2]), [1, 1])
    half = tl.load(half) if WHOLE else tl.load(half, mask=(slot < stop)[:, None], other=0)
    if origins is not None:
        origin = tl.load(origins + slot * 2, mask=slot < stop, other=0)[:, None]
        ends = tl.load(origins + slot * 2 + 1, mask=slot < stop, other=0)[:, None]
        there = (place >= (ends >> 32).to(tl.int32)) & (place < ends.to(tl.int32))
        place = tl.multiple_of(tl.max_contiguous(origin + place, [1, 2]), [1, 1])
        value = tl.load(x + place, mask=there, other=0)
    else:
        place = tl.multiple_of(tl.max_contiguous(place + number[:, None] * BUCKETS, [1, 2]), [1, 1])
        begin = first * BUCKETS - before
        least = tl.maximum(-begin, 0).to(tl.int32)
        most = tl.minimum(length - begin, SLOTS * BUCKETS).to(tl.int32)
        there = (place >= least) & (place < most)
        value = tl.load(x + begin + place) if WHOLE else tl.load(x + begin + place, mask=there, other=0)
    return value.to(NUMBER), there, half


@triton.jit
def _with_added(sums, power, value, half, bucket):
    """Return the sums of each bucket, and of the squares, with what blocks add to them; `half` are signs, 32 in a word."""
    wide = value.to(tl.float64)
    negative = (half << (31 - (bucket & 31))[None, :]).to(tl.int64) & 0x80000000
    signed = (wide.to(tl.int64, bitcast=True) ^ (negative << 32)).to(tl.float64, bitcast=True)
    return sums + tl.sum(signed, 0), power + tl.sum(wide * wide, 0)


@triton.jit(do_not_specialize=["parts", "tiles", "slots", "runs", "length", "start", "stride", "a_run"])
def sketch_parts(
    x,
    signs,
    turns,
    origins,
    table,
    parts,
    tiles,
    slots,
    runs,
    length,
    start,
    stride,
    a_run,
    DOUBLE: tl.constexpr,
    INTEGER: tl.constexpr,
    RUNS: tl.constexpr,
    TOGETHER: tl.constexpr,
    BUCKETS: tl.constexpr,
):
    """Write sums and facts of a part of a tensor; `table` is float64 [rows, parts, BUCKETS + 5]. A program has one part of one row.

    Most elements are added as if all were finite. If the sum of the squares is not, they are added once more, with a look at each.

    Args:
        x: all runs of a tensor, one after another, and one tensor after another.
        signs, turns, origins: what `make_signs` wrote; `signs` as int32.
        tiles: of a part; a tile is `TOGETHER` slots.
        slots: of a tensor; a slot is a block of which a run may have elements. A block has `BUCKETS` elements, a power of two.
        runs, length, start, stride: see `Runs` of `reducers/kernels/parts.py`.
        a_run: slots of a run.
        DOUBLE: elements are numbers in float64, not in float32.
        RUNS: whether there is more than one run.
    """
    NUMBER: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    SOME: tl.constexpr = TOGETHER // 2 if TOGETHER > 1 else 1
    bucket = tl.arange(0, BUCKETS)
    begin = (tl.program_id(0) % parts).to(tl.int64) * tiles * TOGETHER
    stop = tl.minimum(begin + tiles * TOGETHER, slots)
    start = start.to(tl.int64)
    length = length.to(tl.int64)
    before = start % BUCKETS  # elements of the first block that are not there
    x += tl.program_id(0) // parts * (length * runs)
    all_there = _added_before(stop, length, start, stride, a_run, BUCKETS, RUNS)
    all_there -= _added_before(begin, length, start, stride, a_run, BUCKETS, RUNS)
    sums = tl.zeros([BUCKETS], tl.float64)
    power = tl.zeros([BUCKETS], tl.float64)
    low = tl.full([BUCKETS], float("inf"), NUMBER)
    high = tl.full([BUCKETS], float("-inf"), NUMBER)
    full = begin
    if RUNS:
        full_stop = stop
        quick = all_there
    else:  # first the tiles that are there as a whole
        full += tl.where((begin == 0) & (before > 0), TOGETHER, 0)
        some = tl.minimum(stop, (before + length) // BUCKETS) - begin
        full_stop = tl.maximum(begin + some // TOGETHER * TOGETHER, full)
        quick = (full_stop - full) * BUCKETS
    for first in range(full, full_stop, TOGETHER):
        value, there, half = _read(x, signs, turns, origins, first, stop, length, before, bucket, NUMBER, not RUNS, TOGETHER)
        if RUNS:
            low = tl.minimum(low, tl.min(tl.where(there, value, float("inf")), 0))
            high = tl.maximum(high, tl.max(tl.where(there, value, float("-inf")), 0))
        else:
            low = tl.minimum(low, tl.min(value, 0))
            high = tl.maximum(high, tl.max(value, 0))
        sums, power = _with_added(sums, power, value, half, bucket)
    again = (tl.sum(power, 0) < float("inf")) == 0
    full_stop = tl.where(again, full, full_stop)
    quick = tl.where(again, 0, quick)
    sums = tl.where(again, 0.0, sums)
    power = tl.where(again, 0.0, power)
    low = tl.where(again, float("inf"), low)
    high = tl.where(again, float("-inf"), high)
    count = tl.zeros([BUCKETS], tl.int32)
    for index in range(begin, stop - (full_stop - full), SOME):
        first = tl.where(index < full, index, index + (full_stop - full))
        value, there, half = _read(x, signs, turns, origins, first, stop, length, before, bucket, NUMBER, False, SOME)
        if not INTEGER:
            there = there & (tl.abs(value) < float("inf"))
            value = tl.where(there, value, 0.0)
        count += tl.sum(there.to(tl.int32), 0)
        low = tl.minimum(low, tl.min(tl.where(there, value, float("inf")), 0))
        high = tl.maximum(high, tl.max(tl.where(there, value, float("-inf")), 0))
        sums, power = _with_added(sums, power, value, half, bucket)

    finite = quick + tl.sum(count, 0)
    to = table + tl.program_id(0).to(tl.int64) * (BUCKETS + FACTS)
    tl.store(to + bucket, sums)
    tl.store(to + BUCKETS, finite.to(tl.float64))
    tl.store(to + BUCKETS + 1, (all_there - finite).to(tl.float64))
    tl.store(to + BUCKETS + 2, tl.sum(power, 0))
    tl.store(to + BUCKETS + 3, tl.min(low, 0).to(tl.float64))
    tl.store(to + BUCKETS + 4, tl.max(high, 0).to(tl.float64))


@triton.jit(do_not_specialize=["parts", "buckets"])
def join_parts(table, sums, facts, parts, buckets, PARTS: tl.constexpr, COLUMNS: tl.constexpr):
    """Write the sums and facts of tensor `program_id(0)`, in columns `program_id(1)` of the table [rows, parts, buckets + 5]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    width = buckets + FACTS
    fact = column - buckets
    least = fact == 3
    greatest = fact == 4
    empty = tl.where(least, float("inf"), tl.where(greatest, float("-inf"), 0.0)).to(tl.float64)
    joined = tl.zeros([PARTS, COLUMNS], tl.float64) + empty[None, :]
    for begin in range(0, parts, PARTS):
        part = begin + tl.arange(0, PARTS)
        there = (part < parts)[:, None] & (column < width)[None, :]
        found = tl.load(table + (row * parts + part)[:, None] * width + column[None, :], mask=there, other=0)
        found = tl.where(there, found, empty[None, :])
        ends = tl.where(least[None, :], tl.minimum(joined, found), tl.maximum(joined, found))
        joined = tl.where((least | greatest)[None, :], ends, joined + found)
    ends = tl.where(least, tl.min(joined, 0), tl.max(joined, 0))
    found = tl.where(least | greatest, ends, tl.sum(joined, 0))
    tl.store(sums + row * buckets + column, found, mask=column < buckets)
    tl.store(facts + row * FACTS + fact, found, mask=(fact >= 0) & (fact < FACTS))
