"""Call: what a monitor sees at one of its sites. And values that belong to one call of a module, kept in the frame of that call.

A hook before the forward may keep a value for the hook after it. PyTorch does not call the second hook if the call is interrupted
(`KeyboardInterrupt`). The frame of the call is freed in any case, and the value with it. No other call, of this thread or of
another, has the same frame while the value exists.

The usual way is a stack of entries in a thread-local. The entry of an interrupted call would stay there until the next call in the
thread, and keep a clone of a tensor alive. With such a stack
`test_an_interrupted_forward_retains_nothing_and_the_next_call_is_recorded` fails: the clones must be freed
once the error has left the call, without another call. Entries of optimizer steps hold only ids and weak references, so
`schedule/steps.py` uses a stack.

PEP 667 specifies that `frame.f_locals` accepts new names; versions of Python before it accept them too.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from torch import Tensor, nn

from recorders._torch import call_of_module
from recorders._torch.compiler import keep_in_traced_call, restore_in_traced_call
from recorders.capture.hooks import Hook
from recorders.capture.operands import pack

_HOOK = Hook.__call__.__code__


@dataclass(slots=True, eq=False)
class Call:
    """What a monitor sees at one of its sites: the part of a call of a module that is known there.

    Attributes:
        site: the name of the site; see `Monitor.sites`.
        module: the module; None if it no longer exists, or if there is none.
        args: its positional arguments.
        kwargs: its keyword arguments.
        output: what it returned.
        before: a copy of what `Monitor.watched` returned before the forward.
        gradient: the gradient of the loss with respect to `tensor`.
        tensor: a leaf of the output or the inputs, as it was at the forward; None if nobody needs it.
        values: what was pushed, or read of the module.
        operands: what the kind made of all this; None before that.
    """

    site: str
    module: nn.Module | None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    output: Any = None
    before: Any = None
    gradient: Tensor | None = None
    tensor: Tensor | None = None
    values: tuple[Any, ...] = ()
    operands: tuple[Any, ...] | None = None

    @property
    def inputs(self) -> Any:
        """The tensor itself if the call had one input, a tuple if it had several, a dict if some were keywords; None if none."""
        return pack(self.args, self.kwargs)

    @property
    def seen(self) -> tuple[Any, ...]:
        """The operands of a kind that computes none itself."""
        if self.site == "forward":
            return self.output, self.inputs
        if self.site == "forward_pre":
            return (self.inputs,)
        if self.site == "around_forward":
            return self.output, self.inputs, self.before
        if self.gradient is not None:
            return (self.gradient,) if self.tensor is None else (self.gradient, self.tensor)
        return self.values

    @property
    def shown(self) -> tuple[Any, ...]:
        """What a message shows."""
        return self.seen if self.operands is None else self.operands


def keep_for_end(monitor: Any, value: Any) -> None:
    """Keeps a value of a monitor in the call of the module for which a `Hook`, which is among the callers, runs."""
    _frame_of_call().f_locals[f"kept for monitor {id(monitor)}"] = value


def take_kept(monitor: Any) -> Any:
    """Returns what was kept in this call, and keeps it no longer; None if nothing was."""
    values, name = _frame_of_call().f_locals, f"kept for monitor {id(monitor)}"
    found = values.get(name)
    if found is not None:
        values[name] = None
    return found


def _frame_of_call() -> FrameType:
    """The frame is the same before the forward, after it, and after an exception."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code is not _HOOK:  # a timed step adds frames
        frame = frame.f_back
    return call_of_module(frame.f_back or frame)


def keep_traced(context: Any) -> None:
    """For `comptime` in a function that a `Hook` calls while a graph is traced: keeps its variable `value` until the call ends.

    The function has a variable `sink`, too, whose tensor tells the values of several monitors apart.
    """
    keep_in_traced_call(context, "value", "sink", _HOOK)


def restore_traced(context: Any) -> None:
    """For `comptime` in a later hook on the same call: sets the variable `value` to what was kept, if anything was."""
    restore_in_traced_call(context, "value", "sink", _HOOK)
