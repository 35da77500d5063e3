"""`save_sharded`: every rank of a process group writes its own files into one folder, and one rank commits all of them.

The lowest rank of the group makes the folder of the new files, and locks the recording. Then every rank writes and flushes its own
files there, and a manifest of them. When all have said so, the lowest rank writes a manifest that names those of all ranks, and
renames it, which is the commit. So there are three collectives of a few hundred bytes a rank, whatever was recorded.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from recorders._torch import without_modes
from recorders.errors import MergeError, NotARecordingError, RecordingExistsError, SchemaError, StorageError, SyncError
from recorders.recordings.atomic_files import as_path, open_regular
from recorders.recordings.distributed.collectives import Exchange, Message, is_alone
from recorders.recordings.recording import Recording
from recorders.recordings.storage.commit import Commit, Generation, check_same_net, names_at
from recorders.recordings.storage.load import load, manifest_at
from recorders.recordings.storage.remote import fetched
from recorders.recordings.storage.save import Layout, Turn, save, versions, warn_left_out, write_rank
from recorders.recordings.storage.schema import RankFile, encode_ranks, rank_file, read_manifest, shown_ranks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

VISIBLE_SECONDS = 5.0
"""How long a rank waits for what another one has made: network file systems may show it a little later."""

_KINDS = (StorageError, NotARecordingError, RecordingExistsError, SchemaError)
"""The errors that are raised on all ranks if one of them raised one; any other becomes the first of these."""
_SHOWN = 10
"""Of how many ranks an error tells what went wrong."""


def save_sharded(
    recording: Recording,
    path: str | os.PathLike[str],
    group: ProcessGroup | None = None,
    *,
    layout: Layout = "folder",
    overwrite: bool = False,
) -> Path:
    """Writes the recordings of all ranks of a group into one folder, completely or not at all; returns the folder.

    Every rank of the group must call it. Each writes its own files, and the lowest rank commits them. Nothing is sent but three
    messages of a few hundred bytes a rank, whatever was recorded. `load(path)` merges what is there, as `sync` does;
    `load(path, ranks=2)` is what rank 2 saved, and `recorder.resume(path)` goes on with it.

    If a rank is killed, its disk is full or anything fails, the folder holds the last complete save, and the next save removes what
    was written. A group of one rank, or none, saves as `save` does.

    Args:
        path: as for `save`, but no URL; the folder must be on a file system that all ranks share, where a rename replaces a file at
            once, and a rank sees what another has flushed. See `docs/sharded.md`.
        group: the ranks; None for all.
        layout: as for `save`; "packed" for two files a rank, whatever it recorded, and so for many ranks.
        overwrite: replace the recording of another net, too.

    Raises:
        StorageError: a rank could not write, or does not see the files of another; all ranks raise, and name it. So are
            NotARecordingError, RecordingExistsError and SchemaError of one rank raised on all, see `save`. Nothing was saved.
        SyncError: a rank died, or does not call `save_sharded`. All others raise, within the timeout of the group and a few
            seconds, name the ranks that did not answer, and say which recording the folder holds.

    Warns:
        RecordingWarning: on the rank whose results or states cannot be stored, see `save`.

    >>> import tempfile
    >>> from recorders import Recording, load
    >>> with tempfile.TemporaryDirectory() as folder:  # without a process group, as `save`
    ...     len(load(save_sharded(Recording({}), folder + "/run")))
    0
    """
    if is_alone(group):
        return Path(save(recording, as_path(path), layout=layout, overwrite=overwrite))
    attempt = _Attempt(recording, path, group, layout)
    without_modes(attempt.run, overwrite)
    return attempt.root


class _Attempt:
    """One save of all ranks, as one of them sees it."""

    def __init__(self, recording: Recording, path: str | os.PathLike[str], group: ProcessGroup | None, layout: Layout) -> None:
        self.recording, self.path, self.layout = recording, os.fspath(path), layout
        self.exchange = Exchange(group, "save_sharded", f"not all ranks could save to {self.path}")
        self.ranks, self.rank = self.exchange.ranks, dist.get_rank()
        self.root = Path()
        self.files = Generation(self.root, "")
        self.left_out: list[str] = []

    def run(self, overwrite: bool) -> None:
        with contextlib.ExitStack() as stack:
            try:
                messages = self._agree("the folder of the new files", lambda: self._begin(stack))
                if self.rank != self.ranks[0]:
                    generation, _, live = messages[0].text.partition(" ")
                    self.files = Generation(self.root, generation, live)
                messages = self._agree("what was written", lambda: self._write(overwrite))
                self._agree("the commit", lambda: self._publish(messages))
            except SyncError as error:
                raise SyncError(f"{error} {self._found()}") from error
        warn_left_out(self.path, self.left_out)

    def _agree(self, what: str, step: Callable[[], Message]) -> list[Message]:
        """Does a step, then tells all ranks how it went; returns their messages, and raises on all if one of them failed."""
        messages, failure = self.exchange.agree(what, step, _KINDS)
        if failed := [(rank, one) for rank, one in zip(self.ranks, messages, strict=True) if one.kind]:
            shown = "; ".join(f"rank {rank}: {one.text}" for rank, one in failed[:_SHOWN])
            more = f"; and {len(failed) - _SHOWN} more ranks" if len(failed) > _SHOWN else ""
            raise _KINDS[failed[0][1].kind - 1](
                f"not all ranks could save to {self.path}: {shown}{more}; the folder holds the last complete save, if any"
            ) from failure
        return messages

    def _begin(self, stack: contextlib.ExitStack) -> Message:
        """Checks what the user gave; the lowest rank locks and prepares the folder, and says where to write."""
        if self.layout not in ("folder", "packed"):
            raise ValueError(f"layout={self.layout!r}: give 'folder' or 'packed'")
        self.root = Path(os.path.abspath(as_path(self.path)))
        if self.rank != self.ranks[0]:
            return Message()
        stack.enter_context(Turn(self.root)).wait()
        self.files = stack.enter_context(Commit(self.root))
        return Message(text=f"{self.files.generation} {self.files.live}")

    def _write(self, overwrite: bool) -> Message:
        """Writes the files of this rank, and flushes them."""
        if not _appears(lambda: os.path.isdir(self.root / self.files.generation)):
            raise StorageError(
                f"it does not see the folder {self.files.generation} that rank {self.ranks[0]} made in {self.root}: is that not a "
                "shared file system?"
            )
        if self.files.live and not overwrite:
            self._check_net()
        file = write_rank(self.recording, self.files, self.rank, self.layout, self.left_out)
        self.files.flush()
        return Message(size=file.bytes, sha256=bytes.fromhex(file.sha256))

    def _check_net(self) -> None:
        """Raises `RecordingExistsError` if the folder holds the recording of another net than that of this rank.

        What this rank saved there tells it mostly; if it does not fit, the layers may have moved between ranks.
        """
        names, where = self.recording.keys(), os.fspath(self.root)
        if not names:
            return
        try:
            check_same_net(names, names_at(where, self.rank) or names_at(where), where)
        except RecordingExistsError:
            check_same_net(names, names_at(where), where)

    def _publish(self, messages: Sequence[Message]) -> Message:
        """The lowest rank commits what all have written."""
        if not isinstance(self.files, Commit):
            return Message()
        written = []
        for rank, one in zip(self.ranks, messages, strict=True):
            file = RankFile(rank, rank_file(rank), one.size, one.sha256.hex())
            where = os.path.join(self.root, self.files.generation, file.file)
            if not _appears(lambda where=where, size=file.bytes: _length(where) == size):  # type: ignore[misc]
                raise StorageError(f"it does not see {where}, which rank {rank} wrote: is that not a shared file system?")
            written.append(file)
        self.files.publish(encode_ranks(self.files.generation, versions(), written))
        return Message()

    def _found(self) -> str:
        """What the folder holds, if ranks do not answer."""
        try:
            committed = bool(self.files.generation) and read_manifest(os.fspath(self.root)).generation == self.files.generation
        except (StorageError, OSError):
            committed = False
        if committed:
            return f"{self.root} holds this save of all ranks, whole."
        if self.rank == self.ranks[0]:
            return f"{self.path} holds the last complete save, if any."
        return f"{self.path} holds the last complete save, if any; or this one, if rank {self.ranks[0]} still commits it."


def _appears(seen: Callable[[], bool]) -> bool:
    """Waits for what another rank has made; returns whether it is seen."""
    deadline = time.monotonic() + VISIBLE_SECONDS
    while not seen():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _length(where: str) -> int | None:
    """The length of a file, which is opened because network file systems look at the server then; None if it is not there."""
    try:
        with open_regular(where, sys.maxsize) as (_, size):
            return size
    except (StorageError, OSError):
        return None


def load_own(path: str | os.PathLike[str], group: ProcessGroup | None = None) -> Recording:
    """What this rank saved: of a recording that many ranks saved, its part; any other whole. Raises what `load` raises.

    Raises:
        MergeError: the ranks of the group are not those that saved it, so that what some recorded would be left out.
    """

    with fetched(path) as folder:
        saved = manifest_at(folder).ranks
        if saved is None:
            return load(folder)
        here = dist.get_process_group_ranks(group) if dist.is_available() and dist.is_initialized() else []
        if set(here) != set(saved):
            this = f"the group has ranks {shown_ranks(here)}" if here else "this process is in no process group"
            raise MergeError(
                f"{os.fspath(path)} was saved by ranks {shown_ranks(saved)}, and {this}: go on with the ranks that saved it; or, "
                "in one process only, with what they recorded together: recorder.resume(recorders.load(path))"
            )
        return load(folder, ranks=dist.get_rank())
