"""Lenses on active and dead units."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from recorders.monitors.base import Monitor
from recorders.monitors.forward import ForwardMonitor
from recorders.monitors.parameters import ParameterGradientMonitor
from recorders.watch.charts import Across, Chart
from recorders.watch.lenses.lens import (
    Classes,
    Lens,
    Moment,
    Names,
    OfKind,
    checked_line,
    classes,
    names_of,
    pattern_of,
    phase_of,
    spread,
)
from reducers import Activity, PerObservation, Reducer


def OutputActivation(
    inplace: bool = True,
    record_eval: bool = False,
    evaluation_from_grad: bool = False,
    activation: bool = True,
    dropout: bool = True,
    include: Classes = (),
    exclude: Classes = (),
    channel_last: bool | None = None,
    warning_plot: bool = True,
    activation_aggregation: str = "mean",
    death_aggregation: str = "mean",
) -> Lens:
    """A lens on the units of activation functions and dropout layers: the share that is active, and the share that is dead.

    A unit is active in an element of the output that is not zero, and dead in a batch in which it is nowhere active. Each batch
    gives two numbers: the mean active share of the units, and the share of dead units.

    Args:
        inplace: keep running statistics only; False keeps every value, so that median and quartiles are known.
        record_eval: record evaluation too, apart from training, in charts of its own.
        evaluation_from_grad: evaluation is when gradients are off; False: when the module is in evaluation mode.
        activation: watch the activation functions of `torch.nn`.
        dropout: watch its dropout layers.
        include: further classes of modules to watch, such as `nn.Linear`.
        exclude: classes of modules to leave out, whatever the other options say.
        channel_last: units are the last axis of outputs; False: the second; None: that of the layer, see `channel_axis`.
        warning_plot: also draw the lowest active share and the highest dead share of all layers.
        activation_aggregation: the aggregation of active shares: "mean", "std", "min", "max", and with `inplace=False` "median",
            "Q1", "Q3".
        death_aggregation: the aggregation of dead shares.

    Charts:
        Output Activation: `mean`, `std`, `min` and `max` over batches of the active share of units, without a unit; `count` and
            `nonfinite`, how many batches count and how many are left out. One value a layer and tick. With `inplace=False` also
            `median`, `Q1` and `Q3`.
        Output Death: the same keys for the share of dead units.
        Extreme Output Activations Of All Layers: the lowest active share and the highest dead share, one value of each a tick;
            drawn from the rows above, it adds none.

    Raises:
        LensError: an unknown aggregation, or one that needs `inplace=False`.

    >>> [chart.title for chart in OutputActivation().charts]
    ['Output Activation', 'Output Death', 'Extreme Output Activations Of All Layers']
    """
    lines = _lines(inplace, activation_aggregation, death_aggregation)
    reducer = activity(pattern_of(channel_last), inplace)
    monitor = ForwardMonitor(reducer, eval_update=record_eval, phase=phase_of(evaluation_from_grad))
    charts = _charts({"output": "Output"}, lines, "Extreme Output Activations Of All Layers" if warning_plot else None)
    kinds = OfKind(activation, dropout, classes(include), classes(exclude))
    return Lens("OutputActivation", charts, {"output": monitor}, kinds)


def ParameterGradientActivation(
    inplace: bool = True,
    warning_plot: bool = True,
    parameters: Names = ("weight", "bias"),
    activation_aggregation: str = "mean",
    death_aggregation: str = "mean",
    when: Moment = "step",
) -> Lens:
    """A lens on the gradients of parameters: the share of elements that is not zero, and the share of units without any.

    A unit is an index of the first axis of a parameter: an output of a linear layer, or a channel of a convolution.

    Args:
        inplace: keep running statistics only; False keeps every value, so that median and quartiles are known.
        warning_plot: also draw the lowest active share and the highest dead share of all layers and parameters.
        parameters: names of parameters; a layer that lacks one is passed by.
        activation_aggregation: as in `OutputActivation`.
        death_aggregation: as in `OutputActivation`.
        when: "step" records the gradients that the optimizer uses, "accumulate" those after every backward.

    Charts:
        Weight Gradient Activation, Bias Gradient Activation: `mean`, `std`, `min` and `max` over observations of the active share
            of elements, without a unit; `count` and `nonfinite`, how many observations count and how many are left out. One value
            a layer and tick. With `inplace=False` also `median`, `Q1` and `Q3`.
        Weight Gradient Death, Bias Gradient Death: the same keys for the share of dead units.
        Extreme Gradient Activations Of All Layers: the lowest active share and the highest dead share, one value of each a tick;
            drawn from the rows above, it adds none.

    Raises:
        LensError: an unknown aggregation, or one that needs `inplace=False`.

    >>> [chart.title for chart in ParameterGradientActivation(parameters="weight", warning_plot=False).charts]
    ['Weight Gradient Activation', 'Weight Gradient Death']
    """
    lines = _lines(inplace, activation_aggregation, death_aggregation)
    titles = {name: f"{name.title()} Gradient" for name in names_of(parameters)}
    charts = _charts(titles, lines, "Extreme Gradient Activations Of All Layers" if warning_plot else None)
    reducer = activity("c ... -> c", inplace)
    monitors: dict[str, Monitor] = {name: ParameterGradientMonitor(reducer, name, when=when) for name in titles}
    return Lens("ParameterGradientActivation", charts, monitors, inner=True)


def activity(pattern: str, inplace: bool) -> Reducer:
    """Of each observation the mean active share of its units, and the share of dead ones; reduced over observations."""
    return PerObservation(Activity(pattern).postmap(_rates), spread(inplace))


def _rates(activity: Mapping[str, Tensor]) -> dict[str, Tensor]:
    observed = ~activity["rate"].isnan()
    return {"activation": activity["rate"].nanmean(), "death": activity["dead"].sum() / observed.sum().double()}


def _lines(inplace: bool, activation: str, death: str) -> dict[str, str]:
    return {
        "activation": checked_line(inplace, activation, "activation_aggregation"),
        "death": checked_line(inplace, death, "death_aggregation"),
    }


def _charts(titles: Mapping[str, str], lines: Mapping[str, str], warning: str | None) -> tuple[Chart, ...]:
    """For each group of monitors a chart of activation and one of death; and the chart of the worst of all layers."""
    unit, limits = {"activation": "active share", "death": "share of dead units"}, (0.0, 1.0)
    charts, worst = [], []
    for group, title in titles.items():
        for what, line in lines.items():
            name = f"{title} {what.title()}"
            charts.append(Chart(name, (group, what), unit[what], line, None, shared=True, limits=limits))
            worst.append(Across(name, "min" if what == "activation" else "max", line))
    if warning is not None:
        charts.append(Chart(warning, (), "share", limits=limits, across=tuple(worst)))
    return tuple(charts)
