"""Counts, sums, means and extremes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from reducers.core import State, Statistic
from reducers.numeric import count_of, finite, widen

__all__ = ["Count", "Mean", "Sum"]


@dataclass(frozen=True)
class Count(Statistic):
    """How many finite elements were seen.

    Returns:
        int64, in the shape of the kept axes.

    >>> import torch
    >>> count = Count("b c -> c")
    >>> count.compute(count.update({}, torch.tensor([[1.0, float("nan")], [2.0, 3.0]])))
    tensor([2, 1])
    """

    def lift(self, x: Tensor, axes: tuple[int, ...]) -> State:
        return {"count": count_of(x, finite(x)[1], axes)}

    def join(self, a: State, b: State) -> State:
        return {"count": a["count"] + b["count"]}

    def read(self, state: State) -> Tensor:
        return state["count"]


@dataclass(frozen=True)
class Sum(Statistic):
    """Sum of the finite elements: exact for integers, in float64 for floats.

    Returns:
        int64, float64 or complex128, in the shape of the kept axes.

    >>> import torch
    >>> total = Sum("b c -> c")
    >>> total.compute(total.update({}, torch.tensor([[1.0, 2.0], [3.0, 4.0]])))
    tensor([4., 6.], dtype=torch.float64)
    """

    def lift(self, x: Tensor, axes: tuple[int, ...]) -> State:
        return {"sum": finite(widen(x, "Sum"))[0].sum(dim=axes)}

    def join(self, a: State, b: State) -> State:
        return {"sum": a["sum"] + b["sum"]}

    def read(self, state: State) -> Tensor:
        return state["sum"]


@dataclass(frozen=True)
class Mean(Statistic):
    """Arithmetic mean of the finite elements, weighted by count across batches, so a smaller last batch is no special case.

    Means merge as `mean_a + (mean_b - mean_a) * n_b / (n_a + n_b)` (Chan, Golub and LeVeque 1983, eq. 1.5a).

    Returns:
        float64 or complex128, in the shape of the kept axes; NaN where nothing finite was seen.

    >>> import torch
    >>> mean = Mean("b c -> c")
    >>> state = mean.update({}, torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    >>> mean.compute(mean.update(state, torch.tensor([[5.0, 9.0]])))
    tensor([3., 5.], dtype=torch.float64)
    """

    def lift(self, x: Tensor, axes: tuple[int, ...]) -> State:
        wide, mask = finite(widen(x, "Mean"))
        count = count_of(x, mask, axes)
        return {"count": count, "mean": wide.sum(dim=axes) / count.clamp(min=1).double()}

    def join(self, a: State, b: State) -> State:
        count = a["count"] + b["count"]
        share = b["count"].double() / count.clamp(min=1).double()
        return {"count": count, "mean": a["mean"] + (b["mean"] - a["mean"]) * share}

    def read(self, state: State) -> Tensor:
        return torch.where(state["count"] > 0, state["mean"], torch.nan)
