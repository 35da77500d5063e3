"""Across: how a chart compares the layers of another chart in one panel."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from recorders.errors import LensError

__all__ = ["Across", "Point"]

_SHOWN = ("share", "min", "max")


class Point(NamedTuple):
    """One value of a comparison at one tick: the line that it belongs to, and the layer that it comes from."""

    line: str
    layer: str
    value: float


@dataclass(frozen=True)
class Across:
    """What a chart compares: one statistic of all layers of another chart, at each tick.

    Args:
        title: the title of the other chart, in the same lens.
        show: "share" for a line per layer: its part of the sum over layers. "min" or "max" for one line: the lowest or the highest
            value of all layers.
        statistic: the statistic of the other chart, such as "mean".

    Raises:
        LensError: `show` is unknown.

    >>> Across("Norm", "share").points({"a": 1.0, "b": 3.0})
    [Point(line='a', layer='a', value=0.25), Point(line='b', layer='b', value=0.75)]
    >>> Across("Norm", "max").points({"a": 1.0, "b": 3.0})
    [Point(line='highest Norm', layer='b', value=3.0)]
    """

    title: str
    show: str
    statistic: str = "mean"

    def __post_init__(self) -> None:
        if self.show not in _SHOWN:
            raise LensError(f"a comparison cannot show {self.show!r}; choose from {', '.join(map(repr, _SHOWN))}")

    def points(self, values: Mapping[str, float]) -> list[Point]:
        """The values to draw at one tick, from those of the layers; values that are not finite are left out."""
        finite = {layer: value for layer, value in values.items() if math.isfinite(value)}
        if self.show == "share":
            total = sum(finite.values())
            return [Point(layer, layer, value / total) for layer, value in finite.items()] if total else []
        if not finite:
            return []
        layer = (min if self.show == "min" else max)(finite, key=finite.__getitem__)
        return [Point(f"{'lowest' if self.show == 'min' else 'highest'} {self.title}", layer, finite[layer])]
