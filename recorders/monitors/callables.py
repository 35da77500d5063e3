"""The user's callables of a monitor, `filter_`, `map_` and `op_`: each gets the arguments that it takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from inspect import Parameter
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.overrides import get_testing_overrides

Together: TypeAlias = "Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor]"


class Takes(NamedTuple):
    """How many operands a callable takes by position, and which of `module` and `name` by keyword only."""

    most: int | None
    names: tuple[str, ...]


def call(function: Callable[..., Any], operands: tuple[Any, ...], monitor: Any) -> Any:
    """Calls `function` with as many of the operands as it takes, and with the monitor's `module` and `name` if it asks for them."""
    try:
        takes = _known.get(function) or _known.setdefault(function, _inspect(function))
    except TypeError:  # it cannot be referenced weakly, so it is one of Python's or PyTorch's own functions
        takes = _inspect(function)
    if takes is UNTOLD:
        return _with_as_many_as_it_takes(function, operands)
    return function(*operands[: takes.most], **{name: getattr(monitor, name) for name in takes.names})


_known: WeakKeyDictionary[Callable[..., Any], Takes] = WeakKeyDictionary()


UNTOLD = Takes(None, ("\0",))
"""What a function takes that does not say."""


def _told_elsewhere(function: Callable[..., Any]) -> Takes:
    """What a function in C takes, if it is one of PyTorch: arguments without a default count.

    >>> import torch
    >>> _told_elsewhere(torch.abs).most, _told_elsewhere(torch.sub).most
    (1, 2)
    """
    try:
        parameters = inspect.signature(_overrides()[function]).parameters.values()
    except (KeyError, TypeError, ValueError):
        return UNTOLD
    return Takes(_positional(parameters, required=True) or None, ())


def _positional(parameters: Iterable[Parameter], required: bool) -> int:
    """How many arguments can be given by position; only those without a default, if these are asked for."""
    kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    return sum(one.kind in kinds and not (required and one.default is not Parameter.empty) for one in parameters)


@cache
def _overrides() -> Mapping[Any, Callable[..., Any]]:
    """A function with the same arguments for each function of PyTorch."""
    found: Mapping[Any, Callable[..., Any]] = get_testing_overrides()
    return found


def _with_as_many_as_it_takes(function: Callable[..., Any], operands: tuple[Any, ...]) -> Any:
    """Calls a function that does not say what it takes with all operands; if that is a TypeError, with fewer."""
    for count in range(len(operands), 1, -1):
        try:
            return function(*operands[:count])
        except TypeError:
            continue
    return function(*operands[:1])


_together: WeakKeyDictionary[Callable[..., Any], Together] = WeakKeyDictionary()


def computed_together(together: Together) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Says, of an `op_` that makes one number of a parameter after a step and before it, how to compute that of many at once.

    Args:
        together: takes a list of parameters after a step, and one of these as they were before it, of one dtype and on one device;
            returns a number for each, in the dtype of the latter, but float32 or wider. It may overwrite the latter.
    """

    def known(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        _together[function] = together
        return function

    return known


def together_of(monitor: Any) -> Together | None:
    """Returns how what a monitor records of many parameters is computed at once; None if its callables have to be called."""
    if monitor.op_ is None or monitor.map_ is not None or monitor.filter_ is not None:
        return None
    try:
        return _together.get(monitor.op_)
    except TypeError:  # it cannot be referenced weakly
        return None


def _inspect(function: Callable[..., Any]) -> Takes:
    """What `function` takes; all operands if it takes `*args`, or does not say.

    Optional arguments count, but for those of PyTorch's own functions and modules: they are no operands.

    >>> from torch import nn
    >>> _inspect(nn.functional.relu).most, _inspect(nn.ReLU()).most, _inspect(lambda output, input=None: output).most
    (1, 1, 2)
    """
    inputs = getattr(function, "nin", None)
    if isinstance(inputs, int):  # a function of NumPy, whose signature has the results as well
        return Takes(inputs, ())
    called = function.forward if isinstance(function, nn.Module) else function
    try:
        parameters = inspect.signature(called).parameters
    except (TypeError, ValueError):
        return _told_elsewhere(function)
    asked = tuple(name for name in ("module", "name") if name in parameters and parameters[name].kind is Parameter.KEYWORD_ONLY)
    if any(one.kind is Parameter.VAR_POSITIONAL for one in parameters.values()):
        return Takes(None, asked)
    most = _positional(parameters.values(), required=_is_torch(called))
    return Takes(most if most or asked else None, asked)  # one that takes nothing gets all, and says itself what is wrong


def _is_torch(function: Callable[..., Any]) -> bool:
    return str(getattr(function, "__module__", "")).partition(".")[0] == "torch"
