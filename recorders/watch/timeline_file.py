"""The SQLite file of a timeline: schema, creation, checks and transactions."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Iterator

from recorders.errors import CorruptRecordingError, NotARecordingError, SchemaError, StorageError

__all__ = ["as_storage_error", "open_file", "transaction"]

_APPLICATION_ID = 0x54524543  # "TREC", shown by file(1)
_SCHEMA = 1
_PATIENCE = 30.0  # seconds to wait for another process that is writing

# Keyed by tick first, so that an append touches few pages; a series is read by one look-up for each row of `ticks`.
_TABLES = (
    "CREATE TABLE ticks (tick INTEGER PRIMARY KEY, step INTEGER)",
    "CREATE TABLE series (id INTEGER PRIMARY KEY, name TEXT NOT NULL, statistic TEXT NOT NULL, UNIQUE (name, statistic))",
    "CREATE TABLE samples (tick INTEGER NOT NULL, series INTEGER NOT NULL, value REAL, PRIMARY KEY (tick, series)) WITHOUT ROWID",
    "CREATE TABLE notes (key TEXT PRIMARY KEY, text TEXT NOT NULL) WITHOUT ROWID",
    "CREATE VIEW timeline AS SELECT tick, name, statistic, value FROM samples JOIN series ON series.id = samples.series",
)


def open_file(path: str) -> sqlite3.Connection:
    """A connection to the file, which is created or checked; waits while another process creates or closes it.

    SQLite waits for ordinary locks, but not for those held while a file changes to a write-ahead log and back.
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
    """A connection to the file; never writes into a file of another program."""
    # Transactions are explicit (isolation_level=None), and the timeline's own lock keeps threads apart.
    db = sqlite3.connect(path, timeout=_PATIENCE, isolation_level=None, check_same_thread=False)
    try:
        db.execute("PRAGMA trusted_schema = OFF")
        with transaction(db, "DEFERRED"):  # one consistent read: another process may be creating the file
            state = _state_of(db, path)
        if state == "new":
            db.execute("PRAGMA journal_mode = WAL")
            with transaction(db):
                if _state_of(db, path) == "new":  # unless another process was faster
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
    """Returns "new" or "known"; raises if the file is neither."""
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


def as_storage_error(error: Exception, path: str) -> StorageError:
    """An error of SQLite as a `StorageError`."""
    text = str(error)
    if "file is not a database" in text:
        return NotARecordingError(f"{path} is not a timeline: {text}; it is left as it was")
    if "malformed" in text or "Could not decode" in text:
        return CorruptRecordingError(f"{path} is damaged: {text}")
    return StorageError(f"{path}: {text}")


@contextlib.contextmanager
def transaction(db: sqlite3.Connection, kind: str = "IMMEDIATE") -> Iterator[None]:
    """Runs the block in a transaction, which is undone if the block raises."""
    db.execute(f"BEGIN {kind}")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise
