"""The launches that count bins."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from reducers.kernels.triton.arguments import DTYPES, WARPS, bytes_of, kept_shape, range_of, tile_constants
from reducers.kernels.triton.bins_kernel import count, start
from reducers.kernels.triton.lanes import LanePlan, neighbours_at_once
from reducers.kernels.triton.shared_bins_kernel import WORDS as SHARED_WORDS
from reducers.kernels.triton.shared_bins_kernel import count_shared
from reducers.kernels.triton.sweep import on_device
from reducers.kernels.triton.tiling import TilePlan, cut_axes, merged_axes, plan, power_of_two, tiled

_BLOCK = 1024  # entries of a state that one program prepares
_OWN_BINS = 512  # that a program counts in by itself: more leave too few registers for the elements
_BY_BITS = ("counts", "min", "max", "nonfinite")
_MIN_TILE = 128  # elements; a smaller tile has fewer than threads count together
_FEWEST_LANES = 32  # of fewer, threads of a warp would count what others count
_LANES = 128  # threads of a program that counts in shared memory
_EACH = 16  # elements that each of them reads at once
_KEPT = 4  # kept positions of a lane at most: each has extremes of its own, in registers
_COLUMNS = 32  # kept positions of a program at most, if they are neighbours in memory
_GROUP = 4  # lanes at least along a reduced axis, so that they read whole sectors of 32 bytes
_SHARED = True  # whether bins are counted in shared memory if the device is NVIDIA's


def binned_by_edges(
    x: Tensor, axes: tuple[int, ...], bounds: Tensor, state: Mapping[str, Tensor] | None
) -> dict[str, Tensor] | None:
    """Return how many elements of `x` lie between bounds, added to the counts of a state: two launches, which read `x` once.

    What is allocated is the result. Nothing waits for the device, and the work depends on shapes and strides only, so that a CUDA
    graph may hold it. Equal tensors give equal counts.

    Args:
        bounds: float32 or float64 on the device of `x`, increasing; elements are compared with them in that dtype.
        state: an earlier result, or nothing.

    Returns:
        `counts`: int64, of shape (*kept axes, len(bounds) + 2): below the first bound, from each of them to the next, from the last
        on, and NaN. None if the dtype of `x` is not supported, or too many axes are left after merging.
    """
    found = _binned(x, axes, len(bounds) + 2, bounds, 0, 0, state)
    return None if found is None else {"counts": found[0]}


def binned_by_bits(
    x: Tensor, axes: tuple[int, ...], bits: int, exponents: tuple[int, int], state: Mapping[str, Tensor] | None
) -> dict[str, Tensor] | None:
    """Return how many finite elements of `x` have each sign, exponent and `bits` leading bits of the mantissa, and the extremes.

    Launches and memory are as for `binned_by_edges`, with a table of three numbers for each kept position.

    Args:
        exponents: of the smallest magnitude that does not count as zero, and of the one from which on all share a bin.

    Returns:
        `counts`: int64, of shape (*kept axes, bins), from the largest negative magnitude to the largest positive one; `min` and
        `max` in the dtype of `x`, inf and -inf if no element is finite; `nonfinite` int64, how many are not. None as for
        `binned_by_edges`.
    """
    middle = ((exponents[1] - exponents[0]) << bits) + 1
    found = _binned(x, axes, 2 * middle + 1, None, bits, exponents[0], state)
    return None if found is None else dict(zip(_BY_BITS, found, strict=True))


def _binned(
    x: Tensor,
    axes: tuple[int, ...],
    bins: int,
    bounds: Tensor | None,
    bits: int,
    first: int,
    state: Mapping[str, Tensor] | None,
) -> list[Tensor] | None:
    tiles = _tiles(x, axes, bounds, first) if x.dtype in DTYPES else None
    if tiles is None:
        return None
    keys = ("counts",) if bounds is not None else _BY_BITS
    before = [] if not state else [state[key] for key in keys]
    shape = kept_shape(x, axes)
    with on_device(x):
        results = _start(x, shape, bins, bounds is None, first, before)
        _count(x, tiles, results, bounds, bits, first)
    return [*results[:3], *results[4:]]


def _start(x: Tensor, shape: Sequence[int], bins: int, extremes: bool, first: int, state: Sequence[Tensor]) -> list[Tensor]:
    """Return the counts of a state, or zeros; with `extremes` also minimum and maximum, not yet written, a table for
    them, and the number of what is not finite. One launch.

    Args:
        x: what is to be counted; only its dtype and device matter.
        shape: of the kept axes.
        first: the exponent of the smallest magnitude that does not count as zero.
        state: counts, and with `extremes` minimum, maximum and what is not finite; or nothing.
    """
    kept = math.prod(shape)
    results = [torch.empty((*shape, bins), dtype=torch.int64, device=x.device)]
    if extremes:
        results += [torch.empty(shape, dtype=x.dtype, device=x.device) for _ in range(2)]
        results.append(torch.empty((3, kept), dtype=torch.int64, device=x.device))
        results.append(torch.empty(shape, dtype=torch.int64, device=x.device))
    lowest, highest = _none(x, first)
    start[(-(-kept * bins // _BLOCK), 1, 1)](
        results[0],
        *(results[3:] if extremes else (None, None)),
        state[0] if state else None,
        bytes_of(state[1]) if extremes and state else None,
        bytes_of(state[2]) if extremes and state else None,
        state[3] if extremes and state else None,
        kept * bins,
        kept,
        lowest,
        highest,
        STATE=len(state) > 0,
        EXTREMES=extremes,
        INTEGER=not x.dtype.is_floating_point,
        DOUBLE=_is_double(x, first),
        BLOCK=_BLOCK,
        num_warps=WARPS,
    )
    return results


def _count(x: Tensor, tiles: TilePlan, results: Sequence[Tensor], bounds: Tensor | None, bits: int, first: int) -> None:
    """Add the elements of `x` to the counts that `_start` returned, and write the extremes, if there are any. One launch."""
    bins, edges = results[0].shape[-1], 0 if bounds is None else bounds.shape[0]
    double = _is_double(x, first, bounds)
    if isinstance(tiles, LanePlan):
        kernel, own = count_shared, _shared_constants(tiles, bins, bounds, bits, first, double)
    else:
        kernel, own = count, {"BINS": _own_bins(tiles, bins)}
    constants = {**tile_constants(tiles), **own}
    kernel[tiles.grid](
        bytes_of(x),
        results[0],
        *((*results[3:], *map(bytes_of, results[1:3])) if bounds is None else (None,) * 4),
        bounds,
        bins,
        edges,
        (52 if double else 23) - bits,
        ((1023 if double else 127) + first) << bits,
        bins // 2,
        *tiles.arguments(),
        STEPS=edges.bit_length(),
        EDGES=bounds is not None,
        INTEGER=not x.dtype.is_floating_point,
        DOUBLE=double,
        **constants,
    )


def _tiles(x: Tensor, axes: tuple[int, ...], bounds: Tensor | None, first: int) -> TilePlan | None:
    """Return how `x` is cut: a `LanePlan` if it is counted in shared memory; None if too many axes are left after merging."""
    if _takes_shared(x):
        lanes = _shared_plan(x, axes, _is_double(x, first, bounds))
        if lanes is None or lanes.lanes >= _FEWEST_LANES:
            return lanes
    return plan(x, axes)


def _takes_shared(x: Tensor) -> bool:
    """Return whether the kernel with PTX counts `x`."""
    return _SHARED and x.is_cuda and torch.version.hip is None


def _shared_plan(x: Tensor, axes: tuple[int, ...], double: bool) -> LanePlan | None:
    """Return how the reduction of `x` over `axes` is cut for the kernel that counts in shared memory.

    A program has few kept positions, so that the window of each is big.
    """
    found = merged_axes(x, axes, None)
    if found is None:
        return None
    kept, reduced = found
    positions = math.prod(size for size, _, _ in kept)
    each = _EACH // 2 if double or not x.dtype.is_floating_point else _EACH
    outer, run, inner = cut_axes(reduced, False, 1)
    if kept[-1][1] < run[1]:
        vector = neighbours_at_once(x, kept[-1], [*kept[:-1], *outer, run]) if len(kept) == 1 else 1
        columns = power_of_two(positions, _COLUMNS)
        vector = min(vector, columns, _KEPT)
        rows = power_of_two(run[0], _LANES * vector // columns * (each // vector))
        across = min(_LANES * vector // columns, rows)
        unroll, lanes, axis = rows // across, across * columns // vector, 0
    else:
        vector = min(neighbours_at_once(x, run, [*kept, *outer]), each)
        rows = power_of_two(run[0], _LANES * each)
        vector = min(vector, rows)
        unroll = max(1, min(each // vector, rows // (vector * _GROUP)))
        across = rows // (unroll * vector)
        columns, axis = power_of_two(positions, max(1, _LANES // across)), 1
        lanes = across * columns
    cut = tiled(x, kept, outer, run, inner, rows, 1, columns, axis)
    return LanePlan(**vars(cut), unroll=unroll, lanes=lanes, vector=vector)


def _own_bins(tiles: TilePlan, bins: int) -> int:
    """Return the bins of a program for each kept position, in registers; 0 if it has none."""
    own = power_of_two(bins + 1, 1 << 62)  # the last is for what is left out
    own = max(own, 64 // tiles.columns)
    return 0 if own * tiles.columns > _OWN_BINS or tiles.rows * tiles.columns < _MIN_TILE else own


def _shared_constants(tiles: LanePlan, bins: int, bounds: Tensor | None, bits: int, first: int, double: bool) -> dict[str, Any]:
    """Return the constants of the launch that counts in shared memory."""
    own = SHARED_WORDS // tiles.columns
    capped = packed = whole = False
    if bounds is not None:
        slots = own - 1  # the last is for what is not in the window
        whole = bins <= slots
    else:
        # One count of 16 bits for each sign, if no program sees so many elements of a kept position.
        packed = tiles.columns > 1 and tiles.rows * tiles.tiles < 1 << 16
        exponent = 1023 if double else 127
        middle = bins // 2
        capped = middle - 1 + ((exponent + first) << bits) < (2 * exponent + 1) << bits
        # Zeros, and what is not in the window, have two of them.
        slots = min((own if packed else own // 2) - 2, middle if capped else middle - 1)
    return {
        "CAPPED": capped,
        "PACKED": packed,
        "WHOLE": whole,
        "SLOTS": slots,
        "OWN": own,
        "UNROLL": tiles.unroll,
        "LANES": tiles.lanes,
        "VECTOR": tiles.vector,
        "KEPT_DIMS": len(tiles.kept_sizes) if tiles.kept > 1 else 0,
        "num_warps": max(1, tiles.lanes // 32),
        # So that all programs of a plan run at once. Offsets of several kept axes take more.
        "maxnreg": 128 if len(tiles.kept_sizes) <= 1 else 168,
    }


def _is_double(x: Tensor, first: int, bounds: Tensor | None = None) -> bool:
    """Return whether the bins of `x` are found in float64: float32 lacks small magnitudes, and the digits of wide integers."""
    if bounds is not None:
        return bounds.dtype is torch.float64
    return first < -126 or x.dtype.itemsize > (4 if x.dtype.is_floating_point else 2)


def _none(x: Tensor, first: int) -> tuple[int, int]:
    """Return the extremes of no elements as ordered integers."""
    if not x.dtype.is_floating_point:
        lowest, highest = range_of(x.dtype)
        return highest, lowest
    words, numbers = ("q", "d") if _is_double(x, first) else ("i", "f")
    (infinite,) = struct.unpack(words, struct.pack(numbers, float("inf")))
    return infinite, -infinite - 1
