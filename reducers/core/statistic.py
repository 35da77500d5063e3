"""Statistic: the base class of reducers that implement `lift`, `join` and `read`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, ClassVar

import torch
from torch import Tensor

from reducers.core.checks import check_specimen
from reducers.core.inputs import observation
from reducers.core.patterns import arrange, arrange_all, kept_axes, moves_nothing, sides, validate
from reducers.core.reducer import Reducer
from reducers.core.states import check_states, copy_aliased, require_state, to_device
from reducers.kernels.chunks import BIG, CHUNK, paired_pieces, pieces
from reducers.kernels.dispatch import device_sweep, loop_sweep, masked_moments
from reducers.kernels.masks import can_compact, compact, has_rows
from reducers.kernels.merging import join_stacked, same_layout, stack
from reducers.kernels.precision import count_along, nan_capable
from reducers.kernels.waiting import Slots, device_slots, joinable
from reducers.state import Result, State

__all__ = ["Statistic", "lift_each", "slots_of", "update_slots"]

_MIN_STACK = 4  # fewer states are joined as fast one by one


@dataclass(frozen=True)
class Statistic(Reducer):
    """Base class of reducers over the axes of one tensor. Subclasses implement only `lift`, `join` and `read`.

    Args:
        pattern: einops pattern. Axes on the right are kept, all others are reduced: `"... ->"` reduces everything,
            `"b c h w -> c"` gives one value per channel, `"b ... d -> d"` one per feature for any number of axes between.
            `"channels"` keeps the channels of the layer that a monitor sits on; see `recorders.channel_axis`.
    """

    pattern: str = "... ->"

    fixed_shape: ClassVar[bool] = True
    """Whether all states have the same shapes; then `merge` rejects different shapes instead of broadcasting them."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if {"lift", "join", "observe"} & vars(cls).keys() and "columns" not in vars(cls):
            cls.columns = Statistic.columns  # type: ignore[method-assign]  # what a base class declares is of its own lift

    def __post_init__(self) -> None:
        validate(self.pattern)

    stackable_join: ClassVar[bool] = False
    """Whether `join` works element by element, so that it can join many stacked states at once."""

    @property
    def divisible(self) -> bool:
        """Whether the lifts of the parts of an observation join to the lift of the whole, so that big tensors may be split."""
        return True

    @property
    def batchable(self) -> bool:
        return self.divisible and not self.ordered

    @property
    def columns(self) -> Mapping[str, str]:
        """Which statistic of a GPU kernel each entry of the state is, by its key; empty if the kernel lacks one of them."""
        return {}

    @property
    def threshold(self) -> float:
        """The magnitude above which the GPU kernel counts an element as active."""
        return 0.0

    @abstractmethod
    def lift(self, x: Tensor, axes: tuple[int, ...]) -> State:
        """Return the state of one observation: reduce `axes` (at least one axis and one element) and keep the others."""

    def lift_masked(self, x: Tensor, mask: Tensor, axes: tuple[int, ...]) -> State:
        """Return the state of the elements where `mask`, of the shape of `x`, is True.

        The other elements become NaN, which most statistics exclude. Override this if yours counts NaN or needs integers.
        """
        return self.lift(torch.where(mask, nan_capable(x), torch.nan), axes)

    @abstractmethod
    def join(self, a: State, b: State) -> State:
        """Return the merged state; neither argument is empty."""

    @abstractmethod
    def read(self, state: State) -> Result:
        """Return the statistic of a non-empty state."""

    def update(self, state: State, *xs: Tensor) -> State:
        x, axes = arrange(observation(self, xs), self.pattern)
        if x.numel() == 0:
            return state
        state = to_device(state, x.device)
        swept = self.swept(x, axes, state)
        return self.merge(state, self.observe(x, axes)) if swept is None else swept

    def swept(self, x: Tensor, axes: tuple[int, ...], state: State) -> State | None:
        """Return the state joined with that of an observation, by a kernel that reads it once; None if there is none."""
        return self._by_kernel(x, axes, state)

    def _by_kernel(self, x: Tensor, axes: tuple[int, ...], state: State, mask: Tensor | None = None) -> State | None:
        swept = device_sweep(x, axes, self.columns, self.threshold, state, mask)
        if swept is not None:
            return swept
        swept = loop_sweep(x, axes, self.columns, self.threshold, state, mask)
        if swept is not None or not state:
            return swept
        looped = loop_sweep(x, axes, self.columns, self.threshold, None, mask)
        return None if looped is None else self.merge(state, looped)

    def update_all(self, state: State, xs: Tensor) -> State:
        if not self.batchable or xs.numel() == 0:
            return super().update_all(state, xs)
        x, axes = arrange_all(xs.detach(), self.pattern)
        swept = self._by_kernel(x, axes, to_device(state, x.device))
        if swept is not None:
            return swept
        small = xs[0].numel() < BIG  # stay in float64, as a single small update does, so that grouping changes at most rounding
        return self.merge(to_device(state, x.device), Statistic.observe(self, x, axes) if small else self.observe(x, axes))

    def observe(self, x: Tensor, axes: tuple[int, ...]) -> State:
        """Return the state of one observation of any size, in new contiguous tensors; big ones are lifted in parts."""
        swept = self._by_kernel(x, axes, {})
        if swept is not None:
            return swept
        parts = pieces(x, axes) if self.divisible else (x,)
        lifted = (_contiguous(self.lift(part, axes), part) for part in parts)
        if len(parts) < _MIN_STACK or not self.stackable_join or len(parts) * x.numel() > CHUNK * count_along(x, axes):
            return reduce(self.merge, lifted, {})  # does not hold the states of all parts at once, which may be big
        return self.merge_all(list(lifted))

    def update_masked(self, state: State, x: Tensor, mask: Tensor) -> State:
        if x.numel() == 0:
            return state
        (x, axes), (mask, _) = arrange(x, self.pattern), arrange(mask, self.pattern)
        state = to_device(state, x.device)
        joined = self._by_kernel(x, axes, state, mask)
        if joined is not None:
            return joined
        compacts = self.stackable_join and self.divisible and can_compact(x, mask, axes)
        swept = None if compacts and has_rows(mask) else masked_moments(x, mask, axes, self.columns)
        if swept is not None:
            return self.merge(state, swept)
        if compacts:
            selected = [self.observe(part, rest) for part, rest in compact(x, mask, axes) if part.numel()]
            if selected:
                return self.merge_all([state, *selected])
        parts = paired_pieces(x, mask, axes) if self.divisible else ((x, mask),)
        lifted = [self.lift_masked(*part, axes) for part in parts]
        return self.merge_all([state, *({key: value.contiguous() for key, value in one.items()} for one in lifted)])

    def merge(self, a: State, b: State) -> State:
        if not a or not b:
            return a or b
        check_states(self, a, b, self.fixed_shape)
        return self.join(a, to_device(b, next(iter(a.values())).device))

    def merge_all(self, states: Sequence[State]) -> State:
        nonempty = [state for state in states if state]
        if not self.stackable_join or len(nonempty) < _MIN_STACK or not same_layout(nonempty):
            return super().merge_all(nonempty)
        return join_stacked(self.join, stack(nonempty))

    def merge_stacked(self, state: State, stacked: State) -> State:
        if not self.stackable_join or not stacked:
            return super().merge_stacked(state, stacked)
        return self.merge(state, join_stacked(self.join, stacked))

    def specimen(self, kept: tuple[int, ...], dtype: torch.dtype, device: str) -> State:
        """Return the state of an observation of zeros whose kept axes have these sizes."""
        return self.lift(torch.zeros((2, *kept), dtype=dtype, device=device), (0,))

    def _check(self, state: State) -> None:
        if type(self).update is not Statistic.update:  # then states need not be lifts
            return super()._check(state)
        return check_specimen(self, state, kept_axes(self.pattern), self.fixed_shape)

    def compute(self, state: State) -> Result:
        require_state(self, state)
        return copy_aliased(self.read(state), state)


def slots_of(statistic: Statistic, x: Tensor) -> Slots | None:
    """Return how observations like `x` wait on their device as partial statistics; None if they cannot."""
    own = type(statistic).update is Statistic.update
    if not own or x.is_neg() or x.numel() == 0 or not moves_nothing(statistic.pattern, x.ndim):
        return None
    x, axes = arrange(x.detach(), statistic.pattern)
    return device_slots(x, axes, statistic.columns, statistic.threshold)


def update_slots(statistic: Statistic, state: State, slots: Slots, table: Tensor, first: int, last: int) -> State:
    """Return the state after the observations in some slots of a table, in order; its bits are those of one `update` for each."""
    state = to_device(state, table.device)
    while first < last and not joinable(slots, state):
        state = statistic.merge(state, slots.join(table, {}, first, first + 1))
        first += 1
    return slots.join(table, state, first, last) if first < last else state


def lift_each(statistic: Statistic, xs: Tensor) -> State:
    """Return the lifts of several observations, stacked along a new first axis; `xs` has them along its first axis."""
    left, right = sides(statistic.pattern)
    axis = "observation"
    while axis in left:
        axis += "s"
    each = replace(statistic, pattern=f"{axis} {left} -> {axis} {right}")
    x, axes = arrange(xs.detach(), each.pattern)
    # In float64 if they are small, as in `update_all`.
    return Statistic.observe(each, x, axes) if xs[0].numel() < BIG else each.observe(x, axes)


def _contiguous(state: State, source: Tensor) -> State:
    """Make the state contiguous, as files need: a reduction keeps the stride order of `source`, unknown while compiling."""
    if not torch.compiler.is_compiling() and source.is_contiguous():
        return state
    return {key: value.contiguous() for key, value in state.items()}
