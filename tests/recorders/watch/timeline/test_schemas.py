"""Timelines that earlier versions wrote are read as they were written, and brought to the present schema whole or not at all."""

from __future__ import annotations

import math
import shutil
import sqlite3
from pathlib import Path

import pytest
import torch
from paths import ROOT

from recorders.errors import CorruptRecordingError, RecorderError
from recorders.watch.timeline import Timeline, file

FIXTURES = ROOT / "tests" / "fixtures" / "timeline"
GOLDEN = {"schema-1.db": {}, "schema-1-with-steps.db": {1: 10, 2: 20, 3: 30, 4: 40}, "schema-2.db": {1: 10, 2: 20, 3: 30, 4: 40}}


def check(timeline: Timeline, steps: dict[int, int]) -> None:
    assert timeline.ticks() == [0, 1, 2, 3, 4]
    assert timeline.steps() == steps
    assert timeline.names() == ["Norm/0", "Norm/1", "Norm/2", "Norm/3", "Loss/train", "\u00e9/[x]"]
    assert timeline.notes() == {"axis": "epoch", "how": "as it was"}
    for i in range(4):
        assert timeline.series(f"Norm/{i}", "mean") == ([0, 1, 2, 3, 4], [tick + i / 8 for tick in range(5)])
        assert timeline.series(f"Norm/{i}", "max")[1] == [-0.1 * tick for tick in range(5)]
    loss = timeline.series("Loss/train", "mean")[1]
    assert [*loss[:2], loss[3], loss[4]] == [1 / 3, 1 / 3, math.inf, 1 / 3]
    assert math.isnan(loss[2])
    assert timeline.at(1)["\u00e9/[x]"] == {"odd 'statistic'": 5e-324}
    assert timeline.verify() == {}


def state(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_files_are_read_without_a_change(name: str, tmp_path: Path) -> None:
    shutil.copy(FIXTURES / name, tmp_path / "run.db")
    before = state(tmp_path)
    with Timeline(tmp_path / "run.db", read_only=True) as timeline:
        check(timeline, GOLDEN[name])
    assert state(tmp_path) == before


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_files_are_continued(name: str, tmp_path: Path) -> None:
    path = Path(shutil.copy(FIXTURES / name, tmp_path / "run.db"))
    with Timeline(path) as timeline:
        check(timeline, GOLDEN[name])
        timeline.append(5, {"Norm/0": {"mean": 9.0}}, 50)
    with Timeline(path) as timeline:
        assert timeline.series("Norm/0", "mean")[1][-1] == 9.0
        assert timeline.forget(5) == 1
        check(timeline, GOLDEN[name])
    db = sqlite3.connect(path)
    assert db.execute("PRAGMA user_version").fetchone() == (2,)
    assert db.execute("PRAGMA journal_mode").fetchone() == ("delete",)
    db.close()
    assert [each.name for each in tmp_path.iterdir()] == ["run.db"]


def test_tensors_of_the_golden_file() -> None:
    with Timeline(FIXTURES / "schema-2.db", read_only=True) as timeline:
        assert timeline.tensors() == {"histogram": [0, 1, 2], "complex": [0, 1, 2]}
        assert timeline.tensor("histogram", 2).equal(torch.arange(6).reshape(2, 3) + 2)
        assert timeline.tensor("complex", 0).equal(torch.tensor([1 + 2j]))


def test_an_upgrade_that_fails_leaves_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(shutil.copy(FIXTURES / "schema-1.db", tmp_path / "run.db"))
    upgrade = file.upgrade

    def broken(db: sqlite3.Connection, where: str) -> None:
        upgrade(db, where)
        raise KeyboardInterrupt

    monkeypatch.setattr(file, "upgrade", broken)
    with pytest.raises(KeyboardInterrupt):
        Timeline(path)
    monkeypatch.undo()
    with Timeline(path) as timeline:
        check(timeline, {})


def test_a_damaged_file_of_an_earlier_schema_is_not_upgraded(tmp_path: Path) -> None:
    path = Path(shutil.copy(FIXTURES / "schema-1.db", tmp_path / "run.db"))
    db = sqlite3.connect(path)
    db.execute("UPDATE samples SET value = x'00' WHERE tick = 3")
    db.commit()
    db.close()
    for read_only in (True, False):
        with pytest.raises(CorruptRecordingError, match="tick 3"):
            Timeline(path, read_only=read_only)
    data = (FIXTURES / "schema-1.db").read_bytes()
    path.write_bytes(data[:8192] + bytes(4096) + data[12288:])
    with pytest.raises(RecorderError):
        Timeline(path, read_only=True)
