"""Reducer: the interface of all online statistics."""

from __future__ import annotations

import inspect
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any, ClassVar

from torch import Tensor

from reducers.core.checks import check_cost, check_layout
from reducers.core.fields import Add, Field, Reduction
from reducers.core.overrides import Shortcut, switch_off
from reducers.errors import ArgumentError, ReducerTypeError, StateError
from reducers.kernels.parts import TensorPart
from reducers.kernels.waiting import Slots
from reducers.state import Nonfinite, Result, State

MAX_SIZE = 2**31 - 1
"""The largest number of bins, slots or groups that a field may ask for."""

registry: dict[str, type[Reducer]] = {}
"""Reducer classes by their name in recipes."""

_combinators: dict[str, Callable[..., Reducer]] = {}


def register_combinator(method: str, combinator: Callable[..., Reducer]) -> None:
    """Make `reducer.<method>(function)` return `combinator(reducer, function)`, so that this module imports no combinator."""
    _combinators[method] = combinator


class Reducer(ABC):
    """An immutable description of an online statistic; the caller holds its `State`.

    Laws, for all states `a, b, c` of the same reducer:

    - `merge(merge(a, b), c) == merge(a, merge(b, c))`, and `merge({}, a) == a == merge(a, {})`
    - `update(a, x) == merge(a, update({}, x))`
    - `merge(a, b) == merge(b, a)` unless the reducer is `ordered`
    - no method writes into a state or an input
    """

    ordered: ClassVar[bool] = False
    """Whether the result depends on the order of the observations (in `merge(a, b)`, `a` is the earlier state)."""

    bounded: ClassVar[bool] = True
    """Whether the size of a state has a bound, however many observations there are."""

    state_version: ClassVar[int] = 1
    """The version of the form of the states: raise it if saved states mean something else from now on."""

    fields: ClassVar[Mapping[str, Field]] = {}
    """What a state is made of, by key, if all of it merges element by element; empty if not. From this follow how states join,
    which of them stack, what many processes all-reduce, and what kernels compute. A subclass with another `join` or `merge`
    declares its own."""

    looks_inside: ClassVar[bool] = False
    """Whether the reducers that it is made of may be updated and merged without it: it only names them, or maps their results."""

    interpolation: ClassVar[str] = "previous"
    """The default interpolation of `History.view` between two steps."""

    @property
    def batchable(self) -> bool:
        """Whether `update_all` on stacked observations is cheaper than one `update` per observation."""
        return False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = cls.__module__.partition(".")[0] == "reducers"
        registry[cls.__qualname__ if own else f"{cls.__module__}:{cls.__qualname__}"] = cls
        if cls.init is not Reducer.init:
            raise ReducerTypeError(
                f"{cls.__name__} has an `init` of its own, which nobody would call: the empty state is {{}} everywhere; "
                "let `update` begin with what you want if its state is empty"
            )
        for name, found in vars(cls).items():
            if inspect.isfunction(found) and any(isinstance(vars(base).get(name), property) for base in cls.__mro__[1:]):
                raise ReducerTypeError(
                    f"{cls.__name__}.{name} is a method, which would count as true whatever it returns: write @property above it, "
                    f"or {name} = ... without def"
                )
        switch_off(cls, cls.shortcuts)

    @classmethod
    def from_fields(cls, **fields: Any) -> Reducer:
        """Return the reducer with these dataclass fields, as read by `from_recipe`."""
        return cls(**fields)

    def init(self) -> State:
        """Return the empty state, the identity of `merge`."""
        return {}

    @abstractmethod
    def update(self, state: State, *xs: Tensor) -> State:
        """Return the state after one more observation; `state` is unchanged."""

    @abstractmethod
    def merge(self, a: State, b: State) -> State:
        """Return the state of all observations of `a` followed by those of `b`."""

    @abstractmethod
    def compute(self, state: State) -> Result:
        """Return the statistic.

        Raises:
            EmptyStateError: `state` is empty.
        """

    def nonfinite(self, state: State) -> Nonfinite | None:
        """Return how many elements were left out of `state` because they were NaN or infinite, without reading a value.

        Elements that a mask excludes do not count. A `Product` says it of the part that left out most.

        Returns:
            None if this reducer leaves none out: it takes integers only, or its result shows what is not finite, as those of
            `Collect` and `Last` do.
        """
        return None

    def check(self, state: State) -> None:
        """Check the layout of a state from an untrusted source, at a cost that does not depend on its size; numbers are not read.

        A state that passes can be computed, merged and updated without other errors than those of `reducers`, and its result takes
        at most 64 times its bytes, and 1 MiB.

        Raises:
            StateError: the keys, dtypes or shapes are not those of a state of this reducer; a tensor has more than 64 axes; or
                the result would be too big.
        """
        if not state:
            return
        check_layout(self, state)
        try:
            self._check(state)
        except StateError:
            raise
        except Exception as error:
            shapes = {key: (tuple(value.shape), value.dtype) for key, value in state.items()}
            why = f"{type(error).__name__}: {error}"
            raise StateError(f"{self!r:.200} has no such state: {why:.500}; its tensors are {shapes!r:.500}") from error

    def _check(self, state: State) -> None:
        """Raise any exception if a non-empty state is not sound; by default, if its result cannot be computed."""
        check_cost(self, state)

    def update_all(self, state: State, xs: Tensor) -> State:
        """Return the state after several observations, stacked along a new first axis in order."""
        return reduce(self.update, xs.unbind(), state)

    def lift_each(self, xs: Tensor) -> State | None:
        """Return `update({}, x)` of several observations, which `xs` has along its first axis, stacked along a new first axis.

        Returns:
            None if they are not lifted together.
        """
        return None

    def compute_each(self, states: State) -> Result | None:
        """Return `compute` of several states, which `states` has along its first axis, stacked along a new first axis.

        Returns:
            None if they are not computed together.
        """
        return None

    def slots_for(self, x: Tensor) -> Slots | None:
        """Return how observations like `x` wait on their device, as partial states; None if they do not."""
        return None

    def lifted_slots(self, slots: Any, table: Tensor, first: int, last: int) -> State:
        """Return what `lift_each` does of the observations in some slots of a table.

        Args:
            slots: what `slots_for` returned.
        """
        raise NotImplementedError

    def update_slots(self, state: State, slots: Any, table: Tensor, first: int, last: int) -> State:
        """Return the state after the observations in some slots, in order; its bits are those of one `update` for each."""
        raise NotImplementedError

    def of_part(self, part: TensorPart) -> Reducer:
        """Return the reducer for observations that are this part of larger ones: itself, if it does not ask where an element is.

        Its states join by `join_parts` to those of the whole, and are states of this reducer.
        """
        return self

    def join_parts(self, a: State, b: State) -> State:
        """Return the state of observations from those of two parts of each."""
        return self.merge(a, b)

    def merge_all(self, states: Sequence[State]) -> State:
        """Return the states merged in order."""
        return reduce(self.merge, states, {})

    def reductions_of(self, state: State) -> Mapping[str, Reduction]:
        """Return how tensors of this state merge, by key, for those that merge element by element whatever the others are."""
        fields = {"nonfinite": Add(), **self.fields}  # which the base class of statistics counts
        found = {key: how for key in state if (how := fields[key].reduction if key in fields else None)}
        return found if self.fields and len(found) == len(state) else {}

    def _nothing_reduces(self, state: State) -> Mapping[str, Reduction]:
        return {}

    def update_masked(self, state: State, x: Tensor, mask: Tensor) -> State:
        """Return the state after the elements of `x` where `mask`, a bool tensor of the same shape, is True.

        Raises:
            ReducerTypeError: this reducer takes observations whole.
        """
        raise ReducerTypeError(
            f"{self!r} takes observations whole, so their elements cannot be masked, filtered or grouped; "
            "use a reducer with a pattern, or a Product of such reducers; a class with an `update` of its own needs an "
            "`update_masked` too, or overrides `lift` instead"
        )

    shortcuts: ClassVar[tuple[Shortcut, ...]] = (
        Shortcut("update_all", update_all, frozenset({"update"})),
        Shortcut("batchable", batchable, frozenset({"update"}), frozenset({"update_all"})),
        Shortcut("lift_each", lift_each, frozenset({"update"})),
        Shortcut("compute_each", compute_each, frozenset({"compute"})),
        Shortcut("slots_for", slots_for, frozenset({"update", "merge"})),
        Shortcut("update_masked", update_masked, frozenset({"update"})),
        Shortcut("merge_all", merge_all, frozenset({"merge"})),
        Shortcut("reductions_of", _nothing_reduces, frozenset({"join", "merge"}), frozenset({"fields"})),
        Shortcut("looks_inside", looks_inside, frozenset({"update", "update_all", "merge", "merge_all"})),
    )
    """What would bypass methods that a subclass overrides; see `reducers.core.overrides`."""

    def prefilter(self, predicate: Callable[[Tensor], Tensor | bool]) -> Reducer:
        """Return this reducer restricted to the elements, or the whole observations, for which `predicate(x)` is True."""
        return _combinators["prefilter"](self, predicate)

    def premap(self, function: Callable[..., Tensor | tuple[Tensor, ...]]) -> Reducer:
        """Return this reducer applied to `function(*xs)` instead of `xs`."""
        return _combinators["premap"](self, function)

    def postmap(self, function: Callable[[Any], Any]) -> Reducer:
        """Return this reducer with `function` applied to its result."""
        return _combinators["postmap"](self, function)


def check_reducer(reducer: object, owner: str) -> Reducer:
    """Return `reducer`; raise `ReducerTypeError`, with the correction, if it is not a reducer instance."""
    if isinstance(reducer, Reducer):
        return reducer
    if isinstance(reducer, type) and issubclass(reducer, Reducer):
        name = reducer.__name__
        raise ReducerTypeError(f"{owner} needs a reducer instance and got the class: write {name}(), not {name}")
    raise ReducerTypeError(f"{owner} needs a reducer such as Mean() and got {type(reducer).__name__}: {reducer!r}")


def check_size(reducer: object, name: str, least: int = 1, most: int = MAX_SIZE) -> None:
    """Raise `ArgumentError` if the field `name` of `reducer` is not an integer from `least` to `most`."""
    value = getattr(reducer, name)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ArgumentError(
            f"{type(reducer).__name__} takes {name}, an integer from {least} to {most}, and got {reprlib.repr(value)}"
        )
