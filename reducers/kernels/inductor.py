"""Moments inside compiled graphs, in a single loop that the compiler can fuse with the producer of the tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from reducers.kernels.precision import NARROW, count_along

__all__ = ["fused_moments"]

_MAX_ROW = 1 << 14  # elements; float32 counts a row of this length exactly


def fused_moments(x: Tensor, axes: tuple[int, ...], *, with_extremes: bool = False) -> dict[str, Tensor] | None:
    """Return count, mean and sum of squared deviations of the finite elements, in one loop.

    Deviations from the exact mean would need two loops, and the compiler would repeat the fused producer in both. So deviations
    are taken from the mean of the first row (a row runs along the last reduced axes) and summed in float64. If that centre is k
    standard deviations from the mean, moving the centre costs a relative error of about `1e-16 k^2`.

    Args:
        with_extremes: in place of `nonfinite` return minimum, maximum, and the numbers of zero, NaN and infinite elements.

    Returns:
        `count`, `nonfinite`, `zeros`, `nan` and `inf` int64, `mean` and `m2` float64, `min` and `max` in the dtype of `x`, in the
        shape of the kept axes; None if the dtype, the device or the row length is not supported.
    """
    inner = _row_axes(x, axes)
    if inner is None or x.dtype not in NARROW or x.device.type == "mps":
        return None
    outer = tuple(axis for axis in axes if axis not in inner)
    wide = x.float()
    finite = wide.abs() < torch.inf  # inductor vectorises this, but neither isinf nor isnan
    centre = _centre(wide, inner, outer)
    distance = torch.where(finite, wide.double() - centre, 0.0)
    count, first, second = (_two_stage_sum(part, inner, outer) for part in (finite.float(), distance, distance * distance))
    shift = first / count.clamp(min=1)
    counts = (
        {"count": count.long()} if with_extremes else {"count": count.long(), "nonfinite": (count_along(x, axes) - count).long()}
    )
    state = {**counts, "mean": centre + shift, "m2": (second - first * shift).clamp(min=0)}
    if with_extremes:
        zeros, infinite = (_two_stage_sum(part.float(), inner, outer) for part in (wide == 0, wide.abs() == torch.inf))
        state["zeros"], state["nan"] = zeros.long(), (count_along(x, axes) - count - infinite).long()
        state["inf"] = infinite.long()
        low = torch.where(finite, wide, torch.inf).amin(inner, keepdim=True)
        high = torch.where(finite, wide, -torch.inf).amax(inner, keepdim=True)
        state["min"], state["max"] = (low.amin(outer, keepdim=True), high.amax(outer, keepdim=True)) if outer else (low, high)
        state["min"], state["max"] = state["min"].to(x.dtype), state["max"].to(x.dtype)
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
