"""Twins: what compiled graphs know of monitors that are made alike."""

from __future__ import annotations

from contextlib import suppress
from typing import Any
from weakref import WeakValueDictionary

from recorders.capture.compiled import new_twin_key
from recorders.capture.hooks import Hook
from recorders.capture.switching import hook_of

__all__ = ["find_twin", "renew_twins"]

_twins: WeakValueDictionary[Any, Any] = WeakValueDictionary()


def find_twin(monitor: Any) -> Any:
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
        twin = monitor.constructor(monitor.attr)
        twin.gate.chooses_steps, twin._clock, twin.twin_key = chooses_steps, clock, new_twin_key(twin)
        with suppress(TypeError):
            _twins[key] = twin
    monitor._twin = twin  # which lives as long as a monitor has it
    return twin


def renew_twins(monitor: Any) -> None:
    """Gives the hooks of a monitor the twin for its present clock."""
    for hook in map(hook_of, [*monitor.hooks.handles, *monitor.hooks.suspended]):
        if isinstance(hook, Hook) and hook.trace is not None:
            hook.trace = getattr(find_twin(monitor), hook.trace.__name__)
