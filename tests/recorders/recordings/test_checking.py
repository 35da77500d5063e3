"""Forged states: a state that no reducer made is refused by `load`, or all that follows works, or fails by our own errors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CASES, Case
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from laws import run
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from recorders import RecorderError, Recording, Subrecording, load
from recorders.errors import CorruptRecordingError
from recorders.recordings.checking import Checked
from reducers import (
    Covariance,
    Fold,
    GroupBy,
    History,
    Last,
    Max,
    Mean,
    PerObservation,
    Product,
    Quantile,
    Reducer,
    ReducerError,
    Scan,
    State,
    Window,
    to_recipe,
)

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.uint16,
    torch.float8_e5m2,
]
MEBIBYTE = 2**20


def saved(reducer: Reducer, state: State, folder: Path) -> Path:
    """A recording whose file has this state, whatever it is, and the recipe of this reducer."""
    return Recording({"x": Subrecording(None, {"": state}, samples=1, values={}, recipe=to_recipe(reducer))}).save(folder)


def counted(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.int64)


def double(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.float64)


@pytest.mark.parametrize(
    ("reducer", "state", "told"),
    [
        (
            Mean("b c -> c"),
            {"count": counted(60_000), "sum": double(60_000, 1)},
            r"'sum' must have shape \(60000\), .* \(60000, 1\)",
        ),
        (Mean("b c -> c"), {"count": counted(3), "sum": double(1)}, r"'sum' must have shape \(3\), and has \(1,\)"),
        (Mean(), {"count": counted()}, r"its keys must be \['count', 'sum'\], and are \['count'\]"),
        (Mean(), {"count": double(), "sum": double()}, r"'count' must have dtype torch.int64, and has torch.float64"),
        (Mean("... -> ..."), {"count": counted(*[1] * 64), "sum": double(*[1] * 64)}, "it keeps 64 axes"),
        (
            Covariance(),
            {"count": counted(), "nonfinite": counted(), "m2": double(3, 2), "mean": double(3)},
            r"'m2' must .* \(3, 3\)",
        ),
        (Window(Mean(), 4), {"observed": counted(), "ring/count": counted(4), "ring/sum": double(3)}, r"'ring/sum' must .* \(4,\)"),
        (Window(Last(), 10**9), {"observed": counted(), "ring/value": double(10**9, 0)}, "must have elements, or short axes"),
        (GroupBy(Mean(), 2), {"count": counted(2), "sum": double(3)}, r"'sum' must have shape \(2,\)"),
        (
            Quantile("b c -> c", q=(0.5,) * 10**5, low=1.0, high=2.0, bits=1),
            {"counts": counted(1000, 7), "min": double(1000), "max": double(1000)},
            "its result would take 800000000 bytes, more than 64 times the 72000 of the state",
        ),
        (Product(mean=Mean()), {"other/count": counted()}, "no part 'other'"),
        (PerObservation(Mean(), Last()), {"a//value": double(), "a/b//value": double()}, "'a' is a result, so 'a/b' cannot be one"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_refused_is_named(reducer: Reducer, state: State, told: str, tmp_path: Path) -> None:
    path = saved(reducer, state, tmp_path / "run")
    with pytest.raises(CorruptRecordingError, match=r"00000-x.safetensors \(subrecorder 'x'\) is malformed: .*" + told):
        load(path)


def test_a_reducer_that_is_given_must_fit_the_states(tmp_path: Path) -> None:
    mean = Mean().premap(torch.abs)
    path = Recording({"x": Subrecording(mean, {"": run(mean, [torch.ones(2)])}, samples=1)}).save(tmp_path / "run")
    assert load(path, reducers=mean)["x"].peek().item() == 1.0
    with pytest.raises(CorruptRecordingError, match=r"with the reducer that was given, is malformed: .*must be \['max'\]"):
        load(path, reducers=Max())


def test_equal_layouts_are_checked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []
    monkeypatch.setattr(Mean, "check", lambda self, state: checked.append(self))
    states = [run(Mean("b c -> c"), [torch.ones(2, width)]) for width in (3, 3, 5, 3)]
    parts = {str(i): Subrecording(Mean("b c -> c"), {"": state}) for i, state in enumerate(states)}
    load(Recording(parts).save(tmp_path / "run"))
    assert len(checked) == 2


class Largest(TorchDispatchMode):
    """The most bytes that one operation makes, but for those that make views, or tensors without memory."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [x.untyped_storage().nbytes() for x in tree_leaves(out) if isinstance(x, Tensor) and not x.is_meta]
        self.nbytes = max([self.nbytes, *made])
        return out


def observations(case: Case) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.rand(n, *case.trailing, generator=generator) * 5 - 2).to(case.dtypes[0]) for n in (6, 6, 6)]


@cache
def sound(index: int) -> tuple[State, list[Tensor]]:
    xs = observations(CASES[index])
    return run(CASES[index].reducer, xs), xs


def filled(x: Tensor, number: float) -> Tensor:
    if x.is_floating_point() or x.is_complex():
        return torch.full(x.shape, number, dtype=torch.float64).to(x.dtype)
    return torch.full(x.shape, -1 if number != number else int(max(min(number, 2**62), -(2**62)))).to(x.dtype)


MUTATIONS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "dtype": lambda x, n: (x.real if x.is_complex() else x).to(DTYPES[n % len(DTYPES)]),
    "transposed": lambda x, n: x.movedim(0, -1) if x.ndim else x,
    "flat": lambda x, n: x.reshape(-1),
    "column": lambda x, n: x[..., None],
    "row": lambda x, n: x[None],
    "first": lambda x, n: x[0] if x.ndim and len(x) else x,
    "longer": lambda x, n: x.repeat(*(1,) * (x.ndim - 1), n + 2) if x.ndim else x.repeat(n + 2),
    "shorter": lambda x, n: x[..., : x.shape[-1] // 2] if x.ndim else x,
    "long": lambda x, n: x.new_ones(3000),
    "long column": lambda x, n: x.new_ones(3000, 1),
    "deep": lambda x, n: x.new_ones((1,) * (40, 64, 65, 1000)[n % 4]),
    "empty": lambda x, n: x[..., :0] if x.ndim else x.reshape(1)[:0],
    "huge and empty": lambda x, n: x.new_empty(((10**12, 0), (0, 10**6), (2**16, 0))[n % 3]),
    "numbers": lambda x, n: filled(x, (float("nan"), -1.0, 0.0, 1e300, -1e300)[n % 5]),
}
mutation = st.tuples(st.sampled_from(["drop", "add", "rename", *MUTATIONS]), st.integers(0, 9), st.integers(0, 9))


def mutate(state: State, mutations: list[tuple[str, int, int]]) -> State:
    state = dict(state)
    for kind, place, n in mutations:
        if not state:
            break
        key = list(state)[place % len(state)]
        if kind in {"drop", "rename"}:
            value = state.pop(key)
        if kind in {"add", "rename"}:
            new = (f"{key}/x", "evil", "0", "7", "", "ring/x", "-5", f"{key}x", "correlation/count", "payload")[n]
            state[new] = value if kind == "rename" else state[key].clone()
        if kind in MUTATIONS:
            state[key] = MUTATIONS[kind](state[key], n).contiguous()
    return state


def survives(index: int, mutations: list[tuple[str, int, int]]) -> None:
    """A mutated state is refused, or everything afterwards works, or fails by our errors, in bounded memory."""
    case, (state, xs) = CASES[index], sound(index)
    forged = mutate(state, mutations)
    part = Subrecording(case.reducer, {"": forged}, samples=1)
    own = sum(value.nbytes for value in (*forged.values(), *state.values()))
    limit = max(64 * MEBIBYTE, 64 * own)
    with Largest() as checking:
        try:
            Checked().require("here", part)
        except CorruptRecordingError:
            return
    other = Subrecording(case.reducer, {"": state}, samples=1)
    uses: list[Callable[[], object]] = [
        lambda: part.peek(),
        lambda: repr(part),
        lambda: part.rows_shown(),
        lambda: isinstance(case.reducer, History) and case.reducer.dump(forged),
    ]
    combines: list[Callable[[], object]] = [
        lambda: part.merge(other).peek(),
        lambda: other.merge(part).peek(),
        lambda: part.merge(part).peek(),
        lambda: case.reducer.compute(case.reducer.update(forged, xs[0])),
    ]
    with Largest() as using:
        for use in uses if isinstance(case.reducer, (Fold, Scan)) else [*uses, *combines]:  # their function is the caller's
            with suppress(ReducerError, RecorderError):
                use()
    assert max(checking.nbytes, using.nbytes) <= limit


forgeries = given(st.integers(0, len(CASES) - 1), st.lists(mutation, min_size=1, max_size=3))
quiet = {"deadline": None, "suppress_health_check": list(HealthCheck)}


@settings(max_examples=2000, **quiet)
@forgeries
def test_a_mutated_state_is_refused_or_harmless(index: int, mutations: list[tuple[str, int, int]]) -> None:
    survives(index, mutations)


@pytest.mark.long
@settings(max_examples=20_000, **quiet)
@forgeries
def test_twenty_thousand_mutated_states(index: int, mutations: list[tuple[str, int, int]]) -> None:
    survives(index, mutations)
