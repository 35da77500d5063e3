"""Sums over everything of a big dense CPU tensor: along rows in float32, across them in float64.

PyTorch splits a call on more than 32,768 elements over its threads, and waits for the slowest of them. On a busy machine each such wait
may take as long as all the rest. So each function here makes few such calls, whatever the size, and needs no temporary of that size.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["flat", "row_moments", "row_squares", "row_sum"]

_SUM_ROW = 1024  # elements, which `sum` adds pairwise
_SQUARES_ROW = 128  # elements per `vector_norm`, which adds 16 of them one by one in each of 8 lanes
_MOST_ROWS = (1 << 15) - 1  # so few numbers are not split over threads
_CENTRED_SIZE = 1 << 20  # elements of a piece from which the centre is subtracted: few calls, and still partly in the cache
_NEAR = 2 / 3  # share of the squares about a centre that the variance must be: so the errors of the sums grow by half at most
_MIN_MEAN_SQUARE = 1e-24  # below it, float32 squares underflow
_MIN_RELATIVE_STD = 8 * torch.finfo(torch.float32).eps


def flat(x: Tensor, axes: tuple[int, ...]) -> Tensor | None:
    """Return the elements of `x` in the order of memory, as a view; None if not all axes are reduced, or if there are gaps."""
    if len(axes) < x.ndim:
        return None
    ordered = x if x.is_contiguous() else x.permute(sorted(range(x.ndim), key=x.stride, reverse=True))
    return ordered.view(-1) if ordered.is_contiguous() else None


def row_sum(x: Tensor) -> Tensor:
    """Return the sum of a vector in float64; the sums of its rows are in the dtype of `x`, at least float32."""
    return _over_rows(x, _SUM_ROW, lambda rows: rows.sum(dim=1))


def row_squares(x: Tensor) -> Tensor:
    """Return the sum of squares of a vector in float64; its rows are summed in float32, with a relative error below 1e-6."""
    return _over_rows(x, _SQUARES_ROW, lambda rows: torch.linalg.vector_norm(rows, dim=1), torch.square)


def _over_rows(
    x: Tensor, length: int, reduce: Callable[[Tensor], Tensor], power: Callable[[Tensor], Tensor] = Tensor.double
) -> Tensor:
    """Return the sum of what `reduce` makes of each row and `power` of that in float64; what is left over is a row, too."""
    whole = x.numel() // length * length
    parts = [x[:whole].view(-1, length)] if whole <= length * _MOST_ROWS else x[:whole].view(-1, length).split(_MOST_ROWS)
    if whole < x.numel():
        parts = [*parts, x[whole:].view(1, -1)]
    total: Tensor | None = None
    for part in parts:
        value = power(reduce(part).double()).sum()
        total = value if total is None else total.add_(value)
    return x.new_zeros((), dtype=torch.float64) if total is None else total


def row_moments(x: Tensor) -> tuple[float, float] | None:
    """Return the mean of a vector in float32, or narrower, and its sum of squared deviations from the mean.

    The sums are about 0 if the first elements are near it, measured in standard deviations, and about their mean if not. If that
    turns out to be far from the mean, there is a second sweep about the mean.

    Returns:
        None if elements are not finite, or too small, or too nearly equal, for float32.
    """
    head, count = x[:_MOST_ROWS].float(), x.numel()
    centre, squares = head.mean().item(), torch.linalg.vector_norm(head).item() ** 2
    if centre * centre <= (1 - _NEAR) * squares / head.numel():
        centre = 0.0
    for _ in range(2):
        first, second = _sums_about(x, centre)
        shift = first / count
        mean, m2 = centre + shift, second - first * shift
        if not math.isfinite(m2):
            return None
        if m2 >= max(_NEAR * second, count * _MIN_MEAN_SQUARE):
            return (mean, m2) if m2 >= count * (_MIN_RELATIVE_STD * centre) ** 2 else None
        centre = torch.tensor(mean, dtype=torch.float32).item()
    return None


def _sums_about(x: Tensor, centre: float) -> tuple[float, float]:
    """Return the sums of the deviations from a centre, which is a float32, and of their squares. Of float32 about 0 no copy is made."""
    if centre == 0 and x.dtype is torch.float32:
        return row_sum(x).item(), row_squares(x).item()
    buffer = torch.empty(min(_CENTRED_SIZE, x.numel()))
    first = second = 0.0
    for piece in x.split(_CENTRED_SIZE):
        distance = buffer[: piece.numel()]
        if x.dtype is torch.float32:
            torch.sub(piece, centre, out=distance)
        else:  # a difference of narrow numbers would be narrow
            distance.copy_(piece).sub_(centre)
        first, second = first + row_sum(distance).item(), second + row_squares(distance).item()
    return first, second
