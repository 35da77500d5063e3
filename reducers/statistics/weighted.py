"""Weighted mean and variance."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from reducers.core.checks import check_specimen
from reducers.core.fields import Add, Field, Joined, columns_of, join_fields
from reducers.core.inputs import observation_with
from reducers.core.overrides import Shortcut
from reducers.core.patterns import arrange, kept_axes, validate
from reducers.core.reducer import Reducer
from reducers.core.states import check_states, require_state, to_device
from reducers.errors import DTypeError
from reducers.kernels.chunks import paired_pieces
from reducers.kernels.dispatch import weigh
from reducers.kernels.precision import nan_capable, real, weighted_squares, wide_float
from reducers.state import Nonfinite, Result, State
from reducers.statistics.moments import check_correction


@dataclass(frozen=True)
class _Weighted(Reducer):
    pattern: str = "... ->"

    @property
    def columns(self) -> tuple[str, ...]:
        """The keys of the state, in the order of the kernels, which stand for `lift` and `join`; empty if they do not."""
        return tuple(columns_of(self.fields))

    divisible: ClassVar[bool] = True
    """Whether the lifts of the parts of an observation join to the lift of the whole."""

    def __post_init__(self) -> None:
        validate(self.pattern)

    @abstractmethod
    def lift(self, x: Tensor, weights: Tensor, axes: tuple[int, ...]) -> State:
        """Return the state of one observation, without `nonfinite`; all elements are finite, and excluded ones have weight 0."""

    def join(self, a: State, b: State) -> State:
        """Return the merged state; neither argument is empty. A class whose `fields` do not say it all overrides it."""
        return join_fields(self.fields, a, b)

    def update(self, state: State, *xs: Tensor) -> State:
        x, weights = observation_with(self, xs, "weights")
        if weights.is_complex():
            raise DTypeError(f"{self!r} takes real weights, and got {weights.dtype}")
        if x.numel() == 0:
            return state
        (x, axes), (weights, _) = arrange(x, self.pattern), arrange(weights.expand(x.shape), self.pattern)
        state = to_device(state, x.device)
        joined = weigh(x, weights, axes, self.columns, state, self.merge)
        if joined is not None:
            return joined
        for part, given in paired_pieces(x, weights, axes) if self.divisible else ((x, weights),):
            piece, part_weights = nan_capable(part), real(given)
            finite = torch.isfinite(piece) & torch.isfinite(part_weights)
            wide = wide_float(torch.where(finite, piece, torch.zeros_like(piece)))
            nonfinite = (~finite).sum(dim=axes)
            lifted = {"nonfinite": nonfinite, **self.lift(wide, torch.where(finite, part_weights, 0.0), axes)}
            state = self.merge(state, {key: value.contiguous() for key, value in lifted.items()})
        return state

    def merge(self, a: State, b: State) -> State:
        if not a or not b:
            return a or b
        check_states(self, a, b)
        b = to_device(b, a["weight"].device)
        return self.join(a, b)

    def nonfinite(self, state: State) -> Nonfinite | None:
        """Return how many elements were left out because they, or their weights, were not finite."""
        return Nonfinite(state["nonfinite"].sum(), None) if state else None

    def specimen(self, kept: tuple[int, ...], dtype: torch.dtype, device: str) -> State:
        """Return the state of an observation of zeros whose kept axes have these sizes."""
        x = wide_float(torch.zeros((2, *kept), dtype=dtype, device=device))
        lifted = self.lift(x, real(x.real), (0,))
        return {"nonfinite": torch.zeros_like(lifted["weight"], dtype=torch.int64), **lifted}

    def _check(self, state: State) -> None:
        check_specimen(self, state, kept_axes(self.pattern))

    shortcuts: ClassVar[tuple[Shortcut, ...]] = (
        *Reducer.shortcuts,
        Shortcut("columns", property(lambda self: ()), frozenset({"lift", "join", "merge"}), frozenset({"fields"})),
        Shortcut("divisible", False, frozenset({"lift", "join", "merge"}), completed=True),
    )


@dataclass(frozen=True)
class WeightedMean(_Weighted):
    """Weighted mean of the finite elements, `sum(w x) / sum(w)`.

    `update(state, x, weights)`: weights are real numbers from 0 up. Their axes are the leading axes of `x`, and they broadcast
    over the others: `[batch]` with `[batch, channels]`. Elements with a non-finite weight are excluded. All is summed in float64,
    on GPUs too.

    Args:
        pattern: see `Statistic`.

    Returns:
        float64 or complex128, in the shape of the kept axes; NaN if the total weight is 0.

    Raises:
        ArgumentError: the weights do not broadcast to the observation.
        DTypeError: the weights are complex.

    >>> import torch
    >>> mean = WeightedMean()
    >>> mean.compute(mean.update({}, torch.tensor([1.0, 5.0]), torch.tensor([3.0, 1.0])))
    tensor(2., dtype=torch.float64)
    """

    fields: ClassVar[Mapping[str, Field]] = {name: Add(name) for name in ("nonfinite", "weight", "sum")}

    def lift(self, x: Tensor, weights: Tensor, axes: tuple[int, ...]) -> State:
        return {"weight": weights.sum(dim=axes), "sum": (weights * x).sum(dim=axes)}

    def compute(self, state: State) -> Tensor:
        require_state(self, state)
        return torch.where(state["weight"] > 0, state["sum"] / state["weight"], torch.nan)


@dataclass(frozen=True)
class WeightedMoments(_Weighted):
    """Weighted mean, variance and standard deviation of the finite elements.

    With W the sum of the weights, `var = sum(w |x - mean|^2) / (W - correction sum(w^2) / W)`, as in `numpy.cov(x, aweights=w)`.
    It is unbiased for reliability weights and `correction=1`, and equal to that of `Moments` if all weights are equal. States
    merge about their means: West 1979, "Updating mean and variance estimates: an improved method", and Chan, Golub and LeVeque
    1983, with weights in place of counts.

    `update(state, x, weights)`: weights are real numbers from 0 up. Their axes are the leading axes of `x`, and they broadcast
    over the others: `[batch]` with `[batch, channels]`. Elements with a non-finite weight are excluded. All is summed in float64,
    on GPUs too.

    Args:
        pattern: see `Statistic`.
        correction: 1 for the sample variance, 0 for the population variance.

    Returns:
        `weight` (the sum of the weights), `var` and `std` float64, `mean` float64 or complex128, in the shape of the kept axes;
        NaN if the weight is not sufficient.

    Raises:
        ArgumentError: `correction` is not a finite number from 0 up, or the weights do not broadcast to the observation.
        DTypeError: the weights are complex.

    >>> import torch
    >>> moments = WeightedMoments(correction=0)
    >>> result = moments.compute(moments.update({}, torch.tensor([1.0, 5.0]), torch.tensor([3.0, 1.0])))
    >>> {name: value.item() for name, value in result.items() if name != "std"}
    {'weight': 4.0, 'mean': 2.0, 'var': 3.0}
    """

    fields: ClassVar[Mapping[str, Field]] = {
        **{name: Add(name) for name in ("nonfinite", "weight", "squares")},
        **{name: Joined(name) for name in ("mean", "m2")},
    }

    correction: float = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_correction(self.correction, "WeightedMoments")

    def lift(self, x: Tensor, weights: Tensor, axes: tuple[int, ...]) -> State:
        weight = weights.sum(dim=axes, keepdim=True)
        mean = (weights * x).sum(dim=axes, keepdim=True) / torch.where(weight > 0, weight, 1.0)
        return {
            "weight": weight.squeeze(axes),
            "squares": weights.square().sum(dim=axes),
            "mean": mean.squeeze(axes),
            "m2": weighted_squares(weights, x - mean).sum(dim=axes),
        }

    def join(self, a: State, b: State) -> State:
        joined = super().join(a, b)
        share = b["weight"] / torch.where(joined["weight"] > 0, joined["weight"], 1.0)
        delta = b["mean"] - a["mean"]
        return {
            **joined,
            "mean": a["mean"] + delta * share,
            "m2": a["m2"] + b["m2"] + weighted_squares(share * a["weight"], delta),
        }

    def compute(self, state: State) -> Result:
        require_state(self, state)
        weight = state["weight"]
        dof = weight - self.correction * state["squares"] / weight
        # for a single element the difference is 0 up to rounding
        var = torch.where(dof > 1e-12 * weight, state["m2"] / dof, torch.nan)
        return {
            "weight": weight.clone(),
            "mean": torch.where(weight > 0, state["mean"], torch.nan),
            "var": var,
            "std": var.sqrt(),
        }
