"""Paths that people type: a leading "~" is the home folder everywhere, and a part of a recording is told from a recording."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from recorders import (
    CallMonitor,
    Recorder,
    Recording,
    Stream,
    StreamDataset,
    Subrecording,
    Timeline,
    load,
    merge,
    overview,
    repair,
    save,
    verify,
)
from recorders.cli import main as cli
from recorders.errors import NotARecordingError, StorageError
from recorders.streams.files import StreamFiles
from recorders.watch.visualizers.html import Run, write_report
from reducers import Summary

pytest.importorskip("rich")

RECORDING = Recording({"loss": Subrecording(Summary(), {"": Summary().update({}, torch.ones(2))}, 1, monitor="CallMonitor")})


def test_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    save(RECORDING, "~/run")
    assert load("~/run").compute() == merge(["~/run"]).compute() == RECORDING.compute()
    assert verify("~/run") == repair("~/run", "~/repaired") == {}
    Timeline("~/timeline").append(0, {"loss": {"mean": 1.0}})
    with Stream("~/stream") as stream:
        stream.put("x", torch.ones(2, 3))
    assert len(StreamDataset("~/stream")) == 2
    write_report("~/report.html", "~/run")
    assert cli(["merge", "~/run", "~/repaired", "--to=~/merged"]) == 0
    found = {path.name for path in tmp_path.iterdir()}
    assert found >= {"run", "repaired", "timeline", "stream", "report.html", "merged"}
    assert "~" not in os.listdir()


def test_what_is_merged_is_found_after_the_program_went_to_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save(RECORDING, "one")
    save(RECORDING, "two", layout="packed")
    merged = merge(["one", "two"])
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert merged["loss"].peek()["count"] == 4


@pytest.mark.parametrize("path", [b"run", 5, None, ["run"]])
def test_what_is_no_path_is_told_as_such(path: Any) -> None:
    for call in (load, verify, Stream, StreamFiles, lambda path: save(RECORDING, path), lambda path: merge([path])):
        with pytest.raises(TypeError, match=r"path"):
            call(path)
    with pytest.raises(TypeError, match=r"a path is a text or a pathlib\.Path; got b'run'"):
        save(RECORDING, b"run")  # type: ignore[arg-type]


def test_a_path_in_the_place_of_a_recording_is_told_as_such(tmp_path: Path) -> None:
    recorder = Recorder(loss=CallMonitor(Summary())).push("loss", 1.0)
    for call in (RECORDING.merge, recorder.merge, overview):
        for path in ("run", tmp_path):
            with pytest.raises(TypeError, match=r"of a path give recorders\.load\(path\)"):
                call(path)  # type: ignore[operator]


def test_links_to_nothing_and_folders_in_the_place_of_files(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("nothing")
    with pytest.raises(NotARecordingError, match="link is a link to nothing"):
        save(RECORDING, tmp_path / "link")
    (tmp_path / "run" / "manifest.json").mkdir(parents=True)
    opened = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    with pytest.raises(StorageError, match=r"manifest\.json is not a regular file"):
        load(tmp_path / "run")
    assert not opened or len(os.listdir("/proc/self/fd")) == opened


@pytest.mark.parametrize("pattern", ["generation-*", "generation-*/*", "manifest.json"])
def test_parts_of_a_recording(tmp_path: Path, pattern: str, capsys: pytest.CaptureFixture[str]) -> None:
    root = save(RECORDING, tmp_path / "run")
    (inner,) = root.glob(pattern)
    told = re.escape(f"{inner} is part of the recording {root}: load that")
    for read in (load, verify, lambda path: merge([path]), Run.of):
        with pytest.raises(NotARecordingError, match=told):
            read(inner)
    assert cli(["show", str(inner)]) == 1
    assert re.search(told, capsys.readouterr().err)
    with pytest.raises(NotARecordingError, match="holds no manifest"):
        load(root / ".lock")
