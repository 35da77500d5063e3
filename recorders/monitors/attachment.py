"""Attachment: the hooks of a monitor, and the module that they are on."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from recorders._torch import warn_of_missing
from recorders.capture.hooks import Hook
from recorders.capture.renewal import hooks_are_on
from recorders.capture.switching import hook_of, remove

__all__ = ["Attachment"]


class Attachment:
    """The hooks of a monitor, and the module that they are on, which is referenced weakly.

    Hooks that are part of a compiled graph stay in the module when the monitor is taken off, and record nothing. The compiler
    writes no guard for absent hooks, so it might run a graph made without them once they are back.

    Attributes:
        handles: the handles of the hooks that are on.
        suspended: the handles of the hooks that had to stay in the module.
        module_class: the name of the module's class; it is known after the module is gone.
        spec: the `TraceSpec` that hooks find while a graph is traced; None if no hook needed one yet.
    """

    def __init__(self) -> None:
        self.handles: list[Any] = []
        self.suspended: list[Any] = []
        self.module_class = ""
        self.spec: Any = None
        self._module: weakref.ref[nn.Module] | None = None

    @property
    def module(self) -> nn.Module | None:
        """The module; None if there is none, or it no longer exists."""
        return None if self._module is None else self._module()

    def resume(self, module: nn.Module) -> bool:
        """Puts suspended hooks on again; returns whether hooks are on `module` now."""
        if module is not self.module or not (self.handles or self.suspended):
            return False
        self.handles, self.suspended = self.handles or self.suspended, []
        return True

    def move(self, module: nn.Module) -> None:
        """Removes suspended hooks; `module` is the module from now on."""
        suspended, self.suspended, self.spec = self.suspended, [], None
        for handle in suspended:
            remove(handle)
        self._module, self.module_class = weakref.ref(module), type(module).__name__

    def put_on(self, module: nn.Module, handles: list[Any]) -> None:
        """Takes over the handles of new hooks on `module`; graphs that were compiled without those hooks are dropped."""
        self.handles = handles
        warn_of_missing()
        if any(isinstance(hook := hook_of(handle), Hook) and hook.trace is not None for handle in handles):
            hooks_are_on(module)

    def take_off(self, *, suspend: bool) -> None:
        """Removes the hooks, or suspends them."""
        handles, self.handles = self.handles, []
        if suspend:
            self.suspended = handles or self.suspended
            return
        for handle in handles:
            remove(handle)
