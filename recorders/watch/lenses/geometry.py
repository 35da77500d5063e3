"""Lenses on the norm and the direction of gradients and updates."""

from __future__ import annotations

from collections.abc import Mapping

from recorders.monitors.base import Monitor
from recorders.monitors.gradients import BackwardMonitor
from recorders.monitors.parameters import ParameterGradientMonitor, ParameterUpdateMonitor
from recorders.watch.charts import Aggregation, Chart
from recorders.watch.lenses.lens import (
    Lens,
    Moment,
    Names,
    any_module,
    checked,
    names_of,
    not_activation,
    phase_of,
    size_of,
    spread,
)
from reducers import Geometry


def OutputGradientGeometry(
    inplace: bool = True,
    normalize_by_size: bool = False,
    log_scale: bool = False,
    compute_correlation: bool = True,
    skip_activation: bool = True,
    line_aggregation: Aggregation = "mean",
    range_aggregation: Aggregation = ("std", "min-max"),
    record_eval: bool = False,
    evaluation_from_grad: bool = False,
) -> Lens:
    """A lens on the norm of the gradient with respect to each layer's output, and its correlation with the previous gradient.

    The norm shows vanishing and exploding gradients. The correlation shows whether steps agree (1), are unrelated (0) or oscillate
    (-1); gradients are compared within an epoch.

    Args:
        inplace: keep running statistics only; False keeps every value, so that median and quartiles are known.
        normalize_by_size: record the root mean square instead of the L2 norm, to compare layers of different sizes.
        log_scale: draw the norm on a logarithmic axis.
        compute_correlation: False saves a copy of every gradient.
        skip_activation: leave out the activation functions of `torch.nn`.
        line_aggregation: one or several of "mean", "std", "min", "max", and with `inplace=False` "median", "Q1", "Q3".
        range_aggregation: one or several of "std", "min-max", and with `inplace=False` "Q1-Q3"; None for no ranges.
        record_eval: also record gradients of modules in evaluation mode, such as those of adversarial tests.
        evaluation_from_grad: count every gradient as training, for modules that are trained in evaluation mode.

    Charts:
        Output Gradient Norm: `mean`, `std`, `min` and `max` over observations of the L2 norm, in the unit of the gradient;
            `count` and `nonfinite`, how many observations count and how many are left out. One value a layer and tick. With
            `inplace=False` also `median`, `Q1` and `Q3`. It is Output Gradient RMS, the root mean square, with
            `normalize_by_size`.
        Output Gradient Correlation: the same keys for the cosine with the one before, from -1 to 1. The first observation of a
            tick has none.

    Raises:
        LensError: an unknown aggregation, or one that needs `inplace=False`.

    >>> [chart.title for chart in OutputGradientGeometry(log_scale=True).charts]
    ['Output Gradient Norm', 'Output Gradient Correlation']
    """
    geometry = Geometry(spread(inplace), normalize=normalize_by_size, correlation=compute_correlation)
    charts = _charts({"gradient": "Output Gradient"}, geometry, log_scale, checked(inplace, line_aggregation, range_aggregation))
    where = not_activation if skip_activation else any_module
    monitor = BackwardMonitor(geometry, eval_update=record_eval, phase=phase_of(evaluation_from_grad))
    return Lens("OutputGradientGeometry", charts, {"gradient": monitor}, where)


def ParameterGradientGeometry(
    inplace: bool = True,
    normalize_by_size: bool = False,
    log_scale: bool = False,
    compute_correlation: bool = True,
    parameters: Names = ("weight", "bias"),
    line_aggregation: Aggregation = "mean",
    range_aggregation: Aggregation = ("std", "min-max"),
    when: Moment = "step",
) -> Lens:
    """A lens on the norm of the gradients of parameters, and their correlation with the previous gradient.

    Args:
        parameters: names of parameters; a layer that lacks one is passed by.
        when: "step" records the gradients that the optimizer uses: accumulated, clipped, unscaled. "accumulate" records what
            there is after every backward.
        inplace, normalize_by_size, log_scale, compute_correlation, line_aggregation, range_aggregation: as in
            `OutputGradientGeometry`.

    Charts:
        Weight Gradient Norm, Bias Gradient Norm: `mean`, `std`, `min` and `max` over observations of the L2 norm, in the unit of
            the gradient; `count` and `nonfinite`, how many observations count and how many are left out. One value a layer and
            tick. With `inplace=False` also `median`, `Q1` and `Q3`. RMS stands in place of Norm with `normalize_by_size`.
        Weight Gradient Correlation, Bias Gradient Correlation: the same keys for the cosine with the one before, from -1 to 1.
            The first observation of a tick has none.

    Raises:
        LensError: an unknown aggregation, or one that needs `inplace=False`.

    >>> [chart.title for chart in ParameterGradientGeometry(parameters="weight").charts]
    ['Weight Gradient Norm', 'Weight Gradient Correlation']
    """
    geometry = Geometry(spread(inplace), normalize=normalize_by_size, correlation=compute_correlation)
    titles = {name: f"{name.title()} Gradient" for name in names_of(parameters)}
    charts = _charts(titles, geometry, log_scale, checked(inplace, line_aggregation, range_aggregation))
    monitors: dict[str, Monitor] = {name: ParameterGradientMonitor(geometry, name, when=when) for name in titles}
    return Lens("ParameterGradientGeometry", charts, monitors, inner=True)


def ParameterUpdateGeometry(
    *,
    inplace: bool = True,
    normalize_by_size: bool = False,
    log_scale: bool = False,
    compute_correlation: bool = True,
    parameters: Names = ("weight", "bias"),
    line_aggregation: Aggregation = "mean",
    range_aggregation: Aggregation = ("std", "min-max"),
) -> Lens:
    """A lens on the norm of what each optimizer step changes in the parameters, and its correlation with the previous change.

    The steps of all optimizers are followed; none is handed over.

    Args:
        parameters: names of parameters; a layer that lacks one is passed by.
        inplace, normalize_by_size, log_scale, compute_correlation, line_aggregation, range_aggregation: as in
            `OutputGradientGeometry`.

    Charts:
        Weight Update Norm, Bias Update Norm: `mean`, `std`, `min` and `max` over steps of the L2 norm, in the unit of the
            parameter; `count` and `nonfinite`, how many steps count and how many are left out. One value a layer and tick. With
            `inplace=False` also `median`, `Q1` and `Q3`. RMS stands in place of Norm with `normalize_by_size`.
        Weight Update Correlation, Bias Update Correlation: the same keys for the cosine with the one before, from -1 to 1. The
            first step of a tick has none.

    Raises:
        LensError: an unknown aggregation, or one that needs `inplace=False`.

    >>> [chart.title for chart in ParameterUpdateGeometry(compute_correlation=False).charts]
    ['Weight Update Norm', 'Bias Update Norm']
    """
    geometry = Geometry(spread(inplace), normalize=normalize_by_size, correlation=compute_correlation)
    titles = {name: f"{name.title()} Update" for name in names_of(parameters)}
    charts = _charts(titles, geometry, log_scale, checked(inplace, line_aggregation, range_aggregation))
    monitors: dict[str, Monitor] = {name: ParameterUpdateMonitor(geometry, name) for name in titles}
    return Lens("ParameterUpdateGeometry", charts, monitors, inner=True)


def _charts(
    titles: Mapping[str, str], geometry: Geometry, log_scale: bool, aggregations: tuple[tuple[str, ...], tuple[str, ...]]
) -> tuple[Chart, ...]:
    """For each group of monitors a chart of norms and, if they are computed, one of correlations."""
    (size, unit), charts = size_of(geometry.normalize), []
    for group, title in titles.items():
        charts.append(Chart(f"{title} {size}", (group, "norm"), unit, *aggregations, log_scale, limits=(0.0, None)))
        if geometry.correlation:
            of, what = (group, "correlation"), "cosine with the one before"
            charts.append(Chart(f"{title} Correlation", of, what, *aggregations, shared=True, limits=(-1.0, 1.0)))
    return tuple(charts)
