"""A recorder that no longer exists, and whose hooks are still on: the next call of a hook, or the next step, says so once."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch.optim import Optimizer

from recorders.capture.hooks import Hook
from recorders.capture.switching import hook_of
from recorders.errors import RecordingWarning
from reducers.errors import warn_user

__all__ = ["forget", "tell_forgotten", "warnings_due"]

warnings_due: list[Forgotten] = []
"""Recorders that are gone and of which nobody was told yet."""


def forget(monitors: Mapping[str, Any]) -> None:
    """Called when the recorder of these monitors is freed: if hooks are on that nobody took off, prepares the warning.

    It warns when the network is used again, not now: at the end of a function the network may be freed with its recorder.
    Monitors that hand their rows to a stream are left out, because the stream has what they record.
    """
    left = [monitor for monitor in monitors.values() if monitor.registered and type(monitor.buffer) is monitor.buffer_class]
    if left:
        warnings_due.append(Forgotten(left))


def tell_forgotten(optimizer: Optimizer) -> None:
    """Warns of the recorders that are gone, and watched what this optimizer trains; called at the end of its step."""
    for forgotten in warnings_due[:]:
        if optimizer in forgotten.others:
            continue
        monitors = forgotten.on()
        trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if not monitors:  # the network was freed, or somebody took the hooks off
            warnings_due.remove(forgotten)
        elif any(id(parameter) in trained for monitor in monitors for parameter in monitor.module.parameters()):
            forgotten.tell()
        else:
            forgotten.others.add(optimizer)


class Forgotten:
    """The monitors of a recorder that is gone, and their hooks, which warn at their next call and are then as before.

    Attributes:
        others: optimizers that train none of their modules, which need not be looked at again.
    """

    def __init__(self, monitors: list[Any]) -> None:
        self.others: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._monitors = [weakref.ref(monitor) for monitor in monitors]
        hooks = [hook for monitor in monitors for handle in monitor.all_handles() if isinstance(hook := hook_of(handle), Hook)]
        self._hooks = [weakref.ref(hook) for hook in hooks]
        for hook in hooks:
            hook.run = partial(self._call, hook.usual)

    def _call(self, function: Any, *args: Any) -> None:
        function(*args)
        self.tell()

    def on(self) -> list[Any]:
        """The monitors whose hooks are still on a module that exists."""
        return [m for ref in self._monitors if (m := ref()) is not None and m.registered and m.module is not None]

    def tell(self) -> None:
        """Warns, if hooks are still on and their modules exist; the first call ends it."""
        if self not in warnings_due:
            return
        warnings_due.remove(self)
        for hook in [ref() for ref in self._hooks]:
            if hook is not None and isinstance(hook.run, partial) and hook.run.func == self._call:
                hook.run = hook.usual
        on = self.on()
        if on:
            warn_user(
                f"a recorder no longer exists, and the hooks of its {len(on)} monitors are still on, first {on[0].describe()}: they"
                " cost time, and nobody may see what they record; keep the recorder, or end it by `with recorder:` or "
                "recorder.deregister(); recorders.attached(net) lists what is on a net, and detach_all(net) takes it off",
                RecordingWarning,
            )
