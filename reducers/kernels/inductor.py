"""Inside compiled graphs: one loop over the elements, which the compiler fuses with what makes them."""

from __future__ import annotations

import torch
from torch import Tensor

from reducers.kernels.precision import NARROW, count_along

__all__ = ["one_loop"]

_LONGEST = 1 << 14  # elements of a row: so many are counted in float32, exactly


def one_loop(x: Tensor, axes: tuple[int, ...], *, ends: bool = False) -> dict[str, Tensor] | None:
    """Count, mean and sum of squared distances from it; with `ends` also minimum, maximum, and how many are zero, NaN or infinite.

    Were the mean needed before the distances from it, a compiler would make two loops, and compute in both what it fuses with them.
    So distances are from the mean of the first row, along the last of the reduced axes, and sums are in float64: what moving the
    centre to the mean cancels of those is some `1e-16 k^2` of the result, where the centre is k standard deviations off.

    Returns:
        `count`, `zeros`, `nan` and `inf` int64, `mean` and `m2` float64, `min` and `max` in the dtype of `x`, in the shape of the
        kept axes; None where the dtype, the device or the length of the rows is not for it.
    """
    inner = _inner(x, axes)
    if inner is None or x.dtype not in NARROW or x.device.type == "mps":
        return None
    outer = tuple(axis for axis in axes if axis not in inner)
    wide = x.float()
    finite = wide.abs() < torch.inf  # inductor vectorises this and neither isinf nor isnan
    centre = _centre(wide, inner, outer)
    distance = torch.where(finite, wide.double() - centre, 0.0)
    count, first, second = (_sum(part, inner, outer) for part in (finite.float(), distance, distance * distance))
    shift = first / count.clamp(min=1)
    state = {"count": count.long(), "mean": centre + shift, "m2": (second - first * shift).clamp(min=0)}
    if ends:
        zeros, infinite = (_sum(part.float(), inner, outer) for part in (wide == 0, wide.abs() == torch.inf))
        state["zeros"], state["nan"] = zeros.long(), (count_along(x, axes) - count - infinite).long()
        state["inf"] = infinite.long()
        low = torch.where(finite, wide, torch.inf).amin(inner, keepdim=True)
        high = torch.where(finite, wide, -torch.inf).amax(inner, keepdim=True)
        state["min"], state["max"] = (low.amin(outer, keepdim=True), high.amax(outer, keepdim=True)) if outer else (low, high)
        state["min"], state["max"] = state["min"].to(x.dtype), state["max"].to(x.dtype)
    return {key: value.squeeze(axes) for key, value in state.items()}


def _centre(x: Tensor, inner: tuple[int, ...], outer: tuple[int, ...]) -> Tensor:
    """The mean of the first row, or of the beginning of the only one."""
    for axis in outer:
        x = x.narrow(axis, 0, 1)
    if not outer:
        x = x.narrow(inner[0], 0, 1 + x.shape[inner[0]] // 8)
    finite = x.abs() < torch.inf
    total = torch.where(finite, x, 0.0).double().sum(inner, keepdim=True)
    return total / finite.double().sum(inner, keepdim=True).clamp(min=1)


def _sum(x: Tensor, inner: tuple[int, ...], outer: tuple[int, ...]) -> Tensor:
    """Row by row, and then of the rows in float64."""
    rows = x.sum(inner, keepdim=True).double()
    return rows.sum(outer, keepdim=True) if outer else rows


def _inner(x: Tensor, axes: tuple[int, ...]) -> tuple[int, ...] | None:
    """The axes along which rows run: the last reduced ones, which are next to each other, if rows get not too long; not all."""
    inner: tuple[int, ...] = ()
    length = 1
    for axis in reversed(axes):
        if (inner and axis != inner[0] - 1) or length * x.shape[axis] > _LONGEST:
            break
        inner, length = (axis, *inner), length * x.shape[axis]
    return (inner[1:] if 1 < len(inner) == len(axes) else inner) or None
