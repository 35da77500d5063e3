"""`save`: writes a recording into a folder.

The folder holds `manifest.json` and a generation folder, which has one safetensors file per subrecorder, or one for all. A file
holds the results, called `value`, `value/mean` or `value/logits/mean`, for any program that reads safetensors, and the states, with
which the recording merges and continues bit for bit. No code is stored or executed.
"""

from __future__ import annotations

import os
import tempfile
import threading
from concurrent.futures import Future
from pathlib import Path

from recorders._torch import without_modes
from recorders.errors import StorageError
from recorders.recordings.atomic_files import as_path, is_url
from recorders.recordings.recording import Recording, register_writer
from recorders.recordings.storage.commit import Commit
from recorders.recordings.storage.manifest import encode
from recorders.recordings.storage.remote import send
from recorders.recordings.storage.same_net import check_same_net, names_at
from recorders.recordings.storage.turns import Turn
from recorders.recordings.storage.writing import Layout, warn_left_out, write_files

__all__ = ["save", "save_in_background", "save_in_turn"]


def save(recording: Recording, path: str | os.PathLike[str], *, layout: Layout = "folder", overwrite: bool = False) -> Path | str:
    """Writes a recording into the folder `path`, completely or not at all; returns the folder, or the URL.

    If the process is killed, the disk is full or anything fails, the folder still holds the last complete save. Processes that save
    into one folder wait for each other; the last one wins. Saves of one process happen in the order in which they were asked for,
    also those in the background, and those of several threads. On systems without file locks (Windows, some network file systems)
    what killed saves left is not removed.

    Args:
        path: a new or empty folder, or one that holds a recording; parents are created. Or a URL that fsspec knows, such as
            "s3://bucket/run": see `docs/recordings.md` for what is promised there.
        layout: "folder" for one safetensors file per subrecorder; "packed" for one file for all, which is faster for thousands of
            small ones, and of which damage anywhere loses all.
        overwrite: replace the recording of another net, too.

    Raises:
        NotARecordingError: `path` is a file, or a folder that contains something else.
        RecordingExistsError: `path` holds the recording of another net: of the names of the smaller of both recordings, fewer than
            half are in the other. One of the same net, also with more or fewer subrecorders, is replaced.
        SchemaError: `path` holds a recording of a newer version.
        StorageError: writing failed, or another process has been saving there for minutes.

    Warns:
        RecordingWarning: a result cannot be computed, or is neither a tensor, a number nor a mapping of these. It is left out; the
            states are saved, and all other subrecorders. The same for a subrecorder whose state is no tensor that can be stored.

    >>> import tempfile, torch
    >>> from recorders import Recording, Subrecording, load
    >>> from reducers import Mean
    >>> mean = Mean()
    >>> part = Subrecording(mean, {"": mean.update({}, torch.tensor([1.0, 3.0]))}, samples=1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     load(save(Recording({"loss": part}), folder + "/run")).compute()
    {'loss': tensor(2., dtype=torch.float64)}
    """
    with Turn(path) as turn:
        return save_in_turn(turn, recording, path, layout, overwrite)


def save_in_turn(turn: Turn, recording: Recording, path: str | os.PathLike[str], layout: Layout, overwrite: bool) -> Path | str:
    """Like `save`, after all saves that were asked for before the turn was taken."""
    if layout not in ("folder", "packed"):
        raise ValueError(f"layout={layout!r}: give 'folder' or 'packed'")
    turn.wait()
    if is_url(path):
        with tempfile.TemporaryDirectory() as folder:
            local = Path(folder, "recording")
            save(recording, local, layout=layout)
            send(local, os.fspath(path), None if overwrite else recording.keys())
        return os.fspath(path)
    root = Path(as_path(path))
    try:
        without_modes(_save, recording, root, layout, overwrite)
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(f"cannot save to {root}: {error}; the folder holds the last complete save, if any") from error
    return root


def save_in_background(
    recording: Recording,
    path: str | os.PathLike[str],
    *,
    layout: Layout = "folder",
    overwrite: bool = False,
    turn: Turn | None = None,
) -> Future[Path | str]:
    """Like `save`, in a thread of its own; the process waits for it before it ends.

    Args:
        turn: its place among other saves, if that was taken before what is saved was looked at.

    Returns:
        a future; its `result()` waits for the end and raises what `save` raises. `cancel()` returns True if the save waits for
        others to the same path, and it does not happen then; False once it has begun.
    """
    future: Future[Path | str] = Future()

    def work() -> None:
        try:
            mine.wait()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(save_in_turn(mine, recording, path, layout, overwrite))
                except BaseException as error:
                    future.set_exception(error)
        finally:
            mine.end()

    with turn or Turn(path) as mine:
        thread = threading.Thread(target=work, name=f"save {os.fspath(path)}")
        mine.hand_over()
        try:
            thread.start()
        except BaseException:
            mine.end()
            raise
    return future


def _save(recording: Recording, root: Path, layout: Layout, overwrite: bool) -> None:
    left_out: list[str] = []
    with Commit(root) as commit:
        if commit.live and not overwrite:
            where = os.path.abspath(root)
            check_same_net(recording.keys(), names_at(where), where)
        commit.publish(encode(*write_files(recording, commit, layout, left_out)))
    warn_left_out(root, left_out)


register_writer(save)
