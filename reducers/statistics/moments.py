"""Moments to the fourth, alone or beside the other numbers one wants of a tensor, by merging about centres."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from reducers.core.statistic import Statistic
from reducers.errors import ArgumentError, DTypeError
from reducers.kernels.cpu import sweep
from reducers.kernels.inductor import one_loop
from reducers.kernels.precision import (
    comparable,
    count_of,
    extremes,
    magnitude,
    nan_where_infinite,
    negligible,
    real,
    square_sum,
    total,
)
from reducers.state import Result, State

__all__ = ["Moments", "Summary", "join_moments", "lift_moments", "read_moments"]


def lift_moments(x: Tensor, axes: tuple[int, ...], who: str, order: int = 2) -> tuple[State, Tensor | None]:
    """Count, mean and sums of distances from it, squared and to the powers up to `order`, of the finite elements; their mask."""
    filled, mask, added = total(x, axes, who)
    count = count_of(x, mask, axes)
    mean = added / real(count.clamp(min=1)).reshape(added.shape)
    distance = filled + -mean  # tensors of bool can be added to, and not subtracted from
    if mask is not None:
        distance = torch.where(mask, distance, 0.0)
    state = {"count": count, "mean": mean.squeeze(axes)}
    if order == 2:
        return {**state, "m2": square_sum(distance, axes)}, mask
    square = distance * distance
    state["m2"] = square.sum(dim=axes)
    state["m3"] = distance.mul_(square).sum(dim=axes)
    if order == 4:
        state["m4"] = square_sum(square, axes)
    return state, mask


def join_moments(a: State, b: State) -> State:
    """Moments of both (Chan, Golub and LeVeque 1983, eqs. 1.5a and 1.5b; Pebay 2008 for the third and fourth power)."""
    count = a["count"] + b["count"]
    share = b["count"] / real(count.clamp(min=1))
    delta = b["mean"] - a["mean"]
    joined = {
        "count": count,
        "mean": torch.addcmul(a["mean"], delta, share),
        "m2": torch.addcmul(a["m2"] + b["m2"], magnitude(delta), share * a["count"]),
    }
    if "m3" in a:
        other = a["count"] / real(count.clamp(min=1))
        both, square = share * other, delta * delta
        joined["m3"] = (
            a["m3"] + b["m3"] + delta * (3 * (other * b["m2"] - share * a["m2"]) + square * count * both * (other - share))
        )
    if "m4" in a:
        spread = 6 * (other * other * b["m2"] + share * share * a["m2"]) + square * count * both * (1 - 3 * both)
        joined["m4"] = a["m4"] + b["m4"] + delta * (4 * (other * b["m3"] - share * a["m3"]) + delta * spread)
    return joined


def read_moments(state: State, correction: float) -> dict[str, Tensor]:
    """Count, mean and variance."""
    count = state["count"]
    freedom = real(count) - correction
    return {
        "count": count,
        "mean": torch.where(count > 0, state["mean"], torch.nan),
        "var": torch.where(freedom > 0, state["m2"] / freedom, torch.nan),
    }


def read_shape(state: State) -> dict[str, Tensor]:
    """Skewness, and kurtosis where the fourth power is there; NaN where all is equal."""
    count = real(state["count"])
    var = state["m2"] / count
    flat = negligible(state["m2"], state["count"], state["mean"])
    shape = {"skewness": torch.where(flat, torch.nan, state["m3"] / count / var.pow(1.5))}
    if "m4" in state:
        shape["kurtosis"] = torch.where(flat, torch.nan, state["m4"] / count / var.square() - 3)
    return shape


@dataclass(frozen=True)
class Moments(Statistic):
    """Count, mean, variance and standard deviation of the finite elements; on request also skewness and excess kurtosis.

    The variance is `sum |x - mean|^2 / (count - correction)`. With m_p the mean of `(x - mean)^p`, the skewness is
    `m_3 / m_2^1.5` and the excess kurtosis `m_4 / m_2^2 - 3`, as in `scipy.stats.skew` and `scipy.stats.kurtosis` with their
    default `bias=True`; `correction` does not touch them. Every batch is centred on its own mean before its powers are taken, and
    batches merge about their centres (Chan, Golub and LeVeque 1983 for the second, Pebay 2008, "Formulas for robust, one-pass
    parallel computation of covariances and arbitrary-order statistical moments", for the third and fourth power), all in float64,
    so that in any merge tree relative errors stay within `1e-12 + 10 eps |mean| / std`, eps = 2.2e-16 (of shapes below 1, absolute
    errors). On the CPU, observations of more than 8,192 elements in float32 or less are summed in float32 about their centre, five
    times as fast: the variance is good to 1e-6 of itself then, the mean to 1e-6 of the standard deviation, whatever the mean is;
    `Moments().premap(torch.Tensor.double)` has all digits.

    Args:
        correction: 1 for the variance of the population a sample was drawn from, 0 for that of the elements themselves, as in
            `torch.var`.
        order: the highest power to keep: 2, 3 (adds skewness) or 4 (adds kurtosis too).

    Returns:
        `count` int64; `mean` float64 or complex128, NaN where nothing finite was seen; `var` and `std` float64, NaN where
        `count <= correction`; `skewness` and `kurtosis` float64, NaN where all finite elements are equal but for rounding;
        all in the shape of the kept axes.

    Raises:
        ArgumentError: `correction` is not a finite number from 0 up, or `order` is none of 2, 3, 4.
        DTypeError: complex numbers with an order above 2, or uint64.

    >>> import torch
    >>> moments = Moments("b c -> c")
    >>> result = moments.compute(moments.update({}, torch.tensor([[1.0, 5.0], [3.0, 5.0]])))
    >>> result["mean"], result["var"]
    (tensor([2., 5.], dtype=torch.float64), tensor([2., 0.], dtype=torch.float64))
    >>> shape = Moments(order=4)
    >>> result = shape.compute(shape.update({}, torch.tensor([0.0, 0.0, 0.0, 4.0])))
    >>> round(result["skewness"].item(), 4), round(result["kurtosis"].item(), 4)
    (1.1547, -0.6667)
    """

    correction: float = 1
    order: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.correction, (int, float)) or not 0 <= self.correction < math.inf:
            raise ArgumentError(f"Moments takes a finite correction from 0 up, as torch.var does, and got {self.correction!r}")
        if not isinstance(self.order, int) or self.order not in (2, 3, 4):
            raise ArgumentError(f"Moments takes order 2, 3 or 4 and got {self.order!r}")

    stackable_join: ClassVar[bool] = True

    def observe(self, x: Tensor, axes: tuple[int, ...]) -> State:
        swept = sweep(x, axes) if self.order == 2 else None
        return super().observe(x, axes) if swept is None else {"count": count_of(x, None, axes), **swept}

    def lift(self, x: Tensor, axes: tuple[int, ...]) -> State:
        if self.order > 2 and x.is_complex():
            raise DTypeError(f"{self!r} is not defined for {x.dtype}: complex numbers have a variance and no skewness; use order=2")
        swept = one_loop(x, axes) if self.order == 2 and torch.compiler.is_compiling() else None
        return lift_moments(x, axes, "Moments", self.order)[0] if swept is None else swept

    def join(self, a: State, b: State) -> State:
        return join_moments(a, b)

    def read(self, state: State) -> Result:
        result = read_moments(state, self.correction)
        result["std"] = result["var"].sqrt()
        return {**result, **read_shape(state)} if self.order > 2 else result


@dataclass(frozen=True)
class Summary(Statistic):
    """Nine numbers in one pass: `count`, `mean`, `var`, `min`, `max`, `absmax`, `zeros`, `nan` and `inf`.

    All but `nan` and `inf`, which say how many of either were met, are about the finite elements; `var` is the sample variance
    (`correction=1`). As exact as `Moments`.

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

    stackable_join: ClassVar[bool] = True

    def observe(self, x: Tensor, axes: tuple[int, ...]) -> State:
        swept = sweep(x, axes, ends=True)
        if swept is None:
            return super().observe(x, axes)
        count = count_of(x, None, axes)
        return {"count": count, **swept, "nan": torch.zeros_like(count), "inf": torch.zeros_like(count)}

    def lift(self, x: Tensor, axes: tuple[int, ...]) -> State:
        if torch.compiler.is_compiling() and (swept := one_loop(x, axes, ends=True)) is not None:
            return swept
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

    def lift_masked(self, x: Tensor, mask: Tensor, axes: tuple[int, ...]) -> State:
        state = super().lift_masked(x, mask, axes)
        return {**state, "nan": state["nan"] - (~mask).sum(dim=axes)}

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
