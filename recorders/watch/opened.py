"""What is at a path or a URL: a recording, a timeline or a stream."""

from __future__ import annotations

import os
from pathlib import Path

from recorders.errors import CorruptRecordingError, NotARecordingError, RecordingNotFoundError, SchemaError, StorageError
from recorders.recordings.atomic_files import as_path, is_url
from recorders.recordings.display import listed
from recorders.recordings.recording import Recording
from recorders.recordings.storage.load import load
from recorders.recordings.storage.schema import MANIFEST, recording_of
from recorders.streams.files import StreamFiles
from recorders.streams.index import INDEX
from recorders.watch.timeline import Timeline
from reducers.errors import did_you_mean


def open_recorded(source: str | os.PathLike[str]) -> Recording | Timeline | StreamFiles:
    """The recording, the timeline or the stream at a path or a URL; nothing is created or changed.

    Raises:
        RecordingNotFoundError: there is nothing.
        StorageError: what is there cannot be read, or is neither.
    """
    if is_url(source):
        return _at_url(source)
    path = as_path(source)
    if not os.path.exists(path):
        raise RecordingNotFoundError(f"there is nothing at {path}: {_beside(path)}")
    if os.path.isfile(os.path.join(path, INDEX)) and not os.path.isfile(os.path.join(path, MANIFEST)):
        return StreamFiles(path)
    if os.path.isdir(path) or recording_of(path):  # of which load says that it is a part
        return load(path)
    return Timeline(path, read_only=True)


def _at_url(url: str | os.PathLike[str]) -> Recording | Timeline | StreamFiles:
    """What is there a store says only by what is not there."""
    try:
        return load(url)
    except (NotARecordingError, RecordingNotFoundError):
        pass
    try:
        return StreamFiles(url)
    except (CorruptRecordingError, SchemaError):
        raise
    except StorageError:  # there is no such file in a file
        return Timeline(url, read_only=True)


def _beside(path: str) -> str:
    """What there is instead, as the end of a message."""
    folder = Path(os.path.abspath(path)).parent
    try:
        names = sorted(entry.name for entry in folder.iterdir() if _holds_something(entry))
    except OSError:
        names = []
    guess = did_you_mean(os.path.basename(path), names)
    return f"{guess}in {folder} there are {listed(names)}" if names else "give a recording, a timeline or a stream"


def _holds_something(path: Path) -> bool:
    """Whether it is a recording, a stream or a timeline, by its first bytes."""
    try:
        if path.is_file():  # not a pipe, which would wait
            with path.open("rb") as file:
                return file.read(16) == b"SQLite format 3\0"
        return (path / MANIFEST).is_file() or (path / INDEX).is_file()
    except OSError:
        return False
