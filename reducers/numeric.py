"""Exact accumulation: dtypes wide enough to add in, and non-finite values set aside without touching the caller's tensor."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from reducers.errors import DTypeError

__all__ = ["count_of", "finite", "widen"]


def widen(x: Tensor, who: str) -> Tensor:
    """`x` in the dtype its sums are exact in: float64 (float32 where the device has none), complex128, or int64 for integers.

    Raises:
        DTypeError: unsigned 64-bit integers, which no wider dtype holds.
    """
    if x.is_complex():
        return x.to(torch.complex128)
    if x.is_floating_point():
        return x.to(torch.float32 if x.device.type == "mps" else torch.float64)
    if x.dtype is torch.uint64:
        raise DTypeError(f"{who} has no exact sum for torch.uint64; convert it first, for example .premap(torch.Tensor.double)")
    return x.to(torch.int64)


def finite(x: Tensor, fill: float = 0.0) -> tuple[Tensor, Tensor | None]:
    """`x` with its non-finite values replaced by `fill`, and the mask of what was finite (None: everything was).

    On the CPU a finite sum proves that every element is finite, at the price of one read; elsewhere, and while compiling, the
    mask is always made, because to look at it would synchronise the device or break the graph.
    """
    if not (x.is_floating_point() or x.is_complex()):
        return x, None
    if x.device.type == "cpu" and not torch.compiler.is_compiling():
        total = x.sum()
        if torch.isfinite(total).item():
            return x, None
    mask = torch.isfinite(x)
    return torch.where(mask, x, fill), mask


def count_of(x: Tensor, mask: Tensor | None, axes: tuple[int, ...]) -> Tensor:
    """How many elements were finite, int64, in the shape of the kept axes."""
    if mask is not None:
        return mask.sum(dim=axes)
    kept = [size for axis, size in enumerate(x.shape) if axis not in axes]
    return torch.full(kept, math.prod(x.shape[axis] for axis in axes), dtype=torch.int64, device=x.device)
