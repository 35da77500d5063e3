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


@triton.jit(do_not_specialize=["number"])
def make_signs(signs, turns, number, BUCKETS: tl.constexpr, BLOCK: tl.constexpr):
    """Write how far each block of elements is turned, int32, and the signs of what it adds to each 64 neighbouring buckets.

    What these are added comes from the end of one group of 64 elements and from the begin of the next.

    Args:
        signs: int64 [blocks, BUCKETS // 64], with `number` entries: bit i is set if what is added to bucket i of these is negative.
    """
    GROUPS: tl.constexpr = BUCKETS // 64
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    block = place // GROUPS
    group = (place % GROUPS).to(tl.int32)
    turn = (mix(block.to(tl.uint64), 8) >> 33).to(tl.int32) & (BUCKETS - 1)
    last = group - (turn >> 6)
    first = block * GROUPS
    word = mix((first + (last & (GROUPS - 1))).to(tl.uint64), 7)
    before = mix((first + ((last - 1) & (GROUPS - 1))).to(tl.uint64), 7)
    by = (turn & 63).to(tl.uint64)
    word = (word << by) | ((before >> 1) >> (63 - by))
    tl.store(signs + place, word.to(tl.int64, bitcast=True), mask=place < number)
    tl.store(turns + block, turn, mask=(place < number) & (group == 0))


@triton.jit(do_not_specialize=["blocks", "tiles"])
def sketch_parts(
    x,
    signs,
    turns,
    table,
    length,
    blocks,
    tiles,
    DOUBLE: tl.constexpr,
    INTEGER: tl.constexpr,
    TOGETHER: tl.constexpr,
    BUCKETS: tl.constexpr,
):
    """Write sums and facts of part `program_id(0)` of tensor `program_id(1)`; `table` is float64 [rows, parts, BUCKETS + 5].

    Args:
        x: contiguous; each tensor has `length` elements, one tensor after another.
        signs, turns: what `make_signs` wrote.
        blocks: of a tensor, each of `BUCKETS` elements, a power of two.
        tiles: of a part; a tile is `TOGETHER` blocks.
        DOUBLE: elements are numbers in float64, not in float32.
    """
    GROUPS: tl.constexpr = BUCKETS // 64
    NUMBER: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    here = tl.arange(0, TOGETHER)[:, None, None]
    group = tl.arange(0, GROUPS)[None, :, None]
    lane = tl.arange(0, 64)[None, None, :]
    bucket = group * 64 + lane
    row = tl.program_id(1).to(tl.int64)
    begin = tl.program_id(0).to(tl.int64) * tiles * TOGETHER
    stop = tl.minimum(begin + TOGETHER * tiles, blocks)
    end = begin * 0 + length
    sums = tl.zeros([TOGETHER, GROUPS, 64], tl.float64)
    power = tl.zeros([TOGETHER, GROUPS, 64], tl.float64)
    low = tl.full([TOGETHER, GROUPS, 64], float("inf"), NUMBER)
    high = tl.full([TOGETHER, GROUPS, 64], float("-inf"), NUMBER)
    others = tl.zeros([TOGETHER, GROUPS, 64], tl.int32)
    for first in range(begin, stop, TOGETHER):
        start = first * BUCKETS
        elements = x + (row * length + start)
        left = tl.minimum(end - start, TOGETHER * BUCKETS).to(tl.int32)
        is_block = here < stop - first
        turn = tl.load(turns + first + here, mask=is_block, other=0)
        word = tl.load(signs + first * GROUPS + (here * GROUPS + group), mask=is_block, other=0)
        offset = here * BUCKETS + ((bucket - turn) & (BUCKETS - 1))
        there = offset < left
        value = tl.load(elements + offset, mask=there, other=0).to(NUMBER)
        if not INTEGER:
            finite = tl.abs(value) < float("inf")
            others += tl.where(finite, 0, 1)  # outside of the tensor there are zeros
            value = tl.where(finite, value, 0.0)
            there = there & finite
        low = tl.minimum(low, tl.where(there, value, float("inf")))
        high = tl.maximum(high, tl.where(there, value, float("-inf")))
        wide = value.to(tl.float64)
        power += wide * wide
        sums += tl.where((word >> lane.to(tl.int64)) & 1 == 1, -wide, wide)

    to = table + (row * tl.num_programs(0) + tl.program_id(0)) * (BUCKETS + FACTS)
    tl.store(to + tl.arange(0, BUCKETS), tl.reshape(tl.sum(sums, 0), [BUCKETS]))
    left_out = tl.sum(tl.sum(tl.sum(others, 2), 1), 0)
    read = tl.minimum(stop * BUCKETS, end) - begin * BUCKETS
    tl.store(to + BUCKETS, (read - left_out).to(tl.float64))
    tl.store(to + BUCKETS + 1, left_out.to(tl.float64))
    tl.store(to + BUCKETS + 2, tl.sum(tl.sum(tl.sum(power, 2), 1), 0))
    tl.store(to + BUCKETS + 3, tl.min(tl.min(tl.min(low, 2), 1), 0).to(tl.float64))
    tl.store(to + BUCKETS + 4, tl.max(tl.max(tl.max(high, 2), 1), 0).to(tl.float64))


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
    added = tl.zeros([PARTS, COLUMNS], tl.float64)
    low = tl.full([COLUMNS], float("inf"), tl.float64)
    high = tl.full([COLUMNS], float("-inf"), tl.float64)
    for begin in range(0, parts, PARTS):
        part = begin + tl.arange(0, PARTS)
        there = (part < parts)[:, None] & (column < width)[None, :]
        found = tl.load(table + (row * parts + part)[:, None] * width + column[None, :], mask=there, other=0)
        found = tl.where(there, found, empty[None, :])
        added += found
        low = tl.minimum(low, tl.min(found, 0))
        high = tl.maximum(high, tl.max(found, 0))
    found = tl.where(least, low, tl.where(greatest, high, tl.sum(added, 0)))
    tl.store(sums + row * buckets + column, found, mask=column < buckets)
    tl.store(facts + row * FACTS + fact, found, mask=(fact >= 0) & (fact < FACTS))
