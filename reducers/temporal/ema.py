"""Moving averages, time since an event, differences of consecutive observations, and the first non-finite observation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from reducers.core.checks import check_keys
from reducers.core.constants import is_number, numbers
from reducers.core.inputs import observation
from reducers.core.reducer import Reducer, check_reducer
from reducers.core.states import check_states, prefixed, require_state, substate, to_device
from reducers.core.statistic import Statistic
from reducers.errors import ArgumentError, ReducerTypeError
from reducers.kernels.dispatch import sweep
from reducers.kernels.precision import count_along, count_of, counts_of, finite, real, total, wide_float
from reducers.samples.collect import keep
from reducers.state import Nonfinite, Result, State
from reducers.temporal.affine import Affine, apply, compose

_AVERAGE = tuple((name, name) for name in ("count", "mean", "nonfinite")), 0.0
"""What a kernel is asked for an average."""
_MANY = 64  # elements of an average from which on a kernel is faster


def check_positive(reducer: Reducer, name: str, per_element: bool = False) -> None:
    """Raise `ArgumentError` if the field `name` of `reducer` is not a finite number above 0, or nested tuples of such."""
    value = getattr(reducer, name)
    for number in numbers(value) if per_element else (value,):
        if not is_number(number) or not 0 < number < float("inf"):
            raise ArgumentError(f"{type(reducer).__name__} takes a finite {name} above 0 and got {value!r}")


@dataclass(frozen=True)
class EMA(Statistic):
    """Exponential moving average: `s = x` for the first observation, then `s = alpha x + (1 - alpha) s`.

    Reduced axes are averaged first, so each observation has the same weight for any size: `"b c -> c"` averages the batch means
    of each channel. By default, each element has its own average. Non-finite elements are excluded; if there is no finite
    element, the average does not change.

    The state stores the first value and the composed affine map of all observations. Applied to the first value x, the map of
    the first observation returns it unchanged, `alpha x + (1 - alpha) x = x`, so states merge exactly without a special case:
    the later state drops its first value, which then has the weight `alpha`, like any other.

    Args:
        pattern: see `Statistic`.
        alpha: weight of the newest observation, from 0 (keeps the first) to 1 (keeps the last). For a time constant tau and
            steps of length dt, `alpha = 1 - exp(-dt / tau)`.

    Returns:
        float64 or complex128, in the shape of the kept axes; NaN if there are no finite elements.

    Raises:
        ArgumentError: `alpha` is not a number from 0 to 1.

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
        if not is_number(self.alpha) or not 0 <= self.alpha <= 1:
            raise ArgumentError(f"EMA takes alpha from 0 to 1 and got {self.alpha!r}")

    @property
    def divisible(self) -> bool:
        return False

    def lift(self, x: Tensor, axes: tuple[int, ...]) -> State:
        averaged = sweep(_AVERAGE, x, axes, {}) if count_along(x, axes) >= _MANY else None
        if averaged is not None:
            count, value, nonfinite = averaged["count"], averaged["mean"], averaged["nonfinite"]
        else:
            _, mask, added = total(x, axes, "EMA")
            counts = counts_of(x, mask, axes)
            count, nonfinite = counts["count"], counts["nonfinite"]
            value = added.squeeze(axes) / real(count.clamp(min=1))
            if mask is None:
                decay = torch.full_like(value.real, 1 - self.alpha)
                return {"first": value, "decay": decay, "gain": self.alpha * value, "nonfinite": nonfinite}
        any_finite = count > 0
        return {
            "first": torch.where(any_finite, value, torch.nan),
            "decay": 1 - self.alpha * real(any_finite),
            "gain": torch.where(any_finite, self.alpha * value, 0.0),
            "nonfinite": nonfinite,
        }

    def join(self, a: State, b: State) -> State:
        return {"first": torch.where(torch.isnan(a["first"]), b["first"], a["first"]), **compose(a, b)}

    def read(self, state: State) -> Tensor:
        return apply(state, state["first"])


@dataclass(frozen=True)
class TimeSince(Affine):
    """Time since each element last met a criterion: 0 in that observation, and `step_time` more in each later one.

    The state counts steps, so that times do not accumulate rounding errors.

    Args:
        criterion: maps an observation to a bool tensor of the same shape, True where the criterion is met.
        step_time: time between observations; the result has the same unit.
        initial: result of elements that never met the criterion: "inf", "nan", or "zero" for the time since the first observation.

    Returns:
        float64, in the shape of the observations.

    Raises:
        ArgumentError: `step_time` is not above 0, or `initial` is not one of the three.
        ReducerTypeError: `criterion` is not callable, or does not return such a tensor.

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
        not_met = real(~matches(self, self.criterion, x))
        return {"decay": not_met, "gain": not_met.clone()}

    def compute(self, state: State) -> Tensor:
        require_state(self, state)
        # start one step before the first observation, whose result is then `initial`
        return self.step_time * apply(state, -1.0 if self.initial == "zero" else float(self.initial))


def matches(reducer: Reducer, criterion: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return the bool tensor `criterion(x)`.

    Raises:
        ReducerTypeError: the criterion did not return a bool tensor of the shape of `x`.
    """
    match = criterion(x)
    if not isinstance(match, Tensor) or match.dtype is not torch.bool or match.shape != x.shape:
        got = f"{match.dtype} of shape {tuple(match.shape)}" if isinstance(match, Tensor) else type(match).__name__
        raise ReducerTypeError(f"the criterion of {reducer!r} must return a bool tensor of shape {tuple(x.shape)}; got {got}")
    return match.detach()


@dataclass(frozen=True)
class Difference(Reducer):
    """An inner reducer applied to the differences of consecutive observations, `x[t] - x[t-1]`, in float64.

    If two consecutive observations differ in shape (a smaller last batch), their difference is skipped. The state stores the
    first and the last observation, so that merging adds the difference between the two parts.

    Args:
        reducer: the inner reducer.

    Returns:
        The result of the inner reducer; an empty mapping if there is no difference yet.

    Raises:
        ReducerTypeError: `reducer` is not a reducer instance.

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

    def _check(self, state: State) -> None:
        inner = substate(state, "difference")
        check_keys(self, state, ("first", "last"), prefixed("difference", inner))
        self.reducer.check(inner)

    def compute(self, state: State) -> Result:
        require_state(self, state)
        inner = substate(state, "difference")
        return self.reducer.compute(inner) if inner else {}

    def nonfinite(self, state: State) -> Nonfinite | None:
        """Return how many elements of differences were left out."""
        inner = substate(state, "difference")
        return self.reducer.nonfinite(inner) if inner else None

    def _append(self, a: State, b: State) -> State:
        if not a:
            return b
        check_states(self, {"last": a["last"]}, {"last": b["last"]}, shapes=False)
        inner, earlier, later = substate(a, "difference"), a["last"], b["first"]
        if earlier.shape == later.shape:
            inner = self.reducer.update(inner, wide_float(later) - wide_float(earlier))
        inner = self.reducer.merge(inner, substate(b, "difference"))
        return {**prefixed("difference", inner), "first": a["first"], "last": b["last"]}


@dataclass(frozen=True)
class FirstNonfinite(Statistic):
    """Index, from 0, of the first observation with a NaN or infinite element.

    On the CPU, a finite observation costs one sum; on an accelerator, no value is read.

    Returns:
        int64, in the shape of the kept axes; -1 if all elements are finite.

    >>> import torch
    >>> when = FirstNonfinite("b c -> c")
    >>> state = when.update({}, torch.tensor([[1.0, 2.0]]))
    >>> when.compute(when.update(state, torch.tensor([[float("inf"), 2.0]])))
    tensor([ 1, -1])
    """

    ordered: ClassVar[bool] = True
    counts_nonfinite: ClassVar[bool] = False  # the result says when
    row_columns: ClassVar[frozenset[str]] = frozenset({"nonfinite"})

    @property
    def divisible(self) -> bool:
        return False

    @property
    def batchable(self) -> bool:
        return True

    def update_all(self, state: State, xs: Tensor) -> State:
        if xs.numel() == 0:
            return state
        return self._after(to_device(state, xs.device), self._lift_each(xs)["first"] >= 0)

    def update_rows(self, state: State, rows: State) -> State:
        return self._after(state, rows["nonfinite"] > 0)

    def _after(self, state: State, hit: Tensor) -> State:
        """Return the state after several observations; `hit` says, along the first axis, in which something is not finite."""
        before = (hit.cumsum(dim=0) == 0).sum(dim=0)  # many times as fast as argmax along the first axis
        first = torch.where(before == len(hit), -1, before)
        return self.merge(state, {"steps": hit.new_full((), len(hit), dtype=torch.int64), "first": first})

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
