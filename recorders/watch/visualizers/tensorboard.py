"""Charts as scalars, and histograms, for TensorBoard."""

from __future__ import annotations

import contextlib
import math
import os
import re
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from recorders.errors import require
from recorders.recordings.atomic_files import as_path
from recorders.watch.charts import ChartView
from recorders.watch.visualizers.movers import MOST, Movers
from recorders.watch.visualizers.numbers import ends_of

_LARGEST = 3.4028234e38
_STRING = 7
"""The number of this dtype in TensorBoard."""

_TOGETHER = 16
"""So many layers are in one section, and in one panel together."""


class TensorBoardVisualizer:
    """Writes each number of each chart as a scalar for TensorBoard, at its tick.

    The tags are `chart/layer/statistic`, such as `Output Norm/encoder.0/mean`: every line, both ends of every range ("mean-std",
    "mean+std", "min", "max", "Q1", "Q3"), "nonfinite" if there was such a value, `chart/line` for a comparison of layers, and
    "layers left out" of a chart with more than `most`. The unit is that of the chart, which its lens names. All are in one run,
    comparisons too.

    The tab "Custom Scalars" has a section for each chart, with one panel for each layer, its ranges shaded, and one for all. If
    there are more than 16 layers, a chart has a section for each 16 of them, closed at first. A comparison is one panel. The tabs
    "Time Series" and "Scalars" have a panel for each tag.

    Ticks that come again, as in a training that went back to a checkpoint, in a resumed one or in a replay, replace those of the
    folder from the first of them on. TensorBoard stores float32. There are no histograms: a timeline holds no distributions.

    Args:
        folder: of the run, created at the first tick; None for a new one in `runs`, named for the time. Give each training its own.
        most: of a chart with more layers, so many are written at each tick: those that moved most, see `Movers`; None for all.

    Raises:
        MissingExtraError: tensorboard is not installed.
        LensError: `most` is less than 1.

    >>> import tempfile
    >>> from recorders.watch.charts import Chart
    >>> from recorders.watch.timeline import Timeline
    >>> from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    >>> timeline = Timeline()
    >>> timeline.append(0, {"Loss/train": {"mean": 2.0, "min": 1.0, "max": 4.0}})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     visualizer = TensorBoardVisualizer(folder)
    ...     visualizer.show(0, [ChartView(Chart("Loss", ("loss",), ranges="min-max"), timeline, ("train",))])
    ...     visualizer.flush()
    ...     EventAccumulator(folder).Reload().Tags()["scalars"]
    ['Loss/train/mean', 'Loss/train/min', 'Loss/train/max']
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None, *, most: int | None = MOST) -> None:
        self._board: Any = require("tensorboard.summary.writer.event_file_writer", "tensorboard")
        self._events: Any = require("tensorboard.compat.proto.event_pb2", "tensorboard")
        self._summaries: Any = require("tensorboard.compat.proto.summary_pb2", "tensorboard")
        self._layouts: Any = require("tensorboard.plugins.custom_scalar.layout_pb2", "tensorboard")
        self.folder = Path("runs", time.strftime("%Y-%m-%d_%H-%M-%S")) if folder is None else Path(as_path(folder))
        self._movers = Movers(most)
        self._writer: Any = None
        self._last = 0
        self._laid_out: list[tuple[str, tuple[str, ...]]] = []

    def show(self, tick: int, charts: Sequence[ChartView]) -> None:
        """Hands the numbers of one tick to the thread that writes them.

        Raises:
            OSError: the folder cannot be written.
        """
        if self._writer is None or tick <= self._last:
            self._start(tick)
        self._last = tick
        panels = [(view.title, view.layers) for view in charts]
        if panels != self._laid_out:
            self._write(tick, summary=self._layout(charts))
            self._laid_out = panels
        value = self._summaries.Summary.Value
        values = [value(tag=tag, simple_value=_float32(number)) for tag, number in self._movers.numbers(tick, charts).items()]
        self._write(tick, summary=self._summaries.Summary(value=values))

    def flush(self) -> None:
        """Waits until everything is written.

        Raises:
            OSError: the file cannot be written.
        """
        if self._writer is not None:
            self._writer.flush()

    def _start(self, tick: int) -> None:
        """What the folder holds from this tick on is no longer valid: TensorBoard leaves it out after this event."""
        if self._writer is None:
            # Files are read in the order of their names, which have a whole second, and then a number that is ordered as text.
            if any(f".{int(time.time())}." in path.name for path in self.folder.glob("*tfevents*")):
                time.sleep(1)
            self._writer = self._board.EventFileWriter(str(self.folder), flush_secs=5)
            weakref.finalize(self, _close, self._writer, os.getpid())
        self._laid_out = []
        self._write(tick, session_log=self._events.SessionLog(status=self._events.SessionLog.START))

    def _write(self, tick: int, **what: Any) -> None:
        self._writer.add_event(self._events.Event(wall_time=time.time(), step=tick, **what))

    def _layout(self, charts: Sequence[ChartView]) -> Any:
        """What the tab "Custom Scalars" shows; TensorBoard takes the last one of a run."""
        few_first = sorted(charts, key=lambda view: len(view.layers) > _TOGETHER)
        sections = [section for view in few_first for section in self._sections(view)]
        plugin = self._summaries.SummaryMetadata.PluginData(plugin_name="custom_scalars")
        value = self._summaries.Summary.Value(
            tag="custom_scalars__config__", metadata=self._summaries.SummaryMetadata(plugin_data=plugin)
        )
        value.tensor.dtype = _STRING
        value.tensor.tensor_shape.SetInParent()
        value.tensor.string_val.append(self._layouts.Layout(category=sections).SerializeToString())
        return self._summaries.Summary(value=[value])

    def _sections(self, view: ChartView) -> Iterator[Any]:
        """The panels of one chart. TensorBoard draws all panels of a section as soon as it is open, so sections are small."""
        chart, lines, section = self._layouts.Chart, self._layouts.MultilineChartContent, self._layouts.Category
        title, several = re.escape(view.title), len(view.layers) > _TOGETHER
        if view.chart.across:
            yield section(title=view.title, chart=[chart(title=view.title, multiline=lines(tag=[f"{title}/"]))], closed=several)
            return
        for first in range(0, len(view.layers), _TOGETHER):
            layers = view.layers[first : first + _TOGETHER]
            panels = [chart(title=layer, margin=self._bands(view, view.chart.row(layer))) for layer in layers]
            panels.reverse()  # TensorBoard 2.21 inserts each one before those it has
            name = f"{view.title}, {layers[0]} to {layers[-1]}" if several else view.title
            if not several and len(layers) > 1 and view.lines:
                line = view.lines[0]
                panels.insert(0, chart(title=f"all layers, {line}", multiline=lines(tag=[f"{title}/.*/{line}$"])))
            yield section(title=name, chart=panels, closed=several)

    def _bands(self, view: ChartView, row: str) -> Any:
        """The ranges of one layer, each about another line, because TensorBoard draws one about each; then other lines."""
        lines = list(view.lines)
        found = []
        for low, high in map(ends_of, view.ranges):
            found.append((lines.pop(0) if lines else low, low, high))
        drawn = {name for band in found for name in band}
        found += [(name, name, name) for name in lines if name not in drawn]
        series = self._layouts.MarginChartContent.Series
        return self._layouts.MarginChartContent(
            series=[series(value=f"{row}/{line}", lower=f"{row}/{low}", upper=f"{row}/{high}") for line, low, high in found]
        )


def add_histogram(writer: Any, tag: str, result: Mapping[str, Tensor], step: int) -> None:
    """Writes the result of a `Histogram` to TensorBoard's tab "Histograms", with its own bins.

    Kept axes are added up. What lies outside the edges, and NaN, are left out: they have no place in a bin. Sums, which TensorBoard
    asks for and does not show, are those of the middles of the bins.

    Args:
        writer: a `torch.utils.tensorboard.SummaryWriter`, or anything with its `add_histogram_raw`.
        tag: the name in TensorBoard.
        result: `counts` of shape `(*kept axes, bins)` and `edges` of shape (bins + 1,).
        step: of the training.

    Raises:
        KeyError: `result` is not that of a `Histogram`.

    >>> import torch
    >>> from reducers import Histogram
    >>> class Printer:
    ...     def add_histogram_raw(self, tag, **given):
    ...         print(tag, given["num"], given["bucket_limits"], given["bucket_counts"])
    >>> histogram = Histogram(bins=2, low=0.0, high=2.0)
    >>> result = histogram.compute(histogram.update({}, torch.tensor([0.0, 1.0, 1.5, 9.0])))
    >>> add_histogram(Printer(), "out/encoder.0", result, step=3)
    out/encoder.0 3 [1.0, 2.0] [1, 2]
    """
    edges = result["edges"].double().cpu()
    counts = result["counts"].cpu().reshape(-1, len(edges) - 1).sum(0)
    middles = (edges[1:] + edges[:-1]) / 2
    writer.add_histogram_raw(
        tag,
        min=float(edges[0]),
        max=float(edges[-1]),
        num=int(counts.sum()),
        sum=float((counts * middles).sum()),
        sum_squares=float((counts * middles**2).sum()),
        bucket_limits=edges[1:].tolist(),
        bucket_counts=counts.tolist(),
        global_step=step,
    )


def _float32(number: float) -> float:
    """A finite number stays finite."""
    return max(-_LARGEST, min(number, _LARGEST)) if math.isfinite(number) else number


def _close(writer: Any, process: int) -> None:
    """Also at the end of the process that made it; a forked one has no thread that writes."""
    if process == os.getpid():
        with contextlib.suppress(OSError):
            writer.close()
