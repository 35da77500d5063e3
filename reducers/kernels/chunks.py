"""Big tensors cut into pieces that stay in the cache while several passes are made over them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["BIG", "CHUNK", "PIECE", "pieces", "pieces_beside"]

BIG = 1 << 13  # elements of an observation from which less than float64 throughout pays off
PIECE = 1 << 19  # elements: 2 MiB in float32
CHUNK = 1 << 16  # elements: 512 KiB in float64, the dtype sums are taken in


def pieces(x: Tensor, axes: tuple[int, ...], size: int | None = None) -> Sequence[Tensor]:
    """Views of `x` of about `size` elements (`CHUNK` where None), cut along its reduced axes, outermost in memory first.

    Only on the CPU, where full-size temporaries cost page faults, and not while compiling, where the fused kernel reads
    each element once anyway.
    """
    cut = _cut(x, axes, size or CHUNK)
    if cut is None:
        return (x,)
    axis, length, enough = cut
    parts = torch.split(x, length, dim=axis)
    return parts if enough else [piece for part in parts for piece in pieces(part, axes, size)]


def pieces_beside(x: Tensor, beside: Tensor, axes: tuple[int, ...], size: int | None = None) -> Sequence[tuple[Tensor, Tensor]]:
    """The `pieces` of `x`, each with the same part of a tensor of its shape."""
    cut = _cut(x, axes, size or CHUNK)
    if cut is None:
        return ((x, beside),)
    axis, length, enough = cut
    parts = list(zip(torch.split(x, length, dim=axis), torch.split(beside, length, dim=axis), strict=True))
    return parts if enough else [piece for part in parts for piece in pieces_beside(*part, axes, size)]


def _cut(x: Tensor, axes: tuple[int, ...], size: int) -> tuple[int, int, bool] | None:
    """Along which axis, into parts of which length, and whether these are small enough; None where there is nothing to cut."""
    if x.device.type != "cpu" or x.numel() < 2 * size or torch.compiler.is_compiling():
        return None
    cuttable = [axis for axis in axes if x.shape[axis] > 1]
    if not cuttable:
        return None
    axis = max(cuttable, key=x.stride)
    wanted = x.numel() // size
    return axis, max(1, x.shape[axis] // wanted), x.shape[axis] >= wanted
