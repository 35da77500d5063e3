"""Observations in order of time: averages that fade, time since an event, differences, and when something went wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from reducers.core.inputs import observation
from reducers.core.reducer import Reducer, check_reducer
from reducers.core.states import check_states, require_state, to_device
from reducers.core.statistic import Statistic
from reducers.errors import ArgumentError, ReducerTypeError
from reducers.exemplars.collect import keep
from reducers.kernels.precision import count_of, finite, real, total, wide_float
from reducers.state import Result, State
from reducers.temporal.affine import Affine, apply, compose

__all__ = ["EMA", "Difference", "FirstNonfinite", "TimeSince", "check_positive"]


def check_positive(reducer: Reducer, name: str) -> None:
    """Raises `ArgumentError` where the field `name` of `reducer` is not a finite number above 0."""
    value = getattr(reducer, name)
    if not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise ArgumentError(f"{type(reducer).__name__} takes a finite {name} above 0 and got {value!r}")


@dataclass(frozen=True)
class EMA(Statistic):
    """Exponential moving average over observations: `s = x` at the first, then `s = alpha x + (1 - alpha) s`.

    Axes that the pattern reduces are averaged first, each observation weighing the same whatever its size: `"b c -> c"` follows
    the batch mean of each channel. By default every element is followed by itself. Elements that are not finite are left out:
    where an observation has none that is, the average stays as it was.

    The state keeps the first value and the map that all observations make of it: the map of the first leaves it where it is,
    `alpha x + (1 - alpha) x = x`, so the first needs no special case and parts merge exactly. In it, a part that comes later
    forgets its own first value, and weighs it `alpha` as any other.

    Args:
        pattern: see `Statistic`.
        alpha: weight of the newest observation, from 0 (the first stays) to 1 (the last counts). For a time constant tau and
            steps of length dt, `alpha = 1 - exp(-dt / tau)`.

    Returns:
        float64 or complex128, in the shape of the kept axes; NaN where nothing finite was seen.

    Raises:
        ArgumentError: `alpha` is no number from 0 to 1.

    >>> import torch
    >>> average = EMA(alpha=0.5)
    >>> state = average.update({}, torch.tensor([1.0, 8.0]))
    >>> average.compute(average.update(state, torch.tensor([2.0, 0.0])))
    tensor([1.5000, 4.0000], dtype=torch.float64)
    """

    pattern: str = "... -> ..."
    alpha: float = field(kw_only=True)

    ordered: ClassVar[bool] = True
    interpolation: ClassVar[str] = "linear"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.alpha, (int, float)) or not 0 <= self.alpha <= 1:
            raise ArgumentError(f"EMA takes alpha from 0 to 1 and got {self.alpha!r}")

    @property
    def divisible(self) -> bool:
        return False

    def lift(self, x: Tensor, axes: tuple[int, ...]) -> State:
        _, mask, added = total(x, axes, "EMA")
        count = count_of(x, mask, axes)
        value = added.squeeze(axes) / real(count.clamp(min=1))
        if mask is None:
            return {"first": value, "decay": torch.full_like(value.real, 1 - self.alpha), "gain": self.alpha * value}
        there = count > 0
        return {
            "first": torch.where(there, value, torch.nan),
            "decay": 1 - self.alpha * real(there),
            "gain": torch.where(there, self.alpha * value, 0.0),
        }

    def join(self, a: State, b: State) -> State:
        return {"first": torch.where(torch.isnan(a["first"]), b["first"], a["first"]), **compose(a, b)}

    def read(self, state: State) -> Tensor:
        return apply(state, state["first"])


@dataclass(frozen=True)
class TimeSince(Affine):
    """How long ago each element last met a criterion: 0 in the observation where it does, one `step_time` more in each after.

    The state counts steps, so that times do not gather rounding errors.

    Args:
        criterion: takes an observation and returns where it is met, a bool tensor of the same shape.
        step_time: time between observations; times come in its unit.
        initial: what elements that never met the criterion show: "inf", "nan", or "zero", the time since the first observation.

    Returns:
        float64, in the shape of the observations.

    Raises:
        ArgumentError: `step_time` is not above 0, or `initial` is none of the three.
        ReducerTypeError: `criterion` cannot be called, or returns something else.

    >>> import torch
    >>> since = TimeSince(torch.signbit, step_time=0.5)
    >>> state = since.update({}, torch.tensor([-1.0, 1.0, 1.0]))
    >>> since.compute(since.update(state, torch.tensor([1.0, -1.0, 1.0])))
    tensor([0.5000, 0.0000,    inf], dtype=torch.float64)
    """

    criterion: Callable[[Tensor], Tensor]
    step_time: float = 1.0
    initial: Literal["inf", "zero", "nan"] = "inf"

    interpolation: ClassVar[str] = "elapsed"

    def __post_init__(self) -> None:
        if not callable(self.criterion):
            raise ReducerTypeError(f"TimeSince needs a function of one tensor, such as torch.signbit, and got {self.criterion!r}")
        check_positive(self, "step_time")
        if self.initial not in ("inf", "zero", "nan"):
            raise ArgumentError(f"TimeSince takes initial 'inf', 'zero' or 'nan' and got {self.initial!r}")

    def step(self, *xs: Tensor) -> State:
        x = observation(self, xs)
        later = real(~matches(self, self.criterion, x))
        return {"decay": later, "gain": later.clone()}

    def compute(self, state: State) -> Tensor:
        require_state(self, state)
        # a step before the first observation, so that this one shows what was asked for
        return self.step_time * apply(state, -1.0 if self.initial == "zero" else float(self.initial))


def matches(reducer: Reducer, criterion: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Where `x` meets `criterion`.

    Raises:
        ReducerTypeError: the criterion returned something other than a bool tensor of the shape of `x`.
    """
    match = criterion(x)
    if not isinstance(match, Tensor) or match.dtype is not torch.bool or match.shape != x.shape:
        got = f"{match.dtype} of shape {tuple(match.shape)}" if isinstance(match, Tensor) else type(match).__name__
        raise ReducerTypeError(f"the criterion of {reducer!r} must return a bool tensor of shape {tuple(x.shape)}; it gave {got}")
    return match.detach()


@dataclass(frozen=True)
class Difference(Reducer):
    """Differences of consecutive observations, `x[t] - x[t-1]`, reduced by an inner reducer, which gets them in float64.

    An observation whose shape is not that of the one before (a smaller last batch) makes no difference with it. The state
    keeps the first and the last observation, so that merging adds the difference across the seam.

    Args:
        reducer: what reduces the differences.

    Returns:
        What the inner reducer computes; an empty mapping before there was any difference.

    Raises:
        ReducerTypeError: `reducer` is none.

    >>> import torch
    >>> from reducers import Mean
    >>> change = Difference(Mean())
    >>> state = change.update({}, torch.tensor([1, 2]))
    >>> change.compute(change.update(state, torch.tensor([4, 7])))
    tensor(4., dtype=torch.float64)
    """

    reducer: Reducer

    ordered: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_reducer(self.reducer, "Difference")

    def update(self, state: State, *xs: Tensor) -> State:
        x = observation(self, xs)
        if x.numel() == 0:
            return state
        return self._append(to_device(state, x.device), {"first": keep(x), "last": keep(x)})

    def merge(self, a: State, b: State) -> State:
        if not a or not b:
            return a or b
        return self._append(a, to_device(b, a["last"].device))

    def compute(self, state: State) -> Result:
        require_state(self, state)
        inner = _inner(state)
        return self.reducer.compute(inner) if inner else {}

    def _append(self, a: State, b: State) -> State:
        if not a:
            return b
        check_states(self, {"last": a["last"]}, {"last": b["last"]}, shapes=False)
        inner, before, after = _inner(a), a["last"], b["first"]
        if before.shape == after.shape:
            inner = self.reducer.update(inner, wide_float(after) - wide_float(before))
        inner = self.reducer.merge(inner, _inner(b))
        return {**{f"difference/{key}": value for key, value in inner.items()}, "first": a["first"], "last": b["last"]}


def _inner(state: State) -> State:
    return {key.partition("/")[2]: value for key, value in state.items() if key.startswith("difference/")}


@dataclass(frozen=True)
class FirstNonfinite(Statistic):
    """In which observation, counted from 0, something was NaN or infinite for the first time.

    Costs one sum per observation while all is well, and no look at a value off the CPU.

    Returns:
        int64, in the shape of the kept axes; -1 where everything was finite.

    >>> import torch
    >>> when = FirstNonfinite("b c -> c")
    >>> state = when.update({}, torch.tensor([[1.0, 2.0]]))
    >>> when.compute(when.update(state, torch.tensor([[float("inf"), 2.0]])))
    tensor([ 1, -1])
    """

    ordered: ClassVar[bool] = True

    @property
    def divisible(self) -> bool:
        return False

    def lift(self, x: Tensor, axes: tuple[int, ...]) -> State:
        steps = torch.ones((), dtype=torch.int64, device=x.device)
        mask = finite(x)[1]
        if mask is None:
            return {"steps": steps, "first": -torch.ones_like(count_of(x, None, axes))}
        return {"steps": steps, "first": mask.all(dim=axes).to(torch.int64).neg()}

    def lift_masked(self, x: Tensor, mask: Tensor, axes: tuple[int, ...]) -> State:
        return self.lift(torch.where(mask, x, torch.zeros((), dtype=x.dtype, device=x.device)), axes)

    def join(self, a: State, b: State) -> State:
        later = torch.where(b["first"] >= 0, a["steps"] + b["first"], -1)
        return {"steps": a["steps"] + b["steps"], "first": torch.where(a["first"] >= 0, a["first"], later)}

    def read(self, state: State) -> Tensor:
        return state["first"]
