"""Hashes of the bits of tensors: one launch hashes parts of them, and one adds these up.

`reducers/kernels/digests.py` has the definition. Sums of integers modulo 2**64 do not depend on how a tensor is cut.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["absorb", "finish", "hash_parts"]

PRIME = tl.constexpr(2**61 - 1)


@triton.jit
def mix(x, SALT: tl.constexpr):
    """As `mix` of `reducers/kernels/hashing.py`, of uint64."""
    x += SALT * 0x9E3779B97F4A7C15 % 18446744073709551616
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _without_nans(word, MAGNITUDE: tl.constexpr, ABOVE: tl.constexpr, SIGNS: tl.constexpr, NANS: tl.constexpr, BITS: tl.constexpr):
    """Return words whose elements of `BITS` bits are the one NaN where they are any NaN.

    All elements of a word are seen at once. Where a magnitude is that of a NaN, adding `ABOVE` reaches the bit of the sign.
    """
    nan = ((word & MAGNITUDE) + ABOVE) & SIGNS
    all_bits = (nan << 1) - (nan >> (BITS - 1))
    return word ^ ((word ^ NANS) & all_bits)


@triton.jit(do_not_specialize=["blocks", "tiles", "first"])
def hash_parts(
    x,
    table,
    words,
    blocks,
    tiles,
    MAGNITUDE: tl.constexpr,
    ABOVE: tl.constexpr,
    SIGNS: tl.constexpr,
    NANS: tl.constexpr,
    BITS: tl.constexpr,
    ONE_ROW: tl.constexpr,
    TOGETHER: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Write the sum of the hashes of the blocks of part `program_id(0)` of tensor `program_id(1)`; `table` is int64 [rows, parts].

    Args:
        x: int64 words, of each tensor so many, one tensor after another.
        blocks: of a tensor.
        tiles: of a part; a tile is `TOGETHER` blocks.
        MAGNITUDE, ABOVE, SIGNS, NANS, BITS: see `_without_nans`; `BITS` is 0 if there is no NaN.
    """
    place = tl.arange(0, WORDS)
    weight = mix(place.to(tl.uint64), 1) | 1
    number = tl.arange(0, TOGETHER)
    lane = number[:, None] * WORDS + place[None, :]
    row = tl.program_id(1).to(tl.int64)
    if ONE_ROW:
        row = row * 0
    begin = tl.program_id(0).to(tl.int64) * tiles * TOGETHER
    stop = tl.minimum(begin + tiles.to(tl.int64) * TOGETHER, blocks.to(tl.int64))
    total = tl.zeros([TOGETHER], tl.uint64)
    for block in range(begin, stop, TOGETHER):
        start = block * WORDS
        here = x + start if ONE_ROW else x + (row * words + start)
        if start + TOGETHER * WORDS <= words:
            word = tl.load(here + lane)
        else:
            word = tl.load(here + lane, mask=start + lane < words, other=0)
        word = word.to(tl.uint64, bitcast=True)
        if BITS > 0:
            word = _without_nans(word, MAGNITUDE, ABOVE, SIGNS, NANS, BITS)
        word = (word ^ (word >> 32)) * 0x9E3779B97F4A7C15
        word = word ^ (word >> 32)
        hashes = mix(mix(tl.sum(word * weight[None, :], 1), 2) + (block + number).to(tl.uint64), 3)
        total += tl.where(block + number < stop, hashes, 0)
    tl.store(table + row * tl.num_programs(0) + tl.program_id(0), tl.sum(total, 0).to(tl.int64, bitcast=True))


@triton.jit(do_not_specialize=["parts", "kind"])
def finish(table, hashes, parts, kind, BLOCK: tl.constexpr):
    """Write the hash of tensor `program_id(0)`: of the sum of its parts, and of `kind`, a hash of its shape and dtype."""
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], tl.int64)
    for begin in range(0, parts, BLOCK):
        part = begin + tl.arange(0, BLOCK)
        total += tl.load(table + row * parts + part, mask=part < parts, other=0)
    whole = tl.zeros([1], tl.int64) + tl.sum(total, 0) + kind
    tl.store(hashes + row + tl.arange(0, 1), mix(whole.to(tl.uint64, bitcast=True), 5).to(tl.int64, bitcast=True))


@triton.jit
def _reduced(x):
    """Return uint64 modulo the prime 2**61 - 1."""
    x = (x & PRIME) + (x >> 61)
    return tl.where(x >= PRIME, x - PRIME, x)


@triton.jit
def _times(a, b):
    """Return the product of numbers below the prime modulo the prime, of which the bits from the 61st on count as they are."""
    low = a * b
    return _reduced((low & PRIME) + ((tl.umulhi(a, b) << 3) | (low >> 61)))


@triton.jit
def _stored(number, to):
    tl.store(to + tl.arange(0, 1), number.to(tl.int64, bitcast=True))


@triton.jit(do_not_specialize=["rows", "power"])
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
    FACTOR: tl.constexpr,
    STATE: tl.constexpr,
):
    """Write the state of `Digest` after observations with these hashes, in order.

    Args:
        rows: how many there are.
        power: the factor to this power, modulo the prime.
        STATE: whether `digest`, `factor` and `observations` are a state before.
    """
    one = tl.arange(0, 1)
    zero = tl.zeros([1], tl.uint64)
    found = zero
    if STATE:
        found += tl.load(digest + one).to(tl.uint64, bitcast=True)
    for row in range(rows):
        hash = tl.load(hashes + row + one).to(tl.uint64, bitcast=True) & PRIME
        found = _reduced(_times(found, zero + FACTOR) + hash)
    powers = zero + power.to(tl.uint64)
    number = zero + rows.to(tl.uint64)
    if STATE:
        powers = _times(tl.load(factor + one).to(tl.uint64, bitcast=True), powers)
        number += tl.load(observations + one).to(tl.uint64, bitcast=True)
    _stored(found, digest_out)
    _stored(powers, factor_out)
    _stored(number, observations_out)
