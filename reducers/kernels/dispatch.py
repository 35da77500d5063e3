"""Which kernel reduces a tensor: by device in eager mode, and inside compiled graphs. A new one is a file, and a line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

from reducers.errors import warn_user
from reducers.kernels.cpu import sweep
from reducers.kernels.inductor import fused_moments
from reducers.kernels.masked import masked_sweep
from reducers.state import State

__all__ = ["device_accumulation", "device_sweep", "eager_moments", "masked_moments", "traced_moments"]

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


def device_accumulation(device: str) -> Any:
    """Return the room of what accumulates statistics in place on this type of device, inside CUDA graphs; None if there is none."""
    find = SWEEPS.get(device)
    if find is None or _failed or find() is None:
        return None
    from reducers.kernels.triton import accumulating

    return accumulating


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
    find = SWEEPS.get(x.device.type)
    if find is None or not columns or _failed or torch.compiler.is_compiling():
        return None
    kernel = find()
    if kernel is None or not _fits(x, axes, columns, state):
        return None
    try:
        return kernel(x, axes, columns, threshold, state)
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
