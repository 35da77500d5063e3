"""Counted: statistics whose states say how many elements were left out because they are not finite."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from reducers.core.fields import Add, Field
from reducers.core.reducer import Reducer
from reducers.kernels.precision import count_nonfinite
from reducers.state import Nonfinite, Result, State

__all__ = ["COUNTS", "NONFINITE", "Counted", "nothing_to_nan", "uncounted"]

NONFINITE = "nonfinite"  # a key of the state
COUNTS: Mapping[str, Field] = {"count": Add("count"), NONFINITE: Add(NONFINITE)}
"""The fields of what `counts_of` returns: the numbers of finite and of other elements."""


class Counted(Reducer):
    """The part of `Statistic` that counts what is not finite, so that `lift`, `join` and `read` need not know of it."""

    counts_nonfinite: ClassVar[bool] = True
    """Whether the state has `nonfinite`, int64 in the shape of the kept axes. False if the result shows what is not finite."""

    @abstractmethod
    def lift(self, x: Tensor, axes: tuple[int, ...]) -> State:
        """Return the state of one observation."""

    @abstractmethod
    def lift_masked(self, x: Tensor, mask: Tensor, axes: tuple[int, ...]) -> State:
        """Return the state of the elements that a mask selects."""

    @abstractmethod
    def join(self, a: State, b: State) -> State:
        """Return the merged state."""

    def lifted(self, x: Tensor, axes: tuple[int, ...]) -> State:
        """Return `lift`, with the number of elements that are not finite."""
        state = self.lift(x, axes)
        if NONFINITE in state or not self.counts_nonfinite:
            return state
        return {**state, NONFINITE: count_nonfinite(x, axes)}

    def lifted_masked(self, x: Tensor, mask: Tensor, axes: tuple[int, ...]) -> State:
        """Return `lift_masked`, in which what the mask excludes may count as not finite, with the right number."""
        state = self.lift_masked(x, mask, axes)
        return {**state, NONFINITE: count_nonfinite(x, axes, mask)} if self.counts_nonfinite else state

    def joined(self, a: State, b: State) -> State:
        """Return `join`, with the sum of the numbers."""
        if NONFINITE not in a or not self.counts_nonfinite:
            return self.join(a, b)
        joined = {**self.join(uncounted(a), uncounted(b)), NONFINITE: a[NONFINITE] + b[NONFINITE]}
        return {key: joined[key] for key in a} if joined.keys() == a.keys() else joined

    def nonfinite(self, state: State) -> Nonfinite | None:
        if NONFINITE not in state:
            return None
        number = state[NONFINITE].sum()
        finite = self.fields.get("count") == COUNTS["count"]
        return Nonfinite(number, state["count"].sum() + number if finite else None)


def nothing_to_nan(result: Result, state: State) -> Result:
    """Return a sum, or what is made of one, with NaN for elements of which none was finite; if there were none it stays 0."""
    assert isinstance(result, Tensor)
    if not (result.is_floating_point() or result.is_complex()):
        return result
    return torch.where((state["count"] == 0) & (state[NONFINITE] > 0), torch.nan, result)


def uncounted(state: State) -> State:
    """Return what `lift`, `join` and `read` know of."""
    return {key: value for key, value in state.items() if key != NONFINITE}
