"""The SQLite file of a timeline: how it is created, opened for writing, and opened where nothing may be written."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path, PurePath
from urllib.parse import quote

from recorders.errors import CorruptRecordingError, NotARecordingError, RecordingNotFoundError, SchemaError, StorageError
from recorders.watch.timeline.schema import APPLICATION_ID, SCHEMA, TABLES, create_tables
from recorders.watch.timeline.transactions import transaction

__all__ = ["open_file", "open_memory", "open_read_only"]

_PATIENCE = 30.0  # seconds to wait for another process that is writing
_JOURNALS = ("-journal", "-wal")


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
    if not os.path.lexists(path):
        _create(path)
    _check_file(path)
    if not (os.access(path, os.W_OK) and os.access(os.path.dirname(path), os.W_OK)):
        raise StorageError(f"{path} cannot be written, or its folder cannot: to read it, use Timeline(path, read_only=True)")
    with _connected(path, "rw") as db:
        if db.execute("PRAGMA journal_mode").fetchone()[0] == "wal":
            _end_log(db)
        db.execute("PRAGMA synchronous = EXTRA")
    return db


def open_read_only(path: str) -> sqlite3.Connection:
    """A connection to the file that cannot write; nothing is created or changed in the folder.

    If the file cannot be read like that, it is read from a copy in memory. That is so for files of a writer that was killed in the
    middle of a tick, which must be undone first, and for those with a write-ahead log.
    """
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


def _copied(path: str) -> sqlite3.Connection:
    """The file in memory, with what its journal undoes undone."""
    with tempfile.TemporaryDirectory() as folder:
        copy = os.path.join(folder, "copy")
        for end in ("", *_JOURNALS):
            if os.path.exists(path + end):
                shutil.copyfile(path + end, copy + end)
        with _connected(copy, "rw", path) as db:
            found = _connect(":memory:")
            db.backup(found)
        db.close()
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


def _check_file(path: str) -> None:
    try:
        status = os.stat(path)
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error}") from error
    if not stat.S_ISREG(status.st_mode):
        raise NotARecordingError(f"{path} is not a file, so not a timeline")
    if not status.st_size:
        raise CorruptRecordingError(f"{path} is empty: if a timeline was there, it is lost; remove the file to begin a new one")


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


def _end_log(db: sqlite3.Connection) -> None:
    """Gives a file that another program gave a write-ahead log a rollback journal again.

    SQLite waits for ordinary locks, but not for those of a file that changes between kinds of journals.
    """
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            db.execute("PRAGMA journal_mode = DELETE")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
