"""Which kernel of a device counts bins, or chooses the best elements."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from reducers.kernels.columns import column_dtypes
from reducers.kernels.cpp.binned import looped_bits, looped_edges
from reducers.kernels.cpp.library import ELEMENTS
from reducers.kernels.failing import Kernels, found, in_triton, tried
from reducers.kernels.precision import can_read_values
from reducers.state import State

BINS = Kernels({"cuda": in_triton("bins")}, "counts elements in bins")
BEST = Kernels({"cuda": in_triton("best")}, "chooses the best elements")


def has_device_bins(x: Tensor) -> bool:
    """Return whether a kernel may count the bins of tensors like `x`."""
    return found(BINS, x) is not None or _is_for_loop(x)


def device_edges(
    x: Tensor, axes: tuple[int, ...], bounds: Tensor, even: tuple[float, float] | None = None, state: State | None = None
) -> State | None:
    """Return the `counts` of the elements of `x` between bounds, added to those of a state, by a kernel that reads `x` once.

    Args:
        bounds: float32 or float64, on the device of `x`.
        even: the first bound, and bounds a unit, if a bin that these give is off by one at most; else None.
        state: what was observed before, or nothing.

    Returns:
        what `reducers.kernels.triton.bins.binned_by_edges` returns; None in the same cases as `sweep` of `dispatch.py`.
    """
    room = found(BINS, x)
    if not (room or _is_for_loop(x)) or not _counts_fit(x, axes, len(bounds) + 2, state):
        return None
    if room is None:
        return looped_edges(x, axes, bounds, even, state or {})
    return tried(BINS, x.device, room.binned_by_edges, x.resolve_neg(), axes, bounds, state)


def device_bits(
    x: Tensor, axes: tuple[int, ...], bits: int, exponents: tuple[int, int], state: State | None = None
) -> State | None:
    """Return the `counts` of the elements of `x` by their leading bits, `min`, `max` and `nonfinite`, joined with those of a state.

    Returns:
        what `reducers.kernels.triton.bins.binned_by_bits` returns; None in the same cases as `sweep` of `dispatch.py`.
    """
    room = found(BINS, x)
    bins = (2 * (exponents[1] - exponents[0]) << bits) + 3
    if not (room or _is_for_loop(x)) or not _counts_fit(x, axes, bins, state, "min", "max", "nonfinite"):
        return None
    if room is None:
        return looped_bits(x, axes, bits, exponents, state or {})
    return tried(BINS, x.device, room.binned_by_bits, x.resolve_neg(), axes, bits, exponents, state)


def _is_for_loop(x: Tensor) -> bool:
    """Return whether the loop in C++ may count the bins of `x`, outside of graphs."""
    return x.dtype in ELEMENTS and can_read_values(x)


def device_best(
    x: Tensor, arranged: Callable[[Tensor], tuple[Tensor, tuple[int, ...]]], k: int, largest: bool, ids: Tensor | None, state: State
) -> State | None:
    """Return the slots of the k best elements of `x` and of a state, by a kernel that reads `x` once, and sorts nothing.

    Args:
        arranged: returns a view of a tensor, and which of its axes are reduced.
        ids: int64, one for each sample.
        state: what was observed before, or nothing.

    Returns:
        what `reducers.kernels.triton.best.best_elements` returns; None in the same cases as `sweep` of `dispatch.py`.
    """
    room = found(BEST, x)
    if room is None:
        return None
    x, ids = x.resolve_neg().contiguous(), None if ids is None else ids.contiguous()
    view, axes = arranged(x)
    kept = [size for axis, size in enumerate(view.shape) if axis not in axes]
    dtype = torch.uint8 if x.dtype is torch.bool else x.dtype
    if state and not (
        "payload" not in state
        and state["value"].dtype is dtype
        and list(state["value"].shape) == [*kept, k]
        and all(value.is_contiguous() for value in state.values())
    ):
        return None
    return tried(BEST, x.device, room.best_elements, x, view, axes, k, largest, ids, state)


def _counts_fit(x: Tensor, axes: tuple[int, ...], bins: int, state: State | None, *others: str) -> bool:
    """Return whether the state has so many bins at the kept positions of `x`, and extremes of its dtype."""
    if not state:
        return True
    if state.keys() != {"counts", *others}:
        return False
    kept = [size for axis, size in enumerate(x.shape) if axis not in axes]
    counts = state["counts"]
    return (
        [*kept, bins] == list(counts.shape)
        and counts.dtype is torch.int64
        and all(list(state[key].shape) == kept for key in others)
        and all(state[key].dtype is dtype for key, dtype in zip(others, column_dtypes(others, x.dtype), strict=True))
        and all(value.is_contiguous() for value in state.values())
    )
