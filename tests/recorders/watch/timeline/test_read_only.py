"""Reading changes nothing: no file is created or changed beside a timeline, whatever a writer left there."""

from __future__ import annotations

import os
import shutil
import sqlite3
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath

import pytest

from recorders import replay
from recorders.cli import main
from recorders.errors import CorruptRecordingError, RecordingNotFoundError, RecordingWarning, StorageError
from recorders.watch.charts import Chart, ChartView, keep_charts
from recorders.watch.timeline import Timeline
from recorders.watch.timeline.connection import as_sqlite_uri


def state(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    with Timeline(folder / "run.db") as timeline:
        for tick in range(4):
            timeline.append(tick, {"Loss/train": {"mean": 1.0 - tick}})
        keep_charts(timeline, [ChartView(Chart("Loss", ("loss",), ranges=None), timeline, ("train",))])
    return folder / "run.db"


@pytest.mark.parametrize(
    "command",
    [
        ["show"],
        ["show", "--at", "2"],
        ["check"],
        ["diff", "{path}"],
        ["show", "--follow", "--until", "3"],
        ["report", "-o", "html:{out}"],
        ["export", "--to", "csv:{out}"],
    ],
)
def test_commands_that_read_change_nothing(command: list[str], path: Path, tmp_path: Path) -> None:
    before = state(path.parent)
    verb, *rest = (part.format(path=path, out=tmp_path / "out") for part in command)
    assert main([verb, str(path), *rest]) == 0
    replay(path, "text")
    assert state(path.parent) == before


def test_nothing_can_be_written(path: Path) -> None:
    before = state(path.parent)
    with Timeline(path, read_only=True) as timeline:
        for write in (
            lambda: timeline.append(9, {}),
            lambda: timeline.forget(0),
            lambda: timeline.note("a", "b"),
            lambda: timeline.compact(2, 2),
        ):
            with pytest.raises(StorageError, match="read_only=True"):
                write()
        with timeline._connection.reading() as db, pytest.raises(sqlite3.OperationalError, match="readonly"):
            db.execute("DELETE FROM ticks")
        assert timeline.ticks() == [0, 1, 2, 3]
    assert state(path.parent) == before


def test_a_file_that_is_not_there_is_not_created(tmp_path: Path) -> None:
    for missing in (tmp_path / "none.db", ":memory:"):
        with pytest.raises(RecordingNotFoundError, match="no timeline"):
            Timeline(missing, read_only=True)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_says_what_to_do(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda where, mode: where != str(path.parent))
    with pytest.raises(StorageError, match=r"Timeline\(path, read_only=True\)"):
        Timeline(path)
    assert Timeline(path, read_only=True).ticks() == [0, 1, 2, 3]


def test_a_reader_follows_a_writer(path: Path) -> None:
    with Timeline(path, read_only=True) as reader, Timeline(path) as writer:
        for tick in range(4, 8):
            writer.append(tick, {"Loss/train": {"mean": 1.0 - tick}, f"new{tick}": {"mean": 0.0}})
            assert reader.series("Loss/train", "mean") == (list(range(tick + 1)), [1.0 - each for each in range(tick + 1)])
            assert [*reader][-1] == f"new{tick}"


def test_what_a_killed_writer_left_is_undone_in_a_copy(path: Path, tmp_path: Path) -> None:
    """A journal is copied in the middle of a transaction, as a kill would leave it."""
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("PRAGMA cache_spill = 1")
    db.execute("PRAGMA cache_size = 1")
    db.execute("BEGIN IMMEDIATE")
    db.execute("UPDATE ticks SET step = 77")
    db.execute(
        "CREATE TABLE filler AS WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n WHERE x < 9999) SELECT x FROM n"
    )
    killed = tmp_path / "killed"
    killed.mkdir()
    for end in ("", "-journal"):
        shutil.copy(f"{path}{end}", killed / f"run.db{end}")
    db.execute("ROLLBACK")
    db.close()
    before = state(killed)
    assert before["run.db"][0] != path.read_bytes()
    with Timeline(killed / "run.db", read_only=True) as timeline:
        assert timeline.series("Loss/train", "mean")[1] == [1.0, 0.0, -1.0, -2.0]
    assert state(killed) == before
    with Timeline(killed / "run.db") as timeline:
        assert timeline.series("Loss/train", "mean")[1] == [1.0, 0.0, -1.0, -2.0]


def test_a_write_ahead_log_of_another_program_is_read_in_a_copy_and_ended(path: Path) -> None:
    db = sqlite3.connect(path)
    assert db.execute("PRAGMA journal_mode = WAL").fetchone() == ("wal",)
    db.close()
    before = state(path.parent)
    with Timeline(path, read_only=True) as timeline:
        assert timeline.ticks() == [0, 1, 2, 3]
    assert state(path.parent) == before
    with Timeline(path) as timeline:
        timeline.append(4, {})
        assert timeline.ticks() == [0, 1, 2, 3, 4]
    assert [each.name for each in path.parent.iterdir()] == ["run.db"]


def damaged(path: Path, *statements: str) -> None:
    db = sqlite3.connect(path)
    for statement in statements:
        db.execute(statement)
    db.commit()
    db.close()


def test_damage_is_named_and_the_rest_is_read(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damaged(path, "UPDATE ticks SET numbers = '{\"1\":0.5}' WHERE tick = 2")
    with Timeline(path, read_only=True) as timeline:
        for read in (
            lambda: timeline.at(2),
            lambda: timeline.series("Loss/train", "mean"),
            timeline.select,
            timeline.items,
            timeline.to_json,
        ):
            with pytest.raises(CorruptRecordingError, match=r"run\.db is damaged at tick 2.*damaged='skip'"):
                read()
        assert timeline.at(1) == {"Loss/train": {"mean": 0.0}}
        assert list(timeline.verify()) == [2]
    with Timeline(path, read_only=True, damaged="skip") as timeline, pytest.warns(RecordingWarning, match="tick 2") as told:
        assert timeline.series("Loss/train", "mean") == ([0, 1, 3], [1.0, 0.0, -2.0])
        assert timeline.at(2) == {}
        assert list(timeline.damaged) == [2]
    assert len(told) == 1
    assert main(["check", str(path)]) == 1
    assert "tick 2" in capsys.readouterr().err
    with pytest.raises(ValueError, match="'skip'"):
        Timeline(path, damaged="ignore")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE ticks SET numbers = '{}' WHERE tick = 1",
        "UPDATE ticks SET numbers = numbers || ' ' WHERE tick = 1",
        "DELETE FROM ticks WHERE tick = 3",
        "UPDATE ticks SET step = 7",
        "UPDATE series SET name = 'Loss/eval'",
        "UPDATE series SET name = x'ff'",
        "UPDATE ticks SET numbers = x'00' WHERE tick = 3",
        "UPDATE ticks SET tick = 9 WHERE tick = 3",
        "UPDATE notes SET text = '[]'",
        "DELETE FROM notes",
        "DELETE FROM series",
        "DELETE FROM totals",
    ],
)
def test_no_row_can_be_changed_or_removed_unnoticed(path: Path, statement: str) -> None:
    damaged(path, statement)
    with Timeline(path, read_only=True) as timeline:
        with pytest.raises(CorruptRecordingError):
            timeline.steps(), timeline.select(), timeline.notes()
        assert timeline.verify()


@pytest.mark.parametrize(
    ("path", "uri"),
    [
        (PureWindowsPath(r"\\server\share\a run.db"), "file:////server/share/a%20run.db"),
        (PureWindowsPath(r"\\?\UNC\server\share\x.db"), "file:////server/share/x.db"),
        (PureWindowsPath(r"\\?\C:\runs\x.db"), "file:///C:/runs/x.db"),
        (PureWindowsPath(r"C:\runs\50%?#.db"), "file:///C:/runs/50%25%3F%23.db"),
        (PurePosixPath("/runs/\u00e9 %41.db"), "file:///runs/%C3%A9%20%2541.db"),
    ],
    ids=str,
)
def test_sqlite_is_given_no_host(path: PurePath, uri: str) -> None:
    assert as_sqlite_uri(path) == uri
