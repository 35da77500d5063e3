"""Clock: the position in a training. It switches monitors on and off between steps."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from recorders.capture.hooks import Hook
from recorders.capture.operands import recomputing, tracing
from recorders.capture.renewal import hooks_are_on
from recorders.capture.switching import SwitchedHooks, put_back, remove
from recorders.graphs.sinks import new_sink
from recorders.schedule.chosen_steps import StepGroup
from recorders.schedule.notices import watch_clock
from recorders.schedule.steps import count_steps, notice_steps, stop_counting
from reducers.kernels.locks import new_lock

if TYPE_CHECKING:
    from recorders.schedule.meter import Meter

MANY = 256  # the most steps without a decision of the groups: hooks may have been put back for the compiler meanwhile
Phase: TypeAlias = Literal["module", "grad"]


class QuietSteps:
    """Coming steps of which only the clock needs to know; `recorders.schedule.steps` counts them without asking the clock.

    Attributes:
        until: the step that follows them.
        left: how many of them have not ended.
        over: whether others take their place.
    """

    __slots__ = ("left", "over", "until")

    def __init__(self, step: int, left: int) -> None:
        self.until, self.left, self.over = step + left, left, False


class Clock:
    """The position in a training: step, micro-batch, phase and recomputation.

    A step is the forwards, the backwards and the optimizer step at their end. The clock is advanced by hand, or by an optimizer to
    which it is attached. It switches monitors with `steps` or `every_step` on and off between calls, never within one. A compiled
    graph reads only `any_due`: there is one graph for all steps in which any of these monitors records, and one for other steps.

    Attributes:
        attached: whether an optimizer advances the clock.
        moved: whether it was ever at another step than the first.
        several: whether more than the optimizer that was attached last is known to advance it: another one, or the user.
        any_due: whether any monitor with `steps` or `every_step`, or with a budget, records in this step.
        cadence: one in this many of the steps that a monitor chooses is recorded; 1 without a budget.

    >>> clock = Clock()
    >>> clock.advance()
    >>> clock
    Clock(step=1, micro_batch=0, phase='train')
    """

    def __init__(self) -> None:
        self._micro_batch, self._begun, self._forwards_of = 0, False, 0  # the step that the forwards were counted in
        self.attached = self.moved = self.several = False
        self.told = False  # whether somebody was warned that the clock stands still
        self._net: weakref.ref[nn.Module] | None = None
        self._groups: list[StepGroup] = []
        self._meter: Meter | None = None
        self._handle: Any = None
        self._counting = SwitchedHooks()
        self.any_due, self.cadence = False, 1
        self._lock = new_lock()
        self._asked, self.quiet = 0, QuietSteps(0, 0)  # the step at which groups and meter were asked last
        self._sink = new_sink(self)

    @property
    def step(self) -> int:
        """The number of steps that have ended; set it to resume a training.

        Raises:
            ValueError: it is set to a negative number, or to something that is not an integer.
            MonitorError: `steps` of a monitor with `on_error="raise"` failed; the step is set all the same.
        """
        quiet = self.quiet
        return quiet.until - quiet.left

    @step.setter
    def step(self, step: int) -> None:
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise ValueError(f"Clock.step = {step!r}: a step is a whole number, and the first is 0")
        with self._lock:
            if self._meter is not None:
                self._meter.drop()
            self._catch_up()
            self._set_step(step)

    @property
    def micro_batch(self) -> int:
        """The number of micro-batches of this step before the present one.

        The clock counts forwards with gradients on, if an optimizer is attached or there is a budget; with a budget only in steps
        that record. Set it at the beginning of a micro-batch, if the network is called otherwise: the next forward belongs to it.
        """
        return self._micro_batch if self._forwards_of == self.step else 0

    @micro_batch.setter
    def micro_batch(self, micro_batch: int) -> None:
        self._micro_batch, self._begun, self._forwards_of = micro_batch, False, self.step

    def advance(self) -> None:
        """Ends a step. Threads may call it at the same time.

        Raises:
            MonitorError: as if `step` is set.
        """
        with self._lock:
            if self.quiet.left:
                self.quiet.left -= 1
                return
            self._catch_up()
            meter, left = self._meter, MANY
            if meter is not None:
                self.cadence = meter.end()
            try:
                self._set_step(self._asked + 1)
            finally:
                if meter is not None:
                    left = meter.begin(self.any_due)
                    self._meter = meter if meter.measuring else None
            left = min([left, MANY, *[group.undue_steps(self._asked, self.cadence) for group in self._groups]])
            self.quiet = QuietSteps(self._asked, left)

    def _catch_up(self) -> None:
        """Counts the steps of which nobody was told. From now on everybody is asked at every step."""
        step, since = self.step, self._asked
        if step != since:
            for group in self._groups:
                group.skip(since, step - since)
            if self._meter is not None:
                self._meter.skip(step - since)
        self._move(step)

    def _move(self, step: int) -> None:
        before, self.quiet, self._asked = self.quiet, QuietSteps(step, 0), step
        before.over, self.moved = True, self.moved or step > 0

    def _set_step(self, step: int) -> None:
        """Sets the step, and switches the groups for which the decision has changed."""
        self._move(step)
        self.micro_batch = 0
        failed: Exception | None = None
        any_due = False
        for group in self._groups:
            group.decide(step, self.cadence)
            any_due = any_due or group.due
            if group.due != group.notified or group.error is not None:
                failed = group.notify(step) or failed
            elif not group.due and step >= group.hooks.again:
                group.hooks.off(group.monitors, step)
        if any_due != self.any_due:
            self._switch_counting(any_due)
        self.any_due = any_due
        if failed is not None:
            raise failed

    def _switch_counting(self, any_due: bool) -> None:
        """Drops empty groups. With a budget, takes out the clock's own hook, which costs as much as others, in idle steps."""
        self._groups = [group for group in self._groups if group.monitors]
        if self._meter is None or self._meter.budget is None:
            return
        if any_due:
            self._counting.on()
        else:
            self._counting.off([self], self._asked)

    def switchable(self) -> tuple[list[Any], bool]:
        """Returns the handle of the hook that counts micro-batches, if there is one, and True, because it stays the same."""
        return [] if self._handle is None else [self._handle], True

    @property
    def phase(self) -> Literal["train", "eval", "no_grad"]:
        """The phase now: "eval" if the watched network is in evaluation mode, otherwise "no_grad" if gradients are off."""
        net = None if self._net is None else self._net()
        if net is not None and not net.training:
            return "eval"
        return "train" if torch.is_grad_enabled() else "no_grad"

    @property
    def recompute(self) -> bool:
        """Whether this code runs inside a backward pass. A forward is then a recomputation of activation checkpointing."""
        return recomputing()

    def attach(self, optimizer: Optimizer) -> Clock:
        """Advances by one after every step of `optimizer`, when all monitors were notified of it; returns the clock itself.

        Steps that a GradScaler skips do not count. Skipped steps of a fused optimizer on an accelerator count, because asking would
        synchronise with the device. If one optimizer wraps another, its step and the steps within it are one step, whichever of the
        two is attached. The optimizer does not keep the clock alive, nor the clock the optimizer.

        Raises:
            TypeError: `optimizer` is not a `torch.optim.Optimizer`.
        """
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"a clock is attached to a torch.optim.Optimizer, or advanced by hand; got {type(optimizer).__name__}")
        self.several = count_steps(optimizer, self)
        self.attached = True
        return self

    def detach(self) -> Clock:
        """Ends the attachment to all optimizers; returns the clock itself."""
        stop_counting(self)
        self.attached = False
        return self

    def measure(self, meter: Meter) -> None:
        """Notifies `meter` of steps as long as it measures, and takes the cadence from it."""
        with self._lock:
            self._catch_up()
            self._meter, self.cadence = meter if meter.measuring else None, meter.every_step

    def watch(self, net: nn.Module) -> None:
        """Takes the phase from `net`, which is held weakly; see `expect`."""
        self._net = weakref.ref(net)
        self.expect(net)

    @property
    def expected(self) -> bool:
        """Whether monitors depend on the steps of this clock, and no optimizer advances it."""
        return not self.attached and any(group.monitors for group in self._groups)

    def expect(self, net: nn.Module | None) -> None:
        """Warns if `net` trains and the clock stands still, unless an optimizer advances it or no monitor depends on it."""
        if net is not None and self.expected:
            notice_steps()
            watch_clock(self, net)

    def count(self, net: nn.Module) -> Any:
        """Counts the forwards of `net` as micro-batches; returns the handle of the hook, or None if `net` takes no hooks."""
        try:
            self._handle = net.register_forward_pre_hook(Hook(self._forward, _trace_forward, self._sink))
            hooks_are_on(net)
        except RuntimeError:  # a module of torch.jit.script
            self._handle = None
        self._counting.change()
        return self._handle

    def uncount(self) -> None:
        """Stops counting micro-batches."""
        self._counting.on()
        if self._handle is not None:
            remove(self._handle)
        self._handle = None
        self._counting.change()

    def add(self, monitor: Any) -> None:
        """Switches `monitor`, which is held weakly, on and off from now on."""
        steps, every_step = monitor.gate.steps, monitor.gate.every_step
        with self._lock:
            self._catch_up()
            group = next((group for group in self._groups if group.steps == steps and group.every_step == every_step), None)
            if group is None:
                group = StepGroup(steps, every_step)
                group.decide(self._asked, self.cadence)
                group.notified = group.due
                self._groups.append(group)
            group.monitors.add(monitor)
            group.hooks.change()
            self.any_due = self.any_due or group.due
        monitor.switch(group.due, group.error)

    def release(self, monitor: Any) -> None:
        """Stops switching `monitor`; it stays on or off as it is now."""
        self.restore_hooks(monitor)
        with self._lock:
            self._catch_up()
            for group in self._groups:
                group.monitors.discard(monitor)
            self._groups = [group for group in self._groups if group.monitors]

    def restore_hooks(self, monitor: Any) -> None:
        """Puts the hooks of `monitor` back, before hooks are removed or added."""
        with self._lock:
            self._catch_up()
            put_back(monitor.all_handles())
            for group in self._groups:
                if monitor in group.monitors:
                    group.hooks.change()

    def _forward(self, *_: Any) -> None:
        if torch.is_grad_enabled() and not tracing():
            self.receive_call()

    def receive_call(self, *_: object) -> None:
        """Counts a forward with gradients on that has begun, in a compiled graph or outside of one."""
        if not recomputing():
            with self._lock:
                if self._forwards_of != self.step:
                    self.micro_batch = 0
                self._micro_batch += self._begun
                self._begun = True

    def __repr__(self) -> str:
        return f"Clock(step={self.step}, micro_batch={self.micro_batch}, phase={self.phase!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _clock_at, (self.step,)


def _trace_forward(sink: Tensor, *_: Any) -> None:
    if torch.is_grad_enabled() and not tracing():
        torch.ops.torch_recorders.receive_call(sink, "", "", [], [], "")


def _clock_at(step: int) -> Clock:
    clock = Clock()
    clock.step = step
    return clock
