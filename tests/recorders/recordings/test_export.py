"""Results as data of other libraries: every number, none changed, none left out silently."""

from __future__ import annotations

import importlib.util
import json
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from recorders import CallMonitor, MissingExtraError, Recorder, Recording, RecordingWarning, Subrecording, load
from recorders.recordings.export import as_data, rows
from reducers import Extremes, Last, Mean, Summary

COMPLEX = torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex64)
VALUES: dict[str, Any] = {
    "": 0.1,
    "whole": torch.tensor([[1.5, float("nan")], [float("inf"), -float("inf")]]),
    "group/0.layer": {"hidden": torch.tensor([True, False]), "a.b/c": torch.tensor([2**60, -(2**53) - 1])},
    "complex": COMPLEX.conj(),
    "half": torch.tensor([0.5, 1.0], dtype=torch.bfloat16),
}


def recorder() -> Recorder:
    made = Recorder(start=CallMonitor(Mean()))
    for name, value in VALUES.items():
        made.add(name, CallMonitor(Last())).push(name, value)
    return made


@pytest.fixture(params=["recorder", "recording", "loaded"])
def recorded(request: pytest.FixtureRequest, tmp_path: Any) -> Any:
    made = recorder()
    return {"recorder": lambda: made, "recording": made.snapshot, "loaded": lambda: load(made.save(tmp_path / "run"))}[
        request.param
    ]()


@pytest.mark.parametrize("backend", ["pandas", "polars"])
def test_frames_have_one_number_in_each_row(recorded: Any, backend: Any) -> None:
    library = pytest.importorskip(backend)
    with pytest.warns(RecordingWarning, match=r"'group/0.layer': integers of 'its result' beyond 2\*\*53"):
        frame = recorded.to_frame(backend)
    assert isinstance(frame, library.DataFrame)
    assert list(frame.columns) == ["name", "leaf", "statistic", "index", "index_1", "value"]
    assert [str(frame[name].dtype) for name in ("index", "index_1")] == ["Int64", "Int64"]
    filled = frame.astype(object).where(frame.notna(), None) if backend == "pandas" else frame
    rows = [tuple(row) for row in (filled.itertuples(index=False) if backend == "pandas" else filled.iter_rows())]
    assert rows[0] == ("", "", "", None, None, 0.1)
    assert [row[3:] for row in rows if row[0] == "whole" and row[5] == 1.5] == [(0, 0, 1.5)]
    assert sum(row[0] == "whole" for row in rows) == 4
    assert [row[1:] for row in rows if row[1] == "hidden"] == [("hidden", "", 0, None, 1.0), ("hidden", "", 1, None, 0.0)]
    assert [row[2:] for row in rows if row[0] == "complex"] == [
        ("real", 0, None, 1.0),
        ("real", 1, None, 3.0),
        ("imag", 0, None, -2.0),
        ("imag", 1, None, 1.0),
    ]
    assert {row[0] for row in rows} == {"", "whole", "group/0.layer", "complex", "half"}


def test_frames_take_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    polars = pytest.importorskip("polars")
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "pandas" else found(name, *rest))
    made = Recorder(loss=CallMonitor(Mean())).push("loss", 0.5)
    assert isinstance(made.to_frame(), polars.DataFrame)
    assert made.to_frame().write_csv() == 'name,leaf,statistic,index,value\nloss,"","",,0.5\n'
    with pytest.raises(ValueError, match="choose 'pandas' or 'polars'"):
        made.to_frame("arrow")  # type: ignore[arg-type]
    monkeypatch.setitem(__import__("sys").modules, "xarray", None)
    with pytest.raises(MissingExtraError, match=r"torch-recorders\[xarray\]"):
        made.to_xarray()


@pytest.mark.parametrize("backend", ["pandas", "polars"])
def test_nothing_recorded_is_an_empty_frame_of_the_same_columns(backend: Any) -> None:
    pytest.importorskip(backend)
    for empty in (Recording({}), Recorder(loss=CallMonitor(Mean()))):
        frame = empty.to_frame(backend)
        assert (frame.shape, frame.columns[0]) == ((0, 5), "name")
        assert [str(kind).lower() for kind in frame.dtypes][-1] == "float64"
    assert (Recording({}).to_numpy(), len(Recording({}).to_xarray().children)) == ({}, 0)
    assert json.loads(Recording({}).to_json())["subrecorders"] == {}


def test_arrays_are_exact_and_their_own(recorded: Any) -> None:
    found = recorded.to_numpy()
    assert found["group/0.layer"]["a\\.b/c"][""].tolist() == [2**60, -(2**53) - 1]
    assert found["group/0.layer"]["hidden"][""].dtype == np.bool_
    assert found["complex"][""][""].tolist() == COMPLEX.conj().tolist()
    assert (found["half"][""][""].dtype, found["half"][""][""].tolist()) == (np.float32, [0.5, 1.0])
    assert found["start"] == {}
    found["whole"][""][""][:] = 0
    assert recorded["whole"].peek()[0, 0] == 1.5


def test_json_is_strict_and_exact(recorded: Any) -> None:
    def refused(text: str) -> None:
        raise AssertionError(text)

    data = json.loads(recorded.to_json(), parse_constant=refused)
    parts = data["subrecorders"]
    assert parts["whole"]["results"] == {"": {"": [[1.5, "nan"], ["inf", "-inf"]]}}
    assert 2**60 in parts["group/0.layer"]["results"]["a\\.b/c"][""]
    assert parts["complex"]["results"][""][""] == {"real": [1.0, 3.0], "imag": [-2.0, 1.0]}
    assert (parts["start"]["observations"], parts["start"]["results"], parts["start"]["monitor"]) == (0, {}, "CallMonitor")
    assert (data["kind"], data["step"], parts[""]["results"][""][""]) == ("recording", 0, 0.1)


def test_xarray_has_a_node_for_each_name(recorded: Any) -> None:
    pytest.importorskip("xarray")
    tree = recorded.to_xarray()
    node = tree["group/0.layer"]
    assert sorted(node.data_vars) == ["a\\.b|c:value", "hidden:value"]
    assert node["hidden:value"].dims == ("axis0_2",)
    assert (node.attrs["monitor"], node.attrs["observations"], node.attrs["attr"]) == ("CallMonitor", 1, "")
    assert float(tree["value"]) == 0.1
    assert tree["whole"]["value"].shape == (2, 2)
    assert (tree["whole"]["value"][:, 0] - tree["whole"]["value"][0, 0]).dims == ("axis0_2",)


def test_a_statistic_with_the_name_of_another_subrecorder_is_told(recorded: Any) -> None:
    pytest.importorskip("xarray")
    part = Recorder(loss=CallMonitor(Extremes())).push("loss", 1.0)["loss"].snapshot()
    with pytest.raises(ValueError, match=r"'max' is a statistic of '\(net\)' and the name of a subrecorder.* to_numpy"):
        Recording({"": part, "max": part}).to_xarray()
    with pytest.raises(ValueError, match=r"'min' is a statistic of 'out' and the name of a subrecorder.* to_numpy"):
        Recording({"out": part, "out/min/deep": part}).to_xarray()


def test_statistics_of_nested_results_have_paths() -> None:
    made = Recorder(loss=CallMonitor(Extremes())).push("loss", 1.0)
    made.apply(lambda result: {"deep": result, "count": 3, "text": "x"})
    with pytest.warns(RecordingWarning, match="'loss': its result 'text' is a str, and is left out"):
        assert list(made.to_numpy()["loss"][""]) == ["deep.min", "deep.max", "count"]


def test_frames_agree_with_results() -> None:
    pandas = pytest.importorskip("pandas")
    made = Recorder(a=CallMonitor(Summary("b c -> c"))).push("a", torch.randn(8, 3, generator=torch.Generator().manual_seed(0)))
    frame = made.to_frame("pandas")
    table = frame.pivot(index="index", columns="statistic", values="value")
    assert isinstance(table, pandas.DataFrame)
    for statistic, x in made["a"].peek().items():
        assert table[statistic].tolist() == x.double().tolist()


def test_what_was_loaded_without_its_reducer_is_exported() -> None:
    part = Subrecording(None, saved_results={"": {"mean": torch.tensor(2.0), "top": torch.zeros(0, 3)}}, samples=3)
    found = Recording({"x": part}).to_numpy()["x"][""]
    assert (found["mean"], found["top"].shape) == (2.0, (0, 3))


def test_places_of_a_result_that_takes_several_blocks() -> None:
    x = torch.arange(3 * 2 * 40_000.0).reshape(3, 2, 40_000)
    found = list(rows(Recording({"x": Subrecording(None, {}, 1, saved_results={"": x})})))
    assert [value for *_, value in found] == list(range(x.numel()))
    places = [place for *_, place, _ in found]
    assert [places[at] for at in (0, 1, 40_000, 99_999, 100_000, 160_000, -1)] == [
        *("0,0,0", "0,0,1", "0,1,0", "1,0,19999", "1,0,20000", "2,0,0", "2,1,39999")
    ]
    assert len({*places}) == x.numel()


def test_integers_that_a_frame_rounds_are_told_from_the_first_one_on() -> None:
    pytest.importorskip("pandas")
    for dtype, value, rounds in [
        (torch.int64, 2**53, False),
        (torch.int64, 2**53 + 1, True),
        (torch.int64, -(2**53) - 1, True),
        (torch.uint64, 2**53, False),
        (torch.uint64, 2**63 + 1, True),
    ]:
        monitor = CallMonitor(Last())
        monitor.push(torch.tensor(value, dtype=dtype))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            monitor.to_frame("pandas")
        assert [one.category for one in caught] == [RecordingWarning] * rounds


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8, torch.uint16, torch.uint32, torch.uint64])
def test_narrow_and_unsigned_dtypes_are_data_too(dtype: torch.dtype) -> None:
    x = torch.arange(100).to(dtype)
    found = Recorder(x=CallMonitor(Last())).push("x", x)
    assert json.loads(found.to_json())["subrecorders"]["x"]["results"][""][""] == x.tolist()
    shown = as_data(found, 64)["subrecorders"]["x"]["results"][""][""]
    assert shown == {"shape": [100], "min": 0, "max": max(x.tolist())}
