"""Timeline: scalars over time in one SQLite file, one row per (tick, name, statistic)."""

from __future__ import annotations

import contextlib
import math
import os
import sqlite3
import threading
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from recorders.errors import CorruptRecordingError, SelectionError, StorageError, TickError
from recorders.watch.timeline_file import as_storage_error, open_file, transaction
from recorders.watch.timeline_rows import TimelineRows, numbers_of

__all__ = ["MEMORY", "Row", "Timeline", "TimelineRows"]

MEMORY = ":memory:"


class Row(NamedTuple):
    """One value of one statistic of one name at one tick."""

    tick: int
    name: str
    statistic: str
    value: float


class Timeline:
    """An append-only table of scalars over time, in one SQLite file.

    Each tick is written in one transaction and is on the disk when `append` returns (write-ahead log, synchronous=FULL): if the
    process is killed, the file holds every appended tick completely. Other processes may read at the same time. Threads may share a
    timeline, and so may forked processes: connections are closed before a fork and opened again in each process when needed.

    Args:
        path: the file, which is created or continued; ":memory:" for a timeline in memory.

    Raises:
        NotARecordingError: the file is something else; it is not changed.
        SchemaError: the file has a newer schema.
        CorruptRecordingError: the file is a damaged timeline.
        StorageError: the file cannot be opened, or a later write fails (disk full, locked by another process).

    >>> with Timeline() as timeline:
    ...     timeline.append(1, {"loss": {"mean": 0.9, "max": 1.5}})
    ...     timeline.append(2, {"loss": {"mean": 0.5}})
    ...     timeline.series("loss", "mean"), timeline.at(1)
    (([1, 2], [0.9, 0.5]), {'loss': {'mean': 0.9, 'max': 1.5}})
    """

    def __init__(self, path: str | os.PathLike[str] = MEMORY) -> None:
        self._connection: sqlite3.Connection | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._ids: dict[tuple[str, str], int] = {}
        self.path = os.fspath(path)
        if not isinstance(self.path, str) or not self.path:
            raise StorageError(f"a timeline needs the path of a file, or {MEMORY!r}; got {path!r}")
        if self.path != MEMORY:
            self.path = os.path.abspath(self.path)
        _timelines.add(self)
        with self._session():
            pass

    def append(self, tick: int, rows: TimelineRows, step: int | None = None) -> None:
        """Writes one tick in one transaction.

        Args:
            tick: a new whole number, such as an epoch.
            rows: numbers, or tensors of one element, by name and by statistic; also NaN and infinities. Tensors are copied to the
                CPU in one transfer for each device and dtype.
            step: the number of optimizer steps that ended before this tick; None if it is not known.

        Raises:
            TickError: the tick exists already (it is never overwritten: `forget` it first), or is not a whole number.
            TypeError: a value is neither a number nor a tensor of one element.
        """
        if isinstance(tick, bool) or not isinstance(tick, int) or not -(2**63) <= tick < 2**63:
            raise TickError(f"a tick is a whole number of at most 64 bits, such as an epoch; got {tick!r}")
        values = numbers_of(rows)
        with self._session() as db:
            with transaction(db):
                if db.execute("SELECT 1 FROM ticks WHERE tick = ?", (tick,)).fetchone():
                    raise TickError(
                        f"tick {tick} is already in {self.path} and is never overwritten; to record it again, for instance after "
                        f"going back to a checkpoint, call forget({tick}) first"
                    )
                fresh = self._new_ids(db, values)
                ids = {**self._ids, **fresh} if fresh else self._ids
                db.execute("INSERT INTO ticks VALUES (?, ?)", (tick, step))
                db.executemany("INSERT INTO samples VALUES (?, ?, ?)", ((tick, ids[key], value) for key, value in values.items()))
            self._ids.update(fresh)

    def forget(self, since: int) -> int:
        """Removes the ticks from `since` on, for a training that goes back to a checkpoint; returns their number."""
        with self._session() as db, transaction(db):
            db.execute("DELETE FROM samples WHERE tick >= ?", (since,))
            return db.execute("DELETE FROM ticks WHERE tick >= ?", (since,)).rowcount

    def ticks(self) -> list[int]:
        """All ticks, ascending."""
        return [tick for (tick,) in self._query("SELECT tick FROM ticks ORDER BY tick")]

    def steps(self) -> dict[int, int]:
        """The number of optimizer steps that ended before each tick; ticks of which it is not known are left out."""
        found = self._query("SELECT tick, step FROM ticks WHERE step IS NOT NULL ORDER BY tick")
        if wrong := [step for _, step in found if not isinstance(step, int) or step < 0]:
            raise CorruptRecordingError(f"{self.path} holds {wrong[0]!r:.40} instead of a number of steps")
        return dict(found)

    def names(self) -> list[str]:
        """All names, in the order in which they were first appended."""
        return [self._text(name) for (name,) in self._query("SELECT name FROM series GROUP BY name ORDER BY min(id)")]

    def statistics(self, name: str) -> list[str]:
        """The statistics of one name, in the order in which they were first appended.

        Raises:
            SelectionError: there is no such name; lists those that exist.
        """
        found = [self._text(row[0]) for row in self._query("SELECT statistic FROM series WHERE name = ? ORDER BY id", name)]
        if not found:
            raise SelectionError(f"no {name!r} in {self.path}; there are {_listed(self.names())}")
        return found

    def series(self, name: str, statistic: str) -> tuple[list[int], list[float]]:
        """One statistic over time: its ticks, ascending, and its values.

        Raises:
            SelectionError: there is no such name or statistic; lists those that exist.
        """
        if statistic not in (known := self.statistics(name)):
            raise SelectionError(f"{name!r} in {self.path} has no statistic {statistic!r}; there are {_listed(known)}")
        rows = self._query(
            "SELECT ticks.tick, samples.value FROM ticks CROSS JOIN samples ON samples.tick = ticks.tick AND samples.series = "
            "(SELECT id FROM series WHERE name = ? AND statistic = ?) ORDER BY ticks.tick",
            name,
            statistic,
        )
        return [tick for tick, _ in rows], [self._number(value) for _, value in rows]

    def at(self, tick: int) -> dict[str, dict[str, float]]:
        """All values at one tick, by name and by statistic.

        Raises:
            SelectionError: there is no such tick.
        """
        found: dict[str, dict[str, float]] = {}
        for row in self._rows(tick):
            found.setdefault(row.name, {})[row.statistic] = row.value
        if not found and tick not in (ticks := self.ticks()):
            raise SelectionError(f"no tick {tick!r} in {self.path}; there are {_listed(ticks)}")
        return found

    def first_above(self, statistic: str, bound: float) -> dict[str, int]:
        """For each name whose `statistic` was ever above a bound, the first such tick."""
        found = self._query(
            "SELECT series.name, min(ticks.tick) FROM ticks CROSS JOIN series CROSS JOIN samples "
            "ON samples.tick = ticks.tick AND samples.series = series.id "
            "WHERE series.statistic = ? AND samples.value > ? GROUP BY series.id",
            statistic,
            bound,
        )
        return {self._text(name): tick for name, tick in found}

    def ids(self) -> dict[tuple[str, str], int]:
        """The ids of all series by name and statistic, as in `values`."""
        found = self._query("SELECT name, statistic, id FROM series ORDER BY id")
        return {(self._text(name), self._text(statistic)): number for name, statistic, number in found}

    def values(self, tick: int) -> tuple[list[int], list[float]]:
        """All values at one tick: the ids of their series, ascending, and the values. For thousands of them faster than `at`."""
        rows = self._query("SELECT series, value FROM samples WHERE tick = ? ORDER BY series", tick)
        values = [value for _, value in rows]
        if set(map(type, values)) != {float}:
            values = [self._number(value) for value in values]
        return [number for number, _ in rows], values

    def note(self, key: str, text: str) -> None:
        """Writes a text into the file, such as how to draw the numbers; replaces an earlier text with the same key."""
        with self._session() as db, transaction(db):
            db.execute("INSERT INTO notes VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET text = excluded.text", (key, text))

    def notes(self) -> dict[str, str]:
        """All texts by key."""
        return {self._text(key): self._text(text) for key, text in self._query("SELECT key, text FROM notes ORDER BY key")}

    def close(self) -> None:
        """Closes the file; a timeline in memory is lost. Closing twice is harmless."""
        with self._lock:
            self._closed = True
            self._disconnect()

    def __iter__(self) -> Iterator[Row]:
        """All rows, by tick; ticks appended during the iteration may be missed, but no tick is incomplete."""
        for tick in self.ticks():
            yield from self._rows(tick)

    def __len__(self) -> int:
        """The number of ticks."""
        return int(self._query("SELECT count(*) FROM ticks")[0][0])

    def __bool__(self) -> bool:
        return True

    def __enter__(self) -> Timeline:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_connection", None) is not None:
            self.close()

    def __repr__(self) -> str:
        return f"Timeline({self.path!r})"

    def _rows(self, tick: int) -> list[Row]:
        found = self._query(
            "SELECT name, statistic, value FROM samples JOIN series ON series.id = samples.series "
            "WHERE tick = ? ORDER BY samples.series",
            tick,
        )
        return [Row(tick, self._text(name), self._text(statistic), self._number(value)) for name, statistic, value in found]

    def _query(self, sql: str, *parameters: str | float) -> list[tuple[Any, ...]]:
        with self._session() as db:
            return db.execute(sql, parameters).fetchall()

    def _new_ids(self, db: sqlite3.Connection, keys: Mapping[tuple[str, str], object]) -> dict[tuple[str, str], int]:
        """Ids of the series that this process does not know; creates those that no other process has created."""
        unknown = [key for key in keys if key not in self._ids]
        db.executemany("INSERT OR IGNORE INTO series (name, statistic) VALUES (?, ?)", unknown)
        find = "SELECT id FROM series WHERE name = ? AND statistic = ?"
        return {key: db.execute(find, key).fetchone()[0] for key in unknown}

    def _text(self, value: object) -> str:
        if not isinstance(value, str):
            raise CorruptRecordingError(f"{self.path} holds {value!r:.40} instead of a name")
        return value

    def _number(self, value: object) -> float:
        if value is None:  # SQLite stores NaN as NULL
            return math.nan
        if not isinstance(value, float):
            raise CorruptRecordingError(f"{self.path} holds {value!r:.40} instead of a number")
        return value

    @contextlib.contextmanager
    def _session(self) -> Iterator[sqlite3.Connection]:
        """The connection of this process, for one thread at a time; turns errors of SQLite into `StorageError`."""
        with self._lock:
            if self._closed:
                raise StorageError(f"{self.path}: this timeline is closed; open it again with Timeline(path)")
            try:
                if self._connection is None:
                    self._connection = self._open()
                yield self._connection
            except (sqlite3.Error, UnicodeError) as error:
                raise as_storage_error(error, self.path) from error

    def _open(self) -> sqlite3.Connection:
        return open_file(self.path)

    def _disconnect(self) -> None:
        connection, self._connection, self._ids = self._connection, None, {}
        if connection is not None:
            connection.close()


def _listed(known: list[Any]) -> str:
    return f"{known[:20]}{' and more' if len(known) > 20 else ''}"


_timelines: weakref.WeakSet[Timeline] = weakref.WeakSet()
_forking = threading.Lock()
_locked: list[Timeline] = []


def _before_fork() -> None:
    """Closes connections, which must not cross a fork, and takes the locks, so that no other thread holds one in the child."""
    _forking.acquire()
    for timeline in list(_timelines):
        timeline._lock.acquire()
        _locked.append(timeline)
        if timeline.path != MEMORY:
            with contextlib.suppress(sqlite3.Error):
                timeline._disconnect()


def _after_fork() -> None:
    while _locked:
        _locked.pop()._lock.release()
    _forking.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
