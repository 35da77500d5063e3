"""What a manifest of one process names, read: all of it, or each subrecording when it is looked at."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import TypeAlias

import torch

from recorders._torch import without_modes
from recorders.errors import CorruptRecordingError, StorageError
from recorders.recordings.atomic_files import open_regular
from recorders.recordings.recording import Recording, Subrecording
from recorders.recordings.storage.checking import Checked
from recorders.recordings.storage.codec import Recipes, rebuilt
from recorders.recordings.storage.entry import Entry
from recorders.recordings.storage.manifest import Manifest
from recorders.recordings.storage.packed import PackedParts
from recorders.recordings.storage.ranks_manifest import generation_folder
from recorders.recordings.storage.tensorfile import read_tensors
from reducers import Reducer

__all__ = ["Given", "read", "read_lazily", "with_reducers"]

Given: TypeAlias = Reducer | Mapping[str, Reducer] | None
"""Reducers that the caller of `load` gives: one for all subrecordings without one, or by name or glob."""


def read(root: str, manifest: Manifest, skip: bool, mmap: bool) -> tuple[Recording, Mapping[str, list[str]]]:
    """The recording of a manifest, and the names of which the reducer is not known, by reason.

    Args:
        skip: leave out subrecorders that cannot be read, and name them in `lost`.
        mmap: map the file of the layout "packed" rather than read it.
    """
    folder, recipes = generation_folder(root, manifest.generation), Recipes()
    lost = {f"line {number + 2} of the manifest": reason for number, reason in manifest.damaged.items()}
    parts: Mapping[str, Subrecording]
    if manifest.packed is not None:
        parts = PackedParts(folder, manifest, recipes, mmap=mmap)
    else:
        parts = found = {}
        files = set[str]()
        for name in manifest.lines:
            try:
                entry = manifest.entry(name)
                if entry.file in files:
                    raise CorruptRecordingError(f"{manifest.where} is malformed: two subrecorders have the file {entry.file!r}")
                files.add(entry.file)
                found[name] = _read_one(folder, entry, recipes)
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


def read_lazily(root: str, manifest: Manifest, recipes: Recipes, *, mmap: bool = False, given: Given = None) -> Recording:
    """A recording of which a subrecording is read, and checked, when it is looked at, each time anew; it keeps none.

    Args:
        recipes: what is known of reducers; several recordings may share it.
        mmap: map the file of the layout "packed", and keep what was looked at.
        given: reducers for subrecordings that have none.
    """
    folder = generation_folder(root, manifest.generation)
    parts: Mapping[str, Subrecording]
    if manifest.packed is not None:
        parts = PackedParts(folder, manifest, recipes, mmap=mmap, lazily=not mmap)
    else:
        parts = _FolderParts(folder, manifest, recipes)
    if given is not None:
        parts = _WithReducers(parts, given, folder)
    return Recording(parts, manifest.aliases, manifest.step)


class _FolderParts(Mapping[str, Subrecording]):
    """Subrecordings by name, each read from its file when it is asked for."""

    def __init__(self, folder: str, manifest: Manifest, recipes: Recipes) -> None:
        self._folder, self._manifest, self._recipes = folder, manifest, recipes

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

    def __contains__(self, name: object) -> bool:  # that of the base class would read the file
        return name in self._manifest.lines


class _WithReducers(Mapping[str, Subrecording]):
    """Subrecordings by name, with reducers for those that have none."""

    def __init__(self, parts: Mapping[str, Subrecording], given: Given, where: str) -> None:
        self._parts, self._given, self._where = parts, given, where

    def __getitem__(self, name: str) -> Subrecording:
        part = self._parts[name]
        return part if part.reducer is not None else with_reducers(Recording({name: part}), self._given, self._where)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def __contains__(self, name: object) -> bool:
        return name in self._parts


def with_reducers(recording: Recording, reducers: Given, where: str) -> Recording:
    """The recording with reducers for subrecordings that have none; raises `CorruptRecordingError` if a state does not fit."""
    if reducers is None:
        return recording
    without = [name for name, part in recording.items() if part.reducer is None]
    recording, checked = recording.with_reducers(reducers), Checked()
    for name in without:
        without_modes(checked.require, f"{where} (subrecorder {name!r}), with the reducer that was given,", recording[name])
    return recording
