"""`load`: reads a recording, also one from anywhere."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Literal, TypeAlias

from recorders._torch import without_modes
from recorders.errors import (
    CorruptRecordingError,
    NotARecordingError,
    RecordingNotFoundError,
    RecordingWarning,
    SelectionError,
    StorageError,
)
from recorders.recordings.atomic_files import as_path, is_url, open_regular
from recorders.recordings.display import listed
from recorders.recordings.distributed.merge import Merged, merged_aliases
from recorders.recordings.recording import Recording, Subrecording
from recorders.recordings.storage.codec import Recipes, no_collection, rebuilt
from recorders.recordings.storage.remote import fetch, fetched, renamed
from recorders.recordings.storage.schema import (
    MANIFEST,
    Entry,
    Manifest,
    generation_folder,
    read_manifest,
    read_rank,
    recording_of,
    shown_ranks,
)
from recorders.recordings.storage.tensors import read_tensors, shared_tensors
from reducers import Reducer
from reducers.errors import did_you_mean, warn_user

ATTEMPTS = 100
"""How often `load` starts again if a save replaces the recording meanwhile."""

Given: TypeAlias = Reducer | Mapping[str, Reducer] | None
"""Reducers that the caller of `load` gives: one for all subrecordings without one, or by name or glob."""


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
        damaged: "skip" leaves out subrecorders whose file or line in the manifest is damaged, with a warning; `damaged` of
            the recording names them. "error" raises.
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
    if damaged not in ("error", "skip"):
        raise ValueError(f"load(damaged={damaged!r}): choose 'error' or 'skip'")
    chosen = ranks if ranks is None or isinstance(ranks, int) else tuple(ranks)  # asked for again if a save comes between
    with fetched(path) as folder:
        root = as_path(folder)
        recording: Recording
        recording, unknown = without_modes(_load, root, chosen, reducers, damaged == "skip", mmap)
        if folder is not path:
            recording = replace(recording, damaged=renamed(recording.damaged, root, str(path)))
        recording = _with_reducers(recording, reducers, str(path))
    _warn(recording, unknown, os.fspath(path))
    return recording


def load_lazily(path: str | os.PathLike[str]) -> tuple[Recording, str]:
    """A recording of which a subrecording is read, and checked, when it is looked at, each time anew; and its generation.

    Each save makes a generation with a name of its own, which copies of it keep.

    Raises:
        StorageError: the manifest, or a file that all share, cannot be read; see `load`.
    """
    if is_url(path):
        copy = tempfile.mkdtemp()
        try:
            fetch(os.fspath(path), copy)
            found, generation = load_lazily(copy)
        except BaseException:
            shutil.rmtree(copy, ignore_errors=True)
            raise
        weakref.finalize(found.subrecordings, shutil.rmtree, copy, ignore_errors=True)
        return found, generation
    manifest = manifest_at(path, skip=False)
    root, recipes = os.path.abspath(as_path(path)), Recipes()  # the program may be in another folder when it is looked at
    if manifest.ranks is None:
        return _lazily(root, manifest, recipes, mapped=True), manifest.generation
    held = {f"rank {rank}": _lazily(root, read_rank(root, manifest, rank), recipes) for rank in manifest.ranks}
    parts = Merged(held, apart=True)
    return Recording(parts, merged_aliases(held, parts)), manifest.generation


def manifest_at(path: str | os.PathLike[str], *, skip: bool = True) -> Manifest:
    """The manifest of the recording in a folder, without what is damaged of it if `skip`; raises `StorageError`, see `load`."""
    root = as_path(path)
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


_Chosen: TypeAlias = int | tuple[int, ...] | None
_Found: TypeAlias = tuple[Recording, Mapping[str, list[str]]]
"""A recording, and the names of which the reducer is not known, by reason."""


def _load(root: str, ranks: _Chosen, given: Given, skip: bool, mmap: bool) -> _Found:
    for _ in range(ATTEMPTS):
        manifest = manifest_at(root, skip=skip)
        try:
            found = _read(root, manifest, ranks, given, skip, mmap)
            if not found[0].damaged or manifest_at(root, skip=skip).generation == manifest.generation:
                return found
        except (StorageError, OSError) as error:
            # If a save has replaced the generation meanwhile, read the new one.
            if manifest_at(root, skip=skip).generation != manifest.generation:
                continue
            if isinstance(error, StorageError):
                raise
            kind = CorruptRecordingError if isinstance(error, FileNotFoundError) else StorageError
            raise kind(f"cannot load {root}: {error}") from error
    raise StorageError(f"cannot load {root}: it was saved again {ATTEMPTS} times during the attempt; try again")


def _read(root: str, manifest: Manifest, ranks: _Chosen, given: Given, skip: bool, mmap: bool) -> _Found:
    recipes = Recipes()
    if manifest.ranks is None:
        if ranks is not None:
            raise SelectionError(f"{root} was saved by one process, not by ranks: load it without ranks")
        return _whole(root, manifest, recipes, skip, mmap), recipes.unknown
    if isinstance(ranks, int):
        return _whole(root, read_rank(root, manifest, ranks), recipes, skip, mmap), recipes.unknown
    chosen = {manifest.of(rank).rank for rank in (manifest.ranks if ranks is None else ranks)}
    if not chosen:
        raise SelectionError(f"no rank is chosen of those that saved {manifest.where}: {shown_ranks(manifest.ranks)}")
    damaged, held = dict(manifest.damaged), dict[str, Recording]()
    for rank in (rank for rank in manifest.ranks if rank in chosen):  # in the order of the group
        try:
            held[f"rank {rank}"] = _lazily(root, read_rank(root, manifest, rank), recipes, given=given)
        except (StorageError, OSError) as error:
            if not skip:
                raise
            damaged[f"rank {rank}"] = str(error)
    parts = Merged(held, damaged=damaged if skip else None, apart=True).all()
    return Recording(parts, merged_aliases(held, parts), None, damaged), recipes.unknown


def _whole(root: str, manifest: Manifest, recipes: Recipes, skip: bool, mmap: bool) -> Recording:
    """The recording of a manifest of one process; if `skip`, without what is damaged of it."""
    with no_collection():
        read = _reader(root, manifest, recipes, mapped=mmap, kept=True)
        damaged = dict(manifest.damaged)
        parts: Mapping[str, Subrecording]
        if manifest.packed is not None and not skip:
            parts = _Parts(manifest.lines, lambda name: read(manifest.entry(name)), kept=True)
        else:
            parts = found = {}
            files = set[str]()
            for name in manifest.lines:
                try:
                    entry = manifest.entry(name)
                    if entry.file in files and manifest.packed is None:
                        raise CorruptRecordingError(f"{manifest.where} is malformed: two subrecorders have the file {entry.file!r}")
                    files.add(entry.file)
                    found[name] = read(entry)
                except (StorageError, OSError) as error:
                    if not skip:
                        raise
                    damaged[name] = str(error)
    aliases = {alias: name for alias, name in manifest.aliases.items() if name in parts}
    return Recording(parts, aliases, manifest.step, damaged)


def _lazily(root: str, manifest: Manifest, recipes: Recipes, *, mapped: bool = False, given: Given = None) -> Recording:
    """A recording of which a subrecording is read, and checked, when it is looked at, each time anew.

    Args:
        recipes: what is known of reducers; several recordings may share it.
        mapped: map the file of the layout "packed", and keep what was looked at.
        given: reducers for subrecordings that have none.
    """
    read = _reader(root, manifest, recipes, mapped=mapped, kept=False)

    def make(name: str) -> Subrecording:
        try:
            part = read(manifest.entry(name))
        except FileNotFoundError as error:
            raise CorruptRecordingError(f"{error.filename} is not there, or was replaced by a save meanwhile") from error
        return part if part.reducer is not None else _with_reducers(Recording({name: part}), given, root)[name]

    kept = mapped and manifest.packed is not None
    return Recording(_Parts(manifest.lines, make, kept=kept), manifest.aliases, manifest.step)


class _Parts(Mapping[str, Subrecording]):
    """Subrecordings by name, each made when it is asked for, and kept or made anew each time."""

    def __init__(self, names: Mapping[str, object], read: Callable[[str], Subrecording], *, kept: bool) -> None:
        self._names, self._read, self._keep = names, read, kept
        self._made: dict[str, Subrecording] = {}

    def __getitem__(self, name: str) -> Subrecording:
        if (part := self._made.get(name)) is None:
            if name not in self._names:
                raise KeyError(name)
            part = without_modes(self._read, name)
            if self._keep:
                self._made[name] = part
        return part

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:  # that of the base class would read the file
        return name in self._names


def _reader(root: str, manifest: Manifest, recipes: Recipes, *, mapped: bool, kept: bool) -> Callable[[Entry], Subrecording]:
    """What reads a subrecording of a manifest, from a file of its own or from the one that all share; see `shared_tensors`."""
    folder = generation_folder(root, manifest.generation)
    if manifest.packed is None:
        return lambda entry: _read_file(folder, entry, recipes)
    where = os.path.join(folder, manifest.packed["file"])
    longest = 4096 + 16 * sum(map(len, manifest.lines.values()))
    size, sha256 = manifest.packed["bytes"], manifest.packed["sha256"]
    tensors = shared_tensors(where, size, sha256, longest, mapped=mapped, kept=kept)

    def read(entry: Entry) -> Subrecording:
        return rebuilt(entry, recipes, lambda name: tensors(name, entry.dtypes.get(name)), where)

    return read


def _read_file(folder: str, entry: Entry, recipes: Recipes) -> Subrecording:
    where = os.path.join(folder, entry.file)
    this = f"{where} (subrecorder {entry.name!r})"
    named = entry.tensors()
    with open_regular(where, entry.bytes) as (file, size):
        if size != entry.bytes:
            raise CorruptRecordingError(f"{this} is damaged: {size} bytes are there and {entry.bytes} were saved")
        try:
            tensors, sha256 = read_tensors(file, size, entry.dtypes, where, 4096 + sum(2048 + 6 * len(name) for name in named))
        except (RuntimeError, MemoryError) as error:
            raise StorageError(f"{where}: its {size} bytes do not fit into memory: {error}") from error
    if sha256 != entry.sha256:
        raise CorruptRecordingError(f"{this} is damaged: its checksum differs from what was saved")
    if tensors.keys() != set(named):
        found, expected = sorted(tensors)[:20], sorted(named)[:20]
        raise CorruptRecordingError(f"{this} holds tensors {found}, and the manifest names {expected}")
    return rebuilt(entry, recipes, tensors.__getitem__, where)


def _with_reducers(recording: Recording, reducers: Given, where: str) -> Recording:
    """The recording with reducers for subrecordings that have none; raises `CorruptRecordingError` if a state does not fit."""
    if reducers is None:
        return recording
    without = [name for name, part in recording.items() if part.reducer is None]
    recording, recipes = recording.with_reducers(reducers), Recipes()
    for name in without:
        without_modes(recipes.check, recording[name], f"{where} (subrecorder {name!r}), with the reducer that was given,")
    return recording


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


def _warn(recording: Recording, unknown: Mapping[str, list[str]], root: str) -> None:
    if recording.damaged:
        (name, reason), *others = recording.damaged.items()
        more = f", and {len(others)} more" if others else ""
        message = f"{root} is damaged, and {len(recording.damaged)} parts of it are left out: {name!r:.200} ({reason}){more}"
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
