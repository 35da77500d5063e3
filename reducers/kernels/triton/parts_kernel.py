"""What the parts of an observation are together, and the kernel that finds it for many slots at once, before they are joined.

Adding up the parts takes far longer than joining the result to a state, and no slot needs another for it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from reducers.kernels.triton.words import as_number, as_word


@triton.jit
def moments_of_parts(place, field, there, counts, number, ORDER: tl.constexpr):
    """Return the mean of all parts, and the central power sums; those beyond `ORDER` are not looked at.

    Args:
        place: where the first field of each part of each column is.
        counts: of each part, int32; 0 if it is not there.
        number: of all parts.
    """
    weights = counts.to(tl.float64)
    weight = number.to(tl.float64)
    means = as_number(tl.load(place + field, mask=there, other=0))
    # About the mean of one part, so that equal numbers have exactly themselves as the mean.
    one = tl.max(tl.where(counts > 0, means, float("-inf")), 0)
    one = tl.where(number > 0, one, 0.0)
    shifts = tl.where(counts > 0, means - one[None, :], 0.0)
    shift = tl.sum(weights * shifts, 0) / tl.maximum(weight, 1.0)
    mean = one + shift
    m2 = mean
    m3 = mean
    m4 = mean
    shifts = tl.where(counts > 0, shifts - shift[None, :], 0.0)
    if ORDER > 1:
        seconds = as_number(tl.load(place + 2 * field, mask=there, other=0))
        squares = shifts * shifts
        m2 = tl.sum(seconds + weights * squares, 0)
    if ORDER > 2:
        thirds = as_number(tl.load(place + 3 * field, mask=there, other=0))
        m3 = tl.sum(thirds + shifts * (3 * seconds + weights * squares), 0)
    if ORDER > 3:
        fourths = as_number(tl.load(place + 4 * field, mask=there, other=0))
        m4 = tl.sum(fourths + shifts * (4 * thirds + shifts * (6 * seconds + weights * squares)), 0)
    return mean, m2, m3, m4


@triton.jit
def extremes_of_parts(place, field, there, INTEGER: tl.constexpr, LOWEST: tl.constexpr, HIGHEST: tl.constexpr):
    """Return the minimum and the maximum of all parts; `place` is where the minimum of each is."""
    lows = tl.load(place, mask=there, other=HIGHEST)
    highs = tl.load(place + field, mask=there, other=LOWEST)
    if not INTEGER:
        lows = tl.where(there, as_number(lows), float("inf"))
        highs = tl.where(there, as_number(highs), float("-inf"))
    return tl.min(lows, 0), tl.max(highs, 0)


@triton.jit
def total_of_parts(place, there, COUNTED: tl.constexpr):
    """Return the sum of a field over all parts: of integers, or of floats."""
    words = tl.load(place, mask=there, other=0)
    return tl.sum(words, 0) if COUNTED else tl.sum(as_number(words), 0)


@triton.jit(do_not_specialize=["parts", "first"], do_not_specialize_on_alignment=["partials", "joined"])
def join_each(
    partials,
    joined,
    kept,
    parts,
    ORDER: tl.constexpr,
    EXTREMES: tl.constexpr,
    COUNTS: tl.constexpr,
    TOTAL: tl.constexpr,
    INTEGER: tl.constexpr,
    WITH_NONFINITE: tl.constexpr,
    WITH_MEAN: tl.constexpr,
    LOWEST: tl.constexpr,
    HIGHEST: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    first=0,
):
    """Write what the parts of slot `first + program_id(1)` are together, for the columns of block `program_id(0)`.

    `joined` is int64 of shape [slots, fields and one, kept]: the fields are those that `sweep` writes, but the first is the count
    alone, in 64 bits, and the number of what is not finite is the last.
    """
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < kept
    part = tl.arange(0, PARTS)
    there = (part < parts)[:, None] & inside[None, :]
    start = partials + part[:, None].to(tl.int64) * kept + column[None, :]
    field = parts.to(tl.int64) * kept
    COUNTED: tl.constexpr = TOTAL == "active" or (INTEGER and (TOTAL == "sum" or TOTAL == "exact"))
    ADDED: tl.constexpr = TOTAL != "" and TOTAL != "peak"
    FIELDS: tl.constexpr = 1 + ORDER + 2 * EXTREMES + 3 * COUNTS + ADDED
    slot = tl.program_id(1).to(tl.int64)
    place = start + (first + slot) * (FIELDS * field)
    row = tl.zeros([], tl.int64) + kept
    target = joined + slot * ((FIELDS + 1) * row) + column

    counts = tl.load(place, mask=there, other=0)
    if WITH_NONFINITE:
        tl.store(target + FIELDS * row, tl.sum(counts >> 32, 0), mask=inside)
    counts = counts.to(tl.int32)  # without the upper half
    number = tl.sum(counts.to(tl.int64), 0)
    tl.store(target, number, mask=inside)
    if WITH_MEAN:
        mean, m2, m3, m4 = moments_of_parts(place, field, there, counts, number, ORDER)
        tl.store(target + row, as_word(mean), mask=inside)
        if ORDER > 1:
            tl.store(target + 2 * row, as_word(m2), mask=inside)
        if ORDER > 2:
            tl.store(target + 3 * row, as_word(m3), mask=inside)
        if ORDER > 3:
            tl.store(target + 4 * row, as_word(m4), mask=inside)
    if EXTREMES:
        low, high = extremes_of_parts(place + (1 + ORDER) * field, field, there, INTEGER, LOWEST, HIGHEST)
        tl.store(target + (1 + ORDER) * row, low if INTEGER else as_word(low), mask=inside)
        tl.store(target + (2 + ORDER) * row, high if INTEGER else as_word(high), mask=inside)
    base: tl.constexpr = 1 + ORDER + 2 * EXTREMES
    if COUNTS:
        for which in tl.static_range(base, base + 3):
            tl.store(target + which * row, total_of_parts(place + which * field, there, True), mask=inside)
    if ADDED:
        total = total_of_parts(place + (FIELDS - 1) * field, there, COUNTED)
        tl.store(target + (FIELDS - 1) * row, total if COUNTED else as_word(total), mask=inside)


@triton.jit
def joined_slot(
    place,
    row,
    there,
    ORDER: tl.constexpr,
    EXTREMES: tl.constexpr,
    COUNTS: tl.constexpr,
    ADDED: tl.constexpr,
    COUNTED: tl.constexpr,
    INTEGER: tl.constexpr,
    WITH_MEAN: tl.constexpr,
    WITH_NONFINITE: tl.constexpr,
):
    """Return what `join_each` has written for a slot, in the order of the fields but with the last one second.

    What it has not written is not looked at.
    """
    base: tl.constexpr = 1 + ORDER + 2 * EXTREMES
    count = tl.load(place, mask=there, other=0)
    others = count
    zeros = count
    infinite = count
    missing = count
    mean = as_number(count)
    m2 = mean
    m3 = mean
    m4 = mean
    low = count if INTEGER else mean
    high = low
    total = count if COUNTED else mean
    if WITH_MEAN:
        mean = as_number(tl.load(place + row, mask=there, other=0))
        if ORDER > 1:
            m2 = as_number(tl.load(place + 2 * row, mask=there, other=0))
        if ORDER > 2:
            m3 = as_number(tl.load(place + 3 * row, mask=there, other=0))
        if ORDER > 3:
            m4 = as_number(tl.load(place + 4 * row, mask=there, other=0))
    if EXTREMES:
        low = tl.load(place + (1 + ORDER) * row, mask=there, other=0)
        high = tl.load(place + (2 + ORDER) * row, mask=there, other=0)
        if not INTEGER:
            low = as_number(low)
            high = as_number(high)
    if COUNTS:
        zeros = tl.load(place + base * row, mask=there, other=0)
        infinite = tl.load(place + (base + 1) * row, mask=there, other=0)
        missing = tl.load(place + (base + 2) * row, mask=there, other=0)
    if ADDED:
        total = tl.load(place + (base + 3 * COUNTS) * row, mask=there, other=0)
        if not COUNTED:
            total = as_number(total)
    if WITH_NONFINITE:
        others = tl.load(place + (base + 3 * COUNTS + ADDED) * row, mask=there, other=0)
    return count, others, mean, m2, m3, m4, low, high, zeros, infinite, missing, total
