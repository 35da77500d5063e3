"""Work on recordings in files: merged in bounded memory, checked, and repaired as far as they can be."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from functools import reduce
from pathlib import Path

from recorders.errors import MergeError, NotARecordingError, RecordingWarning
from recorders.recordings.loading import load, load_lazily
from recorders.recordings.ranks import Differing, merge_subrecordings, warn_differing
from recorders.recordings.recording import Missing, Recording, Subrecording, check_same_names
from recorders.recordings.storage import save
from recorders.recordings.whole import as_path

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
    parts = _Merged(found)
    aliases = {alias: name for recording in reversed(found.values()) for alias, name in recording.aliases.items()}
    return Recording(parts, {alias: name for alias, name in aliases.items() if alias not in parts})


class _Merged(Mapping[str, Subrecording]):
    """Subrecordings by name, each merged when it is asked for."""

    def __init__(self, recordings: Mapping[str, Recording]) -> None:
        self._recordings = recordings
        self._names = dict.fromkeys(name for recording in recordings.values() for name in recording)

    def __getitem__(self, name: str) -> Subrecording:
        if name not in self._names:
            raise KeyError(name)

        def add(merged: Subrecording | None, path: str) -> Subrecording:
            part = self._recordings[path].subrecordings[name]
            try:
                return part if merged is None else merged.merge(part)
            except Exception as error:
                raise MergeError(f"subrecorder {name!r} of {path} does not fit those before: {error}") from error

        holding = [path for path, recording in self._recordings.items() if name in recording.subrecordings]
        if self._recordings[holding[0]].subrecordings[name].placement:  # then all are needed at once
            differing: Differing = {}
            together = merge_subrecordings([self._recordings[path].subrecordings[name] for path in holding], name, differing)
            warn_differing(differing)
            return together
        merged = reduce(add, holding, None)
        assert merged is not None
        return merged

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def verify(path: str | os.PathLike[str]) -> dict[str, str]:
    """Reads all of a recording; returns why a subrecorder is damaged, by name. If it is whole, that is empty.

    Raises:
        StorageError: nothing of it can be read, see `load`.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecordingWarning)
        return dict(load(path, damaged="skip").lost)


def repair(path: str | os.PathLike[str], to: str | os.PathLike[str]) -> dict[str, str]:
    """Writes what is whole of a damaged recording into another folder; returns why a subrecorder is left out, by name.

    Raises:
        NotARecordingError: there is something at `to` already.
        StorageError: nothing of the recording can be read, or the new one cannot be written.
    """
    target = Path(as_path(to))
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise NotARecordingError(f"{target} exists already: choose another folder, or remove it")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecordingWarning)
        recording = load(path, damaged="skip")
    save(recording, target)
    return dict(recording.lost)
