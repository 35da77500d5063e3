"""Mean and variance of elements that do not weigh the same."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from reducers.core.inputs import observation_with
from reducers.core.patterns import arrange, validate
from reducers.core.reducer import Reducer
from reducers.core.states import check_states, require_state, to_device
from reducers.errors import ArgumentError
from reducers.kernels.chunks import pieces_beside
from reducers.kernels.precision import able_to_hold_nan, magnitude, real, wide_float
from reducers.state import Result, State

__all__ = ["WeightedMean", "WeightedMoments"]


@dataclass(frozen=True)
class _Weighted(Reducer):
    pattern: str = "... ->"

    def __post_init__(self) -> None:
        validate(self.pattern)

    @abstractmethod
    def lift(self, x: Tensor, weights: Tensor, axes: tuple[int, ...]) -> State:
        """The state of one observation, of which nothing is missing: what was has weight 0."""

    @abstractmethod
    def join(self, a: State, b: State) -> State:
        """The state of both; neither is empty."""

    def update(self, state: State, *xs: Tensor) -> State:
        x, weights = observation_with(self, xs, "weights")
        if x.numel() == 0:
            return state
        weights = real(weights)
        weights = torch.where(torch.isfinite(weights), weights, 0.0).expand(x.shape)
        (x, axes), (weights, _) = arrange(x, self.pattern), arrange(weights, self.pattern)
        state = to_device(state, x.device)
        for part, weighing in pieces_beside(x, weights, axes):
            piece = able_to_hold_nan(part)
            there = torch.isfinite(piece)
            wide = wide_float(torch.where(there, piece, torch.zeros_like(piece)))
            lifted = self.lift(wide, torch.where(there, weighing, 0.0), axes)
            state = self.merge(state, {key: value.contiguous() for key, value in lifted.items()})
        return state

    def merge(self, a: State, b: State) -> State:
        if not a or not b:
            return a or b
        check_states(self, a, b)
        return self.join(a, to_device(b, a["weight"].device))


@dataclass(frozen=True)
class WeightedMean(_Weighted):
    """Weighted mean of the finite elements, `sum(w x) / sum(w)`.

    `update(state, x, weights)`: real numbers from 0 up, whose axes are the first ones of x, and repeated where it lacks them:
    sample weights `[batch]` beside `[batch, channels]`. An element whose weight is not finite is left out.

    Args:
        pattern: see `Statistic`.

    Returns:
        float64 or complex128, in the shape of the kept axes; NaN where nothing has weight.

    Raises:
        ArgumentError: the shape of the weights does not fit.

    >>> import torch
    >>> mean = WeightedMean()
    >>> mean.compute(mean.update({}, torch.tensor([1.0, 5.0]), torch.tensor([3.0, 1.0])))
    tensor(2., dtype=torch.float64)
    """

    def lift(self, x: Tensor, weights: Tensor, axes: tuple[int, ...]) -> State:
        return {"weight": weights.sum(dim=axes), "sum": (weights * x).sum(dim=axes)}

    def join(self, a: State, b: State) -> State:
        return {key: value + b[key] for key, value in a.items()}

    def compute(self, state: State) -> Tensor:
        require_state(self, state)
        return torch.where(state["weight"] > 0, state["sum"] / state["weight"], torch.nan)


@dataclass(frozen=True)
class WeightedMoments(_Weighted):
    """Weighted mean, variance and standard deviation of the finite elements.

    With W the sum of the weights, `var = sum(w |x - mean|^2) / (W - correction sum(w^2) / W)`: of weights that say how reliable
    elements are, unbiased for `correction=1`, and with equal weights what `Moments` gives; `numpy.cov(x, aweights=w)` likewise.
    Parts are merged about their means: West 1979, "Updating mean and variance estimates: an improved method", and Chan, Golub and
    LeVeque 1983, with weights for counts.

    `update(state, x, weights)`: real numbers from 0 up, whose axes are the first ones of x, and repeated where it lacks them:
    sample weights `[batch]` beside `[batch, channels]`. An element whose weight is not finite is left out.

    Args:
        pattern: see `Statistic`.
        correction: 0 for the variance of the elements themselves.

    Returns:
        `weight`, the sum of the weights, `var` and `std` float64, `mean` float64 or complex128, in the shape of the kept axes; NaN
        where weight is missing.

    Raises:
        ArgumentError: `correction` is not a finite number from 0 up, or the shape of the weights does not fit.

    >>> import torch
    >>> moments = WeightedMoments(correction=0)
    >>> result = moments.compute(moments.update({}, torch.tensor([1.0, 5.0]), torch.tensor([3.0, 1.0])))
    >>> {name: value.item() for name, value in result.items() if name != "std"}
    {'weight': 4.0, 'mean': 2.0, 'var': 3.0}
    """

    correction: float = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.correction, (int, float)) or not 0 <= self.correction < math.inf:
            raise ArgumentError(f"WeightedMoments takes a finite correction from 0 up and got {self.correction!r}")

    def lift(self, x: Tensor, weights: Tensor, axes: tuple[int, ...]) -> State:
        weight = weights.sum(dim=axes, keepdim=True)
        mean = (weights * x).sum(dim=axes, keepdim=True) / torch.where(weight > 0, weight, 1.0)
        return {
            "weight": weight.squeeze(axes),
            "squares": weights.square().sum(dim=axes),
            "mean": mean.squeeze(axes),
            "m2": (weights * magnitude(x - mean)).sum(dim=axes),
        }

    def join(self, a: State, b: State) -> State:
        weight = a["weight"] + b["weight"]
        share = b["weight"] / torch.where(weight > 0, weight, 1.0)
        delta = b["mean"] - a["mean"]
        return {
            "weight": weight,
            "squares": a["squares"] + b["squares"],
            "mean": a["mean"] + delta * share,
            "m2": a["m2"] + b["m2"] + magnitude(delta) * share * a["weight"],
        }

    def compute(self, state: State) -> Result:
        require_state(self, state)
        weight = state["weight"]
        freedom = weight - self.correction * state["squares"] / weight
        # of a lone element they differ by rounding at most
        var = torch.where(freedom > 1e-12 * weight, state["m2"] / freedom, torch.nan)
        return {
            "weight": weight.clone(),
            "mean": torch.where(weight > 0, state["mean"], torch.nan),
            "var": var,
            "std": var.sqrt(),
        }
