"""What a monitor does for compiled graphs: traces its observations into them, and receives these when a graph runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from recorders.capture.compiled import emit_call, emit_leaves, new_receiver
from recorders.capture.given import keep, number_of
from recorders.capture.graph_buffers import parts
from recorders.capture.layouts import Told
from recorders.capture.operands import leaves, plain_or_spread, recomputing, tracing
from recorders.errors import OperandError
from recorders.monitors.graph_rows import add_together
from recorders.monitors.record import Recording, is_due, store, store_lifts, with_given, work
from recorders.schedule.clock import Clock
from recorders.schedule.stopwatch import Timer, entrance, timed_together

__all__ = ["GraphReceiver", "in_due_step", "is_due_in_graph", "trace", "wanted_in_graph"]


class Traced(Recording, Protocol):
    """What a monitor needs to be part of compiled graphs."""

    twin_key: str
    compiled: bool
    timer: Timer | None
    _clock: Clock | None

    @property
    def records_recomputed(self) -> bool: ...

    def _training(self, module: nn.Module | None) -> bool: ...

    def _receive_call(self, operands: Callable[[], Any], stream: str, told: Told | None = None) -> None: ...


def wanted_in_graph(twin: Traced, module: nn.Module | None) -> bool:
    """Whether the graph that is being traced records calls of `module`; what else the gate asks is asked when the graph runs."""
    return twin.gate.records_in(twin._training(module)) and in_due_step(twin) and not tracing()


def in_due_step(twin: Traced) -> bool:
    """Whether any monitor of the clock records in this step: a graph knows no more of the steps, so there are two graphs."""
    return not twin.gate.chooses_steps or twin._clock is None or twin._clock.busy


def trace(twin: Traced, receiver: Tensor, operands: tuple[Any, ...], path: str = "") -> None:
    """Adds one observation to the graph that is being traced, for the monitor of `receiver`."""
    if twin.bare:
        found = list(leaves(twin._default(*operands), path))
        if found:
            emit_leaves(receiver, twin.twin_key, [leaf for leaf, _ in found], [tensor for _, tensor in found], path)
            return
    emit_call(receiver, operands, path)


def is_due_in_graph(monitor: Traced, stream: str) -> bool:
    """Whether to record what a graph hands over; its mode was asked when the graph was traced."""
    if not monitor.gate.on:
        return False
    if recomputing() and not monitor.records_recomputed:
        monitor._skip("recomputed by checkpointing")
        return False
    monitor.compiled = True
    return is_due(monitor, lambda: monitor.gate.refusal_in_any_mode(stream), None)


class GraphReceiver:
    """Receives the observations that compiled graphs hand over to one monitor, which it references weakly.

    Attributes:
        tensor: the number by which graphs know the receiver; see `new_receiver`.
    """

    def __init__(self, monitor: Traced) -> None:
        self._monitor = weakref.ref(monitor)
        self.tensor = new_receiver(self)

    @property
    def monitor(self) -> Any:
        """The monitor; None if it no longer exists."""
        return self._monitor()

    @property
    def timer(self) -> Timer | None:
        """That of the monitor."""
        monitor = self._monitor()
        return None if monitor is None else monitor.timer

    @entrance
    def receive(self, layout: str, packs: list[Tensor], stream: str, told: Mapping[str, Told]) -> None:
        """Records an observation that the graph lifted."""
        monitor = self._monitor()
        if monitor is not None and is_due_in_graph(monitor, stream):
            work(monitor, None, tuple(packs), store_lifts, monitor, layout, packs, told)

    @staticmethod
    def receive_together(
        receivers: Sequence[GraphReceiver | None], streams: list[str], layouts: list[str], spans: list[str], packs: list[Tensor]
    ) -> None:
        """Records an observation of each of several monitors, which the graph lifted."""
        monitors = [None if receiver is None else receiver.monitor for receiver in receivers]
        timers = [monitor.timer for monitor in monitors if monitor is not None and monitor.timer is not None]
        if timed_together(timers, add_together, monitors, layouts, spans, packs):
            return
        for receiver, stream, layout, span in zip(receivers, streams, layouts, spans, strict=True):
            if receiver is not None:
                receiver.receive(layout, parts(span, packs), stream, {})

    @entrance
    def receive_leaves(self, leaves: dict[str, Tensor], stream: str, told: Mapping[str, Told]) -> None:
        """Records an observation that the graph could not lift."""
        monitor = self._monitor()
        if monitor is not None and is_due_in_graph(monitor, stream):

            def add() -> None:
                inputs: dict[str, tuple[Tensor, ...]] = {path: (plain_or_spread(tensor),) for path, tensor in leaves.items()}
                store(monitor, with_given(monitor, inputs) if monitor.given else inputs, told)

            work(monitor, None, (leaves,), add)

    @entrance
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
