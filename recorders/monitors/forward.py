"""Monitors of what modules return and are given, and of values pushed by hand."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from recorders._torch import outside_modes
from recorders.capture.entering import timed
from recorders.capture.operands import as_operands, pack
from recorders.capture.receivers import new_twin_key
from recorders.monitors.base import Monitor
from recorders.monitors.graphs import trace, wanted_in_graph
from recorders.monitors.options import MonitorOptions
from recorders.monitors.record import add_alone, add_at_once, is_ignored, reduce_at_once
from reducers import Reducer

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["CallMonitor", "ForwardInputMonitor", "ForwardMonitor"]

_NONE: Mapping[str, Any] = MappingProxyType({})


class ForwardMonitor(Monitor):
    """Records what a module returns. Operands: output, inputs.

    The inputs are the tensor itself if the call had one, a tuple if it had several, a dict if some were keywords, and None if it
    had none. Forwards that activation checkpointing runs again during backward are not recorded twice.

    >>> import torch
    >>> from reducers import Mean
    >>> layer = torch.nn.ReLU()
    >>> monitor = ForwardMonitor(Mean(), layer)
    >>> _ = layer(torch.tensor([-1.0, 3.0]))
    >>> monitor.peek()
    tensor(1.5000, dtype=torch.float64)
    """

    side = "outputs"

    def _attach(self, module: nn.Module) -> list[Any]:
        hook = self._hook(self._after_quickly if self._quick else self._after, "_trace_after")
        # A graph guards that a hook gets keyword arguments, in each call; if nobody needs the inputs, these may lack them.
        needs_inputs = not self.bare or type(self)._default is not Monitor._default
        return [module.register_forward_hook(hook, prepend=self.prepend, with_kwargs=needs_inputs)]

    def _after(self, module: nn.Module, args: tuple[Any, ...], *rest: Any) -> None:
        kwargs, output = split(rest)
        if not is_ignored(self) and self._due(module, self._training(module)) and not add_alone(self, output):
            self._record(module, output, pack(args, kwargs))

    def _after_quickly(self, module: nn.Module, args: tuple[Any, ...], *rest: Any) -> None:
        if not add_at_once(self, rest[-1]):
            kwargs, output = split(rest)
            if not reduce_at_once(self, module, output, pack(args, kwargs)):
                self._after(module, args, *rest)

    def _trace_after(self, receiver: Tensor, module: nn.Module, args: tuple[Any, ...], *rest: Any) -> None:
        if wanted_in_graph(self, module):
            kwargs, output = split(rest)
            trace(
                self,
                receiver,
                (
                    output,
                    pack(args, kwargs),
                ),
            )


def split(rest: tuple[Any, ...]) -> tuple[dict[str, Any], Any]:
    """Returns the keyword arguments and the output that a forward hook got. Code that moves hooks drops the keyword arguments."""
    return (rest[0], rest[1]) if len(rest) == 2 else ({}, rest[-1])


class ForwardInputMonitor(Monitor):
    """Records the inputs of a module, keyword arguments included, before the module can change them in place. Operands: inputs.

    >>> import torch
    >>> from reducers import Max
    >>> layer = torch.nn.Linear(2, 1)
    >>> monitor = ForwardInputMonitor(Max(), layer)
    >>> _ = layer(input=torch.tensor([[1.0, 7.0]]))
    >>> monitor.peek()
    tensor(7.)
    """

    side = "inputs"

    def _attach(self, module: nn.Module) -> list[Any]:
        hook = self._hook(self._before_quickly if self._quick else self._before, "_trace_before")
        return [module.register_forward_pre_hook(hook, prepend=self.prepend, with_kwargs=True)]

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] = _NONE) -> None:
        if is_ignored(self) or not self._due(module, self._training(module)):
            return
        inputs = pack(args, kwargs)
        if not add_alone(self, inputs):
            self._record(module, inputs)

    def _before_quickly(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] = _NONE) -> None:
        inputs = pack(args, kwargs)
        if not add_at_once(self, inputs) and not reduce_at_once(self, module, inputs):
            self._before(module, args, kwargs)

    def _trace_before(self, receiver: Tensor, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] = _NONE) -> None:
        if wanted_in_graph(self, module):
            trace(self, receiver, (pack(args, kwargs),))


class CallMonitor(Monitor):
    """Records values that the user pushes: losses, metrics, anything that no hook gets. Operands: the values pushed.

    >>> from reducers import Mean
    >>> loss = CallMonitor(Mean())
    >>> for value in (3.0, 1.0):
    ...     loss.push(value)
    >>> loss.peek()
    tensor(2., dtype=torch.float64)
    """

    def __init__(self, reducer: Reducer, module: nn.Module | None = None, **options: Unpack[MonitorOptions]) -> None:
        super().__init__(reducer, module, **options)
        self.twin_key = new_twin_key(self)  # code that pushes inside a graph uses the monitor itself, not a twin

    def deregister(self) -> Monitor:
        """Takes the monitor off its module; pushed values are still recorded. Returns the monitor."""
        super().deregister()
        self.gate.turn(on=True)
        return self

    def push(self, *values: Any) -> None:
        """Records one observation: tensors (which stay on their device), Python numbers, or nested values of them."""
        if torch.compiler.is_compiling():
            if wanted_in_graph(self, self.module):
                trace(self, self.receiver.tensor, tuple(map(as_operands, values)))
        else:
            outside_modes(timed, self, self._pushed, *values)

    def _pushed(self, *values: Any) -> None:
        module = self.module
        self._ensure_clock()
        if self.on_error == "disable" and self.last_error is not None:
            self._skip("pushed after the failure that took it off")
        elif self._due(module, self._training(module)):
            self._record(module, *map(as_operands, values))

    def _attach(self, module: nn.Module) -> list[Any]:
        return []

    def _training(self, module: nn.Module | None) -> bool:
        if (
            module is None and self.gate.phase == "module"
        ):  # without a module there is no mode, so any mode that is recorded will do
            return self.gate.train_update
        return super()._training(module)
