"""Recordings on disk: `save` and `load`.

A recording is a folder: `manifest.json`, and a generation folder with one safetensors file per subrecorder. A file holds the
results, called `value`, `value/mean` or `value/logits/mean`, for `safetensors.torch.load_file` or anything else that reads
safetensors, and the states, from which the recording merges and continues bit for bit. No code is ever stored or executed.
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

from recorders.errors import (
    CorruptRecordingError,
    NotARecordingError,
    RecordingNotFoundError,
    RecordingWarning,
    StorageError,
)
from recorders.recordings.commit import Commit
from recorders.recordings.manifest import MAX_DEPTH, Entry, Manifest, Tree, encode, read_manifest, read_regular
from recorders.recordings.recording import Recording, Subrecording, register_writer
from recorders.recordings.tensorfile import pack, unpack
from reducers import RecipeError, Reducer, from_recipe, to_recipe

__all__ = ["load", "save"]

ATTEMPTS = 100
"""How often `load` begins again when savers replace the recording under it."""


def save(recording: Recording, path: str | os.PathLike[str]) -> Path:
    """Writes a recording into the folder `path`, whole or not at all.

    Killed at any moment, out of disk or failing, the folder still holds the last complete save. Savers of one folder wait for each
    other; the last one stays. Where the system has no file locks (Windows, some network file systems) leftovers of killed saves
    stay in the folder.

    Args:
        path: a new or empty folder, or one saved to before; parents are made.

    Returns:
        The folder.

    Raises:
        NotARecordingError: there is a file, or a folder with something else in it.
        StorageError: it could not be written, or a result is neither a tensor, a number nor a mapping of such; names which.

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
    """Reads a recording back; safe on files from anywhere.

    A reducer that holds a function is not in the file: its subrecordings have `reducer` None and show what was computed when they
    were saved. Their states are there, so that they compute, merge and continue once the reducer is given. The same goes for
    reducers defined by code that is not imported here; of these a warning tells.

    Args:
        reducers: for subrecordings without one: one for all, or a mapping from name or glob pattern to reducer.

    Raises:
        RecordingNotFoundError: nothing is there; also a FileNotFoundError.
        NotARecordingError: what is there is no recording.
        SchemaError: a newer version wrote it.
        CorruptRecordingError: it is not what was saved: damaged, incomplete or forged; names the file and the reason.
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
            # A save that finished meanwhile has taken the older generation away: then what is wanted is the new one.
            if _manifest(root).generation != manifest.generation:
                continue
            if isinstance(error, StorageError):
                raise
            kind = CorruptRecordingError if isinstance(error, FileNotFoundError) else StorageError
            raise kind(f"cannot load {root}: {error}") from error
    else:
        raise StorageError(f"cannot load {root}: it was saved anew {ATTEMPTS} times while it was read; try again")
    if reducers is not None:
        recording = recording.with_reducers(reducers)
    _warn_of_unknown(recording)
    return recording


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Holds back the cycle collector: reading makes many lasting objects and no cycles, and searching them doubled the time."""
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
    return Recording(parts, dict(manifest.aliases))


def _reducer(recipe: Mapping[str, Any] | str | None) -> Reducer | None:
    if not isinstance(recipe, Mapping):
        return None
    try:
        return from_recipe(recipe)
    # Registered classes make themselves from fields that may come from anywhere, and may stumble in ways of their own.
    except Exception:
        return None


def _subrecording(entry: Entry, tensors: Mapping[str, Tensor], reducer: Reducer | None) -> Subrecording:
    return Subrecording(
        reducer=reducer,
        states={leaf: {key: tensors[name] for key, name in state.items()} for leaf, state in entry.states.items()},
        samples=entry.samples,
        values={leaf: _grow(tree, tensors) for leaf, tree in entry.values.items()},
        monitor=entry.monitor,
        attr=entry.attr,
        module=entry.module,
        recipe=entry.reducer if reducer is None else None,
    )


def _grow(tree: Tree, tensors: Mapping[str, Tensor]) -> Any:
    """The result that a tree of tensor names stands for."""
    return tensors[tree] if isinstance(tree, str) else {key: _grow(node, tensors) for key, node in tree.items()}


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
            f"{len(names)} subrecorders, the first of them {names[0]!r}, were loaded without their reducer, as saved values and "
            f"states: {reason}",
            RecordingWarning,
            stacklevel=3,
        )


def _describe(name: str, part: Subrecording, file: str, recipe: Mapping[str, Any] | str | None) -> tuple[Entry, bytearray]:
    """A subrecording as the bytes of its file and its entry in the manifest."""
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
    entry = Entry(
        name=name,
        monitor=part.monitor,
        attr=part.attr,
        module=part.module,
        samples=part.samples,
        reducer=recipe,
        file=file,
        bytes=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        states=states,
        values=values,
        dtypes=dtypes,
    )
    return entry, data


def _recipe(part: Subrecording) -> Mapping[str, Any] | str | None:
    if part.reducer is None:
        return part.recipe
    try:
        return to_recipe(part.reducer)
    except RecipeError:
        return repr(part.reducer)[:1000]


def _flatten(tensors: dict[str, Tensor], path: tuple[str, ...], result: Any) -> Tree:
    """Puts the tensors of a result among `tensors`; returns the same result with their names in it."""
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
        f"its result {_readable(path)!r} is a {type(result).__name__}; only tensors, numbers and mappings of such can be stored: "
        "let the function given to postmap or apply return one"
    )


def _put(tensors: dict[str, Tensor], path: tuple[str, ...], tensor: Tensor) -> str:
    """Adds a tensor under a readable name that is free; returns the name."""
    wanted = name = _readable(path)
    number = 1
    while name in tensors:
        number += 1
        name = f"{wanted}#{number}"
    tensors[name] = tensor
    return name


def _readable(path: tuple[str, ...]) -> str:
    # Empty leaves and keys leave no trace in a name; lone surrogates are no text in a file.
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
