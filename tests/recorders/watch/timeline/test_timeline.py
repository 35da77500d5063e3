"""Timeline: what goes in comes out, whole, in order, also after a fork, from threads, and from another process."""

from __future__ import annotations

import math
import os
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paths import ROOT

from recorders.errors import CorruptRecordingError, NotARecordingError, SchemaError, SelectionError, StorageError, TickError
from recorders.watch.timeline import Row, Timeline

ODD_NAMES = [
    "",
    "a/b",
    "../up",
    "/root",
    "nul\0inside",
    "two\nlines",
    "x" * 300,
    "Name",
    "name",
    "\u00e9",
    "e\u0301",
    "'; DROP TABLE ticks",
]


def test_many_series_are_read_together_as_one_by_one() -> None:
    with Timeline() as timeline:
        for tick in range(6):
            names = range(tick % 2, 40, 1 + tick % 3)  # ticks of several layouts
            timeline.append(tick, {f"layer.{n}": {"x": tick + n, "y": math.nan if n == 3 else -1.0} for n in names})
        keys = [(name, statistic) for name in [*timeline] for statistic in ("x", "y")]
        for some in (keys, keys[::5], keys[:1]):
            one_by_one = {key: timeline.series(*key) for key in some}
            assert repr(timeline.courses([*some, ("layer.0", "z"), ("none", "x")])) == repr(one_by_one)
        assert timeline.courses([]) == {}


def test_series_and_rows_come_back_in_order() -> None:
    with Timeline() as timeline:
        timeline.append(2, {"b": {"mean": 1.0, "std": 0.5}, "a": {"mean": 3}})
        timeline.append(1, {"a": {"mean": torch.tensor(7, dtype=torch.int32), "max": torch.tensor([2.5], dtype=torch.bfloat16)}})
        assert timeline.ticks() == [1, 2]
        assert len(timeline) == 2 == len(timeline.ticks())
        assert [*timeline] == ["b", "a"]
        assert timeline.statistics("a") == ["mean", "max"]
        assert timeline.series("a", "mean") == ([1, 2], [7.0, 3.0])
        assert timeline.at(2) == {"b": {"mean": 1.0, "std": 0.5}, "a": {"mean": 3.0}}
        assert timeline.select() == [
            Row(2, "b", "mean", 1.0),
            Row(2, "b", "std", 0.5),
            Row(1, "a", "mean", 7.0),
            Row(2, "a", "mean", 3.0),
            Row(1, "a", "max", 2.5),
        ]


@settings(max_examples=30)
@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"])),
        st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), st.floats(), max_size=3),
        max_size=5,
    )
)
def test_any_float_under_any_name_round_trips(rows: dict[str, dict[str, float]]) -> None:
    with Timeline() as timeline:
        timeline.append(0, rows)
        back = timeline.at(0)
        for name, statistics in rows.items():
            for statistic, value in statistics.items():
                got = back[name][statistic]
                assert got == value or (math.isnan(got) and math.isnan(value))
        assert sum(map(len, back.values())) == sum(map(len, rows.values()))


def test_odd_names_and_non_finite_values_survive_the_file(tmp_path: Path) -> None:
    values = [math.nan, math.inf, -math.inf, 5e-324, 1.7976931348623157e308, 0.1]
    with Timeline(tmp_path / "run.db") as timeline:
        timeline.append(0, {name: {"v": value} for name, value in zip(ODD_NAMES, values * 2, strict=True)})
    with Timeline(tmp_path / "run.db") as timeline:
        assert [*timeline] == ODD_NAMES
        assert [str(timeline.series(name, "v")[1][0]) for name in ODD_NAMES] == [str(value) for value in values * 2]


def test_a_file_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    with Timeline(path) as timeline:
        timeline.append(0, {"loss": {"mean": 2.0}})
        timeline.note("how", "first")
        timeline.note("how", "then")
    with Timeline(str(path)) as timeline:
        timeline.append(1, {"loss": {"mean": 1.0}, "new": {"mean": 5.0}})
        assert timeline.series("loss", "mean") == ([0, 1], [2.0, 1.0])
        assert timeline.series("new", "mean") == ([1], [5.0])
        assert timeline.notes() == {"how": "then"}
    assert [file.name for file in tmp_path.iterdir()] == ["run.db"]


def test_notes_are_written_with_a_tick_or_not_at_all(tmp_path: Path) -> None:
    with Timeline(tmp_path / "run.db") as timeline:
        timeline.append(0, {"loss": {"mean": 2.0}}, notes={"how": "first", "why": "so"})
        with pytest.raises(TickError, match=r"forget\(0\)"):
            timeline.append(0, {"loss": {"mean": 2.0}}, notes={"how": "then"})
        with pytest.raises(TypeError, match="notes are strings"):
            timeline.append(1, {"loss": {"mean": 2.0}}, notes={"how": 1})  # type: ignore[dict-item]
    with Timeline(tmp_path / "run.db") as timeline:
        assert (timeline.ticks(), timeline.notes(), timeline.verify()) == ([0], {"how": "first", "why": "so"}, {})


def test_a_tick_is_never_overwritten_but_may_be_forgotten() -> None:
    with Timeline() as timeline:
        for tick in range(4):
            timeline.append(tick, {"loss": {"mean": float(tick)}})
        with pytest.raises(TickError, match=r"forget\(2\)"):
            timeline.append(2, {"loss": {"mean": 9.0}})
        assert timeline.series("loss", "mean")[1] == [0.0, 1.0, 2.0, 3.0]
        assert timeline.forget(2) == 2
        timeline.append(2, {"loss": {"mean": 9.0}})
        assert timeline.series("loss", "mean") == ([0, 1, 2], [0.0, 1.0, 9.0])


def test_a_tick_without_values_is_a_tick() -> None:
    with Timeline() as timeline:
        timeline.append(0, {})
        timeline.append(1, {"never ran": {}})
        assert timeline.ticks() == [0, 1]
        assert timeline.at(0) == {}
        assert [*timeline] == []


@pytest.mark.parametrize("value", [torch.ones(2), torch.ones(()) * 1j, "1.0", None, [1.0]])
def test_what_is_no_number_is_refused_and_nothing_is_written(value: object) -> None:
    with Timeline() as timeline:
        with pytest.raises(TypeError, match="'mean' of 'loss'"):
            timeline.append(0, {"fine": {"mean": 1.0}, "loss": {"mean": value}})  # type: ignore[dict-item]
        assert timeline.ticks() == []


def test_what_is_refused_is_told_by_its_name() -> None:
    with Timeline() as timeline:
        with pytest.raises(TypeError, match=r"'loss' has no statistics but 0\.5: give a mapping, such as \{'value': 0\.5\}"):
            timeline.append(0, {"loss": 0.5})  # type: ignore[dict-item]
        with pytest.raises(StorageError, match=r"the tensor 'histogram' cannot be stored: .* is a meta tensor"):
            timeline.append(0, {}, tensors={"histogram": torch.empty(2, device="meta")})
        assert timeline.ticks() == []


def test_names_that_cannot_be_stored_are_refused_and_nothing_is_written() -> None:
    with Timeline() as timeline:
        with pytest.raises(TypeError, match="strings"):
            timeline.append(0, {3: {"mean": 1.0}})  # type: ignore[dict-item]
        with pytest.raises(StorageError, match="surrogates"):
            timeline.append(0, {"fine": {"mean": 1.0}, "\ud800": {"mean": 1.0}})
        assert timeline.ticks() == []
        assert [*timeline] == []
        timeline.append(0, {"fine": {"mean": 1.0}})


@pytest.mark.parametrize("tick", [1.0, "1", True, None, 2**63])
def test_ticks_are_whole_numbers(tick: object) -> None:
    with Timeline() as timeline, pytest.raises(TickError, match="whole number"):
        timeline.append(tick, {})  # type: ignore[arg-type]


def test_unknown_names_list_the_known_ones() -> None:
    with Timeline() as timeline:
        timeline.append(0, {"loss": {"mean": 1.0}})
        with pytest.raises(SelectionError, match=r"'los'.*\['loss'\]"):
            timeline.series("los", "mean")
        with pytest.raises(SelectionError, match=r"'median'.*\['mean'\]"):
            timeline.series("loss", "median")
        with pytest.raises(SelectionError, match=r"no tick 5.*\[0\]"):
            timeline.at(5)


def test_foreign_files_are_left_as_they_were(tmp_path: Path) -> None:
    text, other = tmp_path / "notes.txt", tmp_path / "other.db"
    text.write_text("not a database, and longer than the header of one " * 4)
    db = sqlite3.connect(other)
    db.execute("CREATE TABLE mine (x)")
    db.commit()
    db.close()
    for path in (text, other):
        before = path.read_bytes()
        with pytest.raises(NotARecordingError, match=path.name):
            Timeline(path)
        assert path.read_bytes() == before
    assert sorted(file.name for file in tmp_path.iterdir()) == ["notes.txt", "other.db"]


def altered(path: Path, *statements: str) -> Path:
    with Timeline(path) as timeline:
        for tick in range(50):
            timeline.append(tick, {f"layer{i}": {"mean": float(i)} for i in range(40)})
    db = sqlite3.connect(path)
    for statement in statements:
        db.execute(statement)
    db.commit()
    db.close()
    return path


def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match="schema 3"):
        Timeline(altered(tmp_path / "run.db", "PRAGMA user_version = 3"))


@pytest.mark.parametrize(
    "statement",
    [
        "DROP TABLE tensors",
        "CREATE TRIGGER t AFTER INSERT ON ticks BEGIN DELETE FROM series; END",
        "PRAGMA user_version = 0",
    ],
)
def test_other_tables_than_ours_are_refused(tmp_path: Path, statement: str) -> None:
    with pytest.raises(CorruptRecordingError, match=r"run\.db"):
        Timeline(altered(tmp_path / "run.db", statement))


def test_paths_that_cannot_be_opened(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing" / "run.db", ""):
        with pytest.raises(StorageError):
            Timeline(path)


def test_a_tick_is_one_row_in_one_transaction(tmp_path: Path) -> None:
    said: list[str] = []
    with Timeline(tmp_path / "run.db") as timeline:
        timeline.append(0, {"loss": {"mean": 1.0}})
        with timeline._connection.reading() as db:
            db.set_trace_callback(said.append)
        said.clear()
        timeline.append(1, {"loss": {"mean": 1.0, "max": 2.0}, "new": {"mean": 0.0}}, 10, notes={"how": "so"})
    assert [each.partition(" (")[0][:17] for each in said if each.startswith(("BEGIN", "COMMIT", "INSERT INTO ticks"))] == [
        "BEGIN IMMEDIATE",
        "INSERT INTO ticks",
        "COMMIT",
    ]


def test_closed_is_closed(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "run.db")
    timeline.close()
    timeline.close()
    with pytest.raises(StorageError, match="closed"):
        timeline.append(0, {})


def test_threads_share_a_timeline(tmp_path: Path) -> None:
    with Timeline(tmp_path / "run.db") as timeline:

        def work(start: int) -> None:
            for tick in range(start, 80, 4):
                timeline.append(tick, {f"layer{tick % 7}": {"mean": float(tick)}, "all": {"mean": float(tick)}})

        threads = [threading.Thread(target=work, args=(start,)) for start in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert timeline.series("all", "mean") == (list(range(80)), [float(tick) for tick in range(80)])
        assert len(timeline.select()) == 160


def test_many_may_create_one_file_at_once(tmp_path: Path) -> None:
    """Connections of their own stand for processes; none may take a file that is half made for another program's."""
    failures: list[Exception] = []

    def work(path: Path, worker: int, start: threading.Barrier) -> None:
        start.wait()
        try:
            with Timeline(path) as timeline:
                timeline.append(worker, {"loss": {"mean": 1.0}})
        except Exception as error:
            failures.append(error)

    for attempt in range(8):
        start = threading.Barrier(6)
        path = tmp_path / f"run{attempt}.db"
        threads = [threading.Thread(target=work, args=(path, worker, start)) for worker in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        with Timeline(path) as timeline:
            assert timeline.ticks() == list(range(6))


def test_two_timelines_write_one_file(tmp_path: Path) -> None:
    """Two connections stand for two processes: each meets series the other has made."""
    with Timeline(tmp_path / "run.db") as one, Timeline(tmp_path / "run.db") as two:
        for tick in range(10):
            writer = (one, two)[tick % 2]
            writer.append(tick, {"loss": {"mean": float(tick)}, f"layer{tick // 3}": {"mean": 1.0}})
        assert one.series("loss", "mean") == two.series("loss", "mean") == (list(range(10)), [float(tick) for tick in range(10)])
        with pytest.raises(TickError):
            one.append(9, {})


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_writes_on_its_own_connection(tmp_path: Path) -> None:
    """In a process of its own, because pytest's has threads."""
    script = """
import os, sys
from recorders.watch.timeline import Timeline
timeline, memory = Timeline(sys.argv[1]), Timeline()
timeline.append(0, {"loss": {"mean": 0.0}}), memory.append(0, {"loss": {"mean": 0.0}})
child = os.fork()
if child == 0:
    timeline.append(1, {"loss": {"mean": 1.0}})
    memory.append(1, {"loss": {"mean": 1.0}})
    os._exit(0 if memory.ticks() == [0, 1] else 1)
assert os.waitpid(child, 0)[1] == 0
timeline.append(2, {"loss": {"mean": 2.0}})
assert timeline.series("loss", "mean") == ([0, 1, 2], [0.0, 1.0, 2.0])
assert memory.ticks() == [0]
"""
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "run.db")], check=True, timeout=300, cwd=ROOT)


def test_another_process_reads_while_it_is_written(tmp_path: Path) -> None:
    """The reader uses plain sqlite3 and the view, as any other program would."""
    path = tmp_path / "run.db"
    script = "import sqlite3, sys; print(sqlite3.connect(sys.argv[1]).execute('SELECT * FROM timeline ORDER BY tick').fetchall())"
    with Timeline(path) as timeline:
        for tick in range(2):
            timeline.append(tick, {"loss": {"mean": tick + 0.5}})
            seen = subprocess.run(
                [sys.executable, "-c", script, str(path)], check=True, timeout=300, capture_output=True, text=True
            )
            assert eval(seen.stdout) == [(past, "loss", "mean", past + 0.5) for past in range(tick + 1)]


def test_the_rows_of_many_names_are_read_together(monkeypatch: pytest.MonkeyPatch) -> None:
    with Timeline() as timeline:
        timeline.append(0, {f"name {number}": {"mean": float(number), "max": 1.0} for number in range(1200)})
        timeline.append(1, {"name 3": {"mean": 9.0}})
        asked, courses = [], Timeline.courses
        monkeypatch.setattr(Timeline, "courses", lambda self, keys: (asked.append(1), courses(self, keys))[1])
        rows = [*timeline.rows_shown()[1]]
        assert (len(rows), len(asked)) == (1200, 3)
        assert [row[:2] + row[3:] for row in map(tuple, rows[3])] == [("name 3", "mean", "2", "9"), ("name 3", "max", "1", "1")]
