"""What a reducer gave over the last stretch of time, and at any time within it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from reducers.core.reducer import Reducer, check_reducer
from reducers.core.states import require_state, to_device, tree_map
from reducers.errors import ArgumentError, NoHistoryError
from reducers.kernels.precision import wide_float
from reducers.state import Result, State
from reducers.temporal import ring

__all__ = ["History", "history_of"]

Interpolate = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class History(Reducer):
    """A reducer whose results of the last `duration` are kept, one per observation, and can be looked at.

    Results are kept at the times 0 (the newest), `step_time`, 2 `step_time` and so on before the newest: `ceil(duration /
    step_time)` of them, one more if the duration is `inclusive`, and never none.

    The state holds the inner states behind these results, `slots` of them, so that a history that comes later is merged as if it
    had never been apart. An observation copies the ring, so a history a thousand steps long wants a reducer with a small state.

    Args:
        reducer: one whose state keeps its shape: not `Collect`. With `Last()`, a record of the observations themselves.
        step_time: time between observations; all times come in its unit.
        duration: how far back results are kept.
        inclusive: whether the result at exactly `duration` is kept too.

    Returns:
        What the inner reducer computes of all observations, as without history.

    Raises:
        ReducerTypeError: `reducer` is none.
        ArgumentError: a time is out of range, or the inner reducer has another `step_time`.
        StateMismatchError: the inner state changed its shape.

    >>> import torch
    >>> from reducers import Last
    >>> record = History(Last(), step_time=0.5, duration=1.0, inclusive=True)
    >>> state = {}
    >>> for value in (1.0, 2.0, 4.0, 8.0):
    ...     state = record.update(state, torch.tensor([value]))
    >>> record.dump(state).tolist()
    [[8.0], [4.0], [2.0]]
    >>> record.view(state, 0.25, "linear")
    tensor([6.], dtype=torch.float64)
    """

    reducer: Reducer
    step_time: float = 1.0
    duration: float = 0.0
    inclusive: bool = False

    ordered: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_reducer(self.reducer, "History")
        for name, low in (("step_time", math.ulp(0.0)), ("duration", 0.0)):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not low <= value < math.inf:
                raise ArgumentError(f"History takes a finite {name} {'from 0 up' if not low else 'above 0'} and got {value!r}")
        inner = getattr(self.reducer, "step_time", self.step_time)
        if inner != self.step_time:
            raise ArgumentError(f"History has step_time={self.step_time!r} and its reducer {inner!r}: give both the same")

    @property
    def slots(self) -> int:
        """How many results are kept."""
        # 0.3 / 0.1 may come out a rounding above 3
        return max(math.ceil(self.duration / self.step_time * (1 - 1e-12)) + self.inclusive, 1)

    def update(self, state: State, *xs: Tensor) -> State:
        if xs and isinstance(xs[0], Tensor) and xs[0].numel() == 0:
            return state
        after = self.reducer.update(ring.slot(state, 0) if state else {}, *xs)
        if not after:
            return state
        return ring.push(self, to_device(state, next(iter(after.values())).device), after, self.slots)

    def merge(self, a: State, b: State) -> State:
        if not a or not b:
            return a or b
        b = to_device(b, a["observed"].device)
        before = ring.slot(a, 0)
        after = [self.reducer.merge(before, ring.slot(b, index)) for index in range(self.slots)]
        return ring.join(self, a, ring.stack(self, after, b["observed"]), self.slots)

    def compute(self, state: State) -> Result:
        require_state(self, state)
        return self._result(state, 0)

    def latest(self, state: State) -> Result:
        """The newest result, the one at time 0."""
        return self.compute(state)

    def dump(self, state: State) -> Result:
        """All results there are, newest first, along a new first axis.

        Waits for the device, to learn how many there are.

        Raises:
            EmptyStateError: there are none.
        """
        require_state(self, state)
        results = [self._result(state, index) for index in range(self._kept(state))]
        return tree_map(lambda *parts: torch.stack(parts), *results)

    def view(
        self,
        state: State,
        time: float | Tensor,
        interpolation: str | None = None,
        *,
        tolerance: float = 1e-7,
        time_constant: float | None = None,
    ) -> Result:
        """The result at a time before the newest; times beyond the oldest result there is are an error.

        Waits for the device, to learn how many results there are.

        Args:
            time: how long before the newest result, in the unit of `step_time`: one number for all elements; or a tensor of them
                that broadcasts to the result, to be looked at each element's own time; or one with an axis more, at the end, for
                several times each.
            interpolation: what lies between two results, where `e` is the time since the earlier one. "previous": the earlier;
                "nearest": the later if it is nearer; "linear": on the straight line between them; "expdecay":
                `earlier * exp(-e / time_constant)`; "elapsed": `earlier + e`. By default what suits the reducer: "linear" for means
                and `EMA`, "expdecay" for traces, "elapsed" for `TimeSince`, and "previous" otherwise.
            tolerance: times as near as this to that of a result are at it, and not between.
            time_constant: of "expdecay"; by default the reducer's own.

        Returns:
            The result in its own shape, or with the axis of times at the end; in its own dtype if "previous" or "nearest", else in
            float64 or complex128.

        Raises:
            EmptyStateError: nothing was reduced.
            ArgumentError: the time is out of range or of the wrong shape, or the interpolation is unknown or has no time constant.
        """
        require_state(self, state)
        interpolate = self._interpolation(interpolation, time_constant)
        kept = self._kept(state)
        times = torch.as_tensor(time, dtype=torch.float64).cpu()
        latest = (kept - 1) * self.step_time
        low, high = times.aminmax() if times.numel() else (times.sum(), times.sum())
        if not (low >= -tolerance and high <= latest + tolerance):  # NaN is in no range
            span = f"{low.item():g}" if low == high else f"{low.item():g} to {high.item():g}"
            raise ArgumentError(
                f"{self!r} was asked for time {span}; its {kept} results so far reach from 0 (the newest) to {latest:g}: "
                "ask for less, or keep a longer duration"
            )
        steps = times / self.step_time
        nearest = steps.round().clamp(0, kept - 1)
        steps = torch.where((nearest * self.step_time - times).abs() <= tolerance, nearest, steps)
        earlier, later = steps.ceil().long(), steps.floor().long()
        elapsed = (earlier - steps) * self.step_time

        def read(*results: Tensor) -> Tensor:
            if times.ndim == 0:
                before, after, e = results[0], results[-1], elapsed.to(results[0].device)
            else:
                before, after, e = _gather(torch.stack(results), earlier, later, elapsed)
            between = interpolate(before, after, e)
            return torch.where(e == 0, before.to(between.dtype), between)

        wanted = (int(earlier), int(later)) if times.ndim == 0 else range(kept)
        return tree_map(read, *[self._result(state, index) for index in wanted])

    def _result(self, state: State, index: int) -> Result:
        return self.reducer.compute(ring.slot(state, index))

    def _kept(self, state: State) -> int:
        return min(int(state["observed"]), self.slots)

    def _interpolation(self, name: str | None, time_constant: float | None) -> Interpolate:
        name = self.reducer.interpolation if name is None else name
        step = self.step_time
        tau = float(getattr(self.reducer, "time_constant", math.nan) if time_constant is None else time_constant)
        if name == "expdecay" and not tau > 0:
            raise ArgumentError(f"{self!r} has no time constant of its own: view(time, 'expdecay', time_constant=...), above 0")
        known: dict[str, Interpolate] = {
            "previous": lambda before, after, e: before,
            "nearest": lambda before, after, e: torch.where(e > step / 2, after, before),
            "linear": lambda before, after, e: wide_float(before) + (wide_float(after) - wide_float(before)) * (e / step),
            "expdecay": lambda before, after, e: wide_float(before) * torch.exp(-e / tau),
            "elapsed": lambda before, after, e: wide_float(before) + e,
        }
        if name not in known:
            raise ArgumentError(f"no interpolation {name!r}; there are {list(known)}")
        return known[name]


def _gather(results: Tensor, earlier: Tensor, later: Tensor, elapsed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For each element the results before and after its own times, and the time since the former."""
    shape = results.shape[1:]
    several = earlier.ndim == len(shape) + 1
    try:
        wanted = (*shape, earlier.shape[-1]) if several else shape
        earlier, later, elapsed = (part.expand(wanted).to(results.device) for part in (earlier, later, elapsed))
    except RuntimeError:
        raise ArgumentError(
            f"times of shape {tuple(earlier.shape)} do not fit results of shape {tuple(shape)}: they must broadcast to it, or have "
            "one axis more, at the end"
        ) from None
    columns = results.movedim(0, -1)
    if several:
        return columns.gather(-1, earlier), columns.gather(-1, later), elapsed
    before, after = (columns.gather(-1, index.unsqueeze(-1)).squeeze(-1) for index in (earlier, later))
    return before, after, elapsed


def history_of(reducer: Reducer) -> History:
    """The reducer itself, if it keeps a history.

    Raises:
        NoHistoryError: it keeps none.
    """
    if isinstance(reducer, History):
        return reducer
    raise NoHistoryError(f"{reducer!r} keeps no history: wrap it, History({reducer!r}, step_time=1.0, duration=...)")
