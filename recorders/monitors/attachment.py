"""Attachment: the hooks of a monitor, and the module that they are on. TraceSpec: what graphs know of monitors made alike."""

from __future__ import annotations

import weakref
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn

from recorders._torch import warn_of_missing
from recorders.capture.hooks import SPECS, Hook
from recorders.capture.renewal import hooks_are_on
from recorders.capture.switching import hook_of, remove
from recorders.graphs.caching import content_of
from recorders.graphs.sinks import new_spec_key

if TYPE_CHECKING:
    from recorders.monitors.constructor import MonitorConstructor

_FUNCTIONS = frozenset({"condition", "filter_", "map_", "op_"})
_specs: weakref.WeakValueDictionary[Any, TraceSpec] = weakref.WeakValueDictionary()


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
        self.spec: TraceSpec | None = None
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


class TraceSpec:
    """Is held by monitors that are made alike. When the last of them is freed, hooks no longer find it in `SPECS`.

    Attributes:
        monitor: a monitor without a module, of the same recipe, attribute and, if they choose steps, clock.
        key: the key by which hooks, and operators of graphs, find it.
    """

    def __init__(self, monitor: Any) -> None:
        self.monitor, self.key = monitor, new_spec_key(monitor, content_of(monitor))
        monitor.spec_key = self.key
        setattr(SPECS, self.key, monitor.trace)
        weakref.finalize(self, delattr, SPECS, self.key).atexit = False


def name_of_hook(monitor: Any, hook: str) -> str:
    """The text by which a hook of a monitor finds its spec while a graph is traced, and says which hook it is."""
    if monitor.hooks.spec is None:
        monitor.hooks.spec = _find_spec(monitor)
    return f"{monitor.hooks.spec.key} {hook}"


def _find_spec(monitor: Any) -> TraceSpec:
    """The compiler guards everything that it reads. If it read the monitors themselves, each would cost a graph."""
    chooses_steps = monitor.gate.chooses_steps
    clock = monitor._clock if chooses_steps else None
    recipe = _without_functions(monitor.constructor)
    key, spec = (recipe, monitor.attr, chooses_steps, id(clock)), None
    with suppress(TypeError):  # an argument has no hash
        spec = _specs.get(key)
    if spec is None:
        made = recipe(monitor.attr)
        made.gate.chooses_steps, made._clock = chooses_steps, clock
        spec = TraceSpec(made)
        with suppress(TypeError):
            _specs[key] = spec
    return spec


def _without_functions(recipe: MonitorConstructor[Any]) -> MonitorConstructor[Any]:
    """The recipe with one function in place of all that the user gave: a graph asks whether there are any, and calls none itself.

    Specs are found from everywhere, so with such a function they would keep the net that it refers to.
    """
    options = ((name, _not_called if name in _FUNCTIONS and value is not None else value) for name, value in recipe.options)
    return replace(recipe, options=tuple(options))


def _not_called(*operands: Any) -> Any:
    raise AssertionError("a spec records nothing")


def renew_spec(monitor: Any) -> None:
    """Gives the hooks of a monitor the spec for its present clock."""
    monitor.hooks.spec = None
    for hook in map(hook_of, [*monitor.hooks.handles, *monitor.hooks.suspended]):
        if isinstance(hook, Hook) and isinstance(hook.trace, str):
            hook.trace = name_of_hook(monitor, hook.trace.partition(" ")[2])


def leave_clock(monitor: Any) -> None:
    """Frees a monitor from the clock and the budget of its recorder; it gets a clock when it is put on, if it chooses steps."""
    clock, monitor._clock = monitor._clock, None
    if clock is not None:
        clock.release(monitor)
    monitor.gate.chooses_steps = monitor.gate.has_steps
    monitor.switch(True, None)
    renew_spec(monitor)
