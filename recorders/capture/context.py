"""What surrounds the work of a monitor: none of the user's modes, full precision, no gradients.

A dispatch or function mode that sees what a monitor computes counts it (a FLOP counter, a profiler), keeps it (selective
checkpointing, which then finds other operations in the recomputation than it kept), or changes it. So all that runs for a monitor
runs outside of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextvars import ContextVar, copy_context
from functools import partial
from itertools import chain, repeat, starmap
from typing import Any

import torch
from torch.utils._device import DeviceContext

__all__ = ["NoAutocast", "NoInference", "as_monitor", "capturing", "outside_modes"]

# Contexts written in C: those written in Python can be interrupted while they end, and then leave a mode as it was inside.
NoInference = torch._C._InferenceMode
NoAutocast = torch._C._DisableAutocast

_capturing: ContextVar[bool] = ContextVar("capturing", default=False)

_count_dispatch = torch._C._len_torch_dispatch_stack
_count_function = torch._C._len_torch_function_stack
_pop_dispatch = torch._C._pop_torch_dispatch_stack
_pop_function = torch._C._pop_torch_function_stack
_push_dispatch = torch._C._push_on_torch_dispatch_stack
_push_function = torch._C._push_on_torch_function_stack

# Modes of PyTorch itself, below the user's on the stack: while a program is traced, tensors have no meaning without them.
_INTERNAL = tuple(torch._C._TorchDispatchModeKey.__members__.values())


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
        torch._C._set_grad_enabled(False)  # until NoInference ends, which turns gradients on again
        return function(*args)


def outside_modes(call: Callable[..., Any], *args: Any) -> Any:
    """Call `call(*args)` with the user's modes off, and return what it returns; they are on again then, however it ends.

    Modes of `torch.compile` and other tracing stay. So does the default device, unless other function modes are on too.

    >>> import torch
    >>> from torch.overrides import TorchFunctionMode
    >>> class Names(TorchFunctionMode):
    ...     def __torch_function__(self, function, types, args=(), kwargs=None):
    ...         print(function.__name__)
    ...         return function(*args, **(kwargs or {}))
    >>> with Names():
    ...     _ = torch.add(torch.ones(1), 1)
    ...     _ = outside_modes(torch.add, torch.ones(1), 1)
    ones
    add
    ones
    """
    if not _count_dispatch() and not _count_function():
        return call(*args)
    # Both lists are filled, and emptied again, by single calls into C: an asynchronous exception comes before or after them.
    dispatch: list[Any] = [None]
    function: list[Any] = [None]
    put_back: partial[Any] = partial(
        deque, chain(map(_push_dispatch, iter(dispatch.pop, None)), map(_push_function, iter(function.pop, None))), 0
    )
    try:
        dispatch.extend(map(_pop_dispatch, repeat(None, _user_dispatch_modes())))
        function.extend(starmap(_pop_function, repeat((), _user_function_modes())))
        return call(*args)
    finally:
        put_back()


def _user_dispatch_modes() -> int:
    """How many dispatch modes on the stack are the user's."""
    count = _count_dispatch()
    return count and count - sum(torch._C._get_dispatch_mode(key) is not None for key in _INTERNAL)


def _user_function_modes() -> int:
    """How many function modes to take off: none if they only set the default device."""
    modes = map(torch._C._get_function_stack_at, range(_count_function()))
    return 0 if all(isinstance(mode, DeviceContext) for mode in modes) else _count_function()
