"""Numbers: what charts show at one tick, by name, for boards that draw the curves themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from recorders.watch.charts import ChartView, ends


def curves_of(view: ChartView) -> list[str]:
    """The names of the lines, then of the ends of ranges that are not lines.

    >>> from recorders.watch.charts import Chart
    >>> from recorders.watch.timeline import Timeline
    >>> curves_of(ChartView(Chart("Norm", (), lines=("mean", "max"), ranges=("std", "min-max")), Timeline(), ()))
    ['mean', 'max', 'mean-std', 'mean+std', 'min']
    """
    return list(dict.fromkeys((*view.lines, *(end for aggregation in view.ranges for end in ends_of(aggregation)))))


def ends_of(aggregation: str) -> tuple[str, str]:
    """The names of the ends of a range; "mean-std" and "mean+std", "min" and "max", or "Q1" and "Q3"."""
    if aggregation == "std":
        return "mean-std", "mean+std"
    low, high = aggregation.split("-")
    return low, high


def numbers(tick: int, charts: Sequence[ChartView]) -> dict[str, float]:
    """What the charts show at one tick; numbers that were not recorded are left out.

    Names are `chart/layer/statistic`: each line, each end of a range, and "nonfinite", the number of values that were not finite,
    if there were any. A chart that compares layers has `chart/line`.

    >>> from recorders.watch.charts import Chart
    >>> from recorders.watch.timeline import Timeline
    >>> timeline = Timeline()
    >>> timeline.append(0, {"Norm/net.0": {"mean": 2.0, "std": 0.5}})
    >>> numbers(0, [ChartView(Chart("Norm", ("norm",), ranges="std"), timeline, ("net.0", "net.1"))])
    {'Norm/net.0/mean': 2.0, 'Norm/net.0/mean-std': 1.5, 'Norm/net.0/mean+std': 2.5}
    """
    # Of thousands of layers, reading takes longest: a timeline is read once, not once for each chart.
    rows = {timeline: timeline.at(tick) for timeline in {view.timeline for view in charts}}
    return {name: value for view in charts for name, value in _named(view, rows[view.timeline])}


def _named(view: ChartView, rows: Mapping[str, Mapping[str, float]]) -> Iterator[tuple[str, float]]:
    for point in view.points_of(rows):
        yield view.chart.row(point.line), point.value
    curves = curves_of(view)
    for name in map(view.chart.row, view.layers):
        values = dict(rows.get(name, {}))
        if {"mean", "std"} <= values.keys():
            values["mean-std"], values["mean+std"] = ends(values, "std")
        for curve in curves:
            if curve in values:
                yield f"{name}/{curve}", values[curve]
        if values.get("nonfinite"):
            yield f"{name}/nonfinite", values["nonfinite"]
