"""Records what happens inside PyTorch networks: monitors capture tensors, reducers reduce them, recordings keep the results."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from recorders.capture.calls import Call
from recorders.capture.channels import channel_axis, register_channel_axis
from recorders.capture.layouts import register_layouts
from recorders.errors import (
    CorruptRecordingError,
    GivenError,
    LensError,
    MergeError,
    MissingExtraError,
    MonitorError,
    NotARecordingError,
    OperandError,
    PluginError,
    RecorderError,
    RecordingExistsError,
    RecordingNotFoundError,
    RecordingWarning,
    SchemaError,
    SelectionError,
    StorageError,
    SyncError,
    TargetError,
    TickError,
    TrainingFaultError,
)
from recorders.monitors.attributes import DifferenceMonitor, StateMonitor
from recorders.monitors.base import Monitor
from recorders.monitors.constructor import MonitorConstructor
from recorders.monitors.forward import CallMonitor, ForwardInputMonitor, ForwardMonitor, ModuleMonitor
from recorders.monitors.gradients import BackwardInputMonitor, BackwardMonitor, global_gradient
from recorders.monitors.optimizers import OptimizerMonitor
from recorders.monitors.pairs import PairMonitor
from recorders.monitors.parameters import (
    OptimizerStateMonitor,
    ParameterGradientMonitor,
    ParameterMonitor,
    ParameterUpdateMonitor,
)
from recorders.recorder.attached import Attached, attached, detach_all
from recorders.recorder.cache import cache
from recorders.recorder.recorder import Recorder
from recorders.recordings.cell import Cell
from recorders.recordings.distributed.sync import SyncHandle
from recorders.recordings.plugins import import_reducers
from recorders.recordings.recording import Recording, Subrecording
from recorders.recordings.storage.load import load
from recorders.recordings.storage.save import save
from recorders.recordings.storage.tools import merge, repair, verify
from recorders.schedule.clock import Clock
from reducers import __version__ as __version__

if TYPE_CHECKING:
    from recorders.streams.dataset import StreamDataset
    from recorders.streams.stream import Stream
    from recorders.watch import calibration, lenses, presets, visualizers
    from recorders.watch.compare import compare
    from recorders.watch.diagnosis.checkup import Checkup
    from recorders.watch.diagnosis.findings import findings
    from recorders.watch.diagnosis.learned import Learned, learn
    from recorders.watch.divergence.bisecting import bisect
    from recorders.watch.divergence.repeating import repeat
    from recorders.watch.divergence.result import Divergence
    from recorders.watch.divergence.runs.answer import RunDivergence
    from recorders.watch.divergence.runs.search import divergence
    from recorders.watch.divergence.runs.steps import bisect_steps
    from recorders.watch.inspector import Inspector
    from recorders.watch.overview import overview
    from recorders.watch.replay import replay
    from recorders.watch.timeline import Timeline

__all__ = [
    "Attached",
    "BackwardInputMonitor",
    "BackwardMonitor",
    "Call",
    "CallMonitor",
    "Cell",
    "Checkup",
    "Clock",
    "CorruptRecordingError",
    "DifferenceMonitor",
    "Divergence",
    "ForwardInputMonitor",
    "ForwardMonitor",
    "GivenError",
    "Inspector",
    "Learned",
    "LensError",
    "MergeError",
    "MissingExtraError",
    "ModuleMonitor",
    "Monitor",
    "MonitorConstructor",
    "MonitorError",
    "NotARecordingError",
    "OperandError",
    "OptimizerMonitor",
    "OptimizerStateMonitor",
    "PairMonitor",
    "ParameterGradientMonitor",
    "ParameterMonitor",
    "ParameterUpdateMonitor",
    "PluginError",
    "Recorder",
    "RecorderError",
    "Recording",
    "RecordingExistsError",
    "RecordingNotFoundError",
    "RecordingWarning",
    "RunDivergence",
    "SchemaError",
    "SelectionError",
    "StateMonitor",
    "StorageError",
    "Stream",
    "StreamDataset",
    "Subrecording",
    "SyncError",
    "SyncHandle",
    "TargetError",
    "TickError",
    "Timeline",
    "TrainingFaultError",
    "attached",
    "bisect",
    "bisect_steps",
    "cache",
    "calibration",
    "channel_axis",
    "compare",
    "detach_all",
    "divergence",
    "findings",
    "global_gradient",
    "import_reducers",
    "learn",
    "lenses",
    "load",
    "merge",
    "overview",
    "presets",
    "register_channel_axis",
    "register_layouts",
    "repair",
    "repeat",
    "replay",
    "save",
    "verify",
    "visualizers",
]

_LATER = {
    "Checkup": "recorders.watch.diagnosis.checkup",
    "Divergence": "recorders.watch.divergence.result",
    "Inspector": "recorders.watch.inspector",
    "Learned": "recorders.watch.diagnosis.learned",
    "RunDivergence": "recorders.watch.divergence.runs.answer",
    "Stream": "recorders.streams.stream",
    "StreamDataset": "recorders.streams.dataset",
    "Timeline": "recorders.watch.timeline",
    "bisect": "recorders.watch.divergence.bisecting",
    "bisect_steps": "recorders.watch.divergence.runs.steps",
    "calibration": "recorders.watch.calibration",
    "compare": "recorders.watch.compare",
    "divergence": "recorders.watch.divergence.runs.search",
    "findings": "recorders.watch.diagnosis.findings",
    "learn": "recorders.watch.diagnosis.learned",
    "lenses": "recorders.watch.lenses",
    "overview": "recorders.watch.overview",
    "presets": "recorders.watch.presets",
    "repeat": "recorders.watch.divergence.repeating",
    "replay": "recorders.watch.replay",
    "visualizers": "recorders.watch.visualizers",
}
"""Where the names are of streams, and of what watches and compares trainings: they load when one of them is asked for."""


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(_LATER[name])
    found = module if name in ("calibration", "lenses", "presets", "visualizers") else getattr(module, name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
