"""Findings over time: likely faults that a timeline shows, each with the tick since when."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import TypeAlias, TypeVar

from recorders.watch.charts import ChartView, charts_of, in_order, layers_of, network_order, silent_in
from recorders.watch.diagnosis.explaining import told_once
from recorders.watch.diagnosis.finding import Finding, Findings, fault
from recorders.watch.diagnosis.layer_rules import gradients_by_depth
from recorders.watch.diagnosis.limits import (
    UNIT_SHARE,
    UPDATE_LIMITS,
    is_massive,
    shown_outliers,
    shown_range,
    usual_growth,
)
from recorders.watch.timeline import Timeline

Course: TypeAlias = Mapping[str, dict[int, float]]
"""Values by layer and by tick."""

_Value = TypeVar("_Value")
_PUSHED = ("loss", "metric", "pushed")
_FIRST = "First Nonfinite"
_SLACK = 1.5
"""Of steps that are not equal quite, such as the first ones of Adam."""
_EXAMINED = {
    "Dead Units": ("mean",),
    "Saturated Units": ("mean",),
    "Outlier Features": ("largest", "typical"),
    "Output Quantiles": ("min", "max", "Q1", "Q3"),
    "Output Gradient Norm": ("mean",),
    "Output Gradient RMS": ("mean",),
    "Weight Gradient Norm": ("mean",),
    "Weight Update Ratio": ("mean", "max"),
}
"""By title the statistics that are examined, beside the numbers of values that are not finite."""


def findings_over_time(timeline: Timeline) -> Findings:
    """The likely faults that the charts of a timeline show at its last tick, each with the tick since when; worst first.

    They are known by the titles that the lenses give: of every chart the values that are not finite; of charts of outputs the
    layers that never ran, or no more; "Dead Units" of the lens `DeadUnits`; "Saturated Units" of `Saturation`, but for the last
    layer, which may give probabilities; "Outlier Features" of `Outliers`, or "Output Quantiles" of `Quantiles`; "Output Gradient
    Norm" or "RMS" of `OutputGradientGeometry`; "Weight Update Ratio" of `UpdateRatio`. Weights that never changed are a fault if
    the lens `ParameterGradientGeometry` shows gradients of them; else they may be frozen on purpose, and `unexamined` names them.
    """
    views = {view.title: view for view in charts_of(timeline) if not view.chart.across}
    known = _Known(timeline, views)
    order = in_order(network_order(view.layers for view in views.values()), layers_of(timeline))
    gradients = next((title for title in ("Output Gradient Norm", "Output Gradient RMS") if title in views), None)
    outliers = next((title for title in ("Outlier Features", "Output Quantiles") if title in views), None)
    still = _still(known, views.get("Weight Update Ratio"))
    moved = {layer for layer, norms in known.of("Weight Gradient Norm", "mean").items() if any(norms.values())}
    used = moved | {layer for layer in known.of("Weight Update Ratio", "mean") if layer not in still}
    found = [*_nonfinite(known, timeline, views, order), *_never_ran(timeline, views, used), *_dead(known)]
    found += [*_saturated(known, order), *_outliers(known, outliers), *_gradients(known, gradients)]
    found += [fault("frozen", layer, "the weights never changed", since) for layer, since in still.items() if layer in moved]
    found += _updates(known, still, timeline.steps())
    told = {
        ("dead units", "DeadUnits"): len(known.of("Dead Units", "mean")),
        ("saturated units", "Saturation"): len(known.of("Saturated Units", "mean")),
        ("outlier features", "Outliers"): len(known.of(outliers, "largest") or known.of(outliers, "max")),
        ("gradients that vanish or explode", "OutputGradientGeometry"): len(known.of(gradients, "mean")),
        ("updates that are too large or too small", "UpdateRatio"): len(known.of("Weight Update Ratio", "mean")),
    }
    inside = {layer for view in views.values() if view.chart.of[0] not in _PUSHED for layer in view.layers}
    examined = [f"{kind}: {count} of {len(inside)}" for (kind, _), count in told.items() if count]
    unexamined = [f"what the lens {lens} shows" for (_, lens), count in told.items() if not count]
    names = set(timeline)
    if seen := {layer for view in views.values() for layer in view.layers if view.chart.row(layer) in names}:
        several = inside if seen & inside else seen  # of losses and metrics, if nothing else is there
        examined.insert(0, f"NaN and infinity: {len(seen & several)} of {len(several)}")
    if unknown := [layer for layer in still if layer not in moved]:
        unexamined.append(f"weights that never changed, perhaps frozen on purpose: {', '.join(unknown)}")
    return Findings(told_once(found, told["updates that are too large or too small", "UpdateRatio"]), unexamined, examined)


class _Known:
    """The statistics of charts that are examined, read from the timeline all at once."""

    def __init__(self, timeline: Timeline, views: Mapping[str, ChartView]) -> None:
        self._views = views
        self._courses = timeline.courses(
            (view.chart.row(layer), statistic)
            for title, view in views.items()
            for statistic in ("nonfinite", *(("mean",) if title.startswith(_FIRST) else _EXAMINED.get(title, ())))
            for layer in view.layers
        )

    def of(self, title: str | None, statistic: str) -> Course:
        """One statistic of all layers of a chart that have it."""
        view = self._views.get(title or "")
        rows = {layer: view.chart.row(layer) for layer in view.layers} if view is not None else {}
        found = {layer: self._courses.get((row, statistic)) for layer, row in rows.items()}
        return {layer: dict(zip(*course, strict=True)) for layer, course in found.items() if course and course[0]}


def _since(values: Mapping[int, _Value], holds: Callable[[_Value], bool]) -> int | None:
    """The first of the last ticks in a row at which something holds; None if it does not hold at the last."""
    first = None
    for tick in sorted(values, reverse=True):
        if not holds(values[tick]):
            break
        first = tick
    return first


def _nonfinite(known: _Known, timeline: Timeline, views: Mapping[str, ChartView], order: Sequence[str]) -> Iterator[Finding]:
    """One finding, where it began: NaN spreads to what is computed later, from outputs to the loss and to gradients."""
    begun: dict[str, tuple[int, int, float, int]] = {}
    for view in views.values():
        group = view.chart.of[0]
        role = 1 if group in _PUSHED else 2 if group in ("gradient", "weight", "bias") else 0
        counts = known.of(view.title, "nonfinite")
        if view.title.endswith("Update Ratio"):  # of weights that were zero, the ratio is infinite: a fault if no other comes
            counts = {layer: course for layer, course in counts.items() if not _recovers(known.of(view.title, "mean").get(layer))}
        for layer in view.layers:
            tick, observation = next((tick for tick, count in counts.get(layer, {}).items() if count > 0), None), math.inf
            if view.title.startswith(_FIRST) and (course := known.of(view.title, "mean").get(layer)):
                tick, observation = next(iter(course.items()))
            if tick is not None:
                place = order.index(layer)  # gradients are computed from the last layer on
                start = (tick, role, observation, -place if role == 2 else place)
                begun[layer] = min(begun.get(layer, start), start)
    if begun:
        first = min(begun, key=begun.__getitem__)
        tick, _, observation, _ = begun[first]
        what = "values are NaN or infinite"
        what += "" if math.isinf(observation) else f", for the first time in observation {observation:.0f} of the tick"
        yield fault("nonfinite", first, what + (f", and in {len(begun) - 1} more" if len(begun) > 1 else ""), tick)


def _recovers(means: Mapping[int, float] | None) -> bool:
    return means is not None and len(means) > 0 and math.isfinite(means[max(means)])


def _never_ran(timeline: Timeline, views: Mapping[str, ChartView], used: Container[str]) -> Iterator[Finding]:
    """Layers without a value in any chart of outputs, or at the last tick at which others have one."""
    names = set(timeline)
    told: set[str] = set()
    excused = silent_in(timeline)
    for title, view in views.items():
        rows = {layer: view.chart.row(layer) for layer in view.layers}
        if view.chart.of[0] != "output" or title.startswith(_FIRST) or not names.intersection(rows.values()):
            continue
        last: set[str] = set()
        for tick in reversed(timeline.ticks()):
            there = timeline.at(tick)
            if last := {layer for layer, row in rows.items() if row in there}:
                break
        if not last:
            continue  # what the chart shows was forgotten
        for layer in (layer for layer in view.layers if layer not in last | told | excused):
            if rows[layer] in names:
                own = max(view.series(layer, timeline.statistics(rows[layer])[0])[0], default=-math.inf)
                other = next(iter(last))
                ticks = view.series(other, next(iter(there[rows[other]])))[0]
                yield fault("never-ran", layer, "it gives no output any more", min(tick for tick in ticks if tick > own))
            elif layer in used or layer.rpartition(".")[2] == "out_proj":
                continue  # the attention of PyTorch uses the weights of its out_proj without calling it
            else:
                yield fault("never-ran", layer, "no output was recorded")
            told.add(layer)


def _dead(known: _Known) -> Iterator[Finding]:
    for layer, shares in known.of("Dead Units", "mean").items():
        since = _since(shares, lambda share: share > UNIT_SHARE)
        if since is not None:
            yield fault("dead-units", layer, f"{shares[max(shares)]:.0%} of the units are dead: they were never active", since)


def _saturated(known: _Known, order: Sequence[str]) -> Iterator[Finding]:
    for layer, shares in known.of("Saturated Units", "mean").items():
        since = _since(shares, lambda share: share > UNIT_SHARE)
        if since is not None and layer != order[-1]:
            what = f"{shares[max(shares)]:.0%} of the units are saturated: nearly all outputs lie at the ends of the curve"
            yield fault("saturated-units", layer, what, since)


def _outliers(known: _Known, title: str | None) -> Iterator[Finding]:
    """One finding, where they began: later layers hand them on."""
    courses = [known.of(title, name) for name in _EXAMINED[title]] if title else [{}]
    hit: dict[str, tuple[int, tuple[float, float]]] = {}
    for layer, ticks in courses[0].items():
        values = {tick: [abs(course[layer].get(tick, math.nan)) for course in courses] for tick in ticks}
        sizes = {tick: (max(found[: len(found) // 2]), max(found[len(found) // 2 :])) for tick, found in values.items()}
        if (since := _since(sizes, lambda pair: is_massive(*pair))) is not None:
            hit[layer] = since, sizes[max(sizes)]
    if hit:
        first = min(hit, key=lambda layer: hit[layer][0])
        since, pair = hit[first]
        yield fault("outliers", first, shown_outliers(*pair, len(hit) - 1), since)


def _gradients(known: _Known, title: str | None) -> Iterator[Finding]:
    """At most one finding: that norms differ too much between layers, on their way back or on their way forth."""
    norms = known.of(title, "mean")
    by_tick: dict[int, dict[str, float]] = {}
    for layer, values in norms.items():
        for tick, value in values.items():
            if math.isfinite(value):
                by_tick.setdefault(tick, {})[layer] = value
    in_order = {tick: {layer: at[layer] for layer in norms if layer in at} for tick, at in by_tick.items()}
    if in_order:
        since = _since(in_order, lambda at: any(gradients_by_depth(at)))
        yield from gradients_by_depth(in_order[max(in_order)], since)


def _still(known: _Known, view: ChartView | None) -> dict[str, int | None]:
    """The layers whose weights never changed, with the first tick at which that was seen."""
    courses = known.of("Weight Update Ratio", "max") or known.of("Weight Update Ratio", "mean")
    silent = [layer for layer in view.layers if layer not in courses] if view is not None and courses else []
    first = min((min(course) for course in courses.values()), default=None)
    return {**dict.fromkeys(silent, first), **{layer: min(course) for layer, course in courses.items() if not any(course.values())}}


def _updates(known: _Known, still: Mapping[str, int | None], steps: Mapping[int, int]) -> Iterator[Finding]:
    """
    Args:
        steps: the number of optimizer steps that ended before each tick, as far as it is known.
    """
    least, most = UPDATE_LIMITS
    largest = known.of("Weight Update Ratio", "max")
    for layer, ratios in known.of("Weight Update Ratio", "mean").items():
        if layer in still:
            continue
        mean = ratios[max(ratios)]
        highest = largest.get(layer, ratios)
        over = _since(ratios, lambda ratio: ratio > most)
        under = _since(highest, lambda ratio: ratio < least)
        if over is not None and not _just_grows(mean, highest.get(max(ratios), mean), max(ratios), steps):
            yield fault(
                "updates-too-large", layer, f"updates are too large: a step changes the weights by {shown_range(mean)}", over
            )
        elif under == min(highest):  # since the beginning: a training that converges makes small steps in the end
            what = f"updates are too small: the largest step changes the weights by {shown_range(max(highest.values()))}"
            yield fault("updates-too-small", layer, what, under)


def _just_grows(mean: float, largest: float, tick: int, steps: Mapping[int, int]) -> bool:
    """Whether the updates of a tick are no larger than those of weights that began near zero and grow in equal steps."""
    end = steps.get(tick, 0)
    start = max((count for number, count in steps.items() if number < tick), default=0)
    if end <= start:
        return False  # nobody counted steps
    first = largest if start == 0 else 0.0  # of weights that begin near zero, the first update has any size
    return mean * (end - start) - first <= usual_growth(start, end) * _SLACK
