"""What is at a path or a URL: a recording, or a timeline."""

from __future__ import annotations

import os

from recorders.errors import NotARecordingError, RecordingNotFoundError
from recorders.recordings.atomic_files import as_path, is_url
from recorders.recordings.recording import Recording
from recorders.recordings.storage.load import load
from recorders.recordings.storage.schema import recording_of
from recorders.watch.timeline import Timeline

__all__ = ["open_recorded"]


def open_recorded(source: str | os.PathLike[str]) -> Recording | Timeline:
    """The recording or the timeline at a path or a URL; nothing is created or changed.

    Raises:
        RecordingNotFoundError: there is nothing.
        StorageError: what is there cannot be read, or is neither.
    """
    if is_url(source):
        try:
            return load(source)
        except (NotARecordingError, RecordingNotFoundError):
            return Timeline(source, read_only=True)
    path = as_path(source)
    if not os.path.exists(path):
        raise RecordingNotFoundError(f"there is nothing at {path}: give a folder with a recording, or the file of a timeline")
    if os.path.isdir(path) or recording_of(path):  # of which load says that it is a part
        return load(path)
    return Timeline(path, read_only=True)
