"""Rows of a timeline, written with their checksums inside a transaction of the caller."""

from __future__ import annotations

import json
import math
import sqlite3
import struct
from collections.abc import Collection, Iterable, Mapping
from itertools import repeat

from recorders.errors import TickError
from recorders.watch.timeline.schema import Series, Tick, checksum, digest, hashed, sample_checksums, tensor_checksum, total
from recorders.watch.timeline.tables import TimelineTables

__all__ = ["add_notes", "add_series", "add_tick", "check_new", "remove_ticks"]


def add_series(db: sqlite3.Connection, tables: TimelineTables, keys: Iterable[Series]) -> dict[Series, int]:
    """Adds the series that the file does not have; returns the ids of all."""
    ids = tables.ids(db)
    if not (new := [key for key in keys if key not in ids]):
        return ids
    rows = list(enumerate(new, max(ids.values(), default=0) + 1))
    proofs = [checksum("series", number, *key) for number, key in rows]
    written = ((number, *key, proof) for (number, key), proof in zip(rows, proofs, strict=True))
    db.executemany("INSERT INTO series VALUES (?, ?, ?, ?)", written)
    totals = tables.totals(db)
    totals._replace(series=total([totals.series, *proofs])).store(db)
    return {**ids, **{key: number for number, key in rows}}


def check_new(db: sqlite3.Connection, path: str, number: int) -> None:
    """Raises `TickError` if the file has the tick."""
    if db.execute("SELECT 1 FROM ticks WHERE tick = ?", (number,)).fetchone():
        raise TickError(
            f"tick {number} is already in {path} and is never overwritten; to record it again, for instance after going back to a "
            f"checkpoint, call forget({number}) first"
        )


def add_tick(
    db: sqlite3.Connection,
    tables: TimelineTables,
    number: int,
    step: int | None,
    values: Mapping[Series, float],
    tensors: Mapping[str, tuple[str | None, bytes]] | None = None,
    notes: Mapping[str, str] | None = None,
) -> None:
    """Adds one tick, which the file does not have, and notes."""
    ids = add_series(db, tables, values)
    # Numbers as SQLite returns them: it knows one NaN and one zero.
    samples = sorted((ids[key], value + 0.0 if value == value else math.nan) for key, value in values.items())
    at, numbers = [at for at, _ in samples], [value for _, value in samples]
    series = struct.pack(f"<{len(at)}I", *at)
    layout = hashed(series)
    if not db.execute("SELECT 1 FROM layouts WHERE id = ?", (layout,)).fetchone():
        db.execute("INSERT INTO layouts VALUES (?, ?)", (layout, series))
    totals = tables.totals(db)
    written = totals.written + 1
    tick = Tick(step, layout, written, digest(numbers), json.dumps(list(tensors)) if tensors else None)
    proof = checksum("ticks", number, *tick)
    db.execute("INSERT INTO ticks VALUES (?, ?, ?, ?, ?, ?, ?)", (number, *tick, proof))
    proofs = sample_checksums(repeat(number), at, repeat(written), numbers)
    rows = zip(repeat(number), at, numbers, proofs, strict=False)
    db.executemany("INSERT INTO samples VALUES (?, ?, ?, ?)", rows)
    for name, stored in (tensors or {}).items():
        proof_of = tensor_checksum(number, name, written, *stored)
        db.execute("INSERT INTO tensors VALUES (?, ?, ?, ?, ?)", (number, name, *stored, proof_of))
    totals._replace(written=written, ticks=total([totals.ticks, proof])).store(db)
    add_notes(db, tables, notes or {})


def remove_ticks(db: sqlite3.Connection, tables: TimelineTables, gone: Collection[int]) -> None:
    """Removes ticks, and the layouts that none of the others has."""
    ticks = tables.ticks(db)
    for name in ("samples", "tensors", "ticks"):
        db.executemany(f"DELETE FROM {name} WHERE tick = ?", ((number,) for number in gone))
    db.execute("DELETE FROM layouts WHERE id NOT IN (SELECT layout FROM ticks)")
    proofs = [checksum("ticks", number, *tick) for number, tick in ticks.items() if number not in gone]
    tables.totals(db)._replace(ticks=total(proofs)).store(db)


def add_notes(db: sqlite3.Connection, tables: TimelineTables, notes: Mapping[str, str]) -> None:
    """Writes the notes that the file does not have; replaces earlier ones with the same keys."""
    if not notes or notes.items() <= (known := tables.notes(db)).items():
        return
    rows = ((key, text, checksum("notes", key, text)) for key, text in notes.items() if known.get(key) != text)
    db.executemany("INSERT OR REPLACE INTO notes VALUES (?, ?, ?)", rows)
    proofs = (checksum("notes", *note) for note in {**known, **notes}.items())
    tables.totals(db)._replace(notes=total(proofs)).store(db)
