"""The last launch: the partial statistics of all parts joined, in float64, and with them those of a state."""

from __future__ import annotations

import triton
import triton.language as tl

from reducers.kernels.triton.parts_kernel import extremes_of_parts, joined_slot, moments_of_parts, total_of_parts


@triton.jit
def _before(old, column, inside, KIND: tl.constexpr, THERE: tl.constexpr):
    """Return the numbers of a state; zeros if there is none."""
    return tl.load(old + column, mask=inside, other=0).to(KIND) if THERE else tl.zeros(column.shape, KIND)


@triton.jit
def _narrowed(value, out, INTEGER: tl.constexpr):
    """Return a number that came from the dtype of `out` in that dtype again."""
    if not INTEGER and out.dtype.element_ty != tl.float64:
        value = value.to(tl.float32)  # there is no conversion from float64 to bfloat16
    return value.to(out.dtype.element_ty)


OUTPUTS = ("count", "nonfinite", "mean", "m2", "m3", "m4", "min", "max", "zeros", "nan", "inf", "total")
"""What the kernel writes, in the order of its arguments; and what it reads of a state."""

_PLACES = ["partials", "cuts", *(f"{name}_{which}" for which in ("out", "old") for name in OUTPUTS)]


# Where tensors begin makes no other kernel.
@triton.jit(do_not_specialize=["parts", "first", "last"], do_not_specialize_on_alignment=_PLACES)
def join(
    partials,
    cuts,
    count_out,
    nonfinite_out,
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
    nonfinite_old,
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
    WITH_NONFINITE: tl.constexpr,
    WITH_MEAN: tl.constexpr,
    WITH_MIN: tl.constexpr,
    WITH_MAX: tl.constexpr,
    LOWEST: tl.constexpr,
    HIGHEST: tl.constexpr,
    STATE: tl.constexpr,
    MANY: tl.constexpr,
    READY: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    first=0,
    last=1,
):
    """Write the statistics of all parts, joined with those of a state, for the columns of block `program_id(0)`.

    The parts are those of the observations in the slots of a table from `first` to `last`, which are joined one after another. So
    the bits are those of one launch for each of them. Without a state there is one slot.

    Of many tensors, each a column, the parts of one are neighbours: `cuts` has, behind what `sweep` reads, the first part of each
    column, then how many there are. A column without parts keeps its state.

    If slots are `READY`, their parts are joined already: `partials` is what `join_each` has written.
    """
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < kept
    part = tl.arange(0, PARTS)
    if MANY:
        field = parts.to(tl.int64)
        cuts += 3 * field
        there = (part[:, None] < tl.load(cuts + kept + column, mask=inside, other=0)[None, :]) & inside[None, :]
        start = partials + tl.load(cuts + column, mask=inside, other=0)[None, :] + part[:, None]
    elif READY:
        there = inside
        start = partials + column
        field = parts.to(tl.int64) * kept
    else:
        there = (part < parts)[:, None] & inside[None, :]
        start = partials + part[:, None].to(tl.int64) * kept + column[None, :]
        field = parts.to(tl.int64) * kept
    COUNTED: tl.constexpr = TOTAL == "active" or (INTEGER and (TOTAL == "sum" or TOTAL == "exact"))
    ADDED: tl.constexpr = TOTAL != "" and TOTAL != "peak"
    FIELDS: tl.constexpr = 1 + ORDER + 2 * EXTREMES + 3 * COUNTS + ADDED
    WORDS: tl.constexpr = FIELDS + READY
    KIND: tl.constexpr = tl.int64 if INTEGER else tl.float64
    count = _before(count_old, column, inside, tl.int64, STATE and WITH_COUNT)
    # With four powers of many parts it waits until registers are free, or some would be spilled.
    EARLY: tl.constexpr = WITH_NONFINITE and (ORDER < 4 or READY)
    others = _before(nonfinite_old, column, inside, tl.int64, STATE and EARLY)
    mean = _before(mean_old, column, inside, tl.float64, STATE and WITH_MEAN)
    m2 = _before(m2_old, column, inside, tl.float64, STATE and WITH_MEAN and ORDER > 1)
    m3 = _before(m3_old, column, inside, tl.float64, STATE and WITH_MEAN and ORDER > 2)
    m4 = _before(m4_old, column, inside, tl.float64, STATE and WITH_MEAN and ORDER > 3)
    low = _before(min_old, column, inside, KIND, STATE and WITH_MIN)
    high = _before(max_old, column, inside, KIND, STATE and WITH_MAX)
    zeros = _before(zeros_old, column, inside, tl.int64, STATE and COUNTS)
    infinite = _before(inf_old, column, inside, tl.int64, STATE and COUNTS)
    missing = _before(nan_old, column, inside, tl.int64, STATE and COUNTS)
    total = _before(total_old, column, inside, tl.int64 if COUNTED else tl.float64, STATE and TOTAL != "")

    if READY:
        # The next slot is on its way while one is joined.
        ahead = joined_slot(
            start + first * (WORDS * field),
            field,
            there & (first < last),
            ORDER,
            EXTREMES,
            COUNTS,
            ADDED,
            COUNTED,
            INTEGER,
            WITH_MEAN,
            EARLY,
        )
    for slot in range(first, last):
        place = start + slot * (WORDS * field)
        if READY:
            (
                number,
                new_others,
                new_mean,
                new_m2,
                new_m3,
                new_m4,
                new_low,
                new_high,
                new_zeros,
                new_infinite,
                new_missing,
                new_total,
            ) = ahead
            ahead = joined_slot(
                place + WORDS * field,
                field,
                there & (slot + 1 < last),
                ORDER,
                EXTREMES,
                COUNTS,
                ADDED,
                COUNTED,
                INTEGER,
                WITH_MEAN,
                EARLY,
            )
        else:
            counts = tl.load(place, mask=there, other=0)
            if EARLY:
                new_others = tl.sum(counts >> 32, 0)
            counts = counts.to(tl.int32)  # without the upper half
            number = tl.sum(counts.to(tl.int64), 0)
            if WITH_MEAN:
                new_mean, new_m2, new_m3, new_m4 = moments_of_parts(place, field, there, counts, number, ORDER)
        if EARLY:
            others += new_others
        if WITH_MEAN:
            weight = number.to(tl.float64)
            if STATE:
                # Chan, Golub and LeVeque 1983, eqs. 1.5a and 1.5b; Pebay 2008 for the third and fourth power.
                before = count.to(tl.float64)
                both = before + weight
                share = weight / tl.maximum(both, 1.0)
                other = before / tl.maximum(both, 1.0)
                # Not from the mean of nothing, which is 0: the square of a huge distance, times no weight, would be NaN.
                delta = tl.where((before > 0) & (weight > 0), new_mean - mean, 0.0)
                if ORDER > 2:
                    product = both * share * other
                if ORDER > 3:
                    spread = 6 * (other * other * new_m2 + share * share * m2) + delta * delta * product * (1 - 3 * share * other)
                    m4 = m4 + new_m4 + delta * (4 * (other * new_m3 - share * m3) + delta * spread)
                if ORDER > 2:
                    lean = 3 * (other * new_m2 - share * m2) + delta * delta * product * (other - share)
                    m3 = m3 + new_m3 + delta * lean
                if ORDER > 1:
                    m2 = m2 + new_m2 + delta * delta * (share * before)
                mean = tl.where(before > 0, mean, new_mean) + delta * share
            else:
                mean = new_mean
                if ORDER > 1:
                    m2 = new_m2
                if ORDER > 2:
                    m3 = new_m3
                if ORDER > 3:
                    m4 = new_m4
        count += number
        if EXTREMES:
            if not READY:
                new_low, new_high = extremes_of_parts(place + (1 + ORDER) * field, field, there, INTEGER, LOWEST, HIGHEST)
            low = tl.minimum(low, new_low) if STATE else new_low
            high = tl.maximum(high, new_high) if STATE else new_high
            if TOTAL == "peak":
                peak = tl.where(number > 0, tl.maximum(-(new_low.to(tl.float64)), new_high.to(tl.float64)), 0.0)
                total = tl.maximum(total, peak)
        if COUNTS:
            if not READY:
                base = 1 + ORDER + 2 * EXTREMES
                new_zeros = total_of_parts(place + base * field, there, True)
                new_infinite = total_of_parts(place + (base + 1) * field, there, True)
                new_missing = total_of_parts(place + (base + 2) * field, there, True)
            zeros += new_zeros
            infinite += new_infinite
            missing += new_missing
        if ADDED:
            total += new_total if READY else total_of_parts(place + (FIELDS - 1) * field, there, COUNTED)

    if STATE:
        tl.debug_barrier()  # the state may be written in place, and no thread may do so before all have read
    if WITH_COUNT:
        tl.store(count_out + column, count, mask=inside)
    if EARLY:
        tl.store(nonfinite_out + column, others, mask=inside)
    if WITH_MEAN:
        tl.store(mean_out + column, mean, mask=inside)
        if ORDER > 1:
            tl.store(m2_out + column, m2, mask=inside)
        if ORDER > 2:
            tl.store(m3_out + column, m3, mask=inside)
        if ORDER > 3:
            tl.store(m4_out + column, m4, mask=inside)
    if WITH_MIN:
        tl.store(min_out + column, _narrowed(low, min_out, INTEGER), mask=inside)
    if WITH_MAX:
        tl.store(max_out + column, _narrowed(high, max_out, INTEGER), mask=inside)
    if COUNTS:
        tl.store(zeros_out + column, zeros, mask=inside)
        tl.store(inf_out + column, infinite, mask=inside)
        tl.store(nan_out + column, missing, mask=inside)
    if TOTAL != "":
        tl.store(total_out + column, total, mask=inside)
    if WITH_NONFINITE and not EARLY:
        others = _before(nonfinite_old, column, inside, tl.int64, STATE)
        for slot in range(first, last):
            others += tl.sum(tl.load(start + slot * (FIELDS * field), mask=there, other=0) >> 32, 0)
        if STATE:
            tl.debug_barrier()
        tl.store(nonfinite_out + column, others, mask=inside)
