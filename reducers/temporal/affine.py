"""Element-wise affine maps `value -> decay * value + gain`: the monoid behind moving averages and decaying traces."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from reducers.core.checks import check_keys, check_shape
from reducers.core.reducer import Reducer
from reducers.core.states import check_states, require_state, to_device
from reducers.state import State

__all__ = ["Affine", "apply", "compose"]

_REAL = (torch.float64, torch.float32)


def compose(a: State, b: State) -> State:
    """Return the map that applies `a`, then `b`; a decay that all elements share may be 0-d."""
    return {"decay": a["decay"] * b["decay"], "gain": torch.addcmul(b["gain"], b["decay"], a["gain"])}


def apply(state: State, start: Tensor | float) -> Tensor:
    """Return the map applied to `start`; a decay of 0 discards `start` even if it is infinite or NaN."""
    return torch.where(state["decay"] == 0, state["gain"], state["decay"] * start + state["gain"])


@dataclass(frozen=True)
class Affine(Reducer):
    """Base class of reducers that turn each observation into an affine map; the result is their composition applied to `start`.

    Merging is associative because composition is; `{}` is the identity map.
    """

    ordered: ClassVar[bool] = True
    start: ClassVar[float] = 0.0

    @abstractmethod
    def step(self, *xs: Tensor) -> State:
        """Return the map of one observation: `decay` and `gain`."""

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
        return compose(a, to_device(b, a["gain"].device))

    def _check(self, state: State) -> None:
        check_keys(self, state, ("decay", "gain"))
        decay, gain = state["decay"], state["gain"]
        check_shape(self, state, "decay", decay.shape, *_REAL)
        check_shape(self, state, "gain", gain.shape, *_REAL, torch.complex64, torch.complex128)
        decay.expand(gain.shape)  # raises if it does not broadcast

    def compute(self, state: State) -> Tensor:
        require_state(self, state)
        return apply(state, self.start)
