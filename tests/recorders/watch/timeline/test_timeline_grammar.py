"""A timeline is asked with the words of recordings: a mapping by name, newest values, counts, tables and comparison."""

from __future__ import annotations

import json
import math

import pytest

from recorders import SelectionError, Timeline


def timeline(last: float = 0.5) -> Timeline:
    made = Timeline()
    made.append(0, {"loss": {"mean": 0.9, "max": 1.5}, "b/norm": {"mean": math.nan}}, step=10)
    made.append(3, {"loss": {"mean": last}}, step=40)
    return made


def test_it_is_a_mapping_from_names_to_statistics_over_time() -> None:
    made = timeline()
    courses = {"mean": ([0, 3], [0.9, 0.5]), "max": ([0], [1.5])}
    assert (list(made), repr(made.keys()), len(made), "loss" in made, "max" in made) == (
        ["loss", "b/norm"],
        "['loss', 'b/norm']",
        2,
        True,
        False,
    )
    assert made["loss"] == made.get("loss") == dict(made.items())["loss"] == next(iter(made.values())) == courses
    assert made.get("nothing", 5) == 5
    with pytest.raises(SelectionError, match=r"no 'nothing' in :memory:; there are \['loss', 'b/norm'\]"):
        made["nothing"]
    assert made != timeline()
    assert len({made, made, timeline()}) == 2
    assert Timeline()
    assert (len(Timeline()), Timeline().peek(), Timeline().samples) == (0, {}, {})


def test_the_newest_values_and_how_many_there_are() -> None:
    made = timeline()
    assert made.peek()["loss"] == made.compute()["loss"] == {"mean": 0.5, "max": 1.5}
    assert math.isnan(made.peek()["b/norm"]["mean"])
    assert made.samples == {"loss": 2, "b/norm": 1}
    assert made.value("loss", stat="max") == 1.5
    assert math.isnan(made.value("b/norm"))
    with pytest.raises(SelectionError, match=r"'loss' in :memory: has the statistics \['mean', 'max'\]: give one"):
        made.value("loss")
    with pytest.raises(SelectionError, match="has no stat 'maen': did you mean 'mean'"):
        made.value("loss", stat="maen")


def test_two_are_equal_if_all_numbers_are_close() -> None:
    made = timeline()
    assert made.equals(timeline())
    near = timeline(0.5001)
    assert not made.equals(near)
    assert made.equals(near, rtol=0.01)
    near.append(4, {"loss": {"mean": 0.5}})
    assert not made.equals(near, rtol=0.01)
    assert not made.equals(Timeline())
    assert not made.equals({})


@pytest.mark.parametrize("backend", ["pandas", "polars"])
def test_it_is_handed_over_as_a_frame(backend: str) -> None:
    pytest.importorskip(backend)
    frame = timeline().to_frame(backend, statistics="mean")  # type: ignore[arg-type]
    assert list(frame.columns) == ["tick", "step", "name", "statistic", "value"]
    assert frame["value"].to_list()[:2] == [0.9, 0.5]
    assert frame["step"].to_list() == [10, 40, 10]
    with pytest.raises(ValueError, match="choose 'pandas' or 'polars'"):
        timeline().to_frame("arrow")  # type: ignore[arg-type]


def test_it_is_handed_over_as_json_and_labelled_arrays() -> None:
    data = json.loads(timeline().to_json())
    assert (data["kind"], data["ticks"], data["steps"]) == ("timeline", [0, 3], {"0": 10, "3": 40})
    assert data["series"]["b/norm"] == {"mean": {"ticks": [0], "values": ["nan"]}}
    pytest.importorskip("xarray")
    tree = timeline().to_xarray()
    assert tree["loss"]["mean"].sel(tick=3) == 0.5
    assert math.isnan(tree["loss"]["max"].sel(tick=3))
    assert tree["b/norm"]["mean"].sizes == {"tick": 1}
