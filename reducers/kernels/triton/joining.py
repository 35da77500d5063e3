"""The second launch: the partial statistics of all parts joined, in float64, and with them those of a state."""

from __future__ import annotations

import triton
import triton.language as tl

from reducers.kernels.triton.words import as_number

__all__ = ["join"]


@triton.jit
def _merged_sum(out, old, new, column, inside, STATE: tl.constexpr):
    """Write the sum of a new number and the old one, if there is a state."""
    if STATE:
        new += tl.load(old + column, mask=inside, other=0).to(new.dtype)
    tl.store(out + column, new, mask=inside)


@triton.jit
def _narrowed(value, out, INTEGER: tl.constexpr):
    """Return a number that came from the dtype of `out` in that dtype again."""
    if not INTEGER and out.dtype.element_ty != tl.float64:
        value = value.to(tl.float32)  # there is no conversion from float64 to bfloat16
    return value.to(out.dtype.element_ty)


@triton.jit(do_not_specialize=["parts"])
def join(
    partials,
    due,
    count_out,
    mean_out,
    m2_out,
    m3_out,
    m4_out,
    min_out,
    max_out,
    zeros_out,
    nan_out,
    inf_out,
    total_out,
    count_old,
    mean_old,
    m2_old,
    m3_old,
    m4_old,
    min_old,
    max_old,
    zeros_old,
    nan_old,
    inf_old,
    total_old,
    kept,
    parts,
    ORDER: tl.constexpr,
    EXTREMES: tl.constexpr,
    COUNTS: tl.constexpr,
    TOTAL: tl.constexpr,
    INTEGER: tl.constexpr,
    WITH_COUNT: tl.constexpr,
    WITH_MEAN: tl.constexpr,
    WITH_MIN: tl.constexpr,
    WITH_MAX: tl.constexpr,
    LOWEST: tl.constexpr,
    HIGHEST: tl.constexpr,
    STATE: tl.constexpr,
    DUE: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write the statistics of all parts, joined with those of a state, for the columns of block `program_id(0)`.

    Where `due` is 0 the statistics are those of the state: what the parts hold is from an earlier observation then.
    """
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < kept
    part = tl.arange(0, PARTS)
    there = (part < parts)[:, None] & inside[None, :]
    if DUE:
        there = there & (tl.load(due) != 0)
    place = partials + part[:, None].to(tl.int64) * kept + column[None, :]
    field = parts.to(tl.int64) * kept
    counts = tl.load(place, mask=there, other=0)
    count = tl.sum(counts, 0)
    if WITH_MEAN:
        weights = counts.to(tl.float64)
        weight = count.to(tl.float64)
        means = as_number(tl.load(place + field, mask=there, other=0))
        # About the mean of one part, so that equal numbers have exactly themselves as the mean.
        one = tl.max(tl.where(counts > 0, means, float("-inf")), 0)
        one = tl.where(count > 0, one, 0.0)
        shifts = tl.where(counts > 0, means - one[None, :], 0.0)
        shift = tl.sum(weights * shifts, 0) / tl.maximum(weight, 1.0)
        mean = one + shift
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
        if STATE:
            # Chan, Golub and LeVeque 1983, eqs. 1.5a and 1.5b; Pebay 2008 for the third and fourth power.
            before = tl.load(count_old + column, mask=inside, other=0).to(tl.float64)
            both = before + weight
            share = weight / tl.maximum(both, 1.0)
            other = before / tl.maximum(both, 1.0)
            old_mean = tl.load(mean_old + column, mask=inside, other=0)
            # Not from the mean of nothing, which is 0: the square of a huge distance, times no weight, would be NaN.
            delta = tl.where((before > 0) & (weight > 0), mean - old_mean, 0.0)
            if ORDER > 1:
                old_m2 = tl.load(m2_old + column, mask=inside, other=0)
            if ORDER > 2:
                old_m3 = tl.load(m3_old + column, mask=inside, other=0)
                product = both * share * other
            if ORDER > 3:
                old_m4 = tl.load(m4_old + column, mask=inside, other=0)
                spread = 6 * (other * other * m2 + share * share * old_m2) + delta * delta * product * (1 - 3 * share * other)
                m4 = old_m4 + m4 + delta * (4 * (other * m3 - share * old_m3) + delta * spread)
            if ORDER > 2:
                lean = 3 * (other * m2 - share * old_m2) + delta * delta * product * (other - share)
                m3 = old_m3 + m3 + delta * lean
            if ORDER > 1:
                m2 = old_m2 + m2 + delta * delta * (share * before)
            mean = tl.where(before > 0, old_mean, mean) + delta * share
            tl.debug_barrier()  # the state may be written in place, and no thread may do so before all have read
        tl.store(mean_out + column, mean, mask=inside)
        if ORDER > 1:
            tl.store(m2_out + column, m2, mask=inside)
        if ORDER > 2:
            tl.store(m3_out + column, m3, mask=inside)
        if ORDER > 3:
            tl.store(m4_out + column, m4, mask=inside)
    if WITH_COUNT:
        _merged_sum(count_out, count_old, count, column, inside, STATE)
    if EXTREMES:
        lows = tl.load(place + (1 + ORDER) * field, mask=there, other=HIGHEST)
        highs = tl.load(place + (2 + ORDER) * field, mask=there, other=LOWEST)
        if not INTEGER:
            lows = tl.where(there, as_number(lows), float("inf"))
            highs = tl.where(there, as_number(highs), float("-inf"))
        low = tl.min(lows, 0)
        high = tl.max(highs, 0)
        if WITH_MIN:
            if STATE:
                low = tl.minimum(low, tl.load(min_old + column, mask=inside, other=0).to(low.dtype))
            tl.store(min_out + column, _narrowed(low, min_out, INTEGER), mask=inside)
        if WITH_MAX:
            if STATE:
                high = tl.maximum(high, tl.load(max_old + column, mask=inside, other=0).to(high.dtype))
            tl.store(max_out + column, _narrowed(high, max_out, INTEGER), mask=inside)
        if TOTAL == "peak":
            peak = tl.where(count > 0, tl.maximum(-(low.to(tl.float64)), high.to(tl.float64)), 0.0)
            if STATE:
                peak = tl.maximum(peak, tl.load(total_old + column, mask=inside, other=0))
            tl.store(total_out + column, peak, mask=inside)
    if COUNTS:
        base = 1 + ORDER + 2 * EXTREMES
        _merged_sum(zeros_out, zeros_old, tl.sum(tl.load(place + base * field, mask=there, other=0), 0), column, inside, STATE)
        _merged_sum(inf_out, inf_old, tl.sum(tl.load(place + (base + 1) * field, mask=there, other=0), 0), column, inside, STATE)
        _merged_sum(nan_out, nan_old, tl.sum(tl.load(place + (base + 2) * field, mask=there, other=0), 0), column, inside, STATE)
    if TOTAL != "" and TOTAL != "peak":
        words = tl.load(place + (1 + ORDER + 2 * EXTREMES + 3 * COUNTS) * field, mask=there, other=0)
        if TOTAL == "active" or (INTEGER and (TOTAL == "sum" or TOTAL == "exact")):
            _merged_sum(total_out, total_old, tl.sum(words, 0), column, inside, STATE)
        else:
            _merged_sum(total_out, total_old, tl.sum(as_number(words), 0), column, inside, STATE)
