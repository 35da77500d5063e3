"""Sums of elements with random signs: one launch makes the signs, one adds up parts of tensors, and one joins them.

`reducers/kernels/sketches.py` has the definition. Sums are float64, added in an order that depends on sizes only. In each block
of an octet elements are turned within eight neighbours by another number, so a program reads the blocks in the order of these
numbers. It has a sum for each place in an octet in that order, in a register. So a thread reads neighbours at once, moves none of
them, and exchanges nothing with others before it adds up the sums of each bucket.
"""

from __future__ import annotations

import triton
import triton.language as tl

from reducers.kernels.triton.digest_kernel import mix

FACTS = tl.constexpr(5)
OCTET = tl.constexpr(8)


@triton.jit
def _origin_of(octet, start, stride, a_run, SIZE: tl.constexpr, RUNS: tl.constexpr):
    """Return the run of each octet, and where the octet begins: from the begin of this run, which may be within it."""
    if RUNS:
        run = octet // a_run
        begin = start + run * stride
        return run, (begin // SIZE + (octet - run * a_run)) * SIZE - begin
    return octet * 0, octet * SIZE - start % SIZE


@triton.jit
def _doubled(x):
    """Return numbers below 8 times 2, as polynomials over bits modulo x^3 + x + 1."""
    return ((x << 1) & 7) ^ ((x >> 2) * 3)


@triton.jit
def _swapped(word, swap, BY: tl.constexpr, MASK: tl.constexpr):
    """Return words in which bits swap with those `BY` places on, of which `MASK` are the lower ones, if `swap` is not 0."""
    return tl.where(swap != 0, ((word & MASK) << BY) | ((word >> BY) & MASK), word)


@triton.jit(do_not_specialize=["octets", "length", "start", "stride", "a_run"])
def make_signs(
    signs,
    turns,
    origins,
    octets,
    length,
    start,
    stride,
    a_run,
    BUCKETS: tl.constexpr,
    RUNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the signs of the blocks of each octet, and where their elements are.

    The blocks come in the order of x, from 0 to 7: of each eight elements of block x, that at place j is added to bucket j xor x.

    Args:
        signs: int64 [octets, 8, BUCKETS // 64]: bit 8 i + j is set if what element j of eight adds to buckets 8 i to 8 i + 7 of
            these 64 is negative.
        turns: int32 [octets, 8]: the number of the block in the octet, plus what of 8, 16 and 32 its places are turned by, plus
            64 times the groups that they are shifted by.
        origins: if there is more than one run, int64 [octets, 2]: where in the memory of a tensor the octet begins, and which of
            its places are there, the first in the upper half of the word, and the one after the last in the lower.
        octets, length, start, stride, a_run, RUNS: see `sketch_parts`.
        BLOCK: groups of buckets of octets for which a program writes.
    """
    GROUPS: tl.constexpr = BUCKETS // 64
    SIZE: tl.constexpr = OCTET * BUCKETS
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    group = place % GROUPS
    octet = place // GROUPS
    there = octet < octets
    start = start.to(tl.int64)
    run, origin = _origin_of(octet, start, stride, a_run, SIZE, RUNS)
    whole = (start + run * stride + origin) // SIZE  # the number of the octet in the whole
    chosen = mix(whole.to(tl.uint64), 9)
    factor = (1 + ((chosen >> 32) * 7 >> 32)).to(tl.int32)
    twice = _doubled(factor)
    fourfold = _doubled(twice)
    chosen = (chosen & 7).to(tl.int32)
    for number in tl.static_range(OCTET):  # of the block in its octet
        block = whole * OCTET + number
        low = chosen
        if number & 1:
            low = low ^ factor
        if number & 2:
            low = low ^ twice
        if number & 4:
            low = low ^ fourfold
        word = mix((block * GROUPS + group).to(tl.uint64), 7)
        word = _swapped(word, low & 1, 1, 0x5555555555555555)
        word = _swapped(word, low & 2, 2, 0x3333333333333333)
        word = _swapped(word, low & 4, 4, 0x0F0F0F0F0F0F0F0F)
        row = octet * OCTET + low
        tl.store(signs + row * GROUPS + group, word.to(tl.int64, bitcast=True), mask=there)
        turn = mix(block.to(tl.uint64), 8)
        turn = ((((turn >> 32) * GROUPS) >> 32) * 64 + (turn & 56)).to(tl.int32) + number
        tl.store(turns + row, turn, mask=there & (group == 0))
    if RUNS:
        is_first = there & (group == 0)
        tl.store(origins + octet * 2, run * length + origin, mask=is_first)
        within = tl.maximum(-origin, 0) << 32 | tl.maximum(tl.minimum(length - origin, SIZE), 0)
        tl.store(origins + octet * 2 + 1, within, mask=is_first)


@triton.jit
def _added_before(octet, length, start, stride, a_run, SIZE: tl.constexpr, RUNS: tl.constexpr):
    """Return how many elements the octets before one have."""
    run, origin = _origin_of(octet, start, stride, a_run, SIZE, RUNS)
    return run * length + tl.minimum(tl.maximum(origin, 0), length)


@triton.jit
def _turns_of(turns, octet, there):
    """Return where the elements of an octet are: int32 [8, 1, 1]; see `make_signs`."""
    return tl.load(turns + octet * OCTET + tl.arange(0, OCTET)[:, None, None], mask=there, other=0)


@triton.jit
def _read(
    x,
    signs,
    turn,
    origins,
    octet,
    there,
    length,
    before,
    column,
    WHOLE: tl.constexpr,
    BUCKETS: tl.constexpr,
    WIDTH: tl.constexpr,
    STRAIGHT: tl.constexpr,
):
    """Return what an octet adds [8, WIDTH // 32, 32], 0 if it is not there; whether it is there; and the signs, 32 in a word.

    Args:
        turn: what `_turns_of` returns.
        there: whether the octet is one of the part.
        column: the first of the words.
        WHOLE: the octet is there as a whole, in the only run.
        STRAIGHT: it begins at a multiple of eight elements.
    """
    row = octet * OCTET + tl.arange(0, OCTET)[:, None, None]
    word = (column + tl.arange(0, WIDTH // 32))[None, :, None]
    lane = tl.arange(0, 32)[None, None, :]
    half = tl.load(signs + row * (BUCKETS // 32) + word, mask=there, other=0)
    place = (((word * 32 + (turn & -64)) & (BUCKETS - 1)) ^ (turn & 32)) + (turn & 7) * BUCKETS
    # Eight neighbours stay neighbours. Compilers take this only of sums, in the function that computes them.
    place = tl.multiple_of(tl.max_contiguous(place + (lane ^ (turn & 24)), [1, 1, 8]), [1, 1, 8])
    if origins is not None:
        begin = tl.load(origins + octet * 2)
        ends = tl.load(origins + octet * 2 + 1)
        inside = (place >= (ends >> 32).to(tl.int32)) & (place < ends.to(tl.int32)) & there
    else:
        begin = octet * (OCTET * BUCKETS) - before
        least = tl.maximum(-begin, 0).to(tl.int32)
        most = tl.minimum(length - begin, OCTET * BUCKETS).to(tl.int32)
        inside = (place >= least) & (place < most) & there
    if STRAIGHT:
        begin = tl.multiple_of(begin, 8)
    value = tl.load(x + begin + place) if WHOLE else tl.load(x + begin + place, mask=inside, other=0)
    return value, inside, half


@triton.jit
def _read_whole(x, signs, turn, octet, before, column, BUCKETS: tl.constexpr, WIDTH: tl.constexpr, STRAIGHT: tl.constexpr):
    """Return what `_read` does of an octet that is there as a whole, in the only run, and the signs."""
    value, _, half = _read(x, signs, turn, None, octet, True, 0, before, column, True, BUCKETS, WIDTH, STRAIGHT)
    return value, half


@triton.jit
def _with_whole(sums, power, low, high, value, half, NUMBER: tl.constexpr):
    """Return sums, those of the squares, and extremes with what an octet that is there as a whole adds to them."""
    value = value.to(NUMBER)
    sums, power = _with_added(sums, power, value, half)
    return sums, power, tl.minimum(low, tl.min(_fours(value), 3)), tl.maximum(high, tl.max(_fours(value), 3))


@triton.jit
def _fours(value):
    """Return values with the four neighbours that a thread has along a last axis."""
    NUMBERS: tl.constexpr = value.shape[1]
    return tl.reshape(value, [OCTET, NUMBERS, 8, 4])


@triton.jit
def _with_added(sums, power, value, half):
    """Return the sums, and those of the squares, with what an octet adds to them; `half` are signs, 32 in a word."""
    wide = value.to(tl.float64)
    negative = (half << (31 - tl.arange(0, 32))[None, None, :]).to(tl.int64) & 0x80000000
    signed = (wide.to(tl.int64, bitcast=True) ^ (negative << 32)).to(tl.float64, bitcast=True)
    return sums + signed, power + tl.sum(_fours(wide * wide), 3)


@triton.jit(do_not_specialize=["parts", "tiles", "octets", "runs", "length", "start", "stride", "a_run"])
def sketch_parts(
    x,
    signs,
    turns,
    origins,
    table,
    parts,
    tiles,
    octets,
    runs,
    length,
    start,
    stride,
    a_run,
    DOUBLE: tl.constexpr,
    INTEGER: tl.constexpr,
    RUNS: tl.constexpr,
    STRAIGHT: tl.constexpr,
    TOGETHER: tl.constexpr,
    BUCKETS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Write what a part of a tensor adds to some of the buckets: part `program_id(0)` of all rows, buckets `program_id(1)`.

    Most elements are added as if all were finite. If the sum of the squares is not, they are added once more, with a look at each.

    Args:
        x: all runs of a tensor, one after another, and one tensor after another.
        signs, turns, origins: what `make_signs` wrote; `signs` as int32.
        table: float64 [rows, BUCKETS // WIDTH, WIDTH + 5, parts]: the sums, and facts of what was added to them.
        tiles: octets of a part.
        octets: of a tensor; those of which a run may have elements. An octet is eight blocks, which have `BUCKETS` elements each, a
            power of two.
        runs, length, start, stride: see `Runs` of `reducers/kernels/parts.py`.
        a_run: octets of a run.
        DOUBLE: elements are numbers in float64, not in float32.
        RUNS: whether there is more than one run.
        STRAIGHT: whether all octets begin at a multiple of eight elements.
        TOGETHER: octets that are read at once, 2 or 4.
        WIDTH: the buckets of a program.
    """
    NUMBER: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    SIZE: tl.constexpr = OCTET * BUCKETS
    NUMBERS: tl.constexpr = WIDTH // 32
    column = tl.program_id(1) * NUMBERS
    row = tl.program_id(0) // parts
    part = tl.program_id(0) % parts
    begin = part.to(tl.int64) * tiles
    stop = tl.minimum(begin + tiles, octets)
    start = start.to(tl.int64)
    length = length.to(tl.int64)
    before = start % SIZE  # elements of the first octet that are not there
    x += tl.multiple_of(row * (length * runs), 8 if STRAIGHT else 1)
    all_there = _added_before(stop, length, start, stride, a_run, SIZE, RUNS)
    all_there -= _added_before(begin, length, start, stride, a_run, SIZE, RUNS)
    sums = tl.zeros([OCTET, NUMBERS, 32], tl.float64)
    power = tl.zeros([OCTET, NUMBERS, 8], tl.float64)  # this and what follows of each four neighbours, which takes fewer registers
    low = tl.full([OCTET, NUMBERS, 8], float("inf"), NUMBER)
    high = tl.full([OCTET, NUMBERS, 8], float("-inf"), NUMBER)
    full = begin
    full_stop = begin
    if not RUNS:  # first the octets that are there as a whole
        full += tl.where((begin == 0) & (before > 0), 1, 0)
        full_stop = tl.maximum(tl.minimum(stop, (before + length) // SIZE), full)
        full_stop = full + (full_stop - full) // TOGETHER * TOGETHER
        for octet in range(full, full_stop, TOGETHER):
            turn_0 = _turns_of(turns, octet, True)
            turn_1 = _turns_of(turns, octet + 1, True)
            value_0, half_0 = _read_whole(x, signs, turn_0, octet, before, column, BUCKETS, WIDTH, STRAIGHT)
            value_1, half_1 = _read_whole(x, signs, turn_1, octet + 1, before, column, BUCKETS, WIDTH, STRAIGHT)
            if TOGETHER > 2:
                turn_2 = _turns_of(turns, octet + 2, True)
                turn_3 = _turns_of(turns, octet + 3, True)
                value_2, half_2 = _read_whole(x, signs, turn_2, octet + 2, before, column, BUCKETS, WIDTH, STRAIGHT)
                value_3, half_3 = _read_whole(x, signs, turn_3, octet + 3, before, column, BUCKETS, WIDTH, STRAIGHT)
            sums, power, low, high = _with_whole(sums, power, low, high, value_0, half_0, NUMBER)
            sums, power, low, high = _with_whole(sums, power, low, high, value_1, half_1, NUMBER)
            if TOGETHER > 2:
                sums, power, low, high = _with_whole(sums, power, low, high, value_2, half_2, NUMBER)
                sums, power, low, high = _with_whole(sums, power, low, high, value_3, half_3, NUMBER)
    again = (tl.sum(power) < float("inf")) == 0
    full_stop = tl.where(again, full, full_stop)
    sums = tl.where(again, 0.0, sums)
    power = tl.where(again, 0.0, power)
    low = tl.where(again, float("inf"), low)
    high = tl.where(again, float("-inf"), high)
    count = tl.zeros([OCTET, NUMBERS, 8], tl.int32)
    for index in range(begin, stop - (full_stop - full)):
        octet = tl.where(index < full, index, index + (full_stop - full))
        turn = _turns_of(turns, octet, octet < stop)
        value, there, half = _read(
            x, signs, turn, origins, octet, octet < stop, length, before, column, False, BUCKETS, WIDTH, STRAIGHT
        )
        value = value.to(NUMBER)
        if not INTEGER:
            there = there & (tl.abs(value) < float("inf"))
            value = tl.where(there, value, 0.0)
        count += tl.sum(_fours(there.to(tl.int32)), 3)
        low = tl.minimum(low, tl.min(_fours(tl.where(there, value, float("inf"))), 3))
        high = tl.maximum(high, tl.max(_fours(tl.where(there, value, float("-inf"))), 3))
        sums, power = _with_added(sums, power, value, half)

    block = tl.arange(0, OCTET)[:, None, None]
    lane = tl.arange(0, 32)[None, None, :]
    source = (block ^ lane) + tl.zeros([OCTET, NUMBERS, 32], tl.int32)
    sums = tl.sum(tl.gather(sums, source, 2), 0)
    finite = (full_stop - full) * (OCTET * WIDTH) + tl.sum(count)
    to = table + (row * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * (WIDTH + FACTS) * parts + part
    tl.store(to + (tl.arange(0, NUMBERS)[:, None] * 32 + tl.arange(0, 32)[None, :]) * parts, sums)
    to += WIDTH * parts
    tl.store(to, finite.to(tl.float64))
    # Which of them are in these buckets is not known of the others, so the first buckets count all that are there.
    tl.store(to + parts, (tl.where(tl.program_id(1) == 0, all_there, 0) - finite).to(tl.float64))
    tl.store(to + 2 * parts, tl.sum(power))
    tl.store(to + 3 * parts, tl.min(low).to(tl.float64))
    tl.store(to + 4 * parts, tl.max(high).to(tl.float64))


@triton.jit(do_not_specialize=["parts", "buckets", "blocks"])
def join_parts(table, sums, facts, parts, buckets, blocks, WIDTH: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr):
    """Write the sums and facts of tensor `program_id(0)`, in columns `program_id(1)`, from the table that `sketch_parts` wrote.

    Args:
        parts: of each tensor.
        blocks: by how many programs the buckets of a part were added up, of which each had `WIDTH`.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    fact = column - buckets
    is_fact = fact >= 0
    least = (fact == 3)[:, None]
    greatest = (fact == 4)[:, None]
    first = row * blocks + tl.where(is_fact, 0, column // WIDTH)
    within = tl.where(is_fact, WIDTH + fact, column % WIDTH)
    number = tl.where(is_fact, blocks * parts, parts)
    number = tl.where(fact < FACTS, number, 0)
    empty = tl.where(least, float("inf"), tl.where(greatest, float("-inf"), 0.0)).to(tl.float64)
    joined = tl.zeros([COLUMNS, PARTS], tl.float64) + empty
    for begin in range(0, tl.max(number), PARTS):
        part = (begin + tl.arange(0, PARTS))[None, :]
        there = part < number[:, None]
        place = ((first[:, None] + part // parts) * (WIDTH + FACTS) + within[:, None]) * parts + part % parts
        found = tl.where(there, tl.load(table + place, mask=there, other=0), empty)
        ends = tl.where(least, tl.minimum(joined, found), tl.maximum(joined, found))
        joined = tl.where(least | greatest, ends, joined + found)
    ends = tl.where(fact == 3, tl.min(joined, 1), tl.max(joined, 1))
    found = tl.where((fact == 3) | (fact == 4), ends, tl.sum(joined, 1))
    tl.store(sums + row * buckets + column, found, mask=column < buckets)
    tl.store(facts + row * FACTS + fact, found, mask=is_fact & (fact < FACTS))
