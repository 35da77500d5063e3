"""Statistic: the base class whose authors write `lift`, `join` and `read`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import ClassVar

import torch
from torch import Tensor

from reducers.core.inputs import observation
from reducers.core.patterns import arrange, arrange_all, validate
from reducers.core.reducer import Reducer
from reducers.core.states import check_states, copy_aliased, require_state, to_device
from reducers.kernels.chunks import BIG, CHUNK, pieces, pieces_beside
from reducers.kernels.masks import can_compact, compact
from reducers.kernels.merging import alike, join_stacked, stack
from reducers.kernels.precision import able_to_hold_nan, count_along
from reducers.state import Result, State

__all__ = ["Statistic"]

_FEW = 4  # states that are joined as fast one after another


@dataclass(frozen=True)
class Statistic(Reducer):
    """Base of reducers over the axes of one tensor. Authors write `lift`, `join` and `read`, nothing else.

    Args:
        pattern: einops pattern. Axes on the right are kept, all others are reduced: `"... ->"` reduces everything,
            `"b c h w -> c"` gives one value per channel, `"b ... d -> d"` one per feature whatever lies between.
    """

    pattern: str = "... ->"

    fixed_shape: ClassVar[bool] = True
    """Whether every state has the same shapes, so that a difference is a mistake and never broadcast."""

    def __post_init__(self) -> None:
        validate(self.pattern)

    stackable_join: ClassVar[bool] = False
    """Whether `join` treats each element of a state by itself, so that many states may be joined at once, stacked."""

    @property
    def divisible(self) -> bool:
        """Whether the lifts of the parts of an observation join to the lift of the whole, so that big tensors may be cut."""
        return True

    @property
    def batchable(self) -> bool:
        return self.divisible and not self.ordered

    @abstractmethod
    def lift(self, x: Tensor, axes: tuple[int, ...]) -> State:
        """The state of one observation: reduce `axes` (never none, never over zero elements) and keep the others."""

    def lift_masked(self, x: Tensor, mask: Tensor, axes: tuple[int, ...]) -> State:
        """The state of the elements where `mask`, of the shape of `x`, is True.

        The others are made NaN, which statistics keep out; those that count NaN, or cannot hold it, override this.
        """
        return self.lift(torch.where(mask, able_to_hold_nan(x), torch.nan), axes)

    @abstractmethod
    def join(self, a: State, b: State) -> State:
        """The state of both; neither is empty."""

    @abstractmethod
    def read(self, state: State) -> Result:
        """The statistic of a state that is not empty."""

    def update(self, state: State, *xs: Tensor) -> State:
        x, axes = arrange(observation(self, xs), self.pattern)
        if x.numel() == 0:
            return state
        return self.merge(to_device(state, x.device), self.observe(x, axes))

    def update_all(self, state: State, xs: Tensor) -> State:
        if not self.batchable or xs.numel() == 0:
            return super().update_all(state, xs)
        x, axes = arrange_all(xs.detach(), self.pattern)
        small = xs[0].numel() < BIG  # then in float64, as each by itself: how they were grouped shows in no digit but the last
        return self.merge(to_device(state, x.device), Statistic.observe(self, x, axes) if small else self.observe(x, axes))

    def observe(self, x: Tensor, axes: tuple[int, ...]) -> State:
        """The state of one observation however big: the lift, or the lifts of its parts together, in tensors of their own."""
        parts = pieces(x, axes) if self.divisible else (x,)
        lifted = (_contiguous(self.lift(part, axes), part) for part in parts)
        if len(parts) < _FEW or not self.stackable_join or len(parts) * x.numel() > CHUNK * count_along(x, axes):
            return reduce(self.merge, lifted, {})  # where the states of all parts are big, they do not wait for each other
        return self.merge_all(list(lifted))

    def update_masked(self, state: State, x: Tensor, mask: Tensor) -> State:
        if x.numel() == 0:
            return state
        (x, axes), (mask, _) = arrange(x, self.pattern), arrange(mask, self.pattern)
        state = to_device(state, x.device)
        if self.stackable_join and self.divisible and can_compact(x, mask, axes):
            seen = [self.observe(part, rest) for part, rest in compact(x, mask, axes) if part.numel()]
            if seen:
                return self.merge_all([state, *seen])
        parts = pieces_beside(x, mask, axes) if self.divisible else ((x, mask),)
        lifted = [self.lift_masked(*part, axes) for part in parts]
        return self.merge_all([state, *({key: value.contiguous() for key, value in one.items()} for one in lifted)])

    def merge(self, a: State, b: State) -> State:
        if not a or not b:
            return a or b
        check_states(self, a, b, self.fixed_shape)
        return self.join(a, to_device(b, next(iter(a.values())).device))

    def merge_all(self, states: Sequence[State]) -> State:
        found = [state for state in states if state]
        if not self.stackable_join or len(found) < _FEW or not alike(found):
            return super().merge_all(found)
        return join_stacked(self.join, stack(found))

    def merge_stacked(self, state: State, stacked: State) -> State:
        if not self.stackable_join or not stacked:
            return super().merge_stacked(state, stacked)
        return self.merge(state, join_stacked(self.join, stacked))

    def compute(self, state: State) -> Result:
        require_state(self, state)
        return copy_aliased(self.read(state), state)


def _contiguous(state: State, made_of: Tensor) -> State:
    """Reductions keep the order of strides, and files hold contiguous tensors only; a compiler may not ask for strides."""
    if not torch.compiler.is_compiling() and made_of.is_contiguous():
        return state
    return {key: value.contiguous() for key, value in state.items()}
