"""The clock: where in a training the program is, and in which steps a monitor records."""

from __future__ import annotations

import threading
import weakref
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from recorders.capture.compiled import new_receiver
from recorders.capture.hooks import Hook
from recorders.capture.operands import recomputing, tracing
from recorders.capture.switching import SwitchedHooks, grouped, put_back
from recorders.errors import MonitorError
from recorders.schedule.gates import Chosen, StepChooser, StepGroup, Steps, as_steps, shown_steps
from recorders.schedule.steps import count_steps, stop_counting
from recorders.schedule.stopwatch import now

__all__ = ["Chosen", "Clock", "Phase", "Steps", "as_steps", "shown_steps"]

MANY = 64  # steps after which the gates are asked in any case, for hooks may have been put back for the compiler
Phase: TypeAlias = Literal["module", "grad"]


class StepMeter(Protocol):
    """What measures the steps of a clock."""

    budget: float | None
    every_step: int
    counting: Any
    uneventful: int

    def begin(self, records: bool) -> None:
        """A step begins, in which some monitor records or none."""

    def end(self) -> int:
        """A step has ended; returns the cadence from now on."""
        ...

    def drop(self) -> None:
        """The step under way is not like the others."""

    def switched(self, started: float) -> None:
        """Hooks were taken out or put back since then."""

    def forwards(self, count: int) -> None:
        """So many forwards have come since the last step."""


class Clock:
    """Step, micro-batch, phase and recomputation: where in a training the program is.

    A step begins after the optimizer step before it: forwards, backwards and what the optimizer does at the end of them belong to
    one step. The clock is advanced by hand or by an optimizer that it is attached to. Between calls, never within one, it switches
    monitors with `steps` or `every_step` on and off. A compiled graph reads nothing of it but `busy`: there is one graph for the
    steps in which any of them records, whichever these are, and one for the others.

    Attributes:
        attached: whether an optimizer advances it.
        busy: whether this step is one of any monitor with `steps` or `every_step`, or with a budget.
        cadence: of the steps that each monitor chooses, one in so many is recorded: 1, but where there is a budget.
        micro_batch: how many micro-batches of this step came before, 0 at its first. Counted by forwards with gradients on, once
            an optimizer is attached, or with a budget, and then only in steps that record. May be set by hand.

    >>> clock = Clock()
    >>> clock.advance()
    >>> clock
    Clock(step=1, micro_batch=0, phase='train')
    """

    def __init__(self) -> None:
        self._step = 0
        self.micro_batch = 0
        self.attached = False
        self._begun = False
        self._net: weakref.ref[nn.Module] | None = None
        self._gates: list[StepGroup] = []
        self._meter: StepMeter | None = None
        self._handle: Any = None
        self._counting = SwitchedHooks()
        self.busy, self.cadence = False, 1
        self._uneventful = self._skipped = 0  # coming steps in which nothing is switched, and those of them that have ended
        self._lock = threading.RLock()
        self._receiver = new_receiver(self)

    @property
    def step(self) -> int:
        """How many steps have ended; set it to resume a training.

        Raises:
            ValueError: set to what is no whole number, or below 0.
            MonitorError: `steps` of a monitor with `on_error="raise"` failed; the clock stands at the new step all the same.
        """
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise ValueError(f"Clock.step = {step!r}: a step is a whole number, 0 at the first")
        with self._lock:
            if self._meter is not None:
                self._meter.drop()
            self._catch_up()
            self._stand_at(step)

    def advance(self) -> None:
        """Ends a step, by hand. Several threads may do so at once.

        Raises:
            MonitorError: as at setting `step`.
        """
        with self._lock:
            meter = self._meter
            if self._uneventful and (meter is None or meter.uneventful):
                self._uneventful -= 1
                self._skipped += 1
                self._step += 1
                self.micro_batch, self._begun = 0, False
                if meter is not None:
                    meter.uneventful -= 1
                return
            if self._skipped:
                self._catch_up()
            if meter is not None:
                self.cadence = meter.end()
            try:
                self._stand_at(self._step + 1)
            finally:
                if meter is not None:
                    meter.begin(self.busy)
            self._uneventful = min([MANY, *[gate.undue_steps(self._step, self.cadence) for gate in self._gates]])

    def _catch_up(self) -> None:
        """Tells the gates of steps for which they were not asked; from now on they are asked at every step, until more is known."""
        for gate in self._gates:
            gate.skip(self._step - self._skipped, self._skipped)
        self._uneventful = self._skipped = 0

    def _stand_at(self, step: int) -> None:
        self._step, self.micro_batch, self._begun = step, 0, False
        failed: MonitorError | None = None
        busy = False
        for gate in self._gates:
            gate.ask(step, self.cadence)
            busy = busy or gate.due
            if gate.due != gate.told or gate.error is not None:
                started = None if self._meter is None else now()
                failed = gate.tell(step) or failed
                if self._meter is not None and started is not None:
                    self._meter.switched(started)
            elif not gate.due and step >= gate.hooks.again:
                gate.hooks.off(gate.monitors, step)
        if busy != self.busy:
            self._rest(busy)
        self.busy = busy
        if failed is not None:
            raise failed

    def _rest(self, busy: bool) -> None:
        """Its own hook costs as much as those of monitors; with a budget it is out in steps that record nothing."""
        self._gates = [gate for gate in self._gates if gate.monitors]
        if self._meter is None or self._meter.budget is None:
            return
        if busy:
            self._counting.on()
        else:
            self._counting.off([self], self._step)

    def switchable(self) -> tuple[list[Any], bool]:
        """The handle of its own hook, where micro-batches are counted."""
        return [] if self._handle is None else [self._handle], True

    @property
    def phase(self) -> Literal["train", "eval", "no_grad"]:
        """Of this moment: "eval" while the network watched is in evaluation mode, else "no_grad" while gradients are off."""
        net = None if self._net is None else self._net()
        if net is not None and not net.training:
            return "eval"
        return "train" if torch.is_grad_enabled() else "no_grad"

    @property
    def recompute(self) -> bool:
        """Whether this code runs inside a backward pass: forwards then are activation checkpointing at work."""
        return recomputing()

    def attach(self, optimizer: Optimizer) -> Clock:
        """Advances by one after every step of `optimizer`, once all monitors were told of it; returns the clock itself.

        Steps that a GradScaler skips do not count, but for a fused optimizer on an accelerator, which would have to be waited for
        to know. Where one optimizer wraps another, its step and what it calls are one step, whichever of the two is attached. The
        optimizer does not keep the clock, nor the clock the optimizer.

        Raises:
            TypeError: `optimizer` is none.
        """
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"a clock is attached to a torch.optim.Optimizer, or advanced by hand; got {type(optimizer).__name__}")
        count_steps(optimizer, self)
        self.attached = True
        return self

    def detach(self) -> Clock:
        """No optimizer advances it any more; returns the clock itself."""
        stop_counting(self)
        self.attached = False
        return self

    def measure(self, meter: StepMeter) -> None:
        """Tells `meter` of every step from now on, and takes the cadence from it."""
        with self._lock:
            self._catch_up()
            self._meter, self.cadence = meter, meter.every_step

    def watch(self, net: nn.Module) -> None:
        """Takes the phase from `net`, which is held weakly."""
        self._net = weakref.ref(net)

    def count(self, net: nn.Module) -> Any:
        """Takes the forwards of `net` for micro-batches; returns the handle that ends it, None where it takes no hooks."""
        try:
            self._handle = net.register_forward_pre_hook(Hook(self._forward, _trace_forward, self._receiver))
        except RuntimeError:  # of torch.jit.script
            self._handle = None
        self._counting.change()
        return self._handle

    def uncount(self) -> None:
        """Counts micro-batches no more."""
        self._counting.on()
        if self._handle is not None:
            self._handle.remove()
        self._handle = None
        self._counting.change()

    def gate(self, monitor: StepChooser) -> None:
        """Switches `monitor`, which is held weakly, on and off from now on."""
        steps, every_step = monitor.gate.steps, monitor.gate.every_step
        with self._lock:
            self._catch_up()
            gate = next((gate for gate in self._gates if gate.steps == steps and gate.every_step == every_step), None)
            if gate is None:
                gate = StepGroup(steps, every_step)
                gate.ask(self._step, self.cadence)
                gate.told = gate.due
                self._gates.append(gate)
            gate.monitors.add(monitor)
            gate.hooks.change()
            self.busy = self.busy or gate.due
        monitor.switch(gate.due, gate.error)

    def release(self, monitor: StepChooser) -> None:
        """Leaves `monitor` as it is from now on."""
        self.restore_hooks(monitor)
        with self._lock:
            self._catch_up()
            for gate in self._gates:
                gate.monitors.discard(monitor)

    def restore_hooks(self, monitor: Any) -> None:
        """Puts the hooks of `monitor` back for now: they are about to be removed, or others to come."""
        with self._lock:
            self._catch_up()
            put_back(grouped(monitor.all_handles()))
            for gate in self._gates:
                if monitor in gate.monitors:
                    gate.hooks.change()

    def _forward(self, *_: Any) -> None:
        if torch.is_grad_enabled() and not tracing():
            self.take("", [], "")

    def take(self, layout: str, packs: list[Tensor], stream: str) -> None:
        """A forward with gradients on has begun, in a compiled graph or outside of one."""
        if not recomputing():
            with self._lock:
                self.micro_batch += self._begun
                self._begun = True
            if self._meter is not None:
                self._meter.forwards(self.micro_batch + 1)

    def __repr__(self) -> str:
        return f"Clock(step={self.step}, micro_batch={self.micro_batch}, phase={self.phase!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _at, (self._step,)


def _trace_forward(receiver: Tensor, *_: Any) -> None:
    if torch.is_grad_enabled() and not tracing():
        torch.ops.torch_recorders.take(receiver, "", "", [])


def _at(step: int) -> Clock:
    clock = Clock()
    clock.step = step
    return clock
