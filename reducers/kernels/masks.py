"""What a mask can_compact, without what it hides: less to go over, and no NaN in the place of what is hidden."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from reducers.kernels.chunks import BIG, PIECE, pieces_beside

__all__ = ["can_compact", "compact"]


def can_compact(x: Tensor, mask: Tensor, axes: tuple[int, ...]) -> bool:
    """Whether what `mask` shows of `x` is worth to be taken out, and can be.

    Not on other devices than the CPU, which would be waited for; not of integers, whose states are other ones under a mask; nor
    where the mask varies along kept axes, or along axes behind kept ones.
    """
    if x.device.type != "cpu" or x.numel() < BIG or not x.is_floating_point() or torch.compiler.is_compiling():
        return False
    count = _leading(mask)
    return count > 0 and set(range(count)) <= set(axes)


def compact(x: Tensor, mask: Tensor, axes: tuple[int, ...]) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
    """Piece by piece what `mask` can_compact, along one axis in place of those in which it varies; and the axes to reduce."""
    count = _leading(mask)
    rest = tuple(axis - count + 1 for axis in axes if axis >= count)
    for part, beside in pieces_beside(x, mask, axes, PIECE):
        where = beside
        while where.ndim > count:
            where = where[..., 0]
        yield part[where], (0, *rest)


def _leading(mask: Tensor) -> int:
    """The number of axes up to the last one that the mask varies along."""
    return 1 + max((axis for axis in range(mask.ndim) if mask.stride(axis) != 0 and mask.shape[axis] > 1), default=-1)
