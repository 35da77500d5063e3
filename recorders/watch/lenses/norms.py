"""Lenses on the norms of outputs and parameters, and on the condition numbers of weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from recorders.monitors.base import Monitor
from recorders.monitors.forward import ForwardMonitor
from recorders.monitors.parameters import ParameterMonitor
from recorders.watch.charts import Across, Aggregation, Chart
from recorders.watch.lenses.lens import (
    Classes,
    HasMatrix,
    Lens,
    Names,
    OfKind,
    checked,
    checked_line,
    classes,
    names_of,
    phase_of,
    size_of,
    spread,
)
from reducers import Geometry, Norm, PerObservation, State, condition_number


def OutputNorm(
    inplace: bool = True,
    record_eval: bool = False,
    evaluation_from_grad: bool = False,
    normalize_by_size: bool = False,
    log_scale: bool = False,
    activation: bool = True,
    include: Classes = (),
    exclude: Classes = (),
    comparison_plot: bool = True,
    comparison_aggregation: str | None = None,
    line_aggregation: Aggregation = "mean",
    range_aggregation: Aggregation = ("std", "min-max"),
) -> Lens:
    """A lens on the norms of outputs. Each batch gives one number: the mean of the norms of its samples.

    Args:
        inplace: keep running statistics only; False keeps every value, so that median and quartiles are known.
        record_eval: record evaluation too, apart from training, in charts of its own.
        evaluation_from_grad: evaluation is when gradients are off; False: when the module is in evaluation mode.
        normalize_by_size: record the root mean square of each sample instead of its L2 norm, to compare layers of different sizes.
        log_scale: draw the norm on a logarithmic axis.
        activation: watch the activation functions of `torch.nn`.
        include: further classes of modules to watch, such as `nn.Linear`.
        exclude: classes of modules to leave out, whatever the other options say.
        comparison_plot: also draw the part that each layer has in the sum of the norms of all layers.
        comparison_aggregation: the statistic that is compared; None for the first line.
        line_aggregation: one or several of "mean", "std", "min", "max", and with `inplace=False` "median", "Q1", "Q3".
        range_aggregation: one or several of "std", "min-max", and with `inplace=False` "Q1-Q3"; None for no ranges.

    Charts:
        Output Norm: `mean`, `std`, `min` and `max` over batches of the L2 norm, in the unit of the outputs; `count` and
            `nonfinite`, how many batches count and how many are left out. One value a layer and tick. With `inplace=False` also
            `median`, `Q1` and `Q3`. It is Output RMS, the root mean square, with `normalize_by_size`.
        Mean Output Norm Comparison: the share of the sum that each layer has, one value a layer and tick; drawn from the rows
            above, it adds none.

    Raises:
        LensError: an unknown aggregation, or one that needs `inplace=False`.

    >>> [chart.title for chart in OutputNorm(normalize_by_size=True).charts]
    ['Output RMS', 'Mean Output RMS Comparison']
    """
    lines, ranges = checked(inplace, line_aggregation, range_aggregation)
    compared = checked_line(inplace, comparison_aggregation or (*lines, "mean")[0], "comparison_aggregation")
    size, unit = size_of(normalize_by_size)
    charts = [Chart(f"Output {size}", ("output",), unit, lines, ranges, log_scale, limits=(0.0, None))]
    if comparison_plot:
        charts.append(_comparison(f"{compared.title()} Output {size} Comparison", charts[0].title, compared))
    norms = SampleNorms(normalize=normalize_by_size).postmap(torch.mean)
    reducer, phase = PerObservation(norms, spread(inplace)), phase_of(evaluation_from_grad)
    monitor = ForwardMonitor(reducer, eval_update=record_eval, phase=phase)
    return Lens("OutputNorm", tuple(charts), {"output": monitor}, OfKind(activation, False, classes(include), classes(exclude)))


@dataclass(frozen=True)
class SampleNorms(Norm):
    """The norm of each sample; NaN if an element of it is not finite."""

    pattern: str = "b ... -> b"

    def compute(self, state: State) -> Tensor:
        norms = super().compute(state)
        assert isinstance(norms, Tensor)
        return torch.where(state["nonfinite"] == 0, norms, torch.nan)


def ParameterNorm(
    inplace: bool = True,
    parameters: Names = ("weight", "bias"),
    normalize_by_size: bool = False,
    log_scale: bool = False,
    comparison_plot: bool = True,
    aggregation_method: str = "mean",
) -> Lens:
    """A lens on the norms of parameters at the end of each epoch; `inspector.recorders["ParameterNorm"].tick()` records more often.

    Args:
        inplace: keep running statistics only; False keeps every value, so that median and quartiles are known.
        parameters: names of parameters; a layer that lacks one is passed by.
        normalize_by_size: record the root mean square instead of the L2 norm, to compare layers of different sizes.
        log_scale: draw the norm on a logarithmic axis.
        comparison_plot: also draw the part that each layer has in the sum of the norms of all layers.
        aggregation_method: the line: "mean", "std", "min", "max", and with `inplace=False` "median", "Q1", "Q3".

    Charts:
        Weight Norm, Bias Norm: `mean`, `std`, `min` and `max` of the L2 norms of a tick, in the unit of the parameter: one norm,
            if `tick()` is not called besides; `count` and `nonfinite`, how many norms count and how many are left out. One value
            a layer and tick. With `inplace=False` also `median`, `Q1` and `Q3`. They are Weight RMS and Bias RMS, root mean
            squares, with `normalize_by_size`.
        Weight Norm Comparison, Bias Norm Comparison: the share of the sum that each layer has, one value a layer and tick; drawn
            from the rows above, it adds none.

    Raises:
        LensError: an unknown aggregation, or one that needs `inplace=False`.

    >>> [chart.title for chart in ParameterNorm(parameters="weight").charts]
    ['Weight Norm', 'Weight Norm Comparison']
    """
    line = checked_line(inplace, aggregation_method, "aggregation_method")
    size, unit = size_of(normalize_by_size)
    titles = {name: f"{name.title()} {size}" for name in names_of(parameters)}
    charts = [Chart(title, (name, "norm"), unit, line, None, log_scale, limits=(0.0, None)) for name, title in titles.items()]
    if comparison_plot:
        charts += [_comparison(f"{title} Comparison", title, line) for title in titles.values()]
    geometry = Geometry(spread(inplace), normalize=normalize_by_size, correlation=False)
    monitors: dict[str, Monitor] = {name: ParameterMonitor(geometry, name, when="tick") for name in titles}
    return Lens("ParameterNorm", tuple(charts), monitors, inner=True)


def ParameterCond(inplace: bool = True, parameters: Names = "weight", log_scale: bool = True) -> Lens:
    """A lens on the condition numbers of weights at the end of each epoch: the largest singular value over the smallest.

    All axes of a weight after the first are taken as one. A singular matrix has an infinite condition number, which is counted as
    non-finite. Modules without a parameter of two axes are passed by.

    Args:
        inplace: keep running statistics only; False keeps every value.
        parameters: names of parameters; a layer that lacks one is passed by.
        log_scale: draw the condition number on a logarithmic axis.

    Charts:
        Weight Condition Number: `mean`, `std`, `min` and `max` of the condition number at a tick, without a unit; `count` and
            `nonfinite`, how many count and how many are left out. One value a layer and tick. With `inplace=False` also `median`,
            `Q1` and `Q3`.

    >>> [chart.title for chart in ParameterCond().charts]
    ['Weight Condition Number']
    """
    names, unit = names_of(parameters), "condition number"
    titles = {name: f"{name.title()} Condition Number" for name in names}
    charts = [Chart(title, (name,), unit, "mean", None, log_scale, limits=(1.0, None)) for name, title in titles.items()]
    reducer = spread(inplace).premap(condition_number)
    monitors: dict[str, Monitor] = {name: ParameterMonitor(reducer, name, when="tick") for name in names}
    return Lens("ParameterCond", tuple(charts), monitors, HasMatrix(names), inner=True)


def _comparison(title: str, of: str, statistic: str) -> Chart:
    return Chart(title, (), "share of the sum", limits=(0.0, 1.0), across=(Across(of, "share", statistic),))
