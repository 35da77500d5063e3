"""Writer: the thread that writes the rows of a queue into shards, and commits them."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch

from recorders.errors import NotARecordingError, StorageError
from recorders.recordings.atomic_files import FileLock, flush_file, flush_folder, written_whole
from recorders.streams.index import FIRST, INDEX, OURS, Kind, Shard, append, as_line, read_index
from recorders.streams.parts import PartWriter
from recorders.streams.queue import Queue, QueuedRows, as_row_ids, on_host

LOCK = ".lock"

_all: weakref.WeakSet[Writer] = weakref.WeakSet()


class Writer:
    """Writes what comes out of its queue; a shard is committed at the end of the batch in which it reaches `shard_bytes`.

    Args:
        folder: is created if it does not exist; what a killed writer left in it is removed.

    Attributes:
        kinds: by place; those of places that were never committed too.
        committed: the last shard; None before the first.
        rows: how many rows of each place are committed.
        batches: how many batches are written; `next_ids` are the ids of the samples after them that come without one, by place.
        failure: why it stopped; "" while it works.
        dropped: the number of rows that were refused or lost.
    """

    def __init__(self, folder: Path, shard_bytes: int, queue: Queue) -> None:
        self.folder, self.queue, self._shard_bytes = folder, queue, shard_bytes
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = FileLock(folder / LOCK)
        except BlockingIOError as error:
            raise StorageError(f"another Stream is writing to {folder}; give each process a folder of its own") from error
        except OSError as error:
            raise StorageError(f"cannot write a stream to {folder}: {error}; give a folder that can be made, or written") from error
        try:
            shards = prepare(folder)
        except BaseException:
            self._lock.release()
            raise
        self.committed = shards[-1] if shards else None
        self.kinds: dict[str, Kind] = {place: part.kind for shard in shards for place, part in shard.parts.items()}
        self.rows = dict.fromkeys(self.kinds, 0)
        for shard in shards:
            self._count(shard)
        self.next_ids: Mapping[str, int] = self.committed.next_ids if self.committed else {}
        self.batches, self.dropped = (self.committed.batches, self.committed.dropped) if self.committed else (0, 0)
        self._number, self._dropped_by_then = len(shards), self.dropped
        self.failure = ""
        self._parts: dict[str, PartWriter] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._open = True
        self._thread = threading.Thread(target=self._run, name=f"stream to {folder}", daemon=True)
        self._thread.start()
        _all.add(self)

    @property
    def complete(self) -> str:
        """What is committed, for messages."""
        rows = ", ".join(f"{rows} of {place!r}" for place, rows in [*self.rows.items()][:8])
        return f"{self._number} shards are complete, with {rows or 'no rows'}"

    def end_batch(self, next_ids: Mapping[str, int]) -> None:
        """Says that a batch is complete: a shard may end here. `next_ids` are those of the shard, if it does."""
        self.queue.end_batch(partial(self._end_batch, dict(next_ids), self.dropped))

    def flush(self) -> None:
        """Commits what was accepted, and waits until that is done, or the writer has stopped."""
        done = threading.Event()
        self.queue.call(self._commit)
        self.queue.call(done.set)
        with self.queue.changed:
            self.queue.changed.wait_for(lambda: done.is_set() or self.queue.stopped)

    def close(self) -> None:
        """Commits what was accepted, ends the thread, and gives the lock back."""
        if threading.current_thread() is self._thread:  # it happened to collect the stream as garbage, and cannot wait for itself
            threading.Thread(target=self.close).start()
        elif self._open:
            self._open = False
            self.flush()
            self.queue.stop()
            self._thread.join()
            self._lock.release()

    def forget(self) -> None:
        """What a forked process does with its copy: the lock and the folder belong to the other process."""
        if not self._open:
            return
        self._open, self.failure = False, "it belongs to the process that made it, and this is another one"
        self.queue.changed = threading.Condition()  # the thread that held the lock is not here
        self.queue.stop()
        self._lock.close()

    def _run(self) -> None:
        entry: QueuedRows | Callable[[], None] | None = None
        try:
            while (entry := self.queue.take()) is not None:
                if isinstance(entry, QueuedRows):
                    self._write(entry)
                    self.queue.written(entry.size)
                else:
                    entry()
                    self.queue.written(0)
                entry = None  # frees its memory before this waits
        except Exception as error:
            self._fail(error, [entry] if isinstance(entry, QueuedRows) else [])

    def _write(self, rows: QueuedRows) -> None:
        part = self._parts.get(rows.place)
        if part is None:
            part = self._parts[rows.place] = PartWriter(self.folder, self._number, len(self._parts), rows.place, rows.kind)
        ids = rows.ids if isinstance(rows.ids, int) else on_host(rows.ids, rows.ids_ready, self._streams)
        part.append(on_host(rows.values, rows.ready, self._streams), as_row_ids(ids, rows.lead))

    def _end_batch(self, next_ids: Mapping[str, int], dropped: int) -> None:
        self.batches, self.next_ids, self._dropped_by_then = self.batches + 1, next_ids, dropped
        if sum(part.size for part in self._parts.values()) >= self._shard_bytes:
            self._commit()

    def _commit(self) -> None:
        """Flushes the files of the shard to the disk, then adds its line to the index, which is the commit."""
        if not self._parts and self.batches == (self.committed.batches if self.committed else 0):
            return
        parts = {place: part.finish() for place, part in self._parts.items()}
        flush_folder(self.folder)
        shard = Shard(self._number, parts, self.batches, self._dropped_by_then, self.next_ids)
        self._parts = {}  # from here on the index may name the files, even if appending the line raises
        append(self.folder / INDEX, as_line(shard))
        self.committed, self._number = shard, self._number + 1
        self._count(shard)

    def _count(self, shard: Shard) -> None:
        for place, part in shard.parts.items():
            self.rows[place] = self.rows.get(place, 0) + part.rows

    def _fail(self, error: Exception, taken: list[QueuedRows]) -> None:
        """Stops for good; what is committed stays, and the file of the present shard is removed to make room.

        Args:
            taken: the rows that it could not write.
        """
        self.failure = f"{type(error).__name__}: {error}"
        with self.queue.changed:  # as rows are also dropped by who puts them
            lost = [*taken, *self.queue.stop()]
            self.dropped += sum(math.prod(rows.lead) for rows in lost) + sum(part.rows for part in self._parts.values())
        for part in self._parts.values():
            with contextlib.suppress(OSError):
                part.path.unlink()


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
            draft.write_bytes(FIRST)
            flush_file(draft)
        flush_folder(folder)
    shards, end = read_index(folder)
    os.truncate(folder / INDEX, end)
    committed = {part.file for shard in shards for part in shard.parts.values()}
    for name in os.listdir(folder):
        if name.startswith(f".{INDEX}.") or (OURS.fullmatch(name) and name not in committed):
            (folder / name).unlink()
    return shards


def _after_fork() -> None:
    for writer in _all:
        writer.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
