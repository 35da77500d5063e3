"""Fast reductions of big CPU tensors: piece by piece in the cache, in float32 about a centre, accumulated in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from reducers.kernels.chunks import BIG, CHUNK, PIECE, pieces
from reducers.kernels.precision import (
    NARROW,
    can_read_values,
    count_along,
    count_of,
    counts_of,
    extremes,
    float32_threshold,
    is_finite,
)
from reducers.kernels.rows import flat, row_moments, row_squares, row_sum

__all__ = ["all_finite", "count_above", "fast_sum", "min_max", "sum_squares", "sweep"]

_FOLD_SIZE = 1 << 18  # elements of a piece that is folded with others: two fit into the cache
_FOLD_COUNT = 16  # pieces whose squares are accumulated in float32

_ORDERED_DTYPES = (*NARROW, torch.float64, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool)
_EXTREME_OPS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "min": (torch.minimum, torch.amin),
    "max": (torch.maximum, torch.amax),
}
_MIN_RELATIVE_STD = 8 * torch.finfo(torch.float32).eps
_MIN_MEAN_SQUARE = 1e-24  # below it, float32 squares underflow
MIN_REMAINDER = 1 / 64  # share of a sum of squares that must remain if its centre is moved to the mean


def sweep(x: Tensor, axes: tuple[int, ...], *, with_extremes: bool = False) -> dict[str, Tensor] | None:
    """Return count, mean and sum of squared deviations of a big CPU tensor, in the layout of `fused_moments`.

    If everything is reduced, each sum is a single call, along rows. If not, each piece is summed pairwise in float32 about a centre
    that all pieces share, so that the sums add up in float64 without merging. The centre is the mean of the first piece; if it is
    far from the overall mean, a second sweep uses the overall mean.
    The relative error of the sum of squares is below 1e-6 for any mean; the error of the mean is below 1e-6 standard deviations.

    Args:
        with_extremes: in place of `nonfinite` return minimum, maximum, and the numbers of zero, NaN and infinite elements.

    Returns:
        `count`, `nonfinite`, `zeros`, `nan` and `inf` int64, `mean` and `m2` float64, `min` and `max` in the dtype of `x`, in the
        shape of the kept axes; None if float64 is needed throughout, because elements are not finite, or too small or too nearly
        equal.
    """
    if not is_sweepable(x):
        return None
    whole = flat(x, axes)
    if whole is not None and (found := row_moments(whole)) is not None:
        mean, m2 = (torch.tensor(value, dtype=torch.float64, device="cpu") for value in found)
        moments = {"mean": mean, "m2": m2}
        if not with_extremes:
            return {**counts_of(x, None, axes), **moments}
        return {"count": count_of(x, None, axes), **moments, **_whole_extremes(whole)}
    parts, runs = pieces(x, axes, PIECE), strided_runs(x, axes)
    count = count_along(x, axes)
    centre = parts[0].float().mean(dim=axes, keepdim=True)
    for second_sweep in (False, True):
        *sums, extra = centred_sums(parts, axes, runs, centre, with_extremes)
        first, second, middle = (_as_number(value) for value in (*sums, centre.squeeze(axes).double()))
        shift = first / count
        m2 = second - first * shift
        if _any(m2 - m2 != 0):  # not finite
            return None
        inexact = is_inexact(m2, first, second, middle, count)
        off_centre = not second_sweep and _any(m2 < second * MIN_REMAINDER)
        if not off_centre and not _any(inexact):
            mean, m2 = (torch.as_tensor(value, dtype=torch.float64, device="cpu") for value in (middle + shift, m2))
            dtypes = {"min": x.dtype, "max": x.dtype, "zeros": torch.int64}
            extremes_too = {name: value.to(dtypes[name]) for name, value in extra.items()}
            moments = {"mean": mean, "m2": m2}
            if not with_extremes:
                return {**counts_of(x, None, axes), **moments}
            count_there = count_of(x, None, axes)
            none = {name: torch.zeros_like(count_there) for name in ("nan", "inf")}
            return {"count": count_there, **moments, **extremes_too, **none}
        centre = _next_centre(centre, inexact, shift, parts[0], axes)
    return None


def fast_sum(x: Tensor, axes: tuple[int, ...], *, exact: bool = False, magnitudes: bool = False) -> Tensor | None:
    """Return the sum of a big float tensor, or of its magnitudes, in float64; None if it is not finite or not supported.

    Unless `exact`, pieces narrower than float64 are summed pairwise in float32: the error is below 1e-6 of the sum of magnitudes.
    """
    if not _is_big(x, BIG) or x.dtype not in (*NARROW, torch.float64):
        return None
    dtype = torch.float64 if exact or x.dtype is torch.float64 else torch.float32
    copied = magnitudes or dtype is not x.dtype
    if not copied and (whole := flat(x, axes)) is not None:
        added = row_sum(whole)
        return added if math.isfinite(added.item()) else None
    runs = strided_runs(x, axes)
    result = buffer = None
    for part in pieces(x, axes, PIECE):
        if copied:
            buffer = reuse_buffer(buffer, part, dtype)
            part = _abs_into(part, buffer) if magnitudes else buffer.copy_(part)
        result = accumulate(result, pairwise_sum(part, axes, runs))
    return result.contiguous() if result is not None and is_finite(result) else None


def all_finite(x: Tensor) -> bool:
    """Return whether a big CPU tensor is known to be finite after a single read; False if that is not supported."""
    return is_sweepable(x) and fast_sum(x, tuple(range(x.ndim))) is not None


def sum_squares(x: Tensor, axes: tuple[int, ...]) -> Tensor | None:
    """Return the sum of squares in float64, with a relative error below 1e-6; None in the same cases as `sweep`."""
    if not is_sweepable(x):
        return None
    result: Tensor | None = None
    if x.dtype is torch.float32 and (whole := flat(x, axes)) is not None:
        result = row_squares(whole)
    else:
        runs = strided_runs(x, axes)
        for first, *others in _group_by_shape(pieces(x, axes, _FOLD_SIZE), _FOLD_COUNT):
            squares = first.float().square()
            for part in others:
                wide = part.float()
                squares.addcmul_(wide, wide)
            result = accumulate(result, pairwise_sum(squares, axes, runs))
        assert result is not None
    if not is_finite(result):
        return None
    too_small = result < _MIN_MEAN_SQUARE * count_along(x, axes)
    if too_small.any():
        low, high = extremes(x, axes)
        if (too_small & ((low != 0) | (high != 0))).any():
            return None
    return result.contiguous()


def min_max(x: Tensor, axes: tuple[int, ...], *names: str) -> dict[str, Tensor] | None:
    """Return the named ones of `min` and `max` without a temporary as big as `x`; None if one is not finite."""
    if not _is_big(x, 2 * CHUNK) or x.dtype not in _ORDERED_DTYPES:
        return None
    if len(axes) < x.ndim:
        result = {name: _extreme(x, axes, *_EXTREME_OPS[name]) for name in names}
    elif len(names) == 2:
        result = dict(zip(("min", "max"), torch.aminmax(x), strict=True))
    else:
        result = {name: _EXTREME_OPS[name][1](x) for name in names}
    return result if all(is_finite(value) for value in result.values()) else None


def count_above(x: Tensor, axes: tuple[int, ...], eps: float) -> Tensor | None:
    """Return the number of elements with a magnitude above `eps`, int64; None if not all elements are finite."""
    if not all_finite(x):
        return None
    eps = float32_threshold(eps, x.dtype)
    result = buffer = None
    for part in pieces(x, axes, _FOLD_SIZE):  # float32 counts exactly up to 2**24
        buffer = _abs_into(part, reuse_buffer(buffer, part, torch.float32))
        result = accumulate(result, torch.gt(buffer, eps, out=buffer).sum(dim=axes))
    return None if result is None else result.to(torch.int64).contiguous()


def _is_big(x: Tensor, size: int) -> bool:
    # comparing a dynamic size while compiling would specialise the graph
    return can_read_values(x) and x.numel() >= size


def is_sweepable(x: Tensor) -> bool:
    """Return whether `x` is a big CPU tensor in float32 or narrower."""
    return _is_big(x, BIG) and x.dtype in NARROW


def accumulate(result: Tensor | None, value: Tensor) -> Tensor:
    """Return the sum in float64, which is written into `result` if there is one."""
    return value.double() if result is None else result.add_(value)


def strided_runs(x: Tensor, axes: tuple[int, ...]) -> list[list[int]]:
    """Return the reduced axes, grouped if their elements have one common stride in memory, innermost group last."""
    runs: list[list[int]] = []
    if len(axes) == x.ndim and x.is_contiguous():
        return [list(axes)]
    outer = -1
    for axis in sorted((axis for axis in range(x.ndim) if x.shape[axis] > 1), key=x.stride, reverse=True):
        if axis in axes:
            if outer in axes and x.stride(outer) == x.shape[axis] * x.stride(axis):
                runs[-1].append(axis)
            else:
                runs.append([axis])
        outer = axis
    return runs


def pairwise_sum(x: Tensor, axes: tuple[int, ...], runs: list[list[int]]) -> Tensor:
    """Return the sum over `axes`, pairwise along each run. A single call would add the sums of the runs one by one."""
    if len(runs) < 2:
        return x.sum(dim=axes)
    for run in reversed(runs):
        x = x.sum(dim=run, keepdim=True)
    return x.squeeze(axes)


def reuse_buffer(buffer: Tensor | None, part: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the buffer if it fits `part`, else a new one; reuse avoids page faults."""
    return buffer if buffer is not None and buffer.shape == part.shape else torch.empty_like(part, dtype=dtype)


def _abs_into(part: Tensor, buffer: Tensor) -> Tensor:
    return torch.abs(part, out=buffer) if part.dtype is buffer.dtype else buffer.copy_(part).abs_()


def _group_by_shape(parts: Sequence[Tensor], most: int) -> Iterator[list[Tensor]]:
    """Yield groups of up to `most` consecutive parts of the same shape."""
    for _, same_shape in groupby(parts, key=lambda part: part.shape):
        group = list(same_shape)
        yield from (group[start : start + most] for start in range(0, len(group), most))


def _extreme(x: Tensor, axes: tuple[int, ...], fold: Callable[..., Tensor], reduce: Callable[..., Tensor]) -> Tensor:
    """Return the extreme over some axes. Element-wise folds of whole pieces are faster than a reduction along one axis."""
    result: Tensor | None = None
    for first, *others in _group_by_shape(pieces(x, axes, _FOLD_SIZE), x.numel()):
        folded = first.clone() if others else first
        for part in others:
            fold(folded, part, out=folded)
        value = reduce(folded, dim=axes)
        result = value if result is None else fold(result, value)
    assert result is not None
    return result.contiguous()


def is_inexact(m2: Any, first: Any, second: Any, middle: Any, count: Any) -> Any:
    """Return whether elements are too small, or too nearly equal, for float32. If both sums are 0, all equal the centre."""
    too_small = m2 < count * ((middle * _MIN_RELATIVE_STD) ** 2 + _MIN_MEAN_SQUARE)
    return too_small & ((first != 0) | (second != 0))


def _as_number(value: Tensor) -> Any:
    """Return a 0-d tensor as a Python number, whose arithmetic takes a tenth of the time."""
    return value.item() if value.ndim == 0 else value


def _whole_extremes(x: Tensor) -> dict[str, Tensor]:
    """Return minimum, maximum, and the numbers of zeros, NaN and infinities of a finite vector."""
    low, high = torch.aminmax(x)
    none = torch.zeros((), dtype=torch.int64, device="cpu")
    return {"min": low, "max": high, "zeros": x.numel() - torch.count_nonzero(x), "nan": none, "inf": none.clone()}


def _any(condition: Any) -> bool:
    return condition if isinstance(condition, bool) else bool(condition.any())


def _next_centre(centre: Tensor, inexact: Any, shift: Any, part: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Return the mean; if all elements may be equal, the first one, from which the deviations are exactly 0."""
    element = part[tuple(slice(0, 1) if axis in axes else slice(None) for axis in range(part.ndim))].float()
    inexact, shift = (torch.as_tensor(value, device="cpu").reshape(centre.shape) for value in (inexact, shift))
    return torch.where(inexact, element, centre + shift.float())


def centred_sums(
    parts: Iterable[Tensor], axes: tuple[int, ...], runs: list[list[int]], centre: Tensor, with_extremes: bool
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the float64 sums of the deviations from the centre and of their squares, and if asked minimum, maximum and zeros.

    Minimum and maximum are in float32, the number of zeros in float64.
    """
    result: list[Tensor | None] = [None] * (3 if with_extremes else 2)
    low = high = buffer = None
    for part in parts:
        piece = part.float()
        buffer = reuse_buffer(buffer, piece, torch.float32)
        distance = torch.sub(piece, centre, out=buffer)
        sums = [pairwise_sum(distance, axes, runs), pairwise_sum(distance.mul_(distance), axes, runs)]
        if with_extremes:
            least, greatest = extremes(piece, axes)
            low = least if low is None else torch.minimum(low, least)
            high = greatest if high is None else torch.maximum(high, greatest)
            sums.append(torch.eq(piece, 0, out=distance).sum(dim=axes))  # floats sum several times as fast as bools
        result = [accumulate(total, value) for total, value in zip(result, sums, strict=True)]
    first, second, *zeros = (total for total in result if total is not None)
    if low is None or high is None:
        return first, second, {}
    return first, second, {"min": low, "max": high, "zeros": zeros[0]}
