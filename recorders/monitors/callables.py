"""The user's callables of a monitor, `filter_`, `map_` and `op_`: each gets the arguments that it takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from inspect import Parameter
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

from torch import nn

__all__ = ["Caller", "call"]


class Caller(Protocol):
    """What a callable may ask a monitor for."""

    name: str

    @property
    def module(self) -> nn.Module | None: ...


class Takes(NamedTuple):
    """How many operands a callable takes by position, and which of `module` and `name` by keyword only."""

    most: int | None
    names: tuple[str, ...]


def call(function: Callable[..., Any], operands: tuple[Any, ...], monitor: Caller) -> Any:
    """Calls `function` with as many of the operands as it takes, and with the monitor's `module` and `name` if it asks for them."""
    try:
        takes = _known.get(function) or _known.setdefault(function, _inspect(function))
    except TypeError:  # it cannot be referenced weakly, so it is one of Python's or PyTorch's own functions
        return function(*operands)
    return function(*operands[: takes.most], **{name: getattr(monitor, name) for name in takes.names})


_known: WeakKeyDictionary[Callable[..., Any], Takes] = WeakKeyDictionary()


def _inspect(function: Callable[..., Any]) -> Takes:
    """What `function` takes; all operands if it takes `*args`, or does not say."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return Takes(None, ())
    kinds = [parameter.kind for parameter in parameters.values()]
    asked = tuple(name for name in ("module", "name") if name in parameters and parameters[name].kind is Parameter.KEYWORD_ONLY)
    if Parameter.VAR_POSITIONAL in kinds:
        return Takes(None, asked)
    most = sum(kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD) for kind in kinds)
    return Takes(most if most or asked else None, asked)  # one that takes nothing gets all, and says itself what is wrong
