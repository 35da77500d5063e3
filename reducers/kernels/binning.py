"""How often each bin occurs, per unit (position of the kept axes): the shared work of everything that counts into bins."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from reducers.kernels.chunks import CHUNK, pieces

__all__ = ["count_of_units", "kept_shape", "of_units", "tally"]


def kept_shape(x: Tensor, axes: tuple[int, ...]) -> list[int]:
    """Sizes of the axes that are not reduced."""
    return [size for axis, size in enumerate(x.shape) if axis not in axes]


def of_units(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    """The number of the unit each element belongs to, int64, of a shape that broadcasts against `x`."""
    shape = [1 if axis in axes else size for axis, size in enumerate(x.shape)]
    return torch.arange(count_of_units(x, axes), device=x.device).reshape(shape)


def count_of_units(x: Tensor, axes: tuple[int, ...]) -> int:
    """How many positions the kept axes have."""
    units = 1
    for size in kept_shape(x, axes):  # math.prod does not trace sizes that vary
        units *= size
    return units


def tally(x: Tensor, axes: tuple[int, ...], bins: int, index: Callable[[Tensor], Tensor]) -> Tensor:
    """Counts per unit and bin, int64, of shape (*kept axes, bins).

    Args:
        index: the bin of each element of a piece of `x`, an integer from 0 to `bins - 1`.
    """
    kept = kept_shape(x, axes)
    size = count_of_units(x, axes) * bins
    units = of_units(x, axes) * bins if kept else None
    eager = x.device.type == "cpu" and not torch.compiler.is_compiling()
    if eager and size <= CHUNK:  # elsewhere bincount waits for the device; and every piece costs a pass over all bins
        counts = None
        for piece in pieces(x, axes):
            part = torch.bincount(_numbered(index(piece), units), minlength=size)
            counts = part if counts is None else counts.add_(part)
        assert counts is not None
        return counts.reshape(*kept, bins)
    counts = torch.zeros(size, dtype=torch.int64, device=x.device)
    one = torch.ones((), dtype=torch.int64, device=x.device)
    for piece in pieces(x, axes):
        numbered = _numbered(index(piece), units).long()
        counts.scatter_add_(0, numbered, one.expand(numbered.shape))
    return counts.reshape(*kept, bins)


def _numbered(index: Tensor, units: Tensor | None) -> Tensor:
    return (index if units is None else index + units).reshape(-1)
