"""Charts as metrics, distributions as histograms, and findings as alerts of a run of trackio."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from recorders.errors import require
from recorders.recorder.recorder import Recorder
from recorders.watch.charts import ChartView
from recorders.watch.diagnosis.finding import Finding
from recorders.watch.diagnosis.over_time import findings_over_time
from recorders.watch.visualizers.movers import MOST, Movers
from recorders.watch.visualizers.visualizer import Pace
from reducers import Histogram, Postmap, Quantile, State

SHARE = 0.02
"""The most that looking for findings takes of the time."""

_LEVELS = {"error": "ERROR", "warning": "WARN", "notice": "INFO"}


class TrackioVisualizer:
    """Logs each number of each chart as a metric of a run of trackio, whose step is the tick, and each new finding as an alert.

    The metrics are `chart/layer/statistic`, as those of `WandbVisualizer`; trackio groups them by chart. Findings are those of the
    ticks so far, as on the page of `HtmlVisualizer`; looking for them takes at most 2 % of the time. Each is told once. `alert`
    tells one that came otherwise, such as those in `Checkup.found`. `add_histograms` logs distributions.

    If the program has a run, by `trackio.init`, it is used, and the program finishes it. Otherwise the first tick starts one, and
    `flush` finishes it. It is written to the disk; `trackio show` shows it. Nothing waits for a network unless you ask for a server
    (`space_id=`, `server_url=`).

    Args:
        project: of a run that the visualizer starts.
        most: of a chart with more layers, so many are logged at each tick: those that moved most, see `Movers`; None for all.
        alerts: whether findings are looked for and told.
        options: of such a run, for `trackio.init`: `name=`, `group=`, `config=`, `webhook_url=` of alerts, ...

    Raises:
        MissingExtraError: trackio is not installed.
        LensError: `most` is less than 1.

    >>> from recorders import Inspector, lenses
    >>> visualizer = TrackioVisualizer("project", name="first")  # doctest: +SKIP
    >>> with Inspector(net, lenses.Quantiles(), show=visualizer) as inspector:  # doctest: +SKIP
    ...     for epoch in inspector.range(10):
    ...         train(net)
    ...         visualizer.add_histograms(inspector.recorders["Quantiles"], step=epoch)
    """

    def __init__(self, project: str = "recorders", *, most: int | None = MOST, alerts: bool = True, **options: Any) -> None:
        self._trackio: Any = require("trackio", "trackio")
        self._current: Any = require("trackio.context_vars", "trackio").current_run
        self._options: dict[str, Any] = {"project": project, **options}
        self._alerts, self._movers, self._looking = alerts, Movers(most), Pace(0.0, SHARE)
        self._own: Any = None
        self._told: set[tuple[str, str]] = set()
        self._last: tuple[int, Sequence[ChartView]] | None = None

    def show(self, tick: int, charts: Sequence[ChartView]) -> None:
        """Hands the numbers of one tick to the thread that writes them; tells new findings, if it is time to look for them.

        Raises:
            ValueError: trackio does not take the project, or an option.
        """
        self._run().log(self._movers.numbers(tick, charts), step=tick)
        self._last = tick, charts
        if self._alerts and self._looking.due:
            self._look()

    def alert(self, finding: Finding, step: int | None = None) -> None:
        """Tells a finding as an alert of the severity that it has, unless one of its kind and place was told.

        Args:
            finding: from `findings`, or from a `Checkup`.
            step: at which it was found; None for the last one of the run.
        """
        if (key := (finding.kind, finding.layer)) not in self._told:
            self._told.add(key)
            level = self._trackio.AlertLevel[_LEVELS[finding.severity]]
            title = f"{finding.layer}: {finding.kind.replace('-', ' ')}" if finding.kind else finding.layer
            self._run().alert(title=title, text=str(finding), level=level, step=step)

    def add_histograms(self, recorder: Recorder, step: int, *, bins: int = 64) -> None:
        """Logs a histogram of each monitor that reduces by a `Histogram` or a `Quantile`, under its name; others are passed by.

        Args:
            recorder: with what it recorded so far. That of a lens, `inspector.recorders["Quantiles"]`, is empty after a tick.
            step: in trackio, such as the number of the tick.
            bins: as in `binned`.
        """
        found: dict[str, Any] = {}
        for name, monitor in recorder.items():
            reducer = monitor.reducer
            while isinstance(reducer, Postmap):  # its state is that of the reducer whose result it maps
                reducer = reducer.reducer
            if isinstance(reducer, (Histogram, Quantile)):
                for path, state in monitor.states.items():
                    counts, edges = binned(reducer, state, bins)
                    pair = counts.numpy(), edges.numpy()
                    found[f"{name}{path}/histogram"] = self._trackio.Histogram(np_histogram=pair)
        if found:
            self._run().log(found, step=step)

    def flush(self) -> None:
        """Tells what was not told; finishes the run that the visualizer started, and waits until it is written."""
        if self._alerts and self._last is not None:
            self._look()
        own, self._own, self._last = self._own, None, None
        if own is not None:
            own.finish()
            if self._current.get() is own:
                self._current.set(None)

    def _run(self) -> Any:
        """The run of the program, or else an own one: `trackio.init` finishes the one before, so it is asked only without one."""
        if (run := self._current.get()) is None:
            run = self._own = self._trackio.init(**self._options)
        return run

    def _look(self) -> None:
        tick, charts = self._last or (0, ())
        with self._looking.measured():
            for timeline in {view.timeline for view in charts}:
                for finding in findings_over_time(timeline):
                    self.alert(finding, tick)


def binned(reducer: Histogram | Quantile, state: State, bins: int = 64) -> tuple[Tensor, Tensor]:
    """Counts of a distribution and the edges of their bins, as `numpy.histogram` gives them; kept axes are added up.

    Args:
        reducer: a `Histogram`, whose own bins are taken, without what lies outside; or a `Quantile`, whose buckets are
            counted, each as a whole, in `bins` bins from the minimum to the maximum.
        state: of the reducer, with at least one observation.
        bins: their number, for a `Quantile`.

    Returns:
        Counts of shape (bins,) and edges of shape (bins + 1,), float64. There are none if no element was finite.

    >>> quantile = Quantile()
    >>> counts, edges = binned(quantile, quantile.update({}, torch.arange(1024.0)), bins=4)
    >>> counts.sum().item(), edges.tolist()
    (1024.0, [0.0, 255.75, 511.5, 767.25, 1023.0])
    """
    if isinstance(reducer, Histogram):
        result: Any = reducer.compute(state)
        edges = result["edges"].double().cpu()
        return result["counts"].cpu().double().reshape(-1, len(edges) - 1).sum(0), edges
    counts = state["counts"].reshape(-1, state["counts"].shape[-1]).sum(0).cpu().double()
    if not counts.any():
        return torch.empty(0, dtype=torch.float64, device="cpu"), torch.empty(0, dtype=torch.float64, device="cpu")
    low, high = state["min"].min().item(), state["max"].max().item()
    ends = reducer.edges().clamp(low, high)
    if low == high:
        low, high = low - 0.5, high + 0.5  # as NumPy does
    found = torch.histogram((ends[1:] + ends[:-1]) / 2, bins, range=(low, high), weight=counts)
    return found.hist, found.bin_edges
