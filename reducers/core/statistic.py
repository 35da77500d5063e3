"""State, Reducer and Statistic: what every online statistic of this package is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, Union

import torch
from torch import Tensor

from reducers.core.patterns import arrange, arrange_all, validate
from reducers.errors import EmptyStateError, ReducerTypeError, StateMismatchError
from reducers.kernels.chunks import BIG, CHUNK, pieces, pieces_beside
from reducers.kernels.masks import shown, shows
from reducers.kernels.merging import alike, join_stacked, stack
from reducers.kernels.precision import able_to_hold_nan, count_along

if TYPE_CHECKING:
    from reducers.combinators.masked import Prefilter
    from reducers.combinators.product import Postmap, Premap

__all__ = [
    "Reducer",
    "Result",
    "State",
    "Statistic",
    "check_reducer",
    "check_states",
    "follow",
    "leafwise",
    "observation",
    "require_state",
    "unshared",
]

State: TypeAlias = dict[str, Tensor]
Result: TypeAlias = Union[Tensor, Mapping[str, "Result"]]

_FEW = 4  # states that are joined as fast one after another

_registry: dict[str, type[Reducer]] = {}


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
    def gathers(self) -> bool:
        """Whether several observations of one shape are cheaper reduced together, by `update_all`, than one after another."""
        return False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = cls.__module__.partition(".")[0] == "reducers"
        _registry[cls.__qualname__ if own else f"{cls.__module__}:{cls.__qualname__}"] = cls

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

    def prefilter(self, predicate: Callable[[Tensor], Tensor | bool]) -> Prefilter:
        """This reducer over the elements, or the whole observations, of which `predicate(x)` is True."""
        from reducers.combinators.masked import Prefilter

        return Prefilter(self, predicate)

    def premap(self, function: Callable[..., Tensor | tuple[Tensor, ...]]) -> Premap:
        """This reducer over `function(*xs)` instead of `xs`."""
        from reducers.combinators.product import Premap

        return Premap(self, function)

    def postmap(self, function: Callable[[Any], Any]) -> Postmap:
        """This reducer with `function` applied to its result."""
        from reducers.combinators.product import Postmap

        return Postmap(self, function)


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

    elementwise: ClassVar[bool] = False
    """Whether `join` treats each element of a state by itself, so that many states may be joined at once, stacked."""

    @property
    def divisible(self) -> bool:
        """Whether the lifts of the parts of an observation join to the lift of the whole, so that big tensors may be cut."""
        return True

    @property
    def gathers(self) -> bool:
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
        return self.merge(follow(state, x.device), self.observe(x, axes))

    def update_all(self, state: State, xs: Tensor) -> State:
        if not self.gathers or xs.numel() == 0:
            return super().update_all(state, xs)
        x, axes = arrange_all(xs.detach(), self.pattern)
        small = xs[0].numel() < BIG  # then in float64, as each by itself: how they were grouped shows in no digit but the last
        return self.merge(follow(state, x.device), Statistic.observe(self, x, axes) if small else self.observe(x, axes))

    def observe(self, x: Tensor, axes: tuple[int, ...]) -> State:
        """The state of one observation however big: the lift, or the lifts of its parts together, in tensors of their own."""
        parts = pieces(x, axes) if self.divisible else (x,)
        lifted = (_contiguous(self.lift(part, axes), part) for part in parts)
        if len(parts) < _FEW or not self.elementwise or len(parts) * x.numel() > CHUNK * count_along(x, axes):
            return reduce(self.merge, lifted, {})  # where the states of all parts are big, they do not wait for each other
        return self.merge_all(list(lifted))

    def update_masked(self, state: State, x: Tensor, mask: Tensor) -> State:
        if x.numel() == 0:
            return state
        (x, axes), (mask, _) = arrange(x, self.pattern), arrange(mask, self.pattern)
        state = follow(state, x.device)
        if self.elementwise and self.divisible and shows(x, mask, axes):
            seen = [self.observe(part, rest) for part, rest in shown(x, mask, axes) if part.numel()]
            if seen:
                return self.merge_all([state, *seen])
        parts = pieces_beside(x, mask, axes) if self.divisible else ((x, mask),)
        lifted = [self.lift_masked(*part, axes) for part in parts]
        return self.merge_all([state, *({key: value.contiguous() for key, value in one.items()} for one in lifted)])

    def merge(self, a: State, b: State) -> State:
        if not a or not b:
            return a or b
        check_states(self, a, b, self.fixed_shape)
        return self.join(a, follow(b, next(iter(a.values())).device))

    def merge_all(self, states: Sequence[State]) -> State:
        found = [state for state in states if state]
        if not self.elementwise or len(found) < _FEW or not alike(found):
            return super().merge_all(found)
        return join_stacked(self.join, stack(found))

    def merge_stacked(self, state: State, stacked: State) -> State:
        if not self.elementwise or not stacked:
            return super().merge_stacked(state, stacked)
        return self.merge(state, join_stacked(self.join, stacked))

    def compute(self, state: State) -> Result:
        require_state(self, state)
        return unshared(self.read(state), state)


def _contiguous(state: State, made_of: Tensor) -> State:
    """Reductions keep the order of strides, and files hold contiguous tensors only; a compiler may not ask for strides."""
    if not torch.compiler.is_compiling() and made_of.is_contiguous():
        return state
    return {key: value.contiguous() for key, value in state.items()}


def observation(reducer: Reducer, xs: tuple[Any, ...]) -> Tensor:
    """The one tensor in `xs`, detached, dense, dequantised and of no subclass.

    Raises:
        ReducerTypeError: there are several, or something else.
    """
    if len(xs) != 1 or not isinstance(xs[0], Tensor):
        raise ReducerTypeError(f"{reducer!r} reduces one tensor at a time; got ({', '.join(type(x).__name__ for x in xs)})")
    x = xs[0].detach()
    if type(x) is not Tensor and type(x).__torch_dispatch__ is Tensor.__torch_dispatch__:
        x = x.as_subclass(Tensor)  # a state is made of plain tensors
    if x.is_quantized:
        return x.dequantize()
    # a traced backward may not ask for the layout
    return x if torch.compiler.is_compiling() or x.layout is torch.strided else x.to_dense()


def follow(state: State, device: torch.device) -> State:
    """`state` on `device`; the very same where it is there already."""
    for value in state.values():
        if value.device != device:
            return {key: value.to(device) for key, value in state.items()}
    return state


def unshared(result: Result, state: State) -> Result:
    """`result` with copies of those tensors that are the state's own, so that the caller may write into what he is given."""
    if isinstance(result, Tensor):
        return result.clone() if any(result is value for value in state.values()) else result
    return {key: unshared(value, state) for key, value in result.items()}


def leafwise(function: Callable[..., Tensor], *results: Result) -> Result:
    """`function` of the tensors of several results of one kind, name by name."""
    if isinstance(results[0], Tensor):
        return function(*results)
    parts = [result for result in results if not isinstance(result, Tensor)]
    return {name: leafwise(function, *(part[name] for part in parts)) for name in parts[0]}


def require_state(reducer: Reducer, state: State) -> None:
    """Raises `EmptyStateError` where `state` is empty."""
    if not state:
        raise EmptyStateError(f"{reducer!r} has nothing to compute: no observation was reduced into this state yet")


def check_states(reducer: Reducer, a: State, b: State, shapes: bool = True) -> None:
    """Raises `StateMismatchError`, with both sides listed, where two states cannot belong to `reducer`."""
    if a.keys() != b.keys():
        raise StateMismatchError(
            f"{reducer!r} cannot merge states with different keys: {sorted(a)} and {sorted(b)}; were they made by the same reducer?"
        )
    if shapes:
        for key, value in a.items():
            if value.shape != b[key].shape:
                raise StateMismatchError(
                    f"{reducer!r} keeps shape {tuple(value.shape)} for {key!r} so far and now met {tuple(b[key].shape)}: "
                    "the kept axes must not change; keep fewer axes in the pattern, or record these apart"
                )


def check_reducer(reducer: object, where: str) -> Reducer:
    """Returns `reducer`, or raises `ReducerTypeError` that shows the mistaken code and its mend."""
    if isinstance(reducer, Reducer):
        return reducer
    if isinstance(reducer, type) and issubclass(reducer, Reducer):
        name = reducer.__name__
        raise ReducerTypeError(f"{where} needs a reducer instance and got the class: write {name}(), not {name}")
    raise ReducerTypeError(f"{where} needs a reducer such as Mean() and got {type(reducer).__name__}: {reducer!r}")
