"""Inside compiled graphs: a row in float32 while it is in the cache, then the rows together in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from reducers.numeric import count_along

__all__ = ["sweep_rows"]

_SWEEPABLE = (torch.float32, torch.bfloat16, torch.float16)
_LONGEST = 1 << 14  # elements of a row: in longer ones the rounding of float32 would show


def sweep_rows(x: Tensor, axes: tuple[int, ...], *, ends: bool = False) -> dict[str, Tensor] | None:
    """Count, mean and sum of squared distances from it; with `ends` also minimum, maximum, and how many are zero, NaN or infinite.

    A compiler makes two loops over each row of this, one for its mean and one for all else. Rows run along the last of the reduced
    axes. Their means are summed in float32 and their squares in float64, because a graph cannot look whether float32 was enough;
    they join about their common mean in float64 (Chan, Golub and LeVeque 1983, eq. 1.5).

    Returns:
        `count`, `zeros`, `nan` and `inf` int64, `mean` and `m2` float64, `min` and `max` in the dtype of `x`, in the shape of the
        kept axes; None where the dtype or the length of the rows is not for it.
    """
    inner = _inner(x, axes)
    if inner is None or x.dtype not in _SWEEPABLE or x.device.type == "mps":
        return None
    outer = tuple(axis for axis in axes if axis not in inner)
    wide, length = x.float(), count_along(x, inner)

    def added(rows: Tensor) -> Tensor:
        return rows.sum(outer, keepdim=True) if outer else rows

    def counted(condition: Tensor) -> Tensor:
        return added(condition.float().sum(inner, keepdim=True).double())

    finite = wide.abs() < torch.inf  # inductor vectorises this and neither isinf nor isnan
    share = finite.float().sum(inner, keepdim=True)
    means = (torch.where(finite, wide, 0.0) * (1 / length)).sum(inner, keepdim=True) * (length / share.clamp(min=1))
    distance = torch.where(finite, wide - means, 0.0).double()
    squares, share, means = (distance * distance).sum(inner, keepdim=True), share.double(), means.double()
    count = added(share)
    mean = added(share * means) / count.clamp(min=1)
    apart = means - mean
    state = {"count": count, "mean": mean, "m2": added(squares + share * (apart * apart))}
    if ends:
        infinite = counted(wide.abs() == torch.inf)
        state["zeros"], state["nan"], state["inf"] = counted(wide == 0), count_along(x, axes) - count - infinite, infinite
    state = {key: (value if key in ("mean", "m2") else value.long()).squeeze(axes) for key, value in state.items()}
    if not ends:
        return state
    low = torch.where(finite, wide, torch.inf).amin(inner, keepdim=True)
    high = torch.where(finite, wide, -torch.inf).amax(inner, keepdim=True)
    return {**state, "min": low.amin(axes).to(x.dtype), "max": high.amax(axes).to(x.dtype)}


def _inner(x: Tensor, axes: tuple[int, ...]) -> tuple[int, ...] | None:
    """The axes along which rows run: the last reduced ones, which are next to each other, as far as rows get not too long."""
    inner: tuple[int, ...] = ()
    length = 1
    for axis in reversed(axes):
        if (inner and axis != inner[0] - 1) or length * x.shape[axis] > _LONGEST:
            break
        inner, length = (axis, *inner), length * x.shape[axis]
    return inner or None
