"""Saving as one commit: files into a new generation folder, then one rename of the manifest.

Killed, out of disk or failing anywhere, the folder holds the old commit or the new one, never a mixture. What a killed save left
behind is taken away by the next one.
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
"""How many files are flushed at once: file systems commit the journal once for all who wait, so this divides the waiting."""

_OURS = re.compile(r"generation-[0-9a-f]{32}|manifest-[0-9a-f]{32}\.tmp")
_NOT_SUPPORTED = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK}


class Commit:
    """One save into the folder `root`, alone there while the block lasts.

    Leaving the block without `publish` takes away what was written.

    Raises:
        NotARecordingError: `root` is a file, or a folder with something other than a recording in it.
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
        _claim(self.root)
        with self._stack:
            self._alone = self._stack.enter_context(_lock(self.root))
            self._previous = self._recover()
            self._folder.mkdir()
            self._stack = self._stack.pop_all()
        return self

    def write(self, file: str, data: bytes | bytearray) -> None:
        """Writes one new file into the generation; on the disk for certain only after `publish`."""
        path = os.path.join(self._folder, file)
        _write(path, data)
        self._files.append(path)

    def publish(self, manifest: bytes) -> None:
        """Puts everything on the disk, then makes it the recording: the rename of the manifest is the commit."""
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
            # A rename that failed may have happened all the same; then the manifest needs these files.
            if not self._renaming:
                _remove(self._folder)
                _remove(self._draft)

    def _recover(self) -> str | None:
        """Makes room: takes away what killed saves left. Returns the generation in force, where it had to be looked up."""
        ours = _ours(self.root)
        if self._alone and len(ours) < 2:
            return None
        try:
            live = read_manifest(os.fspath(self.root)).generation
        except (StorageError, OSError):
            # Which generation belongs to a damaged manifest is not known, so all stay until this save is done.
            return None
        if self._alone:
            for name in ours - {live}:
                _remove(self.root / name)
        return live

    def _sweep(self) -> None:
        """Removes older generations and all leftovers; not alone, only the generation that this save replaced."""
        replaced = {self._previous} if self._previous else set()
        for name in _ours(self.root) - {self.generation} if self._alone else replaced:
            _remove(self.root / name)


def _claim(root: Path) -> None:
    """Makes the folder, or sees to it that what is there is a recording or the beginning of one."""
    missing = [folder for folder in (root, *root.parents) if not folder.exists()]
    try:
        root.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise NotARecordingError(
            f"{root} is a file: a recording is a folder, so name one that is new, or one saved to before"
        ) from error
    for folder in missing:
        _flush_folder(folder.parent)
    # Listed once, for another saver may be at work here.
    listed = set(os.listdir(root))
    ours = {name for name in listed if _OURS.fullmatch(name)}
    others = listed - ours - {LOCK}
    if MANIFEST in others:
        # Beside a generation of ours, a manifest that is not readable as one is a damaged one.
        with open(root / MANIFEST, "rb") as file:
            if ours or is_manifest(file.read(100)):
                return
    if others:
        raise NotARecordingError(
            f"{root} holds {sorted(others)[:5]} and no recording: save into a new folder, or into one saved to before"
        )


def _ours(root: Path) -> set[str]:
    """Generations and drafts of manifests in the folder."""
    return {name for name in os.listdir(root) if _OURS.fullmatch(name)}


@contextlib.contextmanager
def _lock(root: Path) -> Iterator[bool]:
    """Waits until no other process or thread saves here; False where the system has no such locks."""
    handle = os.open(root / LOCK, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
    alone = False
    try:
        alone = _exclusive(handle)
        yield alone
    finally:
        # Closing alone would leave the lock with a process that was forked meanwhile, such as a data loader's worker.
        if sys.platform != "win32" and alone:
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
    """Puts files on the disk. After all are written, so that the first flush finds most of the others under way."""
    threads = min(THREADS, len(paths))
    if threads > 1:
        try:
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(_flush_each, [paths[start::threads] for start in range(threads)]))
            return
        except RuntimeError:
            # Threads cannot be started while the interpreter shuts down, and saving at exit must work.
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
    """Puts the names in a folder on the disk, where the system knows such a thing."""
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
    """Removes a file or folder of ours as far as the system lets it; what stays is for the next save."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()
