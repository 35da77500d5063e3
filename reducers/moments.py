"""Mean and variance, alone or beside the other numbers one wants of a tensor, by merging about centres."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from reducers.core import Result, State, Statistic
from reducers.errors import ArgumentError
from reducers.numeric import comparable, count_of, finite, magnitude, nan_where_infinite, real, real_or_complex, widen

__all__ = ["Moments", "Summary", "join_moments", "lift_moments"]


def lift_moments(wide: Tensor, mask: Tensor | None, axes: tuple[int, ...]) -> State:
    """Count, mean and sum of squared distances from it; `wide` holds 0 where `mask` is false."""
    count = count_of(wide, mask, axes)
    mean = (wide.sum(dim=axes, keepdim=True) / real(count.clamp(min=1)).reshape(_kept_dims(wide, axes))).to(wide.dtype)
    distance = wide - mean
    if mask is not None:
        distance = torch.where(mask, distance, 0.0)
    return {"count": count, "mean": mean.squeeze(axes), "m2": magnitude(distance).sum(dim=axes)}


def _kept_dims(x: Tensor, axes: tuple[int, ...]) -> list[int]:
    return [1 if axis in axes else size for axis, size in enumerate(x.shape)]


def join_moments(a: State, b: State) -> State:
    """Moments of both (Chan, Golub and LeVeque 1983, eqs. 1.5a and 1.5b)."""
    count = a["count"] + b["count"]
    share = real(b["count"]) / real(count.clamp(min=1))
    delta = b["mean"] - a["mean"]
    m2 = a["m2"] + b["m2"] + magnitude(delta) * real(a["count"]) * share
    return {"count": count, "mean": a["mean"] + delta * share, "m2": m2}


def read_moments(state: State, correction: float) -> dict[str, Tensor]:
    """Count, mean and variance."""
    count = state["count"]
    freedom = real(count) - correction
    return {
        "count": count,
        "mean": torch.where(count > 0, state["mean"], torch.nan),
        "var": torch.where(freedom > 0, state["m2"] / freedom, torch.nan),
    }


@dataclass(frozen=True)
class Moments(Statistic):
    """Count, mean, variance and standard deviation of the finite elements.

    The variance is `sum |x - mean|^2 / (count - correction)`. Every batch is centred on its own mean before squaring, and batches
    merge about their centres (Chan, Golub and LeVeque 1983), all in float64, so data far from zero lose no digits.

    Args:
        correction: 1 for the variance of the population a sample was drawn from, 0 for that of the elements themselves, as in
            `torch.var`.

    Returns:
        `count` int64; `mean` float64 or complex128, NaN where nothing finite was seen; `var` and `std` float64, NaN where
        `count <= correction`; all in the shape of the kept axes.

    Raises:
        ArgumentError: `correction` is not a finite number from 0 up.

    >>> import torch
    >>> moments = Moments("b c -> c")
    >>> result = moments.compute(moments.update({}, torch.tensor([[1.0, 5.0], [3.0, 5.0]])))
    >>> result["mean"], result["var"]
    (tensor([2., 5.], dtype=torch.float64), tensor([2., 0.], dtype=torch.float64))
    """

    correction: float = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.correction, (int, float)) or not 0 <= self.correction < math.inf:
            raise ArgumentError(f"Moments takes a finite correction from 0 up, as torch.var does, and got {self.correction!r}")

    def lift(self, x: Tensor, axes: tuple[int, ...]) -> State:
        return lift_moments(*finite(real_or_complex(widen(x, "Moments"))), axes)

    def join(self, a: State, b: State) -> State:
        return join_moments(a, b)

    def read(self, state: State) -> Result:
        result = read_moments(state, self.correction)
        return {**result, "std": result["var"].sqrt()}


@dataclass(frozen=True)
class Summary(Statistic):
    """Nine numbers in one pass: `count`, `mean`, `var`, `min`, `max`, `absmax`, `zeros`, `nan` and `inf`.

    All but `nan` and `inf`, which say how many of either were met, are about the finite elements; `var` is the sample variance
    (`correction=1`).

    Returns:
        `count`, `zeros`, `nan`, `inf` int64; `mean`, `var` float64; `min`, `max` in the dtype of the input, `absmax` too for
        floats and int64 for integers (an int8 has no +128); all in the shape of the kept axes; NaN where nothing finite was seen.

    Raises:
        DTypeError: complex numbers, which have no order, or uint64.

    >>> import torch
    >>> summary = Summary()
    >>> result = summary.compute(summary.update({}, torch.tensor([0.0, -4.0, 1.0, float("nan")])))
    >>> {name: value.item() for name, value in result.items()}
    {'count': 3, 'mean': -1.0, 'var': 7.0, 'min': -4.0, 'max': 1.0, 'absmax': 4.0, 'zeros': 1, 'nan': 1, 'inf': 0}
    """

    def lift(self, x: Tensor, axes: tuple[int, ...]) -> State:
        x = comparable(x, "Summary")
        wide, mask = finite(real(x))
        state = lift_moments(wide, mask, axes)
        total = count_of(x, None, axes)
        if mask is None:
            nan, low, high = torch.zeros_like(total), x, x
        else:
            nan = torch.isnan(x).sum(dim=axes)
            low, high = (torch.where(mask, x, fill) for fill in (torch.inf, -torch.inf))
        return {
            **state,
            "min": low.amin(dim=axes),
            "max": high.amax(dim=axes),
            "zeros": total - _nonzeros(x, axes),
            "nan": nan,
            "inf": total - state["count"] - nan,
        }

    def join(self, a: State, b: State) -> State:
        return {
            **join_moments(a, b),
            "min": torch.minimum(a["min"], b["min"]),
            "max": torch.maximum(a["max"], b["max"]),
            **{key: a[key] + b[key] for key in ("zeros", "nan", "inf")},
        }

    def read(self, state: State) -> Result:
        low, high = nan_where_infinite(state["min"]), nan_where_infinite(state["max"])
        ends = (low, high) if low.is_floating_point() else (low.to(torch.int64), high.to(torch.int64))
        return {
            **read_moments(state, correction=1),
            "min": low,
            "max": high,
            "absmax": torch.maximum(-ends[0], ends[1]),
            "zeros": state["zeros"],
            "nan": state["nan"],
            "inf": state["inf"],
        }


def _nonzeros(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    # count_nonzero over all axes has a fast kernel, over some of them it does not
    return torch.count_nonzero(x) if len(axes) == x.ndim else (x != 0).sum(dim=axes)
