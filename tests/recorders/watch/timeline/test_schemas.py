"""A timeline that this version wrote is read, and continued, by every later version that reads schema 1."""

from __future__ import annotations

import math
import shutil
import sqlite3
from pathlib import Path

import torch
from paths import ROOT

from recorders.watch.timeline import Timeline

GOLDEN = ROOT / "tests" / "fixtures" / "timeline" / "timeline.db"
STEPS = {1: 10, 2: 20, 3: 30, 4: 40}


def check(timeline: Timeline) -> None:
    assert timeline.ticks() == [0, 1, 2, 3, 4]
    assert timeline.steps() == STEPS
    assert [*timeline] == ["Norm/0", "Norm/1", "Norm/2", "Norm/3", "Loss/train", "\u00e9/[x]"]
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


def test_the_golden_file_is_read_without_a_change(tmp_path: Path) -> None:
    shutil.copy(GOLDEN, tmp_path / "run.db")
    before = state(tmp_path)
    with Timeline(tmp_path / "run.db", read_only=True) as timeline:
        check(timeline)
    assert state(tmp_path) == before


def test_the_golden_file_is_continued(tmp_path: Path) -> None:
    path = Path(shutil.copy(GOLDEN, tmp_path / "run.db"))
    with Timeline(path) as timeline:
        check(timeline)
        timeline.append(5, {"Norm/0": {"mean": 9.0}}, 50)
    with Timeline(path) as timeline:
        assert timeline.series("Norm/0", "mean")[1][-1] == 9.0
        assert timeline.forget(5) == 1
        check(timeline)
    db = sqlite3.connect(path)
    assert db.execute("PRAGMA user_version").fetchone() == (1,)
    assert db.execute("PRAGMA journal_mode").fetchone() == ("delete",)
    db.close()
    assert [each.name for each in tmp_path.iterdir()] == ["run.db"]


def test_tensors_of_the_golden_file() -> None:
    with Timeline(GOLDEN, read_only=True) as timeline:
        assert timeline.tensors() == {"histogram": [0, 1, 2], "complex": [0, 1, 2]}
        assert timeline.tensor("histogram", 2).equal(torch.arange(6).reshape(2, 3) + 2)
        assert timeline.tensor("complex", 0).equal(torch.tensor([1 + 2j]))
