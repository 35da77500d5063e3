"""StandingClock: a warning if a net trains, and the clock that chooses the steps of its monitors stands still."""

from __future__ import annotations

import weakref
from contextlib import suppress
from functools import cache
from typing import Any, Protocol

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from recorders._torch import hooks_ref
from recorders._torch.compiler import never_trace
from recorders.capture.context import capturing
from recorders.capture.entering import guarded
from recorders.capture.hooks import Hook
from recorders.capture.operands import recomputing, tracing
from recorders.capture.switching import hook_of, remove
from recorders.errors import RecordingWarning
from reducers.errors import warn_user

__all__ = ["StandingClock"]


class Steps(Protocol):
    """A clock."""

    @property
    def step(self) -> int:
        """The number of steps that have ended."""
        ...

    @property
    def expected(self) -> bool:
        """Whether monitors depend on its steps, and no optimizer advances it."""
        ...


class StandingClock:
    """Warns once if a net trains on after an optimizer step, and the clock has not advanced.

    An optimizer step tells the training forwards of one step (micro-batches, several calls, closures) from those of the next one.
    The warning comes at the first training forward after it. Forwards in compiled graphs are not seen: then it comes at the next
    step of the same optimizer. When there is nothing left to find, in the second step at the latest, the hook of the net comes off.
    """

    def __init__(self, clock: Steps) -> None:
        self._clock = weakref.ref(clock)
        self._net: weakref.ref[nn.Module] | None = None
        self._handle: Any = None
        self._start: int | None = None  # the step of the clock when training began
        self._stepped: weakref.ref[Optimizer] | None = None  # the optimizer that stepped
        self._warned = False

    def on(self, net: nn.Module) -> None:
        """Looks at the training of `net` from now on."""
        if self._warned or self in _watching:
            return
        self._net = weakref.ref(net)
        if self._handle is None:
            with suppress(RuntimeError):  # a module of torch.jit.script takes no hooks
                self._handle = net.register_forward_pre_hook(Hook(self._before_forward, _trace_nothing, fail=_HERE))
        _watching.add(self)
        _listen()

    def off(self) -> None:
        """Takes the hook off, unless a graph contains it: graphs guard that it is there."""
        _watching.discard(self)
        if self._handle is not None and not getattr(hook_of(self._handle), "traced", False):
            remove(self._handle)
            self._handle = None
        self._start, self._stepped = None, None

    def _before_forward(self, net: nn.Module, *_: Any) -> None:
        if net.training and torch.is_grad_enabled() and not (tracing() or recomputing() or capturing()):
            clock = self._standing()
            if clock is not None and self._stepped is not None:
                self._warn(clock)

    def see_step(self, optimizer: Optimizer) -> None:
        """Takes that an optimizer has stepped."""
        clock, net = self._standing(), None if self._net is None else self._net()
        if clock is None or net is None:
            return
        weights = set(map(id, net.parameters()))
        if any(id(weight) in weights for group in optimizer.param_groups for weight in group["params"]):
            if self._stepped is None:
                self._stepped = weakref.ref(optimizer)
            elif self._stepped() is optimizer:
                self._warn(clock)

    def _standing(self) -> Steps | None:
        """The clock, if it stands where training began, and should advance; otherwise takes the hook off."""
        clock = self._clock()
        if clock is not None and self._start is None:
            self._start = clock.step
        if clock is None or self._warned or not clock.expected or clock.step != self._start:
            self.off()
            return None
        return clock

    def _warn(self, clock: Steps) -> None:
        self._warned = True
        self.off()
        warn_user(
            f"an optimizer has stepped, and the clock stands at step {clock.step} still. Monitors with steps, every_step or a "
            "budget need it to advance: call recorder.attach(optimizer), or recorder.step() after every step (without a recorder: "
            "monitor.clock.attach(optimizer), or monitor.clock.advance())",
            RecordingWarning,
        )


_HERE = "the look at whether the clock advances"
_watching: set[StandingClock] = set()  # these hold clocks and nets weakly


@cache
def _listen() -> None:
    """Puts one hook on all optimizers, for good: PyTorch walks through these hooks, so none may go while it does.

    It comes first, because PyTorch fails if a hook that goes, as those of `steps` may, is not the last.
    """
    handle: Any = register_optimizer_step_post_hook(_after_step)
    hooks_ref(handle)().move_to_end(handle.id, last=False)


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    if not is_compiling() and _watching:
        for standing in list(_watching):
            guarded(_HERE, standing.see_step, optimizer)


never_trace(_after_step)


def _trace_nothing(*_: Any) -> None:
    """What a graph does here. The compiler calls it, so the hook is known to be in the graph."""
