"""Commit: writes files into a new generation folder, then replaces the manifest by one rename.

If the process is killed, the disk is full or anything fails, the folder holds either the old commit or the new one. The next save
removes what a killed save left.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import sys
import threading
import uuid
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

from recorders.errors import NotARecordingError, RecordingExistsError, StorageError
from recorders.recordings.atomic_files import FileLock, as_path, flush_file, flush_folder, is_url, open_regular, read_regular
from recorders.recordings.storage.schema import (
    GENERATION,
    MANIFEST,
    MAX_BYTES,
    Manifest,
    check_replaceable,
    read_manifest,
    read_rank,
)

LOCK = ".lock"
MAX_START = 4096
"""In how many bytes of a manifest the name of its generation is looked for first."""
LOCK_SECONDS = 300.0
"""How long a save waits for another one, before it says so in an error."""
THREADS = 8
"""How many files are flushed at once: file systems commit the journal once for all that wait."""

_committing: weakref.WeakValueDictionary[tuple[str, int, int], Commit] = weakref.WeakValueDictionary()
"""The saves that are under way, by folder, process and thread. One that was interrupted anywhere is not kept."""

_OURS = re.compile(rf"{GENERATION.pattern}|manifest-[0-9a-f]{{32}}\.tmp")


class Generation:
    """The folder of the new files of one save, which any process that sees it may write into.

    Attributes:
        generation: the name of the folder of the new files.
        live: the folder of the files that the present manifest names; "" if there is none that can be read.
    """

    def __init__(self, root: Path, generation: str, live: str = "") -> None:
        self.root, self.generation, self.live = root, generation, live
        self._folder = root / generation
        self._files: list[str] = []

    def write(self, file: str, chunks: Iterable[bytes | memoryview]) -> tuple[int, str]:
        """Writes one new file, which `flush` flushes to the disk; returns its length and its SHA-256."""
        path = os.path.join(self._folder, file)
        written = _write(path, chunks)
        self._files.append(path)
        return written

    def discard(self, file: str) -> None:
        """Removes a file of which writing failed, if the system permits; no manifest names it."""
        _remove(self._folder / file)

    def flush(self) -> None:
        """Flushes to the disk what this process wrote, and the names in the folder."""
        _flush(self._files)
        self._files.clear()
        flush_folder(self._folder)


class Commit(Generation):
    """One save into the folder `root`, which is locked during the `with` block.

    If the block ends without `publish`, what was written is removed.

    Raises:
        NotARecordingError: `root` is a file, or a folder that contains something else than a recording.
    """

    def __init__(self, root: Path) -> None:
        unique = uuid.uuid4().hex
        super().__init__(root, f"generation-{unique}")
        self._draft = root / f"manifest-{unique}.tmp"
        self._renaming = False
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Commit:
        _prepare(self.root)
        here = os.path.realpath(self.root), os.getpid(), threading.get_ident()
        if here in _committing:
            raise StorageError(
                f"cannot save to {self.root}: a handler of a signal came while this thread was saving there, and that save can go "
                "on only after the handler; save in the training loop, or into another folder"
            )
        with self._stack:
            _committing[here] = self
            self._stack.callback(_committing.pop, here, None)
            try:
                lock = FileLock(self.root / LOCK, LOCK_SECONDS)
            except BlockingIOError:
                raise StorageError(
                    f"cannot save to {self.root}: another process has been saving there for {LOCK_SECONDS:.0f} s, and may be "
                    f"stopped; end it (it holds {self.root / LOCK}), or save into another folder"
                ) from None
            self._stack.callback(lock.release)
            self._has_lock = lock.held
            self.live = self._recover()
            self._folder.mkdir()
            self._stack = self._stack.pop_all()
        return self

    def publish(self, manifest: bytes) -> None:
        """Flushes everything to the disk, then renames the manifest, which is the commit."""
        self.flush()
        _write(os.fspath(self._draft), [manifest])
        _flush([os.fspath(self._draft)])
        # The name of the generation must be on the disk before the manifest that names it.
        flush_folder(self.root)
        self._renaming = True
        os.replace(self._draft, self.root / MANIFEST)
        flush_folder(self.root)
        with contextlib.suppress(OSError):
            self._sweep()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._stack:
            # A rename that raised may still have happened; the manifest would then need these files.
            if not self._renaming:
                _remove(self._folder)
                _remove(self._draft)

    def _recover(self) -> str:
        """Removes what killed saves left; returns the present generation.

        Of a damaged manifest, the generation stays that it names: its files may be whole. If it cannot be read, all stay.
        """
        ours = _own_names(self.root)
        where = os.fspath(self.root / MANIFEST)
        try:
            start = _start(where, MAX_START)
            named = {name for name in ours if name.encode() in start}
            if ours and not named:
                raw = read_regular(where, MAX_BYTES)
                named = {name for name in ours if name.encode() in raw}
        except FileNotFoundError:
            named = set()
        except (StorageError, OSError):
            return ""
        for name in ours - named if self._has_lock else ():
            _remove(self.root / name)
        return next(iter(named)) if len(named) == 1 else ""

    def _sweep(self) -> None:
        """Removes older generations and all leftovers; without a lock, only the generation that this save replaced."""
        replaced = {self.live} if self.live else set()
        for name in _own_names(self.root) - {self.generation} if self._has_lock else replaced:
            _remove(self.root / name)


def _prepare(root: Path) -> None:
    """Creates the folder, or checks that it is empty or holds a recording, complete or not."""
    missing = [folder for folder in (root, *root.parents) if not folder.exists()]
    try:
        root.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        what = "a link to nothing" if root.is_symlink() and not os.path.exists(root) else "a file"
        raise NotARecordingError(f"{root} is {what}: save into a new folder, or into one that holds a recording") from error
    for folder in missing:
        flush_folder(folder.parent)
    # Listed only once, because another process may be saving here.
    listed = set(os.listdir(root))
    ours = {name for name in listed if _OURS.fullmatch(name)}
    others = listed - ours - {LOCK}
    start: bytes | None = None
    if MANIFEST in others:
        try:
            start = _start(os.fspath(root / MANIFEST), 200)
        except (StorageError, OSError):
            start = b""
    check_replaceable(start, others - {MANIFEST}, str(root), "into a new folder", damaged=bool(ours))


def never_committed(path: str | os.PathLike[str]) -> bool:
    """Whether a folder has nothing but what a save left in it that was killed before it was done."""
    if is_url(path):
        return False
    names = set(os.listdir(as_path(path))) if os.path.isdir(as_path(path)) else set[str]()
    return LOCK in names and all(name == LOCK or _OURS.fullmatch(name) for name in names)


def _own_names(root: Path) -> set[str]:
    """The names of generations and manifest drafts in the folder."""
    return {name for name in os.listdir(root) if _OURS.fullmatch(name)}


def _start(path: str, count: int) -> bytes:
    """The first bytes of a regular file."""
    with open_regular(path, sys.maxsize) as (file, _):
        return file.read(count)


def _write(path: str, chunks: Iterable[bytes | memoryview]) -> tuple[int, str]:
    digest, length = hashlib.sha256(), 0
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
    try:
        for chunk in chunks:
            digest.update(chunk)
            length += len(chunk)
            rest = memoryview(chunk)
            while rest:
                rest = rest[os.write(handle, rest) :]
    finally:
        os.close(handle)
    return length, digest.hexdigest()


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
        flush_file(path)


def _remove(path: Path) -> None:
    """Removes a file or folder if the system permits; the next save removes what is left."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def names_in(manifest: Manifest, read: Callable[[int], Manifest], rank: int | None = None) -> Collection[str]:
    """The names in a recording; of one of its ranks, if it is given. `read` reads the manifest of a rank."""
    if manifest.ranks is None:
        return manifest.lines
    names: dict[str, None] = {}
    for one in manifest.ranks if rank is None else {rank} & manifest.ranks.keys():
        with contextlib.suppress(StorageError, OSError):
            names.update(dict.fromkeys(read(one).lines))
    return names


def names_at(root: str, rank: int | None = None) -> Collection[str]:
    """The names in the recording in a folder, as `names_in`; none if no manifest of them can be read."""
    try:
        manifest = read_manifest(root, skip=True)
    except (StorageError, OSError):
        return ()
    return names_in(manifest, lambda one: read_rank(root, manifest, one), rank)


def check_same_net(names: Collection[str], there: Collection[str], where: str) -> None:
    """Raises `RecordingExistsError` if a recording of the names `there` is that of another net than the one of these names.

    Names are all that tells: of those of the smaller of both recordings, half must be in the other. So one of fewer or of more
    modules of the same net is the same.
    """
    common = set(names).intersection(there)
    if there and 2 * len(common) < max(1, min(len(names), len(there))):
        new, old = ([name for name in some if name not in common][:5] for some in (names, there))
        raise RecordingExistsError(
            f"{where} holds the recording of another net, of {len(there)} subrecorders such as {old}; only {len(common)} of the "
            f"{len(names)} to be saved, such as {new}, are in it: save into another folder, or replace it with overwrite=True"
        )
