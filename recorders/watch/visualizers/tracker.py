"""Charts as numbers for any tracker that accelerate knows, or that has the same methods."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from recorders.errors import LensError, require
from recorders.watch.charts import ChartView
from recorders.watch.visualizers.mlflow import mlflow_name
from recorders.watch.visualizers.movers import MOST, Movers


class TrackerVisualizer:
    """Logs each number of each chart to a tracker that accelerate knows, with one `log` for each tick, whose step is the tick.

    The names are `chart/layer/statistic`, as those of `WandbVisualizer`; most trackers group them by what is before a slash.

    A tracker given by name is started at the first tick, and finished by `flush`. Others belong to who started them:
    `accelerator.end_training()` finishes those of an `Accelerator`, which log on its main process only.

    Four are treated in their own way. Names for "mlflow" have codes for characters that it does not take, see `mlflow_name`.
    "clearml" would write 0 for numbers that are not finite, so these are left out. A run of "wandb" that was started before gets
    the numbers at the step at which it is, or the next one, because W&B drops earlier steps, and `tick` with them. "dvclive", if it
    was started before, stays at its step.

    Args:
        tracker: a name that accelerate knows ("aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "tensorboard",
            "trackio", "wandb", or that of a class of your own, given to `accelerate.tracking.register_tracker_class`); or an
            `Accelerator`; or a tracker that was started, which is any object with `log(values, step)`.
        project: of a tracker that is started.
        folder: in which TensorBoard and Aim write, if they are started.
        most: of a chart with more layers, so many are logged at each tick: those that moved most, see `Movers`; None for all.
        options: of a tracker that is started, which accelerate hands to its package, as `init_kwargs` of `init_trackers`.

    Raises:
        LensError: the name is unknown, the object has no `log`, or it takes no options; or `most` is less than 1.
        MissingExtraError: accelerate or the package of the tracker is not installed.

    >>> from recorders.watch.charts import Chart
    >>> from recorders.watch.timeline import Timeline
    >>> class Printer:
    ...     name = "printer"
    ...
    ...     def log(self, values, step):
    ...         print(step, values)
    >>> timeline = Timeline()
    >>> timeline.append(0, {"Loss/train": {"mean": 2.0}})
    >>> TrackerVisualizer(Printer()).show(0, [ChartView(Chart("Loss", ("loss",), ranges=None), timeline, ("train",))])
    0 {'Loss/train/mean': 2.0}
    """

    def __init__(
        self,
        tracker: Any,
        project: str = "recorders",
        *,
        folder: str = ".",
        most: int | None = MOST,
        **options: Any,
    ) -> None:
        self._class: Any = None
        if isinstance(tracker, str):
            self._class = _maker(tracker)
        elif isinstance(tracker, type) or not callable(getattr(tracker, "log", None)):
            raise LensError(f"a tracker is a name, an Accelerator, or an object with log(values, step); got {tracker!r:.100}")
        elif options:
            raise LensError(f"options are for a tracker that is started, by its name; {tracker!r:.100} was started before")
        self._given = tracker
        self._project, self._folder, self._options = project, folder, options
        self._movers = Movers(most)
        self._own: Any = None
        self._last = -1

    def show(self, tick: int, charts: Sequence[ChartView]) -> None:
        """Hands the numbers of one tick to each tracker.

        Raises:
            LensError: the `Accelerator` has no trackers: call its `init_trackers` first.
            Exception: what a tracker raises; the others got the numbers.
        """
        values = self._movers.numbers(tick, charts)
        failed: Exception | None = None
        for tracker in self._trackers():
            try:
                self._log(tracker, tick, values)
            except Exception as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def flush(self) -> None:
        """Finishes the tracker that the visualizer started; if ticks follow, they are of another run."""
        own, self._own = self._own, None
        if own is not None:
            own.finish()

    def _trackers(self) -> Sequence[Any]:
        if self._class is not None:
            if self._own is None:
                self._own = self._start()
            return (self._own,)
        if not hasattr(self._given, "trackers"):
            return (self._given,)
        if not self._given.is_main_process:
            return ()
        if not self._given.trackers:
            raise LensError("the Accelerator has no trackers: call accelerator.init_trackers(...) before the first tick")
        return tuple(self._given.trackers)

    def _start(self) -> Any:
        require("accelerate", "trackers").PartialState()  # trackers ask it whether they are on the main process
        folder = (self._folder,) if self._class.requires_logging_directory else ()
        made = self._class(self._project, *folder, **self._options)
        if hasattr(made, "start"):  # in older releases of accelerate, making one starts it
            made.start()
        return made

    def _log(self, tracker: Any, tick: int, values: dict[str, float]) -> None:
        name = getattr(tracker, "name", "")
        if name == "mlflow":
            tracker.log({mlflow_name(key): value for key, value in values.items()}, step=tick)
        elif name == "clearml":
            tracker.log({key: value for key, value in values.items() if math.isfinite(value)}, step=tick)
        elif name == "wandb" and tracker is not self._own:
            self._last = max(tracker.tracker.step, self._last + 1)
            tracker.log({"tick": tick, **values}, step=self._last, commit=False)
        elif name == "dvclive" and tracker is not self._own:
            step = tracker.tracker.step
            tracker.log(values, step=tick)
            tracker.tracker.step = step
        else:
            tracker.log(values, step=tick)


def _maker(name: str) -> Any:
    """The class of a tracker; its package is imported now, and not at the first tick."""
    known: dict[str, Any] = require("accelerate.tracking", "trackers").LOGGER_TYPE_TO_CLASS
    if name not in known:
        raise LensError(f"accelerate knows no tracker {name!r}; choose from {', '.join(map(repr, sorted(known)))}")
    if known[name].__module__ == "accelerate.tracking":
        require(name, "trackers")  # its own are named as their packages
    return known[name]
