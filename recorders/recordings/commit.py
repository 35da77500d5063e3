"""Commit: writes files into a new generation folder, then replaces the manifest by one rename.

If the process is killed, the disk is full or anything fails, the folder holds either the old commit or the new one. The next save
removes what a killed save left.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import sys
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

from recorders.errors import NotARecordingError, StorageError
from recorders.recordings.manifest import MANIFEST, is_manifest, read_manifest

if sys.platform != "win32":
    import fcntl

__all__ = ["Commit"]

LOCK = ".lock"
THREADS = 8
"""How many files are flushed at once: file systems commit the journal once for all that wait."""

_OURS = re.compile(r"generation-[0-9a-f]{32}|manifest-[0-9a-f]{32}\.tmp")
_NOT_SUPPORTED = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK}


class Commit:
    """One save into the folder `root`, which is locked during the `with` block.

    If the block ends without `publish`, what was written is removed.

    Raises:
        NotARecordingError: `root` is a file, or a folder that contains something else than a recording.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        unique = uuid.uuid4().hex
        self.generation = f"generation-{unique}"
        self._folder = root / self.generation
        self._draft = root / f"manifest-{unique}.tmp"
        self._files: list[str] = []
        self._renaming = False
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Commit:
        _prepare(self.root)
        with self._stack:
            self._has_lock = self._stack.enter_context(_lock(self.root))
            self._previous = self._recover()
            self._folder.mkdir()
            self._stack = self._stack.pop_all()
        return self

    def write(self, file: str, data: bytes | bytearray) -> None:
        """Writes one new file into the generation; it is flushed to the disk by `publish`."""
        path = os.path.join(self._folder, file)
        _write(path, data)
        self._files.append(path)

    def publish(self, manifest: bytes) -> None:
        """Flushes everything to the disk, then renames the manifest, which is the commit."""
        _flush(self._files)
        _flush_folder(self._folder)
        _write(os.fspath(self._draft), manifest)
        _flush([os.fspath(self._draft)])
        self._renaming = True
        os.replace(self._draft, self.root / MANIFEST)
        _flush_folder(self.root)
        with contextlib.suppress(OSError):
            self._sweep()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._stack:
            # A rename that raised may still have happened; the manifest would then need these files.
            if not self._renaming:
                _remove(self._folder)
                _remove(self._draft)

    def _recover(self) -> str | None:
        """Removes what killed saves left; returns the current generation if it had to be looked up."""
        ours = _own_names(self.root)
        if self._has_lock and len(ours) < 2:
            return None
        try:
            live = read_manifest(os.fspath(self.root)).generation
        except (StorageError, OSError):
            # The generation of a damaged manifest is unknown, so all stay until this save is done.
            return None
        if self._has_lock:
            for name in ours - {live}:
                _remove(self.root / name)
        return live

    def _sweep(self) -> None:
        """Removes older generations and all leftovers; without a lock, only the generation that this save replaced."""
        replaced = {self._previous} if self._previous else set()
        for name in _own_names(self.root) - {self.generation} if self._has_lock else replaced:
            _remove(self.root / name)


def _prepare(root: Path) -> None:
    """Creates the folder, or checks that it is empty or holds a recording, complete or not."""
    missing = [folder for folder in (root, *root.parents) if not folder.exists()]
    try:
        root.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise NotARecordingError(f"{root} is a file: save into a new folder, or into one that holds a recording") from error
    for folder in missing:
        _flush_folder(folder.parent)
    # Listed only once, because another process may be saving here.
    listed = set(os.listdir(root))
    ours = {name for name in listed if _OURS.fullmatch(name)}
    others = listed - ours - {LOCK}
    if MANIFEST in others:
        # If there is a generation too, an unreadable manifest is a damaged manifest.
        with open(root / MANIFEST, "rb") as file:
            if ours or is_manifest(file.read(100)):
                return
    if others:
        raise NotARecordingError(f"{root} holds {sorted(others)[:5]} and no recording: save into a new folder, or over a recording")


def _own_names(root: Path) -> set[str]:
    """The names of generations and manifest drafts in the folder."""
    return {name for name in os.listdir(root) if _OURS.fullmatch(name)}


@contextlib.contextmanager
def _lock(root: Path) -> Iterator[bool]:
    """Waits until no other process or thread saves here; yields False if the system has no such locks."""
    handle = os.open(root / LOCK, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
    locked = False
    try:
        locked = _exclusive(handle)
        yield locked
    finally:
        # Closing is not enough: a process forked meanwhile, such as a data loader's worker, would keep the lock.
        if sys.platform != "win32" and locked:
            fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)


def _exclusive(handle: int) -> bool:
    if sys.platform == "win32":
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
    except OSError as error:
        # Some network file systems are mounted without locks.
        if error.errno not in _NOT_SUPPORTED:
            raise
        return False
    return True


def _write(path: str, data: bytes | bytearray) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(handle, rest) :]
    finally:
        os.close(handle)


def _flush(paths: Sequence[str]) -> None:
    """Flushes files to the disk; faster when all are written, because the system has then begun with the others."""
    threads = min(THREADS, len(paths))
    if threads > 1:
        try:
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(_flush_each, [paths[start::threads] for start in range(threads)]))
            return
        except RuntimeError:
            # Threads cannot be started while the interpreter shuts down, but saving at exit must work.
            pass
    _flush_each(paths)


def _flush_each(paths: Sequence[str]) -> None:
    for path in paths:
        handle = os.open(path, os.O_RDWR)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _flush_folder(folder: Path) -> None:
    """Flushes the names in a folder to the disk, if the system supports it."""
    if sys.platform == "win32":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _NOT_SUPPORTED:
            raise
    finally:
        os.close(handle)


def _remove(path: Path) -> None:
    """Removes a file or folder if the system permits; the next save removes what is left."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()
