"""The lens on activation functions that are stuck at the ends of their curves."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from recorders.monitors.forward import ForwardMonitor
from recorders.watch.charts import Across, Chart
from recorders.watch.diagnosis.limits import SATURATED_SLOPE, relative_slope
from recorders.watch.lenses.lens import Lens, OfKind, pattern_of, phase_of
from reducers import Mean, Result
from reducers.kernels.precision import real


def Saturation(
    record_eval: bool = False, evaluation_from_grad: bool = False, channel_last: bool | None = None, warning_plot: bool = True
) -> Lens:
    """A lens on the share of units of `nn.Tanh` and `nn.Sigmoid` that are saturated in an epoch: hardly any gradient passes them.

    A unit is saturated if its mean slope is below `recorders.watch.diagnosis.limits.SATURATED_SLOPE` of the steepest,
    which gives its source. NaN and infinity are left out. Beside the share, the timeline gets the numbers `saturated` and `units`.

    Args:
        record_eval: record evaluation too, not only training.
        evaluation_from_grad: evaluation is when gradients are off; False: when the module is in evaluation mode.
        channel_last: units are the last axis of outputs; False: the second; None: that of the layer, see `channel_axis`.
        warning_plot: also draw the highest share of all layers.

    Charts:
        Saturated Units: `mean`, the share of units, without a unit; `saturated` and `units`, numbers of units. One value a layer
            and tick.
        Most Saturated Units Of All Layers: the highest share of units, one value a tick; drawn from the rows above, it adds none.

    >>> [chart.title for chart in Saturation().charts]
    ['Saturated Units', 'Most Saturated Units Of All Layers']
    """
    charts = [Chart("Saturated Units", ("output",), "share of units", "mean", None, shared=True, limits=(0.0, 1.0))]
    if warning_plot:
        worst = (Across("Saturated Units", "max"),)
        charts.append(Chart("Most Saturated Units Of All Layers", (), "share of units", limits=(0.0, 1.0), across=worst))
    reducer = Mean(pattern_of(channel_last)).postmap(_share)
    monitor = ForwardMonitor(reducer, eval_update=record_eval, phase=phase_of(evaluation_from_grad), op_=_slope)
    return Lens("Saturation", tuple(charts), {"output": monitor}, OfKind(False, False, (nn.Tanh, nn.Sigmoid)))


def _slope(output: Tensor, *, module: nn.Module) -> Tensor:
    return relative_slope(output, output.square(), "tanh" if isinstance(module, nn.Tanh) else "sigmoid")


def _share(slopes: Tensor) -> Result:
    saturated, units = (slopes < SATURATED_SLOPE).sum(), torch.isfinite(slopes).sum()
    return {"mean": saturated / real(units), "saturated": saturated, "units": units}
