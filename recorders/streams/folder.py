"""The folder of a stream: created, locked by one writer, and cleaned of what a killed one left."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from recorders.errors import NotARecordingError, StorageError
from recorders.recordings.atomic_files import flush_file, flush_folder, written_whole
from recorders.streams.index import INDEX, OURS, Shard, first_line, read_index

if sys.platform != "win32":
    import fcntl

__all__ = ["lock", "prepare", "unlock"]

LOCK = ".lock"


def prepare(folder: Path) -> list[Shard]:
    """Creates the stream, or removes from it what is not committed; returns the shards. The folder must be locked.

    Raises:
        NotARecordingError: the folder holds something else.
    """
    names = [name for name in os.listdir(folder) if name != LOCK and not name.startswith(f".{INDEX}.")]
    if INDEX not in names:
        if names:  # perhaps files of shards whose index is gone: they are somebody's data
            raise NotARecordingError(
                f"{folder} holds {sorted(names)[:5]} and no stream: write into a new folder, or go on with a stream"
            )
        with written_whole(folder / INDEX) as draft:
            draft.write_bytes(first_line())
            flush_file(draft)
        flush_folder(folder)
    shards, end = read_index(folder)
    os.truncate(folder / INDEX, end)
    committed = {part.file for shard in shards for part in shard.parts.values()}
    for name in os.listdir(folder):
        if name.startswith(f".{INDEX}.") or (OURS.fullmatch(name) and name not in committed):
            (folder / name).unlink()
    return shards


def lock(folder: Path) -> int:
    """Locks the folder for one writer; returns the handle that holds the lock.

    Raises:
        StorageError: another writer has it.
    """
    handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    if sys.platform != "win32":
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(handle)
            raise StorageError(f"another Stream is writing to {folder}; give each process a folder of its own") from error
        except OSError:  # some network file systems have no locks
            pass
    return handle


def unlock(handle: int) -> None:
    """Gives the lock back."""
    if sys.platform != "win32":
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)
    os.close(handle)
