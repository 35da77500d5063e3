"""The context in which a monitor works: outside the user's modes, in full precision, without gradients.

Otherwise a dispatch or function mode of the user would count the operations of a monitor (a FLOP counter, a profiler), change them,
or keep their outputs: selective checkpointing would then find other operations in the recomputation than it kept.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar, copy_context
from typing import Any

from recorders._torch import NoAutocast, NoInference, autocast_is_on, outside_modes, set_grad_enabled

_capturing: ContextVar[bool] = ContextVar("capturing", default=False)


capturing: Callable[[], bool] = _capturing.get  # written in C, because each observation asks
"""Whether this thread works for a monitor. What callables and reducers call then is not part of the user's program."""


def as_monitor(function: Callable[..., Any], *args: Any) -> Any:
    """Calls `function(*args)` as the work of a monitor: outside modes, in full precision, without gradients. Returns its result.

    The flag of `capturing` is set in a separate context, so it does not stay set if the call is interrupted.
    """
    return outside_modes(copy_context().run, _run, function, args)


def _run(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    _capturing.set(True)
    with NoInference(False):
        set_grad_enabled(False)  # the end of NoInference turns gradients on again
        if not autocast_is_on():  # most of the time; to switch it off would take longer than all else here
            return function(*args)
        with NoAutocast():
            return function(*args)


def unrecorded(function: Callable[..., Any], *args: Any) -> Any:
    """Calls `function(*args)` outside the user's modes; monitors record nothing of it. Gradients and autocast stay as they are."""
    return outside_modes(copy_context().run, _run_unrecorded, function, args)


def _run_unrecorded(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    _capturing.set(True)
    return function(*args)
