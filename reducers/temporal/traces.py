"""Element-wise traces of events, which decay exponentially with time."""

from __future__ import annotations

import cmath
import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from reducers.core.constants import Constant, as_constant, constant_tensor, is_number
from reducers.core.inputs import observation, observation_with
from reducers.errors import ArgumentError, ReducerTypeError
from reducers.kernels.precision import wide_float
from reducers.state import State
from reducers.temporal.affine import Affine, decays
from reducers.temporal.ema import check_positive, matches


@dataclass(frozen=True, kw_only=True)
class _Trace(Affine):
    """Base class: each step multiplies the trace by `exp(-step_time / time_constant)`; an event then sets it or adds to it."""

    time_constant: float | Tensor | tuple[Constant, ...]
    step_time: float = 1.0
    amplitude: complex = 1.0

    interpolation: ClassVar[str] = "expdecay"
    nearest: ClassVar[bool]

    def __post_init__(self) -> None:
        object.__setattr__(self, "time_constant", as_constant(self.time_constant))
        check_positive(self, "time_constant", per_element=True)
        try:
            constant_tensor(self.time_constant)
        except (TypeError, ValueError) as error:
            raise ArgumentError(f"{type(self).__name__} takes time constants in the shape of a tensor: {error}") from None
        check_positive(self, "step_time")
        self._check_finite("amplitude")

    def _check_finite(self, name: str) -> None:
        value = getattr(self, name)
        if not (isinstance(value, complex) or is_number(value)) or isinstance(value, bool) or not cmath.isfinite(value):
            raise ArgumentError(f"{type(self).__name__} takes a finite {name} and got {value!r}")

    def _decay(self, like: Tensor) -> Tensor:
        """Return the decay of one step, which broadcasts to `like`."""
        tau, dtype = self.time_constant, like.real.dtype
        if not isinstance(tau, tuple):
            return torch.full((), math.exp(-self.step_time / tau), dtype=dtype, device=like.device)
        decay: Tensor = decays(tau, self.step_time).to(like.device, dtype, non_blocking=True, copy=True)
        try:
            decay.expand(like.shape)
        except RuntimeError:
            shapes = f"{tuple(decay.shape)}, which does not broadcast to observations of shape {tuple(like.shape)}"
            raise ArgumentError(f"{type(self).__name__} has time constants of shape {shapes}") from None
        return decay

    @abstractmethod
    def event(self, *xs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mask of the events, and their contributions; if these may be not finite, such events are left out."""

    def step(self, *xs: Tensor) -> State:
        match, value = self.event(*xs)
        events, match = match, match & torch.isfinite(value) if self.counts_nonfinite else match
        counts = {"nonfinite": (events ^ match).sum()} if self.counts_nonfinite else {}
        gain = torch.where(match, value, torch.zeros_like(value))
        decay = self._decay(gain)
        return {"decay": torch.where(match, torch.zeros_like(decay), decay) if self.nearest else decay, "gain": gain, **counts}


@dataclass(frozen=True, kw_only=True)
class _MatchTrace(_Trace):
    target: complex = 1.0
    tolerance: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_finite("target")
        if not is_number(self.tolerance) or not 0 <= self.tolerance < math.inf:
            raise ArgumentError(f"{type(self).__name__} takes a finite tolerance from 0 up and got {self.tolerance!r}")

    def event(self, *xs: Tensor) -> tuple[Tensor, Tensor]:
        x = wide_float(observation(self, xs))
        # without a tolerance, equality is cheaper and involves no rounding
        match = (x - self.target).abs() <= self.tolerance if self.tolerance else x == self.target
        dtype = torch.complex128 if isinstance(self.amplitude, complex) else x.real.dtype
        return match, torch.full((), self.amplitude, dtype=dtype, device=x.device)


@dataclass(frozen=True, kw_only=True)
class _EventTrace(_Trace):
    scale: complex = 1.0

    counts_nonfinite: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_finite("scale")


@dataclass(frozen=True, kw_only=True)
class _ScaledTrace(_EventTrace):
    criterion: Callable[[Tensor], Tensor]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.criterion):
            raise ReducerTypeError(f"{type(self).__name__} needs a criterion, such as torch.signbit, and got {self.criterion!r}")

    def event(self, *xs: Tensor) -> tuple[Tensor, Tensor]:
        x = observation(self, xs)
        value = self.scale * wide_float(x) + self.amplitude
        return matches(self, self.criterion, x), value


@dataclass(frozen=True, kw_only=True)
class _ConditionalTrace(_EventTrace):
    def event(self, *xs: Tensor) -> tuple[Tensor, Tensor]:
        x, condition = observation_with(self, xs, "condition")
        value = self.scale * wide_float(x) + self.amplitude
        return (condition != 0).expand(value.shape), value


@dataclass(frozen=True, kw_only=True)
class NearestTrace(_MatchTrace):
    """Trace of the latest match: `s = A` if `|h - target| <= tolerance`, else `s exp(-step_time / time_constant)`.

    The trace starts at 0. Non-finite elements never match.

    Args:
        time_constant: time after which the trace has decayed to 1/e, in the unit of `step_time`; a tensor has one per element.
        step_time: time between observations.
        amplitude: A, the value that a match sets the trace to.
        target: the value that matches, in the unit of the data.
        tolerance: largest distance from the target that still matches.

    Returns:
        float64, or complex128 for a complex amplitude, in the shape of the observations.

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

    The trace starts at 0. Non-finite elements never match.

    Args:
        time_constant: time after which the trace has decayed to 1/e, in the unit of `step_time`; a tensor has one per element.
        step_time: time between observations.
        amplitude: A, the value that a match adds to the trace.
        target: the value that matches, in the unit of the data.
        tolerance: largest distance from the target that still matches.

    Returns:
        float64, or complex128 for a complex amplitude, in the shape of the observations.

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
    """Trace of the latest event, scaled by the input: `s = scale h + A` if the criterion is met, else as `NearestTrace`.

    Events with a non-finite contribution are ignored.

    Args:
        time_constant: time after which the trace has decayed to 1/e, in the unit of `step_time`; a tensor has one per element.
        step_time: time between observations.
        amplitude: A, a constant added to the scaled input.
        criterion: maps an observation to a bool tensor of the same shape, True where there is an event.
        scale: factor applied to the input.

    Returns:
        float64, or complex128 if the input or a number is complex, in the shape of the observations.

    Raises:
        ArgumentError: a time is not above 0, or a number is not finite.
        ReducerTypeError: the criterion is not callable, or does not return such a tensor.

    >>> import torch
    >>> trace = ScaledNearestTrace(time_constant=2.0, amplitude=0.0, criterion=torch.signbit)
    >>> state = trace.update({}, torch.tensor([-4.0, -4.0, 4.0]))
    >>> trace.compute(trace.update(state, torch.tensor([-2.0, 2.0, 2.0])))
    tensor([-2.0000, -2.4261,  0.0000], dtype=torch.float64)
    """

    nearest: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class ScaledCumulativeTrace(_ScaledTrace):
    """Trace of all events, scaled by the input: adds `scale h + A` if the criterion is met; else as `CumulativeTrace`.

    Events with a non-finite contribution are ignored.

    Args:
        time_constant: time after which the trace has decayed to 1/e, in the unit of `step_time`; a tensor has one per element.
        step_time: time between observations.
        amplitude: A, a constant added to the scaled input.
        criterion: maps an observation to a bool tensor of the same shape, True where there is an event.
        scale: factor applied to the input.

    Returns:
        float64, or complex128 if the input or a number is complex, in the shape of the observations.

    Raises:
        ArgumentError: a time is not above 0, or a number is not finite.
        ReducerTypeError: the criterion is not callable, or does not return such a tensor.

    >>> import torch
    >>> trace = ScaledCumulativeTrace(time_constant=2.0, amplitude=0.0, criterion=torch.signbit)
    >>> state = trace.update({}, torch.tensor([-4.0, -4.0, 4.0]))
    >>> trace.compute(trace.update(state, torch.tensor([-2.0, 2.0, 2.0])))
    tensor([-4.4261, -2.4261,  0.0000], dtype=torch.float64)
    """

    nearest: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class ConditionalNearestTrace(_ConditionalTrace):
    """`ScaledNearestTrace` with a condition as second input in place of the criterion: `s = scale h + A` if it is True.

    `update(state, h, condition)`: the condition is bool, or non-zero for True. Its axes are the leading axes of `h`, and it
    broadcasts over missing axes and axes of length 1.

    Args:
        time_constant: time after which the trace has decayed to 1/e, in the unit of `step_time`; a tensor has one per element.
        step_time: time between observations.
        amplitude: A, a constant added to the scaled input.
        scale: factor applied to the input.

    Returns:
        float64, or complex128 if the input or a number is complex, in the shape of the observations.

    Raises:
        ArgumentError: a time is not above 0, a number is not finite, or the condition does not broadcast to the input.

    >>> import torch
    >>> trace = ConditionalNearestTrace(time_constant=2.0, amplitude=0.0)
    >>> state = trace.update({}, torch.tensor([4.0, 4.0]), torch.tensor([True, True]))
    >>> trace.compute(trace.update(state, torch.tensor([2.0, 2.0]), torch.tensor([True, False])))
    tensor([2.0000, 2.4261], dtype=torch.float64)
    """

    nearest: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class ConditionalCumulativeTrace(_ConditionalTrace):
    """`ScaledCumulativeTrace` with a condition as second input in place of the criterion: adds `scale h + A` if it is True.

    `update(state, h, condition)`: the condition is bool, or non-zero for True. Its axes are the leading axes of `h`, and it
    broadcasts over missing axes and axes of length 1.

    Args:
        time_constant: time after which the trace has decayed to 1/e, in the unit of `step_time`; a tensor has one per element.
        step_time: time between observations.
        amplitude: A, a constant added to the scaled input.
        scale: factor applied to the input.

    Returns:
        float64, or complex128 if the input or a number is complex, in the shape of the observations.

    Raises:
        ArgumentError: a time is not above 0, a number is not finite, or the condition does not broadcast to the input.

    >>> import torch
    >>> trace = ConditionalCumulativeTrace(time_constant=2.0, amplitude=0.0)
    >>> state = trace.update({}, torch.tensor([4.0, 4.0]), torch.tensor([True, True]))
    >>> trace.compute(trace.update(state, torch.tensor([2.0, 2.0]), torch.tensor([True, False])))
    tensor([4.4261, 2.4261], dtype=torch.float64)
    """

    nearest: ClassVar[bool] = False
