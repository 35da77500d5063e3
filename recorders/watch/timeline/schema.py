"""The tables of a timeline, the checksums of their rows, and the numbers of a tick as text.

A tick is one row: its numbers are a JSON object, from the id of each series to its value. SQLite reads it too, which the view
`timeline` is made of. Every row has a checksum. `totals` has the sum of those of each table, so a row that is missing is missed.
"""

from __future__ import annotations

import hashlib
import json
import math
import sqlite3
from array import array
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

APPLICATION_ID = 0x54524543  # "TREC", shown by file(1)
SCHEMA = 1

# The numbers come last: what is before them is read without them.
TABLES = (
    "CREATE TABLE totals (id INTEGER PRIMARY KEY, ticks INTEGER NOT NULL, series INTEGER NOT NULL, notes INTEGER NOT NULL, "
    "checksum INTEGER NOT NULL)",
    "CREATE TABLE ticks (tick INTEGER PRIMARY KEY, step INTEGER, tensors TEXT, digest INTEGER NOT NULL, checksum INTEGER NOT NULL, "
    "numbers TEXT NOT NULL)",
    "CREATE TABLE series (id INTEGER PRIMARY KEY, name TEXT NOT NULL, statistic TEXT NOT NULL, checksum INTEGER NOT NULL)",
    "CREATE TABLE tensors (tick INTEGER NOT NULL, name TEXT NOT NULL, data BLOB NOT NULL, PRIMARY KEY (tick, name)) WITHOUT ROWID",
    "CREATE TABLE notes (key TEXT PRIMARY KEY, text TEXT NOT NULL, checksum INTEGER NOT NULL) WITHOUT ROWID",
    "CREATE VIEW timeline AS SELECT tick, name, statistic, number.value AS value "
    "FROM ticks, json_each(ticks.numbers) AS number JOIN series ON series.id = number.key",
)


class Totals(NamedTuple):
    """The sums of the checksums of three tables."""

    ticks: int = 0
    series: int = 0
    notes: int = 0

    def store(self, db: sqlite3.Connection) -> None:
        """Writes the only row of `totals`."""
        db.execute("INSERT OR REPLACE INTO totals VALUES (0, ?, ?, ?, ?)", (*self, checksum("totals", *self)))


class Tick(NamedTuple):
    """A row of `ticks`, without its number and its numbers.

    Attributes:
        step: the number of optimizer steps that ended before it; None if it is not known.
        tensors: as JSON, of each tensor by name its checksum, and its dtype if it is stored as another one; None if there are none.
        digest: the checksum of the text of its numbers.
    """

    step: int | None
    tensors: str | None
    digest: int


class Series(NamedTuple):
    """What one number in a tick is: a statistic of a name."""

    name: str
    statistic: str


_encode = json.JSONEncoder(default=str).encode


def hashed(data: bytes) -> int:
    """The first 64 bits of BLAKE2b of some bytes, as a signed number, lowest byte first."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)


def checksum(*row: Any) -> int:
    """The checksum of a row: `hashed` of its columns as a JSON array in ASCII."""
    return hashed(_encode(row).encode())


def total(checksums: Iterable[int]) -> int:
    """The sum of the checksums of a table: its lowest 63 bits."""
    return sum(checksums) & 0x7FFFFFFFFFFFFFFF


def as_text(values: Mapping[int, float]) -> str:
    """The numbers of a tick, by series, as JSON: NaN is null, and infinity is 9e999, which SQLite and `json` read as such.

    >>> as_text({1: 0.5, 2: math.nan, 3: -math.inf})
    '{"1":0.5,"2":null,"3":-9e999}'
    """
    return json.dumps(values, separators=(",", ":")).replace("NaN", "null").replace("Infinity", "9e999")


def as_numbers(text: bytes) -> tuple[list[str], array[float]]:
    """The ids of series, as text, and their numbers."""
    found = json.loads(text)
    values = list(found.values())
    return list(found), array("d", [math.nan if value is None else value for value in values] if None in values else values)


def create_tables(db: sqlite3.Connection) -> None:
    """Creates the tables, empty."""
    for statement in TABLES:
        db.execute(statement)
    Totals().store(db)
    db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    db.execute(f"PRAGMA user_version = {SCHEMA}")
