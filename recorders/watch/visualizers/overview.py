"""One table and one figure with all layers of a recording."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from recorders.errors import require
from recorders.watch.diagnosis.limits import UPDATE_RANGE
from recorders.watch.overview import Layer
from recorders.watch.spread import Spread

if TYPE_CHECKING:
    from rich.table import Table

_INK, _FAINT = "#333333", "#DDDDDD"
# The colours of Okabe and Ito, which colour-blind readers can tell apart.
_BLUE, _ORANGE, _GREEN, _GREY = "#0072B2", "#D55E00", "#009E73", "#7A8793"
_COLOURS = (_BLUE, _ORANGE, _GREEN, "#CC79A7", "#E69F00", "#56B4E9")
_STYLES = [(colour, dashes) for dashes in ("-", "--", ":") for colour in _COLOURS]


def overview_table(layers: Sequence[Layer]) -> Table:
    """A table with one row per layer, at most 80 characters wide if names have at most 10.

    Columns: mean and standard deviation of the output, share of active units, dead units, norm of the gradient with respect to the
    output and to the weights (root mean square over steps), and median update relative to the weights; "-" if not recorded.

    Raises:
        MissingExtraError: rich is not installed.

    >>> overview_table([Layer("conv1"), Layer("relu1")]).row_count
    2
    """
    text = require("rich.text", "cli").Text
    table: Table = require("rich.table", "cli").Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("\nlayer", overflow="fold")
    for heading in ("output\nmean", "output\nstd", "\nactive", "\ndead", "gradient\nnorm", "weight\ngradient", "update\n/ weight"):
        table.add_column(heading, justify="right", no_wrap=True)
    for layer in layers:
        out, dead = layer.output, 0 if layer.dead is None else int(layer.dead.sum())
        table.add_row(
            text(layer.name),  # in a str, rich would read [brackets] as markup
            _number(math.nan if out is None else out.mean),
            _number(math.nan if out is None else out.std),
            "-" if layer.rate is None else f"{layer.rate.nanmean().item():.0%}",
            text("-" if layer.dead is None else f"{dead}/{layer.dead.numel()}", style="bold red" if dead else ""),
            _size(layer.gradient),
            _size(layer.weight_gradient),
            _exponent(layer.ratio),
        )
    return table


def overview_figure(layers: Sequence[Layer], loss: Tensor, accuracy: Tensor, epoch: int, title: str) -> Any:
    """A `matplotlib.figure.Figure` of four panels: learning, outputs, activity and updates.

    Args:
        layers: from `overview`; fields that are None are left out.
        loss: the loss of each step, (steps,).
        accuracy: the test accuracy after each epoch, (epochs,), from 0 to 1.
        epoch: the number of steps in an epoch.
        title: the title of the figure.

    Raises:
        MissingExtraError: matplotlib is not installed.

    >>> figure = overview_figure([Layer("conv1")], torch.tensor([2.0, 1.0]), torch.tensor([0.5]), epoch=2, title="")
    >>> len(figure.axes) >= 4
    True
    """
    figure = require("matplotlib.figure", "plot").Figure(figsize=(13, 9), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.15, h_pad=0.15)
    figure.suptitle(title, x=0.012, ha="left", fontsize=13, color=_INK)
    grid = figure.add_gridspec(2, 2)
    above, below = grid[0, 0].subgridspec(2, 1, height_ratios=(3, 2)).subplots(sharex=True)
    _learning(above, below, loss, accuracy, epoch)
    outputs = {layer.name: layer.output for layer in layers if layer.output is not None and layer.output.count}
    updates = {layer.name: layer.update for layer in layers if layer.update is not None}
    rates = {layer.name: layer.rate.ravel() for layer in layers if layer.rate is not None}
    _outputs(figure.add_subplot(grid[0, 1]), outputs)
    _updates(figure.add_subplot(grid[1, 0]), updates, epoch)
    _activity(figure, figure.add_subplot(grid[1, 1]), rates)
    return figure


def _learning(above: Any, below: Any, loss: Tensor, accuracy: Tensor, epoch: int) -> None:
    logarithmic = len(loss) > 0 and bool((loss > 0).all())  # not if any loss is negative or NaN
    _style(above, "Loss of each training step", "loss (log scale)" if logarithmic else "loss")
    above.set_yscale("log" if logarithmic else "linear")
    above.plot(_epochs(len(loss), epoch), loss.tolist(), color=_BLUE, linewidth=0.9)
    _style(below, "", "test accuracy (%)", "epoch")
    below.plot(range(1, len(accuracy) + 1), (100 * accuracy).tolist(), color=_ORANGE, linewidth=1.4, marker="o", markersize=4)
    if len(accuracy):
        end, last = len(accuracy), accuracy[-1].item()
        below.annotate(f"{last:.1%}", (end, 100 * last), (0, -6), textcoords="offset points", ha="right", va="top", fontsize=9)
    below.margins(y=0.25)


def _outputs(axes: Any, rows: Mapping[str, Spread]) -> None:
    _style(axes, "Outputs of each layer", "", "value (linear from -1 to 1, logarithmic beyond)")
    axes.set_xscale("symlog", linthresh=1.0)
    axes.axvline(0, color=_INK, linewidth=0.6)
    _layer_axis(axes, list(rows))
    at, spreads = range(len(rows)), list(rows.values())
    axes.hlines(at, [s.low for s in spreads], [s.high for s in spreads], color=_GREY, linewidth=2, alpha=0.6, label="min to max")
    ends = [s.mean - s.std for s in spreads], [s.mean + s.std for s in spreads]
    axes.hlines(at, *ends, color=_BLUE, linewidth=7, alpha=0.55, label="mean \u00b1 std")
    axes.plot([s.mean for s in spreads], at, "o", color=_INK, markersize=4, label="mean")
    _legend(axes, 3)


def _updates(axes: Any, rows: Mapping[str, Tensor], epoch: int) -> None:
    _style(axes, "Updates, relative to the weights", "norm of update / norm of weights (log scale)", "epoch")
    axes.set_yscale("log")
    axes.axhspan(*UPDATE_RANGE, color=_GREEN, alpha=0.08, linewidth=0)
    axes.axhline(1e-3, color=_INK, linewidth=1.0, linestyle=(0, (6, 3)), label="rule of thumb")
    for (name, ratios), (colour, dashes) in zip(rows.items(), itertools.cycle(_STYLES), strict=False):
        axes.plot(_epochs(len(ratios), epoch), ratios.tolist(), color=colour, linestyle=dashes, linewidth=1.1, label=name)
    _legend(axes, 4)


def _activity(figure: Any, axes: Any, rows: Mapping[str, Tensor]) -> None:
    _style(axes, "Activity of units, the least active on the left", "", "unit")
    _layer_axis(axes, list(rows))
    shares = torch.full((max(len(rows), 1), max((len(rate) for rate in rows.values()), default=1)), math.nan, device="cpu")
    for row, rate in zip(shares, rows.values(), strict=False):
        row[: len(rate)] = rate.sort().values
    image = axes.imshow((100 * shares).numpy(), aspect="auto", cmap="cividis", vmin=0, vmax=100, interpolation="nearest")
    axes.grid(False)
    bar = figure.colorbar(image, ax=axes, pad=0.02)
    bar.set_label("active outputs (%)", fontsize=9, color=_INK)
    bar.ax.tick_params(labelsize=8, color=_FAINT, labelcolor=_INK)
    bar.outline.set_edgecolor(_FAINT)


def _legend(axes: Any, columns: int) -> None:
    """Puts a legend below the panel."""
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), fontsize=8, ncols=columns, frameon=False)


def _layer_axis(axes: Any, names: list[str]) -> None:
    """Lists the layers from top to bottom."""
    axes.set_yticks(range(len(names)), names, parse_math=False)
    axes.set_ylim(max(len(names), 1) - 0.5, -0.5)


def _style(axes: Any, title: str, vertical: str, horizontal: str = "") -> None:
    axes.set_title(title, fontsize=11, color=_INK, loc="left")
    axes.set_ylabel(vertical, fontsize=9, color=_INK)
    axes.set_xlabel(horizontal, fontsize=9, color=_INK)
    axes.grid(True, color=_FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", labelsize=8, color=_FAINT, labelcolor=_INK)
    for spine in axes.spines.values():
        spine.set_color(_FAINT)


def _epochs(steps: int, epoch: int) -> list[float]:
    """The time of each step, in epochs of `epoch` steps."""
    return [step / epoch for step in range(1, steps + 1)]


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3g}"


def _exponent(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1e}"


def _size(spread: Spread | None) -> str:
    return "-" if spread is None else _exponent(spread.norm)
