"""Columns: the numbers of charts over ticks, collected from a timeline and packed for a page."""

from __future__ import annotations

import base64
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from recorders.watch.charts import ChartView
from recorders.watch.timeline import Timeline

MISSING = -(2.0**127)
"""Stands for a value that was not recorded; NaN and infinities stand for themselves."""

VALUES = 6_000_000
"""How many values a page holds. If there are more, each point stands for several ticks. About 2.2 bytes each in the page."""

EXACT = 250_000
"""Up to so many values all bits of float32 are kept; beyond, 12 binary digits: a relative error of at most 2**-12."""

_LARGEST = 1.7e38
_ROUNDED = 12
"""How many of the 23 digits behind the point are dropped."""


def statistics_of(view: ChartView) -> tuple[str, ...]:
    """The statistics that lines and ranges of a chart need, and the number of values that were not finite."""
    ends = (part for name in view.ranges for part in ("mean-std" if name == "std" else name).split("-"))
    return tuple(dict.fromkeys((*view.lines, *ends, "nonfinite")))


class Columns:
    """The numbers of charts, one row per tick, in memory as float32.

    >>> timeline = Timeline()
    >>> timeline.append(0, {"Loss/train": {"mean": 2.0}})
    >>> columns = Columns(timeline, [("Loss/train", "mean"), ("Loss/train", "max")])
    >>> columns.add(0)
    >>> columns.ticks, columns.table([("Loss/train", "mean")], 1)
    ([0], tensor([[2.]]))
    """

    def __init__(self, timeline: Timeline, keys: Iterable[tuple[str, str]]) -> None:
        self.timeline = timeline
        self.ticks: list[int] = []
        self._rows: list[Tensor] = []
        self._places = {key: place for place, key in enumerate(dict.fromkeys(keys))}
        self._ids: list[int] = []
        self._order = torch.zeros(0, dtype=torch.int64, device="cpu")

    @classmethod
    def before(cls, timeline: Timeline, tick: int, keys: Iterable[tuple[str, str]]) -> Columns:
        """Those of all ticks before one."""
        columns = cls(timeline, keys)
        for earlier in timeline.ticks():
            if earlier < tick:
                columns.add(earlier)
        return columns

    def add(self, tick: int, keys: Iterable[tuple[str, str]] = ()) -> None:
        """Reads one tick, also of new (name, statistic). Ticks read before, from it on, are dropped: they may have changed."""
        while self.ticks and self.ticks[-1] >= tick:
            self.ticks.pop()
            self._rows.pop()
        for key in keys:
            self._places.setdefault(key, len(self._places))
        ids, values = self.timeline.numbers(tick)
        if ids != self._ids or len(self._order) != len(self._places):  # seldom: most ticks hold the same series
            known, place = self.timeline.ids(), {number: at for at, number in enumerate(ids)}
            self._order = torch.tensor(
                [place.get(known.get(key, -1), len(ids)) for key in self._places], dtype=torch.int64, device="cpu"
            )
            self._ids = ids
        found = torch.tensor(values, dtype=torch.float64, device="cpu")
        stored = found.clamp(-_LARGEST, _LARGEST).where(found.isfinite(), found).float()  # beyond float32 is not infinite
        self._rows.append(torch.cat([stored, torch.tensor([MISSING], device="cpu")])[self._order])
        self.ticks.append(tick)

    def table(self, keys: Sequence[tuple[str, str]], every: int) -> Tensor:
        """The values by key and tick, float32 (keys, ticks / every); each point stands for `every` ticks.

        It is the minimum of "min", the maximum of "max" and "nonfinite", and the mean of other statistics; if one of the values is
        not finite, the mean is not either.
        """
        full = torch.full((len(self._rows), len(self._places) + 1), MISSING, device="cpu")
        for row, values in zip(full, self._rows, strict=True):
            row[: len(values)] = values
        found = full.T[[self._places.get(key, -1) for key in keys]]
        if every > 1:
            kinds = torch.tensor([{"min": -1, "max": 1, "nonfinite": 1}.get(statistic, 0) for _, statistic in keys], device="cpu")
            found = torch.stack([_joined(part, kinds) for part in torch.split(found, every, dim=1)], dim=1)
        return found

    def __len__(self) -> int:
        """The number of ticks."""
        return len(self.ticks)


def _joined(part: Tensor, kinds: Tensor) -> Tensor:
    """One value of several ticks, by row; `kinds` is -1 for the minimum, 1 for the maximum, 0 for the mean."""
    missing = part == MISSING
    count = (~missing).sum(1)
    means = part.masked_fill(missing, 0.0).double().sum(1).div(count).float()
    low, high = part.masked_fill(missing, torch.inf).amin(1), part.masked_fill(missing, -torch.inf).amax(1)
    return torch.where(kinds < 0, low, torch.where(kinds > 0, high, means)).masked_fill(count == 0, MISSING)


def pack(values: Tensor, exact: bool) -> str:
    """Float32 values as text: first all lowest bytes, then the next, up to the highest; compressed by zlib, base64.

    Bytes with the same place in their numbers are alike, so they compress well together. If some digits are dropped, the lowest
    bytes are left out, as they are zero.
    """
    bits = values.contiguous().view(torch.int32)
    if not exact:
        half, mask = 1 << (_ROUNDED - 1), -(1 << _ROUNDED)
        bits = (bits + half).bitwise_and_(mask).where(values.isfinite(), bits)
    planes = bits.view(torch.uint8).reshape(-1, 4).T
    planes = (planes if sys.byteorder == "little" else planes.flip(0))[0 if exact else 1 :]
    data = bytearray(planes.numel())
    if data:
        torch.frombuffer(data, dtype=torch.uint8).view(planes.shape).copy_(planes)
    return base64.b64encode(zlib.compress(data, 4)).decode()


def packed(columns: Columns, views: Sequence[ChartView], every: int, exact: bool) -> Iterator[dict[str, Any]]:
    """What a page holds of one run, chart by chart: statistics that were recorded, and values by statistic, layer and tick."""
    for view in views:
        names = statistics_of(view) if not view.chart.across else ()
        table = columns.table([(view.chart.row(layer), name) for name in names for layer in view.layers], every)
        blocks = table.view(len(names), table.numel() // max(len(names), 1))
        used = [name for name, block in zip(names, blocks, strict=True) if (block != MISSING).any()]
        used = [name for name in used if name != "nonfinite" or (blocks[names.index(name)] > 0).any()]
        kept = blocks[[names.index(name) for name in used]] if used else blocks[:0]
        yield {"statistics": used, "values": pack(kept, exact)}
