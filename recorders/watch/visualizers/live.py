"""A table of layers with the course of each number, redrawn in place."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from recorders.errors import require
from recorders.recordings.display import LOST, printable, sparkline
from recorders.watch.charts import ChartView, axis_of
from recorders.watch.diagnosis.finding import Findings
from recorders.watch.diagnosis.over_time import findings_over_time
from recorders.watch.visualizers.html.columns import MISSING, Columns, statistics_of
from recorders.watch.visualizers.screen import NotebookScreen, Screen
from recorders.watch.visualizers.visualizer import Pace, shortened

PAUSE, SHARE = 0.1, 0.02
"""The least time between two drawings, in seconds, and the most that drawing, or looking for findings, takes of the time."""

_COURSE = 24
_FINDINGS = 5


@dataclass(frozen=True)
class _Row:
    """One statistic of one layer of a chart."""

    view: ChartView
    layer: str
    statistic: str

    @property
    def key(self) -> tuple[str, str]:
        return self.view.chart.row(self.layer), self.statistic

    @property
    def label(self) -> str:
        return printable(self.layer if len(self.view.lines) < 2 else f"{self.layer} {self.statistic}")


class LiveTable:
    """Findings first; then a row for each layer of each chart: the last value, the course, the lowest and the highest value.

    Losses and metrics come before layers. If the screen has too few lines, layers with findings are shown, and those that changed
    most.
    """

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._columns: Columns | None = None
        self._rows: list[_Row] = []
        self._charts: Sequence[ChartView] = ()
        self._drawing, self._looking = Pace(PAUSE, SHARE), Pace(PAUSE, SHARE)
        self._found, self._drawn = Findings((), ()), True

    def show(self, tick: int, charts: Sequence[ChartView]) -> None:
        """Reads a tick, and those before it if the timeline is new; draws the table if that is due."""
        new: list[tuple[str, str]] = []
        timeline = charts[0].timeline
        if charts != self._charts:
            self._charts = list(charts)
            self._rows = [row for view in sorted(charts, key=_later) if not view.chart.across for row in _rows_of(view)]
            new = [key for row in self._rows for key in (row.key, (row.key[0], "nonfinite"))]
        if self._columns is None or self._columns.timeline is not timeline:
            self._columns = Columns.before(timeline, tick, new)
        self._columns.add(tick, new)
        self._drawn = False
        self.refresh()

    def refresh(self) -> None:
        """Draws what was not drawn, if that is due."""
        if self._columns is not None and not self._drawn and self._drawing.due:
            self._draw(self._columns)

    def flush(self) -> None:
        """Draws what was not drawn; the table stays where it is."""
        if self._columns is not None and not self._drawn:
            self._looking = Pace(PAUSE, SHARE)
            self._draw(self._columns)
        self._screen.leave(self)

    def _draw(self, columns: Columns) -> None:
        with self._drawing.measured():
            if self._looking.due:
                with self._looking.measured():
                    self._found = findings_over_time(columns.timeline)
            self._screen.put(self, self._lines(columns))
            self._drawn = True

    def _lines(self, columns: Columns) -> list[str]:
        width, height = self._screen.size
        room = max(height * 3 // 4, 4)
        course = max(8, min(_COURSE, width // 4))
        every = math.ceil(len(columns) / course)
        both = columns.table([row.key for row in self._rows] + [(row.key[0], "nonfinite") for row in self._rows], every)
        values, count = both[: len(self._rows)], both[len(self._rows) :]
        values = torch.where(count > 0, torch.nan, values)  # values that were not finite are kept out of the statistics
        recorded = (values != MISSING).any(1).nonzero().ravel().tolist()
        found = self._found[: max(min(_FINDINGS, room // 4), 1)]
        left = room - 2 - len(found) - (len(self._found) > len(found))
        chosen = self._chosen(values, recorded, left)
        text: Any = require("rich.text", "cli").Text
        axis = axis_of(columns.timeline)
        lines = [text(f"{axis} {columns.ticks[-1]}", style="bold")]
        for finding in found:
            since = "" if finding.since is None else f", since {axis} {finding.since}"
            lines.append(
                text.assemble(("! ", "bold red"), (printable(finding.layer), "bold"), printable(f"{since}: {finding.what}"))
            )
        if len(self._found) > len(found):
            lines.append(text(f"  and {len(self._found) - len(found)} more", style="red"))
        lines += self._table(values, chosen, columns.timeline.at(columns.ticks[-1]), width - course - 38)
        if len(chosen) < len(recorded):
            lines.append(text(f"\u2026 and {len(recorded) - len(chosen)} more rows, which changed less", style="dim"))
        return rendered(lines, width, isinstance(self._screen, NotebookScreen))

    def _chosen(self, values: Tensor, recorded: list[int], room: int) -> list[int]:
        """The rows to show, in the order of charts and layers; each chart takes one more line for its title."""
        ill = {finding.layer for finding in self._found}
        courses = values.tolist()  # of thousands of rows, faster than tensors one by one

        def rank(number: int) -> tuple[int, float]:
            row = self._rows[number]
            return (1 if row.layer in ill else 2) * _later(row.view), -_change(courses[number], row.view)

        chosen: list[int] = []
        titles: set[str] = set()
        for number in sorted(recorded, key=rank):
            title = self._rows[number].view.title
            if len(chosen) + len(titles | {title}) + 1 > room:
                break
            chosen.append(number)
            titles.add(title)
        return sorted(chosen)

    def _table(self, values: Tensor, chosen: Sequence[int], latest: Mapping[str, Mapping[str, float]], wide: int) -> Iterator[Any]:
        """A line for each row, and one for the title of each chart."""
        text: Any = require("rich.text", "cli").Text
        title = None
        names = [shortened(self._rows[number].label, max(wide, 12)) for number in chosen]
        for number, label in zip(chosen, names, strict=True):
            row, known = self._rows[number], values[number]
            if row.view.title != title:
                title = row.view.title
                unit = f" ({row.view.unit})" if row.view.unit and row.view.unit != title.lower() else ""
                yield text(printable(title + unit), style="bold cyan")
            marks = text(
                sparkline([None if value == MISSING else value for value in known.tolist()], row.view.log_scale), style="green"
            )
            marks.highlight_regex(LOST, "bold red")
            finite = known[known.isfinite() & (known != MISSING)]
            span = f"{finite.min().item():.3g} \u2026 {finite.max().item():.3g}" if len(finite) else ""
            name, statistic = row.key
            last = latest.get(name, {}).get(statistic, math.nan)
            shown = "\u2013" if math.isnan(last) else f"{last:.4g}"
            yield text.assemble(f"  {label:{max(map(len, names))}}  {shown:>10}  ", marks, (f"  {span}", "dim"))


def _later(view: ChartView) -> bool:
    """Losses and metrics come before layers."""
    return not view.is_pushed


def _rows_of(view: ChartView) -> Iterator[_Row]:
    for layer in view.layers:
        for statistic in view.lines or statistics_of(view)[:1]:
            yield _Row(view, layer, statistic)


def _change(values: list[float], view: ChartView) -> float:
    """From the first to the last value: orders of magnitude, or a share of the range if the range has ends."""
    known = [value for value in values if value != MISSING]
    if not all(map(math.isfinite, known)):
        return math.inf
    first, last = known[0], known[-1]
    low, high = view.limits
    if math.isfinite(high - low):
        return abs(last - first) / (high - low)
    return abs(math.log10(last / first)) if first * last > 0 else float(first != last)


def rendered(parts: Sequence[Any], width: int, notebook: bool = False) -> list[str]:
    """Lines with colours, at most as wide as the screen."""
    console: Any = require("rich.console", "cli").Console(
        file=io.StringIO(),
        width=width,
        force_terminal=True,
        force_jupyter=False,
        legacy_windows=False,
        color_system="standard" if notebook else "auto",
        highlight=False,
    )
    for part in parts:
        console.print(part, no_wrap=True, overflow="ellipsis", crop=True)
    lines: list[str] = console.file.getvalue().splitlines()
    return lines
