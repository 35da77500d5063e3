"""The rows of a timeline, read and checked, and written with their checksums, inside transactions of the caller."""

from __future__ import annotations

import io
import json
import sqlite3
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping
from operator import itemgetter
from typing import Any, TypeAlias

from torch import Tensor

from recorders.errors import CorruptRecordingError, RecordingWarning, TickError
from recorders.recordings.storage.tensors import read_tensors
from recorders.watch.timeline.connection import is_damage
from recorders.watch.timeline.schema import Series, Tick, Totals, as_numbers, as_text, checksum, hashed, total
from reducers.errors import warn_user

Course: TypeAlias = tuple[list[int], list[float]]
"""Ticks, and the values of one series at them."""

_Numbers: TypeAlias = "tuple[list[int], array[float]]"
"""The ids of series, ascending, and their numbers."""

_KEPT = 16_000_000
"""How many numbers are kept in memory, 8 bytes each, so that series that are read one by one do not read all ticks again."""

_UNREADABLE = (ValueError, TypeError, AttributeError, OverflowError, RecursionError)
"""What text that is no JSON, or JSON of something else, raises."""

_SMALL: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "ticks": ("tick, step, tensors, digest", Tick._make),
    "series": ("id, name, statistic", Series._make),
    "notes": ("key, text", itemgetter(0)),
}
"""The columns that are read of all rows at once, and what they become but for the first one."""


class Store:
    """Reads rows, and writes them.

    Args:
        path: of the file, for messages.
        skip: name what is damaged in `damaged`; otherwise raise `CorruptRecordingError`.
        warn: once, if something is left out.

    Attributes:
        damaged: why something was left out, by tick, or by table; "pages" if SQLite found it.
        last: ticks after this one are not read; None for all.
    """

    def __init__(self, path: str, skip: bool = False, warn: bool = True) -> None:
        self.path, self._skip, self._warn = path, skip, warn
        self.damaged: dict[int | str, str] = {}
        self.last: int | None = None
        self._known: dict[str, tuple[int, dict[Any, Any]]] = {}
        self._by_name: tuple[dict[int, Series], dict[Series, int], dict[str, list[str]]] = {}, {}, {}
        self._layout: tuple[list[str], list[int]] = [], []
        self._numbers: dict[int, tuple[int, _Numbers]] = {}
        self._kept = 0

    def past(self) -> Store:
        """Another one of the same file, which reads no tick yet."""
        found = Store(self.path, self._skip, self._warn)
        found.damaged, found.last = self.damaged, -(2**63)
        return found

    # Tables that are read whole, and remembered as long as their totals stay the same

    def totals(self, db: sqlite3.Connection) -> Totals:
        """The row of `totals`."""
        row = self._row(db, "SELECT ticks, series, notes, checksum FROM totals")
        if row is None or checksum("totals", *row[:-1]) != row[-1]:
            raise CorruptRecordingError(f"{self.path} is damaged: its table of totals is not what was written")
        return Totals(*row[:-1])

    def ticks(self, db: sqlite3.Connection) -> dict[int, Tick]:
        """All ticks, ascending."""
        found: dict[int, Tick] = self._table(db, "ticks")
        return found if self.last is None else {number: tick for number, tick in found.items() if number <= self.last}

    def series(self, db: sqlite3.Connection) -> dict[int, Series]:
        """All series by id, ascending."""
        return self._table(db, "series")

    def ids(self, db: sqlite3.Connection) -> dict[Series, int]:
        """The ids of all series."""
        return self._indexed(db)[1]

    def names(self, db: sqlite3.Connection) -> dict[str, list[str]]:
        """The statistics of each name."""
        return self._indexed(db)[2]

    def notes(self, db: sqlite3.Connection) -> dict[str, str]:
        """All notes by key."""
        return self._table(db, "notes")

    def tensors(self, db: sqlite3.Connection) -> dict[str, list[int]]:
        """The ticks of each tensor."""
        found: dict[str, list[int]] = {}
        for number, tick in self.ticks(db).items():
            for name in self.tensors_of(number, tick):
                found.setdefault(name, []).append(number)
        return found

    # Ticks

    def tick(self, db: sqlite3.Connection, number: int) -> Tick | None:
        """One tick; None if there is none."""
        if self.last is not None and number > self.last:
            return None
        columns, make = _SMALL["ticks"]
        row = self._row(db, f"SELECT {columns}, checksum FROM ticks WHERE tick = ?", number)
        if row is None:  # only all of them tell whether it was lost
            return self.ticks(db).get(number)
        if row[0] != number or checksum("ticks", *row[:-1]) != row[-1]:
            self._damaged(number, "its row is not what was written")
            return None
        found: Tick = make(row[1:-1])
        return found

    def numbers(self, db: sqlite3.Connection, number: int, tick: Tick) -> _Numbers:
        """All numbers of a tick; empty if they are damaged and skipped."""
        known = self._numbers.get(number)
        if known is not None and known[0] == tick.digest:
            return known[1]
        reason: Exception | str = "its numbers are not what was written"
        try:
            row = db.execute("SELECT CAST(numbers AS BLOB) FROM ticks WHERE tick = ?", (number,)).fetchone()
        except sqlite3.DatabaseError as error:
            row, reason = None, error
        if row is None or hashed(row[0]) != tick.digest:
            self._damaged(number, reason)
            return [], array("d")
        try:
            names, values = as_numbers(row[0])
            if names != self._layout[0]:  # most ticks have the series of the one before
                self._layout = names, list(map(int, names))
        except _UNREADABLE as error:  # in a forged file, whose checksums are right
            self._damaged(number, f"its numbers cannot be read: {error}")
            return [], array("d")
        found = self._layout[1], values
        if self._kept + len(values) <= _KEPT:
            self._kept += len(values) - (len(known[1][1]) if known is not None else 0)
            self._numbers[number] = tick.digest, found
        return found

    def courses(self, db: sqlite3.Connection, ids: Iterable[int], ticks: Mapping[int, Tick]) -> dict[int, Course]:
        """Several series at the given ticks, ascending."""
        found: dict[int, Course] = {series: ([], []) for series in ids}
        layout: list[int] | None = None
        places: list[tuple[list[int], list[float], int]] = []
        for number, tick in ticks.items() if found else ():
            there, values = self.numbers(db, number, tick)
            if there is not layout:
                layout, places = there, [(*found[series], place) for place, series in enumerate(there) if series in found]
            for numbers, course, place in places:
                numbers.append(number)
                course.append(values[place])
        return found

    def tensors_of(self, number: int, tick: Tick) -> dict[str, tuple[int, str | None]]:
        """Checksum and dtype of each tensor of a tick by name; empty if that is damaged and skipped."""
        try:
            return {name: (int(digest), dtype) for name, (digest, dtype) in json.loads(tick.tensors or "{}").items()}
        except _UNREADABLE as error:
            self._damaged(number, f"its list of tensors cannot be read: {error}")
            return {}

    def tensor(self, db: sqlite3.Connection, number: int, tick: Tick, name: str) -> Tensor | None:
        """A tensor that a tick has; None if it is damaged and skipped."""
        digest, dtype = self.tensors_of(number, tick)[name]
        reason: Exception | str = f"the tensor {name!r} is not what was written"
        try:
            row = db.execute("SELECT data FROM tensors WHERE tick = ? AND name = ?", (number, name)).fetchone()
        except sqlite3.DatabaseError as error:
            row, reason = None, error
        if row is None or not isinstance(row[0], bytes) or hashed(row[0]) != digest:
            self._damaged(number, reason)
            return None
        where = f"{self.path}, tick {number}, tensor {name!r}"
        return read_tensors(io.BytesIO(row[0]), len(row[0]), {} if dtype is None else {"": dtype}, where, len(row[0]))[0][""]

    def check(self, db: sqlite3.Connection) -> None:
        """Reads every row, and lets SQLite look at every page."""
        self.notes(db)
        series = self.series(db)
        for number, tick in self.ticks(db).items():
            there, _ = self.numbers(db, number, tick)
            if not series.keys() >= set(there):
                self._damaged(number, "it has numbers of series that are not there")
            for name in self.tensors_of(number, tick):
                self.tensor(db, number, tick, name)
        try:
            (said,) = db.execute("PRAGMA integrity_check(1)").fetchone()
        except sqlite3.DatabaseError as error:
            said = error
        if said != "ok":
            self._damaged("pages", said)

    # Writing

    def add_tick(
        self,
        db: sqlite3.Connection,
        number: int,
        step: int | None,
        values: Mapping[tuple[str, str], float],
        tensors: Mapping[str, tuple[str | None, bytes]],
    ) -> None:
        """Adds one tick; raises `TickError` if the file has it."""
        if db.execute("SELECT 1 FROM ticks WHERE tick = ?", (number,)).fetchone():
            raise TickError(
                f"tick {number} is already in {self.path} and is never overwritten; to record it again, for instance after going "
                f"back to a checkpoint, call forget({number}) first"
            )
        ids = self._add_series(db, values)
        text = as_text(dict(sorted((ids[key], value) for key, value in values.items())))
        described = json.dumps({name: (hashed(data), dtype) for name, (dtype, data) in tensors.items()}) if tensors else None
        tick = Tick(step, described, hashed(text.encode()))
        proof = checksum("ticks", number, *tick)
        db.execute("INSERT INTO ticks VALUES (?, ?, ?, ?, ?, ?)", (number, *tick, proof, text))
        db.executemany("INSERT INTO tensors VALUES (?, ?, ?)", ((number, name, data) for name, (_, data) in tensors.items()))
        totals = self.totals(db)
        totals._replace(ticks=total([totals.ticks, proof])).store(db)

    def remove_ticks(self, db: sqlite3.Connection, gone: Collection[int]) -> None:
        """Removes ticks."""
        for name in ("tensors", "ticks"):
            db.executemany(f"DELETE FROM {name} WHERE tick = ?", ((number,) for number in gone))
        self._numbers, self._kept = {}, 0
        kept = (checksum("ticks", number, *tick) for number, tick in self.ticks(db).items() if number not in gone)
        self.totals(db)._replace(ticks=total(kept)).store(db)

    def add_notes(self, db: sqlite3.Connection, notes: Mapping[str, str]) -> None:
        """Writes the notes that the file does not have; replaces earlier ones with the same keys."""
        if not notes or notes.items() <= (known := self.notes(db)).items():
            return
        rows = ((key, text, checksum("notes", key, text)) for key, text in notes.items() if known.get(key) != text)
        db.executemany("INSERT OR REPLACE INTO notes VALUES (?, ?, ?)", rows)
        proofs = (checksum("notes", *note) for note in {**known, **notes}.items())
        self.totals(db)._replace(notes=total(proofs)).store(db)

    def _add_series(self, db: sqlite3.Connection, keys: Iterable[tuple[str, str]]) -> Mapping[tuple[str, str], int]:
        """Adds the series that the file does not have; returns the ids of all."""
        ids: Mapping[Any, int] = self.ids(db)
        if not (new := [key for key in keys if key not in ids]):
            return ids
        rows = list(enumerate(new, max(ids.values(), default=0) + 1))
        proofs = [checksum("series", number, *key) for number, key in rows]
        written = ((number, *key, proof) for (number, key), proof in zip(rows, proofs, strict=True))
        db.executemany("INSERT INTO series VALUES (?, ?, ?, ?)", written)
        totals = self.totals(db)
        totals._replace(series=total([totals.series, *proofs])).store(db)
        return {**ids, **{key: number for number, key in rows}}

    # Tables and rows as they are in the file

    def _indexed(self, db: sqlite3.Connection) -> tuple[dict[int, Series], dict[Series, int], dict[str, list[str]]]:
        """All series; their ids; the statistics of each name."""
        found = self.series(db)
        if self._by_name[0] is not found:
            names: dict[str, list[str]] = {}
            for series in found.values():
                names.setdefault(series.name, []).append(series.statistic)
            self._by_name = found, {series: number for number, series in found.items()}, names
        return self._by_name

    def _table(self, db: sqlite3.Connection, part: str) -> dict[Any, Any]:
        """All rows of a table by their first column, ascending."""
        current: int | None = None
        try:
            current = getattr(self.totals(db), part)
        except CorruptRecordingError as error:
            if not self._skip:
                raise
            self._damaged("totals", error)
        if part in self._known and self._known[part][0] == current:
            return self._known[part][1]
        make, proofs, found = _SMALL[part][1], [], {}
        for row in self._rows(db, part):
            if checksum(part, *row[:-1]) == row[-1]:
                found[row[0]] = make(row[1:-1])
                proofs.append(row[-1])
            else:
                self._damaged(part, f"the row of {row[0]!r:.40} is not what was written")
        found = dict(sorted(found.items(), key=itemgetter(0)))  # pages that changed places change the order, and nothing else
        if current is not None:
            if total(proofs) != current:
                self._damaged(part, "not all rows are there")
            self._known[part] = current, found
        return found

    def _rows(self, db: sqlite3.Connection, part: str) -> list[Any]:
        """All rows of a table; of a damaged one, those before and those after what cannot be read."""
        found: list[list[Any]] = [[], []]
        for rows, order in zip(found, ("ASC", "DESC"), strict=True):
            try:
                for row in db.execute(f"SELECT {_SMALL[part][0]}, checksum FROM {part} ORDER BY 1 {order}"):
                    rows.append(row)
                break
            except sqlite3.DatabaseError as error:
                self._damaged(part, error)
        known = set(found[0])
        return found[0] + [row for row in reversed(found[1]) if row not in known]

    def _row(self, db: sqlite3.Connection, query: str, *values: object) -> Any:
        """One row as it is in the file; None if there is none, or it cannot be read."""
        try:
            return db.execute(query, values).fetchone()
        except sqlite3.DatabaseError as error:
            if not is_damage(error):
                raise
            return None

    def _damaged(self, part: int | str, reason: Exception | str) -> None:
        """Raises that a tick or a table is damaged; if it is to be skipped, keeps that in `damaged`, and warns the first time.

        An error of SQLite that does not tell of damage, such as a lock, is raised as it is.
        """
        if isinstance(reason, sqlite3.Error) and not is_damage(reason):
            raise reason
        where = f"at tick {part}" if isinstance(part, int) else f"in its {part}"
        if not self._skip:
            remedy = "Timeline(path, damaged='skip') reads what is whole, and `recorders check` tells what is not"
            raise CorruptRecordingError(f"{self.path} is damaged {where}: {reason}; {remedy}")
        if self._warn and not self.damaged:
            message = f"{self.path} is damaged {where}, which is left out: {reason}; Timeline.damaged has all that is left out"
            warn_user(message, RecordingWarning)
        self.damaged.setdefault(part, str(reason))
