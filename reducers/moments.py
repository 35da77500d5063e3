"""Mean and variance, alone or beside the other numbers one wants of a tensor, by merging about centres."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from reducers.core import Result, State, Statistic
from reducers.errors import ArgumentError
from reducers.numeric import comparable, count_of, extremes, magnitude, nan_where_infinite, real, square_sum, total

__all__ = ["Moments", "Summary", "join_moments", "lift_moments", "read_moments"]


def lift_moments(x: Tensor, axes: tuple[int, ...], who: str) -> tuple[State, Tensor | None]:
    """Count, mean and sum of squared distances from it, of the finite elements; and the mask of these (None: all are)."""
    filled, mask, added = total(x, axes, who)
    count = count_of(x, mask, axes)
    mean = added / real(count.clamp(min=1)).reshape(added.shape)
    distance = filled + -mean  # tensors of bool can be added to, and not subtracted from
    if mask is not None:
        distance = torch.where(mask, distance, 0.0)
    return {"count": count, "mean": mean.squeeze(axes), "m2": square_sum(distance, axes)}, mask


def join_moments(a: State, b: State) -> State:
    """Moments of both (Chan, Golub and LeVeque 1983, eqs. 1.5a and 1.5b)."""
    count = a["count"] + b["count"]
    share = b["count"] / real(count.clamp(min=1))
    delta = b["mean"] - a["mean"]
    return {
        "count": count,
        "mean": torch.addcmul(a["mean"], delta, share),
        "m2": torch.addcmul(a["m2"] + b["m2"], magnitude(delta), share * a["count"]),
    }


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
        return lift_moments(x, axes, "Moments")[0]

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
        state, mask = lift_moments(x, axes, "Summary")
        if mask is None:
            (low, high), nan, inf = extremes(x, axes), torch.zeros_like(state["count"]), torch.zeros_like(state["count"])
        else:
            low, high = (torch.where(mask, x, fill) for fill in (torch.inf, -torch.inf))
            low, high = low.amin(dim=axes), high.amax(dim=axes)
            inf = (x.abs() == torch.inf).sum(dim=axes)  # inductor vectorises this and neither isinf nor isnan
            nan = count_of(x, None, axes) - state["count"] - inf
        return {**state, "min": low, "max": high, "zeros": _zeros(x, axes), "nan": nan, "inf": inf}

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


def _zeros(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    if len(axes) == x.ndim:  # over all axes there is a fast kernel for what is not zero
        return x.numel() - torch.count_nonzero(x)
    return (x == 0).sum(dim=axes)
