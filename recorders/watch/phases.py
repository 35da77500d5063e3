"""Phases kept apart: a lens that records training and evaluation records them in statistics and charts of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from recorders.monitors.base import Monitor
from recorders.watch.charts import Chart
from recorders.watch.lenses.lens import Lens

__all__ = ["apart", "is_of_evaluation", "with_options"]

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
