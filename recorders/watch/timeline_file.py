"""The SQLite file of a timeline: its schema, how it is made and checked, and its transactions."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Iterator

from recorders.errors import CorruptRecordingError, NotARecordingError, SchemaError, StorageError

__all__ = ["open_file", "transaction", "typed"]

_APPLICATION_ID = 0x54524543  # "TREC", shown by file(1)
_SCHEMA = 1
_PATIENCE = 30.0  # seconds to wait for another process that is writing

# Keyed by tick first, so that an append touches few pages; `ticks` lets one series be read by one look-up a tick.
_TABLES = (
    "CREATE TABLE ticks (tick INTEGER PRIMARY KEY)",
    "CREATE TABLE series (id INTEGER PRIMARY KEY, name TEXT NOT NULL, statistic TEXT NOT NULL, UNIQUE (name, statistic))",
    "CREATE TABLE samples (tick INTEGER NOT NULL, series INTEGER NOT NULL, value REAL, PRIMARY KEY (tick, series)) WITHOUT ROWID",
    "CREATE TABLE notes (key TEXT PRIMARY KEY, text TEXT NOT NULL) WITHOUT ROWID",
    "CREATE VIEW timeline AS SELECT tick, name, statistic, value FROM samples JOIN series ON series.id = samples.series",
)


def open_file(path: str) -> sqlite3.Connection:
    """A checked connection; waits for other processes that are making the file, or closing it, just now.

    SQLite waits by itself for ordinary locks, but not for those under which a file changes to a write-ahead log and back.
    """
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            return _connect(path)
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _connect(path: str) -> sqlite3.Connection:
    """Nothing is written into a file that is not ours."""
    # Transactions are explicit (isolation_level=None), and the timeline's own lock keeps threads apart.
    db = sqlite3.connect(path, timeout=_PATIENCE, isolation_level=None, check_same_thread=False)
    try:
        db.execute("PRAGMA trusted_schema = OFF")
        with transaction(db, "DEFERRED"):  # one look at the file: another process may be making it just now
            state = _state_of(db, path)
        if state == "new":
            db.execute("PRAGMA journal_mode = WAL")
            with transaction(db):
                if _state_of(db, path) == "new":  # or another process was faster
                    for statement in _TABLES:
                        db.execute(statement)
                    db.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
                    db.execute(f"PRAGMA user_version = {_SCHEMA}")
        elif (found := db.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
            raise CorruptRecordingError(f"{path} is damaged: {found}")
        db.execute("PRAGMA synchronous = FULL")
    except BaseException:
        db.close()
        raise
    return db


def _state_of(db: sqlite3.Connection, path: str) -> str:
    """Whether the file is "new" or "known"; raises where it is neither."""
    application, version = (db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version"))
    tables = [sql for (sql,) in db.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY rowid")]
    if (application, version) == (0, 0) and not tables:
        return "new"
    if application != _APPLICATION_ID:
        raise NotARecordingError(f"{path} is an SQLite file of another program, not a timeline; it is left as it was")
    if version > _SCHEMA:
        raise SchemaError(f"{path} has schema {version}, this version of torch-recorders knows {_SCHEMA}: install a newer one")
    if version != _SCHEMA or tables != list(_TABLES):
        raise CorruptRecordingError(f"{path} says it is a timeline of schema {version}, but its tables are not those of one")
    return "known"


def typed(error: Exception, path: str) -> StorageError:
    """What SQLite raised, as one of our errors."""
    text = str(error)
    if "file is not a database" in text:
        return NotARecordingError(f"{path} is not a timeline: {text}; it is left as it was")
    if "malformed" in text or "Could not decode" in text:
        return CorruptRecordingError(f"{path} is damaged: {text}")
    return StorageError(f"{path}: {text}")


@contextlib.contextmanager
def transaction(db: sqlite3.Connection, kind: str = "IMMEDIATE") -> Iterator[None]:
    """All of it or nothing, whatever is raised within."""
    db.execute(f"BEGIN {kind}")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise
