"""Element-wise affine maps `value -> decay * value + gain`: the monoid behind moving averages and decaying traces."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from reducers._torch import constant_in_graphs
from reducers.core.checks import check_keys, check_shape
from reducers.core.constants import Constant, constant_tensor
from reducers.core.reducer import Reducer
from reducers.core.states import check_states, require_state, to_device
from reducers.state import Nonfinite, State

_REAL = (torch.float64, torch.float32)


def compose(a: State, b: State) -> State:
    """Return the map that applies `a`, then `b`; a decay that all elements share may be 0-d."""
    return {"decay": a["decay"] * b["decay"], "gain": torch.addcmul(b["gain"], b["decay"], a["gain"])}


def apply(state: State, start: Tensor | float) -> Tensor:
    """Return the map applied to `start`; a decay of 0 discards `start` even if it is infinite or NaN."""
    return torch.where(state["decay"] == 0, state["gain"], state["decay"] * start + state["gain"])


@constant_in_graphs
def decays(tau: tuple[Constant, ...], step_time: float) -> Tensor:
    """Return what remains of a trace after one step, `exp(-step_time / tau)`, on the CPU."""
    found: Tensor = _cached_decays(tau, step_time)
    return found


@lru_cache(maxsize=64)
def _cached_decays(tau: tuple[Constant, ...], step_time: float) -> Tensor:
    with torch.inference_mode(False):
        return torch.exp(-step_time / constant_tensor(tau))


@dataclass(frozen=True)
class Affine(Reducer):
    """Base class of reducers that turn each observation into an affine map; the result is their composition applied to `start`.

    Merging is associative because composition is; `{}` is the identity map.
    """

    ordered: ClassVar[bool] = True
    start: ClassVar[float] = 0.0
    counts_nonfinite: ClassVar[bool] = False
    """Whether a state has `nonfinite`, int64, 0-d: how many events were left out."""

    @abstractmethod
    def step(self, *xs: Tensor) -> State:
        """Return the map of one observation: `decay` and `gain`, and the number of events left out if that is counted."""

    def update(self, state: State, *xs: Tensor) -> State:
        new = self.step(*xs)
        if new["gain"].numel() == 0:
            return state
        new = {key: value.contiguous() for key, value in new.items()}
        return self.merge(to_device(state, new["gain"].device), new)

    def merge(self, a: State, b: State) -> State:
        if not a or not b:
            return a or b
        check_states(self, a, b)
        b = to_device(b, a["gain"].device)
        counts = {"nonfinite": a["nonfinite"] + b["nonfinite"]} if self.counts_nonfinite else {}
        return {**compose(a, b), **counts}

    def nonfinite(self, state: State) -> Nonfinite | None:
        return Nonfinite(state["nonfinite"], None) if state and self.counts_nonfinite else None

    def _check(self, state: State) -> None:
        check_keys(self, state, ("decay", "gain", "nonfinite")[: 2 + self.counts_nonfinite])
        if self.counts_nonfinite:
            check_shape(self, state, "nonfinite", (), torch.int64)
        decay, gain = state["decay"], state["gain"]
        check_shape(self, state, "decay", decay.shape, *_REAL)
        check_shape(self, state, "gain", gain.shape, *_REAL, torch.complex64, torch.complex128)
        decay.expand(gain.shape)  # raises if it does not broadcast

    def compute(self, state: State) -> Tensor:
        require_state(self, state)
        return apply(state, self.start)
