"""Comparison of two recordings or timelines: what changed, largest change first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from recorders.errors import SelectionError
from recorders.recorder.recorder import Recorder
from recorders.recordings.display import flat_leaves, listed, shown_name
from recorders.recordings.recording import Recording, check_recorded
from recorders.watch.timeline import Timeline

_PLACES = frozenset({"mean", "median", "Q1", "Q3"})
"""Statistics whose change is measured in standard deviations, if these are known. Not extremes, which differ by chance."""

_FAULTS = frozenset({"nan", "inf", "nonfinite"})
_BITS = frozenset({"digest"})
"""Statistics that are equal or not: how far they are apart says nothing."""

_PROJECTIONS = frozenset({"sketch"})
"""Statistics of which the distance as vectors counts."""

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
            is not finite, or if non-finite values were seen in one run only; and of digests that differ. Of a sketch the distance
            of the two, relative to the longer.
    """

    name: str
    statistic: str
    index: tuple[int, ...]
    first: float
    second: float
    score: float

    def __str__(self) -> str:
        place = f"[{', '.join(map(str, self.index))}]" if self.index else ""
        return f"{_titled(self.name, self.statistic)}{place}: {self.first:.4g} -> {self.second:.4g} ({self.score:.2g})"


@dataclass(frozen=True)
class Reshaped:
    """A statistic whose shape differs between two runs, so that its numbers cannot be compared.

    Attributes:
        name, statistic: as in `Change`.
        first, second: its shapes.
    """

    name: str
    statistic: str
    first: tuple[int, ...]
    second: tuple[int, ...]

    def __str__(self) -> str:
        return f"{_titled(self.name, self.statistic)}: shape {list(self.first)} -> {list(self.second)}"


@dataclass(frozen=True)
class Comparison:
    """What changed between two runs.

    Attributes:
        changes: one for each statistic that both have in one shape, largest first; those of about the same size (within 0.1) in
            network order.
        only_first, only_second: what only one of the two has: a subrecorder or a leaf of it by its name, or a statistic of one that
            both have, as in "out/0 mean".
        reshaped: statistics whose shapes differ, such as those of a layer that became wider.
    """

    changes: tuple[Change, ...]
    only_first: tuple[str, ...] = ()
    only_second: tuple[str, ...] = ()
    reshaped: tuple[Reshaped, ...] = ()

    @property
    def is_comparable(self) -> bool:
        """Whether both have the same statistics in the same shapes, so that `changes` tells all."""
        return not (self.only_first or self.only_second or self.reshaped)

    def exceeds(self, score: float) -> bool:
        """Whether the runs differ by more than this: in a change with a larger score, or in what they have at all."""
        return not self.is_comparable or any(change.score > score for change in self.changes)

    def rest(self) -> list[str]:
        """What cannot be measured by a score, in lines of text."""
        lines = [f"shapes differ: {'; '.join(map(str, self.reshaped[:20]))}{'; ...' * (len(self.reshaped) > 20)}"] * bool(
            self.reshaped
        )
        for which, names in (("first", self.only_first), ("second", self.only_second)):
            lines += [f"only in the {which}: {listed(names)}"] * bool(names)
        return lines

    def __str__(self) -> str:
        changed = [str(change) for change in self.changes if change.score][:20]
        return "\n".join([*changed, *self.rest()]) or "no difference"


def compare(
    first: Recorder | Recording | Timeline, second: Recorder | Recording | Timeline, *, tick: int | None = None
) -> Comparison:
    """Compares two runs, statistic by statistic.

    What only one of them has, and shapes that differ, are differences too: see `Comparison.is_comparable`. Counts, which tell how
    much was recorded, are compared by their shapes only.

    Args:
        first, second: two recordings (or recorders), or two timelines.
        tick: which tick of the timelines to compare; None for the last that both have.

    Raises:
        TypeError: one is a timeline and the other is not, or one is neither, such as a path.
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
        a, b = ({name: _numbers(row) for name, row in one.at(tick).items()} for one in (first, second))
    elif isinstance(first, Timeline) or isinstance(second, Timeline):
        raise TypeError("compare needs two recordings or two timelines; got one of each")
    else:
        for one in (first, second):
            check_recorded(one, "compare")
        a, b = results_by_name(first), results_by_name(second)
    both = [(order, name) for order, name in enumerate(a) if name in b]
    found = [(order, change) for order, name in both for change in _changes(name, a[name], b[name])]
    found.sort(key=lambda item: (-round(item[1].score, 1), item[0]))
    only_first, only_second = (_only(one, other) for one, other in ((a, b), (b, a)))
    reshaped = [
        Reshaped(name, statistic, tuple(here.shape), tuple(b[name][statistic].shape))
        for _, name in both
        for statistic, here in a[name].items()
        if statistic in b[name] and here.shape != b[name][statistic].shape
    ]
    return Comparison(tuple(change for _, change in found), only_first, only_second, tuple(reshaped))


def _only(one: Mapping[str, Mapping[str, Tensor]], other: Mapping[str, Mapping[str, Tensor]]) -> tuple[str, ...]:
    """What the other lacks: names, also if it recorded nothing under them, and statistics of names that it has."""
    found: list[str] = []
    for name, results in one.items():
        if name not in other:
            silent = not results and any(known.startswith(f"{name}[") for known in other)  # whose leaves the other has
            found += [name] * (not silent)
        elif results and not other[name]:
            found.append(name)
        else:
            found += [_titled(name, statistic) for statistic in results if statistic not in other[name]]
    return tuple(found)


def _titled(name: str, statistic: str) -> str:
    return f"{shown_name(name)}{f' {statistic}' if statistic else ''}"


def results_by_name(recorded: Recorder | Recording) -> dict[str, dict[str, Tensor]]:
    """The results of a recording as float64 tensors, by subrecorder and leaf (`name[leaf]`), and by path in the result.

    A subrecorder that recorded nothing has no results.
    """
    recording = recorded.snapshot()
    found: dict[str, dict[str, Tensor]] = {}
    for name, part in recording.items():
        leaves = part.leaves()
        for leaf, result in leaves.items():
            found[f"{name}[{leaf}]" if leaf else name] = _numbers(result)
        if not leaves:
            found[name] = {}
    return found


def _numbers(result: Any) -> dict[str, Tensor]:
    """The numbers in a nested result by path: in float64, complex ones as pairs; also empty tensors, which have a shape."""
    tensors = {path: x.detach().cpu() for path, x in flat_leaves(result) if isinstance(x, Tensor)}
    return {path: (torch.view_as_real(x.resolve_conj()) if x.is_complex() else x).double() for path, x in tensors.items()}


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
        there = b.get(statistic)
        if there is None or here.shape != there.shape or kind in _SIZES or not here.numel():
            continue
        scores = _scores(statistic, kind, a, b)
        worst = int(scores.argmax())
        index = (
            tuple(int(place) for place in torch.unravel_index(torch.tensor(worst, device="cpu"), here.shape)) if here.ndim else ()
        )
        first, second = here.reshape(-1)[worst].item(), there.reshape(-1)[worst].item()
        changes.append(Change(name, statistic, index, first, second, scores[worst].item()))
    return sorted(changes, key=lambda change: -change.score)


def _scores(statistic: str, kind: str, a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tensor:
    """The size of the change of each element."""
    here, there = a[statistic].reshape(-1), b[statistic].reshape(-1)
    difference = (there - here).abs()
    if kind in _BITS:
        return torch.where(here != there, torch.inf, 0.0)
    if kind in _PROJECTIONS:
        lengths = torch.stack([torch.linalg.vector_norm(one, dim=-1) for one in (a[statistic], b[statistic])])
        apart = torch.linalg.vector_norm(a[statistic] - b[statistic], dim=-1) / lengths.amax(0)
        each: Tensor = apart.nan_to_num(0.0)[..., None].expand(a[statistic].shape).reshape(-1)
        return each
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
