"""The guard at every entrance from PyTorch: what fails in this package does not reach the user's program, and is told.

Whatever PyTorch calls of this package goes through `guarded`, `failure_of` or a `Hook`: hooks of modules, tensors, parameters and
optimizers, callbacks of the compiler, operators in graphs. `tests/recorders/capture/test_entrances.py` lists them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from recorders._torch import outside_modes
from recorders.errors import MonitorError, RecordingWarning, in_a_line
from reducers.errors import warn_user

PASSED_ON = (MonitorError, Warning)
"""What the user asks for: by `on_error="raise"`, or by making errors of warnings."""

Fail: TypeAlias = "Callable[..., object] | str"
"""What is called with an exception; or the name of the entrance, if no monitor is at fault."""

_told: set[tuple[str, str]] = set()

timing: Callable[..., Any] | None = None
"""What times the work of monitors in a measured step; None in all other steps, in which no clock is read.

`recorders.schedule.stopwatch` sets it. It is called with whose work it is, what to call, and the arguments: with the method of a
monitor, a monitor or its sink, the numbers of several sinks, or the name of an entrance that no monitor owns.
"""

joining: Callable[..., Any] | None = None
"""What times the reduction of pending observations while steps are measured, whichever step it is in; otherwise None."""


def timed(owner: object, run: Callable[..., Any], *args: Any) -> Any:
    """Calls `run(*args)`, and returns its result; the seconds are those of `owner`, if the step is timed."""
    watch = timing
    return run(*args) if watch is None else watch(owner, run, *args)


def guarded(fail: Fail, run: Callable[..., Any], *args: Any) -> Any:
    """Calls `run(*args)` outside the user's modes; returns its result, or None if it raised something that is not `PASSED_ON`.

    >>> failures = []
    >>> guarded(failures.append, int, "x")
    >>> failures
    [ValueError("invalid literal for int() with base 10: 'x'")]
    """
    try:
        watch = timing  # read once, because another thread may end the measured step
        return outside_modes(run, *args) if watch is None else outside_modes(watch, fail, run, *args)
    except PASSED_ON:
        raise
    except Exception as error:
        report_failure(fail, error)


def failure_of(fail: Fail, run: Callable[..., object], *args: Any) -> Exception | None:
    """Calls `run(*args)`; returns what it raised if that is `PASSED_ON`: the caller raises it when all others were called."""
    try:
        watch = timing
        run(*args) if watch is None else watch(fail, run, *args)
    except PASSED_ON as error:
        return error
    except Exception as error:
        try:
            report_failure(fail, error)
        except PASSED_ON as passed_on:
            return passed_on
    return None


def report_failure(fail: Fail, error: Exception, *about: Any) -> None:
    """Reports `error` by `fail(error, *about)`; if there is no function, or it raises, by one warning for each kind of error."""
    where = fail if isinstance(fail, str) else "a hook"
    if callable(fail):
        try:
            fail(error, *about)
            return
        except PASSED_ON:
            raise
        except Exception as further:
            error = further
    if (where, type(error).__name__) not in _told:
        _told.add((where, type(error).__name__))
        warn_user(
            f"{where} of a recorder failed: {type(error).__name__}: {in_a_line(error)}; the training goes on, and what this moment "
            "would have recorded is left out, now and in later moments like it silently",
            RecordingWarning,
        )
