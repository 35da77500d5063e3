"""Charts as tables: one that is redrawn in place in a terminal or notebook, or tables at each tick; made with rich."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import weakref
from collections.abc import Sequence
from typing import IO, Any

from recorders.errors import require
from recorders.recordings.display import printable
from recorders.watch.charts import ChartView, Point, ends
from recorders.watch.visualizers.live import LiveTable
from recorders.watch.visualizers.screen import screen_of

_DASH = "\u2013"
_FILE_WIDTH = 160


class TextVisualizer:
    """Shows charts as text: in a terminal or a notebook one table, redrawn in place; in a file or a pipe tables at each tick.

    The table in place has findings first, then a row for each layer of each chart: the last value, its course as a sparkline
    ("\u00d7" for values that were not finite), the lowest and the highest value. If there are more rows than fit, it shows losses
    and metrics, layers with findings, and those that changed most. It is drawn so seldom that drawing takes at most 2 % of the
    time. What the program prints stays whole, above it.

    Tables at each tick are one for each chart: one row per layer, one column per line or range; "\u2013" if nothing was recorded. A
    chart that compares layers has one row per line, with the layer that its value comes from.

    Args:
        file: where to print; None for standard output.
        width: of tables at each tick, in characters; None for the width of the terminal, or 160 in a file.
        live: redraw one table in place; None if standard output, or the file, is a terminal or belongs to a notebook.

    Raises:
        MissingExtraError: rich is not installed.

    >>> import sys
    >>> from recorders.watch.charts import Chart
    >>> from recorders.watch.timeline import Timeline
    >>> timeline = Timeline()
    >>> timeline.append(3, {"Loss/train": {"mean": 0.25, "min": 0.125, "max": 0.5}})
    >>> view = ChartView(Chart("Loss", ("loss",), ranges="min-max"), timeline, ("train", "eval"))
    >>> TextVisualizer(sys.stdout, width=60).show(3, [view])
    Loss, tick 3
    layer  mean      min-max
    train  0.25  0.125 \u2026 0.5
    eval      \u2013            \u2013
    """

    def __init__(self, file: IO[str] | None = None, width: int | None = None, live: bool | None = None) -> None:
        console: Any = require("rich.console", "cli").Console
        self._console: Any = console(file=file, width=width, highlight=False)
        if width is None and not self._console.is_terminal:
            self._console = console(file=file, width=_FILE_WIDTH, highlight=False)
        self._table: Any = require("rich.table", "cli").Table
        self._text: Any = require("rich.text", "cli").Text
        self._file, self._wanted = file, live
        self._live: LiveTable | None = None

    def show(self, tick: int, charts: Sequence[ChartView]) -> None:
        """Shows the charts at one tick; charts without a number are left out."""
        if self._live is None and self._wanted is not False:
            screen = screen_of(sys.stdout if self._file is None else self._file, force=bool(self._wanted))
            self._wanted = screen is not None
            if screen is not None:
                self._live = LiveTable(screen)
                weakref.finalize(self, _finish, self._live, os.getpid())
        if self._live is not None and len({view.timeline for view in charts}) == 1:
            self._live.show(tick, charts)
        else:
            self._print(tick, charts)

    def flush(self) -> None:
        """Draws the table in place for the last time; what is shown later is drawn below it."""
        if self._live is not None:
            self._live.flush()

    def _print(self, tick: int, charts: Sequence[ChartView]) -> None:
        for view in charts:
            rows, points = view.at(tick), view.points(tick)
            if rows or points:
                unit = f" ({view.unit})" if view.unit and view.unit != view.title.lower() else ""
                self._console.print(self._text(printable(f"{view.title}{unit}, {view.axis} {tick}"), style="bold"))
                self._console.print(self._comparison(points) if points else self._chart(view, rows))

    def _comparison(self, points: list[Point]) -> Any:
        table = self._table(box=None, pad_edge=False)
        of_one_layer = any(point.line != point.layer for point in points)
        for name in ("", "value", "layer") if of_one_layer else ("layer", "share"):
            table.add_column(name, justify="right" if name in ("value", "share") else "left", no_wrap=name in ("value", "share"))
        for point in points:
            cells = [_number(point.value), self._text(printable(point.layer))] if of_one_layer else [f"{point.value:.1%}"]
            table.add_row(self._text(printable(point.line)), *cells)
        return table

    def _chart(self, view: ChartView, rows: dict[str, dict[str, float]]) -> Any:
        table = self._table(box=None, pad_edge=False)
        # Text, because in a str rich would read [brackets] as markup.
        nonfinite = any(row.get("nonfinite") for row in rows.values())
        table.add_column("layer", overflow="fold")
        for name in (*view.lines, *view.ranges, *(["non-finite"] if nonfinite else [])):
            table.add_column(name, justify="right", no_wrap=True)
        for layer in view.layers:
            row = rows.get(layer, {})
            cells = [_number(row.get(line, math.nan)) for line in view.lines]
            cells += [_range(*ends(row, aggregation)) for aggregation in view.ranges]
            cells += [f"{row.get('nonfinite', 0):.0f}"] if nonfinite else []
            table.add_row(self._text(printable(layer)), *cells)
        return table


def _number(value: float) -> str:
    return _DASH if math.isnan(value) else f"{value:.4g}"


def _range(low: float, high: float) -> str:
    return _DASH if math.isnan(low) and math.isnan(high) else f"{_number(low)} \u2026 {_number(high)}"


def _finish(live: LiveTable, process: int) -> None:
    """At the end of the process that made it; its timeline may be closed, and its terminal gone."""
    if process == os.getpid():
        with contextlib.suppress(Exception):
            live.flush()
