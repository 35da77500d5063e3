"""Plan: what will be recorded and how big it gets, found by a dry run."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from recorders.capture.copying import apart_from, copied, names_of
from recorders.capture.operands import leaves, mapped
from recorders.capture.renewal import OLD_GRAPH, has_old_graph, in_eager_mode
from recorders.errors import RecordingWarning, TargetError, in_a_line
from recorders.monitors.base import Monitor
from recorders.monitors.buffer import NO_PARTS, Buffer
from recorders.monitors.gate import Gate
from recorders.monitors.options import DEFAULTS
from recorders.recorder.report import shown_module
from recorders.recordings.display import Rows, ShownAsTable, shown_name
from recorders.recordings.storage.tensors import kept_bytes
from recorders.schedule.chosen_steps import shown_steps
from reducers import Reducer, State, TensorPart


@dataclass(frozen=True)
class PlanRow:
    """One subrecorder: the shapes that its reducer gets, by leaf, and the bytes of its state after one observation.

    `grows` says that the state grows without bound, because the reducer keeps every observation; `growth_bytes` says how many bytes
    each observation adds.
    """

    name: str
    monitor: str
    module: str
    reducer: str
    shapes: Mapping[str, tuple[int, ...]]
    state_bytes: int | None
    error: str | None
    steps: str = ""
    grows: bool = False
    growth_bytes: int | None = None

    def __str__(self) -> str:
        if self.error is not None:
            return f"{shown_name(self.name)}: will fail: {self.error}"
        steps = f", {self.steps}" if self.steps else ""
        return f"{shown_name(self.name)}: {self.monitor}({self.reducer}) on {self.module}: {self.size}{steps}"

    @property
    def size(self) -> str:
        """The size of the state, in words."""
        if self.error:
            return f"will fail: {self.error}"
        if self.grows:
            by = "with every" if self.growth_bytes is None else f"by {self.growth_bytes:,} bytes an"
            return f"grows {by} observation, without bound"
        return "size unknown" if self.state_bytes is None else f"{self.state_bytes:,} bytes of state"


@dataclass(frozen=True, repr=False)
class Plan(ShownAsTable):
    """What will be recorded: a row for each subrecorder, and a note if something stayed unknown."""

    rows: tuple[PlanRow, ...]
    note: str

    @property
    def state_bytes(self) -> int:
        """The total size after one observation of the states whose size is known."""
        return sum(row.state_bytes or 0 for row in self.rows)

    def __str__(self) -> str:
        return "\n".join([*map(str, self.rows), self._total(), *([self.note] if self.note else [])])

    def _total(self) -> str:
        total = f"{len(self.rows)} subrecorders, {self.state_bytes:,} bytes of state"
        if growing := sum(row.grows for row in self.rows):
            total += f"; {growing} of them grow without bound: keep less with Whole(last=n), Reservoir(k) or Window(reducer, n)"
        return total

    def title_shown(self) -> str:
        """The total."""
        return f"Plan: {self._total()}" + (f"; {self.note}" if self.note else "")

    def rows_shown(self) -> Rows:
        """One row for each subrecorder."""
        cells = ([(shown_name(row.name), f"{row.monitor}({row.reducer})", row.module, row.size, row.steps)] for row in self.rows)
        return ("name", "monitor", "on", "state after one observation", "steps"), cells, len(self.rows)


def plan(monitors: Mapping[str, Monitor], nets: Iterable[nn.Module], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Plan:
    """The plan of `monitors`, from a run of copies of the nets on the meta device: only shapes are computed."""
    nets = [*nets]
    note = "" if args or kwargs else "give plan() example inputs to learn the sizes of what is recorded in forward and backward"
    copies: list[nn.Module] = []
    memo: dict[int, Any] = {}  # the copy of each object, by its id
    try:
        for net in nets:
            kept = [value for module in net.modules() for value in vars(module).values() if isinstance(value, Tensor)]
            memo.update({id(tensor): _meta(tensor) for tensor in [*net.parameters(), *net.buffers(), *kept]})
            copies.append(copied(net, memo))
    except Exception as error:
        memo.clear()  # it may hold modules that are half copied
        note = f"the sizes are incomplete: the net cannot be copied ({type(error).__name__}: {in_a_line(error)})"
    known: dict[Any, State] = {}
    dry: dict[str, Monitor] = {}
    with in_eager_mode():
        for name, one in monitors.items():
            with contextlib.suppress(TargetError):  # the copy of a module of torch.jit.trace takes no hooks
                if id(one.module) in memo:
                    dry[name] = _on_copy(one, memo[id(one.module)], known)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecordingWarning)
        for monitor in dry.values():
            monitor.record_shapes()
        try:
            if args or kwargs:
                with apart_from({number: name for net in nets for number, name in names_of(net).items()}):
                    _run(copies, _on_meta(args), _on_meta(dict(kwargs)))
        except Exception as error:
            note = f"the sizes are incomplete: the net cannot be run on shapes alone ({type(error).__name__}: {in_a_line(error)})"
    growths: dict[int, int] = {}
    rows = [_plan_row(name, monitor, dry.get(name), growths) for name, monitor in monitors.items()]
    for monitor in dry.values():
        monitor.deregister()
        if monitor.given and not monitor.states and monitor.last_error is None and (args or kwargs):
            note = note or "give plan() what monitors take: with recorder.given(...): recorder.plan(...)"
    if any(monitor.module is None and monitor.subject != "values" for monitor in monitors.values()):
        note = "; ".join(filter(None, (note, "a module no longer exists: nothing else kept it alive; keep the net")))
    if any(has_old_graph(monitor.module) for monitor in monitors.values()):
        note = "; ".join(filter(None, (note, OLD_GRAPH)))
    return Plan(tuple(rows), note)


def _on_copy(monitor: Monitor, module: nn.Module, known: dict[Any, State]) -> Monitor:
    """A monitor like this one on a copy of its module, which records the shapes of all that it sees.

    Args:
        known: the states that all monitors of the plan share, see `_Shapes`.
    """
    made = monitor.constructor(monitor.attr)
    made.dry_run, made.context = True, monitor.context
    made.on_error, made.filter_, made.gate = "warn", None, Gate(DEFAULTS)
    made.register(module)
    shapes = _Shapes(made.reducer, known)
    made.buffer, shapes.by_channels = shapes, made.buffer.by_channels
    return made


class _Shapes(Buffer):
    """States of tensors on the meta device, where all observations of the same shapes and dtypes have one.

    So the reducer is asked once for many layers: an operation takes as long there as one on numbers.
    """

    def __init__(self, reducer: Reducer, known: dict[Any, State]) -> None:
        super().__init__(reducer)
        self._known = known

    def add(self, inputs: Mapping[str, tuple[Tensor, ...]], parts: Mapping[str, TensorPart] = NO_PARTS) -> None:
        self.stored = self.stored.after(self._updated(self.stored.states, inputs, parts))

    def _joined(self, reducer: Reducer, xs: tuple[Tensor, ...], state: State) -> State:
        described = [(name, x.shape, x.dtype, x.layout, x.device) for name, x in (*state.items(), *enumerate(xs))]
        try:
            key = reducer, *described
            found = self._known.get(key)
        except TypeError:  # an option of the reducer, such as a list, has no hash
            return reducer.update(state, *xs)
        if found is None:
            found = self._known[key] = reducer.update(state, *xs)
        return found


def _run(nets: list[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    drawn = [torch.cuda.current_device()] if used else []  # all is on the meta device, but for what the net itself makes
    for net in nets:
        with torch.enable_grad(), torch.random.fork_rng(drawn):
            outputs = [tensor for _, tensor in leaves(net(*args, **kwargs)) if tensor.requires_grad]
            if outputs:
                torch.autograd.backward([tensor.sum() for tensor in outputs])


def _plan_row(name: str, monitor: Monitor, dry: Monitor | None, growths: dict[int, int]) -> PlanRow:
    """The row of a monitor, of which `dry` is the one of the dry run.

    Args:
        growths: by how much each state of the dry run grows, by its id; monitors share states.
    """
    seen = dry if dry is not None and dry.states else monitor
    size = sum(map(_bytes, seen.states.values())) if seen.states else None
    grows = not monitor.reducer.bounded
    shapes, error = ({}, None) if dry is None else (dict(dry.dry_run_shapes), dry.last_error)
    steps = shown_steps(monitor.gate.steps, monitor.gate.every_step)
    reducer = repr(monitor.reducer) + (f", given={monitor.given}" if monitor.given else "")
    growth = _growth(seen, growths) if grows and seen.states else None
    kind, module = type(monitor).__name__, shown_module(monitor)
    return PlanRow(name, kind, module, reducer, shapes, size, error, steps, grows, growth)


def _bytes(state: State) -> int:
    """The bytes of the storages of a state: the slots of a window or a history are a view of a buffer with free slots."""
    return sum(map(kept_bytes, state.values()))


def _growth(monitor: Monitor, known: dict[int, int]) -> int | None:
    """The bytes by which each observation makes the states bigger: merging a state with itself adds its observations once more."""
    states = monitor.states.values()
    try:
        for state in states:
            if id(state) not in known:
                known[id(state)] = _bytes(monitor.reducer.merge(state, state)) - _bytes(state)
    except Exception:  # of a reducer whose states do not merge
        return None
    return sum(known[id(state)] for state in states) // max(1, monitor.samples)


def _meta(tensor: Tensor) -> Tensor:
    copied = tensor.detach().to("meta").requires_grad_(tensor.requires_grad)
    return nn.Parameter(copied, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copied


def _on_meta(value: Any) -> Any:
    return mapped(value, lambda tensor: tensor.detach().to("meta"))
