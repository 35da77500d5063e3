"""The clock: where in a training the program is, and in which steps a monitor records."""

from __future__ import annotations

import operator
import sys
import threading
import weakref
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from recorders.compiled import enrol
from recorders.constructor import Hook
from recorders.errors import MonitorError
from recorders.operands import recomputing, tracing
from recorders.steps import count_steps
from recorders.stopwatch import now
from recorders.switching import Switched, grouped, put_back

if TYPE_CHECKING:
    from recorders.meter import Meter

__all__ = ["Chosen", "Clock", "Phase", "Steps", "as_steps", "shown_steps"]

Phase: TypeAlias = Literal["module", "grad"]
Steps: TypeAlias = "range | slice | Collection[int] | Callable[[int], bool]"
Chosen: TypeAlias = "range | tuple[int, ...] | Callable[[int], bool] | None"


class _Gated(Protocol):
    """What records in some steps only."""

    steps: Chosen
    every_step: int

    def switch(self, active: bool, error: Exception | None) -> None:
        """Whether to record from now on; `error` is what asking for that raised."""

    def switchable(self) -> tuple[list[Any], bool]:
        """The handles of its hooks that may be taken out now, and whether these will stay the same."""


class _Gate:
    """The monitors that record in the same steps, held weakly. In other steps their hooks are out, where that can be."""

    def __init__(self, steps: Chosen, every_step: int) -> None:
        self.steps, self.every_step = steps, every_step
        self.monitors: WeakSet[Any] = WeakSet()
        self.due = self.told = True
        self.hooks = Switched()
        self._ago = 0  # steps chosen since the last one in which they recorded, itself included; 0 before the first
        self.error: Exception | None = None

    def ask(self, step: int, cadence: int) -> None:
        """Finds out whether `step` is one of theirs, one in so many of them."""
        self.due, self.error = False, None
        try:
            chosen = self.steps is None or (self.steps(step) if callable(self.steps) else step in self.steps)
            if chosen and step % self.every_step == 0:
                self.due = self._ago == 0 or self._ago >= cadence
                self._ago = 1 if self.due else self._ago + 1
        except Exception as error:
            self.error = error

    def tell(self, step: int) -> MonitorError | None:
        """Switches the monitors, where there is news for them, and their hooks; returns what the first of them raised."""
        failed: MonitorError | None = None
        if self.due != self.told or self.error is not None:
            if self.due:
                self.hooks.on()
            for monitor in list(self.monitors):
                try:
                    monitor.switch(self.due, self.error)
                except MonitorError as error:
                    failed = failed or error
            self.told = self.due
        if not self.due:
            self.hooks.off(self.monitors, step)
        return failed


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
            an optimizer is attached, or with a budget. Where the net's own call is in a compiled graph it is counted as the graph
            runs: a `condition`, which is asked before, finds the micro-batch before. May be set by hand.

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
        self._gates: list[_Gate] = []
        self._meter: Meter | None = None
        self.busy, self.cadence = False, 1
        self._lock = threading.RLock()
        self._graph_name = enrol(self)

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
            self._stand_at(step)

    def advance(self) -> None:
        """Ends a step, by hand. Several threads may do so at once.

        Raises:
            MonitorError: as at setting `step`.
        """
        with self._lock:
            if self._meter is not None:
                self.cadence = self._meter.end()
            try:
                self._stand_at(self._step + 1)
            finally:
                if self._meter is not None:
                    self._meter.begin(self.busy)

    def _stand_at(self, step: int) -> None:
        self._step, self.micro_batch, self._begun = step, 0, False
        self._gates = [gate for gate in self._gates if gate.monitors]
        failed: MonitorError | None = None
        for gate in self._gates:
            gate.ask(step, self.cadence)
            started = now() if self._meter is not None and gate.due != gate.told else None
            failed = gate.tell(step) or failed
            if started is not None and self._meter is not None:
                self._meter.switched(started)
        self.busy = any(gate.due for gate in self._gates)
        if failed is not None:
            raise failed

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

    def measure(self, meter: Meter) -> None:
        """Tells `meter` of every step from now on, and takes the cadence from it."""
        self._meter, self.cadence = meter, meter.every_step

    def watch(self, net: nn.Module) -> None:
        """Takes the phase from `net`, which is held weakly."""
        self._net = weakref.ref(net)

    def count(self, net: nn.Module) -> Any:
        """Takes the forwards of `net` for micro-batches; returns the handle that ends it, None where it takes no hooks."""
        try:
            return net.register_forward_pre_hook(Hook(self._forward))
        except RuntimeError:  # of torch.jit.script
            return None

    def gate(self, monitor: _Gated) -> None:
        """Switches `monitor`, which is held weakly, on and off from now on."""
        steps, every_step = monitor.steps, monitor.every_step
        with self._lock:
            gate = next((gate for gate in self._gates if gate.steps == steps and gate.every_step == every_step), None)
            if gate is None:
                gate = _Gate(steps, every_step)
                gate.ask(self._step, self.cadence)
                gate.told = gate.due
                self._gates.append(gate)
            gate.monitors.add(monitor)
            gate.hooks.change()
            self.busy = self.busy or gate.due
        monitor.switch(gate.due, gate.error)

    def release(self, monitor: _Gated) -> None:
        """Leaves `monitor` as it is from now on."""
        self.settle(monitor)
        with self._lock:
            for gate in self._gates:
                gate.monitors.discard(monitor)

    def settle(self, monitor: Any) -> None:
        """Puts the hooks of `monitor` back for now: they are about to be removed, or others to come."""
        with self._lock:
            put_back(grouped(monitor.all_handles()))
            for gate in self._gates:
                if monitor in gate.monitors:
                    gate.hooks.change()

    def _forward(self, *_: Any) -> None:
        if torch.compiler.is_compiling():
            if torch.is_grad_enabled() and not tracing():
                torch.ops.torch_recorders.take(self._graph_name, "", "", [])
        elif torch.is_grad_enabled() and not tracing():
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


def as_steps(steps: Steps | None) -> Chosen:
    """`steps` in a form that compares, pickles and has a hash: a slice becomes a range, a collection a sorted tuple.

    Raises:
        ValueError: it can hold no step.
        TypeError: it is of another kind.

    >>> as_steps({3, 1}), as_steps(slice(10, 20))
    ((1, 3), range(10, 20))
    """
    found: Chosen
    if steps is None or isinstance(steps, range) or callable(steps):
        found = steps
    elif isinstance(steps, slice):
        found = range(steps.start or 0, sys.maxsize if steps.stop is None else steps.stop, 1 if steps.step is None else steps.step)
    elif isinstance(steps, Collection) and all(hasattr(step, "__index__") and not isinstance(step, bool) for step in steps):
        found = tuple(sorted(set(map(operator.index, steps))))
    else:
        raise TypeError(f"steps={steps!r}: give range(100, 200), slice(100, None), the steps themselves, or a function of the step")
    if isinstance(found, (range, tuple)) and (not found or min(found[0], found[-1]) < 0):
        raise ValueError(f"steps={steps!r}: steps are counted from 0 on, and there must be one")
    return found


def shown_steps(steps: Chosen, every_step: int, cadence: int = 1) -> str:
    """In words, "" for all steps; `cadence` is that of a budget.

    >>> shown_steps(range(100, 200), 10)
    'steps 100 to 199, every 10 steps'
    """
    parts = []
    if isinstance(steps, range):
        begin = f"from {steps[0]} on" if steps.stop == sys.maxsize else f"{steps[0]} to {steps[-1]}"
        parts = [f"steps {begin}"] + ([f"{steps.step} apart"] if steps.step != 1 else [])
    elif isinstance(steps, tuple):
        parts = [f"steps {', '.join(map(str, steps[:8]))}{' and more' if len(steps) > 8 else ''}"]
    elif steps is not None:
        parts = [f"steps chosen by {getattr(steps, '__name__', type(steps).__name__)}"]
    parts += [f"every {every_step} steps"] if every_step != 1 else []
    return ", ".join(parts + ([f"one in {cadence} of these for the budget"] if cadence != 1 else []))


def _at(step: int) -> Clock:
    clock = Clock()
    clock.step = step
    return clock
