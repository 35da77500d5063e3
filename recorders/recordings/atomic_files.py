"""Files that are written whole or not at all, locks of files, and files from anywhere that are read without following links."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import re
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from recorders.errors import CorruptRecordingError, StorageError

if sys.platform != "win32":
    import fcntl

NOT_SUPPORTED = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK}
"""How file systems say that they have no locks, or do not flush folders."""


def flush_file(path: str | os.PathLike[str]) -> None:
    """Flushes a file to the disk."""
    handle = os.open(path, os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def flush_folder(folder: Path) -> None:
    """Flushes the names in a folder to the disk, if the system supports it."""
    if sys.platform == "win32":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in NOT_SUPPORTED:
            raise
    finally:
        os.close(handle)


class FileLock:
    """The exclusive lock of a file, which is created if it is not there; other processes and threads wait for it.

    Attributes:
        held: False if the system has no such locks: Windows, and some network file systems.

    Raises:
        BlockingIOError: another one has had it for `seconds`.
    """

    def __init__(self, path: str | os.PathLike[str], seconds: float = 0.0) -> None:
        # A file object closes itself when it is forgotten: an interrupt may come before any block that closes it.
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
        self._file = os.fdopen(os.open(path, flags, 0o666), "r+b", buffering=0)
        try:
            self.held = self._take(seconds)
        except BaseException:
            self._file.close()
            raise

    def _take(self, seconds: float) -> bool:
        if sys.platform == "win32":
            return False
        collect_at = time.monotonic()
        deadline = collect_at + seconds
        while True:
            try:
                fcntl.flock(self._file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                now = time.monotonic()
                if now >= deadline:
                    raise
                if now >= collect_at:
                    gc.collect()  # one of this process that was interrupted may hold the lock until it is collected
                    collect_at = now + 1.0
                time.sleep(0.01)
            except OSError as error:
                if error.errno not in NOT_SUPPORTED:
                    raise
                return False

    def release(self) -> None:
        """Gives the lock back."""
        try:
            # Closing is not enough: a process forked meanwhile, such as a data loader's worker, would keep the lock.
            if sys.platform != "win32":
                with contextlib.suppress(OSError):
                    fcntl.flock(self._file.fileno(), fcntl.LOCK_UN)
        finally:
            self.close()

    def close(self) -> None:
        """Closes the file: in a forked process, the lock stays that of the one that took it."""
        self._file.close()


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A file beside `path` to write into, which takes its place at the end: a reader never sees half a file.

    Folders are created. If the block raises, what was at `path` stays. A symbolic link stays one: what it points to is replaced. A
    pipe or a device gets the bytes at the end.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with written_whole(Path(folder, "new", "file.txt")) as draft:
    ...         _ = draft.write_text("all of it")
    ...     Path(folder, "new", "file.txt").read_text()
    'all of it'
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file() and not path.is_dir():
        with tempfile.TemporaryDirectory() as folder:
            draft = Path(folder, path.name)
            yield draft
            with draft.open("rb") as file, path.open("wb", buffering=0) as target:
                shutil.copyfileobj(file, target)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    mode = os.umask(0)
    os.umask(mode)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    os.close(handle)
    draft = Path(name)
    try:
        yield draft
        draft.chmod(0o666 & ~mode)  # temporary files are for their owner only
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+::)*[A-Za-z][A-Za-z0-9+.-]+://")


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a URL, also one of fsspec's chains.

    >>> is_url("s3://bucket/run"), is_url("simplecache::gs://bucket/run"), is_url("runs/a::b"), is_url("C://run")
    (True, True, False, False)
    """
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str):
        raise TypeError(f"a path is a text or a pathlib.Path; got {path!r:.100}")
    return _URL.match(text) is not None


def as_path(path: str | os.PathLike[str]) -> str:
    """The path, with a leading "~" expanded; raises `StorageError` if no file can have it."""
    if is_url(path):
        raise StorageError(f"{path} is a URL; this needs a path: only recordings are saved at URLs, and loaded, merged, verified")
    text = os.path.expanduser(os.fspath(path))
    try:
        sound = b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        sound = False
    if not sound:
        raise StorageError(f"{text!r} is no path: it holds a NUL, or half of a surrogate pair")
    return text


@contextlib.contextmanager
def open_regular(path: str, limit: int) -> Iterator[tuple[BinaryIO, int]]:
    """A regular file, open and unbuffered, with its size; follows no link and does not wait on a pipe.

    Raises `CorruptRecordingError` if it is not a regular file or is longer than `limit`, and `OSError` if it cannot be read.
    """
    if os.path.islink(path):
        raise CorruptRecordingError(f"{path} is a symbolic link, which recordings do not hold")
    # Some systems lack these flags. O_NOFOLLOW protects against a link created since the check.
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    handle = os.open(path, flags)
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise CorruptRecordingError(f"{path} is not a regular file")
        if status.st_size > limit:
            raise CorruptRecordingError(f"{path} is {status.st_size} bytes long; at most {limit} are allowed")
        file = os.fdopen(handle, "rb", buffering=0)  # after the checks: of a folder it raises, and leaves the handle open
    except BaseException:
        os.close(handle)
        raise
    with file:
        yield file, status.st_size


def read_regular(path: str, limit: int) -> bytes:
    """The bytes of a regular file; raises what `open_regular` raises."""
    with open_regular(path, limit) as (file, size):
        try:
            return file.read(size)
        except MemoryError as error:
            raise StorageError(f"{path}: its {size} bytes do not fit into memory") from error
