"""Vector norms."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from reducers.core.constants import is_number
from reducers.core.counted import COUNTS, nothing_to_nan
from reducers.core.fields import Add, Field, Greatest
from reducers.core.statistic import Statistic
from reducers.errors import ArgumentError
from reducers.kernels.precision import abs_squared, counts_of, finite, positive_zero, real, real_or_complex, reduce_finite, widen
from reducers.state import Result, State

_ANY_POWER = Add()
_POWERS = {1: Add("magnitudes"), 2: Add("squares"), math.inf: Greatest("peak")}


@dataclass(frozen=True)
class Norm(Statistic):
    """Vector norm of all finite elements: `(sum |x|^p)^(1/p)`.

    Powers are added in float64. Kernels for GPUs, for the orders 1 and 2, add those of float32 and narrower numbers in float32
    within a tile: there the relative error is below 1e-6.

    Args:
        p: order from 0 to infinity: 0 counts the non-zero elements, infinity gives the largest magnitude.
        normalize: use the mean of `|x|^p` instead of the sum, so that the result does not depend on the number of elements:
            p=2 gives the root mean square, p=0 the share of non-zero elements; p=inf is unchanged.

    Returns:
        float64, in the shape of the kept axes, as `torch.linalg.vector_norm` of all elements; NaN if none of them is finite, and
        with `normalize` also if there are none.

    Raises:
        ArgumentError: `p` is negative or not a number.

    >>> import torch
    >>> norm, rms = Norm(), Norm(normalize=True)
    >>> norm.compute(norm.update(norm.update({}, torch.tensor([3.0])), torch.tensor([4.0])))
    tensor(5., dtype=torch.float64)
    >>> rms.compute(rms.update({}, torch.tensor([2.0, -2.0])))
    tensor(2., dtype=torch.float64)
    """

    p: float = 2.0
    normalize: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_number(self.p) or not self.p >= 0:
            raise ArgumentError(f"Norm takes an order p from 0 to infinity and got {self.p!r}")

    @property
    def fields(self) -> Mapping[str, Field]:  # type: ignore[override]
        return {**COUNTS, "power": _POWERS.get(self.p, _ANY_POWER)}

    def lift(self, x: Tensor, axes: tuple[int, ...]) -> State:
        if self.p == 0:  # a NaN does not show in this power, so reduce_finite would miss it
            wide, mask = finite(real_or_complex(widen(x, "Norm")))
            power = real((wide != 0).sum(dim=axes))
        else:
            _, mask, power = reduce_finite(x, lambda part: self._power(part, axes))
        return {**counts_of(x, mask, axes), "power": power}

    def _power(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        narrow, x = x, real_or_complex(widen(x, "Norm"))
        if self.p == 2:
            return (abs_squared(x) if x is narrow or x.is_complex() else x.mul_(x)).sum(dim=axes)  # a copy may be overwritten
        if self.p == math.inf:
            return x.abs().amax(dim=axes)
        return (x.abs() if self.p == 1 else x.abs().pow(self.p)).sum(dim=axes)

    def read(self, state: State) -> Tensor:
        power = positive_zero(state["power"])
        if self.normalize:
            power = torch.where(state["count"] > 0, power if self.p == math.inf else power / real(state["count"]), torch.nan)
        return power if self.p in (0, 1, math.inf) else power.pow(1 / self.p)

    def compute(self, state: State) -> Result:
        return nothing_to_nan(super().compute(state), state)

    def compute_each(self, states: State) -> Result:
        return self.compute(states)
