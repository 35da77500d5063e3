"""Where tensors are captured, and where results go."""

from recorders.attributes import DifferenceMonitor, StateMonitor
from recorders.clock import Clock
from recorders.constructor import MonitorConstructor
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
from recorders.gradients import BackwardInputMonitor, BackwardMonitor
from recorders.inspector import Inspector
from recorders.monitor import Monitor
from recorders.monitors import CallMonitor, ForwardInputMonitor, ForwardMonitor
from recorders.pairs import PairMonitor
from recorders.parameters import OptimizerStateMonitor, ParameterGradientMonitor, ParameterMonitor, ParameterUpdateMonitor
from recorders.recorder import Recorder
from recorders.recording import Recording, Subrecording
from recorders.storage import load, save
from recorders.timeline import Timeline

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
