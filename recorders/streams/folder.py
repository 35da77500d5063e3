"""The folder of a stream: created, locked by one writer, and cleaned of what a killed one left."""

from __future__ import annotations

import os
from pathlib import Path

from recorders.errors import NotARecordingError, StorageError
from recorders.recordings.atomic_files import FileLock, flush_file, flush_folder, written_whole
from recorders.streams.index import INDEX, OURS, Shard, first_line, read_index

__all__ = ["lock", "prepare"]

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


def lock(folder: Path) -> FileLock:
    """Locks the folder for one writer.

    Raises:
        StorageError: another writer has it.
    """
    try:
        return FileLock(folder / LOCK)
    except BlockingIOError as error:
        raise StorageError(f"another Stream is writing to {folder}; give each process a folder of its own") from error
