"""One sweep over a big observation: all passes over a piece while it is in the cache, in float32 about a centre."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from reducers.kernels.chunks import BIG, CHUNK, PIECE, pieces
from reducers.kernels.precision import NARROW, count_along, extremes

__all__ = ["all_finite", "count_beyond", "ends", "sum_squares", "sums", "sweep"]

_SUMMED = 1 << 22  # elements that lie side by side and are added in float32, where nothing has to be copied for it
_FOLDED = 1 << 18  # elements that later ones are folded onto: with them they stay in the cache
_ADDED = 16  # how many numbers are added one after another in float32
_ROW = 256  # elements of which `vector_norm` adds one in eight after another

_ORDERED = (*NARROW, torch.float64, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool)
_ENDS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "min": (torch.minimum, torch.amin),
    "max": (torch.maximum, torch.amax),
}
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
    if not _sweepable(x):
        return None
    parts, runs = pieces(x, axes, PIECE), _runs(x, axes)
    count = count_along(x, axes)
    centre = parts[0].float().mean(dim=axes, keepdim=True)
    for again in (False, True):
        *sums, rest = _sums(parts, axes, runs, centre, ends)
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


def sums(x: Tensor, axes: tuple[int, ...], *, exact: bool = False, magnitudes: bool = False) -> Tensor | None:
    """Sum in float64 of big pieces, or of their magnitudes; None where it is not finite, and where `x` has no such sum.

    Pieces of narrower floats are added in float32 unless `exact`, pairwise: errors are below 1e-6 of the sum of the magnitudes.
    """
    if not _big(x, BIG) or x.dtype not in (*NARROW, torch.float64):
        return None
    dtype = torch.float64 if exact or x.dtype is torch.float64 else torch.float32
    copied = magnitudes or dtype is not x.dtype
    runs = _runs(x, axes)
    found = room = None
    for part in pieces(x, axes, PIECE if copied or len(axes) < x.ndim or not x.is_contiguous() else _SUMMED):
        if copied:
            room = _room(room, part, dtype)
            part = _magnitudes(part, room) if magnitudes else room.copy_(part)
        found = _plus(found, _added(part, axes, runs))
    return found.contiguous() if found is not None and found.isfinite().all() else None


def all_finite(x: Tensor) -> bool:
    """Whether a big observation on the CPU holds nothing but finite numbers; False where this is not known at one read."""
    return _sweepable(x) and sums(x, tuple(range(x.ndim))) is not None


def sum_squares(x: Tensor, axes: tuple[int, ...]) -> Tensor | None:
    """Sum of the squares in float64, to a relative error below 1e-6; None where float32 would lose them, as in `sweep`."""
    if not _sweepable(x):
        return None
    found: Tensor | None = None
    if len(axes) == x.ndim and x.dtype is torch.float32 and x.is_contiguous() and x.numel() >= 2 * CHUNK:
        whole = x.numel() // _ROW * _ROW
        for part in pieces(x.view(-1)[:whole].view(-1, _ROW), (0, 1), _SUMMED):
            found = _plus(found, torch.linalg.vector_norm(part, dim=1).double().square().sum())
        found = _plus(found, x.view(-1)[whole:].double().square().sum())
    else:
        runs = _runs(x, axes)
        for first, *others in _alike(pieces(x, axes, _FOLDED), _ADDED):
            squares = first.float().square()
            for part in others:
                wide = part.float()
                squares.addcmul_(wide, wide)
            found = _plus(found, _added(squares, axes, runs))
        assert found is not None
    if not found.isfinite().all():
        return None
    vanished = found < _TINY * count_along(x, axes)
    if vanished.any():
        low, high = extremes(x, axes)
        if (vanished & ((low != 0) | (high != 0))).any():
            return None
    return found.contiguous()


def ends(x: Tensor, axes: tuple[int, ...], *names: str) -> dict[str, Tensor] | None:
    """Of `min` and `max` those that are named, without a temporary as big as `x`; None where an end is not finite."""
    if not _big(x, 2 * CHUNK) or x.dtype not in _ORDERED:
        return None
    if len(axes) < x.ndim:
        found = {name: _end(x, axes, *_ENDS[name]) for name in names}
    elif len(names) == 2:
        found = dict(zip(("min", "max"), torch.aminmax(x), strict=True))
    else:
        found = {name: _ENDS[name][1](x) for name in names}
    return found if all(value.isfinite().all() for value in found.values()) else None


def count_beyond(x: Tensor, axes: tuple[int, ...], eps: float) -> Tensor | None:
    """How many elements have a magnitude above `eps`, int64; None where not all are finite."""
    if not all_finite(x):
        return None
    if x.dtype is not torch.float32:  # compared as exactly as in float64: with the next number below that float32 has
        nearest = torch.tensor(eps, dtype=torch.float32)
        eps = (nearest if nearest.item() <= eps else torch.nextafter(nearest, torch.zeros(()))).item()
    found = room = None
    for part in pieces(x, axes, _FOLDED):  # of less than 2**24 elements, up to which float32 counts
        room = _magnitudes(part, _room(room, part, torch.float32))
        found = _plus(found, torch.gt(room, eps, out=room).sum(dim=axes))
    return None if found is None else found.to(torch.int64).contiguous()


def _big(x: Tensor, size: int) -> bool:
    # a graph that is being compiled must not ask for sizes, which may vary
    return not torch.compiler.is_compiling() and x.numel() >= size and x.device.type == "cpu"


def _sweepable(x: Tensor) -> bool:
    return _big(x, BIG) and x.dtype in NARROW


def _plus(found: Tensor | None, value: Tensor) -> Tensor:
    return value.double() if found is None else found.add_(value)


def _runs(x: Tensor, axes: tuple[int, ...]) -> list[list[int]]:
    """The reduced axes, those together that are one walk through memory at equal steps, the innermost last."""
    runs: list[list[int]] = []
    if len(axes) == x.ndim and x.is_contiguous():
        return [list(axes)]
    before = -1
    for axis in sorted((axis for axis in range(x.ndim) if x.shape[axis] > 1), key=x.stride, reverse=True):
        if axis in axes:
            if before in axes and x.stride(before) == x.shape[axis] * x.stride(axis):
                runs[-1].append(axis)
            else:
                runs.append([axis])
        before = axis
    return runs


def _added(x: Tensor, axes: tuple[int, ...], runs: list[list[int]]) -> Tensor:
    """The sum over `axes`, pairwise along each run; the kernel alone would add the sums of runs one after another."""
    if len(runs) < 2:
        return x.sum(dim=axes)
    for run in reversed(runs):
        x = x.sum(dim=run, keepdim=True)
    return x.squeeze(axes)


def _room(room: Tensor | None, part: Tensor, dtype: torch.dtype) -> Tensor:
    """Where to put what is made of one part: in the same memory again, for new memory costs page faults."""
    return room if room is not None and room.shape == part.shape else torch.empty_like(part, dtype=dtype)


def _magnitudes(part: Tensor, room: Tensor) -> Tensor:
    return torch.abs(part, out=room) if part.dtype is room.dtype else room.copy_(part).abs_()


def _alike(parts: Sequence[Tensor], most: int) -> Iterator[list[Tensor]]:
    """Parts that follow one another and have one shape, up to `most` of them together."""
    for _, group in groupby(parts, key=lambda part: part.shape):
        alike = list(group)
        yield from (alike[start : start + most] for start in range(0, len(alike), most))


def _end(x: Tensor, axes: tuple[int, ...], fold: Callable[..., Tensor], reduce: Callable[..., Tensor]) -> Tensor:
    """The extreme over some axes: folding whole pieces is faster than kernels that walk along single axes."""
    found: Tensor | None = None
    for first, *others in _alike(pieces(x, axes, _FOLDED), x.numel()):
        kept = first.clone() if others else first
        for part in others:
            fold(kept, part, out=kept)
        end = reduce(kept, dim=axes)
        found = end if found is None else fold(found, end)
    assert found is not None
    return found.contiguous()


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


def _sums(
    parts: Sequence[Tensor], axes: tuple[int, ...], runs: list[list[int]], centre: Tensor, ends: bool
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Sums of the distances from the centre and of their squares, in float64; with `ends` minimum, maximum and zeros."""
    found: list[Tensor | None] = [None] * (3 if ends else 2)
    low = high = room = None
    for part in parts:
        piece = part.float()
        room = _room(room, piece, torch.float32)
        distance = torch.sub(piece, centre, out=room)
        sums = [_added(distance, axes, runs), _added(distance.mul_(distance), axes, runs)]
        if ends:
            least, greatest = extremes(piece, axes)
            low = least if low is None else torch.minimum(low, least)
            high = greatest if high is None else torch.maximum(high, greatest)
            sums.append(torch.eq(piece, 0, out=distance).sum(dim=axes))  # of floats, for those are added several times as fast
        found = [_plus(total, value) for total, value in zip(found, sums, strict=True)]
    first, second, *zeros = (total for total in found if total is not None)
    if low is None or high is None:
        return first, second, {}
    dtype = parts[0].dtype
    return first, second, {"min": low.to(dtype), "max": high.to(dtype), "zeros": zeros[0].to(torch.int64)}
