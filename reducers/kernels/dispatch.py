"""Which kernel reduces a tensor: by device in eager mode, and inside compiled graphs. A new one is a file, and a line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from reducers.errors import warn_user
from reducers.kernels.cpu import sweep
from reducers.kernels.inductor import fused_moments
from reducers.kernels.masked import masked_sweep
from reducers.state import State

__all__ = [
    "device_best",
    "device_bits",
    "device_edges",
    "device_sweep",
    "eager_moments",
    "has_device_bins",
    "masked_moments",
    "traced_moments",
]

Kernel: TypeAlias = "Callable[..., State | None]"  # of a tensor, axes, and `with_extremes`

EAGER: dict[str, Kernel] = {"cpu": sweep}  # by type of device
TRACED: Kernel = fused_moments


def eager_moments(x: Tensor, axes: tuple[int, ...], with_extremes: bool = False) -> State | None:
    """The moments of `x` over `axes`, and its extremes, by a kernel that may look at numbers; None if no kernel takes `x`."""
    kernel = EAGER.get(x.device.type)
    return None if kernel is None else kernel(x, axes, with_extremes=with_extremes)


def traced_moments(x: Tensor, axes: tuple[int, ...], with_extremes: bool = False) -> State | None:
    """The same inside a graph that is being compiled; None outside of one, or if the kernel does not take `x`."""
    return TRACED(x, axes, with_extremes=with_extremes) if torch.compiler.is_compiling() else None


def masked_moments(x: Tensor, mask: Tensor, axes: tuple[int, ...], columns: Mapping[str, str]) -> State | None:
    """Return the statistics of the elements of `x` that a mask selects, by a kernel for big tensors; None if it does not take them.

    Args:
        columns: the keys of the state, and which statistic each is, as for `device_sweep`.
    """
    if not columns or not _MASKED.issuperset(columns.values()):
        return None
    found = masked_sweep(x, mask, axes)
    return None if found is None else {key: found[column] for key, column in columns.items()}


_MASKED = frozenset(("count", "mean", "m2", "sum", "squares", "peak", "min", "max", "zeros", "nan", "inf"))


@lru_cache(maxsize=1)
def _triton_sweep() -> Kernel | None:
    """The sweep by Triton, which comes with PyTorch for GPUs; None if it is missing."""
    try:
        from reducers.kernels.triton.launch import swept
    except ImportError:
        return None
    return swept


SWEEPS: dict[str, Callable[[], Kernel | None]] = {"cuda": _triton_sweep}  # by type of device
_failed: list[Exception] = []


def device_sweep(
    x: Tensor, axes: tuple[int, ...], columns: Mapping[str, str], threshold: float = 0.0, state: State | None = None
) -> State | None:
    """Return the statistics of `x` over `axes`, joined with those of a state, by a kernel that reads `x` once.

    Args:
        columns: the keys of the state, and which statistic each is: one of `reducers.kernels.triton.launch.COLUMNS`.
        threshold: the magnitude above which an element is active.
        state: what was observed before, with the same keys.

    Returns:
        None if no kernel takes `x`, the device has none, or the state does not fit. If a kernel cannot be compiled, such as without
        a C compiler, there is one warning, and None from then on.
    """
    if not columns:
        return None
    kernel = _found(SWEEPS, x)
    if kernel is None or not _fits(x, axes, columns, state):
        return None
    return _launched(kernel, x, axes, columns, threshold, state)


@lru_cache(maxsize=1)
def _triton_bins() -> tuple[Kernel, Kernel] | None:
    """The counts of bins by Triton: by edges, and by the bits of numbers."""
    try:
        from reducers.kernels.triton.binned import binned_by_bits, binned_by_edges
    except ImportError:
        return None
    return binned_by_edges, binned_by_bits


BINS: dict[str, Callable[[], tuple[Kernel, Kernel] | None]] = {"cuda": _triton_bins}  # by type of device


def has_device_bins(x: Tensor) -> bool:
    """Return whether a kernel counts the bins of tensors on the device of `x`."""
    return _found(BINS, x) is not None


def device_edges(x: Tensor, axes: tuple[int, ...], bounds: Tensor, state: State | None = None) -> State | None:
    """Return the `counts` of the elements of `x` between bounds, added to those of a state, by a kernel that reads `x` once.

    Args:
        bounds: float32 or float64, on the device of `x`.
        state: what was observed before, or nothing.

    Returns:
        what `reducers.kernels.triton.binned.binned_by_edges` returns; None in the same cases as `device_sweep`.
    """
    kernels = _found(BINS, x)
    if kernels is None or not _counts_fit(x, axes, len(bounds) + 2, state):
        return None
    return _launched(kernels[0], x, axes, bounds, state)


def device_bits(
    x: Tensor, axes: tuple[int, ...], bits: int, exponents: tuple[int, int], state: State | None = None
) -> State | None:
    """Return the `counts` of the elements of `x` by their leading bits, and `min` and `max`, joined with those of a state.

    Returns:
        what `reducers.kernels.triton.binned.binned_by_bits` returns; None in the same cases as `device_sweep`.
    """
    kernels = _found(BINS, x)
    bins = (2 * (exponents[1] - exponents[0]) << bits) + 3
    if kernels is None or not _counts_fit(x, axes, bins, state, "min", "max"):
        return None
    return _launched(kernels[1], x, axes, bits, exponents, state)


@lru_cache(maxsize=1)
def _triton_best() -> Kernel | None:
    """The choice of the best elements by Triton."""
    try:
        from reducers.kernels.triton.chosen import best_elements
    except ImportError:
        return None
    return best_elements


BEST: dict[str, Callable[[], Kernel | None]] = {"cuda": _triton_best}  # by type of device


def device_best(
    x: Tensor, arranged: Callable[[Tensor], tuple[Tensor, tuple[int, ...]]], k: int, largest: bool, ids: Tensor | None, state: State
) -> State | None:
    """Return the slots of the k best elements of `x` and of a state, by a kernel that reads `x` once, and sorts nothing.

    Args:
        arranged: returns a view of a tensor, and which of its axes are reduced.
        ids: int64, one for each sample.
        state: what was observed before, or nothing.

    Returns:
        what `reducers.kernels.triton.chosen.best_elements` returns; None in the same cases as `device_sweep`.
    """
    kernel = _found(BEST, x)
    if kernel is None:
        return None
    x, ids = x.contiguous(), None if ids is None else ids.contiguous()
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
    return _launched(kernel, x, view, axes, k, largest, ids, state)


Found = TypeVar("Found")


def _found(kernels: Mapping[str, Callable[[], Found | None]], x: Tensor) -> Found | None:
    """Return the kernels for the device of `x`; None if there are none, one has failed, or a graph is being compiled."""
    find = kernels.get(x.device.type)
    return None if find is None or _failed or torch.compiler.is_compiling() else find()


def _launched(kernel: Kernel, *args: Any) -> State | None:
    """Return what a kernel returns; if it raises, warn, and return None from then on."""
    try:
        return kernel(*args)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        _failed.append(error)
        reason = str(error).strip().splitlines()[:1]
        warn_user(
            f"statistics on the GPU are computed without Triton, which takes longer: {type(error).__name__}: {''.join(reason)}",
            RuntimeWarning,
        )
        return None


def _counts_fit(x: Tensor, axes: tuple[int, ...], bins: int, state: State | None, *extremes: str) -> bool:
    """Return whether the state has so many bins at the kept positions of `x`, and extremes of its dtype."""
    if not state:
        return True
    if state.keys() != {"counts", *extremes}:
        return False
    kept = [size for axis, size in enumerate(x.shape) if axis not in axes]
    counts = state["counts"]
    return (
        [*kept, bins] == list(counts.shape)
        and counts.dtype is torch.int64
        and all(list(state[key].shape) == kept and state[key].dtype is x.dtype for key in extremes)
        and all(value.is_contiguous() for value in state.values())
    )


def _fits(x: Tensor, axes: tuple[int, ...], columns: Mapping[str, str], state: State | None) -> bool:
    """Return whether the state is one of this reducer, for observations of this shape and dtype."""
    if not state:
        return True
    if len(state) != len(columns) or not all(key in state for key in columns):
        return False
    kept = [size for axis, size in enumerate(x.shape) if axis not in axes]
    integer = not x.dtype.is_floating_point
    for key, column in columns.items():
        value = state[key]
        own = column in ("min", "max")
        counted = column in ("count", "zeros", "nan", "inf", "active") or (integer and column in ("sum", "exact"))
        wanted = x.dtype if own else torch.int64 if counted else torch.float64
        if list(value.shape) != kept or value.dtype is not wanted or not value.is_contiguous():
            return False
    return True
