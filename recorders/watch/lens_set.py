"""The lenses of an inspector, complete: those that were given, with phases apart, and one for pushed values."""

from __future__ import annotations

from collections.abc import Iterable

from recorders.errors import LensError
from recorders.watch.lenses import Lens, LossMetrics
from recorders.watch.phases import apart

__all__ = ["complete"]


def complete(given: Lens | Iterable[Lens]) -> tuple[Lens, ...]:
    """The lenses, and `LossMetrics` for losses and metrics that none of them shows."""
    lenses = (given,) if isinstance(given, Lens) else tuple(given)
    for lens in lenses:
        if not isinstance(lens, Lens):
            raise LensError(f"an inspector takes lenses, such as OutputGradientGeometry(); got {lens!r}")
    lenses = tuple(map(apart, lenses))
    shown = {group for lens in lenses for chart in lens.charts for group in chart.of[:1]}
    shown |= {"loss", "metric"} if "pushed" in shown else set()
    default = LossMetrics()
    if missing := tuple(chart for chart in default.charts if chart.of[0] not in shown):
        lenses = (*lenses, Lens(default.name, missing))
    titles = [chart.title for lens in lenses for chart in lens.charts]
    if twice := sorted({title for title in titles if titles.count(title) > 1}):
        raise LensError(f"several charts are called {twice[0]!r}: rename one with dataclasses.replace(chart, title=...)")
    return lenses
