"""A timeline at a URL is read as one in a file; nothing can be written there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from recorders import Inspector, lenses
from recorders.cli import main
from recorders.errors import CorruptRecordingError, NotARecordingError, RecordingNotFoundError, StorageError
from recorders.watch.timeline import Timeline

fsspec = pytest.importorskip("fsspec")


@pytest.fixture
def url(tmp_path: Path) -> str:
    with Timeline(tmp_path / "run.db") as timeline:
        for tick in range(3):
            timeline.append(tick, {"Loss/train": {"mean": 1.0 - tick}}, 10 * tick)
    fsspec.filesystem("memory").pipe_file("/runs/run.db", (tmp_path / "run.db").read_bytes())
    return "memory://runs/run.db"


def test_a_timeline_at_a_url_is_read(url: str) -> None:
    with Timeline(url, read_only=True) as timeline:
        assert timeline.path == url
        assert timeline.series("Loss/train", "mean") == ([0, 1, 2], [1.0, 0.0, -1.0])
        assert (timeline.steps(), timeline.verify()) == ({0: 0, 1: 10, 2: 20}, {})
        with pytest.raises(StorageError, match="read_only=True"):
            timeline.append(3, {})


def test_nothing_is_written_at_a_url(url: str) -> None:
    with pytest.raises(StorageError, match=rf"can only be read: Timeline\('{url}', read_only=True\)"):
        Timeline(url)


def test_errors_name_the_url(url: str) -> None:
    store = fsspec.filesystem("memory")
    with pytest.raises(RecordingNotFoundError, match="memory://runs/none"):
        Timeline("memory://runs/none.db", read_only=True)
    for content, error in ((b"", CorruptRecordingError), (b"no database, and longer than a header" * 9, NotARecordingError)):
        store.pipe_file("/runs/other.db", content)
        with pytest.raises(error, match="memory://runs/other"):
            Timeline("memory://runs/other.db", read_only=True)


def test_what_a_kill_left_is_undone_in_the_copy(url: str, tmp_path: Path) -> None:
    store, path = fsspec.filesystem("memory"), tmp_path / "run.db"
    with Timeline(path) as timeline, timeline._connection.writing() as db:
        db.execute("PRAGMA cache_spill = 1")
        db.execute("PRAGMA cache_size = 1")
        db.execute("UPDATE ticks SET step = 77")
        db.execute(
            "CREATE TABLE filler AS WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n WHERE x < 9999) SELECT x FROM n"
        )
        for end in ("", "-journal"):
            store.pipe_file(f"/runs/killed.db{end}", Path(f"{path}{end}").read_bytes())
        db.execute("DROP TABLE filler")
    with Timeline("memory://runs/killed.db", read_only=True) as timeline:
        assert timeline.steps() == {0: 0, 1: 10, 2: 20}


@pytest.mark.parametrize("verb", [["show"], ["check"], ["report", "-o", "{out}"]])
def test_verbs_take_urls_of_timelines(tmp_path: Path, verb: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with Inspector(net, lenses.OutputNorm(), timeline=tmp_path / "run.db") as inspector:
        for _ in inspector.range(3):
            net(torch.ones(1, 2))
    name, *rest = (part.format(out=tmp_path / "page.html") for part in verb)
    assert main([name, (tmp_path / "run.db").as_uri(), *rest]) == 0, capsys.readouterr().err
    assert main(["show", (tmp_path / "run.db").as_uri(), "--follow"]) == 1  # it is as it was when it was fetched
    assert "does not grow" in capsys.readouterr().err
