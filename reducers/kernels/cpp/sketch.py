"""Sums of a CPU tensor's elements with random signs in one read, by the loop in C++."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from reducers.kernels.cpp.library import ELEMENTS, sketch_for
from reducers.kernels.cpp.threads import in_threads
from reducers.kernels.precision import can_read_values

__all__ = ["looped_sketch"]


class _Sketching(ctypes.Structure):
    """The struct `Sketching` in the source."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("length", ctypes.c_int64),
        ("buckets", ctypes.c_int64),
        ("sums", ctypes.c_void_p),
    )


def looped_sketch(x: Tensor, buckets: int) -> Tensor | None:
    """Return the sums of the finite elements of `x` in so many buckets, a multiple of 64, as `reducers.kernels.sketches` does.

    Returns:
        float64 [buckets]; None if there is no loop for the dtype, or `x` is not in memory that may be read here.
    """
    elements = ELEMENTS.get(x.dtype)
    function = sketch_for(elements) if elements is not None and can_read_values(x) else None
    if function is None:
        return None
    x = x.resolve_neg().contiguous()
    sums = torch.empty(buckets, dtype=torch.float64, device="cpu")
    task = _Sketching(x.data_ptr(), x.numel(), buckets, sums.data_ptr())
    return None if in_threads(function, ctypes.byref(task), 1, torch.get_num_threads(), x.nbytes) else sums
