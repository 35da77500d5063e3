"""Reducers for the values of an epoch, the statistics that charts are drawn from, and options that lenses share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from recorders.capture.channels import channel_pattern
from recorders.schedule.clock import Phase
from reducers import Collect, Reducer, Summary

__all__ = [
    "QUARTILES",
    "Moment",
    "Names",
    "collected",
    "names_of",
    "pattern_of",
    "phase_of",
    "running",
    "size_of",
    "spread",
    "statistics",
]

Names: TypeAlias = "str | Iterable[str]"
Moment: TypeAlias = Literal["step", "accumulate"]

QUARTILES = ("median", "Q1", "Q3", "Q1-Q3")
"""Aggregations that need every value."""


def running() -> Reducer:
    """A reducer that keeps mean, deviation, minimum and maximum: a state of constant size."""
    return Summary()


def collected() -> Reducer:
    """A reducer that keeps every value, so that median and quartiles are known too."""
    return Collect()


def spread(inplace: bool) -> Reducer:
    """`running()` if `inplace`, else `collected()`."""
    return running() if inplace else collected()


def names_of(parameters: Names) -> tuple[str, ...]:
    """One name of a parameter or several, as a tuple without duplicates."""
    return (parameters,) if isinstance(parameters, str) else tuple(dict.fromkeys(parameters))


def pattern_of(channel_last: bool | None) -> str:
    """The pattern that keeps the channels: those of the layer if it is None."""
    return "channels" if channel_last is None else channel_pattern(-1 if channel_last else 1)


def phase_of(evaluation_from_grad: bool) -> Phase:
    """What tells training from evaluation: whether gradients are on, or the mode of the module."""
    return "grad" if evaluation_from_grad else "module"


def size_of(normalize: bool) -> tuple[str, str]:
    """The name of a size in titles, and its unit."""
    return ("RMS", "root mean square") if normalize else ("Norm", "L2 norm")


def statistics(result: Mapping[str, Any] | Tensor) -> dict[str, Tensor]:
    """The statistics that charts are drawn from, computed from the result of a reducer.

    From `running()` and `collected()`: `mean`, `std`, `min`, `max` and `count` of the finite values, and `nonfinite`, the number of
    others. The deviation is that of the population (divided by n): 0 for a single value. From `collected()` also `median`, `Q1` and
    `Q3`, with linear interpolation as in `numpy.quantile`. From any other reducer: its results that are tensors of one element.

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
    """A quantile of sorted values; `torch.quantile` refuses more than 2**24 values."""
    if not len(ordered):
        return ordered.new_tensor(torch.nan)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return torch.lerp(ordered[below], ordered[above], place - below)
