"""Twins: what compiled graphs know of monitors that are made alike."""

from __future__ import annotations

import weakref
from contextlib import suppress
from typing import Any

from recorders.capture.hooks import TRACED, Hook
from recorders.capture.receivers import new_twin_key
from recorders.capture.switching import hook_of

__all__ = ["Twin", "leave_clock", "name_of_trace", "renew_twins"]

_twins: weakref.WeakValueDictionary[Any, Twin] = weakref.WeakValueDictionary()


class Twin:
    """What monitors that share a twin hold. When the last of them is freed, hooks no longer find its methods.

    Attributes:
        monitor: the twin itself.
    """

    def __init__(self, monitor: Any) -> None:
        self.monitor = monitor
        self._names: set[str] = set()
        weakref.finalize(self, _forget, self._names).atexit = False

    def name_of(self, method: str) -> str:
        """The name by which hooks find this method in `TRACED`."""
        name = f"{self.monitor.twin_key} {method}"
        setattr(TRACED, name, getattr(self.monitor, method))
        self._names.add(name)
        return name


def name_of_trace(monitor: Any, method: str) -> str:
    """The name by which a hook of a monitor finds this method of its twin."""
    if monitor.hooks.twin is None:
        monitor.hooks.twin = _find_twin(monitor)
    name: str = monitor.hooks.twin.name_of(method)
    return name


def renew_twins(monitor: Any) -> None:
    """Gives the hooks of a monitor the twin for its present clock."""
    monitor.hooks.twin = None
    for hook in map(hook_of, [*monitor.hooks.handles, *monitor.hooks.suspended]):
        if isinstance(hook, Hook) and isinstance(hook.trace, str):
            hook.trace = name_of_trace(monitor, hook.trace.partition(" ")[2])


def leave_clock(monitor: Any) -> None:
    """Frees a monitor from the clock and the budget of its recorder; it gets a clock when it is put on, if it chooses steps."""
    clock, monitor._clock = monitor._clock, None
    if clock is not None:
        clock.release(monitor)
    monitor.gate.chooses_steps = monitor.gate.has_steps
    monitor.switch(True, None)
    renew_twins(monitor)


def _find_twin(monitor: Any) -> Twin:
    """The twin of a monitor: one without a module, the same for all with this recipe and attribute, and clock if they choose steps.

    The compiler guards everything that it reads. If it read the monitors themselves, each would cost a graph.
    """
    chooses_steps = monitor.gate.chooses_steps
    clock = monitor._clock if chooses_steps else None
    key = monitor.constructor, monitor.attr, chooses_steps, id(clock)
    twin = None
    with suppress(TypeError):  # an argument has no hash
        twin = _twins.get(key)
    if twin is None:
        twin = Twin(monitor.constructor(monitor.attr))
        made = twin.monitor
        made.gate.chooses_steps, made._clock, made.twin_key = chooses_steps, clock, new_twin_key(made)
        with suppress(TypeError):
            _twins[key] = twin
    return twin


def _forget(names: set[str]) -> None:
    for name in names:
        delattr(TRACED, name)
