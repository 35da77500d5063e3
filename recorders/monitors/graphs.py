"""What a monitor does for compiled graphs: traces its observations into them, and receives these when a graph runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from recorders.capture.context import as_monitor
from recorders.capture.cuda_graphs import CAPTURES
from recorders.capture.given import keep, number_of
from recorders.capture.layouts import CHANGES, PlacementInfo, from_text, in_use, is_placed
from recorders.capture.operands import leaves, plain_or_spread, recomputing, tracing
from recorders.errors import OperandError
from recorders.graphs.batches import GraphBatch
from recorders.graphs.codec import leaf_paths, leaves_of
from recorders.graphs.device import Accumulators, Observed, add_holder, can_accumulate, hand_out, handle_name
from recorders.graphs.reading import reader_of
from recorders.graphs.rows import GraphRing, Packs, Rows, capacity_for, parts
from recorders.graphs.sinks import find_sink, find_spec, new_sink
from recorders.graphs.tables import OperatorTable, has_filled
from recorders.graphs.trace import emit_call, emit_leaves
from recorders.monitors.places import note_places
from recorders.monitors.record import Observer, report_failures, store, store_lifts, with_given, work
from reducers._torch import constant_in_graphs
from reducers.kernels.locks import new_lock

__all__ = ["GraphSink", "handle_in_graph", "in_due_step", "is_due_in_graph", "trace", "wanted_in_graph"]

_rings: WeakValueDictionary[Any, GraphRing] = WeakValueDictionary()
"""The ring of the monitors of a graph, by the numbers of their sinks, as long as one of them has it."""

_lock = new_lock()  # two threads may run a graph at once, and would give its monitors two rings


class HandedOver:
    """One observation of each of several monitors, as a graph hands it over.

    Attributes:
        batch: what the graph says of it.
        observation: what rows take of it: packs that the graph made, or a row that the loops in C++ read of tensors.
    """

    def __init__(self, batch: GraphBatch, tensors: Sequence[Tensor]) -> None:
        self.batch, self._reader = batch, reader_of(batch.readings) if batch.readings else None
        self.observation: Any = list(tensors) if self._reader is None else self._reader.read(tensors)

    def hand_to(self, sink: Any, index: int) -> None:
        """Hands the part of one monitor over to its sink."""
        batch, packs = self.batch, self.observation
        if self._reader is not None:
            packs = [pack[0] for pack in self._reader.packs(self.observation.unsqueeze(0))]
        own, info = parts(batch.offsets[index], packs), from_text(batch.info[index])
        if batch.copies:
            sink.receive_leaves(leaves_of(batch.layouts[index], own), batch.streams[index], info)
        else:
            sink.receive(batch.layouts[index], own, batch.streams[index], info)

    def new_rows(self, numbers: Sequence[int], recomputed: bool) -> Rows:
        """Returns rows for observations like this one, of sinks with these numbers.

        Args:
            recomputed: whether calls inside a backward count.
        """
        if self._reader is None:
            return Packs(self.observation, len(numbers))
        return OperatorTable(self._reader, numbers, self.batch.key, capacity_for(self._reader.size, len(numbers)), recomputed)


def add_at_once(numbers: Sequence[int], batch: GraphBatch, packs: Sequence[Tensor]) -> bool:
    """Adds what a graph lifted to the buffer of the monitors if all of them are known to record; returns whether it was added.

    No memory of a monitor is looked at: when a forward ends the caches hold that of the net, and each look takes microseconds.
    """
    shared = _rings.get((batch, *numbers))
    if shared is None or not isinstance(shared.rows, Packs) or recomputing():
        return False
    return shared.rows.add_at_once(packs)


def flush_filled(numbers: Sequence[int], monitors: Sequence[Any], batch: GraphBatch) -> bool:
    """Lets the monitors reduce what waits if the operator in C++ has just filled their ring; returns whether it has."""
    if not has_filled():
        return False
    with _lock:
        ring = _rings.get((batch, *numbers))
        if ring is not None:
            _count_calls(ring, monitors)
        del ring  # the next one takes over its memory
        _flush(numbers, [monitor for monitor in monitors if monitor is not None], batch)
    return True


def add_batch(numbers: Sequence[int], monitors: Sequence[Any], handed: HandedOver) -> bool:
    """Adds one observation of each monitor to their ring, if all of them record it.

    Returns:
        whether it was added; if not, each monitor decides for itself.
    """
    if None in monitors or len(set(map(id, monitors))) < len(monitors):
        return False
    if recomputing() and not monitors[0].records_recomputed:  # all are of one class
        return False
    with _lock:
        try:
            full = as_monitor(_add, numbers, monitors, handed)
        except Exception:  # then each monitor reports what fails for it
            return False
        if full is None:
            return False
        for monitor in monitors:
            monitor.counts["calls"] = monitor.counts.get("calls", 0) + 1
            monitor.compiled = True
        if full:
            _flush(numbers, monitors, handed.batch)
    return True


def _add(numbers: Sequence[int], monitors: Sequence[Any], handed: HandedOver) -> bool | None:
    """Returns whether the ring is full then; None if nothing was added."""
    key = (handed.batch, *numbers)
    ring = _rings.get(key)
    if ring is not None:
        _count_calls(ring, monitors)
        ring = ring.successor()
    if not all(map(_records, monitors)):
        return None
    if ring is None or not _all_wait_in(ring, monitors):
        ring = None if handed.batch.copies else _new_ring(numbers, monitors, handed)
        if ring is None:
            return None
    _rings[key] = ring
    if not ring.rows.add(handed.observation):
        return None
    if not ring.is_full:
        _rely_on(monitors, ring)
    return ring.is_full


def _flush(numbers: Sequence[int], monitors: Sequence[Any], batch: GraphBatch) -> None:
    """Lets the monitors reduce what waits in a full ring, and makes the next one ready."""
    for monitor in monitors:
        monitor.buffer.flush()
        report_failures(monitor)
    if len(monitors) < len(numbers):
        return
    key, waiting = (batch, *numbers), monitors[0].buffer.graph_rings
    if len(waiting) == 1 and waiting[0].layouts is batch.layouts and _all_wait_in(waiting[0], monitors):
        _rings[key] = waiting[0]
        _rely_on(monitors, waiting[0])


def _new_ring(numbers: Sequence[int], monitors: Sequence[Any], handed: HandedOver) -> GraphRing | None:
    """Returns a ring in which observations like this one wait from now on; None if it would hold only one."""
    rows = handed.new_rows(numbers, monitors[0].records_recomputed)
    if rows.capacity < 2:
        return None
    ring = GraphRing(handed.batch, rows)
    for index, monitor in enumerate(monitors):
        monitor.buffer.wait_in(ring, index)
    return ring


def let_wait(numbers: Sequence[int], monitors: Sequence[Any], handed: HandedOver) -> None:
    """Lets the next observations wait, if all monitors could reduce this one by itself: what fails is told at once, not later."""
    if None in monitors or len(set(map(id, monitors))) < len(monitors):
        return
    with _lock:
        if all(map(_reduced, monitors, handed.batch.layouts)) and all(map(_records, monitors)):
            key, ring = (handed.batch, *numbers), as_monitor(_new_ring, numbers, monitors, handed)
            if ring is not None:
                _rings[key] = ring


def _reduced(monitor: Any, layout: str) -> bool:
    """Whether the monitor has reduced an observation of these leaves."""
    return all(path in monitor.buffer.stored.states for path in leaf_paths(layout))


def _rely_on(monitors: Sequence[Any], ring: GraphRing) -> None:
    """Makes the rows ready, until one of the monitors changes."""
    with ExitStack() as locks:
        for monitor in monitors:
            locks.enter_context(monitor.buffer.lock)  # held by whoever reduces what waits, or lets it wait elsewhere
        ring.rows.ready = True
        CHANGES.tell(ring.rows)
        for monitor in monitors:
            for changes in (monitor.gate.changes, monitor.buffer.changes):
                changes.tell(ring.rows)
        if not (all(map(_records, monitors)) and _all_wait_in(ring, monitors)):  # another thread changed one in the meantime
            ring.rows.ready = False


def _all_wait_in(ring: GraphRing, monitors: Sequence[Any]) -> bool:
    return all(monitor.buffer.waits_in(ring, index) for index, monitor in enumerate(monitors))


def _records(monitor: Any) -> bool:
    """Whether the monitor records all that comes in this step, without a placement or a shape to check."""
    rows = monitor.gate.on and monitor.gate.active and monitor.buffer.takes_rows
    return bool(rows and not is_placed(monitor.module, monitor.side))


def _count_calls(ring: GraphRing, monitors: Sequence[Any]) -> None:
    """Counts for each monitor the calls that were not counted yet."""
    calls = ring.rows.take_calls()
    for index, monitor in enumerate(monitors):
        if calls and monitor is not None and monitor.buffer.waits_in(ring, index):
            monitor.counts["calls"] = monitor.counts.get("calls", 0) + calls


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
        if _handed_out(spec.spec_key, kind, index):
            handle: Tensor = getattr(sink, handle_name(kind, index))
            return handle
    return None


@constant_in_graphs
def _handed_out(key: str, kind: str, index: int | None) -> bool:
    spec = find_spec(key)
    return spec is not None and hand_out(spec, kind, index)


def trace(spec: Observer, sink: Tensor, operands: tuple[Any, ...], path: str = "") -> None:
    """Adds one observation to the graph that is being traced, for the monitor of `sink`, if its step may be due."""
    found = [] if spec.has_callables else list(leaves(spec._default(*operands), path))
    tensors = [tensor for _, tensor in found]
    handle = handle_in_graph(spec, sink, tensors)
    if handle is None and not in_due_step(spec):
        return
    if found:
        emit_leaves(sink, spec.spec_key, [leaf for leaf, _ in found], tensors, path, handle)
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

    def receive(self, layout: str, packs: list[Tensor], stream: str, info: Mapping[str, PlacementInfo]) -> None:
        """Records an observation that the graph lifted."""
        monitor = self._monitor()
        if monitor is not None and is_due_in_graph(monitor, stream):
            work(monitor, None, tuple(packs), store_lifts, monitor, layout, packs, info)

    @staticmethod
    def receive_batch(numbers: Sequence[int], packs: Sequence[Tensor], batch: GraphBatch) -> None:
        """Records an observation of each of several monitors, which the graph lifted.

        Args:
            numbers: those of the sinks.
        """
        if not (_left_out(numbers) or add_at_once(numbers, batch, packs)):
            _receive_batch(numbers, batch, packs)

    @staticmethod
    def record_batch(numbers: Sequence[int], tensors: Sequence[Tensor], batch: GraphBatch) -> None:
        """Records an observation of each of several monitors, which is to be read of tensors."""
        monitors = _monitors(numbers)
        if not (flush_filled(numbers, monitors, batch) or _left_out(numbers)):
            _receive_batch(numbers, batch, tensors)

    def receive_leaves(self, leaves: dict[str, Tensor], stream: str, info: Mapping[str, PlacementInfo]) -> None:
        """Records an observation that the graph could not lift."""
        monitor = self._monitor()
        if monitor is not None and is_due_in_graph(monitor, stream):

            def add() -> None:
                inputs: dict[str, tuple[Tensor, ...]] = {path: (plain_or_spread(tensor),) for path, tensor in leaves.items()}
                store(monitor, with_given(monitor, inputs) if monitor.given else inputs, info)

            work(monitor, None, (leaves,), add)

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
        monitor = self._monitor()
        if monitor is not None and is_due_in_graph(monitor, ""):
            reason = "its operands could not be read while the graph was traced; run the module without torch.compile to see why"
            monitor._fail(OperandError(reason), None, ())


def _monitors(numbers: Sequence[int]) -> list[Any]:
    return [None if (sink := find_sink(number)) is None else sink.monitor for number in numbers]


def _left_out(numbers: Sequence[int]) -> bool:
    """Leaves the observations of all these out if a CUDA graph is captured; returns whether one is."""
    if not (CAPTURES and CAPTURES[0]()):
        return False
    for monitor in filter(None, _monitors(numbers)):
        is_due_in_graph(monitor, "")
    return True


def _receive_batch(numbers: Sequence[int], batch: GraphBatch, tensors: Sequence[Tensor]) -> None:
    sinks = list(map(find_sink, numbers))
    monitors = [None if sink is None else sink.monitor for sink in sinks]
    handed: list[HandedOver] = []

    def add() -> bool:
        handed.append(HandedOver(batch, tensors))
        return add_batch(numbers, monitors, handed[0])

    try:
        if add():
            return
    except Exception as error:  # the tensors could not be read
        for monitor in filter(None, monitors):
            monitor._fail(error, None, ())
        return
    for index, sink in enumerate(sinks):
        if sink is not None:
            handed[0].hand_to(sink, index)
    if batch.copies:
        let_wait(numbers, monitors, handed[0])
