"""Premap, Postmap and Prefilter: apply a function to the input or the result of a reducer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from reducers.combinators.wrapper import InputWrapper, Wrapper
from reducers.core.inputs import align_input, observation
from reducers.core.reducer import Reducer, register_combinator
from reducers.core.states import to_device
from reducers.errors import ReducerTypeError
from reducers.kernels.masks import as_bool
from reducers.state import Result, State


@dataclass(frozen=True)
class Premap(InputWrapper):
    """A reducer of mapped inputs, made by `reducer.premap(f)`: `premap(r, f).update(s, *xs) == r.update(s, *f(*xs))`.

    Returns:
        The result of the inner reducer.

    >>> import torch
    >>> from reducers import Mean
    >>> magnitude = Mean().premap(torch.abs)
    >>> magnitude.compute(magnitude.update({}, torch.tensor([-1.0, 3.0])))
    tensor(2., dtype=torch.float64)
    """

    function: Callable[..., Any]

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_function(self, self.function)

    def update(self, state: State, *xs: Tensor) -> State:
        mapped = self.function(*xs)
        return self.reducer.update(state, *(mapped if isinstance(mapped, tuple) else (mapped,)))


@dataclass(frozen=True)
class Postmap(Wrapper):
    """A reducer with a mapped result, made by `reducer.postmap(f)`: `postmap(r, f).compute(s) == f(r.compute(s))`.

    Returns:
        What the function returns.

    >>> import torch
    >>> from reducers import Sum
    >>> root = Sum().postmap(torch.sqrt)
    >>> root.compute(root.update({}, torch.tensor([4.0, 5.0])))
    tensor(3., dtype=torch.float64)
    """

    function: Callable[..., Any]

    looks_inside: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_function(self, self.function)

    def compute(self, state: State) -> Result:
        result: Result = self.function(self.reducer.compute(state))
        return result


@dataclass(frozen=True)
class Prefilter(InputWrapper):
    """The inner reducer over the observations or elements that a predicate selects, made by `reducer.prefilter(predicate)`.

    `prefilter(r, p).update(s, x) == r.update(s, x)` if `p(x)` is True, and `s` if it is False. A predicate may also return a
    tensor: 0-d for the whole observation, or a mask of its elements. A tensor needs a reducer with a pattern, or a `Product` of
    such reducers, and works as in `Masked`.

    Args:
        reducer: the inner reducer.
        predicate: maps an observation to a bool or a bool tensor.

    Returns:
        The result of the inner reducer.

    Raises:
        ReducerTypeError: `reducer` is not a reducer instance, `predicate` is not callable or returns another type, or it returns a
            tensor and the reducer takes observations whole.

    >>> import torch
    >>> from reducers import Mean
    >>> positive = Mean().prefilter(lambda x: x > 0)
    >>> positive.compute(positive.update({}, torch.tensor([-5.0, 1.0, 3.0])))
    tensor(2., dtype=torch.float64)
    """

    predicate: Callable[[Tensor], Tensor | bool]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.predicate):
            raise ReducerTypeError(f"Prefilter needs a predicate and got {self.predicate!r}")

    def update(self, state: State, *xs: Tensor) -> State:
        x = observation(self, xs)
        selected = self.predicate(x)
        if isinstance(selected, bool):
            return self.reducer.update(state, x) if selected else state
        if not isinstance(selected, Tensor):
            got = type(selected).__name__
            raise ReducerTypeError(f"the predicate of {self!r} must return a bool or a tensor; it returned {got}")
        mask = align_input(self, selected.detach(), x, "predicate's result")
        return self.reducer.update_masked(to_device(state, x.device), x, as_bool(mask).expand(x.shape))


def _check_function(reducer: Reducer, function: object) -> None:
    if not callable(function):
        raise ReducerTypeError(f"{type(reducer).__name__} needs a function and got {function!r}")


register_combinator("premap", Premap)
register_combinator("postmap", Postmap)
register_combinator("prefilter", Prefilter)
