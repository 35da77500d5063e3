"""PerObservation: the spread, over observations, of a statistic of each observation."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from reducers.combinators.mapped import Postmap
from reducers.core.checks import check_shape
from reducers.core.reducer import Reducer, check_reducer
from reducers.core.states import most_nonfinite, require_state
from reducers.core.statistic import Statistic
from reducers.errors import StateError
from reducers.kernels.waiting import Slots
from reducers.samples.collect import Collect
from reducers.state import Nonfinite, Result, State

_OF = "//"  # between the name of a result and a key of the state of what reduces it; no name of a result has it
_COUNTS = ("nonfinite", "elements")  # of all observations: what `reducer` left out, and of how many, if it says so


@dataclass(frozen=True)
class PerObservation(Reducer):
    """A statistic of each observation, reduced over the observations: such as the variance over batches of the norm of a batch.

    `PerObservation(r, over)` updates `over` with `r.compute(r.update({}, *xs))`. If the result of `reducer` is a mapping, `over`
    reduces each of its tensors by itself. `over` gets a result with a new first axis of size 1, which stands for the observation:
    `Collect()`, the default, lists the results, and `Moments("o c -> c")` keeps the channels of a result of shape `(c,)` apart.

    An observation is what one update gets, such as a batch. So the result depends on how the data is cut into observations.

    Args:
        reducer: the statistic of one observation.
        over: reduces the statistics of all observations; by default lists them.

    Returns:
        the result of `over`; a mapping of such results if `reducer` returns a mapping.

    Raises:
        ReducerTypeError: an argument is not a reducer instance.

    >>> import torch
    >>> from reducers import Mean, Summary
    >>> batches = torch.tensor([1.0, 3.0]), torch.tensor([4.0, 4.0, 4.0, 4.0])
    >>> listed, spread = PerObservation(Mean()), PerObservation(Mean(), Summary())
    >>> states = {}, {}
    >>> for batch in batches:
    ...     states = listed.update(states[0], batch), spread.update(states[1], batch)
    >>> listed.compute(states[0])
    tensor([2., 4.], dtype=torch.float64)
    >>> spread.compute(states[1])["mean"], spread.compute(states[1])["var"]
    (tensor(3., dtype=torch.float64), tensor(2., dtype=torch.float64))
    """

    reducer: Reducer
    over: Reducer = Collect()  # noqa: RUF009  # it is frozen

    def __post_init__(self) -> None:
        check_reducer(self.reducer, "PerObservation")
        check_reducer(self.over, "PerObservation(over=...)")

    @property
    def ordered(self) -> bool:  # type: ignore[override]
        return self.over.ordered

    @property
    def bounded(self) -> bool:  # type: ignore[override]
        return self.over.bounded

    @property
    def batchable(self) -> bool:
        return self.over.batchable or self._inner.batchable

    def update(self, state: State, *xs: Tensor) -> State:
        lifted = self.reducer.update({}, *xs)
        if not lifted:
            return state
        parts = _by_name(state)
        results = _flat(self.reducer.compute(lifted))
        updated = _joined({**parts, **{name: self.over.update(parts.get(name, {}), x[None]) for name, x in results.items()}})
        return {**updated, **_added(state, _counts(self.reducer, lifted))}

    def update_all(self, state: State, xs: Tensor) -> State:
        each = self._each(xs) if xs.numel() and len(xs) > 1 else None
        if each is None:
            return super().update_all(state, xs)
        return self._with_each(state, *each)

    def slots_for(self, x: Tensor) -> Slots | None:
        inner = self._inner
        return inner.slots_for(x) if not isinstance(inner, Statistic) or inner.columns else None

    def update_slots(self, state: State, slots: Any, table: Tensor, first: int, last: int) -> State:
        return self.update_lifted(state, self._inner.lifted_slots(slots, table, first, last))

    def update_lifted(self, state: State, lifted: State) -> State:
        """Return the state after several observations, given what `reducer` lifts of each, stacked along a new first axis."""
        results = self._read_each(lifted)
        if results is None:
            states = [{key: value[index] for key, value in lifted.items()} for index in range(len(next(iter(lifted.values()))))]
            each = [_flat(self.reducer.compute(one)) for one in states]
            results = {name: torch.stack([one[name] for one in each]) for name in each[0]}
        return self._with_each(state, results, _counts(self.reducer, lifted))

    def _with_each(self, state: State, results: Mapping[str, Tensor], counts: State) -> State:
        """Return the state after several observations, given the results of each and their counts."""
        parts = _by_name(state)
        updated = {name: self.over.update_all(parts.get(name, {}), x[:, None]) for name, x in results.items()}
        return {**_joined({**parts, **updated}), **_added(state, counts)}

    def _read_each(self, lifted: State) -> dict[str, Tensor] | None:
        """Return the results of several states, which are stacked along a first axis; None if they are not computed together."""
        each = self.reducer.compute_each(lifted)
        if each is not None:
            return _flat(each)
        with suppress(Exception):  # such as those that depend on values
            return dict(torch.vmap(lambda state: _flat(self.reducer.compute(state)))(lifted))
        return None

    @property
    def _inner(self) -> Reducer:
        """The reducer whose states are those of `reducer`, which may map its results."""
        inner = self.reducer
        while isinstance(inner, Postmap) and inner.looks_inside:
            inner = inner.reducer
        return inner

    def _each(self, xs: Tensor) -> tuple[dict[str, Tensor], State] | None:
        """The results of several observations by name, along a new first axis, and counts; None if names or shapes differ."""
        lifted = self._inner.lift_each(xs)
        if lifted is not None:
            results = self._read_each(lifted)
            if results is not None:
                return results, _counts(self.reducer, lifted)
        states = [self.reducer.update({}, x) for x in xs.unbind()]
        each = [_flat(self.reducer.compute(state)) for state in states]
        shapes = {tuple((name, x.shape, x.dtype) for name, x in results.items()) for results in each}
        if len(shapes) > 1:
            return None
        counts = reduce(_added, (_counts(self.reducer, state) for state in states))
        return {name: torch.stack([results[name] for results in each]) for name in each[0]}, counts

    def merge(self, a: State, b: State) -> State:
        first, second = _by_name(a), _by_name(b)
        merged = _joined({name: self.over.merge(first.get(name, {}), second.get(name, {})) for name in {**first, **second}})
        return {**merged, **_added(a, b)}

    def _check(self, state: State) -> None:
        parts = _by_name(state)
        for key in _COUNTS:
            if key in state:
                check_shape(self, state, key, (), torch.int64)
        for name, part in parts.items():
            self.over.check(part)
            inside = [other for other in parts if other.startswith(f"{name}/")] if name else []
            if inside:
                raise StateError(f"{self!r:.200} has no such state: {name!r:.100} is a result, so {inside[0]!r:.100} cannot be one")

    def compute(self, state: State) -> Result:
        require_state(self, state)
        results: dict[str, Any] = {}
        for name, part in _by_name(state).items():
            *outer, last = name.split("/")
            inside = results
            for step in outer:
                inside = inside.setdefault(step, {})
            inside[last] = self.over.compute(part)
        return results[""] if set(results) == {""} else results

    def nonfinite(self, state: State) -> Nonfinite | None:
        """Return how many elements `reducer` left out; if it leaves out none, how many of its results `over` left out."""
        if "nonfinite" in state:
            return Nonfinite(state["nonfinite"], state.get("elements"))
        return most_nonfinite([self.over.nonfinite(part) for part in _by_name(state).values()])


def _flat(result: Result, prefix: str = "") -> dict[str, Tensor]:
    """The tensors of a result by name; names of nested mappings are joined by `/`."""
    if not isinstance(result, Mapping):
        return {prefix: result}
    return {name: x for key, part in result.items() for name, x in _flat(part, f"{prefix}/{key}" if prefix else key).items()}


def _by_name(state: State) -> dict[str, State]:
    """The states of `over` by the name of the result that they reduce."""
    parts: dict[str, State] = {}
    for key, value in state.items():
        name, of, rest = key.partition(_OF)
        if not of:  # a count
            continue
        parts.setdefault(name, {})[rest] = value
    return parts


def _counts(reducer: Reducer, state: State) -> State:
    """How many elements of one observation, or of several whose states are stacked, were left out."""
    found = reducer.nonfinite(state)
    return {} if found is None else {key: value for key, value in zip(_COUNTS, found, strict=True) if value is not None}


def _added(a: State, b: State) -> State:
    """The counts of two states added."""
    counts = {key: [state[key] for state in (a, b) if key in state] for key in _COUNTS}
    return {key: both[0] + both[1].to(both[0].device) if len(both) > 1 else both[0] for key, both in counts.items() if both}


def _joined(parts: Mapping[str, State]) -> State:
    return {f"{name}{_OF}{key}": value for name, part in parts.items() for key, value in part.items()}
