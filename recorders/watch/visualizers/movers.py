"""Movers: of charts with thousands of layers, the numbers of those that moved most."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from recorders.errors import LensError
from recorders.watch.charts import ChartView
from recorders.watch.visualizers.numbers import curves_of, numbers

MOST = 200
"""So many layers of a chart a tracker gets at each tick, unless it is told otherwise."""


class Movers:
    """Chooses at each tick, of a chart with more than `most` layers, those whose numbers moved most since the tick before.

    How far a layer moved is the largest change of any of its numbers: in orders of magnitude, or 1 from or to zero and across it.
    A number that is not finite moved farthest. A layer that was chosen at the tick before counts double, so that curves are long.
    At the first tick all layers are equal, and the first ones are chosen. Other charts are whole.

    Args:
        most: the number of layers; None for all.

    Raises:
        LensError: `most` is less than 1.

    >>> from recorders.watch.charts import Chart
    >>> from recorders.watch.timeline import Timeline
    >>> timeline = Timeline()
    >>> view = ChartView(Chart("Norm", ("norm",), ranges=None), timeline, ("0", "1", "2"))
    >>> timeline.append(0, {"Norm/0": {"mean": 1.0}, "Norm/1": {"mean": 1.0}, "Norm/2": {"mean": 1.0}})
    >>> timeline.append(1, {"Norm/0": {"mean": 1.1}, "Norm/1": {"mean": 1.0}, "Norm/2": {"mean": 9.0}})
    >>> movers = Movers(most=1)
    >>> movers.numbers(0, [view]), movers.numbers(1, [view])
    ({'Norm/0/mean': 1.0, 'Norm/layers left out': 2.0}, {'Norm/2/mean': 9.0, 'Norm/layers left out': 2.0})
    """

    def __init__(self, most: int | None = MOST) -> None:
        if most is not None and most < 1:
            raise LensError(f"most={most}: give the number of layers of a chart, at least 1, or None for all")
        self.most = most
        self._before: Mapping[str, float] = {}
        self._chosen: dict[str, frozenset[str]] = {}

    def numbers(self, tick: int, charts: Sequence[ChartView]) -> dict[str, float]:
        """What `numbers` gives, without the layers that are left out; `chart/layers left out` is how many these are."""
        found = numbers(tick, charts)
        kept = dict(found)
        for view in charts:
            if self.most is not None and len(view.layers) > self.most:
                self._leave_out(view, found, kept, self.most)
        self._before = found
        return kept

    def _leave_out(self, view: ChartView, found: Mapping[str, float], kept: dict[str, float], most: int) -> None:
        names = {layer: names for layer in view.layers if (names := _names(view, layer, found))}
        before = self._chosen.get(view.title, frozenset())
        far = {
            layer: max(_moved(self._before.get(name), found[name]) for name in each) * (2 if layer in before else 1)
            for layer, each in names.items()
        }
        # Sorting is stable: of layers that moved as far, those stay that were chosen, and then the first ones in the network come.
        chosen = frozenset(sorted(far, key=lambda layer: (far[layer], layer in before), reverse=True)[:most])
        for layer in names.keys() - chosen:
            for name in names[layer]:
                del kept[name]
        self._chosen[view.title] = chosen
        if left := len(names) - len(chosen):
            kept[f"{view.title}/layers left out"] = float(left)


def _names(view: ChartView, layer: str, found: Mapping[str, float]) -> list[str]:
    """The names of the numbers of one layer; a comparison has one for each layer, or none."""
    row = view.chart.row(layer)
    names = [row] if view.chart.across else [f"{row}/{curve}" for curve in (*curves_of(view), "nonfinite")]
    return [name for name in names if name in found]


def _moved(before: float | None, now: float) -> float:
    if not math.isfinite(now):
        return math.inf
    if before is None:
        return 0.0
    if before == 0 or now == 0 or not math.isfinite(before) or (before > 0) != (now > 0):
        return float(now != before)
    return abs(math.log10(abs(now)) - math.log10(abs(before)))
