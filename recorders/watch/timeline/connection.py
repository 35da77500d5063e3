"""How the SQLite file of a timeline is created and opened, and the connection of a process to it.

A connection serves one thread at a time, is closed before a fork, and raises errors of SQLite as ours.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import stat
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path, PurePath
from urllib.parse import quote

from recorders.errors import CorruptRecordingError, NotARecordingError, RecordingNotFoundError, SchemaError, StorageError
from recorders.recordings.atomic_files import is_url
from recorders.recordings.storage.remote import fetch_file
from recorders.watch.timeline.schema import APPLICATION_ID, SCHEMA, TABLES, create_tables

MEMORY = ":memory:"

_PATIENCE = 30.0  # seconds to wait for another process that is writing
_JOURNALS = ("-journal", "-wal")


def located(path: str | os.PathLike[str]) -> str:
    """The path of a timeline, which stays the same if the working folder changes, or its URL."""
    found = os.path.expanduser(path)
    if not isinstance(found, str) or not found or "\0" in found:
        raise StorageError(f"a timeline needs the path of a file, or {MEMORY!r}; got {path!r}")
    return found if found == MEMORY or is_url(found) else os.path.abspath(found)


class Connection:
    """The connection of this process, opened when it is needed.

    Args:
        path: the file, or a URL; ":memory:" for a timeline in memory.
        read_only: never write, and never create a file.

    Raises:
        StorageError: see `Timeline`.
    """

    def __init__(self, path: str, read_only: bool) -> None:
        self._path, self._read_only = path, read_only
        self._connection: sqlite3.Connection | None = None
        self._lock = threading.Lock()
        self._closed = False
        _connections.add(self)
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


_connections: weakref.WeakSet[Connection] = weakref.WeakSet()
_forking = threading.Lock()
_locked: list[Connection] = []


def _before_fork() -> None:
    """Closes connections, which must not cross a fork, and takes the locks, so that no other thread holds one in the child."""
    _forking.acquire()
    for connection in list(_connections):
        connection._lock.acquire()
        _locked.append(connection)
        if connection._path != MEMORY:
            with contextlib.suppress(sqlite3.Error):
                connection._disconnect()


def _after_fork() -> None:
    while _locked:
        _locked.pop()._lock.release()
    _forking.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)


def is_damage(error: sqlite3.Error) -> bool:
    """Whether an error of SQLite says that the file is damaged."""
    return any(sign in str(error) for sign in ("malformed", "Could not decode", "corrupt"))


def as_storage_error(error: Exception, path: str) -> StorageError:
    """An error of SQLite as a `StorageError`."""
    if "file is not a database" in str(error):
        return NotARecordingError(f"{path} is not a timeline: {error}; it is left as it was")
    if isinstance(error, sqlite3.Error) and is_damage(error):
        return CorruptRecordingError(f"{path} is damaged: {error}; `recorders check` tells which ticks are whole, if any are")
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


def open_memory() -> sqlite3.Connection:
    """A new timeline in memory."""
    db = _connect(":memory:")
    create_tables(db)
    return db


def open_file(path: str) -> sqlite3.Connection:
    """A connection to the file, which is created, or checked.

    It has a rollback journal, not a write-ahead log: a tick waits for the disk more often, but network file systems will do, and
    all ticks are in one file, which can be copied, and read where nothing can be written. `synchronous = EXTRA` also writes the
    folder to the disk, so that a power loss cannot bring back the journal of a transaction that was committed.
    """
    if is_url(path):
        raise StorageError(f"a timeline at a URL can only be read: Timeline({path!r}, read_only=True)")
    if not os.path.lexists(path):
        _create(path)
    _check_file(path)
    if not (os.access(path, os.W_OK) and os.access(os.path.dirname(path), os.W_OK)):
        raise StorageError(f"{path} cannot be written, or its folder cannot: to read it, use Timeline(path, read_only=True)")
    with _connected(path, "rw") as db:
        db.execute("PRAGMA journal_mode = DELETE")  # of a file that another program gave a write-ahead log
        db.execute("PRAGMA synchronous = EXTRA")
        db.execute("PRAGMA secure_delete = ON")  # so that no page holds rows that were removed, which would have right checksums
    return db


def open_read_only(path: str) -> sqlite3.Connection:
    """A connection to the file that cannot write; nothing is created or changed in the folder.

    If the file cannot be read like that, it is read from a copy in memory. That is so for files of a writer that was killed in the
    middle of a tick, which must be undone first, for those with a write-ahead log, and for URLs, as they are when they are opened.
    """
    if is_url(path):
        return _copied(path, fetch_file)
    if not os.path.exists(path):
        raise RecordingNotFoundError(f"there is no timeline at {path}")
    _check_file(path)
    with open(path, "rb") as file:
        log = 2 in file.read(20)[18:20]  # SQLite would create the files of a write-ahead log
    if not log:
        try:
            with _connected(path, "ro") as db:
                return db
        except sqlite3.OperationalError as error:
            if "locked" in str(error):
                raise
    return _copied(path)


def _copied(path: str, copy: Callable[[str, str], object] = shutil.copyfile) -> sqlite3.Connection:
    """The file in memory, with what its journal undoes undone; raises `RecordingNotFoundError` if there is none."""
    with tempfile.TemporaryDirectory() as folder:
        draft = os.path.join(folder, "copy")
        copy(path, draft)
        for end in _JOURNALS:
            with contextlib.suppress(FileNotFoundError, StorageError):  # most have none, and some stores refuse to say so
                copy(path + end, draft + end)
        _check_file(draft, path)
        with _connected(draft, "rw", path) as db:
            found = _connect(MEMORY)
            db.backup(found)
        db.close()
    found.execute("PRAGMA query_only = ON")
    return found


def _create(path: str) -> None:
    """Creates an empty timeline, at once: no other process finds half of it."""
    try:
        handle, draft = tempfile.mkstemp(prefix=f".{os.path.basename(path)}.", suffix=".tmp", dir=os.path.dirname(path))
        os.close(handle)
        try:
            mode = os.umask(0)
            os.umask(mode)
            os.chmod(draft, 0o666 & ~mode)
            with _connected(draft, "rw", new=True) as db:
                db.execute("PRAGMA journal_mode = MEMORY")
                with transaction(db):
                    create_tables(db)
            db.close()
            try:
                os.link(draft, path)
            except FileExistsError:
                pass  # another process was faster
            except OSError:  # a file system without links
                if not os.path.exists(path):
                    os.rename(draft, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(draft)
    except OSError as error:
        raise StorageError(f"{path} cannot be created: {error}") from error


def _check_file(path: str, name: str = "") -> None:
    try:
        status = os.stat(path)
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error}") from error
    if not stat.S_ISREG(status.st_mode):
        raise NotARecordingError(f"{name or path} is not a file, so not a timeline")
    if not status.st_size:
        raise CorruptRecordingError(
            f"{name or path} is empty: if a timeline was there, it is lost; remove the file to begin a new one"
        )


def _connect(database: str, *, uri: bool = False) -> sqlite3.Connection:
    # Transactions are explicit (isolation_level=None), and the timeline's own lock keeps threads apart.
    db = sqlite3.connect(database, timeout=_PATIENCE, isolation_level=None, check_same_thread=False, uri=uri)
    db.execute("PRAGMA trusted_schema = OFF")
    return db


@contextlib.contextmanager
def _connected(path: str, mode: str, name: str = "", new: bool = False) -> Iterator[sqlite3.Connection]:
    """A connection to a file that exists, which is closed if the block raises; never writes into a file of another program."""
    db = _connect(f"{as_sqlite_uri(Path(path))}?mode={mode}", uri=True)
    try:
        if not new:
            with transaction(db, "DEFERRED"):
                _check_tables(db, name or path)
        yield db
    except BaseException:
        db.close()
        raise


def as_sqlite_uri(path: PurePath) -> str:
    """The URI by which SQLite opens a file at an absolute path. It knows no hosts, so that of a UNC path is a part of the path.

    >>> from pathlib import PureWindowsPath
    >>> as_sqlite_uri(PurePath("/a b/run#1.db")), as_sqlite_uri(PureWindowsPath(r"\\\\server\\share\\run.db"))
    ('file:///a%20b/run%231.db', 'file:////server/share/run.db')
    """
    text = path.as_posix()
    for prefix in ("//?/UNC/", "//./UNC/"):
        text = f"//{text.removeprefix(prefix)}" if text.startswith(prefix) else text
    for prefix in ("//?/", "//./"):
        text = text.removeprefix(prefix)
    return "file://" + ("" if text.startswith("/") else "/") + quote(text, safe="/:")


def _check_tables(db: sqlite3.Connection, path: str) -> None:
    """Raises an error if the file is no timeline, or one of a newer version."""
    application, version = (db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version"))
    tables = tuple(sql for (sql,) in db.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY rowid"))
    if application != APPLICATION_ID:
        raise NotARecordingError(f"{path} is an SQLite file of another program, not a timeline; it is left as it was")
    if version > SCHEMA:
        raise SchemaError(f"{path} has schema {version}, this version of torch-recorders knows {SCHEMA}: install a newer one")
    if version != SCHEMA or tables != TABLES:
        raise CorruptRecordingError(f"{path} says it is a timeline of schema {version}, but its tables are not those of one")
