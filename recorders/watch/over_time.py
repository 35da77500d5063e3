"""Findings over time: likely faults that a timeline shows, each with the tick since when."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeAlias

from recorders.watch.charts import ChartView, charts_of
from recorders.watch.fault import DEAD_SHARE, GRADIENT_DECAY, UPDATE_RANGE, Finding, Findings, fault, shown_range
from recorders.watch.timeline import Timeline

__all__ = ["findings_over_time"]

Course: TypeAlias = Mapping[str, dict[int, float]]
"""Values by layer and by tick."""


def findings_over_time(timeline: Timeline) -> Findings:
    """The likely faults that the charts of a timeline show at its last tick, each with the tick since when; worst first.

    They are known by the titles that the lenses give: of every chart the values that are not finite; "Dead Units" of the lens
    `DeadUnits`; "Output Gradient Norm" or "RMS" of `OutputGradientGeometry`; "Weight Update Ratio" of `UpdateRatio`.
    """
    views = {view.title: view for view in charts_of(timeline) if not view.chart.across}
    gradients = next((views[title] for title in ("Output Gradient Norm", "Output Gradient RMS") if title in views), None)
    found = [*_nonfinite(timeline, views.values()), *_dead(views.get("Dead Units"))]
    found += [*_gradients(gradients), *_updates(views.get("Weight Update Ratio"))]
    missing = {
        "DeadUnits": "Dead Units" in views,
        "OutputGradientGeometry": gradients,
        "UpdateRatio": "Weight Update Ratio" in views,
    }
    return Findings(found, (f"what the lens {lens} shows" for lens, there in missing.items() if not there))


def _course(view: ChartView | None, statistic: str) -> Course:
    """One statistic of all layers of a chart that have it."""
    layers = () if view is None else view.layers
    found = {layer: dict(zip(*view.series(layer, statistic), strict=True)) for layer in layers if view is not None}
    return {layer: values for layer, values in found.items() if values}


def _since(ticks: Iterable[int], holds: Callable[[int], bool]) -> int | None:
    """The first of the last ticks in a row at which something holds; None if it does not hold at the last."""
    first = None
    for tick in sorted(ticks, reverse=True):
        if not holds(tick):
            break
        first = tick
    return first


def _nonfinite(timeline: Timeline, views: Iterable[ChartView]) -> Iterator[Finding]:
    """One finding, where it began: NaN spreads to what is computed later."""
    known = timeline.first_above("nonfinite", 0.0)
    begun: dict[str, int] = {}
    for view in views:
        for layer in view.layers:
            if (tick := known.get(view.chart.row(layer))) is not None:
                begun[layer] = min(begun.get(layer, tick), tick)
    if begun:
        first = min(begun, key=begun.__getitem__)
        others = f", and in {len(begun) - 1} more" if len(begun) > 1 else ""
        yield fault("nonfinite", first, f"values are NaN or infinite{others}", begun[first])


def _dead(view: ChartView | None) -> Iterator[Finding]:
    for layer, shares in _course(view, "mean").items():
        since = _since(shares, lambda tick, shares=shares: shares[tick] > DEAD_SHARE)  # type: ignore[misc]
        if since is not None:
            yield fault("dead", layer, f"{shares[max(shares)]:.0%} of the units are dead: they were never active", since)


def _gradients(view: ChartView | None) -> Iterator[Finding]:
    """At most one finding: that norms differ too much between layers, on their way back or on their way forth."""
    norms = _course(view, "mean")
    by_tick: dict[int, dict[str, float]] = {}
    for layer, values in norms.items():
        for tick, value in values.items():
            if math.isfinite(value):
                by_tick.setdefault(tick, {})[layer] = value
    order = list(norms)

    def worst(tick: int) -> tuple[str, str]:
        known = by_tick[tick]
        return min(known, key=known.__getitem__), max(known, key=known.__getitem__)

    def uneven(tick: int) -> bool:
        low, high = worst(tick)
        return by_tick[tick][low] < GRADIENT_DECAY * by_tick[tick][high]

    since = _since(by_tick, uneven)
    if since is None:
        return
    last = by_tick[max(by_tick)]
    low, high = worst(max(by_tick))
    if order.index(low) < order.index(high):
        what = f"gradients vanish on their way back: their norm is {last[high]:.1e} at {high} and {last[low]:.1e} here"
        yield fault("vanishing", low, what, since)
    else:
        what = f"gradients explode on their way back: their norm is {last[low]:.1e} at {low} and {last[high]:.1e} here"
        yield fault("exploding", high, what, since)


def _updates(view: ChartView | None) -> Iterator[Finding]:
    least, most = UPDATE_RANGE
    largest = _course(view, "max")
    for layer, ratios in _course(view, "mean").items():
        mean = ratios[max(ratios)]
        over = _since(ratios, lambda tick, ratios=ratios: ratios[tick] > most)  # type: ignore[misc]
        highest = largest.get(layer, ratios)
        under = _since(highest, lambda tick, highest=highest: highest[tick] < least)  # type: ignore[misc]
        if over is not None:
            yield fault("too large", layer, f"updates are too large: a step changes the weights by {shown_range(mean)}", over)
        elif under == min(highest):  # since the beginning: a training that converges makes small steps in the end
            what = f"updates are too small: the largest step changes the weights by {shown_range(max(highest.values()))}"
            yield fault("too small", layer, what, under)
