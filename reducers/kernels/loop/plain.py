"""What the loop computes, by PyTorch's calls: a graph may run where there is no compiler, or no memory for the loop's parts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from reducers.kernels.precision import float32_threshold

__all__ = ["plain_table"]


def plain_table(x: Tensor, axes: tuple[int, ...], names: tuple[str, ...], threshold: float, mask: Tensor | None) -> Tensor:
    """Return the columns of these names along a first axis, in float64; the arguments are those of `looped`."""
    if 0 in x.shape:  # one element that is not selected has the same statistics, and a lowest and a highest number
        x = x.new_zeros([1 if axis in axes else size for axis, size in enumerate(x.shape)])
        mask = torch.zeros_like(x, dtype=torch.bool)
    wide = x.double()
    there = torch.ones_like(x, dtype=torch.bool) if mask is None else mask
    good = there & wide.isfinite()
    filled, count = torch.where(good, wide, 0.0), good.sum(axes, keepdim=True)
    mean = filled.sum(axes, keepdim=True) / count.clamp(min=1)
    columns: dict[str, Callable[[], Tensor]] = {
        "count": lambda: count.squeeze(axes),
        "nan": lambda: (there & wide.isnan()).sum(axes),
        "inf": lambda: (there & wide.isinf()).sum(axes),
        "nonfinite": lambda: (there & ~good).sum(axes),
        "zeros": lambda: (good & (wide == 0)).sum(axes),
        "mean": lambda: mean.squeeze(axes),
        "m2": lambda: torch.where(good, wide - mean, 0.0).square().sum(axes),
        "m3": lambda: torch.where(good, wide - mean, 0.0).pow(3).sum(axes),
        "m4": lambda: torch.where(good, wide - mean, 0.0).pow(4).sum(axes),
        "sum": lambda: filled.sum(axes),
        "exact": lambda: filled.sum(axes),
        "squares": lambda: filled.square().sum(axes),
        "min": lambda: torch.where(good, wide, torch.inf).amin(axes),
        "max": lambda: torch.where(good, wide, -torch.inf).amax(axes),
        "peak": lambda: filled.abs().amax(axes),
        "magnitudes": lambda: filled.abs().sum(axes),
        "active": lambda: (filled.abs() > float32_threshold(threshold, x.dtype)).sum(axes),
    }
    return torch.stack([columns[name]().double() for name in names])
