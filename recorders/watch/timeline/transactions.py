"""Transactions of SQLite, and its errors as ours."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator

from recorders.errors import CorruptRecordingError, NotARecordingError, StorageError

__all__ = ["as_storage_error", "is_damage", "transaction"]


def is_damage(error: sqlite3.Error) -> bool:
    """Whether an error of SQLite says that the file is damaged."""
    return any(sign in str(error) for sign in ("malformed", "Could not decode", "corrupt"))


def as_storage_error(error: Exception, path: str) -> StorageError:
    """An error of SQLite as a `StorageError`."""
    if "file is not a database" in str(error):
        return NotARecordingError(f"{path} is not a timeline: {error}; it is left as it was")
    if isinstance(error, sqlite3.Error) and is_damage(error):
        return CorruptRecordingError(f"{path} is damaged: {error}; `recorders check` tells which ticks are whole")
    return StorageError(f"{path}: {error}")


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
