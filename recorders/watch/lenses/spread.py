"""Reducers that keep how values spread over an epoch, and the statistics that charts are drawn from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from reducers import Collect, Reducer, Summary

__all__ = ["QUARTILES", "collected", "running", "spread", "statistics"]

QUARTILES = ("median", "Q1", "Q3", "Q1-Q3")
"""Aggregations that need every value."""


def running() -> Reducer:
    """Keeps mean, deviation, least and greatest: a few numbers, however many values come."""
    return Summary()


def collected() -> Reducer:
    """Keeps every value, so that the median and the quartiles are known too."""
    return Collect()


def spread(inplace: bool) -> Reducer:
    """`running()` where `inplace`, else `collected()`."""
    return running() if inplace else collected()


def statistics(result: Mapping[str, Any] | Tensor) -> dict[str, Tensor]:
    """What `running()` or `collected()` computed, as the statistics that charts are drawn from.

    `mean`, `std`, `min`, `max` and `count` are about the finite values, `nonfinite` says how many others there were. The deviation
    is that of the values themselves (divided by n), so it is 0 and not undefined where there was one. `collected()` gives `median`,
    `Q1` and `Q3` besides, linearly interpolated as `numpy.quantile` does. Of what any other reducer computed, the tensors of one
    element are taken as they are.

    >>> reducer = collected()
    >>> state = reducer.update({}, torch.tensor([4.0, 1.0, 2.0, 3.0, float("nan")]))
    >>> {name: value.item() for name, value in statistics(reducer.compute(state)).items() if name != "std"}
    {'mean': 2.5, 'min': 1.0, 'max': 4.0, 'count': 4, 'nonfinite': 1, 'median': 2.5, 'Q1': 1.75, 'Q3': 3.25}
    """
    if isinstance(result, Tensor):
        values = result.detach().cpu().ravel().double()
        summary = running()
        ordered = values[torch.isfinite(values)].sort().values
        quartiles = {name: _quantile(ordered, share) for name, share in (("median", 0.5), ("Q1", 0.25), ("Q3", 0.75))}
        return {**statistics(summary.compute(summary.update({}, values))), **quartiles}
    if not {"count", "mean", "var", "min", "max", "nan", "inf"} <= set(result):
        return {name: value for name, value in result.items() if isinstance(value, Tensor) and value.numel() == 1}
    count, var = result["count"], result["var"]
    # In the dtype of the variance: PyTorch divides int64 by int64 in float32.
    share = (count - 1).to(var.dtype) / count.clamp(min=1).to(var.dtype)
    alone = torch.where(count == 1, torch.zeros_like(var), torch.nan)
    return {
        "mean": result["mean"],
        "std": torch.where(count > 1, var * share, alone).sqrt(),
        "min": result["min"],
        "max": result["max"],
        "count": count,
        "nonfinite": result["nan"] + result["inf"],
    }


def _quantile(ordered: Tensor, share: float) -> Tensor:
    """Linear interpolation between neighbours; `torch.quantile` refuses more than 2**24 values."""
    if not len(ordered):
        return ordered.new_tensor(torch.nan)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return torch.lerp(ordered[below], ordered[above], place - below)
