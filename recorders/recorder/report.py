"""Report: what each subrecorder recorded, and why some recorded nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from torch import nn

from recorders._torch.compiler import has_compiled
from recorders.capture.contents import has_own_call
from recorders.capture.cuda_graphs import IN_CUDA_GRAPH
from recorders.capture.operands import TRACED
from recorders.capture.renewal import OLD_GRAPH, has_old_graph
from recorders.errors import RecordingWarning
from recorders.monitors.base import Monitor
from recorders.monitors.gate import WRONG_MODE
from recorders.monitors.gradient_hooks import NO_TENSOR
from recorders.recordings.display import Rows, ShownAsTable, shown_name
from recorders.recordings.recording import LeftOut, Recording, Subrecording, left_out
from recorders.schedule.chosen_steps import shown_steps
from reducers._torch import missing
from reducers.errors import warn_user
from reducers.kernels.cpp import library
from reducers.kernels.dispatch import troubles


@dataclass(frozen=True)
class ReportRow:
    """One subrecorder: the calls of its hook, the observations recorded, those skipped by reason, and the last error.

    `nonfinite` says by leaf how many elements the results leave out because they are NaN or infinite.
    """

    name: str
    monitor: str
    module: str
    calls: int
    samples: int
    skipped: Mapping[str, int]
    error: str | None
    reason: str
    steps: str = ""
    nonfinite: Mapping[str, LeftOut] = field(default_factory=dict)

    def __str__(self) -> str:
        skipped, _ = _left_out(self)
        return (
            f"{shown_name(self.name)}: {self.monitor} on {self.module}: {self.samples} recorded of {self.calls} calls"
            + (f" ({self.steps}; in others its hooks are off)" if self.steps else "")
            + (f"; left out: {skipped}" if skipped else "")
            + (f"; {self.reason}" if self.reason else "")
        )


@dataclass(frozen=True, repr=False)
class Report(ShownAsTable):
    """One row per subrecorder; `str()` shows one line for each, and one for each trouble.

    Attributes:
        rows: one for each subrecorder.
        loops: where the loops that reduce CPU tensors are compiled and kept, or why they are not.
        troubles: what makes recording slower than it could be: no loops in C++, a kernel that failed;
            and what is off because this torch has no longer a private API that it needs.
    """

    rows: tuple[ReportRow, ...]
    loops: str = ""
    troubles: tuple[str, ...] = ()

    @property
    def silent(self) -> tuple[ReportRow, ...]:
        """The subrecorders that recorded nothing, each with the likely reason."""
        return tuple(row for row in self.rows if row.samples == 0)

    def __str__(self) -> str:
        return "\n".join([*map(str, self.rows), *self.troubles])

    def title_shown(self) -> str:
        """How many recorded something."""
        title = f"Report on {len(self.rows):,} subrecorders, of which {len(self.silent):,} recorded nothing"
        title += f", and {holed:,} left out what is not finite" if (holed := sum(bool(row.nonfinite) for row in self.rows)) else ""
        return "; ".join([title, *self.troubles])

    def rows_shown(self) -> Rows:
        """One row for each subrecorder."""
        headings = ("name", "monitor", "on", "recorded", "calls", "left out", "why")
        return headings, ([_cells(row)] for row in self.rows), len(self.rows)


def _cells(row: ReportRow) -> tuple[str, ...]:
    return (shown_name(row.name), row.monitor, row.module, f"{row.samples:,}", f"{row.calls:,}", *_left_out(row))


def _left_out(row: ReportRow) -> tuple[str, str]:
    holes = [f"{share}{f' in {leaf}' * bool(leaf)}" for leaf, share in row.nonfinite.items()]
    return "; ".join([*(f"{count} {reason}" for reason, count in row.skipped.items()), *holes]), row.reason


def shown_module(monitor: Monitor) -> str:
    """The class of the monitor's module, and which of the parameters it names that module does not have."""
    module = monitor.module
    if module is None:
        return "nothing"
    missing = monitor.missing(module)
    return type(module).__name__ + (f" without {', '.join(missing)}" if missing else "")


def report(monitors: Mapping[str, Monitor], gone: Collection[str] = ()) -> Report:
    """The report on `monitors`; `gone` are the names of those whose module has left its net."""
    rows = []
    others_recorded = any(monitor.samples for monitor in monitors.values())
    for name, monitor in monitors.items():
        skipped = {reason: count for reason, count in monitor.counts.items() if reason != "calls"}
        module = shown_module(monitor)
        samples = monitor.samples
        counted = monitor.counts.get("calls", 0) + monitor.buffer.graph_calls
        seen = samples + (sum(skipped.values()) if monitor.watch is not None else 0)  # a gradient that does not come is no call
        calls = max(counted, seen)  # some calls inside a compiled graph are not counted
        steps = shown_steps(monitor.gate.steps, monitor.gate.every_step, monitor.clock.cadence if monitor.gate.chooses_steps else 1)
        reason = _GONE.format(shown_name(name)) if name in gone else _reason(monitor, samples, others_recorded)
        if samples:
            reason = "; ".join(filter(None, [reason, _by_leaf(monitor)]))
        nonfinite, empty = _looked_at(monitor)
        if samples and not reason and empty:
            reason = "every observation was empty, a tensor without elements, so there is no result: look at the batches"
        rows.append(
            ReportRow(
                name,
                type(monitor).__name__,
                module,
                calls,
                samples,
                skipped,
                monitor.last_error,
                reason,
                steps,
                nonfinite,
            )
        )
    return Report(tuple(rows), library.state(), (*troubles(), *missing()))


def _looked_at(monitor: Monitor) -> tuple[dict[str, LeftOut], bool]:
    """What is not finite, by leaf; and whether all states are empty."""
    try:
        found = monitor.snapshot()
        return found.left_out(), bool(found.states) and not any(found.states.values())
    except Exception:  # what cannot be reduced is told elsewhere
        return {}, False


def _by_leaf(monitor: Monitor) -> str:
    """How often each leaf came, if calls differ in what they have; "" if they do not."""
    try:
        counts = monitor.buffer.read().counts
    except Exception:  # what cannot be reduced is told elsewhere
        return ""
    if len({*counts.values()}) < 2:
        return ""
    shown = sorted(counts, key=lambda path: -counts[path])
    more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    return "calls differ in what they have: " + ", ".join(f"{path!r} in {counts[path]:,}" for path in shown[:_SHOWN]) + more


_SHOWN = 4
_IDLE = "the clock stands at step 0 still: call recorder.attach(optimizer), or recorder.step() after every step"
_PARTIAL = (
    "a compiled graph returned it, and a hook outside of that graph misses the gradient that comes from within the graph: compile "
    "the net as a whole, with torch._dynamo.config.wrap_top_frame = True if this is its outermost module"
)
_CAPTURED = (
    "a CUDA graph replays kernels and calls no hooks: compile the net by torch.compile(net, mode='reduce-overhead'), which records "
    "in each replay, or record outside of the capture"
)
_ONLY_TRACED = (
    "it was called only while torch.jit.trace or make_fx wrote its program down, and that program calls no hooks: record the net "
    "itself"
)
_GONE = "its module is no longer in the net: it was replaced after the selection; call recorder.remove({!r}), then select again"


def _reason(monitor: Monitor, samples: int, others_recorded: bool) -> str:
    """The likely reason why nothing, or not everything, was recorded; "" if all is well or no reason is known."""
    idle = monitor.gate.chooses_steps and not monitor.clock.moved
    if IN_CUDA_GRAPH in monitor.counts:
        return _CAPTURED
    if samples:
        return _IDLE if idle else _PARTIAL if monitor.partial else monitor.last_error or ""
    if monitor.subject == "values":
        return "" if monitor.counts else monitor.unseen()
    if monitor.last_error is not None:
        return monitor.last_error
    if not (monitor.gate.active or monitor.gate.came):
        return f"none of its steps has come: {_IDLE if idle else f'the clock stands at step {monitor.clock.step}'}"
    if monitor.counts:
        if monitor.counts.keys() - {"calls"} == {TRACED}:
            return _ONLY_TRACED
        if monitor.counts.keys() - {"calls"} == {NO_TENSOR}:
            return "what it watches holds no tensor: choose another module, or record one of its attributes with StateMonitor"
        return _PARTIAL if monitor.partial else _advice(monitor)
    reason = monitor.unseen() or _absence(monitor)
    on = monitor.registered if monitor.sites else monitor.gate.on
    if on or others_recorded or monitor.seen:  # otherwise hooks are off because the recording has ended
        return reason
    return f"its hooks are off; while they were on, {reason}"


_ADVICE = {
    "no gradient (frozen or unused)": "unless the parameters are frozen, do not call zero_grad() between backward() and step()",
    WRONG_MODE["module", True]: "call net.eval() to evaluate, or tell training by gradients with phase='grad'",
    WRONG_MODE["module", False]: "call net.train() to train, or tell training by gradients with phase='grad'",
    "operand was None": "if it is op_ that returned None, let it return a tensor; otherwise what it watches was not there",
    "filtered out": "filter_ returned False for all of them",
    "no gradient will come (no_grad)": "call the net with gradients on",
}
"""What to do if all calls were left out for one reason, by the reason."""


def _advice(monitor: Monitor) -> str:
    reasons = monitor.counts.keys() - {"calls"}
    advice = _ADVICE.get(next(iter(reasons))) if len(reasons) == 1 else None
    if reasons == {"operand was None"} and type(monitor.module).__name__.endswith("Attention"):
        advice = (
            "attention returns its probabilities if it is asked: need_weights=True, or attn_implementation='eager' in transformers"
        )
    return f"all calls were skipped: {advice}" if advice else "all calls were skipped"


def _absence(monitor: Monitor) -> str:
    """Why a monitor may have seen nothing at all, for all that its kind knows."""
    if monitor.module is None:
        return "its module no longer exists: nothing else kept it alive; keep the net, and select from that which runs"
    if isinstance(monitor.module, (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)):
        return "a container is never called, only the modules in it"
    if has_old_graph(monitor.module):
        return OLD_GRAPH
    if has_own_call(monitor.module):
        return "its module was never called, or its class has a __call__ of its own that runs no hooks, as classes of GPyTorch have"
    reason = (
        "its module was never called, or only its .forward or its weights were used (as MultiheadAttention uses out_proj), or a "
        "copy of it was called, which has no hooks"
    )
    if type(monitor.module).__module__ == nn.Dropout.__module__:
        reason += "; or fused attention (scaled_dot_product_attention) drops in its place"
    if has_compiled():
        reason += "; or it runs in a graph that torch.compile made before the hook was on: call torch._dynamo.reset()"
    if _forks:
        reason += "; or it was called in a process that was forked, such as a worker of a DataLoader: what it records stays there"
    return reason


_forks: set[int] = set()  # this process, once it was forked
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_parent=lambda: _forks.add(os.getpid()))


def unexpected(
    parts: Mapping[str, Subrecording], look: Callable[[Subrecording], dict[str, LeftOut]] = Subrecording.left_out
) -> dict[str, dict[str, LeftOut]]:
    """What was left out, by subrecorder and leaf; not of updates, whose ratios to weights of 0 are not finite in healthy nets."""
    looked = {name: part for name, part in parts.items() if part.monitor != "ParameterUpdateMonitor"}
    return {name: holes for name, part in looked.items() if (holes := look(part))}


def warned_of_left_out(recording: Recording, waits: bool = False) -> bool:
    """Whether elements were left out, of which this warns. Looks at states on other devices too if it may wait for them."""
    hit = unexpected(recording, Subrecording.left_out if waits else _on_cpu)
    for name, holes in hit.items():
        part, (leaf, share) = recording[name], next(iter(holes.items()))
        where = f"{part.monitor}{f' on {part.module}' * bool(part.module)} ({shown_name(name)}{f', {leaf}' * bool(leaf)})"
        more = f", and {len(hit) - 1} more subrecorders left some out" if len(hit) > 1 else ""
        warn_user(
            f"{where}: {share}{more}: results are of the others; recorder.report() lists them, and findings(recorder) says where "
            "to look; if that is as it should be, leave them out yourself, such as by reducer.prefilter(torch.isfinite)",
            RecordingWarning,
        )
        break
    return bool(hit)


def _on_cpu(part: Subrecording) -> dict[str, LeftOut]:
    states = {leaf: state for leaf, state in part.states.items() if all(value.device.type == "cpu" for value in state.values())}
    return left_out(part.reducer, states)
