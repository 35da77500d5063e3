"""Counts, sums, means, extremes and norms."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from reducers.core.reducer import Reduction
from reducers.core.statistic import Statistic
from reducers.errors import ArgumentError
from reducers.kernels.cpu import all_finite, fast_sum, min_max, sum_squares
from reducers.kernels.precision import (
    abs_squared,
    comparable,
    count_of,
    extremes,
    finite,
    infinite_to_nan,
    real,
    real_or_complex,
    reduce_finite,
    total,
    widen,
)
from reducers.state import Result, State

__all__ = ["Count", "Extremes", "Max", "Mean", "Min", "Norm", "Sum"]


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

    stackable_join: ClassVar[bool] = True
    reductions: ClassVar[Mapping[str, Reduction]] = {"count": "sum"}

    def observe(self, x: Tensor, axes: tuple[int, ...]) -> State:
        return {"count": count_of(x, None, axes)} if all_finite(x) else super().observe(x, axes)

    def lift(self, x: Tensor, axes: tuple[int, ...]) -> State:
        return {"count": count_of(x, finite(x)[1], axes)}

    def join(self, a: State, b: State) -> State:
        return {"count": a["count"] + b["count"]}

    def read(self, state: State) -> Tensor:
        return state["count"]


@dataclass(frozen=True)
class Sum(Statistic):
    """Sum of the finite elements: exact for integers, accumulated in float64 for floats.

    Returns:
        int64, float64 or complex128, in the shape of the kept axes.

    >>> import torch
    >>> total = Sum("b c -> c")
    >>> total.compute(total.update({}, torch.tensor([[1.0, 2.0], [3.0, 4.0]])))
    tensor([4., 6.], dtype=torch.float64)
    """

    stackable_join: ClassVar[bool] = True
    reductions: ClassVar[Mapping[str, Reduction]] = {"sum": "sum"}

    def observe(self, x: Tensor, axes: tuple[int, ...]) -> State:
        added = fast_sum(x, axes, exact=True)
        return super().observe(x, axes) if added is None else {"sum": added}

    def lift(self, x: Tensor, axes: tuple[int, ...]) -> State:
        return {"sum": total(x, axes, "Sum")[2].squeeze(axes)}

    def join(self, a: State, b: State) -> State:
        return {"sum": a["sum"] + b["sum"]}

    def read(self, state: State) -> Tensor:
        return state["sum"]


@dataclass(frozen=True)
class Mean(Statistic):
    """Arithmetic mean of all finite elements; each element has the same weight, in batches of any size.

    The state holds the sum, in float64 and exact for integers, and the count. Big float32, float16 and bfloat16 observations on
    the CPU are summed pairwise in float32, a million elements at a time, and these sums in float64. The error of the mean is below
    1e-6 of the mean magnitude (4e-7 measured). `Mean().premap(torch.Tensor.double)` accumulates in float64 throughout.

    Returns:
        float64 or complex128, in the shape of the kept axes; NaN if there are no finite elements.

    >>> import torch
    >>> mean = Mean("b c -> c")
    >>> state = mean.update({}, torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    >>> mean.compute(mean.update(state, torch.tensor([[5.0, 9.0]])))
    tensor([3., 5.], dtype=torch.float64)
    """

    stackable_join: ClassVar[bool] = True
    reductions: ClassVar[Mapping[str, Reduction]] = {"count": "sum", "sum": "sum"}
    interpolation: ClassVar[str] = "linear"

    def observe(self, x: Tensor, axes: tuple[int, ...]) -> State:
        added = fast_sum(x, axes)
        return super().observe(x, axes) if added is None else {"count": count_of(x, None, axes), "sum": added}

    def lift(self, x: Tensor, axes: tuple[int, ...]) -> State:
        _, mask, added = total(x, axes, "Mean")
        return {"count": count_of(x, mask, axes), "sum": added.squeeze(axes)}

    def join(self, a: State, b: State) -> State:
        return {"count": a["count"] + b["count"], "sum": a["sum"] + b["sum"]}

    def read(self, state: State) -> Tensor:
        return torch.where(state["count"] > 0, state["sum"] / real(state["count"]), torch.nan)


@dataclass(frozen=True)
class Min(Statistic):
    """Smallest finite element.

    Returns:
        The dtype of the input (float8 as float32, uint16 and uint32 as signed integers), in the shape of the kept axes; NaN, for
        floats, if there are no finite elements.

    Raises:
        DTypeError: the input is complex, which has no order, or uint64.

    >>> import torch
    >>> low = Min("b c -> c")
    >>> low.compute(low.update({}, torch.tensor([[1.0, float("nan")], [-2.0, 3.0]])))
    tensor([-2.,  3.])
    """

    stackable_join: ClassVar[bool] = True
    reductions: ClassVar[Mapping[str, Reduction]] = {"min": "min"}

    def observe(self, x: Tensor, axes: tuple[int, ...]) -> State:
        return min_max(x, axes, "min") or super().observe(x, axes)

    def lift(self, x: Tensor, axes: tuple[int, ...]) -> State:
        return {"min": reduce_finite(comparable(x, "Min"), lambda part: part.amin(dim=axes), torch.inf)[2]}

    def join(self, a: State, b: State) -> State:
        return {"min": torch.minimum(a["min"], b["min"])}

    def read(self, state: State) -> Tensor:
        return infinite_to_nan(state["min"])


@dataclass(frozen=True)
class Max(Statistic):
    """Largest finite element.

    Returns:
        The dtype of the input (float8 as float32, uint16 and uint32 as signed integers), in the shape of the kept axes; NaN, for
        floats, if there are no finite elements.

    Raises:
        DTypeError: the input is complex, which has no order, or uint64.

    >>> import torch
    >>> top = Max("b c -> c")
    >>> top.compute(top.update({}, torch.tensor([[1.0, float("inf")], [-2.0, 3.0]])))
    tensor([1., 3.])
    """

    stackable_join: ClassVar[bool] = True
    reductions: ClassVar[Mapping[str, Reduction]] = {"max": "max"}

    def observe(self, x: Tensor, axes: tuple[int, ...]) -> State:
        return min_max(x, axes, "max") or super().observe(x, axes)

    def lift(self, x: Tensor, axes: tuple[int, ...]) -> State:
        return {"max": reduce_finite(comparable(x, "Max"), lambda part: part.amax(dim=axes), -torch.inf)[2]}

    def join(self, a: State, b: State) -> State:
        return {"max": torch.maximum(a["max"], b["max"])}

    def read(self, state: State) -> Tensor:
        return infinite_to_nan(state["max"])


@dataclass(frozen=True)
class Extremes(Statistic):
    """Smallest and largest finite element, computed together.

    Returns:
        `min` and `max`: the dtype of the input (float8 as float32, uint16 and uint32 as signed integers), in the shape of the
        kept axes; NaN, for floats, if there are no finite elements.

    Raises:
        DTypeError: the input is complex, which has no order, or uint64.

    >>> import torch
    >>> extremes = Extremes("b c -> c")
    >>> result = extremes.compute(extremes.update({}, torch.tensor([[1.0, float("nan")], [-2.0, 3.0]])))
    >>> result["min"], result["max"]
    (tensor([-2.,  3.]), tensor([1., 3.]))
    """

    stackable_join: ClassVar[bool] = True
    reductions: ClassVar[Mapping[str, Reduction]] = {"min": "min", "max": "max"}

    def observe(self, x: Tensor, axes: tuple[int, ...]) -> State:
        return min_max(x, axes, "min", "max") or super().observe(x, axes)

    def lift(self, x: Tensor, axes: tuple[int, ...]) -> State:
        x, mask = finite(comparable(x, "Extremes"))
        low, high = extremes(x, axes, mask)
        return {"min": low, "max": high}

    def join(self, a: State, b: State) -> State:
        return {"min": torch.minimum(a["min"], b["min"]), "max": torch.maximum(a["max"], b["max"])}

    def read(self, state: State) -> Result:
        return {name: infinite_to_nan(state[name]) for name in ("min", "max")}


@dataclass(frozen=True)
class Norm(Statistic):
    """Vector norm of all finite elements: `(sum |x|^p)^(1/p)`.

    Args:
        p: order from 0 to infinity: 0 counts the non-zero elements, infinity gives the largest magnitude.
        normalize: use the mean of `|x|^p` instead of the sum, so that the result does not depend on the number of elements:
            p=2 gives the root mean square, p=0 the share of non-zero elements; p=inf is unchanged.

    Returns:
        float64, in the shape of the kept axes, as `torch.linalg.vector_norm` of all elements; with `normalize`, NaN if there are
        no finite elements.

    Raises:
        ArgumentError: `p` is negative or not a number.

    >>> import torch
    >>> norm, rms = Norm(), Norm(normalize=True)
    >>> norm.compute(norm.update(norm.update({}, torch.tensor([3.0])), torch.tensor([4.0])))
    tensor(5., dtype=torch.float64)
    >>> rms.compute(rms.update({}, torch.tensor([2.0, -2.0])))
    tensor(2., dtype=torch.float64)
    """

    stackable_join: ClassVar[bool] = True
    reductions: ClassVar[Mapping[str, Reduction]] = {"count": "sum", "power": "sum"}

    p: float = 2.0
    normalize: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.p, (int, float)) or not self.p >= 0:
            raise ArgumentError(f"Norm takes an order p from 0 to infinity and got {self.p!r}")

    def observe(self, x: Tensor, axes: tuple[int, ...]) -> State:
        power = self._fast_power(x, axes)
        return super().observe(x, axes) if power is None else {"count": count_of(x, None, axes), "power": power}

    def _fast_power(self, x: Tensor, axes: tuple[int, ...]) -> Tensor | None:
        if self.p == 2:
            return sum_squares(x, axes)
        if self.p == 1:
            return fast_sum(x, axes, magnitudes=True)
        if self.p == math.inf and x.is_floating_point():  # the magnitude of int8 -128 overflows
            both = min_max(x, axes, "min", "max")
            return None if both is None else torch.maximum(-both["min"], both["max"]).double()
        return None

    def lift(self, x: Tensor, axes: tuple[int, ...]) -> State:
        wide = real_or_complex(widen(x, "Norm"))
        if self.p == 0:  # a NaN does not show in this power, so reduce_finite would miss it
            wide, mask = finite(wide)
            power = real((wide != 0).sum(dim=axes))
        else:
            _, mask, power = reduce_finite(wide, lambda part: self._power(part, axes))
        return {"count": count_of(x, mask, axes), "power": power}

    def _power(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        if self.p == 2:
            return abs_squared(x).sum(dim=axes)
        if self.p == math.inf:
            return x.abs().amax(dim=axes)
        return (x.abs() if self.p == 1 else x.abs().pow(self.p)).sum(dim=axes)

    def join(self, a: State, b: State) -> State:
        join = torch.maximum if self.p == math.inf else torch.add
        return {"count": a["count"] + b["count"], "power": join(a["power"], b["power"])}

    def reductions_of(self, state: State) -> Mapping[str, Reduction]:
        ops = super().reductions_of(state)
        return {**ops, "power": "max"} if ops and self.p == math.inf else ops

    def read(self, state: State) -> Tensor:
        power = state["power"]
        if self.normalize:
            power = torch.where(state["count"] > 0, power if self.p == math.inf else power / real(state["count"]), torch.nan)
        return power if self.p in (0, 1, math.inf) else power.pow(1 / self.p)
