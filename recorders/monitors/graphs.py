"""What a monitor does for compiled graphs: traces its observations into them, and receives these when a graph runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from recorders.capture.accumulators import Accumulators, Observed
from recorders.capture.compiled import emit_call, emit_leaves
from recorders.capture.cuda_graphs import CAPTURES
from recorders.capture.gathering import Together
from recorders.capture.given import keep, number_of
from recorders.capture.handles import add_holder, can_accumulate, hand_out, handle_name
from recorders.capture.layouts import Told, from_text, in_use
from recorders.capture.operands import leaves, plain_or_spread, recomputing, tracing
from recorders.capture.receivers import find_receiver, find_twin, new_receiver
from recorders.errors import OperandError
from recorders.monitors.graph_rows import Handed, Lifted, Read, add_at_once, add_together, flush_filled, let_wait
from recorders.monitors.places import note_places
from recorders.monitors.record import Observer, store, store_lifts, with_given, work
from reducers._torch import constant_in_graphs

__all__ = ["GraphReceiver", "handle_in_graph", "in_due_step", "is_due_in_graph", "trace", "wanted_in_graph"]

UNREADY = "no memory for it on the device when a CUDA graph ran"


def wanted_in_graph(twin: Observer, module: nn.Module | None) -> bool:
    """Whether the graph that is being traced may record calls of `module`; what else the gate asks is asked when the graph runs."""
    return twin.gate.records_in(twin._training(module)) and not tracing()


def in_due_step(twin: Observer) -> bool:
    """Whether any monitor of the clock records in this step: a graph knows no more of the steps, so there are two graphs."""
    return not twin.gate.chooses_steps or twin._clock is None or twin._clock.busy


def handle_in_graph(twin: Observer, receiver: Tensor, tensors: list[Tensor]) -> Tensor | None:
    """Called while a graph is traced: the handle of the receiver on the device of all these tensors; None if there is none.

    With a handle the graph need not know whether the step is due; see `recorders/capture/handles.py`.
    """
    if tensors and all(tensor.device == tensors[0].device for tensor in tensors):
        kind, index = tensors[0].device.type, tensors[0].device.index
        if _handed_out(twin.twin_key, kind, index):
            handle: Tensor = getattr(receiver, handle_name(kind, index))
            return handle
    return None


@constant_in_graphs
def _handed_out(key: str, kind: str, index: int | None) -> bool:
    twin = find_twin(key)
    return twin is not None and hand_out(twin, kind, index)


def trace(twin: Observer, receiver: Tensor, operands: tuple[Any, ...], path: str = "") -> None:
    """Adds one observation to the graph that is being traced, for the monitor of `receiver`, if its step may be due."""
    found = list(leaves(twin._default(*operands), path)) if twin.bare else []
    tensors = [tensor for _, tensor in found]
    handle = handle_in_graph(twin, receiver, tensors)
    if handle is None and not in_due_step(twin):
        return
    if found:
        emit_leaves(receiver, twin.twin_key, [leaf for leaf, _ in found], tensors, path, handle)
    else:
        emit_call(receiver, operands, path)


def is_due_in_graph(monitor: Observer, stream: str) -> bool:
    """Whether to record what a graph hands over; its mode was asked when the graph was traced."""
    if not monitor.gate.on:
        return False
    if recomputing() and not monitor.records_recomputed:
        monitor._skip("recomputed by checkpointing")
        return False
    monitor.compiled = True
    return monitor._due(None, None, stream)


class GraphReceiver:
    """Receives the observations that compiled graphs hand over to one monitor, which it references weakly.

    Attributes:
        tensor: the number by which graphs know the receiver; see `new_receiver`.
    """

    def __init__(self, monitor: Observer) -> None:
        self._monitor = weakref.ref(monitor)
        self.tensor = new_receiver(self)
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
            note_places(monitor, {observed.path: from_text(observed.told)[observed.path]})
        monitor.buffer.accumulators = self._accumulators
        if x.numel() == 0:
            if monitor.gate.on and monitor.gate.active:
                monitor.buffer.add_empty(observed.path)
        elif not accumulators.add(observed, x):
            self.miss(1)

    def receive(self, layout: str, packs: list[Tensor], stream: str, told: Mapping[str, Told]) -> None:
        """Records an observation that the graph lifted."""
        monitor = self._monitor()
        if monitor is not None and is_due_in_graph(monitor, stream):
            work(monitor, None, tuple(packs), store_lifts, monitor, layout, packs, told)

    @staticmethod
    def receive_together(numbers: Sequence[int], packs: Sequence[Tensor], together: Together) -> None:
        """Records an observation of each of several monitors, which the graph lifted.

        Args:
            numbers: those of the receivers.
        """
        if not (_left_out(numbers) or add_at_once(numbers, together, packs)):
            _receive_together(numbers, together, lambda: Lifted(together, packs))

    @staticmethod
    def record_together(numbers: Sequence[int], tensors: Sequence[Tensor], together: Together) -> None:
        """Records an observation of each of several monitors, which is to be read of tensors."""
        monitors = _monitors(numbers)
        if not (flush_filled(numbers, monitors, together) or _left_out(numbers)):
            _receive_together(numbers, together, lambda: Read(together, tensors))

    def receive_leaves(self, leaves: dict[str, Tensor], stream: str, told: Mapping[str, Told]) -> None:
        """Records an observation that the graph could not lift."""
        monitor = self._monitor()
        if monitor is not None and is_due_in_graph(monitor, stream):

            def add() -> None:
                inputs: dict[str, tuple[Tensor, ...]] = {path: (plain_or_spread(tensor),) for path, tensor in leaves.items()}
                store(monitor, with_given(monitor, inputs) if monitor.given else inputs, told)

            work(monitor, None, (leaves,), add)

    def receive_call(self, operands: Callable[[], Any], stream: str, told: Mapping[str, Told]) -> None:
        """Records an observation whose operands callables need."""
        monitor = self._monitor()
        if monitor is not None:
            monitor._receive_call(operands, stream, told.get(""))

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
    return [None if (receiver := find_receiver(number)) is None else receiver.monitor for number in numbers]


def _left_out(numbers: Sequence[int]) -> bool:
    """Leaves the observations of all these out if a CUDA graph is captured; returns whether one is."""
    if not (CAPTURES and CAPTURES[0]()):
        return False
    for monitor in filter(None, _monitors(numbers)):
        is_due_in_graph(monitor, "")
    return True


def _receive_together(numbers: Sequence[int], together: Together, hand_over: Callable[[], Handed]) -> None:
    receivers = list(map(find_receiver, numbers))
    monitors = [None if receiver is None else receiver.monitor for receiver in receivers]
    handed: list[Handed] = []

    def add() -> bool:
        handed.append(hand_over())
        return add_together(numbers, monitors, handed[0])

    try:
        if add():
            return
    except Exception as error:  # the tensors could not be read
        for monitor in filter(None, monitors):
            monitor._fail(error, None, ())
        return
    for index, receiver in enumerate(receivers):
        if receiver is not None:
            handed[0].hand_to(receiver, index)
    if together.copies:
        let_wait(numbers, monitors, handed[0])
