"""The small tables of a timeline: ticks, series and notes, read whole, checked, and remembered as long as they do not change."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any

from recorders.errors import CorruptRecordingError
from recorders.watch.timeline.damage import Damages, passed_on
from recorders.watch.timeline.schema import Series, Tick, Totals, checksum, total

__all__ = ["TimelineTables"]

_SMALL: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "ticks": ("tick, step, layout, written, digest, tensors", Tick._make),
    "series": ("id, name, statistic", Series._make),
    "notes": ("key, text", itemgetter(0)),
}
"""The columns of the tables that are read whole, and what their rows become but for the first column."""


class TimelineTables:
    """Reads the small tables inside transactions of the caller.

    Args:
        damages: what is done about damage.

    Attributes:
        last: ticks after this one are not read; None for all.
    """

    def __init__(self, damages: Damages) -> None:
        self.damages = damages
        self.last: int | None = None
        self._known: dict[str, tuple[int, dict[Any, Any]]] = {}
        self._ids: tuple[dict[int, Series], dict[Series, int], dict[str, list[str]]] = {}, {}, {}

    def totals(self, db: sqlite3.Connection) -> Totals:
        """The row of `totals`."""
        try:
            row = db.execute("SELECT written, ticks, series, notes, checksum FROM totals").fetchone()
        except sqlite3.DatabaseError as error:
            passed_on(error)
            row = None
        if row is None or checksum("totals", *row[:-1]) != row[-1]:
            raise CorruptRecordingError(f"{self.damages.path} is damaged: its table of totals is not what was written")
        return Totals(*row[:-1])

    def ticks(self, db: sqlite3.Connection) -> dict[int, Tick]:
        """All ticks, ascending."""
        found: dict[int, Tick] = self._table(db, "ticks")
        return found if self.last is None else {number: tick for number, tick in found.items() if number <= self.last}

    def tensors(self, db: sqlite3.Connection) -> dict[str, list[int]]:
        """The ticks of each tensor."""
        found: dict[str, list[int]] = {}
        for number, tick in self.ticks(db).items():
            for name in tick.tensor_names():
                found.setdefault(name, []).append(number)
        return found

    def series(self, db: sqlite3.Connection) -> dict[int, Series]:
        """All series by id, ascending."""
        return self._table(db, "series")

    def ids(self, db: sqlite3.Connection) -> dict[Series, int]:
        """The ids of all series."""
        return self._by_name(db)[1]

    def names(self, db: sqlite3.Connection) -> dict[str, list[str]]:
        """The statistics of each name."""
        return self._by_name(db)[2]

    def notes(self, db: sqlite3.Connection) -> dict[str, str]:
        """All notes by key."""
        return self._table(db, "notes")

    def tick(self, db: sqlite3.Connection, number: int) -> Tick | None:
        """One tick; None if there is none."""
        if self.last is not None and number > self.last:
            return None
        columns, make = _SMALL["ticks"]
        try:
            row = db.execute(f"SELECT {columns}, checksum FROM ticks WHERE tick = ?", (number,)).fetchone()
        except sqlite3.DatabaseError as error:
            passed_on(error)
            row = None
        if row is None:  # only all of them tell whether it was lost
            return self.ticks(db).get(number)
        if row[0] != number or checksum("ticks", *row[:-1]) != row[-1]:
            self.damages.add(number, "its row is not what was written")
            return None
        found: Tick = make(row[1:-1])
        return found

    def _by_name(self, db: sqlite3.Connection) -> tuple[dict[int, Series], dict[Series, int], dict[str, list[str]]]:
        found = self.series(db)
        if self._ids[0] is not found:
            names: dict[str, list[str]] = {}
            for series in found.values():
                names.setdefault(series.name, []).append(series.statistic)
            self._ids = found, {series: number for number, series in found.items()}, names
        return self._ids

    def _table(self, db: sqlite3.Connection, part: str) -> dict[Any, Any]:
        """All rows of a small table by their first column, ascending."""
        current: int | None = None
        try:
            current = getattr(self.totals(db), part)
        except CorruptRecordingError as error:
            if not self.damages.skip:
                raise
            self.damages.add("totals", error)
        if part in self._known and self._known[part][0] == current:
            return self._known[part][1]
        make, proofs, found = _SMALL[part][1], [], {}
        for row in self._rows(db, part):
            if checksum(part, *row[:-1]) == row[-1]:
                found[row[0]] = make(row[1:-1])
                proofs.append(row[-1])
            else:
                self.damages.add(part, f"the row of {row[0]!r:.40} is not what was written")
        found = dict(sorted(found.items(), key=itemgetter(0)))  # pages that changed places change the order, and nothing else
        if current is not None:
            if total(proofs) != current:
                self.damages.add(part, "not all rows are there")
            self._known[part] = current, found
        return found

    def _rows(self, db: sqlite3.Connection, part: str) -> list[Any]:
        """All rows of a small table; of a damaged one, those before and those after what cannot be read."""
        found: list[list[Any]] = [[], []]
        for rows, order in zip(found, ("ASC", "DESC"), strict=True):
            try:
                for row in db.execute(f"SELECT {_SMALL[part][0]}, checksum FROM {part} ORDER BY 1 {order}"):
                    rows.append(row)
                break
            except sqlite3.DatabaseError as error:
                self.damages.add(part, error)
        known = set(found[0])
        return found[0] + [row for row in reversed(found[1]) if row not in known]
