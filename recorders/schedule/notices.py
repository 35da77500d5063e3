"""What is told once, at the end of an optimizer step: a clock that stands still while its net trains, a recorder that is gone."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from recorders.capture.hooks import Hook
from recorders.capture.switching import hook_of
from recorders.errors import RecordingWarning
from reducers.errors import warn_user

notices: list[StandingClock | Forgotten] = []
"""What may have to be told."""


def tell(optimizer: Optimizer) -> None:
    """Tells what is to be told of the nets that this optimizer trains; called at the end of its step."""
    for notice in notices[:]:
        notice.look(optimizer)


def watch_clock(clock: Any, net: nn.Module) -> None:
    """Looks, from now on, whether `clock` advances while `net` trains; tells of it once. Both are held weakly."""
    if not clock.told and not any(isinstance(one, StandingClock) and one.clock() is clock for one in notices):
        notices.append(StandingClock(clock, net))


def warn_of_several() -> None:
    """Warns that a second optimizer was attached to the clock of a recorder."""
    warn_user(
        "recorder.attach: a second optimizer advances the clock now, so a training step in which both step counts as two; attach "
        "one of them, or call recorder.clock.detach() first if this one takes the place of the other",
        RecordingWarning,
    )


def warn_of_step(clock: Any) -> None:
    """Warns, once, that `clock` is advanced by hand although an optimizer advances it."""
    if clock.attached and not clock.several:
        clock.several = True
        warn_user(
            "recorder.step: an optimizer is attached, which advances the clock already, so each training step counts as two; leave "
            "out recorder.step(), or recorder.attach(optimizer)",
            RecordingWarning,
        )


def forget(monitors: Mapping[str, Any]) -> None:
    """Called when the recorder of these monitors is freed: if hooks are on that nobody took off, prepares the warning.

    It warns when the network is used again, not now: at the end of a function the network may be freed with its recorder.
    Monitors that hand their rows to a stream are left out, because the stream has what they record.
    """
    left = [monitor for monitor in monitors.values() if monitor.registered and type(monitor.buffer) is monitor.buffer_class]
    if left:
        notices.append(Forgotten(left))


def _trains(optimizer: Optimizer, modules: Iterable[nn.Module]) -> bool:
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return any(id(parameter) in trained for module in modules for parameter in module.parameters())


class StandingClock:
    """A clock that stands still while its net trains and monitors wait for its steps: the second step of an optimizer tells."""

    def __init__(self, clock: Any, net: nn.Module) -> None:
        self.clock, self._net, self._step = weakref.ref(clock), weakref.ref(net), clock.step
        self._stepped: weakref.ref[Optimizer] | None = None
        self._others: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # optimizers that do not train it

    def look(self, optimizer: Optimizer) -> None:
        """Called at the end of each step of any optimizer."""
        clock, net = self.clock(), self._net()
        if clock is None or net is None or clock.step != self._step or not clock.expected:
            notices.remove(self)
        elif optimizer in self._others:
            return
        elif self._stepped is None and not _trains(optimizer, [net]):
            self._others.add(optimizer)
        elif self._stepped is None:
            self._stepped = weakref.ref(optimizer)
        elif self._stepped() is optimizer:
            notices.remove(self)
            clock.told = True
            warn_user(
                f"an optimizer has stepped twice, and the clock stands at step {clock.step} still. Monitors with steps, every_step "
                "or a budget need it to advance: call recorder.attach(optimizer), or recorder.step() after every step (without a "
                "recorder: monitor.clock.attach(optimizer), or monitor.clock.advance())",
                RecordingWarning,
            )


class Forgotten:
    """The monitors of a recorder that is gone, and their hooks, which warn at their next call and are then as before."""

    def __init__(self, monitors: list[Any]) -> None:
        self._others: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # optimizers that train none of their modules
        self._monitors = [weakref.ref(monitor) for monitor in monitors]
        hooks = [hook for monitor in monitors for handle in monitor.all_handles() if isinstance(hook := hook_of(handle), Hook)]
        self._hooks = [weakref.ref(hook) for hook in hooks]
        for hook in hooks:
            hook.run = partial(self._call, hook.usual)

    def _call(self, function: Any, *args: Any) -> None:
        function(*args)
        self._tell()

    def _on(self) -> list[Any]:
        """The monitors whose hooks are still on a module that exists."""
        return [m for ref in self._monitors if (m := ref()) is not None and m.registered and m.module is not None]

    def look(self, optimizer: Optimizer) -> None:
        """Called at the end of each step of any optimizer."""
        if optimizer in self._others:
            return
        if not (on := self._on()):  # the network was freed, or somebody took the hooks off
            notices.remove(self)
        elif _trains(optimizer, (monitor.module for monitor in on)):
            self._tell()
        else:
            self._others.add(optimizer)

    def _tell(self) -> None:
        """Warns, if hooks are still on and their modules exist; the first call ends it."""
        if self not in notices:
            return
        notices.remove(self)
        for hook in [ref() for ref in self._hooks]:
            if hook is not None and isinstance(hook.run, partial) and hook.run.func == self._call:
                hook.run = hook.usual
        if on := self._on():
            warn_user(
                f"a recorder no longer exists, and the hooks of its {len(on)} monitors are still on, first {on[0].describe()}: they"
                " cost time, and nobody may see what they record; keep the recorder, or end it by `with recorder:` or "
                "recorder.deregister(); recorders.attached(net) lists what is on a net, and detach_all(net) takes it off",
                RecordingWarning,
            )
