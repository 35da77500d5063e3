"""Where tensors are captured, and where results go."""

from recorders.errors import (
    CorruptRecordingError,
    LensError,
    MergeError,
    MissingExtraError,
    MonitorError,
    NotARecordingError,
    OperandError,
    RecorderError,
    RecordingWarning,
    SchemaError,
    SelectionError,
    StorageError,
    SyncError,
    TargetError,
    TickError,
)
from recorders.monitors.attributes import DifferenceMonitor, StateMonitor
from recorders.monitors.base import Monitor
from recorders.monitors.constructor import MonitorConstructor
from recorders.monitors.forward import CallMonitor, ForwardInputMonitor, ForwardMonitor
from recorders.monitors.gradients import BackwardInputMonitor, BackwardMonitor
from recorders.monitors.pairs import PairMonitor
from recorders.monitors.parameters import OptimizerStateMonitor, ParameterGradientMonitor, ParameterMonitor, ParameterUpdateMonitor
from recorders.recorder.recorder import Recorder
from recorders.recordings.recording import Recording, Subrecording
from recorders.recordings.storage import load, save
from recorders.schedule.clock import Clock
from recorders.watch.inspector import Inspector
from recorders.watch.timeline import Timeline
from reducers import __version__ as __version__

__all__ = [
    "BackwardInputMonitor",
    "BackwardMonitor",
    "CallMonitor",
    "Clock",
    "CorruptRecordingError",
    "DifferenceMonitor",
    "ForwardInputMonitor",
    "ForwardMonitor",
    "Inspector",
    "LensError",
    "MergeError",
    "MissingExtraError",
    "Monitor",
    "MonitorConstructor",
    "MonitorError",
    "NotARecordingError",
    "OperandError",
    "OptimizerStateMonitor",
    "PairMonitor",
    "ParameterGradientMonitor",
    "ParameterMonitor",
    "ParameterUpdateMonitor",
    "Recorder",
    "RecorderError",
    "Recording",
    "RecordingWarning",
    "SchemaError",
    "SelectionError",
    "StateMonitor",
    "StorageError",
    "Subrecording",
    "SyncError",
    "TargetError",
    "TickError",
    "Timeline",
    "load",
    "save",
]
