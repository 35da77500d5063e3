"""`load`: reads a recording, also one from anywhere."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal, TypeAlias

import torch

from recorders._torch import without_modes
from recorders.errors import (
    CorruptRecordingError,
    NotARecordingError,
    RecordingNotFoundError,
    RecordingWarning,
    SelectionError,
    StorageError,
)
from recorders.recordings.atomic_files import as_path, is_url
from recorders.recordings.display import listed
from recorders.recordings.distributed.merge import Merged, merged_aliases
from recorders.recordings.recording import Recording
from recorders.recordings.storage.codec import Recipes
from recorders.recordings.storage.manifest import MANIFEST, Manifest, recording_of
from recorders.recordings.storage.ranks_manifest import RanksManifest, in_order, read_manifest, read_rank
from recorders.recordings.storage.reading import Given, read, read_lazily, with_reducers
from recorders.recordings.storage.remote import fetch, fetched, renamed
from reducers.errors import did_you_mean, warn_user

__all__ = ["load", "load_chosen", "load_lazily", "manifest_at"]

ATTEMPTS = 100
"""How often `load` starts again if a save replaces the recording meanwhile."""


def load(
    path: str | os.PathLike[str],
    *,
    reducers: Given = None,
    damaged: Literal["error", "skip"] = "error",
    mmap: bool = False,
    ranks: int | Iterable[int] | None = None,
) -> Recording:
    """Reads a recording; safe on untrusted files.

    If many ranks saved it together (`recorder.save_sharded`), they are merged as `sync` merges them: in their order, copies once,
    parts joined, and what only some ranks recorded is kept. One subrecorder is read at a time, of each rank. Results of reducers
    that are not known stand side by side, with the rank in the name of the leaf.

    A reducer that holds a function is not saved: its subrecordings have `reducer` None and show the results as saved. With
    `reducers` they compute, merge and continue again. The same holds for reducers whose code is not imported, with a warning.

    Args:
        path: its folder; a leading "~" is the home folder. Or its URL, as for `save`: it is fetched into a temporary folder first.
        reducers: for subrecordings without a reducer: one for all, or a mapping from name or glob to reducer.
        damaged: "skip" leaves out subrecorders whose file or line in the manifest is damaged, with a warning; `lost` of the
            recording names them. "error" raises.
        mmap: map the file of the layout "packed" into memory rather than read it. It must not be changed by others while the
            recording is used; `save` never changes it. Has no effect on what is merged.
        ranks: one rank, for what it saved, with which it goes on; or several, to merge only these.

    Raises:
        RecordingNotFoundError: `path` does not exist; also a FileNotFoundError.
        NotARecordingError: `path` is not a recording.
        SchemaError: a newer version wrote it.
        CorruptRecordingError: it is damaged, incomplete or forged; the message names the file and the reason.
        StorageError: it cannot be read.
        MergeError: the recordings of the ranks do not fit together; each can be loaded alone, by `ranks`.
        SelectionError: a rank of `ranks` saved nothing there, or the recording was saved by one process.
    """
    chosen = ranks if ranks is None or isinstance(ranks, int) else tuple(ranks)  # asked for again if a save comes between
    return load_chosen(path, None if ranks is None else lambda saved: chosen, reducers=reducers, damaged=damaged, mmap=mmap)


Choose: TypeAlias = Callable[[Sequence[int] | None], int | Iterable[int] | None]
"""From the ranks that saved a recording, None if one process did: which to read, as `ranks` of `load`."""


def load_chosen(
    path: str | os.PathLike[str],
    choose: Choose | None,
    *,
    reducers: Given = None,
    damaged: Literal["error", "skip"] = "error",
    mmap: bool = False,
) -> Recording:
    """Like `load`, of ranks that are chosen once it is known which there are."""
    with fetched(path) as folder:
        root = as_path(folder)
        with torch.inference_mode(False):  # inference tensors could not be updated later
            read_all = functools.partial(_load, choose=choose, given=reducers, skip=damaged == "skip", mmap=mmap)
            recording: Recording
            recording, unknown = without_modes(read_all, root)
        if folder is not path:
            recording = replace(recording, lost=renamed(recording.lost, root, str(path)))
        recording = with_reducers(recording, reducers, str(path))
    _warn(recording, unknown, os.fspath(path))
    return recording


def load_lazily(path: str | os.PathLike[str]) -> Recording:
    """A recording of which a subrecording is read, and checked, when it is looked at, each time anew; it keeps none.

    Raises:
        StorageError: the manifest, or a file that all share, cannot be read; see `load`.
    """
    if is_url(path):
        copy = tempfile.mkdtemp()
        try:
            fetch(os.fspath(path), copy)
            found = load_lazily(copy)
        except BaseException:
            shutil.rmtree(copy, ignore_errors=True)
            raise
        weakref.finalize(found.subrecordings, shutil.rmtree, copy, ignore_errors=True)
        return found
    root = as_path(path)
    manifest = _manifest(root, skip=False)
    if isinstance(manifest, Manifest):
        return read_lazily(root, manifest, Recipes(), mmap=True)
    recipes = Recipes()
    held = {f"rank {rank}": read_lazily(root, read_rank(root, manifest, rank), recipes) for rank in manifest.ranks}
    parts = Merged(held, apart=True)
    return Recording(parts, merged_aliases(held, parts))


def manifest_at(path: str | os.PathLike[str]) -> Manifest | RanksManifest:
    """The manifest of the recording in a folder, without what is damaged of it; raises `StorageError`, see `load`."""
    return _manifest(as_path(path), skip=True)


def _load(root: str, choose: Choose | None, given: Given, skip: bool, mmap: bool) -> tuple[Recording, Mapping[str, list[str]]]:
    for _ in range(ATTEMPTS):
        manifest = _manifest(root, skip)
        try:
            found = _read(root, manifest, choose, given, skip, mmap)
            if not found[0].lost or _manifest(root, skip).generation == manifest.generation:
                return found
        except (StorageError, OSError) as error:
            # If a save has replaced the generation meanwhile, read the new one.
            if _manifest(root, skip).generation != manifest.generation:
                continue
            if isinstance(error, StorageError):
                raise
            kind = CorruptRecordingError if isinstance(error, FileNotFoundError) else StorageError
            raise kind(f"cannot load {root}: {error}") from error
    raise StorageError(f"cannot load {root}: it was saved again {ATTEMPTS} times during the attempt; try again")


def _read(
    root: str,
    manifest: Manifest | RanksManifest,
    choose: Choose | None,
    given: Given,
    skip: bool,
    mmap: bool,
) -> tuple[Recording, Mapping[str, list[str]]]:
    if isinstance(manifest, Manifest):
        if choose is not None and choose(None) is not None:
            raise SelectionError(f"{root} was saved by one process, not by ranks: load it without ranks")
        with _no_collection():
            return read(root, manifest, skip, mmap)
    chosen = None if choose is None else choose(tuple(manifest.ranks))
    if isinstance(chosen, int):
        one = read_rank(root, manifest, chosen)
        with _no_collection():
            return read(root, one, skip, mmap)
    return _merged(root, manifest, [*manifest.ranks] if chosen is None else in_order(manifest, chosen), given, skip)


def _merged(
    root: str, manifest: RanksManifest, ranks: Sequence[int], given: Given, skip: bool
) -> tuple[Recording, Mapping[str, list[str]]]:
    """The recordings of ranks as one, read name by name."""
    recipes, held = Recipes(), dict[str, Recording]()
    lost = {f"line {number + 2} of the manifest": reason for number, reason in manifest.damaged.items()}
    for rank in ranks:
        try:
            held[f"rank {rank}"] = read_lazily(root, read_rank(root, manifest, rank), recipes, given=given)
        except (StorageError, OSError) as error:
            if not skip:
                raise
            lost[f"rank {rank}"] = str(error)
    merged = Merged(held, lost=lost if skip else None, apart=True)
    parts = merged.all()
    return Recording(parts, merged_aliases(held, parts), None, lost), recipes.unknown


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Disables the garbage collector, which doubled the time to read many subrecorders and finds nothing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _beside(root: str) -> str:
    """Which recordings are beside a place where there is nothing, as the end of a sentence."""
    folder = os.path.dirname(os.path.abspath(root))
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries if os.path.isfile(os.path.join(entry.path, MANIFEST)))
    except OSError:
        return ""
    guess = did_you_mean(os.path.basename(root), names)
    return f"; {guess}in {folder} there are {listed(names)}" if names else f"; there is no recording in {folder} either"


def _manifest(root: str, skip: bool) -> Manifest | RanksManifest:
    try:
        return read_manifest(root, skip=skip)
    except StorageError:
        raise
    except OSError as error:
        if not os.path.lexists(root):
            raise RecordingNotFoundError(f"there is nothing at {root}{_beside(root)}") from error
        if whole := recording_of(root):
            raise NotARecordingError(f"{root} is part of the recording {whole}: load that") from error
        if isinstance(error, (FileNotFoundError, NotADirectoryError)):
            raise NotARecordingError(f"{root} is no recording: it holds no manifest; save one with recorder.save(path)") from error
        raise StorageError(f"cannot load {root}: {error}") from error


def _warn(recording: Recording, unknown: Mapping[str, list[str]], root: str) -> None:
    if recording.lost:
        (name, reason), *others = recording.lost.items()
        more = f", and {len(others)} more" if others else ""
        message = f"{root} is damaged, and {len(recording.lost)} parts of it are left out: {name!r:.200} ({reason}){more}"
        warn_user(message, RecordingWarning)
    for reason, names in unknown.items():
        without = [
            name
            for name in dict.fromkeys(names)
            if name in recording.subrecordings and recording.subrecordings[name].reducer is None
        ]
        if without:
            warn_user(
                f"{len(without)} subrecorders, such as {without[0]!r}, were loaded without their reducer, as saved values and "
                f"states: {reason}",
                RecordingWarning,
            )
