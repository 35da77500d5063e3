"""What a timeline's file holds, each row checked against its checksum."""

from __future__ import annotations

import math
import sqlite3
import struct
import sys
from array import array
from bisect import bisect_left
from collections.abc import Collection, Mapping
from itertools import chain, repeat
from typing import Any, TypeAlias

from torch import Tensor

from recorders.watch.timeline.damage import Damages, Mismatch, passed_on
from recorders.watch.timeline.schema import Tick, digest, hashed, sample_checksums, tensor_checksum
from recorders.watch.timeline.tables import TimelineTables
from recorders.watch.timeline.tensors import tensor_of

__all__ = ["Course", "TimelineReader"]

Course: TypeAlias = tuple[list[int], list[float]]
"""Ticks, and the values of one series at them."""

_FEW = 16  # one in so many series is read by look-ups; more of them by reading ticks whole


class TimelineReader:
    """Reads a timeline inside transactions of the caller.

    Args:
        damages: what is done about damage.
    """

    def __init__(self, damages: Damages) -> None:
        self._damages, self.tables = damages, TimelineTables(damages)
        self._layouts: dict[int, array[int]] = {}

    def past(self) -> TimelineReader:
        """Another reader of the same file, which reads no tick yet."""
        found = TimelineReader(self._damages)
        found.tables.last = -(2**63)
        return found

    def values(self, db: sqlite3.Connection, number: int, tick: Tick) -> tuple[list[int], list[float]]:
        """All values of one tick: the ids of their series, ascending, and the values; empty if they are damaged and skipped."""
        try:
            # Without the ids, which the layout has, a row takes half the time. The digest tells whether the order is that one.
            rows = db.execute("SELECT value FROM samples WHERE tick = ? ORDER BY series", (number,))
            values = list(chain.from_iterable(rows))
            if None in values:  # what SQLite makes of NaN
                values = [math.nan if value is None else value for value in values]
            ids = self._layout(db, tick.layout).tolist()
            if len(ids) != len(values) or digest(values) != tick.digest:
                raise Mismatch("its values are not what was written")
        except (Mismatch, sqlite3.DatabaseError, struct.error) as error:
            self._damages.add(number, error)
            return [], []
        return ids, values

    def courses(self, db: sqlite3.Connection, ids: Collection[int], ticks: Mapping[int, Tick]) -> dict[int, Course]:
        """Several series at the given ticks, ascending. Reads their samples only if they are few, and ticks whole if not."""
        if len(ids) * _FEW <= len(self.tables.series(db)) or len(ids) == 1:
            return {series: self._course(db, series, ticks) for series in ids}
        found: dict[int, Course] = {series: ([], []) for series in ids}
        places: dict[int, list[tuple[list[int], list[float], int]]] = {}  # by layout: the course of each series, and its place
        for number, tick in ticks.items():
            there, values = self.values(db, number, tick)
            if values and tick.layout not in places:
                places[tick.layout] = [(*found[series], place) for place, series in enumerate(there) if series in found]
            for numbers, course, place in places[tick.layout] if values else ():
                numbers.append(number)
                course.append(values[place])
        return found

    def tensor(self, db: sqlite3.Connection, number: int, tick: Tick, name: str) -> Tensor | None:
        """A tensor that a tick has; None if it is damaged and skipped."""
        try:
            row = db.execute("SELECT dtype, data, checksum FROM tensors WHERE tick = ? AND name = ?", (number, name)).fetchone()
            if row is None or not isinstance(row[1], bytes) or tensor_checksum(number, name, tick.written, *row[:2]) != row[2]:
                raise Mismatch(f"the tensor {name!r} is not what was written")
            return tensor_of(row[0], row[1], f"{self._damages.path}, tick {number}, tensor {name!r}")
        except (Mismatch, sqlite3.DatabaseError) as error:
            self._damages.add(number, error)
            return None

    def check(self, db: sqlite3.Connection) -> None:
        """Reads every row, and lets SQLite look at every page."""
        self.tables.notes(db)
        for series in self.tables.series(db):
            self._course(db, series, self.tables.ticks(db))
        for number, tick in self.tables.ticks(db).items():
            self.values(db, number, tick)
            for name in tick.tensor_names():
                self.tensor(db, number, tick, name)
        try:
            (said,) = db.execute("PRAGMA integrity_check(1)").fetchone()
        except sqlite3.DatabaseError as error:
            passed_on(error)
            said = error
        if said != "ok":
            self._damages.add("pages", said)

    def _course(self, db: sqlite3.Connection, series: int, ticks: Mapping[int, Tick]) -> Course:
        expected = []
        holds: dict[int, bool | Mismatch | sqlite3.Error] = {}
        for number, tick in ticks.items():
            if tick.layout not in holds:
                holds[tick.layout] = self._holds(db, tick.layout, series)
            if isinstance(there := holds[tick.layout], Exception):
                self._damages.add(number, there)
            elif there:
                expected.append(number)
        if not expected:
            return [], []
        rows = self._samples(db, series, expected)
        found = {number: math.nan if value is None else value for number, value, _ in rows}
        if list(found) == expected and set(map(type, found.values())) == {float}:
            written = [ticks[number].written for number in expected]
            if sample_checksums(expected, repeat(series), written, found.values()) == [proof for _, _, proof in rows]:
                return expected, list(found.values())
        proofs = {number: proof for number, _, proof in rows}
        whole = []
        for number in expected:
            value, at = found.get(number), ticks[number].written
            if isinstance(value, float) and sample_checksums([number], [series], [at], [value]) == [proofs[number]]:
                whole.append(number)
            else:
                self._damages.add(number, f"a value of series {series} is not what was written")
        return whole, [found[number] for number in whole]

    def _samples(self, db: sqlite3.Connection, series: int, ticks: list[int]) -> list[tuple[int, Any, Any]]:
        """Tick, value and checksum of one series, as they are in the file; what cannot be read is left out."""
        join = (
            "SELECT ticks.tick, value, samples.checksum FROM ticks CROSS JOIN samples ON samples.tick = ticks.tick "
            "AND samples.series = ? WHERE ticks.tick BETWEEN ? AND ? ORDER BY ticks.tick"
        )
        first, last = ticks[0], ticks[-1]
        known = self.tables.ticks(db)
        if len(known) <= 2 * len(ticks) or sum(first <= number <= last for number in known) <= 2 * len(ticks):
            try:
                return db.execute(join, (series, first, last)).fetchall()
            except sqlite3.DatabaseError as error:
                passed_on(error)  # of damage, look-ups tell the tick
        return self._look_ups(db, series, ticks)

    def _look_ups(self, db: sqlite3.Connection, series: int, ticks: list[int]) -> list[tuple[int, Any, Any]]:
        found: list[tuple[int, Any, Any]] = []
        for number in ticks:
            try:
                rows = db.execute("SELECT value, checksum FROM samples WHERE tick = ? AND series = ?", (number, series)).fetchall()
            except sqlite3.DatabaseError as error:
                passed_on(error)
            else:
                found += [(number, *row) for row in rows]
        return found

    def _holds(self, db: sqlite3.Connection, layout: int, series: int) -> bool | Mismatch | sqlite3.Error:
        try:
            ids = self._layout(db, layout)
        except (Mismatch, sqlite3.DatabaseError) as error:
            passed_on(error)
            return error
        place = bisect_left(ids, series)
        return place < len(ids) and ids[place] == series

    def _layout(self, db: sqlite3.Connection, layout: int) -> array[int]:
        """The ids of the series of a layout, ascending; its id is the checksum."""
        if layout not in self._layouts:
            row = db.execute("SELECT series FROM layouts WHERE id = ?", (layout,)).fetchone()
            if row is None or not isinstance(row[0], bytes) or hashed(row[0]) != layout:
                raise Mismatch("the list of its series is not what was written")
            ids = self._layouts[layout] = array("I", row[0])
            if sys.byteorder == "big":
                ids.byteswap()
        return self._layouts[layout]
