"""Work on recordings in files: merged in bounded memory, checked, and repaired as far as they can be."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

from recorders.errors import MergeError, NotARecordingError, RecordingWarning, SelectionError, StorageError
from recorders.recordings.atomic_files import as_path
from recorders.recordings.distributed.merge import Merged, merged_aliases
from recorders.recordings.recording import Missing, Recording, check_same_names
from recorders.recordings.storage.commit import Commit
from recorders.recordings.storage.load import load, load_lazily, manifest_at
from recorders.recordings.storage.manifest import Manifest
from recorders.recordings.storage.ranks_manifest import RanksManifest, encode_ranks
from recorders.recordings.storage.remote import fetched, renamed
from recorders.recordings.storage.save import save
from recorders.recordings.storage.writing import versions, warn_left_out, write_rank

__all__ = ["merge", "repair", "verify"]


def merge(paths: Iterable[str | os.PathLike[str]], *, missing: Missing = "error") -> Recording:
    """The recordings at several paths as one, earliest first: of the tasks of a job array, of machines, of days.

    Nothing but names is read until a subrecording is looked at, and then only this one, of each path. So
    `merge(paths).save("all")` needs the memory of two subrecordings, however many paths and names there are. The files must stay as
    they are until then.

    Args:
        paths: folders or URLs of recordings. What is at a URL is fetched into a temporary folder.
        missing: "keep" keeps names that only some of them hold; "error" refuses them.

    Raises:
        MergeError: there is no path, one is given twice, or the names differ. Later also, when a subrecording is looked at, if its
            reducers differ.
        StorageError: a recording cannot be read, see `load`.

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
    for path in [os.fspath(path) for path in paths]:
        if path in found:
            raise MergeError(f"{path} is given twice: it would count twice")
        found[path] = load_lazily(path)
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
        lost: dict[str, str] = {}
        for _ in _whole(folder, lost):
            pass
        return renamed(lost, os.fspath(folder), os.fspath(path))


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
    lost: dict[str, str] = {}
    with fetched(path) as folder:
        if isinstance(manifest_at(folder), RanksManifest):
            _save_ranks(_whole(folder, lost), target)
        else:
            for _, recording in _whole(folder, lost):
                save(recording, target)
        return renamed(lost, os.fspath(folder), os.fspath(path))


def _save_ranks(recordings: Iterable[tuple[int, Recording]], target: Path) -> None:
    left_out: list[str] = []
    with Commit(target) as commit:
        files = [write_rank(recording, commit, rank, "folder", left_out) for rank, recording in recordings]
        commit.publish(encode_ranks(commit.generation, versions(), files))
    warn_left_out(target, left_out)


def _whole(folder: str | os.PathLike[str], lost: dict[str, str]) -> Iterator[tuple[int, Recording]]:
    """What is whole of a recording, by rank, one after another; rank 0 if one process saved it. Adds to `lost` what is not."""
    manifest = manifest_at(folder)
    if isinstance(manifest, Manifest):
        recording = _load_whole(folder, None)
        lost.update(recording.lost)
        yield 0, recording
        return
    lost.update({f"line {number + 2} of the manifest": reason for number, reason in manifest.damaged.items()})
    for rank in manifest.ranks:
        try:
            recording = _load_whole(folder, rank)
        except (StorageError, SelectionError) as error:  # of the latter, the check below tells more
            lost[f"rank {rank}"] = str(error)
            continue
        lost.update({f"{name} of rank {rank}": reason for name, reason in recording.lost.items()})
        yield rank, recording
    if manifest_at(folder).generation != manifest.generation:
        raise StorageError(f"{folder} was saved again while its ranks were read: try again")


def _load_whole(folder: str | os.PathLike[str], rank: int | None) -> Recording:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecordingWarning)
        return load(folder, damaged="skip", ranks=rank)
