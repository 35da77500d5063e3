"""The connection of a process to a timeline's file: one thread at a time, closed before a fork, errors of SQLite as ours."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import weakref
from collections.abc import Iterator

from recorders.errors import StorageError
from recorders.watch.timeline.file import open_file, open_memory, open_read_only
from recorders.watch.timeline.transactions import as_storage_error, transaction

__all__ = ["MEMORY", "Session", "located"]

MEMORY = ":memory:"


def located(path: str | os.PathLike[str]) -> str:
    """The path of a timeline, which stays the same if the working folder changes."""
    found = os.path.expanduser(path)
    if not isinstance(found, str) or not found or "\0" in found:
        raise StorageError(f"a timeline needs the path of a file, or {MEMORY!r}; got {path!r}")
    return found if found == MEMORY else os.path.abspath(found)


class Session:
    """The connection of this process, opened when it is needed.

    Args:
        path: the file; ":memory:" for a timeline in memory.
        read_only: never write, and never create a file.

    Raises:
        StorageError: see `Timeline`.
    """

    def __init__(self, path: str, read_only: bool) -> None:
        self._path, self._read_only = path, read_only
        self._connection: sqlite3.Connection | None = None
        self._lock = threading.Lock()
        self._closed = False
        _sessions.add(self)
        with self._connected():
            pass

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """A transaction that sees the file as it was at its beginning."""
        with self._connected() as db, transaction(db, "DEFERRED"):
            yield db

    @contextlib.contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """A transaction that is on the disk at its end, and undone if the block raises."""
        if self._read_only:
            raise StorageError(f"{self._path} was opened with read_only=True: to write, open it with Timeline(path)")
        with self._connected() as db, transaction(db, "IMMEDIATE"):
            yield db

    def vacuum(self) -> None:
        """Gives unused pages back to the disk: the file is written anew, whole or not at all."""
        with self._connected() as db:
            db.execute("VACUUM")

    def close(self) -> None:
        """Closes the connection for good. Closing twice is harmless."""
        with self._lock:
            self._closed = True
            self._disconnect()

    def __del__(self) -> None:
        if getattr(self, "_connection", None) is not None:
            self.close()

    @contextlib.contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            if self._closed:
                raise StorageError(f"{self._path}: this timeline is closed; open it again with Timeline(path)")
            try:
                if self._connection is None:
                    if self._path == MEMORY and not self._read_only:
                        self._connection = open_memory()
                    else:
                        self._connection = open_read_only(self._path) if self._read_only else open_file(self._path)
                yield self._connection
            except (sqlite3.Error, UnicodeError) as error:
                raise as_storage_error(error, self._path) from error

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


_sessions: weakref.WeakSet[Session] = weakref.WeakSet()
_forking = threading.Lock()
_locked: list[Session] = []


def _before_fork() -> None:
    """Closes connections, which must not cross a fork, and takes the locks, so that no other thread holds one in the child."""
    _forking.acquire()
    for session in list(_sessions):
        session._lock.acquire()
        _locked.append(session)
        if session._path != MEMORY:
            with contextlib.suppress(sqlite3.Error):
                session._disconnect()


def _after_fork() -> None:
    while _locked:
        _locked.pop()._lock.release()
    _forking.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
