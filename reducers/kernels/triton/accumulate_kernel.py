"""The second launch in place: the statistics of all parts joined to accumulators, which are found by a handle."""

from __future__ import annotations

import triton
import triton.language as tl

from reducers.kernels.triton.join_kernel import join


@triton.jit(do_not_specialize=["slot", "kept", "parts"], do_not_specialize_on_alignment=["handle", "partials"])
def join_in_place(
    handle,
    partials,
    kept,
    parts,
    ORDER: tl.constexpr,
    EXTREMES: tl.constexpr,
    COUNTS: tl.constexpr,
    TOTAL: tl.constexpr,
    INTEGER: tl.constexpr,
    WITH_MEAN: tl.constexpr,
    WITH_MIN: tl.constexpr,
    WITH_MAX: tl.constexpr,
    LOWEST: tl.constexpr,
    HIGHEST: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    slot=0,
):
    """Join the statistics of all parts to the accumulators of a slot, and count the observation.

    Nothing is written if the handle says so, or if there are no accumulators of this size: that is counted.
    """
    due = tl.load(handle).to(tl.int32)
    if due == 0:
        return
    address = tl.load(handle + 2 + slot)
    lead = tl.program_id(0) == 0
    if address == 0:
        _add_one(tl.load(handle + 1), lead)
        return
    words = address.to(tl.pointer_type(tl.int64))
    if tl.load(words + 1) != kept:
        _add_one(tl.load(handle + 1), lead)
        return
    _add_one(address, lead)
    field = kept.to(tl.int64)
    table = words + 2
    numbers = table.to(tl.pointer_type(tl.float64), bitcast=True)
    base: tl.constexpr = 1 + ORDER + 2 * EXTREMES
    lows = table + (1 + ORDER) * field
    highs = table + (2 + ORDER) * field
    if not INTEGER:
        lows = lows.to(tl.pointer_type(tl.float64), bitcast=True)
        highs = highs.to(tl.pointer_type(tl.float64), bitcast=True)
    total = table + (base + 3 * COUNTS) * field
    if not (TOTAL == "active" or (INTEGER and (TOTAL == "sum" or TOTAL == "exact"))):
        total = total.to(tl.pointer_type(tl.float64), bitcast=True)
    others = table + (base + 3 * COUNTS + (TOTAL != "")) * field
    zeros = table + base * field
    infinite = table + (base + 1) * field
    missing = table + (base + 2) * field
    mean = numbers + field
    second = numbers + 2 * field
    third = numbers + 3 * field
    fourth = numbers + 4 * field
    join(
        partials,
        None,
        table,
        others,
        mean,
        second,
        third,
        fourth,
        lows,
        highs,
        zeros,
        missing,
        infinite,
        total,
        table,
        others,
        mean,
        second,
        third,
        fourth,
        lows,
        highs,
        zeros,
        missing,
        infinite,
        total,
        kept,
        parts,
        ORDER=ORDER,
        EXTREMES=EXTREMES,
        COUNTS=COUNTS,
        TOTAL=TOTAL,
        INTEGER=INTEGER,
        WITH_COUNT=True,
        WITH_NONFINITE=True,
        WITH_MEAN=WITH_MEAN,
        WITH_MIN=WITH_MIN,
        WITH_MAX=WITH_MAX,
        LOWEST=LOWEST,
        HIGHEST=HIGHEST,
        STATE=True,
        MANY=False,
        READY=False,
        PARTS=PARTS,
        COLUMNS=COLUMNS,
        first=0,
        last=due,  # which is 1 here, but unknown to the compiler: without a loop it spills registers
    )


@triton.jit
def _add_one(address, lead):
    """Count one more at an address, in one of the programs."""
    place = address.to(tl.pointer_type(tl.int64))
    if lead:
        tl.store(place, tl.load(place) + 1)
