"""All that holds results is asked with the same words: recorders, recordings, monitors, subrecordings and cells."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recorders import CallMonitor, Cell, ForwardMonitor, ParameterMonitor, Recorder, Recording, SelectionError, load
from reducers import Extremes, Last, Mean, PatternError, Summary

A, B = torch.tensor([1.0, 2.0]), torch.tensor([6.0])


def recorder(*batches: Tensor) -> Recorder:
    made = Recorder(loss=CallMonitor(Mean()), never=CallMonitor(Mean()))
    for batch in batches:
        made.push("loss", batch)
    return made


def cell(*batches: Tensor) -> Cell:
    made = Cell(Mean())
    for batch in batches:
        made.push(batch)
    return made


def loaded(folder: Path, *batches: Tensor) -> Recording:
    return load(recorder(*batches).save(folder / str(len(batches))))


NAMED: dict[str, Callable[..., Any]] = {
    "recorder": lambda folder, *batches: recorder(*batches),
    "recording": lambda folder, *batches: recorder(*batches).snapshot(),
    "loaded": loaded,
}
LEAVES: dict[str, Callable[..., Any]] = {
    "monitor": lambda folder, *batches: recorder(*batches)["loss"],
    "subrecording": lambda folder, *batches: recorder(*batches).snapshot()["loss"],
    "loaded": lambda folder, *batches: loaded(folder, *batches)["loss"],
    "cell": lambda folder, *batches: cell(*batches),
}


@pytest.mark.parametrize("kind", LEAVES)
def test_what_has_results_by_leaf_is_a_mapping_of_them(kind: str, tmp_path: Path) -> None:
    one = LEAVES[kind](tmp_path, A, B)
    assert (list(one), list(one.keys()), len(one), "" in one, "weight" in one) == ([""], [""], 1, True, False)
    assert one[""] == one.peek() == one.compute() == one.value() == one.get("") == 3
    assert [*one.values()] == [3]
    assert [*one.items()] == [("", 3)]
    assert one.get("weight") is None
    assert one.get("weight", 5) == 5
    with pytest.raises(SelectionError, match=r"no leaf 'weight'; there are \[''\]"):
        one["weight"]
    assert one.samples == one.snapshot().samples == 2
    assert one
    assert one.snapshot()


@pytest.mark.parametrize("kind", LEAVES)
def test_without_observations_there_is_nothing_in_it(kind: str, tmp_path: Path) -> None:
    one = LEAVES[kind](tmp_path)
    assert (one.peek(), one.compute(), one.samples, len(one), [*one.values()], bool(one)) == (None, None, 0, 0, [], True)
    with pytest.raises(SelectionError, match="nothing was recorded"):
        one[""]
    with pytest.raises(SelectionError, match="recorded nothing"):
        one.value()
    assert one.equals(LEAVES[kind](tmp_path))
    assert not one.equals(LEAVES[kind](tmp_path, A))


@pytest.mark.parametrize("kind", NAMED)
def test_what_has_results_by_name_is_a_mapping_of_what_has_them_by_leaf(kind: str, tmp_path: Path) -> None:
    one = NAMED[kind](tmp_path, A, B)
    assert (list(one.keys()), len(one), "loss" in one, 0 in one, "lost" in one) == (["loss", "never"], 2, True, True, False)
    assert one.peek() == one.compute() == {"loss": torch.tensor(3.0)}
    assert one.value("loss") == one["loss"][""] == 3
    assert [part.peek() for part in one.values()] == [3, None]
    assert [name for name, _ in one.items()] == ["loss", "never"]
    assert one.samples == {"loss": 2, "never": 0}
    assert repr(one.samples) == "{'loss': 2, 'never': 0}"
    assert (one.samples["loss"], one.samples[0], one.samples[-1], "loss" in one.samples, 7 in one.samples) == (2, 2, 0, True, False)
    with pytest.raises(SelectionError, match="did you mean 'loss'"):
        one.samples["lost"]


def test_counts_are_those_of_the_moment() -> None:
    made = recorder(A)
    samples = made.samples
    made.push("loss", B)
    assert samples["loss"] == 2
    with pytest.raises(TypeError):
        samples["loss"] = 3  # type: ignore[index]


@pytest.mark.parametrize("other", LEAVES)
@pytest.mark.parametrize("kind", LEAVES)
def test_leaves_equal_if_the_same_was_recorded(kind: str, other: str, tmp_path: Path) -> None:
    one, two = LEAVES[kind](tmp_path / "one", A, B), LEAVES[other](tmp_path / "two", A, B)
    assert one.equals(two)
    assert two.equals(one)
    assert one.equals(one)
    assert one != two
    assert len({one, two, one}) == 2
    more = LEAVES[other](tmp_path / "more", A, B, torch.tensor([3.0]))  # the mean is the same, of another number of observations
    assert more.peek() == one.peek()
    assert not one.equals(more)
    near = LEAVES[other](tmp_path / "near", A, B * 1.001)
    assert not one.equals(near)
    assert one.equals(near, rtol=0.01)
    assert one.equals(near, atol=0.01)
    assert not one.equals(near, rtol=1e-6)
    assert not one.equals(3.0)
    assert not one.equals(None)


@pytest.mark.parametrize("other", NAMED)
@pytest.mark.parametrize("kind", NAMED)
def test_recordings_equal_if_the_same_was_recorded_under_the_same_names(kind: str, other: str, tmp_path: Path) -> None:
    one, two = NAMED[kind](tmp_path / "one", A, B), NAMED[other](tmp_path / "two", A, B)
    assert one.equals(two)
    assert one != two
    assert len({one, two, one}) == 2
    assert not one.equals(NAMED[other](tmp_path / "less", A))
    assert one.equals(NAMED[other](tmp_path / "near", A, B * 1.001), rtol=0.01)
    assert not one.equals(recorder(A, B).add("more", CallMonitor(Mean())))
    assert not one.equals(one["loss"])


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ([float("nan"), float("inf")], [float("nan"), float("inf")], True),
        ([float("nan")], [1.0], False),
        ([float("inf")], [-float("inf")], False),
        ([[1.0, 2.0]], [1.0, 2.0], False),
        ([], [], True),
        ([1 + 2j], [1 + 2j], True),
        ([1 + 2j], [1 - 2j], False),
        ([True, False], [True, True], False),
        ([2**60 + 1], [2**60 + 1], True),
        ([2**60 + 1], [2**60], False),
    ],
)
def test_numbers_are_compared_by_their_values(one: Any, other: Any, same: bool) -> None:
    def last(values: Any) -> CallMonitor:
        made = CallMonitor(Last())
        made.push(torch.tensor(values))
        return made

    assert last(one).equals(last(other)) is same


def test_statistics_and_shapes_are_compared_and_kinds_are_not() -> None:
    net = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    forward, parameter = ForwardMonitor(Summary(), net), ParameterMonitor(Summary(), "weight", net, when="tick")
    net(torch.eye(2))
    parameter.tick()
    assert forward.equals(forward.snapshot())
    assert forward.equals(parameter)
    one, two = Cell(Extremes()), Cell(Mean())
    for made in (one, two):
        made.push(A)
    assert not one.equals(two)
    assert not two.equals(one)
    one, two = Cell(Mean("b -> b")), Cell(Mean())
    for made in (one, two):
        made.push(torch.ones(2))
    assert not one.equals(two, atol=1.0)


@pytest.mark.parametrize("kind", LEAVES)
def test_leaves_are_handed_over_as_all_is(kind: str, tmp_path: Path) -> None:
    one, whole = LEAVES[kind](tmp_path, A, B), recorder(A, B)
    for backend in ("pandas", "polars"):
        pytest.importorskip(backend)
        frame, all_of_it = one.to_frame(backend), whole.to_frame(backend)
        assert list(frame.columns) == ["leaf", "statistic", "index", "value"] == list(all_of_it.columns)[1:]
        assert frame["value"].to_list() == all_of_it["value"].to_list() == [3.0]
    assert one.to_numpy() == whole.to_numpy()["loss"] == {"": {"": 3.0}}
    data = json.loads(one.to_json())
    assert (data["kind"], data["observations"], data["results"]) == ("subrecording", 2, {"": {"": 3.0}})
    pytest.importorskip("xarray")
    assert float(one.to_xarray()["value"]) == float(whole.to_xarray()["loss"]["value"]) == 3.0
    assert one.to_xarray().attrs["observations"] == 2


def test_a_cell_counts_what_was_pushed_merged_saved_and_loaded() -> None:
    one, other = cell(A, B), cell(A)
    one.merge(other)
    assert one.samples == 3
    fresh = Cell(Mean())
    fresh.load_state_dict(one.state_dict())
    assert fresh.samples == copy.deepcopy(one).samples == one.double().samples == 3
    assert fresh.equals(one)
    with pytest.raises(PatternError, match="pattern"):
        failing = Cell(Mean("b c -> c"))
        failing.push(torch.ones(2, 3))
        failing.push(torch.ones(2))
    assert failing.samples == 1
    one.clear()
    assert (one.samples, one.peek()) == (0, None)
