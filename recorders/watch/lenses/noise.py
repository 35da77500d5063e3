"""The lens on the noise of gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from recorders.errors import LensError
from recorders.monitors.base import Monitor
from recorders.monitors.parameters import ParameterGradientMonitor
from recorders.watch.charts import Chart
from recorders.watch.lenses.lens import Lens, Names, names_of
from reducers import Reducer, Result, State
from reducers.core.checks import check_keys, check_shape
from reducers.core.inputs import observation
from reducers.core.states import check_states, require_state, to_device
from reducers.errors import StateError
from reducers.kernels.precision import real, weighted_squares, wide_float
from reducers.state import Nonfinite


def GradientNoise(parameters: Names = ("weight", "bias"), batch_size: int | None = None, log_scale: bool = True) -> Lens:
    """A lens on the simple noise scale of gradients: up to about which batch size more samples make a step better.

    For each parameter, of the gradients g_1 to g_n that the n optimizer steps of an epoch use, with m their mean, it estimates
    `tr(C) / |G|^2`. C is the covariance of a step's gradient, and G its expectation:

    - `noise`, the estimate of tr(C): the sum of `|g_i - m|^2`, divided by n - 1;
    - `signal`, the estimate of `|G|^2`: `|m|^2 - noise / n`;
    - `mean`, the noise scale: noise / signal, in batches of the size that the training uses; with `batch_size`, times that size, in
      samples.

    These are the estimators of S. McCandlish et al., "An Empirical Model of Large-Batch Training" (arXiv:1812.06162), appendix A.1,
    with one step as the small batch and n steps as the big one. If the weights stay as they are and batches are independent, noise
    and signal have no bias, and their ratio has one of the order 1/n. Weights do move: what changes G within an epoch counts
    as noise. Without replacement the batches of an epoch are independent draws from where the data come from, and G is the gradient
    there, not that of the data set. If n is too small to tell the signal from 0 (signal <= 0), there is no scale, only noise and
    signal. `Inspector.tick` makes stretches of steps longer or shorter than an epoch. The scale of the whole network is the sum of
    all `noise` over the sum of all `signal`. Steps with a gradient that is not finite are left out, and counted as `nonfinite`. If
    ranks average their gradients, each step counts once for every rank, and `signal` is too large by up to noise / n.

    Each step reads the gradients and their mean, and keeps the mean in float64: 8 bytes for each element.

    Args:
        parameters: names of parameters; a layer that lacks one is passed by.
        batch_size: the number of samples that a step uses, over all micro-batches and ranks; None for a scale in batches.
        log_scale: draw the scale on a logarithmic axis.

    Charts:
        Weight Gradient Noise Scale, Bias Gradient Noise Scale: `mean`, the scale, in batches, or in samples with `batch_size=`,
            and no value if the signal is not above 0; `noise` and `signal`, in the square of the unit of the gradient, from two
            steps on; `count` and `nonfinite`, how many steps count and how many are left out. One value a layer and tick.

    Raises:
        LensError: `batch_size` is not a positive number.

    >>> [(chart.title, chart.unit) for chart in GradientNoise("weight", batch_size=32).charts]
    [('Weight Gradient Noise Scale', 'samples')]
    """
    if batch_size is not None and (not isinstance(batch_size, int) or batch_size < 1):
        raise LensError(f"GradientNoise(batch_size={batch_size!r}): give the number of samples that a step uses, at least 1")
    unit = "batches" if batch_size is None else "samples"
    titles = {name: f"{name.title()} Gradient Noise Scale" for name in names_of(parameters)}
    charts = tuple(Chart(title, (name,), unit, "mean", None, log_scale, limits=(0.0, None)) for name, title in titles.items())
    reducer = Scatter().postmap(_Scale(batch_size or 1))
    monitors: dict[str, Monitor] = {name: ParameterGradientMonitor(reducer, name) for name in titles}
    return Lens("GradientNoise", charts, monitors, inner=True)


@dataclass(frozen=True)
class Scatter(Reducer):
    """How far observations lie from their mean. Those with an element that is not finite are left out.

    States merge by the formula of Chan, Golub and LeVeque (1983).

    Returns:
        `count` and `nonfinite`, int64, how many observations count and how many are left out; `scatter`, float64, the sum of their
        squared distances from their mean; `square`, float64, the square of the norm of the mean. All 0-d.
    """

    def update(self, state: State, *xs: Tensor) -> State:
        x = observation(self, xs)
        if x.numel() == 0:
            return state
        wide = wide_float(x)
        finite = torch.isfinite(wide).all()
        one = {
            "count": finite.to(torch.int64),
            "nonfinite": (~finite).to(torch.int64),
            "mean": torch.where(finite, wide, 0.0).contiguous(),
            "scatter": real(torch.zeros_like(finite)),
        }
        return self.merge(to_device(state, x.device), one)

    def merge(self, a: State, b: State) -> State:
        if not a or not b:
            return a or b
        check_states(self, a, b)
        b = to_device(b, a["mean"].device)
        count, delta = a["count"] + b["count"], b["mean"] - a["mean"]
        share = b["count"] / real(count.clamp(min=1))
        distance = weighted_squares(share * a["count"], delta).sum()
        return {
            "count": count,
            "nonfinite": a["nonfinite"] + b["nonfinite"],
            "mean": torch.addcmul(a["mean"], delta, share.to(delta.dtype)),
            "scatter": a["scatter"] + b["scatter"] + distance,
        }

    def _check(self, state: State) -> None:
        check_keys(self, state, ("count", "nonfinite", "mean", "scatter"))
        for key in ("count", "nonfinite", "scatter"):
            check_shape(self, state, key, (), *((torch.float64, torch.float32) if key == "scatter" else (torch.int64,)))
        if not (state["mean"].is_floating_point() or state["mean"].is_complex()):
            raise StateError(f"{self!r} has no such state: its mean is of {state['mean'].dtype}")

    def compute(self, state: State) -> Result:
        require_state(self, state)
        square = torch.linalg.vector_norm(state["mean"]).square()
        return {**{name: state[name].clone() for name in ("count", "nonfinite", "scatter")}, "square": square}

    def nonfinite(self, state: State) -> Nonfinite | None:
        """Return how many observations were left out."""
        return Nonfinite(state["nonfinite"].clone(), state["count"] + state["nonfinite"]) if state else None


@dataclass(frozen=True)
class _Scale:
    """Noise, signal and noise scale of a `Scatter`."""

    batch_size: int

    def __call__(self, found: Mapping[str, Tensor]) -> Result:
        count = found["count"]
        shown = {"count": count, "nonfinite": found["nonfinite"]}
        if count < 2:
            return shown
        noise = found["scatter"] / real(count - 1)
        signal = found["square"] - noise / real(count)
        if signal > 0:
            shown["mean"] = self.batch_size * noise / signal
        return {**shown, "noise": noise, "signal": signal}
