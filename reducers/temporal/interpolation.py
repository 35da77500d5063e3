"""Values of a history between its steps, and outside of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, Union

import torch
from torch import Tensor

from reducers.core.constants import as_constant, constant_tensor, is_number, numbers
from reducers.errors import ArgumentError
from reducers.kernels.precision import wide_float

Interpolation: TypeAlias = Union[str, Callable[[Tensor, Tensor, Tensor, float], Tensor]]
"""A name, or a function of the earlier result, the later one, the time since the earlier one, and the step time."""

Extrapolation: TypeAlias = Union[float, str, Callable[[Tensor, Tensor], Tensor]]
"""A number, "nearest", or a function of the nearest result and the time since it, which is negative before the oldest result."""

_NAMED: dict[str, Callable[[Tensor, Tensor, Tensor, float, Tensor], Tensor]] = {
    "previous": lambda before, after, e, step, tau: before,
    "next": lambda before, after, e, step, tau: after,
    "nearest": lambda before, after, e, step, tau: torch.where(e > step / 2, after, before),
    "linear": lambda before, after, e, step, tau: wide_float(before) + (wide_float(after) - wide_float(before)) * (e / step),
    "expdecay": lambda before, after, e, step, tau: wide_float(before) * torch.exp(-e / tau),
    "elapsed": lambda before, after, e, step, tau: wide_float(before) + e,
}


def checked(owner: object, how: Interpolation, beyond: Extrapolation | None, time_constant: Any) -> Tensor:
    """Return the time constant as a tensor, 1 if none is needed.

    Raises:
        ArgumentError: a name is unknown, or "expdecay" has no time constant above 0.
    """
    if not callable(how) and how not in _NAMED:
        raise ArgumentError(f"no interpolation {how!r}; there are {list(_NAMED)}, or give a function")
    if isinstance(beyond, str) and beyond != "nearest":
        raise ArgumentError(f"no extrapolation {beyond!r}; there is 'nearest', or give a number or a function")
    constant = as_constant(time_constant) if how == "expdecay" else 1.0
    if not all(is_number(tau) and tau > 0 for tau in numbers(constant)):
        raise ArgumentError(f"{owner!r} has no time constant above 0; pass one: view(time, 'expdecay', time_constant=...)")
    return constant_tensor(constant)


def interpolated(how: Interpolation, before: Tensor, after: Tensor, elapsed: Tensor, step_time: float, tau: Tensor) -> Tensor:
    """Return the value at a time after the earlier of two results: exactly that result if no time has elapsed."""
    if callable(how):
        value = how(before, after, elapsed, step_time)
    else:
        value = _NAMED[how](before, after, elapsed, step_time, tau.to(before.device))
    return torch.where(elapsed == 0, before.to(value.dtype), value)


def extrapolated(how: Extrapolation, value: Tensor, nearest: Tensor, since: Tensor) -> Tensor:
    """Return `value` where `since`, the time since the nearest result, is 0, and elsewhere what `how` makes of that result."""
    if callable(how):
        return torch.where(since == 0, value, how(nearest, since))
    if isinstance(how, str):
        return torch.where(since == 0, value, nearest.to(value.dtype))
    fits = value.is_floating_point() or value.is_complex() or isinstance(how, int)
    return torch.where(since == 0, value if fits else wide_float(value), how)


def gathered(results: Tensor, index: Tensor) -> Tensor:
    """Return the result of each element and time, of results stacked along a first axis, or of several times."""
    columns = results.movedim(0, -1)
    return columns.gather(-1, index) if index.ndim == columns.ndim else columns.gather(-1, index.unsqueeze(-1)).squeeze(-1)
