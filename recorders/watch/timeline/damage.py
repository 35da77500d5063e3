"""What is found to be damaged: an error, or left out and named."""

from __future__ import annotations

import sqlite3

from recorders.errors import CorruptRecordingError, RecordingWarning
from recorders.watch.timeline.transactions import is_damage
from reducers.errors import warn_user

__all__ = ["Damages", "Mismatch", "passed_on"]


class Mismatch(Exception):
    """A checksum does not fit, or something is missing."""


class Damages:
    """What is damaged in a file.

    Args:
        path: of the file, for messages.
        skip: name what is damaged in `lost`; otherwise raise `CorruptRecordingError`.
        warn: once, if something is left out.

    Attributes:
        lost: why something was left out, by tick, or by table; "pages" if SQLite found it.
    """

    def __init__(self, path: str, skip: bool = False, warn: bool = True) -> None:
        self.path, self.skip, self._warn = path, skip, warn
        self.lost: dict[int | str, str] = {}

    def add(self, part: int | str, reason: Exception | str) -> None:
        """Raises that a tick or a table is damaged; if it is to be skipped, keeps that in `lost`, and warns the first time.

        An error of SQLite that does not tell of damage, such as a lock, is raised as it is.
        """
        passed_on(reason)
        where = f"at tick {part}" if isinstance(part, int) else f"in its {part}"
        if not self.skip:
            remedy = "Timeline(path, damaged='skip') reads what is whole, and `recorders check` tells what is not"
            raise CorruptRecordingError(f"{self.path} is damaged {where}: {reason}; {remedy}")
        if self._warn and not self.lost:
            message = f"{self.path} is damaged {where}, which is left out: {reason}; Timeline.lost has all that is left out"
            warn_user(message, RecordingWarning)
        self.lost.setdefault(part, str(reason))


def passed_on(reason: Exception | str) -> None:
    """Raises errors of SQLite that do not tell of damage."""
    if isinstance(reason, sqlite3.Error) and not is_damage(reason):
        raise reason
