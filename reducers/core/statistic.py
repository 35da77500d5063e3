"""Statistic: the base class of reducers that implement `lift`, `join` and `read`."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import Any, ClassVar

import torch
from torch import Tensor

from reducers.core.checks import check_specimen
from reducers.core.counted import COUNTS, NONFINITE, uncounted
from reducers.core.fields import columns_of, join_fields
from reducers.core.inputs import observation
from reducers.core.overrides import Shortcut
from reducers.core.patterns import arrange, arrange_all, kept_axes, moves_nothing, sides, validate
from reducers.core.reducer import Reducer
from reducers.core.states import check_states, copy_aliased, require_state, to_device
from reducers.errors import ReducerTypeError
from reducers.kernels.chunks import CHUNK, paired_pieces, pieces
from reducers.kernels.columns import COLUMNS
from reducers.kernels.cpp.sweeping import Asked
from reducers.kernels.dispatch import sweep
from reducers.kernels.masks import can_compact, compact
from reducers.kernels.merging import join_stacked, same_layout, stack
from reducers.kernels.precision import count_along, count_nonfinite, nan_capable
from reducers.kernels.waiting import ColumnSlots, device_slots, joinable
from reducers.state import Nonfinite, Result, State

_MIN_STACK = 4  # fewer states are joined as fast one by one
_LIFTING = frozenset({"lift", "join", "merge"})
_TOGETHER = frozenset({"batchable", "divisible"})  # a class that declares one of them knows of other ways to its lifts
_NO_COLUMNS = property(lambda self: {})


@dataclass(frozen=True)
class Statistic(Reducer):
    """Base class of reducers over the axes of one tensor. Subclasses declare `fields`, and implement only `lift` and `read`.

    The number of elements that are NaN or infinite is counted beside what `lift` returns, as `nonfinite` of the state; `join` and
    `read` need not know of it, and do not see it. See `Reducer.nonfinite`.

    Args:
        pattern: einops pattern. Axes on the right are kept, all others are reduced: `"... ->"` reduces everything,
            `"b c h w -> c"` gives one value per channel, `"b ... d -> d"` one per feature for any number of axes between.
            `"channels"` keeps the channels of the layer that a monitor sits on; see `recorders.channel_axis`.
    """

    pattern: str = "... ->"

    counts_nonfinite: ClassVar[bool] = True
    """Whether the state has `nonfinite`, int64 in the shape of the kept axes. False if the result shows what is not finite."""

    fixed_shape: ClassVar[bool] = True
    """Whether all states have the same shapes; then `merge` rejects different shapes instead of broadcasting them."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        fields = inspect.getattr_static(cls, "fields")
        if inspect.getattr_static(cls, "columns") is _NO_COLUMNS or (isinstance(fields, Mapping) and not columns_of(fields)):
            return
        for method in ("update", "merge"):
            if getattr(cls, method) is not getattr(Statistic, method):
                instead = {"update": "lift", "merge": "join"}[method]
                raise ReducerTypeError(
                    f"{cls.__name__} declares `fields` with columns, which stand for its `lift` and `join`, and has a "
                    f"`{method}` of its own, which kernels would bypass: override `{instead}` instead, or declare no columns"
                )

    def __post_init__(self) -> None:
        validate(self.pattern)

    row_columns: ClassVar[frozenset[str]] = frozenset()
    """The columns of each observation that `update_rows` takes in place of observations; empty if it needs what no kernel computes.
    It is for statistics whose states do not join element by element; those of others say it by `columns`."""

    lifts_together: ClassVar[bool] = True
    """Whether one call of `lift` may lift several observations. A class with an `update` of its own sees each of them."""

    masks_by_lift: ClassVar[bool] = True
    """Whether `lift_masked` may be replaced by a lift of the selected elements, and taken part by part; if a class overrides it,
    only if that class declares `fields` or `divisible`."""

    @property
    def divisible(self) -> bool:
        """Whether the lifts of the parts of an observation join to the lift of the whole, so that big tensors may be split.

        If a subclass of a complete statistic overrides `lift`, `join` or `merge`, it is False, unless the subclass says so itself.
        """
        return True

    @property
    def batchable(self) -> bool:
        return self.divisible and not self.ordered

    @property
    def stackable(self) -> bool:
        """Whether many states stack, to be joined at once: they join element by element, and lifts of parts are as small."""
        return bool(self.fields) and self.divisible

    @property
    def columns(self) -> Mapping[str, str]:
        """Which column of a kernel each entry of the state is, by its key, as `fields` say; empty if one of them is none.

        They stand for `lift` and `join`: kernels call neither. A subclass that overrides one of these declares its own `fields`.
        """
        columns = columns_of(self.fields)
        if columns and self.counts_nonfinite:
            columns.setdefault(NONFINITE, NONFINITE)
        return columns

    @property
    def threshold(self) -> float:
        """The magnitude above which kernels count an element as active."""
        return 0.0

    @abstractmethod
    def lift(self, x: Tensor, axes: tuple[int, ...]) -> State:
        """Return the state of one observation: reduce `axes` (at least one axis and one element) and keep the others.

        It may have `nonfinite`, if that costs less here. If not, the number is counted afterwards.
        """

    def lift_masked(self, x: Tensor, mask: Tensor, axes: tuple[int, ...]) -> State:
        """Return the state of the elements where `mask`, of the shape of `x`, is True.

        The other elements become NaN, which most statistics exclude. Override this if yours counts NaN or needs integers.
        """
        return self.lift(torch.where(mask, nan_capable(x), torch.nan), axes)

    def join(self, a: State, b: State) -> State:
        """Return the merged state; neither argument is empty. A class whose `fields` do not say it all overrides it.

        Raises:
            ReducerTypeError: a class has neither `fields` nor a `join` of its own.
        """
        if not self.fields:
            raise ReducerTypeError(f"{type(self).__name__} has nothing to join states by: declare `fields`, or implement `join`")
        return join_fields(self.fields, a, b)

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

    @abstractmethod
    def read(self, state: State) -> Result:
        """Return the statistic of a non-empty state."""

    @cached_property
    def _asked(self) -> Asked:
        """What kernels are asked for. Not while compiling: the compiler does not know such properties."""
        return tuple(self.columns.items()), self.threshold

    def update(self, state: State, *xs: Tensor) -> State:
        return self._updated(state, *arrange(observation(self, xs), self.pattern))

    def _updated(self, state: State, x: Tensor, axes: tuple[int, ...]) -> State:
        if x.numel() == 0:
            return state
        state = to_device(state, x.device)
        swept = self.swept(x, axes, state)
        return self.merge(state, self.observe(x, axes)) if swept is None else swept

    def swept(self, x: Tensor, axes: tuple[int, ...], state: State) -> State | None:
        """Return the state joined with that of an observation, by a kernel that reads it once; None if there is none."""
        return None if torch.compiler.is_compiling() else sweep(self._asked, x, axes, state, merge=self.merge)

    def update_all(self, state: State, xs: Tensor) -> State:
        if not self.batchable or xs.numel() == 0:
            return super().update_all(state, xs)
        return self._updated(state, *arrange_all(xs.detach(), self.pattern))

    def lift_each(self, xs: Tensor) -> State | None:
        return self._lift_each(xs) if self.batchable and self.lifts_together else None

    def _lift_each(self, xs: Tensor) -> State:
        left, right = sides(self.pattern)
        axis = "observation"
        while axis in left:
            axis += "s"
        each = replace(self, pattern=f"{axis} {left} -> {axis} {right}")
        x, axes = arrange(xs.detach(), each.pattern)
        return each._updated({}, x, axes)

    def slots_for(self, x: Tensor) -> ColumnSlots | None:
        if x.is_neg() or x.numel() == 0 or not moves_nothing(self.pattern, x.ndim):
            return None
        x, axes = arrange(x.detach(), self.pattern)
        return device_slots(x, axes, self.columns or slot_columns(self), self.threshold)

    def lifted_slots(self, slots: ColumnSlots, table: Tensor, first: int, last: int) -> State:
        rows = slots.rows(table, first, last)
        return {key: rows[name] for key, name in self.columns.items()}

    def update_slots(self, state: State, slots: ColumnSlots, table: Tensor, first: int, last: int) -> State:
        state = to_device(state, table.device)
        if not self._asked[0]:
            return self.update_rows(state, slots.rows(table, first, last))
        while first < last and not joinable(slots, state):
            state = self.merge(state, slots.join(table, {}, first, first + 1))
            first += 1
        return slots.join(table, state, first, last) if first < last else state

    def update_rows(self, state: State, rows: State) -> State:
        """Return the state after several observations, of which `rows` has the `row_columns`, stacked along a new first axis."""
        raise NotImplementedError

    def observe(self, x: Tensor, axes: tuple[int, ...]) -> State:
        """Return the state of one observation of any size without a kernel, in new contiguous tensors: big ones in parts."""
        parts = pieces(x, axes)
        if len(parts) == 1 or not self.divisible:
            whole = self.lifted(x, axes)
            return whole if x.is_contiguous() and not torch.compiler.is_compiling() else _contiguous(whole, x)
        lifted = (_contiguous(self.lifted(part, axes), part) for part in parts)
        if len(parts) < _MIN_STACK or not self.stackable or len(parts) * x.numel() > CHUNK * count_along(x, axes):
            return reduce(self.merge, lifted, {})  # does not hold the states of all parts at once, which may be big
        return self.merge_all(list(lifted))

    def update_masked(self, state: State, x: Tensor, mask: Tensor) -> State:
        if x.numel() == 0:
            return state
        (x, axes), (mask, _) = arrange(x, self.pattern), arrange(mask, self.pattern)
        state = to_device(state, x.device)
        if not self.masks_by_lift:
            return self.merge(state, {key: value.contiguous() for key, value in self.lifted_masked(x, mask, axes).items()})
        joined = None if torch.compiler.is_compiling() else sweep(self._asked, x, axes, state, mask, self.merge)
        if joined is not None:
            return joined
        if self.stackable and can_compact(x, mask, axes):
            chosen = [(part, rest) for part, rest in compact(x, mask, axes) if part.numel()]
            selected = [self.observe(part, rest) for part, rest in chosen]
            if selected:
                return self.merge_all([state, *selected])
        parts = paired_pieces(x, mask, axes) if self.divisible else ((x, mask),)
        lifted = [self.lifted_masked(*part, axes) for part in parts]
        return self.merge_all([state, *({key: value.contiguous() for key, value in one.items()} for one in lifted)])

    def _update_masked_by_update(self, state: State, x: Tensor, mask: Tensor) -> State:
        """Update masked observations by an `update` that a subclass overrides: the other elements become NaN, as in `lift_masked`.

        Raises:
            ReducerTypeError: a base has a `lift_masked` of its own, so NaN is not left out.
        """
        if type(self).lift_masked is not Statistic.lift_masked:
            return super().update_masked(state, x, mask)
        updated = self.update(state, torch.where(mask, nan_capable(x), torch.nan))
        if NONFINITE not in updated or updated is state:
            return updated
        (x, axes), (mask, _) = arrange(x, self.pattern), arrange(mask, self.pattern)
        number = count_nonfinite(x, axes, mask)  # not of what the mask excludes
        return {**updated, NONFINITE: state[NONFINITE].to(x.device) + number if state else number}

    def merge(self, a: State, b: State) -> State:
        if not a or not b:
            return a or b
        check_states(self, a, b, self.fixed_shape)
        return self.joined(a, to_device(b, next(iter(a.values())).device))

    def merge_all(self, states: Sequence[State]) -> State:
        nonempty = [state for state in states if state]
        if not self.stackable or len(nonempty) < _MIN_STACK or not same_layout(nonempty):
            return super().merge_all(nonempty)
        return join_stacked(self.joined, stack(nonempty))

    def specimen(self, kept: tuple[int, ...], dtype: torch.dtype, device: str) -> State:
        """Return the state of an observation of zeros whose kept axes have these sizes."""
        return self.lifted(torch.zeros((2, *kept), dtype=dtype, device=device), (0,))

    def _check(self, state: State) -> None:
        if type(self).update is not Statistic.update:  # then states need not be lifts
            return super()._check(state)
        return check_specimen(self, state, kept_axes(self.pattern), self.fixed_shape)

    def compute(self, state: State) -> Result:
        require_state(self, state)
        return copy_aliased(self.read(uncounted(state) if self.counts_nonfinite else state), state)

    def nonfinite(self, state: State) -> Nonfinite | None:
        if NONFINITE not in state:
            return None
        number = state[NONFINITE].sum()
        finite = self.fields.get("count") == COUNTS["count"]
        return Nonfinite(number, state["count"].sum() + number if finite else None)

    shortcuts: ClassVar[tuple[Shortcut, ...]] = (
        *(shortcut for shortcut in Reducer.shortcuts if shortcut.name not in ("update_masked", "lift_each", "slots_for")),
        Shortcut("columns", _NO_COLUMNS, frozenset({"update", "swept", "observe", *_LIFTING}), frozenset({"fields"})),
        Shortcut("row_columns", frozenset(), frozenset({"update", "update_all", "swept", "observe", *_LIFTING})),
        Shortcut("swept", swept, frozenset({"observe", *_LIFTING})),
        Shortcut("observe", observe, frozenset({"lift"})),
        Shortcut("divisible", property(lambda self: False), _LIFTING, completed=True),
        Shortcut("stackable", False, frozenset({"join", "merge"}), frozenset({"fields"})),
        Shortcut("masks_by_lift", False, frozenset({"lift_masked"}), frozenset({"fields", "divisible"})),
        Shortcut("update_masked", _update_masked_by_update, frozenset({"update"}), frozenset({"lift_masked"})),
        Shortcut("update_masked", _update_masked_by_update, frozenset({"observe", "swept"}), _TOGETHER | {"lift_masked"}),
        Shortcut("lifts_together", False, frozenset({"update"})),
        *(
            Shortcut(name, off, bypassed, _TOGETHER | {"update_all"}, completed)
            for name, off in (
                ("lifts_together", False),
                ("batchable", Reducer.batchable),
                ("update_all", Reducer.update_all),
            )
            for bypassed, completed in ((frozenset({"observe", "swept"}), False), (_LIFTING, True))
        ),
    )


def slot_columns(statistic: Statistic) -> Mapping[str, str]:
    """Return what a slot holds of an observation: the columns of a state by key, or those of a row by their names; {} if none."""
    return statistic.columns or {name: name for name in COLUMNS if name in statistic.row_columns}


def _contiguous(state: State, source: Tensor) -> State:
    """Make the state contiguous, as files need: a reduction keeps the stride order of `source`, unknown while compiling."""
    if not torch.compiler.is_compiling() and source.is_contiguous():
        return state
    return {key: value.contiguous() for key, value in state.items()}
