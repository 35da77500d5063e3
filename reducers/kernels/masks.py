"""Extracts the elements that a mask selects, so that fewer elements are reduced and none must be replaced by NaN."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from reducers.kernels.chunks import BIG, PIECE, paired_pieces
from reducers.kernels.precision import can_read_values


def as_bool(mask: Tensor) -> Tensor:
    """Return the mask as bool: non-zero is True."""
    return mask if mask.dtype is torch.bool else mask != 0  # comparing bools takes ten times the sum of as many floats


def can_compact(x: Tensor, mask: Tensor, axes: tuple[int, ...]) -> bool:
    """Return whether `compact` supports these arguments, and `x` is big enough to gain from it.

    False on accelerators, which it would synchronise; for integers, whose masked states have another dtype; and if the mask
    varies along a kept axis, or along an axis after a kept one.
    """
    if x.numel() < BIG or not x.is_floating_point() or not (can_read_values(x) and can_read_values(mask)):
        return False
    count = _varying_ndim(mask)
    return count > 0 and set(range(count)) <= set(axes)


def compact(x: Tensor, mask: Tensor, axes: tuple[int, ...]) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
    """Yield the selected elements piece by piece, each with the axes to reduce.

    One leading axis replaces all axes along which the mask varies.
    """
    count = _varying_ndim(mask)
    rest = tuple(axis - count + 1 for axis in axes if axis >= count)
    for part, part_mask in paired_pieces(x, mask, axes, PIECE):
        while part_mask.ndim > count:
            part_mask = part_mask[..., 0]
        yield part[part_mask], (0, *rest)


def _varying_ndim(mask: Tensor) -> int:
    """Return the number of leading axes up to the last one along which the mask varies."""
    return 1 + max((axis for axis in range(mask.ndim) if mask.stride(axis) != 0 and mask.shape[axis] > 1), default=-1)
