"""Combinators: reducers made of reducers. Each obeys the laws of its parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from reducers.core.statistic import Reducer, Result, State, check_reducer, require_state
from reducers.errors import ReducerTypeError, StateMismatchError

__all__ = ["Postmap", "Premap", "Product"]


@dataclass(frozen=True, init=False, repr=False)
class Product(Reducer):
    """Several reducers over the same observations; the state is the plain union of theirs, keyed `part/key`.

    `Product(a=A, b=B).compute(...) == {"a": A.compute(...), "b": B.compute(...)}`

    Raises:
        ReducerTypeError: no parts, a name with `/` in it, or a part that is no reducer instance.

    >>> import torch
    >>> from reducers import Count, Mean
    >>> both = Product(n=Count(), mean=Mean())
    >>> both.compute(both.update({}, torch.tensor([1.0, 3.0])))
    {'n': tensor(2), 'mean': tensor(2., dtype=torch.float64)}
    """

    parts: tuple[tuple[str, Reducer], ...]

    def __init__(self, /, **parts: Reducer) -> None:
        if not parts:
            raise ReducerTypeError("Product needs at least one named part: Product(mean=Mean(), top=Max())")
        for name, part in parts.items():
            if not name or "/" in name:
                raise ReducerTypeError(f"Product part name {name!r} must be non-empty and without '/', which separates state keys")
            check_reducer(part, f"Product({name}=...)")
        object.__setattr__(self, "parts", tuple(parts.items()))

    @classmethod
    def from_fields(cls, **fields: Any) -> Product:
        return cls(**dict(fields["parts"]))

    def __repr__(self) -> str:
        return f"Product({', '.join(f'{name}={part!r}' for name, part in self.parts)})"

    @property
    def ordered(self) -> bool:  # type: ignore[override]
        return any(part.ordered for _, part in self.parts)

    @property
    def gathers(self) -> bool:
        return any(part.gathers for _, part in self.parts)

    def _split(self, state: State) -> dict[str, State]:
        split: dict[str, State] = {name: {} for name, _ in self.parts}
        for key, value in state.items():
            name, _, rest = key.partition("/")
            if name not in split:
                raise StateMismatchError(f"{self!r} has no part {name!r}: the state was made by another reducer")
            split[name][rest] = value
        return split

    def update(self, state: State, *xs: Tensor) -> State:
        split = self._split(state)
        return {f"{name}/{key}": value for name, part in self.parts for key, value in part.update(split[name], *xs).items()}

    def update_masked(self, state: State, x: Tensor, mask: Tensor) -> State:
        split = self._split(state)
        return {
            f"{name}/{key}": value for name, part in self.parts for key, value in part.update_masked(split[name], x, mask).items()
        }

    def update_all(self, state: State, xs: Tensor) -> State:
        split = self._split(state)
        return {f"{name}/{key}": value for name, part in self.parts for key, value in part.update_all(split[name], xs).items()}

    def merge_all(self, states: Sequence[State]) -> State:
        split = [self._split(state) for state in states]
        merged = ((name, part.merge_all([each[name] for each in split])) for name, part in self.parts)
        return {f"{name}/{key}": value for name, state in merged for key, value in state.items()}

    def merge_stacked(self, state: State, stacked: State) -> State:
        before, split = self._split(state), self._split(stacked)
        merged = ((name, part.merge_stacked(before[name], split[name])) for name, part in self.parts)
        return {f"{name}/{key}": value for name, found in merged for key, value in found.items()}

    def merge(self, a: State, b: State) -> State:
        left, right = self._split(a), self._split(b)
        return {f"{name}/{key}": value for name, part in self.parts for key, value in part.merge(left[name], right[name]).items()}

    def compute(self, state: State) -> Result:
        require_state(self, state)
        split = self._split(state)
        return {name: part.compute(split[name]) for name, part in self.parts if split[name]}


@dataclass(frozen=True)
class _Wrapper(Reducer):
    """A reducer around one other: its state is the other's."""

    reducer: Reducer
    function: Callable[..., Any]

    def __post_init__(self) -> None:
        check_reducer(self.reducer, type(self).__name__)
        if not callable(self.function):
            raise ReducerTypeError(f"{type(self).__name__} needs a function and got {self.function!r}")

    @property
    def ordered(self) -> bool:  # type: ignore[override]
        return self.reducer.ordered

    def update(self, state: State, *xs: Tensor) -> State:
        return self.reducer.update(state, *xs)

    def merge(self, a: State, b: State) -> State:
        return self.reducer.merge(a, b)

    def merge_all(self, states: Sequence[State]) -> State:
        return self.reducer.merge_all(states)

    def merge_stacked(self, state: State, stacked: State) -> State:
        return self.reducer.merge_stacked(state, stacked)

    def compute(self, state: State) -> Result:
        return self.reducer.compute(state)


@dataclass(frozen=True)
class Premap(_Wrapper):
    """`premap(r, f).update(s, *xs) == r.update(s, *f(*xs))`; made by `reducer.premap(f)`.

    >>> import torch
    >>> from reducers import Mean
    >>> magnitude = Mean().premap(torch.abs)
    >>> magnitude.compute(magnitude.update({}, torch.tensor([-1.0, 3.0])))
    tensor(2., dtype=torch.float64)
    """

    def update(self, state: State, *xs: Tensor) -> State:
        mapped = self.function(*xs)
        return self.reducer.update(state, *(mapped if isinstance(mapped, tuple) else (mapped,)))


@dataclass(frozen=True)
class Postmap(_Wrapper):
    """`postmap(r, f).compute(s) == f(r.compute(s))`; made by `reducer.postmap(f)`.

    >>> import torch
    >>> from reducers import Sum
    >>> root = Sum().postmap(torch.sqrt)
    >>> root.compute(root.update({}, torch.tensor([4.0, 5.0])))
    tensor(3., dtype=torch.float64)
    """

    @property
    def gathers(self) -> bool:
        return self.reducer.gathers

    def update_all(self, state: State, xs: Tensor) -> State:
        return self.reducer.update_all(state, xs)

    def update_masked(self, state: State, x: Tensor, mask: Tensor) -> State:
        return self.reducer.update_masked(state, x, mask)

    def compute(self, state: State) -> Result:
        result: Result = self.function(self.reducer.compute(state))
        return result
