"""What surrounds the work of a monitor: none of the user's modes, full precision, no gradients.

A dispatch or function mode that sees what a monitor computes counts it (a FLOP counter, a profiler), keeps it (selective
checkpointing, which then finds other operations in the recomputation than it kept), or changes it. So all that runs for a monitor
runs outside of them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar, copy_context
from typing import Any

from recorders._torch import NoAutocast, NoInference, outside_modes, set_grad_enabled

__all__ = ["as_monitor", "capturing"]

_capturing: ContextVar[bool] = ContextVar("capturing", default=False)


def capturing() -> bool:
    """Whether this thread is at work for a monitor: what its callables and reducers call is none of the user's program."""
    return _capturing.get()


def as_monitor(function: Callable[..., Any], *args: Any) -> Any:
    """Call `function(*args)` as the work of a monitor: outside modes, in full precision, without gradients; return what it returns.

    The mark of `capturing` is set in a context of its own, so that it cannot be left behind by an interruption.
    """
    return outside_modes(copy_context().run, _marked, function, args)


def _marked(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    _capturing.set(True)
    with NoInference(False), NoAutocast():
        set_grad_enabled(False)  # until NoInference ends, which turns gradients on again
        return function(*args)
