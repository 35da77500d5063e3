"""The tables of a timeline, the checksums of their rows, and what their columns hold.

Every row has a checksum. That of a sample covers its tick, its series, its value and the number of the transaction that wrote it,
so a page that SQLite has discarded cannot pass for a present one. A tick has a digest of all its values, and the id of its layout:
the list of the series that it holds. So a sample that is missing is missed. `totals` has the sum of the checksums of each small
table, so a row of those is missed too.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import struct
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

__all__ = [
    "APPLICATION_ID",
    "SCHEMA",
    "TABLES",
    "Series",
    "Tick",
    "Totals",
    "checksum",
    "create_tables",
    "digest",
    "hashed",
    "sample_checksums",
    "tensor_checksum",
    "total",
]

APPLICATION_ID = 0x54524543  # "TREC", shown by file(1)
SCHEMA = 1

# Samples are keyed by tick first, so that an append touches few pages; a series is read by one look-up for each row of `ticks`.
TABLES = (
    "CREATE TABLE totals (id INTEGER PRIMARY KEY, written INTEGER NOT NULL, ticks INTEGER NOT NULL, series INTEGER NOT NULL, "
    "notes INTEGER NOT NULL, checksum INTEGER NOT NULL)",
    "CREATE TABLE ticks (tick INTEGER PRIMARY KEY, step INTEGER, layout INTEGER NOT NULL, written INTEGER NOT NULL, "
    "digest INTEGER NOT NULL, tensors TEXT, checksum INTEGER NOT NULL)",
    "CREATE TABLE layouts (id INTEGER PRIMARY KEY, series BLOB NOT NULL)",
    "CREATE TABLE series (id INTEGER PRIMARY KEY, name TEXT NOT NULL, statistic TEXT NOT NULL, checksum INTEGER NOT NULL)",
    "CREATE TABLE samples (tick INTEGER NOT NULL, series INTEGER NOT NULL, value REAL, checksum INTEGER NOT NULL, "
    "PRIMARY KEY (tick, series)) WITHOUT ROWID",
    "CREATE TABLE tensors (tick INTEGER NOT NULL, name TEXT NOT NULL, dtype TEXT, data BLOB NOT NULL, "
    "checksum INTEGER NOT NULL, PRIMARY KEY (tick, name))",
    "CREATE TABLE notes (key TEXT PRIMARY KEY, text TEXT NOT NULL, checksum INTEGER NOT NULL) WITHOUT ROWID",
    "CREATE VIEW timeline AS SELECT tick, name, statistic, value FROM samples JOIN series ON series.id = samples.series",
)


class Totals(NamedTuple):
    """The number of the last transaction that wrote ticks, and the sums of the checksums of three tables."""

    written: int = 0
    ticks: int = 0
    series: int = 0
    notes: int = 0

    def store(self, db: sqlite3.Connection) -> None:
        """Writes the only row of `totals`."""
        db.execute("INSERT OR REPLACE INTO totals VALUES (0, ?, ?, ?, ?, ?)", (*self, checksum("totals", *self)))


class Tick(NamedTuple):
    """A row of `ticks`, without its number.

    Attributes:
        step: the number of optimizer steps that ended before it; None if it is not known.
        layout: the id of the list of its series.
        written: the number of the transaction that wrote it.
        digest: of its values.
        tensors: the names of its tensors, as JSON; None if there are none.
    """

    step: int | None
    layout: int
    written: int
    digest: int
    tensors: str | None

    def tensor_names(self) -> list[str]:
        """The names of its tensors."""
        names: list[str] = json.loads(self.tensors or "[]")
        return names


class Series(NamedTuple):
    """What one number in a tick is: a statistic of a name."""

    name: str
    statistic: str


_encode = json.JSONEncoder(default=str).encode
_SAMPLE = struct.Struct("<qqqd")


def hashed(data: bytes) -> int:
    """The first 64 bits of BLAKE2b of some bytes, as a signed number, lowest byte first."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)


def checksum(*row: Any) -> int:
    """The checksum of a row: `hashed` of its columns as a JSON array in ASCII."""
    return hashed(_encode(row).encode())


def sample_checksums(ticks: Iterable[int], series: Iterable[int], written: Iterable[int], values: Iterable[float]) -> list[int]:
    """Of each sample the CRC-32 of its tick, series, transaction and value, less 2**31: four bytes in SQLite.

    All are 64 bits, lowest byte first.
    """
    pack, crc = _SAMPLE.pack, zlib.crc32
    return [crc(pack(*sample)) - 0x80000000 for sample in zip(ticks, series, written, values, strict=False)]


def tensor_checksum(tick: int, name: str, written: int, dtype: str | None, data: bytes) -> int:
    """The checksum of a tensor."""
    return checksum("tensors", tick, name, written, dtype, hashed(data))


def digest(values: Sequence[float]) -> int:
    """The `hashed` bytes of 64-bit floats, lowest byte first."""
    return hashed(struct.pack(f"<{len(values)}d", *values))


def total(checksums: Iterable[int]) -> int:
    """The sum of the checksums of a table: its lowest 63 bits."""
    return sum(checksums) & 0x7FFFFFFFFFFFFFFF


def create_tables(db: sqlite3.Connection) -> None:
    """Creates the tables, empty."""
    for statement in TABLES:
        db.execute(statement)
    Totals().store(db)
    db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    db.execute(f"PRAGMA user_version = {SCHEMA}")
