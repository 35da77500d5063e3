"""The lens on pushed values: losses and metrics."""

from __future__ import annotations

from torch import nn

from recorders.watch.charts import Aggregation, Chart
from recorders.watch.lenses.lens import Lens

__all__ = ["LossMetrics"]


def LossMetrics(
    loss_fn: nn.Module | None = None,
    loss_line: Aggregation = "mean",
    loss_range: Aggregation = "std",
    metrics_line: Aggregation = "mean",
    metrics_range: Aggregation = None,
    log_scale: bool = False,
) -> Lens:
    """A lens that draws losses and metrics, which come from `push_loss` and `push_metric`, or from `loss_fn`.

    Args:
        loss_fn: a loss module whose outputs are recorded: as training losses if gradients are enabled, else as evaluation losses.
            Do not push these losses as well, or they count twice.
        loss_line: line aggregation of the loss; "median", "Q1" and "Q3" need values pushed with `running=False`.
        loss_range: range aggregation of the loss; "Q1-Q3" needs values pushed with `running=False`.
        metrics_line: line aggregation of the metrics.
        metrics_range: range aggregation of the metrics.
        log_scale: draw the loss on a logarithmic axis.

    Raises:
        LensError: an unknown aggregation.

    >>> [(chart.title, chart.ranges) for chart in LossMetrics(metrics_range="min-max").charts]
    [('Loss', ('std',)), ('Metrics', ('min-max',))]
    """
    loss = Chart("Loss", ("loss",), "loss", loss_line, loss_range, log_scale, shared=True)
    return Lens("LossMetrics", (loss, Chart("Metrics", ("metric",), "", metrics_line, metrics_range)), loss_fn=loss_fn)
