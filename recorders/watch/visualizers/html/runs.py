"""Runs: what a page shows of one training, whether it was watched over time or recorded once."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from recorders.errors import LensError
from recorders.recorder.recorder import Recorder
from recorders.recordings.recording import Recording
from recorders.streams.files import StreamFiles
from recorders.watch.charts import Chart, ChartView, charts_of, drawable, keep_charts, notes_of_layers
from recorders.watch.diagnosis import findings as rules
from recorders.watch.diagnosis.finding import Finding
from recorders.watch.opened import open_recorded
from recorders.watch.overview import overview, pushed
from recorders.watch.spread import Spread
from recorders.watch.timeline import Timeline

_ONCE = (
    Chart("Loss and metrics", ("pushed",), ranges=("std", "min-max")),
    Chart("Output", ("output",), "value", ranges=("std", "min-max")),
    Chart("Active units", ("rate",), "share of the time", ranges="min-max", limits=(0.0, 1.0)),
    Chart("Dead units", ("dead",), "share of the units", ranges=None, limits=(0.0, 1.0)),
    Chart("Output gradient", ("gradient",), "norm", ranges=None, log_scale=True),
    Chart("Weight gradient", ("weight_gradient",), "norm", ranges=None, log_scale=True),
    Chart("Update to weights", ("update",), "ratio of norms", "median", ("Q1-Q3", "min-max"), log_scale=True),
)


@dataclass(frozen=True)
class Run:
    """One training on a page.

    Args:
        timeline: what was recorded over time.
        name: what the page calls it; "" if there is only one.
        findings: likely faults; None if nobody looked for them.
        charts: what to draw; `()` for the charts in the notes of the timeline, written by an `Inspector`.
    """

    timeline: Timeline
    name: str = ""
    findings: Sequence[Finding] | None = None
    charts: Sequence[ChartView] = field(default=(), repr=False)

    @classmethod
    def of(cls, source: Run | Timeline | Recorder | Recording | StreamFiles | str | os.PathLike[str], name: str = "") -> Run:
        """A run from what was recorded: a timeline, a recording, or the path or URL of either, whose name it gets.

        Of a timeline without charts, as one that `append` filled, there is a chart of each statistic.

        Raises:
            RecordingNotFoundError: there is nothing at the path.
            LensError: it is none of these, or a recording of which `overview` reads nothing.
            StorageError: what is there cannot be read, or is neither.
        """
        if isinstance(source, (str, os.PathLike)):
            return cls.of(open_recorded(source), name or os.fspath(source).rstrip("/").rpartition("/")[2])
        if isinstance(source, Run):
            return source
        if isinstance(source, Timeline):
            return cls(drawable(source), name, rules.findings(source))
        if isinstance(source, (Recorder, Recording)):
            return cls(recorded_once(source), name, rules.findings(source))
        raise LensError(f"a page shows timelines, recorders and recordings; got {source!r:.100}")

    def views(self) -> list[ChartView]:
        """The charts to draw."""
        return list(self.charts) or charts_of(self.timeline)


def recorded_once(recorded: Recorder | Recording) -> Timeline:
    """A timeline in memory of one tick, 0, with what `overview` returns and what was pushed, and charts of it.

    Raises:
        LensError: there is nothing of that.

    >>> import torch
    >>> from recorders import ForwardMonitor
    >>> from reducers import Summary
    >>> net = torch.nn.Linear(2, 3)
    >>> with Recorder(ForwardMonitor(Summary())).modules(net) as recorder:
    ...     _ = net(torch.ones(8, 2))
    >>> timeline = recorded_once(recorder)
    >>> [*timeline], [view.title for view in charts_of(timeline)]
    (['Output/(net)'], ['Output'])
    """
    found: dict[str, dict[str, dict[str, float]]] = {chart.title: {} for chart in _ONCE}
    for name, spread in pushed(recorded).items():
        found["Loss and metrics"][name] = _row(spread)
    layers = overview(recorded)
    for layer in layers:
        dead = None if layer.gone is None else float(layer.gone.double().mean())
        facts: dict[str, dict[str, float] | None] = {
            "Output": _row(layer.output),
            "Active units": _quartiles(layer.rate),
            "Dead units": None if dead is None else {"mean": dead},
            "Output gradient": _norm(layer.gradient),
            "Weight gradient": _norm(layer.weight_gradient),
            "Update to weights": _quartiles(layer.update),
        }
        for title, row in facts.items():
            if row:
                found[title][layer.name] = row
    if not any(found.values()):
        raise LensError(
            "a page shows what overview() reads of a recording, such as Summary and Activity; in this one there is nothing"
        )
    timeline = Timeline()
    numbers = {f"{title}/{layer}": row for title, rows in found.items() for layer, row in rows.items()}
    timeline.append(0, numbers, notes=notes_of_layers({layer.name: layer.kind for layer in layers}))
    keep_charts(timeline, [ChartView(chart, timeline, tuple(found[chart.title])) for chart in _ONCE if found[chart.title]])
    return timeline


def _row(spread: Spread | None) -> dict[str, float]:
    if spread is None:
        return {}
    values = {"mean": spread.mean, "std": spread.std, "min": spread.low, "max": spread.high}
    return {**values, "nonfinite": float(spread.nonfinite)}


def _norm(spread: Spread | None) -> dict[str, float]:
    return {} if spread is None else {"mean": spread.norm, "nonfinite": float(spread.nonfinite)}


def _quartiles(values: Tensor | None) -> dict[str, float]:
    """The quartiles of the finite values, and how many others there are."""
    if values is None or not values.numel():
        return {}
    finite = values[values.isfinite()].double().ravel()
    lost: dict[str, float] = {"nonfinite": float(values.numel() - finite.numel())}
    if not finite.numel():
        return {"mean": math.nan, "median": math.nan, **lost}
    shares: Any = finite.quantile(finite.new_tensor([0.0, 0.25, 0.5, 0.75, 1.0])).tolist()
    return {"mean": finite.mean().item(), **dict(zip(("min", "Q1", "median", "Q3", "max"), shares, strict=True)), **lost}
