"""Accurate accumulation: wide dtypes to accumulate in, and exclusion of non-finite values without writing to the input."""

from __future__ import annotations

import struct
from collections.abc import Callable

import torch
from torch import Tensor, nn

from reducers.errors import DTypeError
from reducers.kernels.chunks import BIG


def real(x: Tensor) -> Tensor:
    """Return `x` in the dtype of means and ratios: float64, or float32 if the device has no float64."""
    return x.to(torch.float32 if x.device.type == "mps" else torch.float64)


def wide_float(x: Tensor) -> Tensor:
    """Return `x` in complex128 if it is complex, else as `real` does."""
    if x.is_complex():
        return x.to(torch.complex128)
    return x.to(torch.float32 if x.device.type == "mps" else torch.float64)


def wide_dtype(x: Tensor, caller: str) -> torch.dtype:
    """Return the accumulation dtype of `x`: float64 (float32 if the device has no float64), complex128, or int64 for integers.

    Raises:
        DTypeError: `x` is uint64, which has no wider dtype.
    """
    if x.is_complex():
        return torch.complex128
    if x.is_floating_point():
        return torch.float32 if x.device.type == "mps" else torch.float64
    if x.dtype is torch.uint64:
        raise no_sum(x, caller)
    return torch.int64


def no_sum(x: Tensor, caller: str) -> DTypeError:
    """Return the error of a dtype that has no wider one."""
    return DTypeError(f"{caller} has no exact sum for {x.dtype}; convert it first, for example .premap(torch.Tensor.double)")


def widen(x: Tensor, caller: str) -> Tensor:
    """Return `x` in its `wide_dtype`."""
    return x.to(wide_dtype(x, caller))


def real_or_complex(x: Tensor) -> Tensor:
    """Return `x` with integers converted by `real`, so that powers and differences neither overflow nor truncate."""
    return x if x.is_complex() or x.is_floating_point() else real(x)


def nan_capable(x: Tensor) -> Tensor:
    """Return `x` in a dtype that has NaN and arithmetic: integers as `real` does, float8 as float32, complex32 as complex64."""
    return _upcast(real_or_complex(x))


def comparable(x: Tensor, caller: str) -> Tensor:
    """Return `x` in a dtype that torch can compare: float8 as float32, uint16 as int32, uint32 as int64, others unchanged.

    Raises:
        DTypeError: `x` is complex, which has no order, or uint64, which has no wider dtype.
    """
    if x.is_complex():
        raise DTypeError(f"{caller} is not defined for {x.dtype}, which has no order; reduce its magnitude: .premap(torch.abs)")
    if x.dtype is torch.uint64:
        raise DTypeError(f"{caller} is not defined for torch.uint64; convert it first, for example .premap(torch.Tensor.double)")
    if x.is_floating_point():
        return x.float() if x.dtype.itemsize == 1 else x
    return x.to({torch.uint16: torch.int32, torch.uint32: torch.int64}.get(x.dtype, x.dtype))


def aligned(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return both as they are, or, if only one of them has integers, as `wide_float` does: narrower floats would round these."""
    if a.dtype is b.dtype or (a.is_floating_point() or a.is_complex()) == (b.is_floating_point() or b.is_complex()):
        return a, b
    return wide_float(a), wide_float(b)


def abs_squared(x: Tensor) -> Tensor:
    """Return the squared absolute value, which is real for complex numbers too."""
    return x.real.square() + x.imag.square() if x.is_complex() else x.square()


def weighted_squares(weights: Tensor, x: Tensor) -> Tensor:
    """Return weighted squared absolute values: 0 if the weight is, even if the square overflows."""
    return (weights * x * x.conj()).real


def finite(x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return `x` with non-finite values replaced by zero, and the mask of the finite ones (None if all are finite)."""
    if not (x.is_floating_point() or x.is_complex()):
        return x, None
    x = _upcast(x)
    if can_read_values(x) and is_finite(x.sum(dtype=torch.float32) if x.dtype.itemsize < 4 else x.sum()):
        return x, None
    mask = _is_finite(x)
    return torch.where(mask, x, 0.0), mask


def reduce_finite(x: Tensor, reduction: Callable[[Tensor], Tensor], fill: float = 0.0) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return `x` with non-finite values replaced by `fill`, the mask of the finite ones (None if all are), and the reduction.

    On the CPU the reduction runs first: a finite result proves that all elements are finite, without a second read.

    Args:
        reduction: must return a non-finite value if a non-finite element takes part.
        fill: the neutral element of the reduction.
    """
    if not (x.is_floating_point() or x.is_complex()):
        return x, None, reduction(x)
    if x.dtype.itemsize == 1 or x.dtype is torch.complex32:
        x = _upcast(x)
    if can_read_values(x):
        reduced = reduction(x)
        if is_finite(reduced):
            return x, None, reduced
    mask = _is_finite(x)
    filled = torch.where(mask, x, fill)
    return filled, mask, reduction(filled)


def is_finite(x: Tensor) -> bool:
    """Return whether all numbers of a CPU tensor are finite. One number is looked at in Python, in a tenth of the time."""
    if x.ndim:
        return bool(torch.isfinite(x).all())
    number = x.item()
    return bool(number - number == 0)


def _is_finite(x: Tensor) -> Tensor:
    if torch.compiler.is_compiling() and not x.is_complex():
        return x.abs() < torch.inf  # inductor vectorises this, but not isfinite
    return torch.isfinite(x)


def can_read_values(x: Tensor) -> bool:
    """Return whether values of `x` may be looked at: that makes an accelerator wait, breaks a graph, and fails inside vmap."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling() and has_memory(x)


def has_memory(x: Tensor) -> bool:
    """Return whether `x` has memory of its own, which a kernel can read; fake tensors and those inside vmap and grad have none."""
    if type(x) not in (Tensor, nn.Parameter):
        return False
    try:
        x.data_ptr()
    except RuntimeError:
        return False
    return True


def _upcast(x: Tensor) -> Tensor:
    # torch has almost no arithmetic of float8 and complex32
    if x.dtype is torch.complex32:
        return x.to(torch.complex64)
    return x.float() if x.dtype.itemsize == 1 else x


def total(x: Tensor, axes: tuple[int, ...], caller: str, wraps: bool = False) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return `reduce_finite` with the sum over `axes` in the `wide_dtype`; the reduced axes stay, with length 1.

    Args:
        wraps: sum all integers in int64, which wraps around; otherwise those of 32 bits or more in the dtype of `real`, as two
            elements of int64, or 2**31 of uint32, may exceed int64.
    """
    wide = wide_dtype(x, caller)
    if wide is torch.int64 and x.dtype.itemsize >= 4 and not wraps:
        wide = real(x[:0]).dtype if x.ndim else real(x).dtype
    return reduce_finite(x, lambda part: part.sum(dim=axes, keepdim=True, dtype=wide))


def square_sum(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Return the sum of squared absolute values over `axes`. May overwrite `x`, to avoid a temporary."""
    if x.is_complex():
        return abs_squared(x).sum(dim=axes)
    if not torch.compiler.is_compiling() and len(axes) == x.ndim and x.is_contiguous():
        flat = x.reshape(-1)
        return torch.dot(flat, flat)  # not while compiling: inductor fuses a sum with its producer, but not a dot product
    return x.mul_(x).sum(dim=axes)


def extremes(x: Tensor, axes: tuple[int, ...], mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return minimum and maximum over `axes`, of the elements where `mask` is True; inf and -inf if there are none."""
    if mask is not None:
        return torch.where(mask, x, torch.inf).amin(dim=axes), torch.where(mask, x, -torch.inf).amax(dim=axes)
    if len(axes) == x.ndim:  # aminmax over some axes is slower than amin and amax
        return torch.aminmax(x)
    return x.amin(dim=axes), x.amax(dim=axes)


def infinite_to_nan(x: Tensor) -> Tensor:
    """Return `x` with infinities, the extremes of no elements, replaced by NaN, and -0.0 by 0.0; integers are unchanged."""
    return torch.where(torch.isinf(x), torch.nan, positive_zero(x)) if x.is_floating_point() else x


def positive_zero(x: Tensor) -> Tensor:
    """Return `x` with -0.0 replaced by 0.0: which of two zeros a kernel takes depends on their order, and on the kernel."""
    return torch.where(x == 0, 0.0, x) if x.is_floating_point() else x


def count_of(x: Tensor, mask: Tensor | None, axes: tuple[int, ...]) -> Tensor:
    """Return the number of finite elements: int64, in the shape of the kept axes."""
    if mask is not None:
        return mask.sum(dim=axes)
    kept = [size for axis, size in enumerate(x.shape) if axis not in axes]
    return torch.full(kept, count_along(x, axes), dtype=torch.int64, device=x.device)


def counts_of(x: Tensor, mask: Tensor | None, axes: tuple[int, ...]) -> dict[str, Tensor]:
    """Return the numbers of finite and other elements, `count` and `nonfinite`.

    Args:
        mask: of the finite ones; None if all are.
    """
    count = count_of(x, mask, axes)
    return {"count": count, "nonfinite": torch.zeros_like(count) if mask is None else count_along(x, axes) - count}


def count_if(compare: Callable[..., Tensor], x: Tensor, other: float, axes: tuple[int, ...]) -> Tensor:
    """Return for how many elements a comparison such as `torch.eq` with a number is true: int64, in the shape of the kept axes.

    Many answers on a CPU are added as float32, which holds so many exactly, in a quarter of the time that bools take.
    """
    if torch.compiler.is_compiling() or not BIG <= x.numel() <= 1 << 24 or not can_read_values(x):
        return compare(x, other).sum(dim=axes)
    return compare(x, other, out=torch.empty_like(x, dtype=torch.float32)).sum(dim=axes).to(torch.int64)


def count_nonfinite(x: Tensor, axes: tuple[int, ...], mask: Tensor | None = None) -> Tensor:
    """Return the number of NaN and infinite elements, of those that `mask` selects if there is one: int64, in the kept shape.

    On the CPU a sum tells first whether there are any.
    """
    floats = x.is_floating_point() or x.is_complex()
    x = _upcast(x)
    if not floats or (can_read_values(x) and is_finite(x.sum(dtype=torch.float32) if x.dtype.itemsize < 4 else x.sum())):
        return torch.zeros_like(count_of(x, None, axes))
    other = ~_is_finite(x)
    return (other if mask is None else other & mask).sum(dim=axes)


def count_along(x: Tensor, axes: tuple[int, ...]) -> int:
    """Return the number of elements per position of the kept axes."""
    count = 1
    for axis in axes:  # math.prod cannot be traced with dynamic sizes
        count *= x.shape[axis]
    return count


def float32_threshold(threshold: float, dtype: torch.dtype) -> float:
    """Return the float32 with which kernels compare magnitudes as plain calls do.

    Elements of float32 are compared with the nearest float32, as PyTorch does; narrower ones as in float64, which is the comparison
    with the largest float32 that is not above the threshold.
    """
    (nearest,) = struct.unpack("f", struct.pack("f", min(threshold, torch.finfo(torch.float32).max)))
    if nearest > threshold and dtype is not torch.float32:
        (bits,) = struct.unpack("i", struct.pack("f", nearest))
        (nearest,) = struct.unpack("f", struct.pack("i", bits - 1))
    return float(nearest)


def eps_of(x: Tensor) -> float:
    """Return how far apart numbers of the dtype of `x` are, relative to their size; 0 of integers."""
    return torch.finfo(x.dtype).eps if x.is_floating_point() or x.is_complex() else 0.0


def is_rounding_error(m2: Tensor, count: Tensor, mean: Tensor) -> Tensor:
    """Return whether a sum of squared deviations from the mean is no more than rounding error of equal elements."""
    return m2 <= real(count) * (8 * torch.finfo(m2.dtype).eps * mean).square()
