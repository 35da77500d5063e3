"""Bin counts per unit, where a unit is one position of the kept axes. Shared by all reducers that count into bins."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from reducers.kernels.chunks import CHUNK, pieces
from reducers.kernels.precision import can_read_values


def kept_shape(x: Tensor, axes: tuple[int, ...]) -> list[int]:
    """Return the sizes of the axes that are not reduced."""
    return [size for axis, size in enumerate(x.shape) if axis not in axes]


def unit_index(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Return the index of the unit that each element belongs to: int64, in a shape that broadcasts against `x`."""
    shape = [1 if axis in axes else size for axis, size in enumerate(x.shape)]
    return torch.arange(unit_count(x, axes), device=x.device).reshape(shape)


def unit_count(x: Tensor, axes: tuple[int, ...]) -> int:
    """Return the number of positions of the kept axes."""
    units = 1
    for size in kept_shape(x, axes):  # math.prod cannot be traced with dynamic sizes
        units *= size
    return units


def bin_counts(x: Tensor, axes: tuple[int, ...], bins: int, index: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the counts per unit and bin: int64, of shape (*kept axes, bins).

    Args:
        index: maps a piece of `x` to the bin of each element, an integer from 0 to `bins - 1`.
    """
    kept = kept_shape(x, axes)
    size = unit_count(x, axes) * bins
    units = unit_index(x, axes) * bins if kept else None
    if can_read_values(x) and size <= CHUNK:  # bincount would synchronise a GPU, and it passes over all bins once per piece
        counts = None
        for piece in pieces(x, axes):
            part = torch.bincount(_flat_bins(index(piece), units), minlength=size)
            counts = part if counts is None else counts.add_(part)
        assert counts is not None
        return counts.reshape(*kept, bins)
    counts = x.new_zeros(size, dtype=torch.int64)
    one = torch.ones((), dtype=torch.int64, device=x.device)
    for piece in pieces(x, axes):
        flat = _flat_bins(index(piece), units).long()
        counts.scatter_add_(0, flat, one.expand(flat.shape))
    return counts.reshape(*kept, bins)


def _flat_bins(index: Tensor, units: Tensor | None) -> Tensor:
    return (index if units is None else index + units).reshape(-1)
