"""Parts of tensors that are spread over ranks, and where their elements are in the memory of the whole."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

from torch import Tensor


class TensorPart(NamedTuple):
    """Which part of a tensor a rank observes: a block of neighbouring elements.

    `shape` is that of the whole tensor, and `start` the index in it of the first element of the part.

    >>> import torch
    >>> from reducers import Digest
    >>> Digest().of_part(TensorPart((4, 2), (2, 0))).update({}, torch.ones(2, 2))["observations"]
    tensor(1)
    """

    shape: tuple[int, ...]
    start: tuple[int, ...]


class Runs(NamedTuple):
    """Elements of a part that are neighbours in the whole, too: runs of one length, at equal distances.

    Attributes:
        number: of runs.
        length: of each, in elements.
        start: of the first, in elements from the begin of the whole.
        stride: from the start of one to that of the next.
    """

    number: int
    length: int
    start: int = 0
    stride: int = 0


def runs_of(xs: Tensor, part: TensorPart | None) -> Iterator[tuple[Tensor, Runs]]:
    """Yield observations as runs of elements, each piece with where its runs are in the whole: usually there is one piece.

    Args:
        xs: observations of one part, stacked along the first axis, not empty.
        part: of what; None if they are whole.
    """
    shape = tuple(xs.shape[1:])
    if part is None or part.shape == shape:
        yield xs, Runs(1, math.prod(shape))
        return
    cut = [axis for axis, size in enumerate(shape) if size != part.shape[axis]]
    last = cut[-1]
    # All axes before the last that is cut make one sequence of runs, if only the first of those that have a length is cut.
    outer = next((axis for axis in range(last) if part.shape[axis] > 1), last)
    apart = [axis for axis in cut[:-1] if axis != outer]
    loops = range(apart[-1] if apart else 0)
    inner = math.prod(shape[last + 1 :])
    for index in product(*(range(shape[axis]) for axis in loops)):
        piece = xs
        for at in index:
            piece = piece[:, at]
        first = (*(part.start[axis] + at for axis, at in zip(loops, index, strict=True)), *part.start[len(index) :])
        number = math.prod(shape[len(index) : last])
        yield piece, Runs(number, shape[last] * inner, _offset(first, part.shape), part.shape[last] * inner)


def _offset(index: Sequence[int], shape: Sequence[int]) -> int:
    """Return the place of an element in the memory of a contiguous tensor."""
    place = 0
    for at, size in zip(index, shape, strict=True):
        place = place * size + at
    return place
