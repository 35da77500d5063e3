"""Report: what each subrecorder recorded, and why some recorded nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from recorders.monitors.base import Monitor
from recorders.monitors.forward import CallMonitor
from recorders.monitors.gradients import NO_TENSOR, GradientMonitor
from recorders.monitors.parameters import ParameterMonitor, _ParameterMonitor
from recorders.schedule.clock import shown_steps

__all__ = ["Report", "ReportRow", "report"]


@dataclass(frozen=True)
class ReportRow:
    """One subrecorder: how often its hook was called, what was recorded, what was left out, by reason, and the last error."""

    name: str
    monitor: str
    module: str
    calls: int
    samples: int
    skipped: Mapping[str, int]
    error: str | None
    reason: str
    steps: str = ""

    def __str__(self) -> str:
        left_out = "; ".join(f"{count} {reason}" for reason, count in self.skipped.items())
        return (
            f"{self.name or '(net)'}: {self.monitor} on {self.module}: {self.samples} recorded of {self.calls} calls"
            + (f" ({self.steps})" if self.steps else "")
            + (f"; left out: {left_out}" if left_out else "")
            + (f"; {self.reason}" if self.reason else "")
        )


@dataclass(frozen=True)
class Report:
    """What fired how often. `str()` gives a line a subrecorder."""

    rows: tuple[ReportRow, ...]

    @property
    def silent(self) -> tuple[ReportRow, ...]:
        """The subrecorders that recorded nothing, each with the likely reason."""
        return tuple(row for row in self.rows if row.samples == 0)

    def __str__(self) -> str:
        return "\n".join(map(str, self.rows))


def report(monitors: Mapping[str, Monitor], nets: Iterable[nn.Module] = ()) -> Report:
    """How often each monitor was called and what came of it; `nets` are those that the monitored modules were selected from."""
    rows = []
    begun = any(monitor.samples for monitor in monitors.values())
    present = {id(module) for net in nets for module in net.modules()}
    for name, monitor in monitors.items():
        skipped = {reason: count for reason, count in monitor.tally.items() if reason != "calls"}
        module = "nothing" if monitor.module is None else type(monitor.module).__name__
        samples = monitor.samples
        calls = max(monitor.tally.get("calls", 0), samples)  # calls inside a compiled graph are not tallied
        steps = shown_steps(monitor.steps, monitor.every_step, monitor.clock.cadence if monitor.gated else 1)
        gone = bool(present) and not isinstance(monitor, CallMonitor) and id(monitor.module) not in present
        reason = _GONE if gone else _reason(monitor, samples, begun)
        rows.append(ReportRow(name, type(monitor).__name__, module, calls, samples, skipped, monitor.last_error, reason, steps))
    return Report(tuple(rows))


_IDLE = "the clock stands at step 0 still: it is advanced by recorder.attach(optimizer), or recorder.step() after every step"
_PARTIAL = (
    "a compiled graph returned it, and a hook outside of that graph gets no gradient of what the graph itself makes of it: compile "
    "the net as a whole, with torch._dynamo.config.wrap_top_frame = True where this is its outermost module"
)
_GONE = "its module is no longer in the net: another took its place after the selection; select again"


def _reason(monitor: Monitor, samples: int, begun: bool) -> str:
    """Why nothing was recorded, as far as can be told; `begun` where others recorded something."""
    idle = monitor.gated and monitor.clock.step == 0
    partial = isinstance(monitor, GradientMonitor) and monitor.partial
    if samples:
        return _IDLE if idle else _PARTIAL if partial else ""
    if isinstance(monitor, CallMonitor):
        return "" if monitor.tally else "nothing was pushed"
    if monitor.last_error is not None:
        return monitor.last_error
    if not monitor.active:
        return f"none of its steps has come: {_IDLE if idle else f'the clock stands at step {monitor.clock.step}'}"
    if monitor.tally:
        if monitor.tally.keys() - {"calls"} == {NO_TENSOR}:
            return "what it watches holds no tensor: choose another module, or record an attribute of it with StateMonitor"
        return _PARTIAL if partial else "only ever left out"
    if not monitor.registered and not begun:  # at the end of a recording hooks are off, and that is not the reason
        return "its hooks are off"
    if isinstance(monitor, ParameterMonitor) and monitor.when != "step":
        return "its module was never called" if monitor.when == "call" else "tick() was never called"
    if isinstance(monitor, _ParameterMonitor):
        return "no optimizer step changed its parameters"
    if isinstance(monitor, GradientMonitor) and monitor.seen:
        return "no gradient came: backward was not run, or its output is not used by the loss"
    if monitor.module is None and monitor.registered:
        return "its module is no more: nothing else kept it alive"
    if isinstance(monitor.module, (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)):
        return "a container is never called, only what is in it"
    reason = "its module was never called, or through .forward or its weights alone (as MultiheadAttention does with out_proj)"
    if "torch._dynamo" in sys.modules and torch._dynamo.utils.counters["frames"]:  # importing it takes seconds
        reason += "; or in a graph that torch.compile made before the hook was on: call torch._dynamo.reset() once it is"
    return reason
