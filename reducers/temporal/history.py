"""History: past results of a reducer, with interpolation in time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from reducers.core.constants import is_number
from reducers.core.reducer import MAX_SIZE, Reducer, check_reducer
from reducers.core.states import require_state, to_device, tree_map
from reducers.errors import ArgumentError, NoHistoryError
from reducers.state import Nonfinite, Result, State
from reducers.temporal import ring
from reducers.temporal.interpolation import Extrapolation, Interpolation, checked, extrapolated, gathered, interpolated


@dataclass(frozen=True)
class History(Reducer):
    """A reducer that keeps its results of the last `duration`, one per observation.

    The results are those at 0 (the newest), `step_time`, 2 `step_time` and so on before the newest: `ceil(duration / step_time)`
    results, one more if `inclusive`, and at least one.

    The state stores the inner state of each of these results (`slots` of them), so that histories of consecutive parts merge
    exactly. The cost of an observation does not depend on their number. If they are big they take up to twice the memory, for free
    slots, which are not saved.

    Args:
        reducer: the inner reducer; its state must keep its shape, so not `Collect`. `Last()` records the observations themselves.
        step_time: time between observations; all times have the same unit.
        duration: maximum age of the results that are kept.
        inclusive: whether the result of age exactly `duration` is kept too.

    Returns:
        The result of the inner reducer over all observations, as without a history.

    Raises:
        ReducerTypeError: `reducer` is not a reducer instance.
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
            if not is_number(value) or not low <= value < math.inf:
                raise ArgumentError(f"History takes a finite {name} {'from 0 up' if not low else 'above 0'} and got {value!r}")
        if not self.duration / self.step_time < MAX_SIZE:
            raise ArgumentError(
                f"History keeps at most {MAX_SIZE} results: duration={self.duration!r} is too long for step_time={self.step_time!r}"
            )
        inner = getattr(self.reducer, "step_time", self.step_time)
        if inner != self.step_time:
            raise ArgumentError(f"History has step_time={self.step_time!r}, and its reducer has {inner!r}: give both the same")

    @property
    def slots(self) -> int:
        """The number of results that are kept."""
        # rounding may make 0.3 / 0.1 slightly larger than 3
        return max(math.ceil(self.duration / self.step_time * (1 - 1e-12)) + self.inclusive, 1)

    def update(self, state: State, *xs: Tensor) -> State:
        if xs and isinstance(xs[0], Tensor) and xs[0].numel() == 0:
            return state
        updated = self.reducer.update(ring.slot(state, 0) if state else {}, *xs)
        if not updated:
            return state
        return ring.push(self, to_device(state, next(iter(updated.values())).device), updated, self.slots)

    def merge(self, a: State, b: State) -> State:
        if not a or not b:
            return a or b
        b = to_device(b, a["observed"].device)
        newest = ring.slot(a, 0)
        later = [self.reducer.merge(newest, ring.slot(b, index)) for index in range(self.slots)]
        return ring.join(self, a, ring.stack(self, later, b["observed"]), self.slots)

    def _check(self, state: State) -> None:
        ring.check_ring(self, self.reducer, state, self.slots)

    def compute(self, state: State) -> Result:
        require_state(self, state)
        return self._result(state, 0)

    def nonfinite(self, state: State) -> Nonfinite | None:
        """Return how many elements were left out of the newest result, which is that of all observations."""
        return self.reducer.nonfinite(ring.slot(state, 0)) if state else None

    def latest(self, state: State) -> Result:
        """Return the newest result, the one at time 0."""
        return self.compute(state)

    def dump(self, state: State) -> Result:
        """Return all results, newest first, stacked along a new first axis.

        Synchronises the device, to read the number of results.

        Raises:
            EmptyStateError: there are no results.
        """
        require_state(self, state)
        results = [self._result(state, index) for index in range(self._kept(state))]
        return tree_map(lambda *parts: torch.stack(parts), *results)

    def view(
        self,
        state: State,
        time: float | Tensor,
        interpolation: Interpolation | None = None,
        *,
        tolerance: float = 1e-7,
        time_constant: float | Tensor | None = None,
        extrapolation: Extrapolation | None = None,
    ) -> Result:
        """Return the result at a time before the newest, interpolated between two steps.

        Synchronises the device, to read the number of results.

        Args:
            time: age relative to the newest result, in the unit of `step_time`: a number for all elements; a tensor that
                broadcasts to the result, with one time per element; or a tensor with one more axis at the end, with several
                times per element.
            interpolation: the value between two results, at a time `e` after the earlier one. "previous": the earlier; "next":
                the later; "nearest": the later if it is nearer, else the earlier; "linear": linear interpolation; "expdecay":
                `earlier * exp(-e / time_constant)`; "elapsed": `earlier + e`; or a function `f(earlier, later, e, step_time)` of
                tensors of the shape that is returned. The default depends on the reducer: "linear" for `Mean` and `EMA`,
                "expdecay" for traces, "elapsed" for `TimeSince`, "previous" for all others.
            tolerance: a time within this distance of a result counts as the time of that result.
            time_constant: for "expdecay", a number or one per element; by default that of the reducer.
            extrapolation: the value at times older than the oldest result so far, or newer than the newest: a number; "nearest",
                the nearest result; or a function `f(nearest, e)`, at a time `e` after that result, negative before it. By default
                such times are an error.

        Returns:
            The result in its own shape, with a last axis for several times; in its own dtype for "previous", "next" and "nearest",
            in that of a function's result, else in float64 or complex128.

        Raises:
            EmptyStateError: `state` is empty.
            ArgumentError: the time is NaN, outside the results without an extrapolation, or has the wrong shape; or the
                interpolation or extrapolation is unknown or has no time constant.
        """
        require_state(self, state)
        how = self.reducer.interpolation if interpolation is None else interpolation
        inner = getattr(self.reducer, "time_constant", None) if time_constant is None else time_constant
        tau = checked(self, how, extrapolation, inner)
        last = self._kept(state) - 1
        times = torch.as_tensor(time, dtype=torch.float64, device="cpu").cpu()
        steps = times / self.step_time
        nearest = steps.round().clamp(0, last)
        steps = torch.where((nearest * self.step_time - times).abs() <= tolerance, nearest, steps)
        inside = steps.clamp(0, last)
        if not torch.equal(steps, inside) and (extrapolation is None or steps.isnan().any()):
            low, high = times.aminmax()
            span = f"{low.item():g}" if low == high else f"{low.item():g} to {high.item():g}"
            raise ArgumentError(
                f"{self!r} was asked for time {span}; its {last + 1} results so far reach from 0 (the newest) to "
                f"{last * self.step_time:g}: ask for another time, keep a longer duration, or give an extrapolation"
            )
        earlier, later = inside.ceil().long(), inside.floor().long()
        elapsed, since = (earlier - inside) * self.step_time, (inside - steps) * self.step_time

        def read(*results: Tensor) -> Tensor:
            shape, device = results[0].shape, results[0].device
            several = times.ndim == len(shape) + 1
            wanted = (*shape, times.shape[-1]) if several else shape
            try:
                index, next_index, e, outside = (part.to(device).expand(wanted) for part in (earlier, later, elapsed, since))
            except RuntimeError:
                raise ArgumentError(
                    f"times of shape {tuple(times.shape)} do not fit results of shape {tuple(shape)}: they must broadcast to it, "
                    "or have one more axis at the end"
                ) from None
            if times.ndim == 0:
                before, after = results[0], results[-1]
            else:
                before, after = gathered(torch.stack(results), index), gathered(torch.stack(results), next_index)
            value = interpolated(how, before, after, e, self.step_time, tau.unsqueeze(-1) if several and tau.ndim else tau)
            return value if extrapolation is None else extrapolated(extrapolation, value, before, outside)

        indices = (int(earlier), int(later)) if times.ndim == 0 else range(last + 1)
        return tree_map(read, *[self._result(state, index) for index in indices])

    def _result(self, state: State, index: int) -> Result:
        return self.reducer.compute(ring.slot(state, index))

    def _kept(self, state: State) -> int:
        return max(min(int(state["observed"]), self.slots), 1)  # a forged count may be anything


def history_of(reducer: Reducer) -> History:
    """Return `reducer` if it is a `History`.

    Raises:
        NoHistoryError: it is not.
    """
    if isinstance(reducer, History):
        return reducer
    raise NoHistoryError(f"{reducer!r} keeps no history: wrap it, History({reducer!r}, step_time=1.0, duration=...)")
