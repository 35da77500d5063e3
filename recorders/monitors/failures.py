"""What happens if a reducer or a callable of the user fails while a monitor records."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

from recorders.capture.operands import shapes
from recorders.errors import MonitorError, RecordingWarning

__all__ = ["OnError", "failure_message", "react_to_failure"]

OnError: TypeAlias = Literal["raise", "warn", "disable"]


def failure_message(monitor: str, error: Exception, operands: tuple[Any, ...]) -> str:
    """The monitor, the error, and the shapes of the operands."""
    seen = f"; operands: {' | '.join(map(shapes, operands))}" if operands else ""
    return f"{monitor}: {type(error).__name__}: {error}{seen}"


def react_to_failure(message: str, error: Exception, on_error: OnError, first: bool, disable: Callable[[], object]) -> None:
    """Raise, warn at the first failure, or warn and call `disable`.

    Raises:
        MonitorError: `on_error` is "raise".
    """
    if on_error == "raise":
        raise MonitorError(message) from error
    if on_error == "disable":
        disable()
        if first:
            warnings.warn(f"{message}; the monitor has been taken off", RecordingWarning, stacklevel=5)
    elif first:
        warnings.warn(f"{message}; this observation is left out, and later ones like it silently", RecordingWarning, stacklevel=5)
