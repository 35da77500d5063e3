"""Axes of a tensor merged with their neighbours, as far as strides allow: for kernels that go through memory themselves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from torch import Tensor

Axis: TypeAlias = tuple[int, int, int]
"""Length, stride, and stride of another tensor that is read along with it, such as a mask."""


def merged(axes: Iterable[Axis]) -> list[Axis]:
    """Return the axes with neighbours merged if in both tensors one stride reaches all their elements; at least one axis."""
    found: list[Axis] = []
    for size, stride, other in axes:
        if size == 1:
            continue
        if found and found[-1][1] == size * stride and found[-1][2] == size * other:
            found[-1] = (found[-1][0] * size, stride, other)
        else:
            found.append((size, stride, other))
    return found or [(1, 1, 1)]


def fills_memory(x: Tensor) -> bool:
    """Return whether the elements lie in memory without gaps, each once, in any order of the axes."""
    reach = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and stride != reach:
            return False
        reach *= size
    return True
