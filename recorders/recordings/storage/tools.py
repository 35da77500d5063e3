"""Work on recordings in files: merged in bounded memory, checked, repaired as far as they can be, and as state dicts."""

from __future__ import annotations

import hashlib
import io
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from recorders.errors import MergeError, NotARecordingError, RecordingWarning, SelectionError, StorageError
from recorders.recordings.atomic_files import as_path
from recorders.recordings.distributed.merge import Merged, merged_aliases
from recorders.recordings.recording import Missing, Recording, check_same_names
from recorders.recordings.storage.codec import Recipes, rebuilt
from recorders.recordings.storage.commit import Commit, Generation
from recorders.recordings.storage.load import load, load_lazily, manifest_at
from recorders.recordings.storage.remote import fetched, renamed
from recorders.recordings.storage.save import save, versions, warn_left_out, write_files, write_rank
from recorders.recordings.storage.schema import decode, encode_ranks
from recorders.recordings.storage.tensors import read_tensors


def merge(paths: Iterable[str | os.PathLike[str]], *, missing: Missing = "error") -> Recording:
    """The recordings at several paths as one, earliest first: of the tasks of a job array, of machines, of days.

    Nothing but names is read until a subrecording is looked at, and then only this one, of each path. So
    `merge(paths).save("all")` needs the memory of two subrecordings, however many paths and names there are. The files must stay as
    they are until then.

    Args:
        paths: folders or URLs of recordings. What is at a URL is fetched into a temporary folder.
        missing: "keep" keeps names that only some of them hold; "error" refuses them.

    Raises:
        MergeError: there is no path, one is given twice or with a copy of it, or the names differ. Later also, when a subrecording
            is looked at, if its reducers differ.
        StorageError: a recording cannot be read, see `load`.
        ValueError: `missing` is neither.
        TypeError: there is one path alone, or something that is no path.

    >>> import tempfile, torch
    >>> from recorders import Recording, Subrecording
    >>> from reducers import Mean
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for task, values in enumerate([[1.0, 2.0], [6.0]]):
    ...         part = Subrecording(Mean(), {"": Mean().update({}, torch.tensor(values))}, samples=1)
    ...         _ = Recording({"loss": part}).save(f"{folder}/{task}")
    ...     merge([f"{folder}/0", f"{folder}/1"]).compute()
    {'loss': tensor(3., dtype=torch.float64)}
    """
    found: dict[str, Recording] = {}
    if isinstance(paths, (str, os.PathLike)):
        raise TypeError(f"merge({paths!r}): give several paths in a list, as in merge(['monday', 'tuesday'])")
    several = list(paths)
    if unsaved := [type(path).__name__ for path in several if not isinstance(path, (str, os.PathLike))]:
        raise TypeError(f"merge takes the paths of saved recordings; got {unsaved[0]}: merge what is not saved by one.merge(other)")
    if missing not in ("error", "keep"):
        raise ValueError(f"merge(missing={missing!r}): choose 'error' or 'keep'")
    generations: dict[str, str] = {}
    for path in [os.fspath(path) for path in several]:
        if path in found:
            raise MergeError(f"{path} is given twice: it would count twice")
        found[path], generation = load_lazily(path)
        if (other := generations.setdefault(generation, path)) != path:
            raise MergeError(f"{path} and {other} are the same recording, or copies of it: it would count twice")
    if not found:
        raise MergeError("there is nothing to merge: give the folders of recordings")
    first, *others = found
    for other in others if missing == "error" else ():
        check_same_names(found[first], found[other], first, other)
    parts = Merged(found)
    return Recording(parts, merged_aliases(found, parts))


def verify(path: str | os.PathLike[str]) -> dict[str, str]:
    """Reads all of a recording; returns why a subrecorder is damaged, by name. If it is whole, that is empty.

    If many ranks saved it, the rank is in the name.

    Raises:
        StorageError: nothing of it can be read, see `load`.
    """
    with fetched(path) as folder:
        damaged: dict[str, str] = {}
        for _ in _whole(folder, damaged):
            pass
        return renamed(damaged, os.fspath(folder), os.fspath(path))


def repair(path: str | os.PathLike[str], to: str | os.PathLike[str]) -> dict[str, str]:
    """Writes what is whole of a damaged recording into another folder; returns why a subrecorder is left out, by name.

    If many ranks saved it, so is the other: each rank keeps what is whole of its own.

    Raises:
        NotARecordingError: there is something at `to` already.
        StorageError: nothing of the recording can be read, or the new one cannot be written.
    """
    target = Path(as_path(to))
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise NotARecordingError(f"{target} exists already: choose another folder, or remove it")
    damaged: dict[str, str] = {}
    with fetched(path) as folder:
        if manifest_at(folder).ranks is not None:
            _save_ranks(_whole(folder, damaged), target)
        else:
            for _, recording in _whole(folder, damaged):
                save(recording, target)
        return renamed(damaged, os.fspath(folder), os.fspath(path))


def _save_ranks(recordings: Iterable[tuple[int, Recording]], target: Path) -> None:
    left_out: list[str] = []
    with Commit(target) as commit:
        files = [write_rank(recording, commit, rank, "folder", left_out) for rank, recording in recordings]
        commit.publish(encode_ranks(commit.generation, versions(), files))
    warn_left_out(target, left_out)


def _whole(folder: str | os.PathLike[str], damaged: dict[str, str]) -> Iterator[tuple[int, Recording]]:
    """What is whole of a recording, by rank, one after another; rank 0 if one process saved it. Adds to `damaged` what is not."""
    manifest = manifest_at(folder)
    if manifest.ranks is None:
        recording = _load_whole(folder, None)
        damaged.update(recording.damaged)
        yield 0, recording
        return
    damaged.update(manifest.damaged)
    for rank in manifest.ranks:
        try:
            recording = _load_whole(folder, rank)
        except (StorageError, SelectionError) as error:  # of the latter, the check below tells more
            damaged[f"rank {rank}"] = str(error)
            continue
        damaged.update({f"{name} of rank {rank}": reason for name, reason in recording.damaged.items()})
        yield rank, recording
    if manifest_at(folder).generation != manifest.generation:
        raise StorageError(f"{folder} was saved again while its ranks were read: try again")


def _load_whole(folder: str | os.PathLike[str], rank: int | None) -> Recording:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecordingWarning)
        return load(folder, damaged="skip", ranks=rank)


class _InMemory(Generation):
    """The files of a save, one after another in memory."""

    def __init__(self) -> None:
        super().__init__(Path(), f"generation-{0:032}")
        self.content = b""

    def write(self, file: str, chunks: Iterable[bytes | memoryview]) -> tuple[int, str]:
        self.content += (content := b"".join(map(bytes, chunks)))
        return len(content), hashlib.sha256(content).hexdigest()


def to_state_dict(recording: Recording) -> dict[str, Any]:
    """The recording as `{"recording": bytes}`, for `torch.save` and `torch.distributed.checkpoint`.

    It is one entry, whatever was recorded, because a distributed checkpoint loads the keys and shapes that the program has already,
    and a fresh recorder has none. The bytes are the manifest and the file of the layout "packed", after eight bytes with the length
    of the manifest. Results are not in them, because they are computed from the states.

    >>> import torch
    >>> from recorders import Subrecording
    >>> from reducers import Mean
    >>> part = Subrecording(Mean(), {"": Mean().update({}, torch.ones(2))}, samples=1)
    >>> from_state_dict(to_state_dict(Recording({"loss": part}))).compute()
    {'loss': tensor(1., dtype=torch.float64)}
    """
    files, left_out = _InMemory(), list[str]()
    manifest = write_files(recording, files, "packed", left_out, results=False)
    if left_out:
        raise StorageError(f"not everything that was recorded fits into a state dict: {'; '.join(left_out[:5])}")
    return {"recording": len(manifest).to_bytes(8, "little") + manifest + files.content}


def from_state_dict(state_dict: Mapping[str, Any]) -> Recording:
    """The recording of which `to_state_dict` made this.

    Raises:
        MergeError: it is something else.
    """
    where, recipes = "this state dict", Recipes()
    try:
        raw = bytes(state_dict["recording"])
        start = 8 + int.from_bytes(raw[:8], "little")
        manifest, data = decode(raw[8:start], where), raw[start:]
        entries = [manifest.entry(name) for name in manifest.lines]
        dtypes = {name: dtype for entry in entries for name, dtype in entry.dtypes.items()}
        if hashlib.sha256(data).hexdigest() != (manifest.packed or {"sha256": hashlib.sha256().hexdigest()})["sha256"]:
            raise StorageError("its checksum differs from what was saved")
        tensors = read_tensors(io.BytesIO(data), len(data), dtypes, where, len(data))[0] if data else {}
        parts = {entry.name: rebuilt(entry, recipes, tensors.__getitem__, where) for entry in entries}
        return Recording(parts, manifest.aliases, manifest.step)
    except (KeyError, TypeError, ValueError, RuntimeError, StorageError) as error:
        raise MergeError(f"this is no state dict of a recorder: {type(error).__name__}: {error}") from error
