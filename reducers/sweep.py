"""One sweep over a big observation: all passes over a piece while it is in the cache, in float32 about a centre."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from reducers.chunks import pieces
from reducers.numeric import count_along, extremes

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
    centre = parts[0].float().mean(dim=axes, keepdim=True)
    for again in (False, True):
        *sums, rest = _sums(parts, axes, centre, ends)
        first, second, middle = (_scalar(value) for value in (*sums, centre.squeeze(axes).double()))
        shift = first / count
        m2 = second - first * shift
        if _any(m2 - m2 != 0):  # not finite
            return None
        near = m2 < count * ((middle * _NEAR) ** 2 + _TINY)
        lost = near & ((first != 0) | (second != 0))  # where both are 0, all are equal to the centre
        far = not again and _any(m2 < second * _LEFT)
        if not far and not _any(lost):
            mean = torch.as_tensor(middle + shift, dtype=torch.float64)
            return {"mean": mean, "m2": torch.as_tensor(m2, dtype=torch.float64), **rest}
        centre = _better(centre, lost, shift, parts[0], axes)
    return None


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
    if not found.isfinite().all():
        return None
    vanished = found < _TINY * count_along(x, axes)
    if vanished.any():
        low, high = extremes(x, axes)
        if (vanished & ((low != 0) | (high != 0))).any():
            return None
    return found


def _scalar(value: Tensor) -> Any:
    """A number where one will do: it is computed with in a tenth of the time."""
    return value.item() if value.ndim == 0 else value


def _any(condition: Any) -> bool:
    return condition if isinstance(condition, bool) else bool(condition.any())


def _better(centre: Tensor, lost: Any, shift: Any, part: Tensor, axes: tuple[int, ...]) -> Tensor:
    """The mean; where all may be equal, one of them, from which the distances of the others are 0."""
    one = part[tuple(slice(0, 1) if axis in axes else slice(None) for axis in range(part.ndim))].float()
    lost, shift = (torch.as_tensor(value).reshape(centre.shape) for value in (lost, shift))
    return torch.where(lost, one, centre + shift.float())


def _sums(parts: Sequence[Tensor], axes: tuple[int, ...], centre: Tensor, ends: bool) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Sums of the distances from the centre and of their squares, in float64; with `ends` minimum, maximum and zeros."""
    found: list[Tensor] = []
    low = high = None
    for part in parts:
        piece = part.float()
        distance = piece - centre
        sums = [distance.sum(dim=axes), distance.mul_(distance).sum(dim=axes)]
        if ends:
            least, greatest = extremes(piece, axes)
            low = least if low is None else torch.minimum(low, least)
            high = greatest if high is None else torch.maximum(high, greatest)
            sums.append(torch.eq(piece, 0, out=distance).sum(dim=axes))  # of floats, for those are added several times as fast
        found = (
            [total.add_(value) for total, value in zip(found, sums, strict=True)] if found else [value.double() for value in sums]
        )
    if low is None or high is None:
        return found[0], found[1], {}
    dtype = parts[0].dtype
    return found[0], found[1], {"min": low.to(dtype), "max": high.to(dtype), "zeros": found[2].to(torch.int64)}
