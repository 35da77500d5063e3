"""Hashes of the bits of tensors: one launch hashes parts of them, and one adds these up.

`reducers/kernels/digests.py` has the definition. A program goes through blocks of 512 words, and each thread has the same places in
all of them. Both sums are linear in the words, so a thread adds up the words of each of its places, times the factors of their
blocks, in registers. The coefficients of the places, and what other threads have, come at the end. Sums of integers modulo 2**64 do
not depend on how a tensor is cut.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def mix(x, SALT: tl.constexpr):
    """As `mix` of `reducers/kernels/hashing.py`, of uint64."""
    x += SALT * 0x9E3779B97F4A7C15 % 18446744073709551616
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _without_nans(half, MAGNITUDE: tl.constexpr, ABOVE: tl.constexpr, SIGNS: tl.constexpr, NAN: tl.constexpr, BITS: tl.constexpr):
    """Return halves of words whose elements of `BITS` bits are the one NaN if they are any NaN.

    All elements of a half are seen at once. If a magnitude is that of a NaN, adding `ABOVE` reaches the bit of the sign.
    """
    if BITS == 32:
        number = half.to(tl.float32, bitcast=True)
        return tl.where(number == number, half, NAN)
    nan = ((half & MAGNITUDE) + ABOVE) & SIGNS
    return half ^ ((half ^ NAN) & ((nan << 1) - (nan >> (BITS - 1))))


@triton.jit
def _half_reversed(half):
    """Return halves of words with their bytes in the opposite order, in the way that compilers make one instruction of."""
    return (half << 24) | ((half & 0xFF00) << 8) | ((half >> 8) & 0xFF00) | (half >> 24)


@triton.jit
def _reversed(word):
    """Return words with their bytes in the opposite order, in the way that compilers make two instructions of."""
    word = ((word & 0x00FF00FF00FF00FF) << 8) | ((word >> 8) & 0x00FF00FF00FF00FF)
    word = ((word & 0x0000FFFF0000FFFF) << 16) | ((word >> 16) & 0x0000FFFF0000FFFF)
    return (word << 32) | (word >> 32)


@triton.jit
def _halves(word):
    return word.to(tl.uint32), (word >> 32).to(tl.uint32)


@triton.jit
def _products(low, high, factor):
    """Return the sums of the products of words, in halves, with the factors of their blocks: uint64, and uint32 that count 2**32.

    Modulo 2**64 the product of both high halves is 0, and of the other two with a high half only 32 bits are left.
    """
    factor_low = factor.to(tl.uint32)[:, None]
    factor_high = (factor >> 32).to(tl.uint32)[:, None]
    wide = tl.sum(low.to(tl.uint64) * factor_low.to(tl.uint64), 0)
    return wide, tl.sum(high * factor_low + low * factor_high, 0)


@triton.jit
def _with_added(
    wide,
    upper,
    other_wide,
    other_upper,
    word,
    block,
    MAGNITUDE: tl.constexpr,
    ABOVE: tl.constexpr,
    SIGNS: tl.constexpr,
    NAN: tl.constexpr,
    BITS: tl.constexpr,
):
    """Return the two sums of each place, see `_products`, with what words [blocks, places] add to them."""
    if BITS == 64:
        number = word.to(tl.float64, bitcast=True)
        word = tl.where(number == number, word, NAN)
    word = word.to(tl.uint64, bitcast=True)
    low, high = _halves(word)
    if BITS > 0 and BITS < 64:
        low = _without_nans(low, MAGNITUDE, ABOVE, SIGNS, NAN, BITS)
        high = _without_nans(high, MAGNITUDE, ABOVE, SIGNS, NAN, BITS)
        first, last = _half_reversed(high), _half_reversed(low)
    else:
        first, last = _halves(_reversed(word))
    factor = block.to(tl.uint64) * 0x9E3779B97F4A7C15
    factor = ((factor ^ (factor >> 32)) * 0x94D049BB133111EB) | 1
    swapped = (factor << 32) | (factor >> 32) | 1
    more_wide, more_upper = _products(low, high, factor)
    more_other_wide, more_other_upper = _products(first, last, swapped)
    return wide + more_wide, upper + more_upper, other_wide + more_other_wide, other_upper + more_other_upper


@triton.jit
def _summed(wide, upper, place, SALT: tl.constexpr):
    """Return the sum of all places, each times its coefficient."""
    return tl.sum((wide + (upper.to(tl.uint64) << 32)) * (mix(place.to(tl.uint64), SALT) | 1), 0).to(tl.int64, bitcast=True)


@triton.jit(
    do_not_specialize=["kind", "other_kind", "parts", "tiles", "slots", "runs", "length", "start", "stride", "a_run", "row"]
)
def hash_parts(
    x,
    table,
    kind,
    other_kind,
    parts,
    tiles,
    slots,
    runs,
    length,
    start,
    stride,
    a_run,
    MAGNITUDE: tl.constexpr,
    ABOVE: tl.constexpr,
    SIGNS: tl.constexpr,
    NAN: tl.constexpr,
    BITS: tl.constexpr,
    RUNS: tl.constexpr,
    PAIRS: tl.constexpr,
    EVEN: tl.constexpr,
    TOGETHER: tl.constexpr,
    WORDS: tl.constexpr,
    row=0,
):
    """Write the two sums of a part of a tensor; `table` is int64 [rows, parts, 2]. Each program has one part of one row.

    Args:
        x: int64 words of all runs of a tensor, one after another, and of one tensor after another.
        kind, other_kind: what is added to the two sums of each tensor.
        tiles: of a part; a tile is `TOGETHER` slots.
        slots: of a tensor; a slot is a block of which a run may have words.
        runs, length, start, stride: see `Runs` of `reducers/kernels/parts.py`, in words.
        a_run: slots of a run.
        MAGNITUDE, ABOVE, SIGNS, NAN, BITS: see `_without_nans`; `BITS` is 0 if there is no NaN.
        RUNS: whether there is more than one run.
        PAIRS: whether all words at an even place of a block are at an even place of `x`.
        EVEN: whether a run has an even number of words, so that it ends between pairs of a block if it begins so.
        row: of the table, which is that of the first tensor.
    """
    place = tl.arange(0, WORDS)
    number = tl.arange(0, TOGETHER)
    MULTIPLE: tl.constexpr = 2 if PAIRS else 1
    ENDS: tl.constexpr = 2 if PAIRS and EVEN else 1  # or the word after the last one would be read with it
    begin = (tl.program_id(0) % parts).to(tl.int64) * tiles * TOGETHER
    stop = tl.minimum(begin + tiles * TOGETHER, slots)
    start = start.to(tl.int64)
    length = length.to(tl.int64)
    before = start % WORDS  # words of the first block that are not there
    x += tl.multiple_of(tl.program_id(0) // parts * (length * runs), MULTIPLE)
    wide = tl.zeros([WORDS], tl.uint64)
    upper = tl.zeros([WORDS], tl.uint32)
    other_wide = tl.zeros([WORDS], tl.uint64)
    other_upper = tl.zeros([WORDS], tl.uint32)
    full = begin
    full_stop = begin
    if not RUNS:  # first the tiles that are there as a whole
        full += tl.where((begin == 0) & (before > 0), TOGETHER, 0)
        some = tl.minimum(stop, (before + length) // WORDS) - begin
        full_stop = tl.maximum(begin + some // TOGETHER * TOGETHER, full)
        for first in range(full, full_stop, TOGETHER):
            here = x + tl.multiple_of(first * WORDS - before, MULTIPLE)
            word = tl.load(here + (number[:, None] * WORDS + place[None, :]))
            block = start // WORDS + first + number
            wide, upper, other_wide, other_upper = _with_added(
                wide, upper, other_wide, other_upper, word, block, MAGNITUDE, ABOVE, SIGNS, NAN, BITS
            )
    for first in range(begin, stop - (full_stop - full), TOGETHER):
        slot = tl.where(first < full, first, first + (full_stop - full)) + number
        if RUNS:
            run = (slot.to(tl.int32) // a_run).to(tl.int64)
            begins = start + run * stride
            block = begins // WORDS + (slot - run * a_run)
            low = begins - block * WORDS
            origin = run * length - low
        else:
            block = start // WORDS + slot
            low = before - slot * WORDS
            origin = -low
        least = tl.multiple_of(tl.maximum(low, 0).to(tl.int32), MULTIPLE)
        most = tl.where(slot < stop, tl.minimum(low + length, WORDS), 0)
        most = tl.multiple_of(tl.maximum(most, 0).to(tl.int32), ENDS)
        there = (place[None, :] >= least[:, None]) & (place[None, :] < most[:, None])
        word = tl.load(x + tl.multiple_of(origin, MULTIPLE)[:, None] + place[None, :], mask=there, other=0)
        wide, upper, other_wide, other_upper = _with_added(
            wide, upper, other_wide, other_upper, word, block, MAGNITUDE, ABOVE, SIGNS, NAN, BITS
        )
    to = table + (row.to(tl.int64) * parts + tl.program_id(0)) * 2
    tl.store(to, _summed(wide, upper, place, 1) + tl.where(begin == 0, kind, 0))
    tl.store(to + 1, _summed(other_wide, other_upper, place, 2) + tl.where(begin == 0, other_kind, 0))


@triton.jit(do_not_specialize=["parts"])
def finish(table, hashes, parts, BLOCK: tl.constexpr):
    """Write the two sums of tensor `program_id(0)`, int64 [rows, 2], of those of its parts."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, 2)[None, :]
    total = tl.zeros([BLOCK, 2], tl.int64)
    for begin in range(0, parts, BLOCK):
        part = begin + tl.arange(0, BLOCK)[:, None]
        total += tl.load(table + (row * parts + part) * 2 + column, mask=(part < parts) & (column < 2), other=0)
    tl.store(hashes + row * 2 + tl.arange(0, 2), tl.sum(total, 0))


@triton.jit
def _times(a0, a1, b0, b1):
    """As `_times` of `reducers/statistics/digest.py`."""
    ends = a1 * b1
    return a0 * b0 - ends, a0 * b1 + a1 * b0 - ends


@triton.jit
def _load_pair(pair):
    one = tl.arange(0, 1)
    return tl.load(pair + one), tl.load(pair + 1 + one)


@triton.jit
def _store_pair(first, second, to):
    one = tl.arange(0, 1)
    tl.store(to + one, first)
    tl.store(to + 1 + one, second)


@triton.jit(do_not_specialize=["rows", "power", "other_power"])
def absorb(
    hashes,
    digest_out,
    factor_out,
    observations_out,
    digest,
    factor,
    observations,
    rows,
    power,
    other_power,
    FACTOR: tl.constexpr,
    OTHER_FACTOR: tl.constexpr,
    STATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the state of `Digest` after observations with these hashes, int64 [rows, 2], in order.

    Args:
        power, other_power: the factor to the power of `rows`.
        FACTOR, OTHER_FACTOR: the factor.
        STATE: whether `digest`, `factor` and `observations` are a state before.
    """
    one = tl.arange(0, 1)
    zero = tl.zeros([1], tl.int64)
    first = zero
    second = zero
    for begin in range(0, rows, BLOCK):
        row = begin + tl.arange(0, BLOCK)
        left = rows - 1 - row  # how often each hash is multiplied by the factor
        found = tl.load(hashes + row.to(tl.int64) * 2, mask=left >= 0, other=0)
        found_other = tl.load(hashes + row.to(tl.int64) * 2 + 1, mask=left >= 0, other=0)
        square = zero + FACTOR
        other_square = zero + OTHER_FACTOR
        most = rows - 1 - begin
        while most > 0:
            by, by_other = _times(found, found_other, square, other_square)
            found = tl.where((left & 1) == 1, by, found)
            found_other = tl.where((left & 1) == 1, by_other, found_other)
            square, other_square = _times(square, other_square, square, other_square)
            left = left >> 1
            most = most >> 1
        first += tl.sum(found, 0)
        second += tl.sum(found_other, 0)
    powers = zero + power
    other_powers = zero + other_power
    number = zero + rows
    if STATE:
        before, other_before = _load_pair(digest)
        before, other_before = _times(before, other_before, powers, other_powers)
        first += before
        second += other_before
        before, other_before = _load_pair(factor)
        powers, other_powers = _times(before, other_before, powers, other_powers)
        number += tl.load(observations + one)
    _store_pair(first, second, digest_out)
    _store_pair(powers, other_powers, factor_out)
    tl.store(observations_out + one, number)
