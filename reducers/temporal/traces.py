"""Traces of events that fade exponentially with time, element by element."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from reducers.core.inputs import observation, observation_with
from reducers.errors import ArgumentError, ReducerTypeError
from reducers.kernels.precision import wide_float
from reducers.state import State
from reducers.temporal.affine import Affine
from reducers.temporal.ema import check_positive, matches

__all__ = [
    "ConditionalCumulativeTrace",
    "ConditionalNearestTrace",
    "CumulativeTrace",
    "NearestTrace",
    "ScaledCumulativeTrace",
    "ScaledNearestTrace",
]


@dataclass(frozen=True, kw_only=True)
class _Trace(Affine):
    """`exp(-step_time / time_constant)` of itself from step to step; an event sets it, or adds to it."""

    time_constant: float
    step_time: float = 1.0
    amplitude: float = 1.0

    interpolation: ClassVar[str] = "expdecay"
    nearest: ClassVar[bool]

    def __post_init__(self) -> None:
        check_positive(self, "time_constant")
        check_positive(self, "step_time")
        self._check_finite("amplitude")

    def _check_finite(self, name: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ArgumentError(f"{type(self).__name__} takes a finite {name} and got {value!r}")

    @abstractmethod
    def event(self, *xs: Tensor) -> tuple[Tensor, Tensor]:
        """Where there is an event, and what it contributes."""

    def step(self, *xs: Tensor) -> State:
        match, value = self.event(*xs)
        fading = torch.full((), math.exp(-self.step_time / self.time_constant), dtype=value.real.dtype, device=match.device)
        decay = torch.where(match, torch.zeros_like(fading), fading) if self.nearest else fading
        return {"decay": decay, "gain": torch.where(match, value, torch.zeros_like(value))}


@dataclass(frozen=True, kw_only=True)
class _MatchTrace(_Trace):
    target: float = 1.0
    tolerance: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_finite("target")
        if not isinstance(self.tolerance, (int, float)) or not 0 <= self.tolerance < math.inf:
            raise ArgumentError(f"{type(self).__name__} takes a finite tolerance from 0 up and got {self.tolerance!r}")

    def event(self, *xs: Tensor) -> tuple[Tensor, Tensor]:
        x = wide_float(observation(self, xs))
        # without tolerance the difference is spared, and so is its rounding
        match = (x - self.target).abs() <= self.tolerance if self.tolerance else x == self.target
        return match, torch.full((), self.amplitude, dtype=x.real.dtype, device=x.device)


@dataclass(frozen=True, kw_only=True)
class _ScaledTrace(_Trace):
    criterion: Callable[[Tensor], Tensor]
    scale: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_finite("scale")
        if not callable(self.criterion):
            raise ReducerTypeError(f"{type(self).__name__} needs a criterion, such as torch.signbit, and got {self.criterion!r}")

    def event(self, *xs: Tensor) -> tuple[Tensor, Tensor]:
        x = observation(self, xs)
        value = self.scale * wide_float(x) + self.amplitude
        return matches(self, self.criterion, x) & torch.isfinite(value), value


@dataclass(frozen=True, kw_only=True)
class _ConditionalTrace(_Trace):
    scale: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_finite("scale")

    def event(self, *xs: Tensor) -> tuple[Tensor, Tensor]:
        x, condition = observation_with(self, xs, "condition")
        value = self.scale * wide_float(x) + self.amplitude
        return (condition != 0) & torch.isfinite(value), value


@dataclass(frozen=True, kw_only=True)
class NearestTrace(_MatchTrace):
    """Trace of the latest match: `s = A` where `|h - target| <= tolerance`, else `s exp(-step_time / time_constant)`.

    Starts from 0. An element that is not finite matches nothing.

    Args:
        time_constant: time in which the trace falls to 1/e, in the unit of `step_time`.
        step_time: time between observations.
        amplitude: A, what a match sets the trace to.
        target: the value that matches, in the unit of the data.
        tolerance: largest distance from it that still does.

    Returns:
        float64, in the shape of the observations.

    Raises:
        ArgumentError: a time is not above 0, the tolerance is negative, or a number is not finite.

    >>> import torch
    >>> trace = NearestTrace(time_constant=2.0)
    >>> state = trace.update({}, torch.tensor([1.0, 1.0, 0.0]))
    >>> trace.compute(trace.update(state, torch.tensor([1.0, 0.0, 0.0])))
    tensor([1.0000, 0.6065, 0.0000], dtype=torch.float64)
    """

    nearest: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class CumulativeTrace(_MatchTrace):
    """Trace of all matches: `s = s exp(-step_time / time_constant) + A [|h - target| <= tolerance]`.

    Starts from 0. An element that is not finite matches nothing.

    Args:
        time_constant: time in which the trace falls to 1/e, in the unit of `step_time`.
        step_time: time between observations.
        amplitude: A, what a match adds to the trace.
        target: the value that matches, in the unit of the data.
        tolerance: largest distance from it that still does.

    Returns:
        float64, in the shape of the observations.

    Raises:
        ArgumentError: a time is not above 0, the tolerance is negative, or a number is not finite.

    >>> import torch
    >>> trace = CumulativeTrace(time_constant=2.0)
    >>> state = trace.update({}, torch.tensor([1.0, 1.0, 0.0]))
    >>> trace.compute(trace.update(state, torch.tensor([1.0, 0.0, 0.0])))
    tensor([1.6065, 0.6065, 0.0000], dtype=torch.float64)
    """

    nearest: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class ScaledNearestTrace(_ScaledTrace):
    """Trace of the latest match, as large as the input: `s = scale h + A` where the criterion is met, else as `NearestTrace`.

    An event whose contribution is not finite is left out.

    Args:
        time_constant: time in which the trace falls to 1/e, in the unit of `step_time`.
        step_time: time between observations.
        amplitude: A, added to what the input contributes.
        criterion: takes an observation and returns where there is an event, a bool tensor of the same shape.
        scale: factor of the input.

    Returns:
        float64, or complex128 for complex input, in the shape of the observations.

    Raises:
        ArgumentError: a time is not above 0, or a number is not finite.
        ReducerTypeError: the criterion cannot be called, or returns something else.

    >>> import torch
    >>> trace = ScaledNearestTrace(time_constant=2.0, amplitude=0.0, criterion=torch.signbit)
    >>> state = trace.update({}, torch.tensor([-4.0, -4.0, 4.0]))
    >>> trace.compute(trace.update(state, torch.tensor([-2.0, 2.0, 2.0])))
    tensor([-2.0000, -2.4261,  0.0000], dtype=torch.float64)
    """

    nearest: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class ScaledCumulativeTrace(_ScaledTrace):
    """Trace of all matches, as large as the input: `scale h + A` is added where the criterion is met; see `CumulativeTrace`.

    An event whose contribution is not finite is left out.

    Args:
        time_constant: time in which the trace falls to 1/e, in the unit of `step_time`.
        step_time: time between observations.
        amplitude: A, added to what the input contributes.
        criterion: takes an observation and returns where there is an event, a bool tensor of the same shape.
        scale: factor of the input.

    Returns:
        float64, or complex128 for complex input, in the shape of the observations.

    Raises:
        ArgumentError: a time is not above 0, or a number is not finite.
        ReducerTypeError: the criterion cannot be called, or returns something else.

    >>> import torch
    >>> trace = ScaledCumulativeTrace(time_constant=2.0, amplitude=0.0, criterion=torch.signbit)
    >>> state = trace.update({}, torch.tensor([-4.0, -4.0, 4.0]))
    >>> trace.compute(trace.update(state, torch.tensor([-2.0, 2.0, 2.0])))
    tensor([-4.4261, -2.4261,  0.0000], dtype=torch.float64)
    """

    nearest: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class ConditionalNearestTrace(_ConditionalTrace):
    """`ScaledNearestTrace` whose events are a second input: `s = scale h + A` where the condition holds.

    `update(state, h, condition)`: the condition is bool, or not zero where it holds; its axes are the first ones of h, and those
    it lacks, or has with length 1, are repeated.

    Args:
        time_constant: time in which the trace falls to 1/e, in the unit of `step_time`.
        step_time: time between observations.
        amplitude: A, added to what the input contributes.
        scale: factor of the input.

    Returns:
        float64, or complex128 for complex input, in the shape of the observations.

    Raises:
        ArgumentError: a time is not above 0, a number is not finite, or the condition has another shape.

    >>> import torch
    >>> trace = ConditionalNearestTrace(time_constant=2.0, amplitude=0.0)
    >>> state = trace.update({}, torch.tensor([4.0, 4.0]), torch.tensor([True, True]))
    >>> trace.compute(trace.update(state, torch.tensor([2.0, 2.0]), torch.tensor([True, False])))
    tensor([2.0000, 2.4261], dtype=torch.float64)
    """

    nearest: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class ConditionalCumulativeTrace(_ConditionalTrace):
    """`ScaledCumulativeTrace` whose events are a second input: `scale h + A` is added where the condition holds.

    `update(state, h, condition)`: the condition is bool, or not zero where it holds; its axes are the first ones of h, and those
    it lacks, or has with length 1, are repeated.

    Args:
        time_constant: time in which the trace falls to 1/e, in the unit of `step_time`.
        step_time: time between observations.
        amplitude: A, added to what the input contributes.
        scale: factor of the input.

    Returns:
        float64, or complex128 for complex input, in the shape of the observations.

    Raises:
        ArgumentError: a time is not above 0, a number is not finite, or the condition has another shape.

    >>> import torch
    >>> trace = ConditionalCumulativeTrace(time_constant=2.0, amplitude=0.0)
    >>> state = trace.update({}, torch.tensor([4.0, 4.0]), torch.tensor([True, True]))
    >>> trace.compute(trace.update(state, torch.tensor([2.0, 2.0]), torch.tensor([True, False])))
    tensor([4.4261, 2.4261], dtype=torch.float64)
    """

    nearest: ClassVar[bool] = False
