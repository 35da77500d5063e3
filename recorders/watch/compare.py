"""Comparison of two recordings or timelines: what changed, largest change first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from recorders.errors import SelectionError
from recorders.recorder.recorder import Recorder
from recorders.recordings.recording import Recording
from recorders.recordings.shown import flat_numbers, listed
from recorders.watch.timeline import Timeline

__all__ = ["Change", "Comparison", "compare", "results_by_name"]

_PLACES = frozenset({"mean", "median", "Q1", "Q3"})
"""Statistics whose change is measured in standard deviations, if these are known. Not extremes, which differ by chance."""

_FAULTS = frozenset({"nan", "inf", "nonfinite"})
_SIZES = frozenset({"count", "samples"})
"""Statistics that tell how much was recorded, not what."""


@dataclass(frozen=True)
class Change:
    """How one statistic differs between two runs.

    Attributes:
        name: the subrecorder, with the leaf if there are several; in a timeline, the name of the row.
        statistic: the path in its result; "" if the result is one tensor.
        index: the element that differs most, in a result with several; `()` if it has one.
        first, second: its values.
        score: the size of the change: of means and quartiles in standard deviations, if the result has them; else the
            logarithm of the ratio, or, if the sign changes, the difference divided by the larger of the two. Infinite if one
            is not finite, or if non-finite values were seen in one run only.
    """

    name: str
    statistic: str
    index: tuple[int, ...]
    first: float
    second: float
    score: float

    def __str__(self) -> str:
        place = f"[{', '.join(map(str, self.index))}]" if self.index else ""
        what = f"{self.name or '(net)'}{f' {self.statistic}' if self.statistic else ''}{place}"
        return f"{what}: {self.first:.4g} -> {self.second:.4g} ({self.score:.2g})"


@dataclass(frozen=True)
class Comparison:
    """What changed between two runs.

    Attributes:
        changes: one for each statistic that both have, largest first; those of about the same size (within 0.1) in network order.
        only_first, only_second: names that only one of the two has.
    """

    changes: tuple[Change, ...]
    only_first: tuple[str, ...] = ()
    only_second: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [str(change) for change in self.changes if change.score][:20] or ["no difference"]
        for which, names in (("first", self.only_first), ("second", self.only_second)):
            if names:
                lines.append(f"only in the {which}: {listed(names)}")
        return "\n".join(lines)


def compare(
    first: Recorder | Recording | Timeline, second: Recorder | Recording | Timeline, *, tick: int | None = None
) -> Comparison:
    """Compares two runs, statistic by statistic.

    Args:
        first, second: two recordings (or recorders), or two timelines.
        tick: which tick of the timelines to compare; None for the last that both have.

    Raises:
        TypeError: one is a timeline and the other is not.
        SelectionError: the timelines have no tick in common, or not this one.

    >>> from recorders import CallMonitor
    >>> from reducers import Summary
    >>> runs = []
    >>> for shift in (0.0, 3.0):
    ...     recorder = Recorder(loss=CallMonitor(Summary()), accuracy=CallMonitor(Summary()))
    ...     for value in (1.0, 2.0, 3.0):
    ...         _ = recorder.push("loss", value + shift).push("accuracy", value)
    ...     runs.append(recorder)
    >>> print(compare(*runs).changes[0])
    loss mean: 2 -> 5 (3)
    """
    if isinstance(first, Timeline) and isinstance(second, Timeline):
        tick = _common_tick(first, second, tick)
        a, b = ({name: flat_numbers(row) for name, row in one.at(tick).items()} for one in (first, second))
    elif isinstance(first, Timeline) or isinstance(second, Timeline):
        raise TypeError("compare needs two recordings or two timelines; got one of each")
    else:
        a, b = results_by_name(first), results_by_name(second)
    both = [(order, name) for order, name in enumerate(a) if name in b]
    found = [(order, change) for order, name in both for change in _changes(name, a[name], b[name])]
    found.sort(key=lambda item: (-round(item[1].score, 1), item[0]))
    only = (tuple(name for name in one if name not in other) for one, other in ((a, b), (b, a)))
    return Comparison(tuple(change for _, change in found), *only)


def results_by_name(recorded: Recorder | Recording) -> dict[str, dict[str, Tensor]]:
    """The results of a recording as float64 tensors, by subrecorder and leaf (`name[leaf]`), and by path in the result."""
    recording = recorded.snapshot() if isinstance(recorded, Recorder) else recorded
    found: dict[str, dict[str, Tensor]] = {}
    for name, part in recording.items():
        for leaf, result in part.leaves().items():
            if tensors := flat_numbers(result):
                found[f"{name}[{leaf}]" if leaf else name] = tensors
    return found


def _common_tick(first: Timeline, second: Timeline, tick: int | None) -> int:
    common = set(first.ticks()) & set(second.ticks())
    if tick is None and common:
        return max(common)
    if tick is None or tick not in common:
        wanted = "a tick in common" if tick is None else f"tick {tick} in both"
        raise SelectionError(f"{first.path} and {second.path} have not {wanted}; the first has {first.ticks()[-20:]}")
    return tick


def _changes(name: str, a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> list[Change]:
    changes = []
    for statistic, here in a.items():
        *_, kind = statistic.split(".")
        there = b.get(statistic, here.new_empty(0))
        if here.shape != there.shape or kind in _SIZES:
            continue
        scores = _scores(statistic, kind, a, b)
        worst = int(scores.argmax())
        index = tuple(int(place) for place in torch.unravel_index(torch.tensor(worst), here.shape)) if here.ndim else ()
        first, second = here.reshape(-1)[worst].item(), there.reshape(-1)[worst].item()
        changes.append(Change(name, statistic, index, first, second, scores[worst].item()))
    return sorted(changes, key=lambda change: -change.score)


def _scores(statistic: str, kind: str, a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tensor:
    """The size of the change of each element."""
    here, there = a[statistic].reshape(-1), b[statistic].reshape(-1)
    difference = (there - here).abs()
    if kind in _FAULTS:
        return torch.where((here > 0) != (there > 0), torch.inf, 0.0)
    larger = torch.maximum(here.abs(), there.abs())
    ratio = torch.where(here * there > 0, (there / here).abs().log().abs(), difference / larger)
    scale = _deviation(statistic, kind, a, b) if kind in _PLACES else None
    scores = ratio if scale is None else torch.where(scale > 0, difference / scale, ratio)
    scores = torch.where((here == there) | (here.isnan() & there.isnan()), 0.0, scores)
    return torch.where(here.isfinite() != there.isfinite(), torch.inf, scores.nan_to_num(nan=torch.inf))


def _deviation(statistic: str, kind: str, a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tensor | None:
    """The standard deviation beside a statistic, pooled over both; None if there is none of the same shape."""
    beside = statistic.removesuffix(kind)
    for name, power in (("var", 1), ("std", 2)):
        one, other = a.get(beside + name), b.get(beside + name)
        if one is not None and other is not None and one.shape == other.shape == a[statistic].shape:
            return ((one**power + other**power) / 2).sqrt().reshape(-1)
    return None
