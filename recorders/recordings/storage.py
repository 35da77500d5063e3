"""Recordings on disk: `save` and `load`.

A recording is a folder with `manifest.json` and a generation folder, which has one safetensors file per subrecorder. A file holds
the results, called `value`, `value/mean` or `value/logits/mean`, for any program that reads safetensors, and the states, with which
the recording merges and continues bit for bit. No code is stored or executed.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import importlib.metadata
import json
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recorders.errors import CorruptRecordingError, NotARecordingError, RecordingNotFoundError, RecordingWarning, StorageError
from recorders.recordings.checking import Checked
from recorders.recordings.commit import Commit
from recorders.recordings.manifest import MAX_DEPTH, Entry, Manifest, Tree, encode, read_manifest, read_regular
from recorders.recordings.recording import Recording, Subrecording, register_writer
from recorders.recordings.tensorfile import pack, unpack
from reducers import RecipeError, Reducer, from_recipe, to_recipe

__all__ = ["load", "save"]

ATTEMPTS = 100
"""How often `load` starts again if a save replaces the recording meanwhile."""


def save(recording: Recording, path: str | os.PathLike[str]) -> Path:
    """Writes a recording into the folder `path`, completely or not at all; returns the folder.

    If the process is killed, the disk is full or anything fails, the folder still holds the last complete save. Processes that save
    into one folder wait for each other; the last one wins. On systems without file locks (Windows, some network file systems) what
    killed saves left is not removed.

    Args:
        path: a new or empty folder, or one that holds a recording; parents are created.

    Raises:
        NotARecordingError: `path` is a file, or a folder that contains something else.
        StorageError: writing failed, or a result is neither a tensor, a number nor a mapping of these; the message says which.

    >>> import tempfile
    >>> from reducers import Mean
    >>> mean = Mean()
    >>> part = Subrecording(mean, {"": mean.update({}, torch.tensor([1.0, 3.0]))}, samples=1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     load(save(Recording({"loss": part}), folder + "/run")).compute()
    {'loss': tensor(2., dtype=torch.float64)}
    """
    root = Path(path)
    width = max(5, len(str(len(recording))))
    try:
        with Commit(root) as commit:
            entries = []
            recipes: dict[int, Mapping[str, Any] | str | None] = {}
            for index, (name, part) in enumerate(recording.subrecordings.items()):
                slug = re.sub(r"[^a-z0-9]+", "-", str(name)[:200].lower())[:40].strip("-")
                file = f"{index:0{width}}{'-' * bool(slug)}{slug}.safetensors"
                # Thousands of subrecorders share a few reducers.
                if id(part.reducer) not in recipes or part.reducer is None:
                    recipes[id(part.reducer)] = _recipe(part)
                try:
                    entry, data = _describe(name, part, file, recipes[id(part.reducer)])
                except StorageError as error:
                    raise StorageError(f"cannot save subrecorder {name!r}: {error}") from error
                commit.write(file, data)
                entries.append(entry)
            commit.publish(encode(Manifest(commit.generation, tuple(entries), dict(recording.aliases), _versions())))
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(f"cannot save to {root}: {error}; the folder holds the last complete save, if any") from error
    return root


def load(path: str | os.PathLike[str], *, reducers: Reducer | Mapping[str, Reducer] | None = None) -> Recording:
    """Reads a recording; safe on untrusted files.

    A reducer that holds a function is not saved: its subrecordings have `reducer` None and show the results as saved. With
    `reducers` they compute, merge and continue again. The same holds for reducers whose code is not imported, with a warning.

    Args:
        reducers: for subrecordings without a reducer: one for all, or a mapping from name or glob to reducer.

    Raises:
        RecordingNotFoundError: `path` does not exist; also a FileNotFoundError.
        NotARecordingError: `path` is not a recording.
        SchemaError: a newer version wrote it.
        CorruptRecordingError: it is damaged, incomplete or forged; the message names the file and the reason.
        StorageError: it cannot be read.
    """
    root = os.fspath(path)
    for _ in range(ATTEMPTS):
        manifest = _manifest(root)
        try:
            with _no_collection():
                recording = _read(root, manifest)
            break
        except (StorageError, OSError) as error:
            # If a save has replaced the generation meanwhile, read the new one.
            if _manifest(root).generation != manifest.generation:
                continue
            if isinstance(error, StorageError):
                raise
            kind = CorruptRecordingError if isinstance(error, FileNotFoundError) else StorageError
            raise kind(f"cannot load {root}: {error}") from error
    else:
        raise StorageError(f"cannot load {root}: it was saved again {ATTEMPTS} times during the attempt; try again")
    if reducers is not None:
        unknown = [name for name, part in recording.items() if part.reducer is None]
        recording = recording.with_reducers(reducers)
        checked = Checked()
        for name in unknown:
            checked.require(f"{root}, subrecorder {name!r}, with the reducer that was given,", recording[name])
    _warn_of_unknown(recording)
    return recording


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


def _manifest(root: str) -> Manifest:
    try:
        return read_manifest(root)
    except StorageError:
        raise
    except OSError as error:
        if not os.path.lexists(root):
            raise RecordingNotFoundError(f"there is nothing at {root}") from error
        if isinstance(error, (FileNotFoundError, NotADirectoryError)):
            raise NotARecordingError(f"{root} is no recording: it holds no manifest; save one with recorder.save(path)") from error
        raise StorageError(f"cannot load {root}: {error}") from error


def _read(root: str, manifest: Manifest) -> Recording:
    folder = os.path.join(root, manifest.generation)
    if os.path.islink(folder):
        raise CorruptRecordingError(f"{folder} is a symbolic link, which recordings do not hold")
    parts = {}
    checked = Checked()
    reducers: dict[str, Reducer | None] = {}
    for entry in manifest.entries:
        where = os.path.join(folder, entry.file)
        data = read_regular(where, entry.bytes)
        if len(data) != entry.bytes or hashlib.sha256(data).hexdigest() != entry.sha256:
            raise CorruptRecordingError(
                f"{where} (subrecorder {entry.name!r}) is damaged: {len(data)} bytes are there and {entry.bytes} were saved, "
                "or their checksum differs"
            )
        tensors = unpack(data, entry.dtypes, where)
        if tensors.keys() != set(entry.tensors()):
            raise CorruptRecordingError(
                f"{where} (subrecorder {entry.name!r}) holds tensors {sorted(tensors)[:20]}, "
                f"and the manifest names {sorted(entry.tensors())[:20]}"
            )
        recipe = json.dumps(entry.reducer)
        if recipe not in reducers:
            reducers[recipe] = _reducer(entry.reducer)
        parts[entry.name] = _subrecording(entry, tensors, reducers[recipe])
        checked.require(f"{where} (subrecorder {entry.name!r})", parts[entry.name], tensors)
    return Recording(parts, dict(manifest.aliases))


def _reducer(recipe: Mapping[str, Any] | str | None) -> Reducer | None:
    if not isinstance(recipe, Mapping):
        return None
    try:
        return from_recipe(recipe)
    # A registered class is constructed from untrusted values, and may raise anything.
    except Exception:
        return None


def _subrecording(entry: Entry, tensors: Mapping[str, Tensor], reducer: Reducer | None) -> Subrecording:
    states = {leaf: {key: tensors[name] for key, name in state.items()} for leaf, state in entry.states.items()}
    values = {leaf: _unflatten(tree, tensors) for leaf, tree in entry.values.items()}
    recipe = entry.reducer if reducer is None else None
    return Subrecording(reducer, states, entry.samples, values, entry.monitor, entry.attr, entry.module, recipe=recipe)


def _unflatten(tree: Tree, tensors: Mapping[str, Tensor]) -> Any:
    """The result whose tensors have these names."""
    return tensors[tree] if isinstance(tree, str) else {key: _unflatten(node, tensors) for key, node in tree.items()}


def _warn_of_unknown(recording: Recording) -> None:
    unknown: dict[str, list[str]] = {}
    for name, part in recording.subrecordings.items():
        if part.reducer is None and isinstance(part.recipe, Mapping):
            try:
                from_recipe(part.recipe)
            except Exception as error:
                unknown.setdefault(str(error), []).append(name)
    for reason, names in unknown.items():
        warnings.warn(
            f"{len(names)} subrecorders, such as {names[0]!r}, were loaded without their reducer, as saved values and "
            f"states: {reason}",
            RecordingWarning,
            stacklevel=3,
        )


def _describe(name: str, part: Subrecording, file: str, recipe: Mapping[str, Any] | str | None) -> tuple[Entry, bytearray]:
    """The entry of a subrecording in the manifest, and the bytes of its file."""
    tensors: dict[str, Tensor] = {}
    states = {
        leaf: {key: _put(tensors, ("state", leaf, key), tensor) for key, tensor in state.items()}
        for leaf, state in part.states.items()
    }
    try:
        results = part.leaves()
    except Exception as error:
        raise StorageError(f"its result cannot be computed: {type(error).__name__}: {error}") from error
    values = {leaf: _flatten(tensors, ("value", leaf), result) for leaf, result in results.items()}
    data, dtypes = pack(tensors)
    described = (name, part.monitor, part.attr, part.module, part.samples, recipe)
    return Entry(*described, file, len(data), hashlib.sha256(data).hexdigest(), states, values, dtypes), data


def _recipe(part: Subrecording) -> Mapping[str, Any] | str | None:
    if part.reducer is None:
        return part.recipe
    try:
        return to_recipe(part.reducer)
    except RecipeError:
        return repr(part.reducer)[:1000]


def _flatten(tensors: dict[str, Tensor], path: tuple[str, ...], result: Any) -> Tree:
    """Adds the tensors of a result to `tensors`; returns the result with names in place of tensors."""
    if isinstance(result, Tensor):
        return _put(tensors, path, result)
    if isinstance(result, Mapping):
        if len(path) > MAX_DEPTH:
            raise StorageError(f"its result is nested deeper than {MAX_DEPTH}")
        return {key: _flatten(tensors, (*path, key), node) for key, node in result.items()}
    if isinstance(result, (bool, int, float, complex)):
        try:
            wide = torch.float64 if isinstance(result, float) else torch.complex128 if isinstance(result, complex) else None
            return _put(tensors, path, torch.tensor(result, dtype=wide))
        except (OverflowError, RuntimeError, ValueError) as error:
            raise StorageError(f"its result {_readable(path)!r} does not fit a tensor: {error}") from error
    raise StorageError(
        f"its result {_readable(path)!r} is a {type(result).__name__}; only tensors, numbers and mappings of these can be stored: "
        "let the function given to postmap or apply return one"
    )


def _put(tensors: dict[str, Tensor], path: tuple[str, ...], tensor: Tensor) -> str:
    """Adds a tensor to `tensors` under a readable, unused name; returns the name."""
    wanted = name = _readable(path)
    number = 1
    while name in tensors:
        number += 1
        name = f"{wanted}#{number}"
    tensors[name] = tensor
    return name


def _readable(path: tuple[str, ...]) -> str:
    # Empty leaves and keys are left out; lone surrogates cannot be encoded.
    return "/".join(str(part) for part in path if part != "").encode(errors="backslashreplace").decode()


@functools.cache
def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {"torch": str(torch.__version__)}
    for package in ("torch-recorders", "safetensors"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return versions


register_writer("folder", save)
