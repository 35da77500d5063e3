"""Charts as metrics of a run of MLflow."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Sequence
from typing import Any

from recorders.errors import require
from recorders.watch.charts import ChartView
from recorders.watch.visualizers.movers import MOST, Movers


class MlflowVisualizer:
    """Logs each number of each chart as a metric of a run of MLflow, with one call for each tick, whose step is the tick.

    The metrics are `chart/layer/statistic`, as those of `WandbVisualizer`. MLflow takes letters, digits and `_-./ :` in names,
    and at most 250 of them; `mlflow_name` says how others are written, such as "mean-2b-std" for "mean+std". It stores infinity
    as the largest number.

    If the program has a run, `mlflow.active_run()`, it is used, and the program ends it. Otherwise the first tick creates one, and
    `flush` ends it; it is not made the active run, so the program can still start its own. Where it is stored is MLflow's choice:
    `mlflow.set_tracking_uri`, `MLFLOW_TRACKING_URI`, or else a file in the working folder.

    Args:
        experiment: of a run that the visualizer creates, which is created if there is none of this name; None for that of
            `mlflow.set_experiment`, or "recorders".
        most: of a chart with more layers, so many are logged at each tick: those that moved most, see `Movers`; None for all.
        options: of such a run, for `MlflowClient.create_run`: `run_name=`, `tags=`, ...

    Raises:
        MissingExtraError: mlflow is not installed.
        LensError: `most` is less than 1.

    >>> from recorders import Inspector, lenses
    >>> Inspector(net, lenses.OutputNorm(), show=MlflowVisualizer("experiment", run_name="first"))  # doctest: +SKIP
    """

    def __init__(self, experiment: str | None = None, *, most: int | None = MOST, **options: Any) -> None:
        self._mlflow: Any = require("mlflow", "mlflow")
        self._experiment, self._options = experiment, options
        self._movers = Movers(most)
        self._own: str | None = None

    def show(self, tick: int, charts: Sequence[ChartView]) -> None:
        """Writes the numbers of one tick.

        Raises:
            mlflow.MlflowException: they cannot be written.
        """
        active = self._mlflow.active_run()
        run = self._start() if active is None else active.info.run_id
        values = {mlflow_name(name): value for name, value in self._movers.numbers(tick, charts).items()}
        self._mlflow.log_metrics(values, step=tick, run_id=run)

    def flush(self) -> None:
        """Ends the run that the visualizer created; if ticks follow, they are of another run."""
        own, self._own = self._own, None
        if own is not None:
            self._mlflow.MlflowClient().set_terminated(own)

    def _start(self) -> str:
        if self._own is None:
            client = self._mlflow.MlflowClient()
            self._own = str(client.create_run(self._experiment_id(client), **self._options).info.run_id)
        return self._own

    def _experiment_id(self, client: Any) -> str:
        """`mlflow.set_experiment` sets the first of these variables, too."""
        if self._experiment is None and (known := os.environ.get("MLFLOW_EXPERIMENT_ID")):
            return known
        name = self._experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "recorders"
        found = client.get_experiment_by_name(name)
        return str(client.create_experiment(name) if found is None else found.experiment_id)


def mlflow_name(name: str) -> str:
    """A name as MLflow takes it: other characters become their code between dashes; `name_of_mlflow` is the inverse.

    So does a dash before what could be read as a code, and what MLflow would take for a step in a path: a dot or a slash at the
    beginning or the end of a part.

    >>> mlflow_name("Output Norm/block[0]/mean+std")
    'Output Norm/block-5b-0-5d-/mean-2b-std'
    >>> name_of_mlflow(mlflow_name("Output Norm/block[0]/mean+std"))
    'Output Norm/block[0]/mean+std'

    Of a name that is longer than MLflow takes, 250 characters, the first ones are kept, and a hash tells it from others.

    >>> len(mlflow_name("layer." * 100)), mlflow_name("layer." * 100)[-12:]
    (250, 'r.l_d22a9f68')
    """
    written = _UNKNOWN.sub(lambda found: f"-{ord(found[0]):x}-", name)
    if len(written) > _LONGEST:
        written = f"{written[: _LONGEST - 9]}_{zlib.crc32(written.encode()):08x}"
    return written


def name_of_mlflow(name: str) -> str:
    """The name of which `mlflow_name` made this one, if it was not too long for MLflow."""
    return re.sub(r"-([0-9a-f]+)-", lambda found: chr(int(found[1], 16)), name)


_LONGEST = 250
"""The number of characters that MLflow takes in a name."""

# Windows has no colon in the names of files, so MLflow does not take it there. A part of a path that is "." or "..", or empty, is
# no name: its dots, and the slash after it, are written as codes.
_UNKNOWN = re.compile(r"[^A-Za-z0-9_\-./ ]|-(?=[0-9a-f])|(?:(?<=/)|^)[./]|/\Z")
