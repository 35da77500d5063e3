"""Numbers in recipes that ask for huge sizes cost nothing, and states are checked without a line in the reducer."""

from __future__ import annotations

import copy
import json
import re
import sys
import tracemalloc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import pytest
import torch
import torch._dynamo  # PyTorch imports it in the first dispatch mode, by more calls than are allowed here
from cases import CASES, FLOATS
from laws import run
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import reducers
from reducers import ArgumentError, EmptyStateError, RecipeError, Reducer, ReducerError, State, StateError, Statistic, from_recipe
from reducers.core.fields import Add, Field
from reducers.core.reducer import registry

BOMBS: list[Any] = [
    *(10**9, 10**12, 2**31 - 1, -1, 0, True, 10**400, -(10**18), 1e300, 1e-300, None, "1e9", {}, [], [[1.0, 2.0], 3.0]),
    *({"float": name} for name in ("nan", "inf", "-inf")),
    [0.0] * 100,
    list(range(1, 100)),
]
MEBIBYTE = 2**20
CALLS = 20_000


class Made(TorchDispatchMode):
    """The bytes of all tensors that operations make, but for views and tensors without memory."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.nbytes += sum(x.untyped_storage().nbytes() for x in tree_leaves(out) if isinstance(x, Tensor) and not x.is_meta)
        return out


@contextmanager
def cheap() -> Iterator[None]:
    """What is done takes less than 1 MiB, in Python and in tensors, and few calls: an endless loop fails instead of hanging."""
    left = CALLS

    def count(frame: object, event: str, arg: object) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise AssertionError(f"more than {CALLS} calls")

    tracemalloc.start()
    sys.setprofile(count)
    try:
        with Made() as made:
            yield
    finally:
        sys.setprofile(None)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < MEBIBYTE
    assert made.nbytes < MEBIBYTE


def parts(reducer: object) -> Iterator[Reducer]:
    """The reducer and all that it is made of."""
    if isinstance(reducer, Reducer):
        yield reducer
        for value in vars(reducer).values():
            yield from parts(value)
    elif isinstance(reducer, tuple):
        for value in reducer:
            yield from parts(value)


def recipes() -> dict[str, dict[str, Any]]:
    """A recipe for each reducer of the table, and for each that one of these is made of, if it can be written as data."""
    found = {}
    for case in CASES:
        for reducer in parts(case.reducer):
            with suppress(RecipeError):
                found[repr(reducer)] = reducers.to_recipe(reducer)
    return found


RECIPES = recipes()


def numeric(cls: Any) -> list[str]:
    """The fields of a class that may hold numbers; found by their annotations."""
    return [field.name for field in fields(cls) if re.search(r"\b(int|float|complex|bool|tuple|Constant)\b", str(field.type))]


def test_every_reducer_without_a_function_is_in_the_table() -> None:
    named = {recipe["type"] for recipe in RECIPES.values()}
    own = {name: cls for name, cls in registry.items() if ":" not in name and name in reducers.__all__}
    missing = {name for name, cls in own.items() if name not in named and cls not in (Reducer, Statistic)}
    assert all(any("Callable" in str(field.type) for field in fields(own[name])) for name in missing), missing
    assert len(named) > 35


@pytest.mark.parametrize("name", RECIPES)
def test_numbers_in_a_recipe_cost_nothing(name: str) -> None:
    recipe = json.loads(json.dumps(RECIPES[name]))
    for field in numeric(registry[recipe["type"]]):
        for bomb in BOMBS:
            built = None
            with cheap(), suppress(RecipeError):
                built = from_recipe({**recipe, field: copy.deepcopy(bomb)})
            if built is None:
                continue
            with cheap():
                assert hash(built) == hash(built)
                repr(built)
                with pytest.raises(EmptyStateError):
                    built.compute({})
                with suppress(ReducerError):
                    built.update({}, torch.empty(0, 3))


@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda index: str(CASES[index]))
def test_a_small_state_with_huge_numbers_in_the_recipe_costs_little(index: int) -> None:
    case = CASES[index]
    try:
        recipe = json.loads(json.dumps(reducers.to_recipe(case.reducer)))
    except RecipeError:
        return
    xs = [torch.ones(4, *case.trailing).to(case.dtypes[0])] * 2
    state = run(case.reducer, xs)
    own = sum(value.nbytes for value in state.values())
    for field in numeric(type(case.reducer)):
        for bomb in BOMBS:
            with suppress(ReducerError), Made() as made:
                built = from_recipe({**recipe, field: copy.deepcopy(bomb)})
                built.check(state)
                built.compute(state)
            assert made.nbytes < 64 * MEBIBYTE + 64 * own, (field, bomb)


def test_the_bomb_of_the_hazards() -> None:
    with cheap():
        histogram = from_recipe({"type": "Histogram", "bins": 100_000_000, "low": 0.0, "high": 1.0})
        repr(histogram)
    with pytest.raises(RecipeError, match=r"Histogram takes bins, an integer from 1 to 2147483647, and got 1000000000000"):
        from_recipe({"type": "Histogram", "bins": 10**12, "low": 0.0, "high": 1.0})
    with pytest.raises(ArgumentError, match="History keeps at most 2147483647 results: duration=1e\\+300"):
        reducers.History(reducers.Mean(), duration=1e300)
    with pytest.raises(RecipeError, match="at most 1000 characters; got 200003"):
        from_recipe({"type": "Mean", "pattern": "b " * 100_000 + "-> "})


@dataclass(frozen=True)
class Above(Statistic):
    """The reducer of docs/adding-a-reducer.md."""

    fields: ClassVar[Mapping[str, Field]] = {"above": Add(), "count": Add()}

    threshold: float = 0.0

    def lift(self, x: Tensor, axes: tuple[int, ...]) -> State:
        return {"above": (x > self.threshold).sum(dim=axes), "count": torch.ones_like(x, dtype=torch.int64).sum(dim=axes)}

    def read(self, state: State) -> Tensor:
        return state["above"].double() / state["count"].double()


def counts(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.int64)


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ({"above": counts(3)}, r"its keys must be \['above', 'count', 'nonfinite'\], and are \['above', 'nonfinite'\]"),
        ({"above": counts(3), "count": counts(3, 1)}, r"'count' must have shape \(3\), and has \(3, 1\)"),
        ({"above": counts(3), "count": counts(1)}, r"'count' must have shape \(3\), and has \(1,\)"),
        ({"above": counts(3), "count": counts(3).double()}, "'count' must have dtype torch.int64, and has torch.float64"),
        ({"above": counts(*(1,) * 65), "count": counts(3)}, "'above' must have at most 64 axes, and has 65"),
    ],
)
def test_a_reducer_of_ten_lines_is_covered(state: State, told: str) -> None:
    with pytest.raises(StateError, match=told):
        Above("b c -> c").check({**state, "nonfinite": counts(3)})


def test_what_is_not_finite_is_counted_for_it() -> None:
    above = Above("b c -> c")
    state = above.update(above.update({}, torch.tensor([[1.0, torch.nan]])), torch.tensor([[torch.inf, 2.0]]))
    assert above.compute(state).tolist() == [1.0, 0.5]
    assert above.nonfinite(state) == (2, None)


def test_a_sound_state_passes() -> None:
    Above("b c -> c").check({})
    Above("b c -> c").check(Above("b c -> c").update({}, torch.ones(2, 3)))
    Above("b ... -> ...").check(Above("b ... -> ...").update({}, torch.ones(2, 3, 4, 5)))


@dataclass(frozen=True)
class Looks(Above):
    """Looks at numbers, which tensors on the meta device lack, so a specimen cannot be made: it is not refused."""

    factors: Any = None

    def lift(self, x: Tensor, axes: tuple[int, ...]) -> State:
        return {**super().lift(x, axes), "peak": torch.full((int(x.max().item()),), 1.0)}


def test_a_reducer_that_looks_at_numbers_is_not_refused() -> None:
    state = Looks(factors=[]).update({}, torch.full((2, 3), 7.0))
    Looks(factors=[]).check(state)
    with pytest.raises(StateError, match="at most 64 axes"):
        Looks().check({**state, "peak": torch.ones((1,) * 65)})


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_state_of_the_table_passes(case: Any) -> None:
    for dtype in case.dtypes:
        xs = [(torch.arange(float(n * size(case))) % 7).to(dtype).reshape(n, *case.trailing) for n in (6, 6, 6)]
        state = run(case.reducer, xs)
        case.reducer.check(state)
        if case.merges:
            case.reducer.check(case.reducer.merge(state, state))
            case.reducer.check(case.reducer.update(state, xs[0].double() if dtype in FLOATS else xs[0]))


def size(case: Any) -> int:
    return int(torch.Size(case.trailing).numel())
