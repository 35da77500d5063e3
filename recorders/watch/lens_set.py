"""The lenses of an inspector, complete: those that were given, with phases apart, and one for pushed values."""

from __future__ import annotations

from collections.abc import Iterable
from types import FunctionType

from recorders.errors import LensError
from recorders.recordings.display import listed
from recorders.recordings.plugins import names_of_plugins, plugin
from recorders.watch import lenses as known
from recorders.watch.lenses import Lens, LossMetrics
from recorders.watch.phases import apart

__all__ = ["complete"]


def complete(given: str | Lens | Iterable[str | Lens]) -> tuple[Lens, ...]:
    """The lenses, and `LossMetrics` for losses and metrics that none of them shows."""
    found = tuple(apart(_checked(one)) for one in ((given,) if isinstance(given, (str, Lens)) else given))
    shown = {group for lens in found for chart in lens.charts for group in chart.of[:1]}
    shown |= {"loss", "metric"} if "pushed" in shown else set()
    default = LossMetrics()
    if missing := tuple(chart for chart in default.charts if chart.of[0] not in shown):
        found = (*found, Lens(default.name, missing))
    titles = [chart.title for lens in found for chart in lens.charts]
    if twice := sorted({title for title in titles if titles.count(title) > 1}):
        raise LensError(f"several charts are called {twice[0]!r}: rename one with dataclasses.replace(chart, title=...)")
    return found


def _checked(given: str | Lens) -> Lens:
    """A lens as it was given, or by its name: of this package, or one that another package offers."""
    if isinstance(given, Lens):
        return given
    if not isinstance(given, str):
        raise LensError(f"an inspector takes lenses, such as OutputGradientGeometry(), or their names; got {given!r}")
    ours = {name: make for name in known.__all__ if name[0].isupper() and isinstance(make := getattr(known, name), FunctionType)}
    found: Lens | None = ours[given]() if given in ours else plugin("lenses", given, Lens)
    if found is None:
        raise LensError(f"no lens {given!r}; there are {listed([*ours, *names_of_plugins('lenses')])}")
    return found
