"""Bin counts per unit, where a unit is one position of the kept axes. Shared by all reducers that count into bins."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from reducers.kernels.chunks import CHUNK, pieces
from reducers.kernels.precision import can_read_values
from reducers.kernels.rows import flat

__all__ = ["bin_counts", "kept_shape", "pattern_counts", "unit_count", "unit_index"]

_PATTERN_PIECE = 1 << 21  # elements, for each of which there is an int32: 8 MiB


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


def pattern_counts(x: Tensor, axes: tuple[int, ...], bits: int) -> tuple[Tensor, Tensor]:
    """Return how many elements of a float32 tensor, or a narrower one, begin with each sign, exponent and `bits` of the mantissa.

    All axes are reduced. A piece takes two element-wise calls and `bincount`, so few calls are split over threads.

    Returns:
        for each of these beginnings of finite numbers, the float32 nearest to zero that has it, and the count, int64.
    """
    whole, shift, half = flat(x, axes), 23 - bits, 256 << bits
    parts = pieces(x, axes, _PATTERN_PIECE) if whole is None else torch.split(whole, _PATTERN_PIECE)
    buffer = torch.empty(max(part.numel() for part in parts), dtype=torch.int32, device="cpu")
    counts = torch.zeros(2 * half, dtype=torch.int64, device="cpu")
    for part in parts:
        begin = buffer[: part.numel()].view(part.shape)
        torch.bitwise_right_shift(part.float().view(torch.int32), shift, out=begin).add_(half)
        counts += torch.bincount(begin.view(-1), minlength=2 * half)
    floats = (torch.arange(-half, half, dtype=torch.int32, device="cpu") << shift).view(torch.float32)
    finite = floats.isfinite()
    return floats[finite], counts[finite]
