"""Lenses on how outputs are distributed: their quantiles, and outliers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from recorders.errors import LensError
from recorders.monitors.forward import ForwardMonitor
from recorders.watch.charts import Across, Aggregation, Chart
from recorders.watch.lenses.lens import Classes, Lens, OfKind, checked, classes, pattern_of, phase_of
from reducers import Moments, Product, Quantile, Result, Summary
from reducers.kernels.precision import real

OUTLIER = 6.0
"""The magnitude from which on a feature counts as an outlier, in the unit of the outputs.

It is not a number of standard deviations. Source: T. Dettmers et al., "LLM.int8()", NeurIPS 2022 (arXiv:2208.07339), who keep such
features in 16 bit. They also ask that a feature reaches it in a quarter of the layers and in 6 % of the positions; here one element
is enough.
"""

_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
_NAMES = ("min", "Q1", "median", "Q3", "max")


def Quantiles(
    record_eval: bool = False,
    evaluation_from_grad: bool = False,
    include: Classes = nn.Module,
    exclude: Classes = (),
    bits: int = 5,
    log_scale: bool = False,
    line_aggregation: Aggregation = "median",
    range_aggregation: Aggregation = ("Q1-Q3", "min-max"),
) -> Lens:
    """A lens on the quantiles of all elements of the outputs in an epoch, in bounded memory: 130 KB for each output.

    Median and quartiles have a relative error of at most 1.54 % with 5 bits, and each bit more halves it and doubles the memory;
    minimum and maximum are exact. NaN and infinity are left out. See `reducers.Quantile` for the definition and its source.

    Args:
        record_eval: record evaluation too, apart from training, in charts of its own.
        evaluation_from_grad: evaluation is when gradients are off; False: when the module is in evaluation mode.
        include: classes of modules to watch; the default is every module.
        exclude: classes of modules to leave out, whatever `include` says.
        bits: see above, 1 to 12.
        log_scale: draw the quantiles on a logarithmic axis, on which those of 0 and below have no place.
        line_aggregation: one or several of "median", "min", "max", "Q1", "Q3".
        range_aggregation: one or several of "Q1-Q3", "min-max"; None for no ranges.

    Charts:
        Output Quantiles: `min`, `Q1`, `median`, `Q3` and `max` of all elements of a tick, in the unit of the outputs. One value a
            layer and tick.

    Raises:
        LensError: an unknown aggregation, or "mean" or "std", which are no quantiles.
        ArgumentError: `bits` is out of range.

    >>> [(chart.lines, chart.ranges) for chart in Quantiles(line_aggregation=("median", "max"), range_aggregation=None).charts]
    [(('median', 'max'), ())]
    """
    lines, ranges = checked(False, line_aggregation, range_aggregation)
    if wrong := {"mean", "std"} & {*lines, *ranges}:
        raise LensError(
            f"Quantiles: {min(wrong)!r} is no quantile; choose from 'median', 'min', 'max', 'Q1', 'Q3', 'Q1-Q3', 'min-max'"
        )
    chart = Chart("Output Quantiles", ("output",), "", lines, ranges, log_scale)
    reducer = Quantile(q=_SHARES, bits=bits).postmap(_by_name)
    monitor = ForwardMonitor(reducer, eval_update=record_eval, phase=phase_of(evaluation_from_grad))
    return Lens("Quantiles", (chart,), {"output": monitor}, OfKind(False, False, classes(include), classes(exclude)))


def _by_name(quantiles: Tensor) -> Result:
    return dict(zip(_NAMES, quantiles.unbind(), strict=True))


def Outliers(
    record_eval: bool = False,
    evaluation_from_grad: bool = False,
    include: Classes = (nn.Linear, nn.LayerNorm),
    exclude: Classes = (),
    channel_last: bool | None = None,
    threshold: float = OUTLIER,
    log_scale: bool = False,
    warning_plot: bool = True,
) -> Lens:
    """A lens on outliers of outputs, which make numbers of few bits coarse: how far they stick out, and in how many features.

    For each layer, of all elements of an epoch: the largest magnitude in standard deviations (about 5 for a million normal
    numbers); the excess kurtosis (0 for normal numbers); and the share of features with an element of at least `threshold`. Beside
    the share, the timeline gets the numbers `outliers` and `features`, and for `findings` the `largest` magnitude and the `typical`
    one, the median over features of their root mean squares. NaN and infinity are left out.

    Args:
        record_eval: record evaluation too, apart from training, in charts of its own.
        evaluation_from_grad: evaluation is when gradients are off; False: when the module is in evaluation mode.
        include: classes of modules to watch; add blocks, with the depth of the inspector, to see a residual stream.
        exclude: classes of modules to leave out, whatever `include` says.
        channel_last: features are the last axis of outputs; False: the second; None: that of the layer, see `channel_axis`.
        threshold: the magnitude from which on a feature is an outlier, in the unit of the outputs; the default is `OUTLIER`.
        log_scale: draw the largest magnitude on a logarithmic axis.
        warning_plot: also draw the highest share of outlier features of all layers.

    Charts:
        Output Peak: `mean`, the largest magnitude, in standard deviations. One value a layer and tick.
        Output Kurtosis: `mean`, the excess kurtosis, without a unit. One value a layer and tick.
        Outlier Features: `mean`, the share of features; `outliers` and `features`, numbers of features; `largest` and `typical`,
            magnitudes in the unit of the outputs. One value a layer and tick.
        Most Outlier Features Of All Layers: the highest share of features, one value a tick; drawn from the rows above, it adds
            none.

    Raises:
        LensError: the threshold is not a positive number.

    >>> [chart.title for chart in Outliers(warning_plot=False).charts]
    ['Output Peak', 'Output Kurtosis', 'Outlier Features']
    """
    if not isinstance(threshold, (int, float)) or not 0 < threshold < math.inf:
        raise LensError(f"Outliers(threshold={threshold!r}): give a positive magnitude, such as {OUTLIER}")
    charts = [
        Chart("Output Peak", ("output", "peak"), "standard deviations", "mean", None, log_scale, True, (0.0, None)),
        Chart("Output Kurtosis", ("output", "kurtosis"), "excess kurtosis", "mean", None, limits=(-2.0, None)),
        Chart("Outlier Features", ("output", "features"), "share of features", "mean", None, shared=True, limits=(0.0, 1.0)),
    ]
    if warning_plot:
        worst = (Across("Outlier Features", "max"),)
        charts.append(Chart("Most Outlier Features Of All Layers", (), "share of features", limits=(0.0, 1.0), across=worst))
    features = Summary(pattern_of(channel_last), correction=0)
    reducer = Product(moments=Moments(order=4), features=features).postmap(_Outliers(threshold))
    monitor = ForwardMonitor(reducer, eval_update=record_eval, phase=phase_of(evaluation_from_grad))
    return Lens("Outliers", tuple(charts), {"output": monitor}, OfKind(False, False, classes(include), classes(exclude)))


@dataclass(frozen=True)
class _Outliers:
    """Peak, kurtosis and outlier features, from moments of all elements and the largest magnitude of each feature."""

    threshold: float

    def __call__(self, result: Mapping[str, Any]) -> Result:
        moments, each = result["moments"], result["features"]
        largest, typical = real(each["absmax"]).nan_to_num(), (each["var"] + each["mean"].square()).sqrt().nanmedian()
        outliers = largest >= self.threshold
        number, features = outliers.sum(), torch.tensor(outliers.numel(), device="cpu")
        return {
            "peak": {"mean": largest.amax() / moments["std"]},
            "kurtosis": {"mean": moments["kurtosis"]},
            "features": {
                "mean": real(outliers).mean(),
                "outliers": number,
                "features": features,
                "largest": largest.amax(),
                "typical": typical,
            },
        }
