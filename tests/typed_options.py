"""What a type checker accepts and refuses: `mypy tests/typed_options.py` fails if one of the errors below is not there."""

from __future__ import annotations

from recorders import (
    ForwardMonitor,
    PairMonitor,
    ParameterGradientMonitor,
    ParameterMonitor,
    Recorder,
    Recording,
    StateMonitor,
    SyncHandle,
)
from reducers import Mean

ForwardMonitor(Mean(), every=2)
ForwardMonitor(Mean(), evry=2)  # type: ignore[call-arg]
ForwardMonitor(Mean(), every="2")  # type: ignore[arg-type]
ForwardMonitor(Mean(), given=("ids", "mask"))
ForwardMonitor(Mean(), given=3)  # type: ignore[arg-type]
ForwardMonitor(Mean(), on_error="wran")  # type: ignore[arg-type]
ForwardMonitor.partialconstructor(Mean(), train_updates=False)  # type: ignore[call-arg]
ParameterMonitor.partialconstructor(Mean(), when="tick", steps=range(3))
ParameterMonitor.partialconstructor(Mean(), when="tock")  # type: ignore[arg-type]
ParameterGradientMonitor.partialconstructor(Mean(), when="accumulate")
StateMonitor.partialconstructor(Mean(), as_prehok=True)  # type: ignore[call-arg]
PairMonitor.partialconstructor(Mean(), other=3)  # type: ignore[arg-type]

recorder = Recorder(ForwardMonitor(Mean()))
everywhere: Recording = recorder.sync()
on_one: Recording = recorder.sync(to=0)  # type: ignore[assignment]
handle: SyncHandle[Recording] = recorder.sync(async_op=True)
later: Recording = handle.wait()
not_yet: Recording = recorder.sync(async_op=True)  # type: ignore[assignment]
later_on_one: Recording = recorder.sync(to=0, async_op=True).wait()  # type: ignore[assignment]
