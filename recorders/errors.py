"""All errors and warnings of `recorders`; each message says what is wrong, where, and what to do."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = [
    "CorruptRecordingError",
    "GivenError",
    "LensError",
    "MergeError",
    "MissingExtraError",
    "MonitorError",
    "NotARecordingError",
    "OperandError",
    "PluginError",
    "RecorderError",
    "RecordingExistsError",
    "RecordingNotFoundError",
    "RecordingWarning",
    "SchemaError",
    "SelectionError",
    "StorageError",
    "SyncError",
    "TargetError",
    "TickError",
    "TrainingFaultError",
]


_LONGEST = 300
"""How many characters of a message that is not ours are shown."""


class RecorderError(Exception):
    """Base of every error raised by `recorders`."""


class SelectionError(RecorderError, KeyError):
    """A selection matches nothing, or a name does not exist; the message lists what exists."""

    def __str__(self) -> str:  # KeyError would show the repr of the message
        return Exception.__str__(self)


class TargetError(RecorderError, AttributeError):
    """A monitor was put on something that is not a module, or on a module without the attribute to watch."""


class OperandError(RecorderError, TypeError):
    """The output of a module, of `map_` or of `op_` contains no tensor to reduce."""


class GivenError(RecorderError, ValueError):
    """What a monitor takes from `Recorder.given` is missing, or does not fit the observation; the message names both."""


class MonitorError(RecorderError, RuntimeError):
    """A reducer or a function given by the user failed during capture; the message names monitor, module and shapes."""


class MergeError(RecorderError, ValueError):
    """Two recordings cannot be merged; the message lists what differs."""


class LensError(RecorderError, ValueError):
    """An option of a lens, a chart or an inspector is invalid; the message lists the choices."""


class MissingExtraError(RecorderError, ImportError):
    """An optional library is not installed; the message names the extra that installs it."""


class PluginError(RecorderError, ImportError):
    """What another package offers by an entry point cannot be used; the message names the package."""


class StorageError(RecorderError, OSError):
    """A recording could not be written or read; the message names the file and the reason."""


class NotARecordingError(StorageError):
    """The path exists but is not a recording."""


class RecordingExistsError(StorageError, FileExistsError):
    """The path holds the recording of another net, which would be lost."""


class RecordingNotFoundError(StorageError, FileNotFoundError):
    """The path does not exist."""


class CorruptRecordingError(StorageError):
    """The path is a recording, but its bytes are not what was saved."""


class SchemaError(StorageError):
    """The recording has a schema that this version does not know."""


class SyncError(RecorderError, RuntimeError):
    """The ranks of a process group do not record the same things, or do not answer; the message lists what differs, or who."""


class TickError(RecorderError, ValueError):
    """A tick of a timeline is not a whole number, or exists already."""


class TrainingFaultError(RecorderError, RuntimeError):
    """A training is likely at fault, and `Checkup(..., "raise")` looked; the message says where, why, and what to try."""


class RecordingWarning(UserWarning):
    """Something was not recorded, or a `Checkup` found a likely fault; training goes on."""


def in_a_line(error: Exception) -> str:
    """The message of an error; of one that is not ours the beginning, since PyTorch may list all its kernels in it."""
    text = str(error)
    if type(error).__module__.partition(".")[0] in ("recorders", "reducers"):
        return text
    line = text.strip().partition("\n")[0]
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}..."


def require(module: str, extra: str) -> Any:
    """Imports and returns an optional module; if it is not installed, raises a `MissingExtraError` that names the extra."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        library = module.partition(".")[0]
        raise MissingExtraError(f"{library} is not installed: pip install torch-recorders[{extra}]") from error
