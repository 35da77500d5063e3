"""Twins: what compiled graphs know of monitors that are made alike."""

from __future__ import annotations

from contextlib import suppress
from typing import Any
from weakref import WeakValueDictionary

from recorders.capture.compiled import new_twin_key
from recorders.monitors.constructor import MonitorConstructor
from recorders.schedule.clock import Clock

__all__ = ["twin_of"]

_twins: WeakValueDictionary[Any, Any] = WeakValueDictionary()


def twin_of(recipe: MonitorConstructor[Any], attr: Any, chooses_steps: bool, clock: Clock | None) -> Any:
    """One monitor without a module, the same for all monitors with this recipe, attribute and clock.

    The compiler guards everything that it reads. Monitors that it read themselves would cost one graph each.
    """
    key = recipe, attr, chooses_steps, id(clock)
    with suppress(TypeError):  # an argument has no hash
        found = _twins.get(key)
        if found is not None:
            return found
    twin = recipe(attr)
    twin.chooses_steps, twin._clock, twin.twin_key = chooses_steps, clock, new_twin_key(twin)
    with suppress(TypeError):
        _twins[key] = twin
    return twin
