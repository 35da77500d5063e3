"""Splits big tensors into pieces that stay in the CPU cache over several passes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

BIG = 1 << 13  # elements; from this size on, a copy or a loop in C++ pays off if it saves passes
PIECE = 1 << 19  # elements: 2 MiB in float32
_LEAST = 64  # elements of a piece at each kept position: fewer take longer to join than to add
CHUNK = 1 << 16  # elements: 512 KiB in float64, the accumulation dtype


def pieces(x: Tensor, axes: tuple[int, ...], size: int = CHUNK) -> Sequence[Tensor]:
    """Return views of `x` of about `size` elements, split along the reduced axes, largest stride first.

    Only CPU tensors are split, because full-size temporaries cost page faults there. Nothing is split while compiling: the
    fused kernel reads each element only once anyway.
    """
    if torch.compiler.is_compiling() or x.numel() < 2 * size or x.device.type != "cpu":
        return (x,)
    axis, length, done = _split(x, axes, size)
    parts = torch.split(x, length, dim=axis)
    return parts if done else [piece for part in parts for piece in pieces(part, axes, size)]


def paired_pieces(x: Tensor, other: Tensor, axes: tuple[int, ...], size: int = CHUNK) -> Sequence[tuple[Tensor, Tensor]]:
    """Return the `pieces` of `x`, each paired with the same part of `other`, which has the shape of `x`."""
    if torch.compiler.is_compiling() or x.numel() < 2 * size or x.device.type != "cpu":
        return ((x, other),)
    axis, length, done = _split(x, axes, size)
    parts = list(zip(torch.split(x, length, dim=axis), torch.split(other, length, dim=axis), strict=True))
    return parts if done else [piece for part in parts for piece in paired_pieces(*part, axes, size)]


def _split(x: Tensor, axes: tuple[int, ...], size: int) -> tuple[int, int, bool]:
    """Return the axis to split, the length of the parts, and whether they are small enough, or cannot be split."""
    candidates = [axis for axis in axes if x.shape[axis] > 1]
    if not candidates:
        return 0, x.shape[0], True
    axis = max(candidates, key=x.stride)
    kept = x.numel() // math.prod(x.shape[axis] for axis in axes)
    wanted = max(1, x.numel() // max(size, _LEAST * kept))
    return axis, max(1, x.shape[axis] // wanted), x.shape[axis] >= wanted
