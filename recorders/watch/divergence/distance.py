"""How far two tensors are apart, and how far rounding may bring them apart."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from recorders._torch import autocast_is_on
from recorders.capture.operands import leaves, plain

NOISE = 4.0
"""A difference is noise if rounding each operator of the first net moves the same tensor by a fourth of it."""

_FILL = 1e4
"""Values from here on that repeat, and are the same in both tensors, fill what a mask leaves out, and measure nothing."""

_ROUNDING = 2.0  # what an operator's result may differ by, in eps of the dtype in which it is kept
_SUMMING = 16.0  # and for the order in which it was added up, in eps of the dtype in which that is done


@dataclass(frozen=True)
class Tolerance:
    """How far rounding may bring two tensors apart, relative to their largest magnitude.

    Args:
        eps: of the coarser dtype of the two nets.
        eps_of_sums: of the dtype in which kernels add: float32 for half precision.
        fixed: what a user said instead; None if he did not.
    """

    eps: float
    eps_of_sums: float
    fixed: float | None = None

    def __call__(self, operators: int) -> float:
        """For a tensor that so many operators made from equal ones: their errors are independent, so they add as squares do."""
        if self.fixed is not None:
            return self.fixed
        return (_ROUNDING * self.eps + _SUMMING * self.eps_of_sums) * math.sqrt(max(operators, 1))


def tolerance_of(types: Iterable[torch.dtype], fixed: float | None) -> Tolerance:
    """The tolerance for nets that compute in these dtypes."""
    eps = max((torch.finfo(dtype).eps for dtype in types), default=torch.finfo(torch.float32).eps)
    return Tolerance(eps, min(eps, torch.finfo(torch.float32).eps), fixed)


def number_type(net: nn.Module, batch: object) -> torch.dtype:
    """The dtype in which a net computes: of autocast if it is on, else of most of its parameters, else of the batch."""
    tensors = [*net.parameters(), *net.buffers()] or [tensor for _, tensor in leaves(batch)]
    count: Counter[torch.dtype] = Counter()
    for tensor in tensors:
        if tensor.is_floating_point():
            count[tensor.dtype] += tensor.numel()
    found = count.most_common(1)[0][0] if count else torch.float32
    device = tensors[0].device.type if tensors else "cpu"
    if autocast_is_on() and torch.is_autocast_enabled(device):
        found = max(found, torch.get_autocast_dtype(device), key=lambda dtype: torch.finfo(dtype).eps)
    return found


def distance(a: Tensor, b: Tensor) -> float:
    """Return the largest difference of two elements, relative to the largest magnitude in both tensors.

    Infinite if the shapes differ, or if one has NaN or infinity where the other has not. Of integers and truth values any
    difference is 1.

    >>> distance(torch.tensor([1.0, 4.0]), torch.tensor([1.0, 3.0]))
    0.25
    """
    if a.shape != b.shape:
        return math.inf
    if not a.numel():
        return 0.0
    with torch.no_grad():
        a, b = _dense(a), _dense(b).to(a.device)
        if not (_has_fractions(a) or _has_fractions(b)):
            return float(bool((a != b).any()))
        return _relative(_wide(a), _wide(b))


def _relative(a: Tensor, b: Tensor) -> float:
    finite = a.isfinite() & b.isfinite()
    if not bool(finite.all()):
        if bool(((a != b) & ~(a.isnan() & b.isnan()) & ~finite).any()):
            return math.inf
        a, b = a.where(finite, a.new_zeros(())), b.where(finite, b.new_zeros(()))
    difference = (a - b).abs()
    largest = float(difference.max())
    if largest == 0:
        return 0.0
    magnitude = torch.maximum(a.abs(), b.abs())
    for _ in range(2):  # of two masks, such as those of padding and of causality
        top = magnitude.max()
        fill = (magnitude == top) & (difference == 0)
        if float(top) < _FILL or int(fill.sum()) < 2:
            break
        magnitude = magnitude.masked_fill(fill, 0)
    return largest / float(magnitude.max())


def _dense(tensor: Tensor) -> Tensor:
    tensor = plain(tensor)
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def _has_fractions(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _wide(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.to(torch.float32 if tensor.device.type == "mps" else torch.float64)
