"""The lens on pushed values: losses and metrics."""

from __future__ import annotations

from torch import nn

from recorders.watch.charts import Aggregation, Chart
from recorders.watch.lenses.lens import Lens, Names, names_of, phase_of


def LossMetrics(
    loss_fn: nn.Module | None = None,
    loss_line: Aggregation = "mean",
    loss_range: Aggregation = "std",
    metrics_line: Aggregation = "mean",
    metrics_range: Aggregation = None,
    log_scale: bool = False,
    *,
    metrics: Names | None = None,
    evaluation_from_grad: bool = True,
    separate_loss_and_metrics: bool = True,
    loss_fn_inplace: bool = True,
) -> Lens:
    """A lens that draws losses and metrics, which come from `push_loss` and `push_metric`, or from `loss_fn`.

    Args:
        loss_fn: a loss module whose outputs are recorded. Do not push these losses as well, or they count twice.
        loss_line: line aggregation of the loss; "median", "Q1" and "Q3" need every value, kept by `running=False` or
            `loss_fn_inplace=False`.
        loss_range: range aggregation of the loss; "Q1-Q3" needs every value.
        metrics_line: line aggregation of the metrics; those that need every value need `running=False`.
        metrics_range: range aggregation of the metrics.
        log_scale: draw the loss on a logarithmic axis.
        metrics: the names of the metrics to draw; None for all. The others are recorded too.
        evaluation_from_grad: outputs of `loss_fn` are evaluation losses if gradients are off; False: if `loss_fn` is in evaluation
            mode.
        separate_loss_and_metrics: draw two charts; False draws one, with the lines and ranges of the loss.
        loss_fn_inplace: keep running statistics of the outputs of `loss_fn`; False keeps every value.

    Charts:
        Loss: `mean`, `std`, `min` and `max` over what was pushed since the last tick, in the unit of the loss; `count` and
            `nonfinite`, how many values count and how many are left out. One value a tick for each of `Loss/train` and
            `Loss/eval`. With `loss_fn_inplace=False`, or `running=False` where it is pushed, also `median`, `Q1` and `Q3`.
        Metrics: the same keys for each metric, in its unit: one value a metric and tick.

    Raises:
        LensError: an unknown aggregation.

    >>> [(chart.title, chart.ranges) for chart in LossMetrics(metrics_range="min-max").charts]
    [('Loss', ('std',)), ('Metrics', ('min-max',))]
    """
    only = () if metrics is None else names_of(metrics)
    if separate_loss_and_metrics:
        loss = Chart("Loss", ("loss",), "loss", loss_line, loss_range, log_scale, shared=True)
        charts: tuple[Chart, ...] = loss, Chart("Metrics", ("metric",), "", metrics_line, metrics_range, only=only)
    else:
        charts = (Chart("Loss & Metrics", ("pushed",), "", loss_line, loss_range, log_scale, only=only),)
    phase = phase_of(evaluation_from_grad)
    return Lens("LossMetrics", charts, loss_fn=loss_fn, loss_phase=phase, loss_running=loss_fn_inplace)
