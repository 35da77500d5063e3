"""The page of a training that goes on."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Sequence
from pathlib import Path

from recorders.errors import LensError
from recorders.recordings.atomic_files import as_path
from recorders.watch.charts import ChartView
from recorders.watch.diagnosis.over_time import findings_over_time
from recorders.watch.visualizers.html.columns import Columns
from recorders.watch.visualizers.html.page import keys_of, page, write_whole
from recorders.watch.visualizers.html.runs import Run
from recorders.watch.visualizers.visualizer import Pace

PAUSE = 5.0
"""The least time between two writings of the page, in seconds."""

SHARE = 0.02
"""The most that writing may take of the time of the training."""


class HtmlVisualizer:
    """Writes the charts into one HTML page, which opens without a network and draws itself again while the training goes on.

    Each tick is read once. The page is written whole, and renamed into place: at the first tick; then after 5 seconds at the
    earliest, and so seldom that writing takes at most 2 % of the time; and at the end, by `flush`, which `Inspector.detach`,
    `replay` and the end of the process call. If the process is killed, `write_report` makes the page from the timeline.

    Args:
        path: the file; its folder is created if necessary.
        title: the title of the page.

    >>> import tempfile
    >>> from recorders.watch.charts import Chart
    >>> from recorders.watch.timeline import Timeline
    >>> timeline = Timeline()
    >>> timeline.append(0, {"Loss/train": {"mean": 2.0}})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     visualizer = HtmlVisualizer(f"{folder}/report.html")
    ...     visualizer.show(0, [ChartView(Chart("Loss", ("loss",), ranges=None), timeline, ("train",))])
    ...     visualizer.path.read_text()[:15]
    '<!doctype html>'
    """

    def __init__(self, path: str | os.PathLike[str] = "report.html", title: str = "Training report") -> None:
        self.path = Path(as_path(path)).absolute()
        self._live = _LivePage(self.path, title)
        weakref.finalize(self, self._live.finish, os.getpid())

    def show(self, tick: int, charts: Sequence[ChartView]) -> None:
        """Reads one tick, and those before it if they are new; writes the page if it is due.

        Raises:
            LensError: the charts are of several timelines.
            OSError: the page cannot be written.
        """
        if charts:
            self._live.add(tick, charts)
            if self._live.pace.due:
                self._live.write(live=True)

    def flush(self) -> None:
        """Writes the page with all ticks so far, as that of a training that ended."""
        if self._live.open:
            self._live.write(live=False)


class _LivePage:
    """What outlives the visualizer until the last page is written."""

    def __init__(self, path: Path, title: str) -> None:
        self._path, self._title = path, title
        self._columns: Columns | None = None
        self._charts: Sequence[ChartView] = ()
        self.pace, self.open = Pace(PAUSE, SHARE), False

    def add(self, tick: int, charts: Sequence[ChartView]) -> None:
        timeline = charts[0].timeline
        if any(view.timeline is not timeline for view in charts):
            raise LensError("one page shows charts of one timeline; make one HtmlVisualizer for each")
        new = () if charts == self._charts else keys_of(charts)
        if self._columns is None or self._columns.timeline is not timeline:
            self._columns = Columns.before(timeline, tick, new)
        self._columns.add(tick, new)
        self._charts, self.open = list(charts), True

    def write(self, live: bool) -> None:
        if self._columns is None:
            return
        with self.pace.measured():
            timeline = self._columns.timeline
            run = Run(timeline, findings=findings_over_time(timeline), charts=self._charts)
            write_whole(self._path, page([run], [self._columns], self._title, live))
        self.open = live

    def finish(self, process: int) -> None:
        """At the end of the process that made it; a forked one has an old copy."""
        if self.open and process == os.getpid():
            with contextlib.suppress(OSError):
                self.write(live=False)
