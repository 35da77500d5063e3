"""Moments inside compiled graphs, in loops that the compiler can fuse with the producer of the tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from reducers.kernels.precision import NARROW, count_along

__all__ = ["fused_moments"]

_ADDED = 1 << 5  # numbers that are added in float32 one after another: each rounds by 3e-8 at most, all by less than 1e-6
_PLACES = {"AVX512": 16, "AVX2": 8}.get(torch.backends.cpu.get_cpu_capability(), 4)  # where a row is added side by side
_SHORT = 1 << 4  # rows below this are not worth a loop of their own
_MAX_ROW = 1 << 14  # elements of a row that is added in float64
_ZERO = 2048.0  # stands for one zero in a sum in which 1 stands for one element that is not finite: more than a row has elements


def fused_moments(x: Tensor, axes: tuple[int, ...], *, with_extremes: bool = False) -> dict[str, Tensor] | None:
    """Return count, mean and sum of squared deviations of the finite elements, without a temporary of the size of `x`.

    Deviations from a centre of their own are summed in float32 along rows of a few hundred elements, scaled by a power of two.
    Rows are joined in float64. So the relative error of the variance is below 1e-6, whatever the mean and the magnitude, but for
    rows with numbers 1e19 times as large as all of their first eighth, and for rows that begin with zeros, or with nothing finite,
    and have only numbers below 1e-19 then. If an axis cannot be cut into such rows, `_in_float64` does the work.

    Args:
        with_extremes: also return minimum, maximum, and the numbers of zero, NaN and infinite elements.

    Returns:
        `count`, `zeros`, `nan` and `inf` int64, `mean` and `m2` float64, `min` and `max` in the dtype of `x`, in the shape of the
        kept axes; None if the dtype, the device or the row length is not supported.
    """
    if x.dtype not in NARROW or x.device.type == "mps":
        return None
    cut = _rows(x, axes)
    return _in_float64(x, axes, with_extremes) if cut is None else _in_rows(*cut, with_extremes)


def _in_rows(x: Tensor, inner: tuple[int, ...], outer: tuple[int, ...], with_extremes: bool) -> dict[str, Tensor]:
    wide = x.float()
    finite = wide.abs() < torch.inf  # inductor vectorises this, but neither isinf nor isnan
    centre, up = _centre_and_scale(wide, inner)
    down = 1 / up
    distance = torch.where(finite, wide * _stored(down) - _stored(centre * down), 0.0)  # scaled first, as differences may overflow
    zero = torch.where(wide == 0, _ZERO, 0.0) if with_extremes else 0.0
    special = torch.where(finite, zero, 1.0).sum(inner, keepdim=True)  # exact: below 2**24
    zeros = (special / _ZERO).floor()
    number = (count_along(x, inner) - (special - _ZERO * zeros)).double()
    first, second = (part.sum(inner, keepdim=True).double() for part in (distance, distance * distance))

    up = up.double()
    shift = first / number.clamp(min=1)
    means, squares = centre.double() + shift * up, (second - first * shift) * up * up
    start = means
    for axis in outer:
        start = start.narrow(axis, 0, 1)
    distances = torch.where(number > 0, means - start, 0.0)
    count, first, second = (_across(part, outer) for part in (number, number * distances, squares + number * distances * distances))
    shift = first / count.clamp(min=1)
    state = {"count": count.long(), "mean": start + shift, "m2": (second - first * shift).clamp(min=0)}
    if with_extremes:
        infinite = _across((wide.abs() == torch.inf).float().sum(inner, keepdim=True).double(), outer)
        state["zeros"] = _across(zeros.double(), outer).long()
        state["nan"] = (count_along(x, inner + outer) - count - infinite).long()
        state["inf"] = infinite.long()
        state.update(_extremes(x, wide, finite, inner, outer))
    return {key: value.squeeze(inner + outer) for key, value in state.items()}


def _centre_and_scale(x: Tensor, inner: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return the mean and the magnitude, as a power of two, of the first eighth of each row; 0 and 1 if that has no finite number.

    Deviations from the mean of an eighth add up to at most eight times those from the mean of the row.
    """
    axis = inner[-1]
    head = x.narrow(axis, 0, max(1, x.shape[axis] // 8))
    finite = head.abs() < torch.inf
    low = torch.where(finite, head, torch.inf).amin(inner, keepdim=True)
    high = torch.where(finite, head, -torch.inf).amax(inner, keepdim=True)
    added = torch.where(finite, head * 2.0**-10, 0.0).sum(inner, keepdim=True)  # which does not overflow
    number = finite.float().sum(inner, keepdim=True)
    # Within the extremes, so that equal numbers have exactly themselves as the centre.
    centre = (added / number.clamp(min=1) * 2.0**10).maximum(low).minimum(high)
    peak = high.maximum(-low)
    return torch.where(number > 0, centre, 0.0), _power_of_two(torch.where(peak > 0, peak, 1.0))


def _stored(x: Tensor) -> Tensor:
    """Return `x`, which the compiler stores then, in place of computing it again for every element that needs it."""
    return x.as_strided(x.shape, x.stride())


def _extremes(x: Tensor, wide: Tensor, finite: Tensor, inner: tuple[int, ...], outer: tuple[int, ...]) -> dict[str, Tensor]:
    low = torch.where(finite, wide, torch.inf).amin(inner, keepdim=True)
    high = torch.where(finite, wide, -torch.inf).amax(inner, keepdim=True)
    if outer:
        low, high = low.amin(outer, keepdim=True), high.amax(outer, keepdim=True)
    return {"min": low.to(x.dtype), "max": high.to(x.dtype)}


def _power_of_two(magnitude: Tensor) -> Tensor:
    """Return the power of two that is at most a positive float32, of those whose inverses and squares are far from the limits."""
    bits = magnitude.clamp(1e-30, 1e30).view(torch.int32)
    return bits.bitwise_and(0x7F800000).view(torch.float32)


def _rows(x: Tensor, axes: tuple[int, ...]) -> tuple[Tensor, tuple[int, ...], tuple[int, ...]] | None:
    """Cut the trailing adjacent reduced axes into rows.

    Returns:
        a view of `x`, the axes along its rows, and its other reduced axes; None if there are no such rows.
    """
    most = _ADDED * _PLACES if axes[-1] == x.ndim - 1 else _ADDED  # kept axes behind the reduced ones take all places
    length, first = 1, axes[-1] + 1
    for axis in reversed(axes):
        size = x.shape[axis]
        if axis != first - 1 or not isinstance(size, int):
            break
        part = max((part for part in range(1, min(size, most // length) + 1) if size % part == 0), default=1)
        if part < size:
            if part > 1:
                x, length = x.view(*x.shape[:axis], size // part, part, *x.shape[axis + 1 :]), length * part
                axes = (*(other for other in axes if other <= axis), *(other + 1 for other in axes if other >= axis))
                first = axis + 1
            break
        length, first = length * size, axis
    inner = tuple(axis for axis in axes if axis >= first)
    outer = tuple(axis for axis in axes if axis < first)
    return (x, inner, outer) if length >= _SHORT or (inner and not outer) else None


def _across(rows: Tensor, outer: tuple[int, ...]) -> Tensor:
    return rows.sum(outer, keepdim=True) if outer else rows


def _in_float64(x: Tensor, axes: tuple[int, ...], with_extremes: bool) -> dict[str, Tensor] | None:
    """Return the same by deviations from the mean of the first row, in float64: in one loop, but a slower one.

    If that centre is k standard deviations from the mean, moving the centre costs a relative error of about `1e-16 k^2`.
    """
    inner = _row_axes(x, axes)
    if inner is None:
        return None
    outer = tuple(axis for axis in axes if axis not in inner)
    wide = x.float()
    finite = wide.abs() < torch.inf  # inductor vectorises this, but neither isinf nor isnan
    centre = _centre(wide, inner, outer)
    distance = torch.where(finite, wide.double() - centre, 0.0)
    count, first, second = (_two_stage_sum(part, inner, outer) for part in (finite.float(), distance, distance * distance))
    shift = first / count.clamp(min=1)
    state = {"count": count.long(), "mean": centre + shift, "m2": (second - first * shift).clamp(min=0)}
    if with_extremes:
        zeros, infinite = (_two_stage_sum(part.float(), inner, outer) for part in (wide == 0, wide.abs() == torch.inf))
        state["zeros"], state["nan"] = zeros.long(), (count_along(x, axes) - count - infinite).long()
        state["inf"] = infinite.long()
        state.update(_extremes(x, wide, finite, inner, outer))
    return {key: value.squeeze(axes) for key, value in state.items()}


def _centre(x: Tensor, inner: tuple[int, ...], outer: tuple[int, ...]) -> Tensor:
    """Return the mean of the first row; if there is only one row, of its first eighth."""
    for axis in outer:
        x = x.narrow(axis, 0, 1)
    if not outer:
        x = x.narrow(inner[0], 0, 1 + x.shape[inner[0]] // 8)
    finite = x.abs() < torch.inf
    total = torch.where(finite, x, 0.0).double().sum(inner, keepdim=True)
    return total / finite.double().sum(inner, keepdim=True).clamp(min=1)


def _two_stage_sum(x: Tensor, inner: tuple[int, ...], outer: tuple[int, ...]) -> Tensor:
    """Sum each row in the dtype of `x`, then the rows in float64."""
    rows = x.sum(inner, keepdim=True).double()
    return rows.sum(outer, keepdim=True) if outer else rows


def _row_axes(x: Tensor, axes: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the trailing adjacent reduced axes that form rows of at most `_MAX_ROW` elements; never all of several axes."""
    inner: tuple[int, ...] = ()
    length = 1
    for axis in reversed(axes):
        if (inner and axis != inner[0] - 1) or length * x.shape[axis] > _MAX_ROW:
            break
        inner, length = (axis, *inner), length * x.shape[axis]
    return (inner[1:] if 1 < len(inner) == len(axes) else inner) or None
