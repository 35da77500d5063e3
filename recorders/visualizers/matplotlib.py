"""Charts as small multiples, by matplotlib: one figure a chart, one panel a layer."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recorders.charts import ChartView
from recorders.visualizers.visualizer import require

__all__ = ["MatplotlibVisualizer"]

# Okabe and Ito's colours, told apart by colour-blind readers; each aggregation keeps its own in every chart.
_LINES = {
    "mean": "#0072B2",
    "median": "#D55E00",
    "min": "#56B4E9",
    "max": "#009E73",
    "std": "#CC79A7",
    "Q1": "#E69F00",
    "Q3": "#B8860B",
}
_BANDS = {"min-max": ("#7A8793", 0.22), "std": ("#0072B2", 0.30), "Q1-Q3": ("#D55E00", 0.28)}  # widest first, drawn below
_BAND_LABELS = {"min-max": "min to max", "std": "mean \u00b1 std", "Q1-Q3": "Q1 to Q3"}
_INK, _FAINT = "#333333", "#DDDDDD"
_POINTS_WITH_MARKERS = 12


class MatplotlibVisualizer:
    """Draws each chart as a figure of small panels, one a layer, in network order, with lines and shaded ranges over ticks.

    `show` only remembers what to draw, so training does not wait for drawing: figures are made when asked for, from the
    timeline as it is then. They need no display.

    Raises:
        MissingExtraError: matplotlib is not installed.

    >>> from recorders.charts import Chart
    >>> from recorders.timeline import Timeline
    >>> timeline = Timeline()
    >>> timeline.append(0, {"Loss/train": {"mean": 2.0, "std": 0.5}})
    >>> visualizer = MatplotlibVisualizer()
    >>> visualizer.show(0, [ChartView(Chart("Loss", ("loss",), "nats", ranges="std"), timeline, ("train",))])
    >>> [axes.get_title("left") for axes in visualizer.figures["Loss"].axes]
    ['train']
    """

    def __init__(self) -> None:
        self._figure: Any = require("matplotlib.figure", "plot").Figure
        self._ticker: Any = require("matplotlib.ticker", "plot")
        self._views: dict[str, ChartView] = {}

    def show(self, tick: int, charts: Sequence[ChartView]) -> None:
        """Remembers the charts for drawing."""
        self._views.update({view.title: view for view in charts})

    @property
    def figures(self) -> dict[str, Any]:
        """A `matplotlib.figure.Figure` by title of chart, drawn now; charts without any number are left out."""
        return {title: figure for title, view in self._views.items() if (figure := self._draw(view)) is not None}

    def save(self, folder: str | Path, dpi: float = 120) -> list[Path]:
        """Writes one PNG a chart, named after its title, into a folder that is made where there is none; returns their paths."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        paths = []
        for title, figure in self.figures.items():
            path = folder / f"{re.sub(r'[^a-z0-9]+', '-', title.lower()).strip('-') or 'chart'}.png"
            figure.savefig(path, dpi=dpi)
            paths.append(path)
        return paths

    def _draw(self, view: ChartView) -> Any:
        panels = {layer: _Panel(view, layer) for layer in view.layers}
        drawn = {layer: panel for layer, panel in panels.items() if panel.ticks}
        if not drawn:
            return None
        columns = _columns(len(drawn))
        rows = math.ceil(len(drawn) / columns)
        width, height = (4.2, 2.9) if columns <= 3 else (2.9, 1.85)
        figure = self._figure(figsize=(max(columns * width, 5.5), rows * height + 1.2), layout="constrained")
        grid = figure.subplots(rows, columns, sharex=True, squeeze=False)
        limits = _shared_limits(view, list(drawn.values()))
        for axes, (layer, panel) in zip(grid.flat, drawn.items(), strict=False):
            panel.draw(axes, limits[0] if limits is not None and view.log_scale else -math.inf)
            self._dress(axes, view, layer, limits, width)
        for axes in list(grid.flat)[len(drawn) :]:
            axes.remove()
        self._label(figure, view, grid, columns, len(drawn), [layer for layer in panels if layer not in drawn])
        return figure

    def _dress(self, axes: Any, view: ChartView, layer: str, limits: tuple[float, float] | None, width: float) -> None:
        room = int(width * 11)
        title = layer if len(layer) <= room else "\u2026" + layer[1 - room :]  # the end of a name tells layers apart
        axes.set_title(title, fontsize=9, color=_INK, loc="left", parse_math=False)
        if view.log_scale:
            axes.set_yscale("log")
        if limits is not None:
            axes.set_ylim(*limits)
        if view.limits is not None and view.limits[0] < 0 < view.limits[1]:
            axes.axhline(0.0, color=_INK, linewidth=0.6, zorder=1.5)
        axes.margins(x=0.02)
        axes.xaxis.set_major_locator(self._ticker.MaxNLocator(4, integer=True))
        if not view.log_scale:
            axes.yaxis.set_major_locator(self._ticker.MaxNLocator(4))
        axes.grid(True, color=_FAINT, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.tick_params(labelsize=8, color=_FAINT, labelcolor=_INK)
        for spine in axes.spines.values():
            spine.set_color(_FAINT)

    def _label(self, figure: Any, view: ChartView, grid: Any, columns: int, count: int, silent: list[str]) -> None:
        for position in range(max(0, count - columns), count):  # the lowest panel of each column has the numbers of the ticks
            grid.flat[position].tick_params(labelbottom=True)
        figure.suptitle(view.title, x=0.01, ha="left", fontsize=13, color=_INK)
        figure.supylabel(view.unit + (" (log scale)" if view.log_scale else ""), fontsize=10, color=_INK)
        figure.supxlabel("epoch" + _unseen(silent), fontsize=10, color=_INK)
        handles: dict[str, Any] = {}
        for axes in figure.axes:
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
                handles.setdefault(label, handle)
        if handles:
            figure.legend(
                handles.values(), handles.keys(), loc="outside upper right", ncols=len(handles), frameon=False, fontsize=9
            )


class _Panel:
    """What is drawn of one layer."""

    def __init__(self, view: ChartView, layer: str) -> None:
        self.view = view
        self.lines = {name: view.line(layer, name) for name in view.lines}
        self.bands = {name: view.band(layer, name) for name in _BANDS if name in view.ranges}
        self.ticks = sorted({tick for ticks, *_ in (*self.lines.values(), *self.bands.values()) for tick in ticks})

    def draw(self, axes: Any, floor: float) -> None:
        """Draws into one axes; ranges that reach below `floor` end there."""
        for name, (ticks, low, high) in self.bands.items():
            colour, alpha = _BANDS[name]
            low, high = ([_shown(value, floor) for value in values] for values in (low, high))
            axes.fill_between(ticks, low, high, color=colour, alpha=alpha, linewidth=0, label=_BAND_LABELS[name])
            if len(ticks) == 1:  # one tick has no area to fill
                axes.vlines(ticks, low, high, color=colour, alpha=alpha, linewidth=5)
        marker = "o" if len(self.ticks) <= _POINTS_WITH_MARKERS else None
        for name, (ticks, values) in self.lines.items():
            shown = [_shown(value, -math.inf) for value in values]
            axes.plot(ticks, shown, color=_LINES[name], linewidth=1.6, marker=marker, markersize=3, label=name)

    def positive(self) -> list[float]:
        """What a logarithmic axis must show; a deviation that reaches down to zero is cut off instead."""
        ends = [values for _, values in self.lines.values()]
        ends += [end for name, (_, low, high) in self.bands.items() for end in ((high,) if name == "std" else (low, high))]
        return [value for end in ends for value in end if math.isfinite(value) and value > 0]


def _shared_limits(view: ChartView, panels: list[_Panel]) -> tuple[float, float] | None:
    """One value axis for all panels where that lets them be compared: on a logarithmic scale, and between known limits."""
    if view.limits is not None:
        margin = 0.05 * (view.limits[1] - view.limits[0])
        return view.limits[0] - margin, view.limits[1] + margin
    if not view.log_scale or not (values := [value for panel in panels for value in panel.positive()]):
        return None
    return min(values) / 1.3, max(values) * 1.3


def _columns(panels: int) -> int:
    return panels if panels <= 3 else 4 if panels <= 16 else 6


def _shown(value: float, floor: float) -> float:
    return max(value, floor) if math.isfinite(value) else math.nan


def _unseen(layers: list[str]) -> str:
    if not layers:
        return ""
    return f"\nnothing recorded: {', '.join(layers[:6])}{f' and {len(layers) - 6} more' if len(layers) > 6 else ''}"
