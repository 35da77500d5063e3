"""Charts as metrics of a run of Weights & Biases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from recorders.errors import RecordingWarning, require
from recorders.watch.charts import ChartView
from recorders.watch.visualizers.movers import MOST, Movers
from reducers.errors import warn_user

_PATIENCE = 15
"""How long to wait for somebody to log in, and then for the server, in seconds."""


class WandbVisualizer:
    """Logs each number of each chart as a metric of a run of Weights & Biases, with one `log` for each tick.

    The metrics are `chart/layer/statistic`, such as `Output Norm/encoder.0/mean`: every line, both ends of every range
    ("mean-std", "mean+std", "min", "max", "Q1", "Q3"), "nonfinite" if there was such a value, `chart/line` for a comparison of
    layers, and "layers left out" of a chart with more than `most`. The unit is that of the chart, which its lens names. Their
    horizontal axis is the metric `tick`.

    If the program has a run, `wandb.run`, it is used, and the program finishes it. The visualizer never goes ahead of its step,
    because W&B drops what is logged at an earlier step: it logs at the step at which the run is, or at the next one if that has the
    numbers of another tick.

    Otherwise the first tick starts a run, in which the step is the tick, and `flush` finishes it. If nobody is logged in, or the
    server does not answer, that run is offline, and `wandb sync` sends it later. Each of both is waited for once, for about 15
    seconds; no tick waits for the network afterwards.

    Args:
        project: of a run that the visualizer starts; None for W&B's own choice.
        most: of a chart with more layers, so many are logged at each tick: those that moved most, see `Movers`; None for all.
        options: of such a run, for `wandb.init`: `name=`, `mode="offline"`, `dir=`, `config=`, ...; `id=` and `resume="allow"` to
            continue one.

    Raises:
        MissingExtraError: wandb is not installed.
        LensError: `most` is less than 1.

    >>> from recorders.watch.charts import Chart
    >>> from recorders.watch.timeline import Timeline
    >>> timeline = Timeline()
    >>> timeline.append(0, {"Loss/train": {"mean": 2.0}})
    >>> visualizer = WandbVisualizer("project", mode="disabled")
    >>> visualizer.show(0, [ChartView(Chart("Loss", ("loss",), ranges=None), timeline, ("train",))])
    >>> visualizer.flush()
    """

    def __init__(self, project: str | None = None, *, most: int | None = MOST, **options: Any) -> None:
        self._wandb: Any = require("wandb", "wandb")
        self._options: dict[str, Any] = {"project": project, **options}
        self._movers = Movers(most)
        self._own: Any = None
        self._run: Any = None
        self._titles: set[str] = set()
        self._last = -1

    def show(self, tick: int, charts: Sequence[ChartView]) -> None:
        """Hands the numbers of one tick to the process that writes and sends them.

        Raises:
            wandb.Error: a run cannot be started, even offline.

        Warns:
            RecordingWarning: a run could not be started online.
        """
        run = self._wandb.run or self._start()
        if run is not self._run:
            self._run, self._titles, self._last = run, set(), -1
            run.define_metric("tick", hidden=True)
        for title in {view.title for view in charts} - self._titles:
            if "*" not in title:  # W&B takes a star at the end only
                run.define_metric(f"{title}/*", step_metric="tick")
            self._titles.add(title)
        step = tick
        if run is not self._own:
            step = self._last = max(run.step, self._last + 1)
        # A row of the program's run may get more: the next step completes it.
        run.log({"tick": tick, **self._movers.numbers(tick, charts)}, step=step, commit=run is self._own)

    def flush(self) -> None:
        """Finishes the run that the visualizer started, which sends what was not sent; if ticks follow, they are of another run."""
        own, self._own = self._own, None
        if own is not None:
            own.finish()

    def _start(self) -> Any:
        """A new run: offline, rather than none, if it cannot be online."""
        mode = self._options.get("mode") or self._wandb.setup().settings.mode
        options = {"settings": self._wandb.Settings(init_timeout=_PATIENCE), **self._options}
        try:
            if mode != "online" or self._wandb.login(timeout=_PATIENCE):
                self._own = self._wandb.init(**options)
                return self._own
            why = "nobody is logged in"
        except Exception as error:
            if mode != "online":
                raise
            why = f"{type(error).__name__}: {error}"
        self._options["mode"] = "offline"  # nothing waits for the network twice
        self._own = self._wandb.init(**{**options, "mode": "offline"})
        message = f"no run of W&B could be started online ({why})"
        warn_user(f"{message}: this one is offline, and `wandb sync` sends it later", RecordingWarning)
        return self._own
