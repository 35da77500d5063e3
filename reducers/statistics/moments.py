"""Mean, variance, skewness and kurtosis, merged by the formulas of Chan and Pebay; and Summary, nine common statistics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from reducers.core.constants import is_number
from reducers.core.counted import COUNTS
from reducers.core.fields import Add, Field, Greatest, Joined, Least, join_fields
from reducers.core.statistic import Statistic
from reducers.errors import ArgumentError, DTypeError
from reducers.kernels.precision import (
    comparable,
    count_along,
    count_if,
    extremes,
    infinite_to_nan,
    is_rounding_error,
    no_sum,
    positive_zero,
    real,
    reduce_finite,
    square_sum,
    wide_float,
)
from reducers.state import Nonfinite, Result, State


def check_correction(correction: float, caller: str) -> None:
    """Raise `ArgumentError` if `correction` is not a finite number from 0 up."""
    if not is_number(correction) or isinstance(correction, bool) or not 0 <= correction < math.inf:
        raise ArgumentError(f"{caller} takes a finite correction from 0 up and got {correction!r}")


def lift_moments(x: Tensor, axes: tuple[int, ...], caller: str, order: int = 2) -> tuple[State, Tensor | None]:
    """Return count, mean and central power sums up to `order` of the finite elements, the number of others, `nonfinite`, and the
    mask of the finite ones (None if all are).
    """
    if x.dtype is torch.uint64:
        raise no_sum(x, caller)
    wide, mask, add = wide_float(x), None, partial(torch.sum, dim=axes, keepdim=True)
    if x.is_floating_point() or x.is_complex():
        filled, mask, added = reduce_finite(wide, add)
    else:  # all are finite, so that extremes keep the dtype of integers
        filled, added = wide, add(wide)
    number = count_along(x, axes)
    if mask is None:
        mean, count = added / number, torch.full_like(added.squeeze(axes), number, dtype=torch.int64)
    else:
        count = mask.sum(dim=axes)
        mean = added / real(count.clamp(min=1)).reshape(added.shape)
    distance = filled - mean if filled is x else filled.sub_(mean)  # a copy may be overwritten
    if mask is not None:
        distance = torch.where(mask, distance, 0.0)
    state = {"count": count, "nonfinite": number - count, "mean": mean.squeeze(axes)}
    if order == 2:
        return {**state, "m2": square_sum(distance, axes)}, mask
    square = distance * distance
    state["m2"] = square.sum(dim=axes)
    state["m3"] = distance.mul_(square).sum(dim=axes)
    if order == 4:
        state["m4"] = square_sum(square, axes)
    return state, mask


def join_moments(a: State, b: State) -> State:
    """Return the merged moments (Chan, Golub and LeVeque 1983, eqs. 1.5a and 1.5b; Pebay 2008 for the third and fourth power)."""
    count = a["count"] + b["count"]
    number = count.clamp(min=1).to(a["m2"].dtype)
    share_b = b["count"] / number
    delta = b["mean"] - a["mean"]
    weighted, m2 = delta * (share_b * a["count"]), a["m2"] + b["m2"]  # weighted first: 0 beside no element, however far its mean
    m2 = m2 + (weighted * delta.conj()).real if delta.is_complex() else torch.addcmul(m2, weighted, delta)
    joined = {"count": count, "mean": torch.addcmul(a["mean"], delta, share_b), "m2": m2}
    if "m3" in a:
        share_a, spread = a["count"] / number, weighted * delta
        lean = 3 * (share_a * b["m2"] - share_b * a["m2"]) + spread * (share_a - share_b)
        joined["m3"] = a["m3"] + b["m3"] + delta * lean
    if "m4" in a:
        squares = 6 * (share_a * share_a * b["m2"] + share_b * share_b * a["m2"]) + spread * (1 - 3 * share_a * share_b)
        joined["m4"] = a["m4"] + b["m4"] + delta * (4 * (share_a * b["m3"] - share_b * a["m3"]) + delta * squares)
    return joined


def read_moments(state: State, correction: float) -> dict[str, Tensor]:
    """Return count, mean and variance."""
    count = state["count"]
    dof = real(count) - correction
    return {
        "count": count,
        "mean": torch.where(count > 0, positive_zero(state["mean"]), torch.nan),
        "var": torch.where(dof > 0, state["m2"] / dof, torch.nan),
    }


def _read_skewness_and_kurtosis(state: State) -> dict[str, Tensor]:
    """Return the skewness, and the kurtosis if the state has fourth powers; NaN if all elements are equal."""
    count = real(state["count"])
    var = state["m2"] / count
    constant = is_rounding_error(state["m2"], state["count"], state["mean"])
    shape = {"skewness": torch.where(constant, torch.nan, state["m3"] / count / var.pow(1.5))}
    if "m4" in state:
        shape["kurtosis"] = torch.where(constant, torch.nan, state["m4"] / count / var.square() - 3)
    return shape


_POWERS = {name: Joined(name) for name in ("mean", "m2", "m3", "m4")}
_FIELDS = {order: {**COUNTS, **dict(list(_POWERS.items())[:order])} for order in (2, 3, 4)}


@dataclass(frozen=True)
class Moments(Statistic):
    """Count, mean, variance and standard deviation of the finite elements; optionally skewness and excess kurtosis.

    The variance is `sum |x - mean|^2 / (count - correction)`. With m_p the mean of `(x - mean)^p`, the skewness is
    `m_3 / m_2^1.5` and the excess kurtosis `m_4 / m_2^2 - 3`, as in `scipy.stats.skew` and `scipy.stats.kurtosis` with their
    default `bias=True`; `correction` does not affect them.

    Each batch is centred on its own mean, and batches are merged about their means in float64: Chan, Golub and LeVeque 1983 for
    the second power, Pebay 2008, "Formulas for robust, one-pass parallel computation of covariances and arbitrary-order
    statistical moments", for the third and fourth. For any merge order, relative errors are below `1e-12 + 10 eps |mean| / std`,
    eps = 2.2e-16 (absolute errors, for shapes below 1). Of big tensors the loops in C++ add distances from an element of each part:
    if that lies a million times as far as the others, the error is below 1e-10. Kernels for GPUs add float32 and narrower
    numbers in float32 within a tile, about its centre: there the relative error of the variance is below 1e-6, and the error of the
    mean below 1e-6 standard deviations, for any mean. Integers are taken as float64, which rounds those beyond 2**53.

    Args:
        correction: 1 for the sample variance, 0 for the population variance, as in `torch.var`.
        order: the highest power to keep: 2, 3 (adds skewness) or 4 (adds kurtosis too).

    Returns:
        `count` int64; `mean` float64 or complex128, NaN if there are no finite elements; `var` and `std` float64, NaN if
        `count <= correction`; `skewness` and `kurtosis` float64, NaN if all finite elements are equal up to rounding; all in
        the shape of the kept axes.

    Raises:
        ArgumentError: `correction` is not a finite number from 0 up, or `order` is not 2, 3 or 4.
        DTypeError: the input is complex and the order above 2, or the input is uint64.

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
        check_correction(self.correction, "Moments")
        if not isinstance(self.order, int) or self.order not in (2, 3, 4):
            raise ArgumentError(f"Moments takes order 2, 3 or 4 and got {self.order!r}")

    @property
    def fields(self) -> Mapping[str, Field]:  # type: ignore[override]
        return _FIELDS[self.order]

    def lift(self, x: Tensor, axes: tuple[int, ...]) -> State:
        if self.order > 2 and x.is_complex():
            raise DTypeError(f"{self!r} is not defined for {x.dtype}: complex numbers have a variance but no skewness; use order=2")
        return lift_moments(x, axes, "Moments", self.order)[0]

    def join(self, a: State, b: State) -> State:
        return join_moments(a, b)

    def read(self, state: State) -> Result:
        result = read_moments(state, self.correction)
        result["std"] = result["var"].sqrt()
        return {**result, **_read_skewness_and_kurtosis(state)} if self.order > 2 else result


@dataclass(frozen=True)
class Summary(Statistic):
    """Nine statistics in one pass: `count`, `mean`, `var`, `min`, `max`, `absmax`, `zeros`, `nan` and `inf`.

    `nan` and `inf` count the NaN and infinite elements; all others describe the finite elements. The accuracy is that of `Moments`.

    Args:
        correction: as in `Moments`: 1 for the sample variance, 0 for the population variance.

    Returns:
        `count`, `zeros`, `nan`, `inf` int64; `mean`, `var` float64; `min`, `max` in the dtype of the input, and so is `absmax` for
        floats, but int64 for integers (int8 cannot hold 128; 2**63 is given as 2**63 - 1); all in the shape of the kept axes;
        NaN if no element is finite.

    Raises:
        ArgumentError: `correction` is not a finite number from 0 up.
        DTypeError: the input is complex, which has no order, or uint64.

    >>> import torch
    >>> summary = Summary()
    >>> result = summary.compute(summary.update({}, torch.tensor([0.0, -4.0, 1.0, float("nan")])))
    >>> {name: value.item() for name, value in result.items()}
    {'count': 3, 'mean': -1.0, 'var': 7.0, 'min': -4.0, 'max': 1.0, 'absmax': 4.0, 'zeros': 1, 'nan': 1, 'inf': 0}
    """

    correction: float = 1

    fields: ClassVar[Mapping[str, Field]] = {
        "count": Add("count"),
        "mean": Joined("mean"),
        "m2": Joined("m2"),
        "min": Least("min"),
        "max": Greatest("max"),
        **{name: Add(name) for name in ("zeros", "nan", "inf")},
    }
    counts_nonfinite: ClassVar[bool] = False  # there are `nan` and `inf`

    def __post_init__(self) -> None:
        super().__post_init__()
        check_correction(self.correction, "Summary")

    def lift(self, x: Tensor, axes: tuple[int, ...]) -> State:
        x = comparable(x, "Summary")
        state, mask = lift_moments(x, axes, "Summary")
        low, high = extremes(x, axes, mask)
        nan = state.pop("nonfinite")
        if mask is None:
            inf = torch.zeros_like(nan)
        else:
            inf = (x.abs() == torch.inf).sum(dim=axes)  # inductor vectorises this, but neither isinf nor isnan
            nan = nan - inf
        return {**state, "min": low, "max": high, "zeros": count_if(torch.eq, x, 0, axes), "nan": nan, "inf": inf}

    def lift_masked(self, x: Tensor, mask: Tensor, axes: tuple[int, ...]) -> State:
        state = super().lift_masked(x, mask, axes)
        return {**state, "nan": state["nan"] - (~mask).sum(dim=axes)}

    def join(self, a: State, b: State) -> State:
        return {**join_moments(a, b), **join_fields(self.fields, a, b)}

    def nonfinite(self, state: State) -> Nonfinite:
        number = (state["nan"] + state["inf"]).sum()
        return Nonfinite(number, state["count"].sum() + number)

    def read(self, state: State) -> Result:
        low, high = infinite_to_nan(state["min"]), infinite_to_nan(state["max"])
        wide_low, wide_high = (low, high) if low.is_floating_point() else (low.to(torch.int64), high.to(torch.int64))
        return {
            **read_moments(state, self.correction),
            "min": low,
            "max": high,
            "absmax": positive_zero(torch.maximum(-_negatable(wide_low), wide_high)),
            "zeros": state["zeros"],
            "nan": state["nan"],
            "inf": state["inf"],
        }


def _negatable(x: Tensor) -> Tensor:
    return x if x.is_floating_point() else x.clamp(min=1 - 2**63)
