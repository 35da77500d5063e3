"""A heat map of a chart: layers down, ticks across, the value as a colour."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from recorders.watch.charts import ChartView
from recorders.watch.visualizers.visualizer import require, shortened

__all__ = ["draw_heat", "heat_values"]

_LABELS = 40
"""The most names of layers that are written."""
_BLANK = "#E4E4E4"


def heat_values(view: ChartView) -> tuple[list[int], dict[str, list[float]], str]:
    """The ticks, the values of each layer that has any (NaN if it has none at a tick), and which statistic they are."""
    line = view.lines[0]
    found = view.by_layer(line)
    ticks = sorted({tick for values in found.values() for tick in values})
    return ticks, {layer: [_shown(values.get(tick, math.nan), view) for tick in ticks] for layer, values in found.items()}, line


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


def _shown(value: float, view: ChartView) -> float:
    return value if math.isfinite(value) and (value > 0 or not view.log_scale) else math.nan
