"""One sweep over a big observation: all passes over a piece while it is in the cache, in float32 about a centre."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from reducers.chunks import pieces
from reducers.numeric import count_along, extremes, real

__all__ = ["BIG", "sum_squares", "sweep"]

BIG = 1 << 13  # elements from which a sweep is faster than float64 throughout
PIECE = 1 << 19  # elements: 2 MiB in float32

_SWEEPABLE = (torch.float32, torch.bfloat16, torch.float16)
_NEAR = 8 * torch.finfo(torch.float32).eps
_TINY = 1e-24  # mean squares below it have parts that float32 cannot hold
_LEFT = 1 / 64  # how much of a sum of squares must be left when its centre is moved to the mean


def sweep(x: Tensor, axes: tuple[int, ...], *, ends: bool = False) -> dict[str, Tensor] | None:
    """Mean and sum of squared distances from it; with `ends` also minimum, maximum and how many are zero.

    Sums are taken piece by piece, each pairwise and in float32, about a centre that all pieces share, so that they add up in
    float64 without merging. The centre is the mean of the first piece; where it turns out to be far from the mean of all, a second
    sweep is about that one. Relative errors of the sum of squares are below 1e-6 whatever the mean is, those of the mean below 1e-6
    of the standard deviation.

    Returns:
        `mean` and `m2` float64, `min` and `max` in the dtype of `x`, `zeros` int64, in the shape of the kept axes; None where it
        takes float64 throughout: where elements are not finite, or so small or so nearly equal that float32 would lose them.
    """
    if x.numel() < BIG or x.dtype not in _SWEEPABLE or x.device.type != "cpu" or torch.compiler.is_compiling():
        return None
    parts = pieces(x, axes, PIECE)
    count = count_along(x, axes)
    centre = _centre(parts[0].float(), axes)
    for again in (False, True):
        first, second, rest = _sums(parts, axes, centre, ends)
        shift = first / count
        m2 = second - first * shift
        if not m2.sum().isfinite():
            return None
        lost = m2 < count * (real(centre.squeeze(axes)) * _NEAR).square().clamp(min=_TINY)
        if (lost & ((first != 0) | (second != 0))).any():  # where both are 0, all are equal to the centre
            return None
        if again or not (m2 < second * _LEFT).any():
            break
        centre = centre + shift.reshape(centre.shape).float()
    return {"mean": real(centre.squeeze(axes)) + shift, "m2": m2, **rest}


def sum_squares(x: Tensor, axes: tuple[int, ...]) -> Tensor | None:
    """Sum of the squares in float64, to a relative error below 1e-6; None where float32 would lose them, as in `sweep`."""
    if x.numel() < BIG or x.dtype not in _SWEEPABLE or x.device.type != "cpu" or torch.compiler.is_compiling():
        return None
    found: Tensor | None = None
    for part in pieces(x, axes, PIECE):
        piece = part.float()
        squares = (piece * piece).sum(dim=axes).double()
        found = squares if found is None else found.add_(squares)
    assert found is not None
    safe = found.isfinite() & (found >= _TINY * count_along(x, axes))
    return found if safe.all() else None


def _centre(piece: Tensor, axes: tuple[int, ...]) -> Tensor:
    mean = piece.mean(dim=axes, keepdim=True)
    one = piece[tuple(slice(0, 1) if axis in axes else slice(None) for axis in range(piece.ndim))]
    return torch.where((mean - one).abs() <= one.abs() * _NEAR, one, mean)  # where all are equal, their distances are 0


def _sums(parts: Sequence[Tensor], axes: tuple[int, ...], centre: Tensor, ends: bool) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Sums of the distances from the centre and of their squares, in float64; with `ends` minimum, maximum and zeros."""
    first = torch.zeros(centre.squeeze(axes).shape, dtype=torch.float64)
    second, zeros = torch.zeros_like(first), torch.zeros_like(first)
    low = high = None
    for part in parts:
        piece = part.float()
        distance = piece - centre
        first += distance.sum(dim=axes)
        second += distance.mul_(distance).sum(dim=axes)
        if ends:
            least, greatest = extremes(piece, axes)
            low = least if low is None else torch.minimum(low, least)
            high = greatest if high is None else torch.maximum(high, greatest)
            zeros += torch.eq(piece, 0, out=distance).sum(dim=axes)  # of floats, for those are added several times as fast
    if low is None or high is None:
        return first, second, {}
    dtype = parts[0].dtype
    return first, second, {"min": low.to(dtype), "max": high.to(dtype), "zeros": zeros.to(torch.int64)}
