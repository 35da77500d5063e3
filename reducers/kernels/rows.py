"""Sums over everything of a big dense CPU tensor: along rows in float32, across them in float64.

PyTorch splits a call on 32,768 elements or more over its threads, and waits for the slowest of them. On a busy machine each such
wait may take as long as all the rest. So each function here makes few such calls, and needs no temporary of the size of the tensor.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["flat", "row_moments", "row_squares", "row_sum"]

_SUM_ROW = 1024  # elements, or a multiple of them, which `sum` adds pairwise
_SQUARES_ROW = 256  # elements per `vector_norm`, which adds 32 of them one by one in each of 8 lanes
_EXACT_ROW = 128  # the same if the mean is yet to be taken away, which lets errors grow by half
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
    """Return the sum of a vector in float64; the sums of its rows are in the dtype of `x`."""
    length = _SUM_ROW * (1 + x.numel() // (_SUM_ROW * _MOST_ROWS))
    rows, rest = _rows(x, length)
    total = rows.sum(dim=1).sum(dtype=torch.float64)
    return total if rest is None else total + rest.sum(dtype=torch.float64)


def row_squares(x: Tensor, length: int = _SQUARES_ROW) -> Tensor:
    """Return the sum of squares of a vector in float64, with a relative error below 1e-6; a float32 row has `length` elements."""
    rows, rest = _rows(x, length)
    total = torch.zeros((), dtype=torch.float64, device="cpu") if rest is None else rest.double().square().sum()
    for part in torch.split(rows, _MOST_ROWS):
        total += torch.linalg.vector_norm(part, dim=1).double().square_().sum()
    return total


def _rows(x: Tensor, length: int) -> tuple[Tensor, Tensor | None]:
    """Return a vector as rows, and what is left over."""
    left = x.numel() % length
    return (x[:-left].view(-1, length), x[-left:]) if left else (x.view(-1, length), None)


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
        centre = torch.tensor(mean, dtype=torch.float32, device="cpu").item()
    return None


def _sums_about(x: Tensor, centre: float) -> tuple[float, float]:
    """Return the sums of the deviations from a centre, which is a float32, and of their squares. About 0 float32 is not copied."""
    if centre == 0 and x.dtype is torch.float32:
        return row_sum(x).item(), row_squares(x, _EXACT_ROW).item()
    buffer = torch.empty(min(_CENTRED_SIZE, x.numel()), dtype=torch.float32, device="cpu")
    first = second = 0.0
    for piece in torch.split(x, _CENTRED_SIZE):
        distance = buffer[: piece.numel()]
        if x.dtype is torch.float32:
            torch.sub(piece, centre, out=distance)
        else:  # a difference of narrow numbers would be narrow
            distance.copy_(piece).sub_(centre)
        first, second = first + row_sum(distance).item(), second + row_squares(distance, _EXACT_ROW).item()
    return first, second
