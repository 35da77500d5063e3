"""Weighted sums and moments of a big CPU tensor: piece by piece in the cache, as in `cpu.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from reducers.kernels.chunks import PIECE, paired_pieces
from reducers.kernels.cpu import MIN_REMAINDER, accumulate, is_inexact, is_sweepable, pairwise_sum, reuse_buffer, strided_runs
from reducers.kernels.precision import NARROW, can_read_values, count_along

__all__ = ["weighted_sum", "weighted_sweep"]

_MIN_MEAN_WEIGHT = 1e-12  # below it, float32 weights times squares underflow


def weighted_sum(x: Tensor, weights: Tensor, axes: tuple[int, ...]) -> dict[str, Tensor] | None:
    """Return `weight`, the sum of the weights, `sum`, that of weights times elements, and `nonfinite`; see `weighted_sweep`."""

    def sums(piece: Tensor, weight: Tensor, buffer: Tensor) -> Iterable[Tensor]:
        return [weight, torch.mul(piece, weight, out=buffer)]

    found = _summed(x, weights, axes, sums) if _is_supported(x, weights) else None
    return None if found is None else {**dict(zip(("weight", "sum"), found, strict=True)), "nonfinite": _none(found[0])}


def weighted_sweep(x: Tensor, weights: Tensor, axes: tuple[int, ...]) -> dict[str, Tensor] | None:
    """Return the sums of the weights and of their squares, the weighted mean, and the weighted sum of squared deviations.

    The deviations are taken from the mean of the first piece; if that is far from the weighted mean, a second sweep uses it.
    The relative error of the sum of squares is below 1e-6 for any mean; the error of the mean is below 1e-6 standard deviations.

    Args:
        weights: float32 or narrower, or bool; in the shape of `x`.

    Returns:
        `weight`, `squares`, `mean` and `m2` float64, and `nonfinite` int64, all zeros, in the shape of the kept axes; None if
        float64 is needed throughout, because elements or weights are not finite, or too small, or elements too nearly equal; or if
        `x` is small.
    """
    if not _is_supported(x, weights):
        return None
    kept = [1 if axis in axes else size for axis, size in enumerate(x.shape)]
    middle = paired_pieces(x, weights, axes, PIECE)[0][0].float().mean(dim=axes)
    for second_sweep in (False, True):
        centre = middle.reshape(kept)

        def sums(piece: Tensor, weight: Tensor, buffer: Tensor, centre: Tensor = centre) -> Iterator[Tensor]:
            yield weight
            yield torch.mul(weight, weight, out=buffer)
            distance = torch.sub(piece, centre, out=buffer)
            weighted = distance * weight
            yield weighted
            yield distance.mul_(weighted)

        found = _summed(x, weights, axes, sums)
        if found is None:
            return None
        weight, squares, first, second = found
        if bool((weight < count_along(x, axes) * _MIN_MEAN_WEIGHT).any()):
            return None
        shift = first / weight
        m2 = second - first * shift
        if second_sweep or not bool((m2 < second * MIN_REMAINDER).any()):
            break
        middle = middle + shift.float()
    if bool(is_inexact(m2, first, second, middle.double(), weight).any()):
        return None
    return {"nonfinite": _none(weight), "weight": weight, "squares": squares, "mean": middle.double() + shift, "m2": m2}


def _none(like: Tensor) -> Tensor:
    return torch.zeros_like(like, dtype=torch.int64)  # a sum that is finite proves that all its elements are


def _is_supported(x: Tensor, weights: Tensor) -> bool:
    return is_sweepable(x) and can_read_values(weights) and weights.dtype in (*NARROW, torch.bool)


def _summed(
    x: Tensor, weights: Tensor, axes: tuple[int, ...], tensors: Callable[[Tensor, Tensor, Tensor], Iterable[Tensor]]
) -> list[Tensor] | None:
    """Return the float64 sums of the tensors that a function makes of each piece, its weights and a buffer; None if not finite.

    A tensor may be in the buffer, as it is summed before the next one is made.
    """
    runs, buffer = strided_runs(x, axes), None
    totals: list[Tensor] = []
    for part, part_weights in paired_pieces(x, weights, axes, PIECE):
        piece, weight = part.float(), (part_weights.view(torch.uint8) if weights.dtype is torch.bool else part_weights).float()
        buffer = reuse_buffer(buffer, piece, torch.float32)
        sums = [pairwise_sum(tensor, axes, runs) for tensor in tensors(piece, weight, buffer)]
        totals = list(map(accumulate, totals, sums)) if totals else [value.double() for value in sums]
    return totals if all(bool(total.isfinite().all()) for total in totals) else None
