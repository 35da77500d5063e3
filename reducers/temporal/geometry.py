"""Norms of observations, and the cosine similarity of consecutive ones."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from reducers.core.checks import check_keys
from reducers.core.constants import is_number
from reducers.core.inputs import observation
from reducers.core.reducer import Reducer, check_reducer
from reducers.core.states import check_states, prefixed, require_state, substate, to_device
from reducers.errors import ArgumentError
from reducers.kernels.chunks import CHUNK, pieces
from reducers.kernels.precision import real
from reducers.samples.collect import keep
from reducers.state import Nonfinite, Result, State
from reducers.statistics.moments import Summary


@dataclass(frozen=True)
class Geometry(Reducer):
    """Norm of each observation, and its correlation with the previous observation, each reduced by an inner reducer.

    The norm is the L2 norm of the whole tensor. The correlation of x with the previous observation y is the cosine similarity
    `<x, y> / (max(|x|, eps) max(|y|, eps))`, in [-1, 1], and 0 if either is zero. The first observation has no correlation
    (monitorch counts it as 0), and neither has one whose shape differs from the previous one (a smaller last batch). Integers are
    converted to real numbers, and complex numbers to pairs of real numbers. The norm and the correlations of a non-finite
    observation are not finite either; inner reducers such as `Summary` count and exclude them. Later results are not affected.

    The state stores the first and the last observation, so that merging adds the correlation between the two parts.

    Args:
        reducer: the inner reducer; it gets norms and correlations as 0-d float64 tensors.
        normalize: use the root mean square instead of the norm, so that the result does not depend on the number of elements.
        correlation: False omits the correlation, which needs copies and half of the time.
        eps: smallest norm in the denominator of the correlation, in the unit of the data.

    Returns:
        `norm`, and from the second observation on `correlation`: the results of the inner reducer.

    Raises:
        ReducerTypeError: `reducer` is not a reducer instance.
        ArgumentError: `eps` is not a positive number.

    >>> import torch
    >>> from reducers import Mean
    >>> geometry = Geometry(Mean())
    >>> state = geometry.update({}, torch.tensor([3.0, 4.0]))
    >>> {name: value.item() for name, value in geometry.compute(geometry.update(state, torch.tensor([-4.0, 3.0]))).items()}
    {'norm': 5.0, 'correlation': 0.0}
    """

    reducer: Reducer = field(default_factory=Summary)
    normalize: bool = False
    correlation: bool = True
    eps: float = 1e-8

    def __post_init__(self) -> None:
        check_reducer(self.reducer, "Geometry")
        if not is_number(self.eps) or not self.eps > 0:
            raise ArgumentError(f"Geometry takes eps above 0 and got {self.eps!r}")

    @property
    def ordered(self) -> bool:  # type: ignore[override]
        return self.correlation or self.reducer.ordered

    @property
    def bounded(self) -> bool:  # type: ignore[override]
        return self.reducer.bounded

    @property
    def batchable(self) -> bool:
        return True

    def update(self, state: State, *xs: Tensor) -> State:
        x = observation(self, xs)
        if x.numel() == 0:
            return state
        state = to_device(state, x.device)
        norm = _norm(x)
        length = norm / math.sqrt(x.numel()) if self.normalize else norm
        updated = prefixed("norm", self.reducer.update(substate(state, "norm"), length))
        if self.correlation:
            inner = substate(state, "correlation")
            if state:
                inner = self._correlate(inner, state["last"], x, norm)
            updated |= prefixed("correlation", inner)
            updated["first"] = state["first"] if state else keep(x)
            updated["last"] = keep(x)
        return updated

    def update_all(self, state: State, xs: Tensor) -> State:
        if xs.numel() == 0 or xs.numel() > CHUNK:  # of bigger ones float64 copies would not fit the cache
            return super().update_all(state, xs)
        state, xs = to_device(state, xs.device), xs.detach()
        rows = real(torch.stack([_flat(x) for x in xs]) if xs.is_complex() else xs.reshape(len(xs), -1))
        norms = (rows * rows).sum(dim=1).sqrt()
        lengths = norms / math.sqrt(xs[0].numel()) if self.normalize else norms
        updated = prefixed("norm", self.reducer.update_all(substate(state, "norm"), lengths))
        if self.correlation:
            inner = substate(state, "correlation")
            if state:
                inner = self._correlate(inner, state["last"], xs[0], norms[0])
            if len(xs) > 1:
                bounded = norms.clamp(min=self.eps)
                cosines = (rows[1:] * rows[:-1]).sum(dim=1) / (bounded[1:] * bounded[:-1])
                inner = self.reducer.update_all(inner, cosines.clamp(-1.0, 1.0))
            updated |= prefixed("correlation", inner)
            updated["first"] = state["first"] if state else keep(xs[0])
            updated["last"] = keep(xs[-1])
        return updated

    def merge(self, a: State, b: State) -> State:
        if not a or not b:
            return a or b
        b = to_device(b, next(iter(a.values())).device)
        parts = {name: (substate(a, name), substate(b, name)) for name in ("norm", "correlation")}
        merged = prefixed("norm", self.reducer.merge(*parts["norm"]))
        if self.correlation:
            check_states(self, {"last": a["last"]}, {"last": b["last"]}, shapes=False)
            earlier, later = parts["correlation"]
            earlier = self._correlate(earlier, a["last"], b["first"], _norm(b["first"]))
            merged |= prefixed("correlation", self.reducer.merge(earlier, later))
            merged["first"], merged["last"] = a["first"], b["last"]
        return merged

    def _check(self, state: State) -> None:
        parts = {name: substate(state, name) for name in ("norm", "correlation")[: 1 + self.correlation]}
        inner = [key for name, part in parts.items() for key in prefixed(name, part)]
        check_keys(self, state, ("first", "last") if self.correlation else (), inner)
        for part in parts.values():
            self.reducer.check(part)

    def compute(self, state: State) -> Result:
        require_state(self, state)
        parts = {name: substate(state, name) for name in ("norm", "correlation")}
        return {name: self.reducer.compute(part) for name, part in parts.items() if part}

    def nonfinite(self, state: State) -> Nonfinite | None:
        """Return how many norms, one of each observation, were left out."""
        inner = substate(state, "norm")
        return self.reducer.nonfinite(inner) if inner else None

    def _correlate(self, inner: State, previous: Tensor, x: Tensor, norm: Tensor) -> State:
        """Return `inner` updated with the correlation, if both have one shape, and are real or complex; `norm` is that of `x`."""
        if previous.shape != x.shape or previous.is_complex() != x.is_complex():
            return inner
        denominator = _norm(previous).clamp(min=self.eps) * norm.clamp(min=self.eps)
        return self.reducer.update(inner, (_dot(previous, x) / denominator).clamp(-1.0, 1.0))


def _flat(x: Tensor) -> Tensor:
    return (torch.view_as_real(x.resolve_conj()) if x.is_complex() else x).reshape(-1)


def _dot(x: Tensor, y: Tensor) -> Tensor:
    """Return the inner product in float64, computed piece by piece."""
    pairs = zip(pieces(_flat(x), (0,)), pieces(_flat(y), (0,)), strict=True)
    return torch.stack([(real(left) * real(right)).sum() for left, right in pairs]).sum()


def _norm(x: Tensor) -> Tensor:
    return _dot(x, x).sqrt()
