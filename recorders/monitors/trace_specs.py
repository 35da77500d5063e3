"""TraceSpec: what compiled graphs know of monitors that are made alike."""

from __future__ import annotations

import weakref
from contextlib import suppress
from typing import Any

from recorders.capture.hooks import SPECS, Hook
from recorders.capture.switching import hook_of
from recorders.graphs.sinks import new_spec_key

__all__ = ["TraceSpec", "leave_clock", "name_of_hook", "renew_spec"]

_specs: weakref.WeakValueDictionary[Any, TraceSpec] = weakref.WeakValueDictionary()


class TraceSpec:
    """Is held by monitors that are made alike. When the last of them is freed, hooks no longer find it in `SPECS`.

    Attributes:
        monitor: a monitor without a module, of the same recipe, attribute and, if they choose steps, clock.
        key: the key by which hooks, and operators of graphs, find it.
    """

    def __init__(self, monitor: Any) -> None:
        self.monitor, self.key = monitor, new_spec_key(monitor)
        monitor.spec_key = self.key
        setattr(SPECS, self.key, monitor.trace)
        weakref.finalize(self, delattr, SPECS, self.key).atexit = False


def name_of_hook(monitor: Any, hook: str) -> str:
    """The text by which a hook of a monitor finds its spec while a graph is traced, and says which hook it is."""
    if monitor.hooks.spec is None:
        monitor.hooks.spec = _find_spec(monitor)
    return f"{monitor.hooks.spec.key} {hook}"


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


def _find_spec(monitor: Any) -> TraceSpec:
    """The spec of a monitor.

    The compiler guards everything that it reads. If it read the monitors themselves, each would cost a graph.
    """
    chooses_steps = monitor.gate.chooses_steps
    clock = monitor._clock if chooses_steps else None
    key = monitor.constructor, monitor.attr, chooses_steps, id(clock)
    spec = None
    with suppress(TypeError):  # an argument has no hash
        spec = _specs.get(key)
    if spec is None:
        made = monitor.constructor(monitor.attr)
        made.gate.chooses_steps, made._clock = chooses_steps, clock
        spec = TraceSpec(made)
        with suppress(TypeError):
            _specs[key] = spec
    return spec
