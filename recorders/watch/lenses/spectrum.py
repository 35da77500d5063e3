"""The lens on the rank of outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from recorders.capture.channels import own_axis
from recorders.capture.operands import leaves
from recorders.errors import LensError
from recorders.monitors.forward import ForwardMonitor
from recorders.watch.charts import Chart
from recorders.watch.lenses.lens import Classes, Lens, OfKind, classes, pattern_of, phase_of
from reducers import Covariance, Result, effective_rank


def EffectiveRank(
    record_eval: bool = False,
    evaluation_from_grad: bool = False,
    include: Classes = nn.Linear,
    exclude: Classes = (),
    channel_last: bool | None = None,
    most_features: int = 1024,
) -> Lens:
    """A lens on the effective rank of outputs: how many directions they vary in, from 1 to the number of features.

    It is the exponential of the entropy of the shares that the eigenvalues of the covariance matrix have in their sum (O. Roy and
    M. Vetterli, "The effective rank", EUSIPCO 2007; they take the singular values of a matrix, here that is the covariance
    matrix). All outputs of an epoch are rows of one sample: with n rows it is at most n - 1. It is NaN if no feature varies.
    Beside the rank, the timeline gets its `share` of the features.

    A layer of d features keeps d^2 + d + 2 numbers in float64 (8 MB for 1,024), each observation of n rows costs n d^2
    multiplications, and each epoch a decomposition of d^3.

    Args:
        record_eval: record evaluation too, apart from training, in charts of its own.
        evaluation_from_grad: evaluation is when gradients are off; False: when the module is in evaluation mode.
        include: classes of modules to watch.
        exclude: classes of modules to leave out, whatever `include` says.
        channel_last: features are the last axis of outputs; False: the second; None: that of the layer, see `channel_axis`.
        most_features: outputs with more features than this are left out, and `report()` counts them as filtered out.

    Charts:
        Output Effective Rank: `mean`, the rank, in dimensions; `share`, the rank over the number of features; `rows`, of how many
            rows. One value a layer and tick.

    Raises:
        LensError: `most_features` is below 1.

    >>> [(chart.title, chart.unit) for chart in EffectiveRank().charts]
    [('Output Effective Rank', 'dimensions')]
    """
    if not isinstance(most_features, int) or most_features < 1:
        raise LensError(f"EffectiveRank(most_features={most_features!r}): give a whole number of features, at least 1")
    chart = Chart("Output Effective Rank", ("output",), "dimensions", "mean", None, limits=(1.0, None))
    reducer = Covariance(pattern_of(channel_last)).postmap(_rank)
    few = _Fits(None if channel_last is None else -1 if channel_last else 1, most_features)
    monitor = ForwardMonitor(reducer, eval_update=record_eval, phase=phase_of(evaluation_from_grad), filter_=few)
    return Lens("EffectiveRank", (chart,), {"output": monitor}, OfKind(False, False, classes(include), classes(exclude)))


def _rank(covariance: dict[str, Tensor]) -> Result:
    rank = effective_rank(covariance)
    return {"mean": rank, "share": rank / len(covariance["mean"]), "rows": covariance["count"]}


@dataclass(frozen=True)
class _Fits:
    """Whether no tensor of an output has more features than `most` on `axis`, or if that is None on the axis of its channels."""

    axis: int | None
    most: int

    def __call__(self, output: Any, *, module: nn.Module) -> bool:
        axis = own_axis(module) or -1 if self.axis is None else self.axis
        return all(tensor.ndim == 0 or tensor.shape[min(axis, tensor.ndim - 1)] <= self.most for _, tensor in leaves(output))
