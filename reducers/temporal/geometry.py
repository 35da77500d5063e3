"""Lengths of observations, and the angles between those that follow one another."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from reducers.core.inputs import observation
from reducers.core.reducer import Reducer, check_reducer
from reducers.core.states import check_states, require_state, to_device
from reducers.errors import ArgumentError
from reducers.exemplars.collect import keep
from reducers.kernels.chunks import pieces
from reducers.kernels.precision import real
from reducers.state import Result, State
from reducers.statistics.moments import Summary

__all__ = ["Geometry"]


@dataclass(frozen=True)
class Geometry(Reducer):
    """Length of each observation, and its correlation with the observation before it, each reduced by an inner reducer.

    The length is the L2 norm of the whole tensor; the correlation of x with the previous y is the cosine of the angle between
    them, `<x, y> / (max(|x|, eps) max(|y|, eps))`, in [-1, 1] and 0 where either is zero. The first observation has none, nor
    has one whose shape is not that of the one before (a smaller last batch). monitorch counts the first as 0 instead.
    Integers are taken as real numbers, a complex number as a pair of them. Where an observation is not finite, so are its length
    and its correlations; inner reducers such as `Summary` count these and keep them out, and what comes after is not touched.

    The state keeps the first and the last observation, so that merging adds the correlation across the seam.

    Args:
        reducer: what reduces the lengths and the correlations, which come to it as 0-d float64 tensors.
        normalize: take the root mean square in place of the norm, so that the size does not matter.
        correlation: False spares the copies and the second half of the work.
        eps: norms below it are taken as it in the correlation, in the unit of the data.

    Returns:
        `norm`, and from the second observation on `correlation`: what the inner reducer computes.

    Raises:
        ReducerTypeError: `reducer` is none.
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
        if not isinstance(self.eps, (int, float)) or not self.eps > 0:
            raise ArgumentError(f"Geometry takes eps above 0 and got {self.eps!r}")

    @property
    def ordered(self) -> bool:  # type: ignore[override]
        return self.correlation or self.reducer.ordered

    def update(self, state: State, *xs: Tensor) -> State:
        x = observation(self, xs)
        if x.numel() == 0:
            return state
        state = to_device(state, x.device)
        norm = _norm(x)
        length = norm / math.sqrt(x.numel()) if self.normalize else norm
        updated = _under("norm", self.reducer.update(_part(state, "norm"), length))
        if self.correlation:
            inner = _part(state, "correlation")
            if state:
                inner = self._correlate(inner, state["last"], x, norm)
            updated |= _under("correlation", inner)
            updated["first"] = state["first"] if state else keep(x)
            updated["last"] = keep(x)
        return updated

    def merge(self, a: State, b: State) -> State:
        if not a or not b:
            return a or b
        b = to_device(b, next(iter(a.values())).device)
        parts = {name: (_part(a, name), _part(b, name)) for name in ("norm", "correlation")}
        merged = _under("norm", self.reducer.merge(*parts["norm"]))
        if self.correlation:
            check_states(self, {"last": a["last"]}, {"last": b["last"]}, shapes=False)
            before, after = parts["correlation"]
            across = self._correlate(before, a["last"], b["first"], _norm(b["first"]))
            merged |= _under("correlation", self.reducer.merge(across, after))
            merged["first"], merged["last"] = a["first"], b["last"]
        return merged

    def compute(self, state: State) -> Result:
        require_state(self, state)
        parts = {name: _part(state, name) for name in ("norm", "correlation")}
        return {name: self.reducer.compute(part) for name, part in parts.items() if part}

    def _correlate(self, inner: State, before: Tensor, after: Tensor, norm: Tensor) -> State:
        """`inner` with one more correlation, where there is one."""
        if before.shape != after.shape:
            return inner
        lengths = _norm(before).clamp(min=self.eps) * norm.clamp(min=self.eps)
        return self.reducer.update(inner, (_dot(before, after) / lengths).clamp(-1.0, 1.0))


def _part(state: State, name: str) -> State:
    return {key[len(name) + 1 :]: value for key, value in state.items() if key.startswith(f"{name}/")}


def _under(name: str, state: State) -> State:
    return {f"{name}/{key}": value for key, value in state.items()}


def _flat(x: Tensor) -> Tensor:
    return (torch.view_as_real(x.resolve_conj()) if x.is_complex() else x).reshape(-1)


def _dot(x: Tensor, y: Tensor) -> Tensor:
    """Inner product in float64, piece by piece."""
    pairs = zip(pieces(_flat(x), (0,)), pieces(_flat(y), (0,)), strict=True)
    return torch.stack([(real(left) * real(right)).sum() for left, right in pairs]).sum()


def _norm(x: Tensor) -> Tensor:
    return _dot(x, x).sqrt()
