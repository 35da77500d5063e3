"""A picture of how two runs part: over steps, and over layers at the step at which they do."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from recorders.errors import require
from recorders.watch.divergence.runs.apart import Growth
from recorders.watch.visualizers.visualizer import shortened

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = {"output": "#0072B2", "gradient": "#D55E00", "weight": "#009E73"}  # of Okabe and Ito
_WORDS = {"output": "output", "gradient": "gradients of parameters", "weight": "parameters"}
_MOST = 40  # layers that are named on the axis
_INK, _FAINT = "#333333", "#DDDDDD"


def figure_of(growth: Sequence[Growth], by_layer: Mapping[str, float], unit: str, parted: tuple[int, str, str] | None) -> Figure:
    """Two panels: how far outputs, gradients and parameters are apart at each step, and outputs of layers where the runs part.

    Args:
        growth: how far they are apart at each step.
        by_layer: how far outputs of layers are.
        unit: what steps are.
        parted: the step, the phase and the module at which they part; None if they do not.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    figure: Any = require("matplotlib.figure", "plot").Figure(figsize=(11, 4.2), layout="constrained")
    over_steps, over_layers = figure.subplots(1, 2)
    steps = [row.step for row in growth]
    for name, colour in _COLOURS.items():
        _line(over_steps, steps, [getattr(row, name) for row in growth], colour, _WORDS[name])
    over_steps.set_xlabel(unit)
    over_steps.xaxis.set_major_locator(require("matplotlib.ticker", "plot").MaxNLocator(integer=True))
    over_steps.set_title("How far the runs are apart", loc="left", color=_INK)
    if parted is not None:
        over_steps.axvline(parted[0], color=_INK, linewidth=1, linestyle=":")
        over_steps.annotate(f"they part ({parted[1]})", (parted[0], 1), (4, -12), xycoords=("data", "axes fraction"),
                            textcoords="offset points", fontsize=8, color=_INK)  # fmt: skip
    names = list(by_layer)
    _line(over_layers, range(len(names)), list(by_layer.values()), _COLOURS["output"], "output of the layer")
    stride = max(1, math.ceil(len(names) / _MOST))
    over_layers.set_xticks(range(0, len(names), stride), [shortened(name or "(net)", 18) for name in names[::stride]], rotation=90)
    at = parted[0] if parted is not None else (steps[-1] if steps else 0)
    over_layers.set_title(f"Layers at {unit} {at}", loc="left", color=_INK)
    if parted is not None and parted[2] in by_layer:
        over_layers.axvline(names.index(parted[2]), color=_INK, linewidth=1, linestyle=":")
    for axes in (over_steps, over_layers):
        axes.set_ylabel("relative distance")
        axes.grid(color=_FAINT, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=7 if axes is over_layers else 9)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8, frameon=False)
    return figure  # type: ignore[no-any-return]


def _line(axes: Any, at: Sequence[int], values: Sequence[float], colour: str, label: str) -> None:
    """A line on a logarithmic scale; what is equal lies on the bottom."""
    known = [value for value in values if 0 < value < math.inf]
    if not any(not math.isnan(value) for value in values):
        return
    lowest = min(known, default=1e-8)
    axes.set_yscale("symlog", linthresh=min(lowest, 1e-6), linscale=0.3)
    axes.set_ylim(bottom=0)
    shown = [min(value, 2.0) for value in values]
    axes.plot(list(at), shown, color=colour, linewidth=1.5, marker="o", markersize=3, label=label, clip_on=False)
