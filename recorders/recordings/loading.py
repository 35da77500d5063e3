"""`load`: reads a recording, also one from anywhere."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Literal

import torch

from recorders._torch import without_modes
from recorders.errors import CorruptRecordingError, NotARecordingError, RecordingNotFoundError, RecordingWarning, StorageError
from recorders.recordings.checking import Checked
from recorders.recordings.contents import Recipes, rebuilt
from recorders.recordings.entry import Entry
from recorders.recordings.manifest import Manifest, read_manifest, recording_of
from recorders.recordings.packed import PackedParts
from recorders.recordings.recording import Recording, Subrecording
from recorders.recordings.remote import fetch, fetched, renamed
from recorders.recordings.tensorfile import read_tensors
from recorders.recordings.whole import as_path, is_url, open_regular
from reducers import Reducer
from reducers.errors import warn_user

__all__ = ["load", "load_lazily"]

ATTEMPTS = 100
"""How often `load` starts again if a save replaces the recording meanwhile."""


def load(
    path: str | os.PathLike[str],
    *,
    reducers: Reducer | Mapping[str, Reducer] | None = None,
    damaged: Literal["error", "skip"] = "error",
    mmap: bool = False,
) -> Recording:
    """Reads a recording; safe on untrusted files.

    A reducer that holds a function is not saved: its subrecordings have `reducer` None and show the results as saved. With
    `reducers` they compute, merge and continue again. The same holds for reducers whose code is not imported, with a warning.

    Args:
        path: its folder; a leading "~" is the home folder. Or its URL, as for `save`: it is fetched into a temporary folder first.
        reducers: for subrecordings without a reducer: one for all, or a mapping from name or glob to reducer.
        damaged: "skip" leaves out subrecorders whose file or line in the manifest is damaged, with a warning; `lost` of the
            recording names them. "error" raises.
        mmap: map the file of the layout "packed" into memory rather than read it. It must not be changed by others while the
            recording is used; `save` never changes it.

    Raises:
        RecordingNotFoundError: `path` does not exist; also a FileNotFoundError.
        NotARecordingError: `path` is not a recording.
        SchemaError: a newer version wrote it.
        CorruptRecordingError: it is damaged, incomplete or forged; the message names the file and the reason.
        StorageError: it cannot be read.
    """
    with fetched(path) as folder:
        root = as_path(folder)
        with torch.inference_mode(False):  # inference tensors could not be updated later
            read = functools.partial(_load, skip=damaged == "skip", mmap=mmap)
            recording: Recording
            recording, unknown = without_modes(read, root)
        if folder is not path:
            recording = replace(recording, lost=renamed(recording.lost, root, str(path)))
        if reducers is not None:
            without = [name for name, part in recording.items() if part.reducer is None]
            recording, checked = recording.with_reducers(reducers), Checked()
            for name in without:
                without_modes(checked.require, f"{path} (subrecorder {name!r}), with the reducer that was given,", recording[name])
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
    folder = _folder(root, manifest)
    if manifest.packed is not None:
        return Recording(PackedParts(folder, manifest, Recipes(), mmap=True), manifest.aliases, manifest.step)
    return Recording(_FolderParts(folder, manifest), manifest.aliases, manifest.step)


class _FolderParts(Mapping[str, Subrecording]):
    """Subrecordings by name, each read from its file when it is asked for."""

    def __init__(self, folder: str, manifest: Manifest) -> None:
        self._folder, self._manifest, self._recipes = folder, manifest, Recipes()

    def __getitem__(self, name: str) -> Subrecording:
        if name not in self._manifest.lines:
            raise KeyError(name)
        with torch.inference_mode(False):
            try:
                part: Subrecording = without_modes(_read_one, self._folder, self._manifest.entry(name), self._recipes)
            except FileNotFoundError as error:
                raise CorruptRecordingError(f"{error.filename} is not there, or was replaced by a save meanwhile") from error
        return part

    def __iter__(self) -> Iterator[str]:
        return iter(self._manifest.lines)

    def __len__(self) -> int:
        return len(self._manifest.lines)


def _load(root: str, skip: bool, mmap: bool) -> tuple[Recording, Mapping[str, list[str]]]:
    for _ in range(ATTEMPTS):
        manifest = _manifest(root, skip)
        try:
            with _no_collection():
                return _read(root, manifest, skip, mmap)
        except (StorageError, OSError) as error:
            # If a save has replaced the generation meanwhile, read the new one.
            if _manifest(root, skip).generation != manifest.generation:
                continue
            if isinstance(error, StorageError):
                raise
            kind = CorruptRecordingError if isinstance(error, FileNotFoundError) else StorageError
            raise kind(f"cannot load {root}: {error}") from error
    raise StorageError(f"cannot load {root}: it was saved again {ATTEMPTS} times during the attempt; try again")


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


def _manifest(root: str, skip: bool) -> Manifest:
    try:
        return read_manifest(root, skip=skip)
    except StorageError:
        raise
    except OSError as error:
        if not os.path.lexists(root):
            raise RecordingNotFoundError(f"there is nothing at {root}") from error
        if whole := recording_of(root):
            raise NotARecordingError(f"{root} is part of the recording {whole}: load that") from error
        if isinstance(error, (FileNotFoundError, NotADirectoryError)):
            raise NotARecordingError(f"{root} is no recording: it holds no manifest; save one with recorder.save(path)") from error
        raise StorageError(f"cannot load {root}: {error}") from error


def _folder(root: str, manifest: Manifest) -> str:
    folder = os.path.join(root, manifest.generation)
    if os.path.islink(folder):
        raise CorruptRecordingError(f"{folder} is a symbolic link, which recordings do not hold")
    return folder


def _read(root: str, manifest: Manifest, skip: bool, mmap: bool) -> tuple[Recording, Mapping[str, list[str]]]:
    folder, recipes = _folder(root, manifest), Recipes()
    lost = {f"line {number + 2} of the manifest": reason for number, reason in manifest.damaged.items()}
    parts: Mapping[str, Subrecording]
    if manifest.packed is not None:
        parts = PackedParts(folder, manifest, recipes, mmap=mmap)
    else:
        parts = read = {}
        files = set[str]()
        for name in manifest.lines:
            try:
                entry = manifest.entry(name)
                if entry.file in files:
                    raise CorruptRecordingError(f"{manifest.where} is malformed: two subrecorders have the file {entry.file!r}")
                files.add(entry.file)
                read[name] = _read_one(folder, entry, recipes)
            except (StorageError, OSError) as error:
                if not skip:
                    raise
                lost[name] = str(error)
    aliases = {alias: name for alias, name in manifest.aliases.items() if name in parts}
    return Recording(parts, aliases, manifest.step, lost), recipes.unknown


def _read_one(folder: str, entry: Entry, recipes: Recipes) -> Subrecording:
    where = os.path.join(folder, entry.file)
    named = entry.tensors()
    with open_regular(where, entry.bytes) as (file, size):
        if size != entry.bytes:
            raise CorruptRecordingError(
                f"{where} (subrecorder {entry.name!r}) is damaged: {size} bytes are there and {entry.bytes} were saved"
            )
        try:
            tensors, sha256 = read_tensors(file, size, entry.dtypes, where, 4096 + sum(2048 + 6 * len(name) for name in named))
        except (RuntimeError, MemoryError) as error:
            raise StorageError(f"{where}: its {size} bytes do not fit into memory: {error}") from error
    if sha256 != entry.sha256:
        raise CorruptRecordingError(f"{where} (subrecorder {entry.name!r}) is damaged: its checksum differs from what was saved")
    if tensors.keys() != set(named):
        found, told = sorted(tensors)[:20], sorted(named)[:20]
        raise CorruptRecordingError(f"{where} (subrecorder {entry.name!r}) holds tensors {found}, and the manifest names {told}")
    return rebuilt(entry, recipes, tensors.__getitem__, where)


def _warn(recording: Recording, unknown: Mapping[str, list[str]], root: str) -> None:
    if recording.lost:
        (name, reason), *others = recording.lost.items()
        more = f", and {len(others)} more" if others else ""
        message = f"{root} is damaged, and {len(recording.lost)} parts of it are left out: {name!r:.200} ({reason}){more}"
        warn_user(message, RecordingWarning)
    for reason, names in unknown.items():
        without = [name for name in names if name in recording.subrecordings and recording.subrecordings[name].reducer is None]
        if without:
            warn_user(
                f"{len(without)} subrecorders, such as {without[0]!r}, were loaded without their reducer, as saved values and "
                f"states: {reason}",
                RecordingWarning,
            )
