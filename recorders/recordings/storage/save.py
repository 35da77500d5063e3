"""`save`: writes a recording into a folder.

The folder holds `manifest.json` and a generation folder, which has one safetensors file per subrecorder, or one for all. A file
holds the results, called `value`, `value/mean` or `value/logits/mean`, for any program that reads safetensors, and the states, with
which the recording merges and continues bit for bit. No code is stored or executed.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import re
import tempfile
import threading
import weakref
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
from torch import Tensor

from recorders._torch import without_modes
from recorders.errors import RecordingWarning, StorageError
from recorders.recordings.atomic_files import as_path, is_url
from recorders.recordings.recording import Recording, Subrecording, register_writer
from recorders.recordings.storage.codec import Contents, Recipes, no_collection
from recorders.recordings.storage.commit import Commit, Generation, check_same_net, names_at
from recorders.recordings.storage.remote import send
from recorders.recordings.storage.schema import Entry, Manifest, RankFile, encode, rank_file
from recorders.recordings.storage.tensors import chunks, describe
from reducers.errors import warn_user

if TYPE_CHECKING:
    from typing_extensions import Self

Layout: TypeAlias = Literal["folder", "packed"]
"""Whether every subrecorder has a file of its own, or all share one."""

_PACKED_FILE = "0-packed.safetensors"


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
    place = path if is_url(path) else os.path.abspath(as_path(path))  # the program may be in another folder by then

    def work() -> None:
        try:
            mine.wait()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(save_in_turn(mine, recording, place, layout, overwrite))
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
        commit.publish(write_files(recording, commit, layout, left_out))
    warn_left_out(root, left_out)


def write_files(
    recording: Recording, files: Generation, layout: Layout, left_out: list[str], *, prefix: str = "", results: bool = True
) -> bytes:
    """Writes the subrecorders of a recording into a generation; returns the manifest of them.

    Args:
        left_out: gets what cannot be stored, and why.
        prefix: what the names of the files begin with, if several processes write into the generation.
        results: whether results are stored that can be computed from the states.
    """
    width = max(5, len(str(len(recording))))
    recipes, entries = Recipes(), list[Entry]()
    waiting: list[tuple[str, Subrecording, Contents]] = []
    # Not while files are written, which may take long beside a training that makes garbage.
    with no_collection() if layout == "packed" else nullcontext():
        for index, (name, part) in enumerate(recording.subrecordings.items()):
            try:
                contents = Contents(part, results=results, prefix=f"{index}/" if layout == "packed" else "")
                if layout == "folder":
                    slug = re.sub(r"[^a-z0-9]+", "-", str(name)[:200].lower())[:40].strip("-")
                    file = f"{prefix}{index:0{width}}{'-' * bool(slug)}{slug}.safetensors"
                    written = _write(files, file, contents.tensors, contents.kinds)
                    entries.append(_entry(name, part, contents, recipes, *written))
                else:
                    waiting.append((name, part, contents))
            except StorageError as error:  # also of a tensor of a device that fails, or whose memory is freed meanwhile
                left_out.append(f"subrecorder {name!r}: {error}")
                continue
            if contents.left_out:
                left_out.append(f"the result of subrecorder {name!r}: {contents.left_out}")
    packed = None
    if waiting:
        tensors = {key: tensor for _, _, contents in waiting for key, tensor in contents.tensors.items()}
        kinds = {key: kind for _, _, contents in waiting for key, kind in contents.kinds.items()}
        shared, dtypes = _write(files, prefix + _PACKED_FILE, tensors, kinds)
        with no_collection():
            entries = [_entry(*one, recipes, shared, dtypes) for one in waiting]
        packed = dict(zip(("file", "bytes", "sha256"), shared, strict=True))
    names = {entry.name for entry in entries}
    aliases = {alias: name for alias, name in recording.aliases.items() if name in names}
    with no_collection():
        return encode(Manifest(files.generation, versions(), aliases, recording.step, packed), entries)


def write_rank(recording: Recording, files: Generation, rank: int, layout: Layout, left_out: list[str]) -> RankFile:
    """Writes the files of one rank of many, with its manifest; returns what that of all ranks says of it."""
    file = rank_file(rank)
    manifest = write_files(recording, files, layout, left_out, prefix=f"{Path(file).stem}-")
    return RankFile(rank, file, *files.write(file, [manifest]))


def warn_left_out(root: object, left_out: list[str]) -> None:
    """Warns of what could not be stored, if anything."""
    if left_out:
        shown = "; ".join(left_out[:5]) + (f"; and {len(left_out) - 5} more" if len(left_out) > 5 else "")
        warn_user(f"saved {root}, but not everything of it: {shown}", RecordingWarning)


def _write(
    files: Generation, file: str, tensors: Mapping[str, Tensor], kinds: Mapping[str, tuple[torch.dtype, str]]
) -> tuple[tuple[str, int, str], dict[str, str]]:
    """Writes one file; returns its name, length and SHA-256, and the true dtypes of tensors that are stored as another one."""
    with no_collection():
        header, ordered, dtypes = describe(tensors, kinds)
    try:
        return (file, *files.write(file, chunks(header, ordered))), dtypes
    except StorageError:
        files.discard(file)
        raise


def _entry(
    name: str,
    part: Subrecording,
    contents: Contents,
    recipes: Recipes,
    file: tuple[str, int, str],
    dtypes: Mapping[str, str],
) -> Entry:
    recipe, versions = recipes.of(part)
    own = {key: dtypes[key] for key in contents.tensors if key in dtypes} if dtypes else {}
    described = (name, part.monitor, part.attr, part.module, part.samples, recipe, *file)
    return Entry(*described, contents.states, contents.values, own, versions, contents.progress, contents.placement)


@functools.cache
def versions() -> dict[str, str | None]:
    """Those of the libraries that write."""
    found: dict[str, str | None] = {"torch": str(torch.__version__)}
    for package in ("torch-recorders", "safetensors"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


_PAUSE = 0.1
"""Seconds after which a save looks again whether the one before it still exists: it may have been interrupted anywhere."""

_lock = threading.Lock()
_asked: dict[str, list[weakref.ref[Turn]]] = {}
"""By place, the turns that are not over, in the order in which they were taken."""


class Turn:
    """The place of one save among those to the same path or URL, taken when the save is asked for.

    It is over at the end of a `with` block, unless it was handed to a thread (`hand_over`), which calls `end`.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._place = os.fspath(path) if is_url(path) else os.path.realpath(as_path(path))
        self._thread: int | None = threading.get_ident()
        self._handed_over = False
        self._over = threading.Event()
        with _lock:
            turns = _asked.setdefault(self._place, [])
            self._before = [one for one in turns if one() is not None]
            turns[:] = [*self._before, weakref.ref(self)]

    def hand_over(self) -> None:
        """Leaves the turn to another thread."""
        self._handed_over, self._thread = True, None

    def wait(self) -> None:
        """Waits for the saves that were asked for before; not for one that this thread is in, as in a handler of a signal."""
        self._thread = threading.get_ident()
        for before in self._before:
            while (turn := before()) is not None and turn._thread != self._thread and not turn._over.wait(_PAUSE):
                del turn  # one that was interrupted is collected now
        self._before = []

    def end(self) -> None:
        """Lets the next one begin."""
        self._over.set()
        with _lock:
            turns = [one for one in _asked.get(self._place, ()) if one() is not None and one() is not self]
            if turns:
                _asked[self._place] = turns
            else:
                _asked.pop(self._place, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not self._handed_over:
            self.end()


def _after_fork() -> None:
    """The threads that save are not here, so nobody waits for them."""
    global _lock
    _lock = threading.Lock()
    _asked.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


register_writer(save)
