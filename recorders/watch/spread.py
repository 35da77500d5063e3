"""Spread: how values are spread, read from the results of whatever reducer recorded them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from reducers import FirstNonfinite, Norm, Product, Quantile, Reducer

MOMENTS = frozenset({"count", "mean", "var"})
_SUMMARY = MOMENTS | {"min", "max", "nan", "inf"}
ACTIVITY = frozenset({"rate", "dead"})
IDLE = frozenset({"idle", "observations", "elements"})
_EXTREMES = frozenset({"min", "max"})
_QUARTERS = (0.0, 0.25, 0.75, 1.0)
_Kind = TypeVar("_Kind", bound=Reducer)


@dataclass(frozen=True)
class Spread:
    """The result of a `Summary`, `Moments`, `Norm` or `Quantile`, with all units pooled; NaN if that does not tell.

    Attributes:
        count: the number of finite values.
        mean, std, low, high: statistics of the finite values.
        nonfinite: the number of values that were NaN or infinite.
        observations: the number of tensors observed.
        size: the L2 norm of all values.
        quartile: the larger magnitude of the two quartiles, of the typical unit: half of the values, or more, are no larger.
    """

    count: int
    mean: float
    std: float
    low: float
    high: float
    nonfinite: float
    observations: int
    size: float = math.nan
    quartile: float = math.nan

    @classmethod
    def of(cls, summary: Mapping[str, Tensor], observations: int) -> Spread:
        """Pools the units of a `Summary` or of `Moments`: adds the variance between their means to the variance within them.

        >>> import torch
        >>> from reducers import Summary
        >>> channels = Summary("b c -> c")
        >>> spread = Spread.of(channels.compute(channels.update({}, torch.tensor([[0.0, 4.0], [2.0, 6.0]]))), observations=1)
        >>> spread.mean, round(spread.std, 3), spread.low, spread.high
        (3.0, 2.582, 0.0, 6.0)
        """
        number = {key: values.double().ravel() for key, values in summary.items() if key in _SUMMARY}
        seen, whole = number["count"] > 0, number.keys() >= _SUMMARY
        count, nonfinite = int(number["count"].sum()), int((number["nan"] + number["inf"]).sum()) if whole else math.nan
        if not count:
            return cls(0, math.nan, math.nan, math.nan, math.nan, nonfinite, observations)
        n, means = number["count"][seen], number["mean"][seen]
        mean = (n * means).sum() / count
        within = (number["var"][seen].nan_to_num() * (n - 1)).sum()
        std = ((within + (n * (means - mean).square()).sum()) / max(count - 1, 1)).sqrt()
        low, high = (number["min"][seen].min().item(), number["max"][seen].max().item()) if whole else (math.nan, math.nan)
        size = (n * means.square()).sum() + within
        return cls(count, mean.item(), std.item(), low, high, nonfinite, observations, size.sqrt().item())

    @property
    def rms(self) -> float:
        """Root mean square of the finite values."""
        return self.size / math.sqrt(self.count) if self.count else math.nan

    @property
    def norm(self) -> float:
        """Root mean square of the norms of the observations."""
        return self.size / math.sqrt(self.observations) if self.observations else math.nan


def spread_of(reducer: Reducer | None, results: list[Any], samples: int) -> Spread | None:
    """The results of one monitor as one; None if they tell nothing of the size of values."""
    moments = [one for result in results if (one := find(result, _SUMMARY) or find(result, MOMENTS)) is not None]
    norms = [norm for part, norm in _of_kind(reducer, results, Norm) if part.p == 2 and not part.normalize]
    found: Spread | None = None
    if moments:
        keys = set(_SUMMARY).intersection(*moments)
        found = Spread.of({key: torch.cat([one[key].ravel() for one in moments]) for key in keys}, samples)
    elif norms:
        found = replace(_nothing(samples), size=torch.cat([norm.double().ravel() for norm in norms]).norm().item())
    ends = [one for result in results if (one := find(result, _EXTREMES)) is not None]
    if ends and (found is None or math.isnan(found.high)):
        low, high = min(one["min"].min().item() for one in ends), max(one["max"].max().item() for one in ends)
        found = replace(found or _nothing(samples), low=low, high=high)
    for part, values in _of_kind(reducer, results, Quantile):
        shares = part.q if isinstance(part.q, tuple) else ()
        if set(_QUARTERS) <= set(shares):
            low, first, third, high = (values[shares.index(share)] for share in _QUARTERS)
            quartile = torch.maximum(first.abs(), third.abs()).nanmedian().item()
            found = replace(found or _nothing(samples), low=low.min().item(), high=high.max().item(), quartile=quartile)
    return found


def zero_units(reducer: Reducer | None, result: Any) -> Tensor | None:
    """Whether each unit was always zero; None if the result does not tell."""
    least: Tensor | None = None
    greatest: Tensor | None = None
    if (found := find(result, _EXTREMES)) is not None:
        least, greatest = found["min"], found["max"]
    elif (found := find(result, MOMENTS)) is not None:
        least, greatest = found["mean"], found["var"].nan_to_num()
    for _, norm in _of_kind(reducer, [result], Norm):
        least = greatest = norm
    for part, values in _of_kind(reducer, [result], Quantile):
        if isinstance(part.q, tuple) and {0.0, 1.0} <= {*part.q}:
            least, greatest = values[part.q.index(0.0)], values[part.q.index(1.0)]
    return None if least is None or greatest is None else (least == 0) & (greatest == 0)


def _nothing(samples: int) -> Spread:
    return Spread(0, math.nan, math.nan, math.nan, math.nan, math.nan, samples)


def _of_kind(reducer: Reducer | None, results: list[Any], kind: type[_Kind]) -> Iterator[tuple[_Kind, Any]]:
    """Each reducer of exactly this kind, which may be part of a `Product`, with each of its results."""
    parts = reducer.parts if isinstance(reducer, Product) else [("", reducer)]
    for name, part in parts:
        if type(part) is kind:
            yield from ((part, result[name] if name else result) for result in results if not name or name in result)


def first_nonfinite(reducer: Reducer | None, results: list[Any]) -> int | None:
    """The least result of a `FirstNonfinite`, which may be part of a `Product`; -1 if all was finite, None if there is none."""
    firsts = [int(place) for _, first in _of_kind(reducer, results, FirstNonfinite) for place in first.reshape(-1).tolist()]
    return min((place for place in firsts if place >= 0), default=-1) if firsts else None


def steps(ratio: Any) -> Tensor:
    """The ratios of all steps, or their mean if only that was kept."""
    if isinstance(ratio, Tensor):
        return ratio.ravel()
    mean: Tensor = ratio["mean"]
    return mean.ravel()


def find(result: Any, keys: frozenset[str]) -> Mapping[str, Tensor] | None:
    """The first mapping in a nested result that has tensors of all the keys."""
    return next((found for found in _mappings(result) if all(isinstance(found.get(key), Tensor) for key in keys)), None)


def _mappings(result: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(result, Mapping):
        yield result
        for inner in result.values():
            yield from _mappings(inner)
