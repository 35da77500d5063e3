"""Errors of capture and of files. Every one says what was wrong, where, and what to do."""

from __future__ import annotations

__all__ = [
    "CorruptRecordingError",
    "LensError",
    "MergeError",
    "MissingExtraError",
    "MonitorError",
    "NotARecordingError",
    "OperandError",
    "RecorderError",
    "RecordingNotFoundError",
    "RecordingWarning",
    "SchemaError",
    "SelectionError",
    "StorageError",
    "SyncError",
    "TargetError",
    "TickError",
]


class RecorderError(Exception):
    """Base of every error raised by `recorders`."""


class SelectionError(RecorderError, KeyError):
    """A selection matched nothing, or a name is not there; the message lists what is."""

    def __str__(self) -> str:  # a KeyError would show the repr of its message
        return Exception.__str__(self)


class TargetError(RecorderError, AttributeError):
    """A monitor cannot sit where it was put: no module, or the module has no such attribute."""


class OperandError(RecorderError, TypeError):
    """What a module gave, or what `map_` or `op_` made of it, holds no tensor a reducer could take."""


class MonitorError(RecorderError, RuntimeError):
    """A reducer or one of the user's callables failed during capture; names monitor, module and shapes."""


class MergeError(RecorderError, ValueError):
    """Two recordings do not fit together; both sides are listed."""


class LensError(RecorderError, ValueError):
    """A lens, a chart or an inspector was asked for what it cannot show; lists what it can."""


class MissingExtraError(RecorderError, ImportError):
    """An optional library is not installed; names the extra that brings it."""


class StorageError(RecorderError, OSError):
    """A recording could not be written or read; names the file and the reason."""


class NotARecordingError(StorageError):
    """The path exists and is not a recording."""


class RecordingNotFoundError(StorageError, FileNotFoundError):
    """There is nothing at the path."""


class CorruptRecordingError(StorageError):
    """The path is a recording, and its bytes are not what was saved."""


class SchemaError(StorageError):
    """The recording was written in a schema this version does not know."""


class SyncError(RecorderError, RuntimeError):
    """The ranks of a process group do not record the same things; both sides are listed."""


class TickError(RecorderError, ValueError):
    """A tick of a timeline is no whole number, or is there already."""


class RecordingWarning(UserWarning):
    """Something was not recorded; training goes on."""
