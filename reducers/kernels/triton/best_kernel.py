"""The k largest or smallest elements at each kept position: one launch chooses k in each part of a tensor, and one ranks them all.

Nothing is sorted. A tile whose best element is not among the best so far is left at once, and from any other the best is taken k
times. Elements are ranked by integers in the order of their numbers, and equal ones by code: old slots first, then positions.
"""

from __future__ import annotations

import triton
import triton.language as tl

from reducers.kernels.triton.places import offset_of
from reducers.kernels.triton.words import as_ordered

_PLAIN = [
    *("run_tiles", "all_tiles", "tiles", "parts", "kept_0", "kept_1", "kept_2", "kept_stride_0", "kept_stride_1"),
    *("kept_stride_2", "kept_stride_3", "outer_0", "outer_1", "outer_stride_0", "outer_stride_1", "outer_stride_2"),
    *("k", "kept"),
]


@triton.jit
def _word(raw, INTEGER: tl.constexpr, LARGEST: tl.constexpr):
    """Return what was loaded as an int64 that is higher if the element ranks better; equal numbers have equal words."""
    if INTEGER:
        word = raw.to(tl.int64)
    elif raw.dtype == tl.float64:
        word = as_ordered(tl.where(raw == 0, 0.0, raw).to(tl.float64))
    else:
        number = raw.to(tl.float32)
        word = as_ordered(tl.where(number == 0, 0.0, number)).to(tl.int64)
    if not LARGEST:
        word = ~word
    return word


@triton.jit
def _best(words, codes, best, best_codes, k, AXIS: tl.constexpr):
    """Return the k best of a tile and of [columns, slots] that were best so far: words and codes, best first."""
    WORST: tl.constexpr = -0x7FFFFFFFFFFFFFFF - 1
    LAST: tl.constexpr = 0x7FFFFFFFFFFFFFFF
    slot = tl.arange(0, best.shape[1])[None, :]
    # Whether any element comes before the slot that is last now.
    edge = tl.max(tl.where(slot == k - 1, best, WORST), 1)
    edge_code = tl.min(tl.where(slot == k - 1, best_codes, LAST), 1)
    ahead = words > tl.expand_dims(edge, AXIS)
    ahead = ahead | ((words == tl.expand_dims(edge, AXIS)) & (codes < tl.expand_dims(edge_code, AXIS)))
    if tl.max(tl.max(ahead.to(tl.int32), 1), 0) > 0:
        chosen = tl.full(best.shape, WORST, tl.int64)
        chosen_codes = tl.full(best.shape, LAST, tl.int64)
        for turn in range(k):
            top = tl.maximum(tl.max(words, AXIS), tl.max(best, 1))
            here = tl.min(tl.where(words == tl.expand_dims(top, AXIS), codes, LAST), AXIS)
            before = tl.min(tl.where(best == top[:, None], best_codes, LAST), 1)
            code = tl.minimum(here, before)
            chosen = tl.where(slot == turn, top[:, None], chosen)
            chosen_codes = tl.where(slot == turn, code[:, None], chosen_codes)
            taken = codes == tl.expand_dims(code, AXIS)
            words = tl.where(taken, WORST, words)
            codes = tl.where(taken, LAST, codes)
            taken = best_codes == code[:, None]
            best = tl.where(taken, WORST, best)
            best_codes = tl.where(taken, LAST, best_codes)
        best = chosen
        best_codes = chosen_codes
    return best, best_codes


@triton.jit(do_not_specialize=_PLAIN)
def choose(
    x,
    table,
    nonfinite,
    k,
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
    SLOTS: tl.constexpr,
    INTEGER: tl.constexpr,
    LARGEST: tl.constexpr,
    KEPT_DIMS: tl.constexpr,
    OUTER_DIMS: tl.constexpr,
    AXIS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Write the k best elements of part `program_id(1)` at the kept positions of column `program_id(0)` of tiles.

    `table` is int64 of shape [2, kept, parts, k]: words, then codes, which are offsets in memory and k. `SLOTS` is at least k.
    `nonfinite` is int64 of shape [kept, parts]: how many elements are not finite.
    """
    WORST: tl.constexpr = -0x7FFFFFFFFFFFFFFF - 1
    LAST: tl.constexpr = 0x7FFFFFFFFFFFFFFF
    INDEX: tl.constexpr = tl.int64 if WIDE else tl.int32
    column = tl.program_id(0).to(INDEX) * COLUMNS + tl.arange(0, COLUMNS).to(INDEX)
    inside = column < kept
    kept_offset = offset_of(column, kept_0, kept_1, kept_2, kept_stride_0, kept_stride_1, kept_stride_2, kept_stride_3, KEPT_DIMS)
    row = tl.arange(0, ROWS).to(INDEX)
    lane = tl.expand_dims(row * run_stride, 1 - AXIS) + tl.expand_dims(kept_offset, AXIS)
    wanted = tl.expand_dims(inside, AXIS)
    best = tl.full([COLUMNS, SLOTS], WORST, tl.int64)
    best_codes = tl.full([COLUMNS, SLOTS], LAST, tl.int64)
    others = tl.zeros([COLUMNS], tl.int32)

    begin = tl.program_id(1).to(INDEX) * tiles
    stop = tl.minimum(begin + tiles, all_tiles)
    for tile in range(begin, stop):
        if OUTER_DIMS == 0:
            position = tile * ROWS
            offset = position * run_stride
        else:
            outer = tile // run_tiles
            position = (tile - outer * run_tiles) * ROWS
            offset = position * run_stride
            offset += offset_of(outer, outer_0, outer_1, 1, outer_stride_0, outer_stride_1, outer_stride_2, 0, OUTER_DIMS)
        there = tl.expand_dims(position + row < run, 1 - AXIS) & wanted
        raw = tl.load(x + offset + lane, mask=there, other=0)
        words = _word(raw, INTEGER, LARGEST)
        if not INTEGER:
            finite = tl.abs(raw.to(tl.float64 if raw.dtype == tl.float64 else tl.float32)) < float("inf")
            others += tl.sum(tl.where(finite, 0, 1), AXIS)  # outside of the tensor there are zeros
            there = there & finite
        words = tl.where(there, words, WORST)
        codes = tl.where(there, (offset + lane).to(tl.int64) + k, LAST)
        best, best_codes = _best(words, codes, best, best_codes, k, AXIS)

    slot = tl.arange(0, SLOTS)[None, :]
    place = (column.to(tl.int64)[:, None] * parts + tl.program_id(1)) * k + slot
    stored = inside[:, None] & (slot < k)
    tl.store(table + place, best, mask=stored)
    tl.store(table + kept.to(tl.int64) * parts * k + place, best_codes, mask=stored)
    tl.store(nonfinite + column.to(tl.int64) * parts + tl.program_id(1), others.to(tl.int64), mask=inside)


@triton.jit(do_not_specialize=["k", "kept", "parts", "sample"])
def rank(
    x,
    table,
    nonfinite,
    ids,
    value_out,
    step_out,
    position_out,
    id_out,
    seen_out,
    nonfinite_out,
    value_old,
    step_old,
    position_old,
    id_old,
    seen_old,
    nonfinite_old,
    k,
    kept,
    parts,
    sample,
    WORST_VALUE: tl.constexpr,
    SLOTS: tl.constexpr,
    INTEGER: tl.constexpr,
    LARGEST: tl.constexpr,
    STATE: tl.constexpr,
    IDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the k best of the slots of a state and of what all parts chose at kept position `program_id(0)`.

    Args:
        sample: elements of one sample.
        WORST_VALUE: the value of empty slots.
    """
    WORST: tl.constexpr = -0x7FFFFFFFFFFFFFFF - 1
    LAST: tl.constexpr = 0x7FFFFFFFFFFFFFFF
    here = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, SLOTS)
    there = slot < k
    best = tl.full([1, SLOTS], WORST, tl.int64)
    best_codes = tl.full([1, SLOTS], LAST, tl.int64)
    seen = tl.zeros([], tl.int64)
    others = tl.zeros([BLOCK], tl.int64)
    for begin in range(0, parts, BLOCK):
        part = begin + tl.arange(0, BLOCK)
        others += tl.load(nonfinite + here * parts + part, mask=part < parts, other=0)
    left_out = tl.sum(others, 0)
    if STATE:
        left_out += tl.load(nonfinite_old + here)
        seen += tl.load(seen_old)
        old = there & (tl.load(step_old + here * k + slot, mask=there, other=-1) >= 0)
        before = _word(tl.load(value_old + here * k + slot, mask=old, other=0), INTEGER, LARGEST)
        best = tl.where(old, before, WORST)[None, :]
        best_codes = tl.where(old, slot.to(tl.int64), LAST)[None, :]
    chosen = parts.to(tl.int64) * k
    for begin in range(0, parts * k, BLOCK):
        entry = begin + tl.arange(0, BLOCK)
        words = tl.load(table + here * chosen + entry, mask=entry < chosen, other=WORST)
        codes = tl.load(table + (kept + here) * chosen + entry, mask=entry < chosen, other=LAST)
        best, best_codes = _best(words[None, :], codes[None, :], best, best_codes, k, 1)

    code = tl.reshape(best_codes, [SLOTS])
    new = there & (code >= k) & (code < LAST)
    position = code - k
    value = tl.load(x + position, mask=new, other=WORST_VALUE)
    step = tl.where(new, seen, -1)
    name = tl.full([SLOTS], -1, tl.int64)
    if IDS:
        name = tl.load(ids + position // sample, mask=new, other=-1)
    position = tl.where(new, position, -1)
    if STATE:
        old = code < k
        place = here * k + code
        value = tl.where(old, tl.load(value_old + place, mask=old, other=0), value)
        step = tl.where(old, tl.load(step_old + place, mask=old, other=0), step)
        position = tl.where(old, tl.load(position_old + place, mask=old, other=0), position)
        name = tl.where(old, tl.load(id_old + place, mask=old, other=0), name)
    tl.store(value_out + here * k + slot, value, mask=there)
    tl.store(step_out + here * k + slot, step, mask=there)
    tl.store(position_out + here * k + slot, position, mask=there)
    tl.store(id_out + here * k + slot, name, mask=there)
    tl.store(nonfinite_out + here, left_out)
    if here == 0:
        tl.store(seen_out, seen + 1)
