"""Parts of observations: masks given beside them, and predicates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from reducers.core.statistic import Reducer, Result, State, check_reducer, follow, observation
from reducers.errors import ArgumentError, ReducerTypeError

__all__ = ["Masked", "Prefilter", "fit", "lined_up"]


def fit(reducer: Reducer, xs: tuple[Any, ...], name: str) -> tuple[Tensor, Tensor]:
    """The observation, and what comes beside it with as many axes, so that it broadcasts.

    Raises:
        ReducerTypeError: these are not two tensors.
        ArgumentError: the shapes do not fit.
    """
    if len(xs) != 2:
        raise ReducerTypeError(f"{reducer!r} takes an observation and its {name}; got {len(xs)} of the 2 tensors")
    x, beside = (observation(reducer, (part,)) for part in xs)
    return x, lined_up(reducer, beside.to(x.device), x, name)


def lined_up(reducer: Reducer, beside: Tensor, x: Tensor, name: str) -> Tensor:
    """`beside`, whose axes are the first ones of `x`, with as many as `x`.

    Raises:
        ArgumentError: the shapes do not fit.
    """
    sizes = (*beside.shape, *(1 for _ in range(x.ndim - beside.ndim)))
    if beside.ndim > x.ndim or any(have not in (1, need) for have, need in zip(sizes, x.shape, strict=True)):
        raise ArgumentError(
            f"{reducer!r} got a {name} of shape {tuple(beside.shape)} for an observation of shape {tuple(x.shape)}: its axes must "
            "be the first ones of the observation, each of the same length or of 1"
        )
    return beside.reshape(sizes)


@dataclass(frozen=True)
class _Gate(Reducer):
    """A reducer around one other that gets parts of what comes: its state is the other's."""

    reducer: Reducer

    def __post_init__(self) -> None:
        check_reducer(self.reducer, type(self).__name__)

    @property
    def ordered(self) -> bool:  # type: ignore[override]
        return self.reducer.ordered

    def merge(self, a: State, b: State) -> State:
        return self.reducer.merge(a, b)

    def compute(self, state: State) -> Result:
        return self.reducer.compute(state)


@dataclass(frozen=True)
class Masked(_Gate):
    """The inner reducer over the elements where a mask, the second input, is True: padding tokens stay out.

    `masked.update(s, x, mask) == reducer.update(s, x[mask])` for one that reduces everything, with no shape that depends on data.
    The mask is bool, or not zero where elements count; its axes are the first ones of x, and those it lacks, or has with length 1,
    are repeated: `[batch, time]` beside `[batch, time, features]`. Elements masked out become NaN, which statistics keep out, so
    integers are taken as float64, except by reducers that count whole numbers.

    Args:
        reducer: a reducer with a pattern, or a product of such.

    Raises:
        ReducerTypeError: `reducer` is none, or takes observations whole, or there is no mask.
        ArgumentError: the shape of the mask does not fit.

    >>> import torch
    >>> from reducers import Mean
    >>> mean = Masked(Mean("b t d -> d"))
    >>> x, mask = torch.tensor([[[1.0, 2.0], [3.0, 4.0], [9.0, 9.0]]]), torch.tensor([[True, True, False]])
    >>> mean.compute(mean.update({}, x, mask))
    tensor([2., 3.], dtype=torch.float64)
    """

    def update(self, state: State, *xs: Tensor) -> State:
        x, mask = fit(self, xs, "mask")
        return self.reducer.update_masked(follow(state, x.device), x, (mask != 0).expand(x.shape))


@dataclass(frozen=True)
class Prefilter(_Gate):
    """The inner reducer over what a predicate lets pass; made by `reducer.prefilter(predicate)`.

    `prefilter(r, p).update(s, x) == r.update(s, x)` where `p(x)` is True, and s where it is False. A predicate may also return a
    tensor: 0-d for the observation as a whole, or one mark for each element; these need a reducer with a pattern, or a product of
    such, and work as in `Masked`.

    Args:
        reducer: what reduces.
        predicate: takes an observation, and returns a bool or a bool tensor.

    Raises:
        ReducerTypeError: `reducer` is none, `predicate` cannot be called or returns something else, or elements are to be left out
            of a reducer that takes observations whole.

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
        passed = self.predicate(x)
        if isinstance(passed, bool):
            return self.reducer.update(state, x) if passed else state
        if not isinstance(passed, Tensor):
            raise ReducerTypeError(f"the predicate of {self!r} must return a bool or a tensor; it returned {type(passed).__name__}")
        mask = lined_up(self, passed.detach(), x, "predicate's result")
        return self.reducer.update_masked(follow(state, x.device), x, (mask != 0).expand(x.shape))
