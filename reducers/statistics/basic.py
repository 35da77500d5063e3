"""Counts, sums, means and extremes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from reducers.core.counted import COUNTS, nothing_to_nan
from reducers.core.fields import Add, Field, Greatest, Least
from reducers.core.statistic import Statistic
from reducers.kernels.precision import (
    comparable,
    counts_of,
    extremes,
    finite,
    infinite_to_nan,
    positive_zero,
    real,
    total,
)
from reducers.state import Result, State


@dataclass(frozen=True)
class Count(Statistic):
    """Number of finite elements.

    Returns:
        int64, in the shape of the kept axes.

    >>> import torch
    >>> count = Count("b c -> c")
    >>> count.compute(count.update({}, torch.tensor([[1.0, float("nan")], [2.0, 3.0]])))
    tensor([2, 1])
    """

    fields: ClassVar[Mapping[str, Field]] = COUNTS

    def lift(self, x: Tensor, axes: tuple[int, ...]) -> State:
        return counts_of(x, finite(x)[1], axes)

    def read(self, state: State) -> Tensor:
        return state["count"]


@dataclass(frozen=True)
class Sum(Statistic):
    """Sum of the finite elements: exact for integers, accumulated in float64 for floats.

    A sum of integers that int64 cannot hold wraps around, as in `torch.sum`; `Mean` does not.

    Returns:
        int64, float64 or complex128, in the shape of the kept axes; NaN if there are elements and none is finite.

    >>> import torch
    >>> total = Sum("b c -> c")
    >>> total.compute(total.update({}, torch.tensor([[1.0, 2.0], [3.0, 4.0]])))
    tensor([4., 6.], dtype=torch.float64)
    """

    fields: ClassVar[Mapping[str, Field]] = {**COUNTS, "sum": Add("exact")}

    def lift(self, x: Tensor, axes: tuple[int, ...]) -> State:
        _, mask, added = total(x, axes, "Sum", wraps=True)
        return {**counts_of(x, mask, axes), "sum": added.squeeze(axes)}

    def read(self, state: State) -> Tensor:
        return positive_zero(state["sum"])

    def compute(self, state: State) -> Result:
        return nothing_to_nan(super().compute(state), state)


@dataclass(frozen=True)
class Mean(Statistic):
    """Arithmetic mean of all finite elements; each element has the same weight, in batches of any size.

    The state holds the count and the sum: an exact int64 of integers of up to 16 bits, and float64 of all others. So the sum of
    int32 and int64 is exact up to 2**53, and rounded as float64 beyond. Kernels for GPUs add float32 and narrower floats in float32
    within a tile: there the error of the mean is below 1e-6 of the mean magnitude.

    Returns:
        float64 or complex128, in the shape of the kept axes; NaN if there are no finite elements.

    >>> import torch
    >>> mean = Mean("b c -> c")
    >>> state = mean.update({}, torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    >>> mean.compute(mean.update(state, torch.tensor([[5.0, 9.0]])))
    tensor([3., 5.], dtype=torch.float64)
    """

    fields: ClassVar[Mapping[str, Field]] = {**COUNTS, "sum": Add("sum")}
    interpolation: ClassVar[str] = "linear"

    def lift(self, x: Tensor, axes: tuple[int, ...]) -> State:
        _, mask, added = total(x, axes, "Mean")
        return {**counts_of(x, mask, axes), "sum": added.squeeze(axes)}

    def read(self, state: State) -> Tensor:
        return torch.where(state["count"] > 0, positive_zero(state["sum"] / real(state["count"])), torch.nan)


@dataclass(frozen=True)
class Min(Statistic):
    """Smallest finite element.

    Zero has no sign in the result: it is 0.0, in any order.

    Returns:
        The dtype of the input (float8 as float32, uint16 and uint32 as signed integers; float64 if integers meet floats), in the
        shape of the kept axes; NaN, for floats, if there are no finite elements.

    Raises:
        DTypeError: the input is complex, which has no order, or uint64.

    >>> import torch
    >>> low = Min("b c -> c")
    >>> low.compute(low.update({}, torch.tensor([[1.0, float("nan")], [-2.0, 3.0]])))
    tensor([-2.,  3.])
    """

    fields: ClassVar[Mapping[str, Field]] = {**COUNTS, "min": Least("min")}

    def lift(self, x: Tensor, axes: tuple[int, ...]) -> State:
        x, mask = finite(comparable(x, "Min"))
        usable = x if mask is None else torch.where(mask, x, torch.inf)
        return {**counts_of(x, mask, axes), "min": usable.amin(dim=axes)}

    def read(self, state: State) -> Tensor:
        return infinite_to_nan(state["min"])


@dataclass(frozen=True)
class Max(Statistic):
    """Largest finite element.

    Zero has no sign in the result: it is 0.0, in any order.

    Returns:
        The dtype of the input (float8 as float32, uint16 and uint32 as signed integers; float64 if integers meet floats), in the
        shape of the kept axes; NaN, for floats, if there are no finite elements.

    Raises:
        DTypeError: the input is complex, which has no order, or uint64.

    >>> import torch
    >>> top = Max("b c -> c")
    >>> top.compute(top.update({}, torch.tensor([[1.0, float("inf")], [-2.0, 3.0]])))
    tensor([1., 3.])
    """

    fields: ClassVar[Mapping[str, Field]] = {**COUNTS, "max": Greatest("max")}

    def lift(self, x: Tensor, axes: tuple[int, ...]) -> State:
        x, mask = finite(comparable(x, "Max"))
        usable = x if mask is None else torch.where(mask, x, -torch.inf)
        return {**counts_of(x, mask, axes), "max": usable.amax(dim=axes)}

    def read(self, state: State) -> Tensor:
        return infinite_to_nan(state["max"])


@dataclass(frozen=True)
class Extremes(Statistic):
    """Smallest and largest finite element, computed together.

    Zero has no sign in the result: it is 0.0, in any order.

    Returns:
        `min` and `max`: the dtype of the input (float8 as float32, uint16 and uint32 as signed integers; float64 if integers meet
        floats), in the shape of the kept axes; NaN, for floats, if there are no finite elements.

    Raises:
        DTypeError: the input is complex, which has no order, or uint64.

    >>> import torch
    >>> extremes = Extremes("b c -> c")
    >>> result = extremes.compute(extremes.update({}, torch.tensor([[1.0, float("nan")], [-2.0, 3.0]])))
    >>> result["min"], result["max"]
    (tensor([-2.,  3.]), tensor([1., 3.]))
    """

    fields: ClassVar[Mapping[str, Field]] = {**COUNTS, "min": Least("min"), "max": Greatest("max")}

    def lift(self, x: Tensor, axes: tuple[int, ...]) -> State:
        x, mask = finite(comparable(x, "Extremes"))
        low, high = extremes(x, axes, mask)
        return {**counts_of(x, mask, axes), "min": low, "max": high}

    def read(self, state: State) -> Result:
        return {name: infinite_to_nan(state[name]) for name in ("min", "max")}
