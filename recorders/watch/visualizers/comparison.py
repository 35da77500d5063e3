"""One panel, drawn with matplotlib, that compares the layers of a network over ticks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from recorders.watch.across import Point

__all__ = ["draw_comparison"]

_INK = "#333333"
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
