"""Lenses on the norm and the direction of tensors."""

from __future__ import annotations

from recorders.monitors.gradients import BackwardMonitor
from recorders.watch.charts import Aggregation, Chart
from recorders.watch.lenses.lens import Lens, any_module, checked, not_activation
from recorders.watch.lenses.spread import spread
from reducers import Geometry

__all__ = ["OutputGradientGeometry"]


def OutputGradientGeometry(
    inplace: bool = True,
    normalize_by_size: bool = False,
    log_scale: bool = False,
    compute_correlation: bool = True,
    skip_activation: bool = True,
    line_aggregation: Aggregation = "mean",
    range_aggregation: Aggregation = ("std", "min-max"),
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

    Raises:
        LensError: an unknown aggregation, or one that needs `inplace=False`.

    >>> [chart.title for chart in OutputGradientGeometry(log_scale=True).charts]
    ['Output Gradient Norm', 'Output Gradient Correlation']
    """
    lines, ranges = checked(inplace, line_aggregation, range_aggregation)
    title, unit = ("Output Gradient RMS", "root mean square") if normalize_by_size else ("Output Gradient Norm", "L2 norm")
    charts = [Chart(title, ("gradient", "norm"), unit, lines, ranges, log_scale, limits=(0.0, None))]
    if compute_correlation:
        title, of, unit = "Output Gradient Correlation", ("gradient", "correlation"), "cosine with the pass before"
        charts.append(Chart(title, of, unit, lines, ranges, shared=True, limits=(-1.0, 1.0)))
    geometry = Geometry(spread(inplace), normalize=normalize_by_size, correlation=compute_correlation)
    where = not_activation if skip_activation else any_module
    return Lens("OutputGradientGeometry", tuple(charts), {"gradient": BackwardMonitor(geometry)}, where)
