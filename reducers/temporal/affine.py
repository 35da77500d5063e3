"""Maps `value -> decay * value + gain`, element by element: the one monoid beneath averages and traces that fade with time."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from reducers.core.reducer import Reducer
from reducers.core.states import check_states, require_state, to_device
from reducers.state import State

__all__ = ["Affine", "apply", "compose"]


def compose(a: State, b: State) -> State:
    """The map that does first `a` and then `b`; a decay that is the same for all elements may be kept once (0-d)."""
    return {"decay": a["decay"] * b["decay"], "gain": torch.addcmul(b["gain"], b["decay"], a["gain"])}


def apply(state: State, start: Tensor | float) -> Tensor:
    """What the map makes of `start`; where it forgets it altogether, even an infinite or missing one."""
    return torch.where(state["decay"] == 0, state["gain"], state["decay"] * start + state["gain"])


@dataclass(frozen=True)
class Affine(Reducer):
    """Base of reducers that take each observation as one map, and give what all of them, in order of time, make of `start`.

    Associative because composing maps is, and `{}` is the map that leaves everything as it is.
    """

    ordered: ClassVar[bool] = True
    start: ClassVar[float] = 0.0

    @abstractmethod
    def step(self, *xs: Tensor) -> State:
        """The map that one observation stands for: `decay` and `gain`."""

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

    def compute(self, state: State) -> Tensor:
        require_state(self, state)
        return apply(state, self.start)
