"""Earlier schemas of a timeline, and how a file is brought to the present one."""

from __future__ import annotations

import math
import sqlite3

from recorders.errors import CorruptRecordingError
from recorders.watch.timeline.damage import Damages
from recorders.watch.timeline.schema import Series, create_tables
from recorders.watch.timeline.tables import TimelineTables
from recorders.watch.timeline.writing import add_notes, add_series, add_tick

__all__ = ["OLDER", "upgrade"]

_REST = (
    "CREATE TABLE series (id INTEGER PRIMARY KEY, name TEXT NOT NULL, statistic TEXT NOT NULL, UNIQUE (name, statistic))",
    "CREATE TABLE samples (tick INTEGER NOT NULL, series INTEGER NOT NULL, value REAL, PRIMARY KEY (tick, series)) WITHOUT ROWID",
    "CREATE TABLE notes (key TEXT PRIMARY KEY, text TEXT NOT NULL) WITHOUT ROWID",
    "CREATE VIEW timeline AS SELECT tick, name, statistic, value FROM samples JOIN series ON series.id = samples.series",
)
OLDER = {
    1: (
        ("CREATE TABLE ticks (tick INTEGER PRIMARY KEY)", *_REST),
        ("CREATE TABLE ticks (tick INTEGER PRIMARY KEY, step INTEGER)", *_REST),  # written in between, with the same number
    )
}
"""The tables of each earlier schema."""


def upgrade(db: sqlite3.Connection, path: str) -> None:
    """Brings a file of schema 1 to the present schema, inside the transaction of the caller. Needs room for both."""
    if (found := db.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
        raise CorruptRecordingError(f"{path} is damaged: {found}")
    db.execute("DROP VIEW timeline")
    for table in ("ticks", "series", "samples", "notes"):
        db.execute(f"ALTER TABLE {table} RENAME TO old_{table}")
    create_tables(db)
    tables = TimelineTables(Damages(path))
    series = {number: Series(*key) for number, *key in db.execute("SELECT id, name, statistic FROM old_series ORDER BY id")}
    add_series(db, tables, series.values())
    for row in db.execute("SELECT * FROM old_ticks ORDER BY tick").fetchall():
        tick, step = (*row, None)[:2]
        rows = db.execute("SELECT series, value FROM old_samples WHERE tick = ?", (tick,)).fetchall()
        if not all(isinstance(value, float | None) and number in series for number, value in rows):
            raise CorruptRecordingError(f"{path} is damaged at tick {tick}: it holds something else than numbers")
        add_tick(db, tables, tick, step, {series[number]: math.nan if value is None else value for number, value in rows})
    add_notes(db, tables, dict(db.execute("SELECT key, text FROM old_notes").fetchall()))
    for table in ("ticks", "series", "samples", "notes"):
        db.execute(f"DROP TABLE old_{table}")
