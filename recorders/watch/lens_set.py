"""The lenses of an inspector, complete: those that were given, with training and evaluation apart, and one for pushed values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import FunctionType
from typing import Any

from recorders.errors import LensError
from recorders.monitors.base import Monitor
from recorders.recordings.display import listed
from recorders.recordings.plugins import names_of_plugins, plugin
from recorders.watch import lenses as known
from recorders.watch.charts import Chart
from recorders.watch.lenses import Lens, LossMetrics


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


_EVALUATION = " in Evaluation"


def apart(lens: Lens) -> Lens:
    """The lens with two monitors, and two charts, for each monitor that records both training and evaluation.

    Parameters and modules have no phase: what is read of them at steps or ticks stays as it is.

    >>> from recorders.monitors.forward import ForwardMonitor
    >>> from reducers import Mean
    >>> both = apart(Lens("Own", (Chart("Mean", of=("out",)),), {"out": ForwardMonitor(Mean())}))
    >>> [chart.title for chart in both.charts], list(both.monitors)
    (['Mean', 'Mean in Evaluation'], ['out', 'out in Evaluation'])
    """
    both = [group for group, monitor in lens.monitors.items() if _records_both(monitor)]
    titles = {chart.title for chart in lens.charts if chart.of[:1] and chart.of[0] in both}
    monitors: dict[str, Monitor] = {}
    for group, monitor in lens.monitors.items():
        if group in both:
            monitors[group] = with_options(monitor, eval_update=False)
            monitors[group + _EVALUATION] = with_options(monitor, train_update=False)
        else:
            monitors[group] = monitor
    charts: list[Chart] = []
    for chart in lens.charts:
        charts.append(chart)
        compared = {across.title for across in chart.across}
        if chart.title in titles or (compared and compared <= titles):
            charts.append(_of_evaluation(chart))
    return replace(lens, charts=tuple(charts), monitors=monitors)


def is_of_evaluation(chart: Chart) -> bool:
    """Whether `apart` made this chart."""
    return chart.title.endswith(_EVALUATION)


def with_options(monitor: Monitor, **options: Any) -> Monitor:
    """A prototype like this one, with other options."""
    recipe = monitor.constructor
    given: Mapping[str, Any] = {**dict(recipe.options), **options}
    return replace(recipe, options=tuple(given.items()))(monitor.attr)


def _records_both(monitor: Monitor) -> bool:
    gate = monitor.gate
    return gate.train_update and gate.eval_update and monitor.subject in ("calls", "values")


def _of_evaluation(chart: Chart) -> Chart:
    across = tuple(replace(each, title=each.title + _EVALUATION) for each in chart.across)
    of = (chart.of[0] + _EVALUATION, *chart.of[1:]) if chart.of else ()
    return replace(chart, title=chart.title + _EVALUATION, of=of, across=across)
