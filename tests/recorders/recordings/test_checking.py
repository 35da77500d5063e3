"""Forged states: a state that no reducer made is refused by `load`, or all that follows works, or fails by our own errors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cases import CASES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from laws import run
from mutated import mutation, survives
from torch import Tensor

from recorders import Recording, Subrecording, load
from recorders.errors import CorruptRecordingError
from reducers import (
    Covariance,
    GroupBy,
    Last,
    Max,
    Mean,
    PerObservation,
    Product,
    Quantile,
    Reducer,
    State,
    Window,
    to_recipe,
)


def saved(reducer: Reducer, state: State, folder: Path) -> Path:
    """A recording whose file has this state, whatever it is, and the recipe of this reducer."""
    return Recording({"x": Subrecording(None, {"": state}, samples=1, saved_results={}, recipe=to_recipe(reducer))}).save(folder)


def counted(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.int64)


def double(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.float64)


@pytest.mark.parametrize(
    ("reducer", "state", "told"),
    [
        (
            Mean("b c -> c"),
            {"count": counted(60_000), "nonfinite": counted(60_000), "sum": double(60_000, 1)},
            r"'sum' must have shape \(60000\), .* \(60000, 1\)",
        ),
        (
            Mean("b c -> c"),
            {"count": counted(3), "nonfinite": counted(3), "sum": double(1)},
            r"'sum' must have shape \(3\), and has \(1,\)",
        ),
        (Mean(), {"count": counted()}, r"its keys must be \['count', 'nonfinite', 'sum'\], and are \['count'\]"),
        (
            Mean(),
            {"count": double(), "nonfinite": counted(), "sum": double()},
            r"'count' must have dtype torch.int64, and has torch.float64",
        ),
        (
            Mean("... -> ..."),
            {"count": counted(*[1] * 64), "nonfinite": counted(*[1] * 64), "sum": double(*[1] * 64)},
            "it keeps 64 axes",
        ),
        (
            Covariance(),
            {"count": counted(), "nonfinite": counted(), "m2": double(3, 2), "mean": double(3)},
            r"'m2' must .* \(3, 3\)",
        ),
        (
            Window(Mean(), 4),
            {"observed": counted(), "ring/count": counted(4), "ring/nonfinite": counted(4), "ring/sum": double(3)},
            r"'ring/sum' must .* \(4,\)",
        ),
        (Window(Last(), 10**9), {"observed": counted(), "ring/value": double(10**9, 0)}, "must have elements, or short axes"),
        (GroupBy(Mean(), 2), {"count": counted(2), "nonfinite": counted(2), "sum": double(3)}, r"'sum' must have shape \(2,\)"),
        (
            Quantile("b c -> c", q=(0.5,) * 10**5, low=1.0, high=2.0, bits=1),
            {"counts": counted(1000, 7), "min": double(1000), "max": double(1000), "nonfinite": counted(1000)},
            "its result would take 800000000 bytes, more than 64 times the 80000 of the state",
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
    with pytest.raises(
        CorruptRecordingError, match=r"with the reducer that was given, is malformed: .*must be \['count', 'max', 'nonfinite'\]"
    ):
        load(path, reducers=Max())


def test_equal_layouts_are_checked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []
    monkeypatch.setattr(Mean, "check", lambda self, state: checked.append(self))
    states = [run(Mean("b c -> c"), [torch.ones(2, width)]) for width in (3, 3, 5, 3)]
    parts = {str(i): Subrecording(Mean("b c -> c"), {"": state}) for i, state in enumerate(states)}
    load(Recording(parts).save(tmp_path / "run"))
    assert len(checked) == 2


forgeries = given(st.integers(0, len(CASES) - 1), st.lists(mutation, min_size=1, max_size=3))
quiet = {"deadline": None, "suppress_health_check": list(HealthCheck)}


@settings(max_examples=500, **quiet)
@forgeries
def test_a_mutated_state_is_refused_or_harmless(index: int, mutations: list[tuple[str, int, int]]) -> None:
    survives(index, mutations)


@pytest.mark.long
@settings(max_examples=20_000, **quiet)
@forgeries
def test_twenty_thousand_mutated_states(index: int, mutations: list[tuple[str, int, int]]) -> None:
    survives(index, mutations)
