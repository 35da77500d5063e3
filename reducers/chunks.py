"""Big tensors cut into pieces that stay in the cache while several passes are made over them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["CHUNK", "pieces"]

CHUNK = 1 << 16  # elements: 512 KiB in float64, the dtype sums are taken in


def pieces(x: Tensor, axes: tuple[int, ...]) -> Sequence[Tensor]:
    """Views of `x` of about `CHUNK` elements, cut along its reduced axes, outermost in memory first.

    Only on the CPU, where full-size temporaries cost page faults, and not while compiling, where the fused kernel reads
    each element once anyway.
    """
    if x.device.type != "cpu" or x.numel() < 2 * CHUNK or torch.compiler.is_compiling():
        return (x,)
    cuttable = [axis for axis in axes if x.shape[axis] > 1]
    if not cuttable:
        return (x,)
    axis = max(cuttable, key=x.stride)
    wanted = x.numel() // CHUNK
    cuts = torch.split(x, max(1, x.shape[axis] // wanted), dim=axis)
    return cuts if x.shape[axis] >= wanted else [piece for cut in cuts for piece in pieces(cut, axes)]
