"""Saving onto another net's recording is refused; one of the same net is replaced, also with more or fewer subrecorders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from recorders import CallMonitor, ForwardMonitor, Recorder, Recording, Subrecording, load, merge
from recorders.errors import RecordingExistsError
from recorders.recordings.storage.save import save_in_background
from reducers import Mean

OLD = ("", "fc1", "fc2", "fc3")


def recording(*names: str) -> Recording:
    return Recording({name: Subrecording(Mean(), {"": Mean().update({}, torch.ones(2))}, samples=1) for name in names})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return recording(*OLD).save(tmp_path / "run")


@pytest.mark.parametrize("names", [OLD, OLD[1:], ("fc2",), (*OLD, "fc4", "loss"), ("fc3", "fc1", "head")])
@pytest.mark.parametrize("layout", ["folder", "packed"])
def test_the_same_net_is_replaced(run: Path, names: tuple[str, ...], layout: Any) -> None:
    again = recording(*names)
    again.save(run, layout=layout)
    assert list(load(run)) == list(names)
    again.save(run, layout=layout)
    assert list(load(run)) == list(names)


@pytest.mark.parametrize("names", [("", "conv1", "conv2"), ("conv1", "conv2", "conv3", "conv4", "fc1"), ()])
@pytest.mark.parametrize("layout", ["folder", "packed"])
def test_another_net_is_refused_and_nothing_changes(run: Path, names: tuple[str, ...], layout: Any) -> None:
    manifest = (run / "manifest.json").read_bytes()
    with pytest.raises(RecordingExistsError, match=r"run holds the recording of another net, of 4 subrecorders .*overwrite=True"):
        recording(*names).save(run, layout=layout)
    assert (run / "manifest.json").read_bytes() == manifest
    assert len(list(run.glob("generation-*"))) == 1
    recording(*names).save(run, layout=layout, overwrite=True)
    assert list(load(run)) == list(names)


def test_the_error_names_both_and_how_many_are_common(run: Path) -> None:
    reason = r"such as \['fc1', 'fc2', 'fc3'\]; only 1 of the 3 to be saved, such as \['conv1', 'conv2'\], are in it: save into"
    with pytest.raises(FileExistsError, match=reason):
        recording("", "conv1", "conv2").save(run)


def in_background(made: Recorder, path: Path, **options: Any) -> object:
    return made.save_in_background(path, **options).result()


def of_recording(made: Recorder, path: Path, **options: Any) -> object:
    return save_in_background(made.snapshot(), path, **options).result()


@pytest.mark.parametrize("save", [Recorder.save, in_background, of_recording])
def test_all_ways_to_save_ask(run: Path, save: Callable[..., object]) -> None:
    net = nn.Sequential(nn.Linear(2, 2))
    made = Recorder(out=ForwardMonitor(Mean()), loss=CallMonitor(Mean())).modules(net)
    with pytest.raises(RecordingExistsError):
        save(made, run)
    save(made, run, overwrite=True)
    assert list(load(run)) == list(made)


def test_merged_recordings_that_are_read_from_files_ask_too(run: Path, tmp_path: Path) -> None:
    others = [recording("conv").save(tmp_path / f"{number}") for number in range(2)]
    with pytest.raises(RecordingExistsError):
        merge(others).save(run)
    assert list(load(merge(others).save(others[0]))) == ["conv"]


def test_a_recording_at_a_url_is_kept_too() -> None:
    pytest.importorskip("fsspec")
    recording(*OLD).save("memory://runs/overwrite")
    recording(*OLD, "more").save("memory://runs/overwrite")
    with pytest.raises(RecordingExistsError, match=r"^memory://runs/overwrite holds the recording of another net"):
        recording("conv").save("memory://runs/overwrite")
    recording("conv").save("memory://runs/overwrite", overwrite=True)
    assert list(load("memory://runs/overwrite")) == ["conv"]


def test_what_cannot_be_read_is_replaced_as_before(tmp_path: Path) -> None:
    root = recording(*OLD).save(tmp_path)
    (root / "manifest.json").write_bytes(b"damaged")
    assert list(load(recording("conv").save(root))) == ["conv"]


def test_an_empty_recording_of_either_layout_is_replaced(tmp_path: Path) -> None:
    for layout in ("folder", "packed"):
        Recording({}).save(tmp_path / layout, layout=layout)  # type: ignore[arg-type]
        assert list(load(recording("a").save(tmp_path / layout))) == ["a"]
