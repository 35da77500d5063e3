"""Reducer: the contract of every online statistic of this package."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, ClassVar

from torch import Tensor

from reducers.errors import ReducerTypeError
from reducers.state import Result, State

__all__ = ["Reducer", "check_reducer", "register_combinator", "registry"]

registry: dict[str, type[Reducer]] = {}
"""Reducer classes by the name that recipes give them."""

_combinators: dict[str, Callable[..., Reducer]] = {}


def register_combinator(method: str, combinator: Callable[..., Reducer]) -> None:
    """Let `reducer.<method>(function)` make a `combinator`; combinators know reducers, and not the reverse."""
    _combinators[method] = combinator


class Reducer(ABC):
    """An immutable description of an online statistic; the numbers live in a `State` that the caller holds.

    Laws, for all states `a, b, c` made by the same reducer:

    - `merge(merge(a, b), c) == merge(a, merge(b, c))`, and `merge({}, a) == a == merge(a, {})`
    - `update(a, x) == merge(a, update({}, x))`
    - `merge(a, b) == merge(b, a)` unless the reducer is `ordered`
    - nothing writes into a state or into an input
    """

    ordered: ClassVar[bool] = False
    """Whether the result depends on the order of the observations (`merge(a, b)`: `a` came first)."""

    interpolation: ClassVar[str] = "previous"
    """How a `History` of this reducer is read between two steps, where nothing else is asked for."""

    @property
    def batchable(self) -> bool:
        """Whether several observations of one shape are cheaper reduced together, by `update_all`, than one after another."""
        return False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = cls.__module__.partition(".")[0] == "reducers"
        registry[cls.__qualname__ if own else f"{cls.__module__}:{cls.__qualname__}"] = cls

    @classmethod
    def from_fields(cls, **fields: Any) -> Reducer:
        """The reducer with these dataclass fields, as `from_recipe` read them."""
        return cls(**fields)

    def init(self) -> State:
        """The empty state, the identity of `merge`."""
        return {}

    @abstractmethod
    def update(self, state: State, *xs: Tensor) -> State:
        """The state after one more observation; `state` itself is left as it was."""

    @abstractmethod
    def merge(self, a: State, b: State) -> State:
        """The state of both: as if what made `b` had been observed after what made `a`."""

    @abstractmethod
    def compute(self, state: State) -> Result:
        """The statistic itself.

        Raises:
            EmptyStateError: nothing was reduced into `state`.
        """

    def update_all(self, state: State, xs: Tensor) -> State:
        """The state after several observations, stacked along a new first axis, as if after one another."""
        return reduce(self.update, xs.unbind(), state)

    def merge_all(self, states: Sequence[State]) -> State:
        """The state of all, as if merged one after another."""
        return reduce(self.merge, states, {})

    def merge_stacked(self, state: State, stacked: State) -> State:
        """The state after all states that are stacked along a new first axis, as if merged one after another."""
        count = len(next(iter(stacked.values()), ()))
        return reduce(self.merge, ({key: value[i].clone() for key, value in stacked.items()} for i in range(count)), state)

    def update_masked(self, state: State, x: Tensor, mask: Tensor) -> State:
        """The state after the elements of `x` where `mask`, bool and of its shape, is True.

        Raises:
            ReducerTypeError: this reducer takes observations whole.
        """
        raise ReducerTypeError(
            f"{self!r} takes observations whole, so no elements can be masked, filtered or grouped out of them; "
            "reducers with a pattern, and products of them, take parts"
        )

    def prefilter(self, predicate: Callable[[Tensor], Tensor | bool]) -> Reducer:
        """This reducer over the elements, or the whole observations, of which `predicate(x)` is True."""
        return _combinators["prefilter"](self, predicate)

    def premap(self, function: Callable[..., Tensor | tuple[Tensor, ...]]) -> Reducer:
        """This reducer over `function(*xs)` instead of `xs`."""
        return _combinators["premap"](self, function)

    def postmap(self, function: Callable[[Any], Any]) -> Reducer:
        """This reducer with `function` applied to its result."""
        return _combinators["postmap"](self, function)


def check_reducer(reducer: object, where: str) -> Reducer:
    """Returns `reducer`, or raises `ReducerTypeError` that shows the mistaken code and its mend."""
    if isinstance(reducer, Reducer):
        return reducer
    if isinstance(reducer, type) and issubclass(reducer, Reducer):
        name = reducer.__name__
        raise ReducerTypeError(f"{where} needs a reducer instance and got the class: write {name}(), not {name}")
    raise ReducerTypeError(f"{where} needs a reducer such as Mean() and got {type(reducer).__name__}: {reducer!r}")
