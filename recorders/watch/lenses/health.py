"""Lenses on the health of a training: the size of updates, dead units, and values that are not finite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from recorders.capture.operands import plain
from recorders.monitors.base import Monitor
from recorders.monitors.callables import computed_together
from recorders.monitors.forward import ForwardMonitor
from recorders.monitors.gradients import BackwardMonitor
from recorders.monitors.parameters import ParameterUpdateMonitor
from recorders.schedule.table import subtract
from recorders.watch.charts import Across, Aggregation, Chart
from recorders.watch.diagnosis.limits import UPDATE_RANGE
from recorders.watch.lenses.lens import Classes, Lens, Names, OfKind, checked, classes, names_of, pattern_of, phase_of, spread
from reducers import Activity, FirstNonfinite, Product, Result, Summary
from reducers.execution.rows import norms
from reducers.kernels.precision import real


def UpdateRatio(
    inplace: bool = True,
    parameters: Names = "weight",
    log_scale: bool = True,
    warning_plot: bool = True,
    line_aggregation: Aggregation = "mean",
    range_aggregation: Aggregation = "min-max",
) -> Lens:
    """A lens on the size of updates: the L2 norm of what each optimizer step changes, over the norm of the weights before it.

    The unit of the chart names the usual range, `recorders.watch.diagnosis.limits.UPDATE_RANGE`, which gives its source. The ratio
    has no unit. That of weights which are all zero is infinite, and left out, or 0 if they stay zero. Biases begin at zero, so
    they are not watched unless asked for. Parameters that are spread over processes are taken shard by shard. Each step copies the
    watched parameters and reads them three times.

    Args:
        inplace: keep running statistics only; False keeps the ratio of every step, so that median and quartiles are known.
        parameters: names of parameters; a layer that lacks one is passed by.
        log_scale: draw the ratio on a logarithmic axis.
        warning_plot: also draw the lowest and the highest mean ratio of all layers.
        line_aggregation: one or several of "mean", "std", "min", "max", and with `inplace=False` "median", "Q1", "Q3".
        range_aggregation: one or several of "std", "min-max", and with `inplace=False` "Q1-Q3"; None for no ranges.

    Charts:
        Weight Update Ratio: `mean`, `std`, `min` and `max` over steps of update / weight, without a unit; `count` and
            `nonfinite`, how many steps count and how many are left out. One value a layer and tick. With `inplace=False` also
            `median`, `Q1` and `Q3`.
        Extreme Update Ratios Of All Layers: the lowest and the highest mean of update / weight, one value of each a tick; drawn
            from the rows above, it adds none.

    Raises:
        LensError: an unknown aggregation, or one that needs `inplace=False`.

    >>> [(chart.title, chart.unit) for chart in UpdateRatio(warning_plot=False).charts]
    [('Weight Update Ratio', 'update / weight, usually 1e-04 to 1e-02')]
    """
    aggregations = checked(inplace, line_aggregation, range_aggregation)
    unit = "update / weight, usually {:.0e} to {:.0e}".format(*UPDATE_RANGE)
    titles = {name: f"{name.title()} Update Ratio" for name in names_of(parameters)}
    charts = [Chart(title, (name, "ratio"), unit, *aggregations, log_scale, True, (0.0, None)) for name, title in titles.items()]
    if warning_plot:
        worst = tuple(Across(title, show) for title in titles.values() for show in ("min", "max"))
        charts.append(Chart("Extreme Update Ratios Of All Layers", (), unit, log_scale=log_scale, limits=(0.0, None), across=worst))
    reducer = Product(ratio=spread(inplace))  # `overview` and `findings` know it by this name
    monitors: dict[str, Monitor] = {name: ParameterUpdateMonitor(reducer, name, op_=update_ratio) for name in titles}
    return Lens("UpdateRatio", tuple(charts), monitors, inner=True)


def _update_ratios(afters: Sequence[Tensor], befores: Sequence[Tensor]) -> Tensor:
    """`update_ratio` of many."""
    wide = torch.promote_types(befores[0].dtype, torch.float32)
    sizes = norms(befores).to(wide)
    subtract([*befores], [*afters])
    changes = norms(befores).to(wide)
    return torch.where((changes == 0) & (sizes == 0), changes, changes / sizes)


@computed_together(_update_ratios)
def update_ratio(after: Tensor, before: Tensor) -> Tensor:
    """The L2 norm of `after - before` over that of `before`: 0-d, in float32 or wider; of shards of this process only.

    It is 0 if both are zero, and infinite if only the latter is.

    >>> update_ratio(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0]))
    tensor(0.1000)
    """
    after, before = plain(after), plain(before)  # the norm of a tensor that is spread would communicate in a hook
    wide = torch.promote_types(before.dtype, torch.float32)  # a norm may exceed the range of float16
    change, size = torch.linalg.vector_norm(after - before, dtype=wide), torch.linalg.vector_norm(before, dtype=wide)
    ratio: Tensor = torch.where((change == 0) & (size == 0), change, change / size)
    return ratio


def DeadUnits(
    record_eval: bool = False,
    evaluation_from_grad: bool = False,
    activation: bool = True,
    include: Classes = (),
    exclude: Classes = (),
    channel_last: bool | None = None,
    warning_plot: bool = True,
) -> Lens:
    """A lens on dead units: the share of the units of each layer that were nowhere active in the whole epoch.

    A unit is active if one of its outputs is above 1e-8 in magnitude. `OutputActivation` counts a unit as dead in each batch in
    which it is not active; here it is dead only if no batch made it active. Activation functions that are never zero, such as GELU
    or tanh, have no dead units. Beside the share, the timeline gets the numbers `dead` and `units`.

    Args:
        record_eval: record evaluation too, apart from training, in charts of its own.
        evaluation_from_grad: evaluation is when gradients are off; False: when the module is in evaluation mode.
        activation: watch the activation functions of `torch.nn`.
        include: further classes of modules to watch, such as `nn.Linear`.
        exclude: classes of modules to leave out, whatever the other options say.
        channel_last: units are the last axis of outputs; False: the second; None: that of the layer, see `channel_axis`.
        warning_plot: also draw the highest share of all layers.

    Charts:
        Dead Units: `mean`, the share of units, without a unit; `dead` and `units`, numbers of units. One value a layer and tick.
        Most Dead Units Of All Layers: the highest share of units, one value a tick; drawn from the rows above, it adds none.

    >>> [chart.title for chart in DeadUnits().charts]
    ['Dead Units', 'Most Dead Units Of All Layers']
    """
    charts = [Chart("Dead Units", ("output", "share"), "share of units", "mean", None, shared=True, limits=(0.0, 1.0))]
    if warning_plot:
        worst = (Across("Dead Units", "max"),)
        charts.append(Chart("Most Dead Units Of All Layers", (), "share of units", limits=(0.0, 1.0), across=worst))
    reducer = Activity(pattern_of(channel_last)).postmap(_with_share)
    monitor = ForwardMonitor(reducer, eval_update=record_eval, phase=phase_of(evaluation_from_grad))
    return Lens("DeadUnits", tuple(charts), {"output": monitor}, OfKind(activation, False, classes(include), classes(exclude)))


def _with_share(activity: Mapping[str, Tensor]) -> Result:
    dead, units = activity["dead"].sum(), (~activity["rate"].isnan()).sum()  # a unit of which nothing was finite is unknown
    return {**activity, "share": {"mean": dead / real(units), "dead": dead, "units": units}}


def NonFinite(
    record_eval: bool = False,
    evaluation_from_grad: bool = False,
    outputs: bool = True,
    gradients: bool = True,
    include: Classes = torch.nn.Module,
    exclude: Classes = (),
    first_plot: bool = True,
) -> Lens:
    """A lens on NaN and infinity: how many elements of outputs and of their gradients are not finite, and since when.

    For each layer: the number in the epoch, and the first observation of the epoch with one, counted from 0; nothing if all are
    finite. The timeline also gets `nan`, `inf`, and their `share` of all elements. Across ranks the observations of one rank count
    after those of the ranks before. A GradScaler makes gradients infinite now and then while it looks for its scale.

    Args:
        record_eval: record evaluation too, apart from training, in charts of its own.
        evaluation_from_grad: evaluation is when gradients are off; False: when the module is in evaluation mode.
        outputs: watch outputs.
        gradients: watch the gradients with respect to outputs.
        include: classes of modules to watch; the default is every module.
        exclude: classes of modules to leave out, whatever `include` says.
        first_plot: also draw the first observation with an output that is not finite, of all layers. Of several layers in which it
            is the same, the line belongs to the first in network order: that is where it began.

    Charts:
        Nonfinite Outputs, Nonfinite Gradients: `mean`, the number of elements that are not finite; `nan` and `inf`, of which
            kind; `share`, the part of all elements. One value a layer and tick.
        First Nonfinite Output, First Nonfinite Gradient: `mean`, the first observation with one. One value a layer and tick, and
            no row if all are finite.
        First Nonfinite Output Of All Layers: the first observation of all layers, one value a tick; drawn from the rows above, it
            adds none.

    Raises:
        LensError: neither outputs nor gradients are watched, so there are no charts.

    >>> [chart.title for chart in NonFinite(gradients=False).charts]
    ['Nonfinite Outputs', 'First Nonfinite Output', 'First Nonfinite Output Of All Layers']
    """
    options: dict[str, Any] = {"eval_update": record_eval, "phase": phase_of(evaluation_from_grad)}
    reducer = Product(values=Summary().postmap(_with_total), first=FirstNonfinite().postmap(_since))
    monitors: dict[str, Monitor] = {}
    if outputs:
        monitors["output"] = ForwardMonitor(reducer, **options)
    if gradients:
        monitors["gradient"] = BackwardMonitor(reducer, **options)
    charts = []
    for group in monitors:
        what, limits = group.title(), (0.0, None)
        charts.append(Chart(f"Nonfinite {what}s", (group, "values", "total"), "elements", "mean", None, shared=True, limits=limits))
        charts.append(Chart(f"First Nonfinite {what}", (group, "first"), "observation", "mean", None, shared=True, limits=limits))
    if first_plot and outputs:
        earliest = (Across("First Nonfinite Output", "min"),)
        charts.append(Chart("First Nonfinite Output Of All Layers", (), "observation", limits=(0.0, None), across=earliest))
    return Lens("NonFinite", tuple(charts), monitors, OfKind(False, False, classes(include), classes(exclude)))


def _with_total(summary: Mapping[str, Tensor]) -> Result:
    nan, inf = summary["nan"], summary["inf"]
    total = nan + inf
    share = total / real(summary["count"] + total)
    return {**summary, "total": {"mean": total, "nan": nan, "inf": inf, "share": share}}


def _since(first: Tensor) -> Result:
    return {"mean": first} if first >= 0 else {}  # nothing to draw if there was none
