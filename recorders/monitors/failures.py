"""What happens if a reducer or a callable of the user fails while a monitor records."""

from __future__ import annotations

import weakref
from typing import Any, Literal, TypeAlias

from torch import nn

from recorders.capture.given import current
from recorders.capture.operands import shapes
from recorders.errors import MonitorError, RecordingWarning
from reducers.errors import warn_user

__all__ = ["OnError", "describe", "fail"]

OnError: TypeAlias = Literal["raise", "warn", "disable"]


def describe(monitor: Any, module: Any) -> str:
    """The kind of monitor, its name, what it watches, and the class of `module`."""
    name = f" {monitor.name!r}" if monitor.name else ""
    attr = f" of {monitor.attr!r}" if monitor.attr is not None else ""
    return f"{type(monitor).__name__}{name}{attr} on {type(module).__name__ if isinstance(module, nn.Module) else 'no module'}"


def fail(monitor: Any, error: Exception, module: Any, operands: tuple[Any, ...]) -> None:
    """Counts and remembers the failure, and does what `on_error` says.

    Raises:
        MonitorError: `on_error` is "raise".
    """
    if monitor.on_error == "raise" and isinstance(error, MonitorError):
        raise error  # it was raised for a failure within this one
    first = monitor.last_error is None
    others = _others(monitor, error) if first and monitor.on_error != "raise" else 0
    monitor._skip("errors")
    seen = f"; operands: {' | '.join(map(shapes, operands))}" if operands else ""
    if found := {name: value for name, (value, _) in current().given.get(monitor.context, {}).items() if name in monitor.given}:
        seen += f"; given: {shapes(found)}"
    message = monitor.last_error = (
        f"{monitor.describe(module if isinstance(module, nn.Module) else None)}: {type(error).__name__}: {error}{seen}"
    )
    if monitor.on_error == "raise":
        raise MonitorError(message) from error
    if monitor.on_error == "disable":
        monitor.deregister()
        if first and others is not None:
            warn_user(f"{message}; the monitor has been taken off{_shown(others)}", RecordingWarning)
    elif first and others is not None:
        warn_user(f"{message}; this observation is left out, and later ones like it silently{_shown(others)}", RecordingWarning)


def _shown(others: int) -> str:
    if not others:
        return ""
    many = f"{others} more monitors" if others > 1 else "one more monitor"
    return f"; {many} of this recorder may meet the same, without a further warning: report() names all that did"


def _others(monitor: Any, error: Exception) -> int | None:
    """How many other monitors of the recorder are made like this one; None if one of them has warned of the same mistake.

    A monitor that was reset since then has warned of nothing.
    """
    mistake = _mistake(monitor)
    teller = monitor.context.told.get((type(error), mistake), lambda: None)()
    if teller is not None and teller is not monitor and teller.last_error is not None:
        return None
    monitor.context.told[type(error), mistake] = weakref.ref(monitor)
    return sum(other is not monitor and _mistake(other) == mistake for other in list((monitor.context.monitors() or {}).values()))


def _mistake(monitor: Any) -> tuple[Any, ...]:
    """What a mistake may be in: of monitors that were copied from one prototype it is the same."""
    functions = monitor.filter_, monitor.map_, monitor.op_, monitor.gate.condition
    return (
        type(monitor),
        *map(id, functions),
        repr(monitor.reducer),
        repr(monitor.attr) if all(f is None for f in functions) else "",
    )
