"""Charts as figures, drawn with matplotlib: one figure per chart, one panel per layer."""

from __future__ import annotations

import base64
import io
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from recorders.errors import require
from recorders.recordings.atomic_files import as_path
from recorders.watch.charts import Band, ChartView, Point
from recorders.watch.visualizers.screen import Displays, kernel
from recorders.watch.visualizers.visualizer import Pace, shortened

# The colours of Okabe and Ito, which colour-blind readers can tell apart; each aggregation has the same colour in every chart.
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
_PAUSE, _SHARE, _NOTEBOOK_DPI = 1.0, 0.05, 80  # figures take longer than a table


class MatplotlibVisualizer:
    """Draws each chart as a figure of small panels, one per layer, in network order, with lines and shaded ranges over ticks.

    A chart of more layers than `panels` is a heat map: layers down, ticks across, the first of its lines as a colour.

    A chart that compares layers is one panel: stacked shares, or the lowest and the highest values, with the layers they are of.

    `show` only stores the charts, so that training does not wait: figures are drawn when requested, from the timeline as it is
    then. No display is needed. In a notebook figures are shown below the cell, one for each chart, and redrawn in place: at the
    first tick; then so seldom that drawing takes at most 5 % of the time; and at the end.

    Args:
        folder: where `flush` saves the figures, at the end of the training; None saves none.
        panels: the most layers that have a panel each; 0 for heat maps always.

    Raises:
        MissingExtraError: matplotlib is not installed.

    >>> from recorders.watch.charts import Chart
    >>> from recorders.watch.timeline import Timeline
    >>> timeline = Timeline()
    >>> timeline.append(0, {"Loss/train": {"mean": 2.0, "std": 0.5}})
    >>> visualizer = MatplotlibVisualizer()
    >>> visualizer.show(0, [ChartView(Chart("Loss", ("loss",), "nats", ranges="std"), timeline, ("train",))])
    >>> [axes.get_title("left") for axes in visualizer.figures["Loss"].axes]
    ['train']
    """

    def __init__(self, folder: str | Path | None = None, *, panels: int = 36) -> None:
        self._folder, self._panels = folder, panels
        self._figure: Any = require("matplotlib.figure", "plot").Figure
        self._ticker: Any = require("matplotlib.ticker", "plot")
        self._views: dict[str, ChartView] = {}
        self._displays, self._pace, self._shown = Displays(), Pace(_PAUSE, _SHARE), True

    def show(self, tick: int, charts: Sequence[ChartView]) -> None:
        """Stores the charts, to draw them later; in a notebook draws them, if that is due."""
        self._views.update({view.title: view for view in charts})
        self._shown = kernel() is None
        if not self._shown and self._pace.due:
            self._display()

    @property
    def figures(self) -> dict[str, Any]:
        """Draws the stored charts; returns figures by title. Charts without a number are left out."""
        return {title: figure for title, view in self._views.items() if (figure := self._draw(view)) is not None}

    def save(self, folder: str | Path, dpi: float = 120) -> list[Path]:
        """Writes one PNG per chart, named after its title, into a folder, which is created if necessary; returns the paths."""
        folder = Path(as_path(folder))
        folder.mkdir(parents=True, exist_ok=True)
        paths: dict[str, Path] = {}
        for title, figure in self.figures.items():
            stem = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") or "chart"
            name = next(name for name in (stem, *(f"{stem}-{count}" for count in range(2, len(paths) + 3))) if name not in paths)
            paths[name] = folder / f"{name}.png"
            figure.savefig(paths[name], dpi=dpi)
        return list(paths.values())

    def flush(self) -> None:
        """Saves the figures into the folder, if one was given; in a notebook shows them for the last time."""
        if not self._shown:
            self._display()
        self._displays = Displays()
        if self._folder is not None:
            self.save(self._folder)

    def _display(self) -> None:
        with self._pace.measured():
            for title, figure in self.figures.items():
                file = io.BytesIO()
                figure.savefig(file, format="png", dpi=_NOTEBOOK_DPI)
                self._displays.show(title, {"image/png": base64.b64encode(file.getvalue()).decode()})
            self._shown = True

    def _draw(self, view: ChartView) -> Any:
        if view.chart.across:
            return self._draw_comparison(view)
        if len(view.layers) > self._panels:
            return self._draw_heat(view)
        panels = {layer: _Panel(view, layer) for layer in view.layers}
        drawn = {layer: panel for layer, panel in panels.items() if panel.ticks}
        if not drawn:
            return None
        columns = _columns(len(drawn))
        rows = math.ceil(len(drawn) / columns)
        width, height = (4.2, 2.9) if columns <= 3 else (2.9, 1.85)
        figure = self._figure(figsize=(max(columns * width, 5.5), rows * height + 1.2), layout="constrained")
        grid = figure.subplots(rows, columns, sharex=True, sharey=view.shared, squeeze=False)
        for axes, (layer, panel) in zip(grid.flat, drawn.items(), strict=False):
            panel.draw(axes)
            self._style(axes, view, shortened(layer, int(width * 11)))
        if view.shared and (limits := _limits(view, list(drawn.values()))) is not None:
            grid.flat[0].set_ylim(*limits)
        for axes in list(grid.flat)[len(drawn) :]:
            axes.remove()
        self._label(figure, view, grid, columns, len(drawn), [layer for layer in panels if layer not in drawn])
        return figure

    def _draw_heat(self, view: ChartView) -> Any:
        ticks, rows, line = heat_values(view)
        if not rows:
            return None
        figure = self._figure(figsize=(9.0, min(12.0, 2.0 + 0.16 * len(rows))), layout="constrained")
        draw_heat(figure, view, ticks, rows, line)
        figure.suptitle(view.title, x=0.01, ha="left", fontsize=13, color=_INK)
        return figure

    def _draw_comparison(self, view: ChartView) -> Any:
        found = view.points_by_tick()
        if not found:
            return None
        figure = self._figure(figsize=(7.5, 4.4), layout="constrained")
        axes = figure.subplots()
        self._style(axes, view, "")
        shares = view.chart.across[0].show == "share"
        draw_comparison(axes, found, shares)
        low, high = view.chart.limits
        if not (shares or view.log_scale or low is None or high is None):
            axes.set_ylim(low - 0.03 * (high - low), high + 0.03 * (high - low))  # lines on the edge show
        figure.suptitle(view.title, x=0.01, ha="left", fontsize=13, color=_INK)
        axes.set_ylabel(view.unit, fontsize=10, color=_INK)
        axes.set_xlabel(view.axis, fontsize=10, color=_INK)
        return figure

    def _style(self, axes: Any, view: ChartView, title: str) -> None:
        axes.set_title(title, fontsize=9, color=_INK, loc="left", parse_math=False)
        if view.log_scale:
            axes.set_yscale("log")
        else:
            axes.yaxis.set_major_locator(self._ticker.MaxNLocator(5, steps=[1, 2, 2.5, 5, 10], min_n_ticks=3))
        if view.limits[0] < 0 < view.limits[1] and view.shared:
            axes.axhline(0.0, color=_FAINT, linewidth=1.2, zorder=0.9)
        axes.margins(x=0.02)
        axes.xaxis.set_major_locator(self._ticker.MaxNLocator(4, integer=True))
        axes.grid(True, color=_FAINT, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.tick_params(which="both", labelsize=8, color=_FAINT, labelcolor=_INK)
        for spine in axes.spines.values():
            spine.set_color(_FAINT)

    def _label(self, figure: Any, view: ChartView, grid: Any, columns: int, count: int, silent: list[str]) -> None:
        for position in range(max(0, count - columns), count):  # the lowest panel of each column has tick labels
            grid.flat[position].tick_params(labelbottom=True)
        figure.suptitle(view.title, x=0.01, ha="left", fontsize=13, color=_INK)
        figure.supylabel(view.unit + (" (log scale)" if view.log_scale else ""), fontsize=10, color=_INK)
        figure.supxlabel(view.axis + _not_recorded(silent), fontsize=10, color=_INK)
        handles: dict[str, Any] = {}
        for axes in figure.axes:
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
                handles.setdefault(label, handle)
        if handles:
            figure.legend(
                handles.values(), handles.keys(), loc="outside upper right", ncols=len(handles), frameon=False, fontsize=9
            )


class _Panel:
    """The lines and ranges of one layer."""

    def __init__(self, view: ChartView, layer: str) -> None:
        self.view = view
        lines = {name: view.line(layer, name) for name in view.lines}
        self.lines = {name: (ticks, [_or_gap(value, view) for value in values]) for name, (ticks, values) in lines.items()}
        self.bands = {name: self._clipped(layer, name) for name in _BANDS if name in view.ranges}
        self.ticks = sorted({tick for ticks, *_ in (*self.lines.values(), *self.bands.values()) for tick in ticks})

    def draw(self, axes: Any) -> None:
        for name, (ticks, low, high) in self.bands.items():
            colour, alpha = _BANDS[name]
            axes.fill_between(ticks, low, high, color=colour, alpha=alpha, linewidth=0, label=_BAND_LABELS[name])
            if len(ticks) == 1:  # one tick has no area to fill
                axes.vlines(ticks, low, high, color=colour, alpha=alpha, linewidth=5)
        marker = "o" if len(self.ticks) <= _POINTS_WITH_MARKERS else None
        for name, (ticks, values) in self.lines.items():
            axes.plot(ticks, values, color=_LINES[name], linewidth=1.6, marker=marker, markersize=3, label=name)

    def values(self) -> list[float]:
        """All values drawn, without NaN."""
        ends = [end for _, *ends in (*self.lines.values(), *self.bands.values()) for end in ends]
        return [value for end in ends for value in end if not math.isnan(value)]

    def _clipped(self, layer: str, aggregation: str) -> Band:
        """A range cut off at the limits of its chart and, on a logarithmic axis, at the smallest recorded value."""
        ticks, low, high = self.view.band(layer, aggregation)
        floors = [self.view.limits[0]] * len(ticks)
        if self.view.log_scale:
            least = dict(zip(*self.view.series(layer, "min"), strict=True))
            floors = [max(floor, least.get(tick, floor)) for tick, floor in zip(ticks, floors, strict=True)]
        low = [_or_gap(max(value, floor), self.view) for value, floor in zip(low, floors, strict=True)]
        return ticks, low, [_or_gap(min(value, self.view.limits[1]), self.view) for value in high]


def _or_gap(value: float, view: ChartView) -> float:
    """The value, or NaN, which leaves a gap, if the axis cannot show it."""
    return value if math.isfinite(value) and (value > 0 or not view.log_scale) else math.nan


def _limits(view: ChartView, panels: list[_Panel]) -> tuple[float, float] | None:
    """The smallest and the largest value of all panels, with a margin; None if there is no value."""
    values = [value for panel in panels for value in panel.values()]
    if not values:
        return None
    low, high = min(values), max(values)
    if view.log_scale:
        return low / 1.3, high * 1.3
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    bottom, top = low - margin, high + margin
    least, most = view.chart.limits
    if least is not None:  # an axis shows no values that cannot be
        bottom = max(bottom, least - 0.05 * (top - least))
    if most is not None:
        top = min(top, most + 0.05 * (most - bottom))
    return bottom, top


def _columns(panels: int) -> int:
    return panels if panels <= 3 else 4 if panels <= 16 else 6


def _not_recorded(layers: list[str]) -> str:
    if not layers:
        return ""
    return f"\nnothing recorded: {', '.join(layers[:6])}{f' and {len(layers) - 6} more' if len(layers) > 6 else ''}"


# The colours of Okabe and Ito, which colour-blind readers can tell apart.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_SMALLEST_LABELLED = 0.045  # of the height
_FEW = 16


def draw_comparison(axes: Any, points: Mapping[int, Sequence[Point]], shares: bool) -> None:
    """Draws stacked areas with the names of the layers beside them, or lines with the layer of the last value in the legend."""
    names = list(dict.fromkeys(point.line for at in points.values() for point in at))
    known = {tick: {point.line: point for point in at} for tick, at in points.items()}
    if len(points) == 1:
        axes.set_xticks(list(points))
    if shares:
        _stack(axes, names, {tick: {name: point.value for name, point in at.items()} for tick, at in known.items()})
    else:
        _lines(axes, names, known)


def _stack(axes: Any, names: list[str], shares: Mapping[int, Mapping[str, float]]) -> None:
    ticks = list(shares)
    heights = [[shares[tick].get(name, 0.0) for tick in ticks] for name in names]
    shades = [0.25 + 0.6 * index / max(len(names) - 1, 1) for index in range(len(names))]
    colours = [(0.85 * (1 - shade), 0.9 - 0.45 * shade, 0.95 - 0.25 * shade) for shade in shades]
    edge = {"edgecolor": "white", "linewidth": 0.8 if len(names) <= _FEW else 0.2}
    if len(ticks) > 1:
        axes.stackplot(ticks, *heights, colors=colours, **edge)
        axes.set_xlim(ticks[0], ticks[-1])
    floor = 0.0
    for name, height, colour in zip(names, heights, colours, strict=True):
        if len(ticks) == 1:  # one tick has no area to fill
            axes.bar(ticks, height, bottom=floor, color=colour, width=0.8, **edge)
        if height[-1] >= _SMALLEST_LABELLED:
            place = {"transform": axes.get_yaxis_transform(), "va": "center", "fontsize": 8, "color": _INK, "parse_math": False}
            axes.text(1.01, floor + height[-1] / 2, name, **place)
        floor += height[-1]
    axes.set_ylim(0.0, 1.0)
    axes.grid(False)


def _lines(axes: Any, names: list[str], known: Mapping[int, Mapping[str, Point]]) -> None:
    for index, name in enumerate(names):
        at = {tick: points[name] for tick, points in known.items() if name in points}
        last = list(at.values())[-1]
        label = f"{name}: {last.value:.3g}, layer {last.layer}"
        colour, dashes = _COLOURS[index % len(_COLOURS)], ("-", "--", ":")[index // 2 % 3]  # equal lines both show
        values = [point.value for point in at.values()]
        axes.plot(list(at), values, color=colour, linestyle=dashes, linewidth=1.6, marker="o", markersize=3, label=label)
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), frameon=False, fontsize=9, borderaxespad=0.2)


_LABELS = 40
"""The most names of layers that are written."""
_BLANK = "#E4E4E4"


def heat_values(view: ChartView) -> tuple[list[int], dict[str, list[float]], str]:
    """The ticks, the values of each layer that has any (NaN if it has none at a tick), and which statistic they are."""
    line = view.lines[0]
    found = view.by_layer(line)
    ticks = sorted({tick for values in found.values() for tick in values})
    return ticks, {layer: [_or_gap(values.get(tick, math.nan), view) for tick in ticks] for layer, values in found.items()}, line


def draw_heat(figure: Any, view: ChartView, ticks: list[int], rows: Mapping[str, list[float]], line: str) -> None:
    """Draws one map into an empty figure; what is missing or not finite is grey."""
    axes = figure.subplots()
    finite = [value for values in rows.values() for value in values if math.isfinite(value)]
    colours = require("matplotlib", "plot").colormaps["viridis"].with_extremes(bad=_BLANK)
    norm = None
    if view.log_scale and finite and min(finite) < max(finite):
        norm = require("matplotlib.colors", "plot").LogNorm(min(finite), max(finite))
    # A column for each tick, whatever lies between them: the width says nothing of time that was not recorded.
    image = axes.imshow(list(rows.values()), aspect="auto", interpolation="nearest", cmap=colours, norm=norm)
    every = max(1, math.ceil(len(rows) / _LABELS))
    axes.set_yticks(range(0, len(rows), every), [shortened(layer, 40) for layer in list(rows)[::every]], fontsize=7)
    apart = max(1, math.ceil(len(ticks) / 10))
    axes.set_xticks(range(0, len(ticks), apart), ticks[::apart], fontsize=8)
    axes.set_xlabel(view.axis)
    for text in axes.get_yticklabels():
        text.set_parse_math(False)
    for spine in axes.spines.values():
        spine.set_visible(False)
    bar = figure.colorbar(image, ax=axes, pad=0.01, aspect=40)
    bar.set_label(f"{line}, {view.unit}" if view.unit else line)
    bar.outline.set_visible(False)
