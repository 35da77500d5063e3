"""What a monitor does for compiled graphs: traces its observations into them, and receives these when a graph runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from recorders.capture.context import as_monitor
from recorders.capture.cuda_graphs import CAPTURES
from recorders.capture.entering import failure_of
from recorders.capture.given import keep, number_of
from recorders.capture.layouts import CHANGES, PlacementInfo, from_text, in_use, layout_of
from recorders.capture.operands import leaves, plain_or_spread, recomputing, tracing
from recorders.errors import OperandError
from recorders.graphs.device import Accumulators, Observed, add_holder, can_accumulate, hand_out, handle_name
from recorders.graphs.reading import RowReader, has_filled, read_parts_of
from recorders.graphs.ring import GraphRing, Share
from recorders.graphs.sinks import GraphBatch, find_sink, key_in_graph, new_sink
from recorders.graphs.trace import emit_call, emit_leaves
from recorders.monitors.record import Observer, note_places, report_failures, store, with_given, work
from reducers.kernels.locks import new_lock

_lock = new_lock()  # two threads may run a graph at once, and would give its monitors two rings


def _wait_together(numbers: Sequence[int], monitors: Sequence[Any], batch: GraphBatch, tensors: Sequence[Tensor]) -> bool:
    """Adds one observation of each monitor to their ring, if all of them record it.

    Returns:
        whether it was added; if not, each monitor decides for itself.
    """
    if not batch.read or None in monitors or len(set(map(id, monitors))) < len(monitors) or (CAPTURES and CAPTURES[0]()):
        return False
    if recomputing() and not monitors[0].records_recomputed:  # all are of one class
        return False
    with _lock:
        try:
            ring = as_monitor(_add, numbers, monitors, batch, tensors)
        except Exception:  # then each monitor reports what fails for it
            return False
        if ring is None:
            return False
        full = ring.count >= ring.capacity
        if not full:
            _rely_on(monitors, ring)
        del ring  # a full one is freed when the last monitor has reduced it
        if full:
            _flush(numbers, monitors, batch)
    return True


def _add(numbers: Sequence[int], monitors: Sequence[Any], batch: GraphBatch, tensors: Sequence[Tensor]) -> GraphRing | None:
    """Returns the ring to which the observation was added; None if it was not."""
    if not all(map(_records, monitors)):
        return None
    ring = _ring_of(numbers, monitors, batch)
    if ring is None or ring.count >= ring.capacity:
        ring = _new_ring(numbers, monitors, batch, tensors)
    return ring if ring is not None and ring.add(tensors) else None


def _ring_of(numbers: Sequence[int], monitors: Sequence[Any], batch: GraphBatch) -> GraphRing | None:
    """Returns the ring in which observations of all these monitors wait; None if there is none."""
    share = monitors[0].buffer.stored.pending.get(batch.paths[0])
    if not isinstance(share, Share) or share.ring.batch is not batch or share.ring.numbers != numbers:
        return None
    return share.ring if _all_wait_in(share.ring, monitors) else None


def _new_ring(numbers: Sequence[int], monitors: Sequence[Any], batch: GraphBatch, tensors: Sequence[Tensor]) -> GraphRing | None:
    """Returns a ring in which observations like this one wait from now on; None if there is none, or it would hold only one."""
    each = [(monitor, *leaf) for monitor, own in zip(monitors, _leaves(batch, tensors), strict=True) for leaf in own.items()]
    parts = [found for monitor, path, x in each if (found := read_parts_of(monitor.reducer, path, x)) is not None]
    if len(parts) < len(each):
        return None
    ring = GraphRing(RowReader(parts), numbers, batch, monitors[0].records_recomputed)
    if ring.capacity < 2:
        return None
    for index, monitor in enumerate(monitors):
        monitor.buffer.wait_in(ring, index)
        monitor.compiled = True
        monitor.counts.setdefault("calls", 0)  # it was called; how often, its ring knows
    return ring


def _leaves(batch: GraphBatch, tensors: Sequence[Tensor]) -> list[dict[str, Tensor]]:
    """Returns the leaves of each observation, by path."""
    rest = iter(tensors)
    return [{path: next(rest) for path in paths} for paths in batch.paths]


def _flush(numbers: Sequence[int], monitors: Sequence[Any], batch: GraphBatch) -> None:
    """Lets the monitors reduce what waits in a full ring, and makes the next one ready."""
    for monitor in filter(None, monitors):
        monitor.buffer.flush()
        report_failures(monitor)
    ring = None if None in monitors else _ring_of(numbers, monitors, batch)
    if ring is not None:
        _rely_on(monitors, ring)


def _rely_on(monitors: Sequence[Any], ring: GraphRing) -> None:
    """Makes the ring ready, until one of the monitors changes."""
    with ExitStack() as locks:
        for monitor in monitors:
            locks.enter_context(monitor.buffer.lock)  # held by whoever reduces what waits, or lets it wait elsewhere
        ring.ready = True
        CHANGES.tell(ring)
        for monitor in monitors:
            monitor.gate.changes.tell(ring)
            monitor.buffer.changes.tell(ring)
        if not (all(map(_records, monitors)) and _all_wait_in(ring, monitors)):  # another thread changed one in the meantime
            ring.ready = False


def _all_wait_in(ring: GraphRing, monitors: Sequence[Any]) -> bool:
    return all(monitor.buffer.waits_in(ring, index) for index, monitor in enumerate(monitors))


def _records(monitor: Any) -> bool:
    """Whether the monitor records all that comes in this step, without a placement or a shape to check."""
    rows = monitor.gate.on and monitor.gate.active and monitor.buffer.takes_rows
    return bool(rows and layout_of(monitor.module, monitor.side) is None)


def _record_alone(monitor: Any, found: dict[str, Tensor], stream: str, info: Mapping[str, PlacementInfo]) -> None:
    """Records an observation as in eager mode, with the same early exit."""
    if not is_due_in_graph(monitor, stream):
        return
    x = found.get("")
    if x is None or info[""].axes is None or not monitor._waits(x):
        work(monitor, None, (found,), _store, monitor, found, info)


def _store(monitor: Any, found: dict[str, Tensor], info: Mapping[str, PlacementInfo]) -> None:
    inputs: dict[str, tuple[Tensor, ...]] = {path: (plain_or_spread(tensor),) for path, tensor in found.items()}
    store(monitor, with_given(monitor, inputs) if monitor.given else inputs, info)


_UNREAD = "its operands could not be read while the graph was traced; run the module without torch.compile to see why"
_UNREAD_GRADIENT = f"{_UNREAD}; if it is given or returns a leaf of autograd, such as a parameter, compile without fullgraph=True"
UNREADY = "no memory for it on the device when a CUDA graph ran"


def wanted_in_graph(spec: Observer, module: nn.Module | None) -> bool:
    """Whether the graph that is being traced may record calls of `module`; what else the gate asks is asked when the graph runs."""
    return spec.gate.records_in(spec._training(module)) and not tracing()


def in_due_step(spec: Observer) -> bool:
    """Whether any monitor of the clock records in this step: a graph knows no more of the steps, so there are two graphs."""
    return not spec.gate.chooses_steps or spec._clock is None or spec._clock.any_due


def handle_in_graph(spec: Observer, sink: Tensor, tensors: list[Tensor]) -> Tensor | None:
    """Called while a graph is traced: the handle of the sink on the device of all these tensors; None if there is none.

    With a handle the graph need not know whether the step is due; see `recorders/graphs/device.py`.
    """
    if tensors and all(tensor.device == tensors[0].device for tensor in tensors):
        kind, index = tensors[0].device.type, tensors[0].device.index
        if hand_out(spec.spec_key, kind, index):
            handle: Tensor = getattr(sink, handle_name(kind, index))
            return handle
    return None


def trace(spec: Observer, sink: Tensor, operands: tuple[Any, ...], path: str = "") -> None:
    """Adds one observation to the graph that is being traced, for the monitor of `sink`, if its step may be due."""
    found = [] if spec.has_callables else list(leaves(spec._default(*operands), path))
    tensors = [tensor for _, tensor in found]
    handle = handle_in_graph(spec, sink, tensors)
    if handle is None and not in_due_step(spec):
        return
    if found:
        emit_leaves(sink, key_in_graph(spec.spec_key, handle), [leaf for leaf, _ in found], tensors, path, handle)
    else:
        emit_call(sink, operands, path)


def is_due_in_graph(monitor: Observer, stream: str) -> bool:
    """Whether to record what a graph hands over; its mode was asked when the graph was traced."""
    if not monitor.gate.on:
        return False
    if recomputing() and not monitor.records_recomputed:
        monitor._skip("recomputed by checkpointing")
        return False
    monitor.compiled = True
    return monitor._due(None, None, stream)


class GraphSink:
    """Receives the observations that compiled graphs hand over to one monitor, which it references weakly.

    Attributes:
        tensor: the number by which graphs know the sink; see `new_sink`.
    """

    def __init__(self, monitor: Observer) -> None:
        self._monitor = weakref.ref(monitor)
        self.tensor = new_sink(self)
        self._accumulators: dict[torch.device, Accumulators] = {}
        add_holder(self)

    @property
    def monitor(self) -> Any:
        """The monitor; None if it no longer exists."""
        return self._monitor()

    def hold(self, device: torch.device) -> None:
        """Gets a handle for the device, unless there is one; see `hand_out`."""
        monitor = self._monitor()
        if monitor is None or device in self._accumulators or not can_accumulate(monitor, device.type):
            return
        gate = monitor.gate
        found = self._accumulators[device] = Accumulators(device, self, gate.on and gate.active)
        setattr(self.tensor, handle_name(device.type, device.index), found.handle)
        gate.shown = self._show

    def _show(self, due: bool) -> None:
        for accumulators in self._accumulators.values():
            accumulators.show(due)

    def miss(self, count: int) -> None:
        """Counts observations of CUDA graphs that found no accumulators of their size."""
        monitor = self._monitor()
        if monitor is not None:
            monitor.counts[UNREADY] = monitor.counts.get(UNREADY, 0) + count

    def accumulate(self, observed: Observed, x: Tensor) -> None:
        """Records an observation in place, on the device. A CUDA graph that replays it does not call this."""
        monitor = self._monitor()
        if monitor is None:
            return
        if recomputing() and not monitor.records_recomputed:
            monitor._skip("recomputed by checkpointing")
            return
        monitor.compiled = True
        work(monitor, None, (x,), self._accumulate, monitor, observed, x)

    def _accumulate(self, monitor: Any, observed: Observed, x: Tensor) -> None:
        accumulators = self._accumulators[x.device]
        if not accumulators.known(observed) and (monitor.buffer.places or in_use()):
            note_places(monitor, {observed.path: from_text(observed.info)[observed.path]})
        monitor.buffer.accumulators = self._accumulators
        if x.numel() == 0:
            if monitor.gate.on and monitor.gate.active:
                monitor.buffer.add_empty(observed.path)
        elif not accumulators.add(observed, x):
            self.miss(1)

    @staticmethod
    def record_batch(numbers: Sequence[int], tensors: Sequence[Tensor], batch: GraphBatch) -> None:
        """Records an observation of each of several monitors.

        Args:
            numbers: those of the sinks.
            tensors: the leaves of all of them, one after another.
        """
        sinks = [find_sink(number) for number in numbers]
        monitors = [None if sink is None else sink.monitor for sink in sinks]
        if has_filled():  # their ring: the operator in C++ added this observation
            with _lock:
                _flush(numbers, monitors, batch)
            return
        if _wait_together(numbers, monitors, batch, tensors):
            return
        each = zip(monitors, _leaves(batch, tensors), batch.streams, map(from_text, batch.info), strict=True)
        failed = [failure_of(one._fail, _record_alone, one, *observation) for one, *observation in each if one is not None]
        for error in filter(None, failed):  # one that is asked for, after all others have recorded
            raise error

    def receive_call(self, operands: Callable[[], Any], stream: str, info: Mapping[str, PlacementInfo]) -> None:
        """Records an observation whose operands callables need."""
        monitor = self._monitor()
        if monitor is not None:
            monitor._receive_call(operands, stream, info.get(""))

    def keep_given(self) -> Tensor | None:
        """Returns a number by which the backward of the graph finds what is given at this forward."""
        monitor = self._monitor()
        return None if monitor is None else number_of(keep(monitor))

    def receive_failure(self) -> None:
        """Reports operands that could not be read while the graph was traced."""
        monitor = self.monitor
        if monitor is not None and is_due_in_graph(monitor, ""):
            monitor._fail(OperandError(_UNREAD if monitor.watch is None else _UNREAD_GRADIENT), None, ())
