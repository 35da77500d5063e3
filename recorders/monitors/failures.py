"""What happens if a reducer or a callable of the user fails while a monitor records."""

from __future__ import annotations

from typing import Any, Literal, Protocol, TypeAlias

from torch import nn

from recorders.capture.given import Taking, current
from recorders.capture.operands import shapes
from recorders.errors import MonitorError, RecordingWarning
from reducers.errors import warn_user

__all__ = ["OnError", "describe", "fail"]

OnError: TypeAlias = Literal["raise", "warn", "disable"]


class Failing(Taking, Protocol):
    """A monitor whose callable or reducer may fail."""

    name: str
    attr: Any
    on_error: OnError
    last_error: str | None

    def describe(self, module: nn.Module | None = None) -> str: ...

    def deregister(self) -> Any: ...

    def _skip(self, reason: str) -> None: ...


def describe(monitor: Failing, module: Any) -> str:
    """The kind of monitor, its name, what it watches, and the class of `module`."""
    name = f" {monitor.name!r}" if monitor.name else ""
    attr = f" of {monitor.attr!r}" if monitor.attr is not None else ""
    return f"{type(monitor).__name__}{name}{attr} on {type(module).__name__ if isinstance(module, nn.Module) else 'no module'}"


def fail(monitor: Failing, error: Exception, module: Any, operands: tuple[Any, ...]) -> None:
    """Counts and remembers the failure, and does what `on_error` says.

    Raises:
        MonitorError: `on_error` is "raise".
    """
    if monitor.on_error == "raise" and isinstance(error, MonitorError):
        raise error  # it was raised for a failure within this one
    first = monitor.last_error is None
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
        if first:
            warn_user(f"{message}; the monitor has been taken off", RecordingWarning)
    elif first:
        warn_user(f"{message}; this observation is left out, and later ones like it silently", RecordingWarning)
