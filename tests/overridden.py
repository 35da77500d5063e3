"""Subclasses of every reducer of the table, each with one method of its own, and what these must find: for the law of overrides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from functools import reduce
from typing import Any

import torch
from cases import CASES, Case
from laws import flat
from torch import Tensor

from reducers import Reducer, State, Statistic
from reducers.core.states import tree_map

WHOLE = ("update", "lift", "observe", "swept")
"""Methods that see observations, which they mark."""

MERGING = ("join", "merge")
READING = ("read", "compute")


def marked(x: Tensor) -> Tensor:
    """What an override changes: every element, whatever else it is given with."""
    return ~x if x.dtype is torch.bool else x + 1


def _marked_state(state: State) -> State:
    return {key: marked(value) for key, value in state.items()}


def one_more(value: Any) -> Any:
    """A result, changed."""
    return tree_map(marked, value)


def _overrides(reducer: Reducer, method: str) -> dict[str, Any]:
    """The method, as a class with the bases of `reducer` may override it."""
    base: Any = type(reducer)
    plain = getattr(base, method)

    def update(self: Any, state: State, *xs: Tensor) -> State:
        return plain(self, state, *map(marked, xs))

    def update_all(self: Any, state: State, xs: Tensor) -> State:
        return plain(self, state, marked(xs))

    def update_masked(self: Any, state: State, x: Tensor, mask: Tensor) -> State:
        return plain(self, state, marked(x), mask)

    def lift(self: Any, x: Tensor, *others: Any) -> State:
        return plain(self, marked(x), *others)

    def lift_masked(self: Any, x: Tensor, mask: Tensor, axes: tuple[int, ...]) -> State:
        return plain(self, marked(x), mask, axes)

    def swept(self: Any, x: Tensor, axes: tuple[int, ...], state: State) -> State:
        return self.merge(state, reducer.observe(marked(x), axes))  # type: ignore[attr-defined]

    def join(self: Any, a: State, b: State) -> State:
        return _marked_state(plain(self, a, b))

    def merge(self: Any, a: State, b: State) -> State:
        return _marked_state(plain(self, a, b)) if a and b else plain(self, a, b)

    def merge_all(self: Any, *states: Any) -> State:
        return _marked_state(plain(self, *states))

    def read(self: Any, state: State) -> Any:
        return one_more(plain(self, state))

    same = {"observe": lift, "compute": read}
    made = (update, update_all, update_masked, lift, lift_masked, swept, join, merge, merge_all, read)
    return {method: same.get(method) or next(one for one in made if one.__name__ == method)}


def overriding(reducer: Reducer, *methods: str) -> Reducer:
    """The same reducer, of a subclass that overrides each method by one that marks what it is given, or what it returns."""
    own = {name: function for method in methods for name, function in _overrides(reducer, method).items()}
    cls: Any = type(f"Own{''.join(methods).title()}{type(reducer).__name__}", (type(reducer),), own)
    return cls.from_fields(**{field.name: getattr(reducer, field.name) for field in fields(reducer)})  # type: ignore[arg-type]


def wanted(reducer: Reducer, method: str, xs: Sequence[Tensor]) -> State:
    """The state after these observations of a reducer with this override, by the definition of its methods alone."""
    if method in WHOLE:
        return reduce(reducer.update, map(marked, xs), {})
    if method in MERGING:
        return reduce(overriding(reducer, method).merge, [reducer.update({}, x) for x in xs])
    return reduce(reducer.update, xs, {})


def rows_of(method: str) -> list[Case]:
    """The cases whose reducers are defined by the method."""
    of_statistics = (*WHOLE[1:], *MERGING, "lift_masked", "read")
    return [case for case in CASES if method not in of_statistics or isinstance(case.reducer, Statistic)]


def observations(case: Case, rows: int, number: int = 3, dtype: torch.dtype | None = None) -> list[Tensor]:
    """Observations that the case takes; `dtype` if it takes that."""
    known = torch.float32 if torch.float32 in case.dtypes else case.dtypes[0]
    dtype = dtype if dtype in case.dtypes else known
    made = torch.Generator().manual_seed(rows)
    if dtype.is_floating_point:
        return [torch.randn(rows, *case.trailing, generator=made, dtype=torch.float64).to(dtype) for _ in range(number)]
    return [torch.randint(0, 40, (rows, *case.trailing), generator=made).to(dtype) for _ in range(number)]


def same_state(found: State, wanted: State, what: str) -> None:
    """Both states stand for the same, up to rounding of float32 sums."""
    left, right = flat(found), flat(wanted)
    assert left.keys() == right.keys(), what
    for key, value in left.items():
        wide = torch.complex128 if value.is_complex() else torch.float64
        torch.testing.assert_close(
            value.to(wide),
            right[key].to(wide),
            rtol=1e-5,
            atol=1e-5,
            equal_nan=True,
            msg=lambda text, k=key: f"{what}, {k}: {text}",
        )
