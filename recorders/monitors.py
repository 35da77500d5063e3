"""Monitors of what modules return and are given, and of values pushed by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from recorders.constructor import Hook
from recorders.monitor import Monitor
from recorders.operands import as_operand, pack

__all__ = ["CallMonitor", "ForwardInputMonitor", "ForwardMonitor"]


class ForwardMonitor(Monitor):
    """Records what a module returns. Operands: output, inputs.

    Inputs are the tensor itself where the call had one, a tuple for several, a dict where some were keywords, None without any.
    Forwards that activation checkpointing runs again during backward are not recorded twice.

    >>> import torch
    >>> from reducers import Mean
    >>> layer = torch.nn.ReLU()
    >>> monitor = ForwardMonitor(Mean(), layer)
    >>> _ = layer(torch.tensor([-1.0, 3.0]))
    >>> monitor.peek()
    tensor(1.5000, dtype=torch.float64)
    """

    def _attach(self, module: nn.Module) -> list[Any]:
        hook = Hook(self._after, self._run_after if self._open else None)
        return [module.register_forward_hook(hook, prepend=self.prepend, with_kwargs=True)]

    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if not self._passed_by() and self._due(module, self._training(module)) and not self._waits(output):
            self._record(module, output, pack(args, kwargs))

    def _run_after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if not self._quick(output):
            self._after(module, args, kwargs, output)


class ForwardInputMonitor(Monitor):
    """Records what a module is given, keyword arguments included, before it can change it in place. Operands: inputs.

    >>> import torch
    >>> from reducers import Max
    >>> layer = torch.nn.Linear(2, 1)
    >>> monitor = ForwardInputMonitor(Max(), layer)
    >>> _ = layer(input=torch.tensor([[1.0, 7.0]]))
    >>> monitor.peek()
    tensor(7.)
    """

    def _attach(self, module: nn.Module) -> list[Any]:
        hook = Hook(self._before, self._run_before if self._open else None)
        return [module.register_forward_pre_hook(hook, prepend=self.prepend, with_kwargs=True)]

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._passed_by() or not self._due(module, self._training(module)):
            return
        inputs = pack(args, kwargs)
        if not self._waits(inputs):
            self._record(module, inputs)

    def _run_before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._quick(pack(args, kwargs)):
            self._before(module, args, kwargs)


class CallMonitor(Monitor):
    """Records what is pushed: losses, metrics, anything that no hook sees. Operands: the values pushed.

    >>> from reducers import Mean
    >>> loss = CallMonitor(Mean())
    >>> for value in (3.0, 1.0):
    ...     loss.push(value)
    >>> loss.peek()
    tensor(2., dtype=torch.float64)
    """

    def push(self, *values: Any) -> None:
        """Hands over one observation: tensors (never copied off their device), Python numbers, or nested values of them."""
        if torch.compiler.is_compiling():
            self._push(*values)
        else:
            self._pushed(*values)

    def _pushed(self, *values: Any) -> None:
        """Outside of graphs, which guard what they call: for a while a timed version may take its place."""
        self._push(*values)

    def _push(self, *values: Any) -> None:
        module = self.module
        self._wind()
        if self.on_error == "disable" and self.last_error is not None:
            self._skip("pushed after the failure that took it off")
        elif self._due(module, self._training(module)):
            self._record(module, *map(_numbers, values))

    def _attach(self, module: nn.Module) -> list[Any]:
        return []

    def _training(self, module: nn.Module | None) -> bool:
        if module is None and self.phase == "module":  # there is no mode: it is pushed in one that is recorded
            return self.train_update
        return super()._training(module)


def _numbers(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _numbers(item) for key, item in value.items()}
    if type(value) in (tuple, list):
        return [_numbers(item) for item in value]
    return as_operand(value)
