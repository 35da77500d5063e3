"""Exact accumulation: dtypes wide enough to add in, and non-finite values set aside without touching the caller's tensor."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from reducers.errors import DTypeError

__all__ = [
    "NARROW",
    "able_to_hold_nan",
    "comparable",
    "count_along",
    "count_of",
    "extremes",
    "finite",
    "magnitude",
    "nan_where_infinite",
    "negligible",
    "real",
    "real_or_complex",
    "reduce_finite",
    "square_sum",
    "total",
    "wide_dtype",
    "wide_float",
    "widen",
]

NARROW = (torch.float32, torch.bfloat16, torch.float16)  # floats that are summed in wider ones, or about a centre


def real(x: Tensor) -> Tensor:
    """`x` in the dtype that means and shares are kept in: float64, or float32 where the device has none."""
    return x.to(torch.float32 if x.device.type == "mps" else torch.float64)


def wide_float(x: Tensor) -> Tensor:
    """`x` as `real` gives it, or complex128."""
    return x.to(torch.complex128) if x.is_complex() else real(x)


def wide_dtype(x: Tensor, who: str) -> torch.dtype:
    """The dtype sums of `x` are exact in: float64 (float32 where the device has none), complex128, or int64 for integers.

    Raises:
        DTypeError: unsigned 64-bit integers, which no wider dtype holds.
    """
    if x.is_complex():
        return torch.complex128
    if x.is_floating_point():
        return torch.float32 if x.device.type == "mps" else torch.float64
    if x.dtype is torch.uint64:
        raise DTypeError(f"{who} has no exact sum for torch.uint64; convert it first, for example .premap(torch.Tensor.double)")
    return torch.int64


def widen(x: Tensor, who: str) -> Tensor:
    """`x` in its `wide_dtype`."""
    return x.to(wide_dtype(x, who))


def real_or_complex(x: Tensor) -> Tensor:
    """`x` with integers made real, so that powers and differences neither overflow nor truncate."""
    return x if x.is_complex() or x.is_floating_point() else real(x)


def able_to_hold_nan(x: Tensor) -> Tensor:
    """`x` in a dtype that has NaN and can be computed with: integers as real numbers, float8 as float32."""
    return _computable(real_or_complex(x))


def comparable(x: Tensor, who: str) -> Tensor:
    """`x` itself, or in the narrowest dtype that holds it and has an order in torch: float8 as float32, uint16, uint32 as signed.

    Raises:
        DTypeError: complex numbers, which have no order, and unsigned 64-bit integers, which no wider dtype holds.
    """
    if x.is_complex():
        raise DTypeError(f"{who} is not defined for {x.dtype}, which has no order; reduce its magnitude: .premap(torch.abs)")
    if x.dtype is torch.uint64:
        raise DTypeError(f"{who} is not defined for torch.uint64; convert it first, for example .premap(torch.Tensor.double)")
    if x.is_floating_point():
        return x.float() if x.dtype.itemsize == 1 else x
    return x.to({torch.uint16: torch.int32, torch.uint32: torch.int64}.get(x.dtype, x.dtype))


def magnitude(x: Tensor) -> Tensor:
    """Squared absolute value, real also for complex numbers."""
    return x.real.square() + x.imag.square() if x.is_complex() else x.square()


def finite(x: Tensor) -> tuple[Tensor, Tensor | None]:
    """`x` with zeros for its non-finite values, and the mask of what was finite (None: everything was)."""
    if not (x.is_floating_point() or x.is_complex()):
        return x, None
    x = _computable(x)
    if _may_look(x) and torch.isfinite(x.sum(dtype=torch.float32) if x.dtype.itemsize < 4 else x.sum()).item():
        return x, None
    mask = _is_finite(x)
    return torch.where(mask, x, 0.0), mask


def reduce_finite(x: Tensor, reduction: Callable[[Tensor], Tensor], fill: float = 0.0) -> tuple[Tensor, Tensor | None, Tensor]:
    """`x` with its non-finite values replaced by `fill`, the mask of what was finite (None: everything was), and its reduction.

    On the CPU a finite result proves that nothing it depends on is infinite or NaN, at no second read.

    Args:
        reduction: gives something non-finite wherever a non-finite element would change it.
        fill: what the reduction leaves its result unchanged by.
    """
    if not (x.is_floating_point() or x.is_complex()):
        return x, None, reduction(x)
    x = _computable(x)
    if _may_look(x):
        reduced = reduction(x)
        if torch.isfinite(reduced).all().item():
            return x, None, reduced
    mask = _is_finite(x)
    filled = torch.where(mask, x, fill)
    return filled, mask, reduction(filled)


def _is_finite(x: Tensor) -> Tensor:
    if torch.compiler.is_compiling() and not x.is_complex():
        return x.abs() < torch.inf  # which the compiler vectorises
    return torch.isfinite(x)


def _may_look(x: Tensor) -> bool:
    # elsewhere looking at a value would make the host wait for the device, or break the graph
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def _computable(x: Tensor) -> Tensor:
    # float8 can be converted, and hardly more
    return x.float() if x.dtype.itemsize == 1 else x


def total(x: Tensor, axes: tuple[int, ...], who: str) -> tuple[Tensor, Tensor | None, Tensor]:
    """As `reduce_finite` with the sum over `axes`, which stay with length 1, in their `wide_dtype`."""
    wide = wide_dtype(x, who)
    return reduce_finite(x, lambda part: part.sum(dim=axes, keepdim=True, dtype=wide))


def square_sum(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Sum of the squared magnitudes over `axes`; `x` is the caller's own, and may be overwritten to spare a second temporary."""
    if x.is_complex():
        return magnitude(x).sum(dim=axes)
    if not torch.compiler.is_compiling() and len(axes) == x.ndim and x.is_contiguous():
        flat = x.reshape(-1)
        return torch.dot(flat, flat)  # compiled, a sum fuses with what comes before it and a product does not
    return x.square_().sum(dim=axes)


def extremes(x: Tensor, axes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Minimum and maximum over `axes`."""
    if len(axes) == x.ndim:  # over all axes there is a kernel for both, over some it is slower than two
        return torch.aminmax(x)
    return x.amin(dim=axes), x.amax(dim=axes)


def nan_where_infinite(x: Tensor) -> Tensor:
    """`x` with NaN where it still is the infinity that extremes start from; integers have none."""
    return torch.where(torch.isinf(x), torch.nan, x) if x.is_floating_point() else x


def count_of(x: Tensor, mask: Tensor | None, axes: tuple[int, ...]) -> Tensor:
    """How many elements were finite, int64, in the shape of the kept axes."""
    if mask is not None:
        return mask.sum(dim=axes)
    kept = [size for axis, size in enumerate(x.shape) if axis not in axes]
    return torch.full(kept, count_along(x, axes), dtype=torch.int64, device=x.device)


def count_along(x: Tensor, axes: tuple[int, ...]) -> int:
    """How many elements there are for each position of the kept axes."""
    count = 1
    for axis in axes:  # math.prod does not trace sizes that vary
        count *= x.shape[axis]
    return count


def negligible(m2: Tensor, count: Tensor, mean: Tensor) -> Tensor:
    """Whether a sum of squared distances from a mean is no more than what rounding makes of equal elements."""
    return m2 <= real(count) * (8 * torch.finfo(m2.dtype).eps * mean).square()
