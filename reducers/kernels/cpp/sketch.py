"""Sums of CPU tensors' elements with random signs, and facts of them, in one read, by the loop in C++."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from reducers.kernels.cpp.library import ELEMENTS, sketch_for
from reducers.kernels.cpp.threads import in_threads
from reducers.kernels.parts import Runs
from reducers.kernels.precision import can_read_values

__all__ = ["looped_sketches"]

_FACTS = 5


class _Sketching(ctypes.Structure):
    """The struct `Sketching` in the source."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("runs", ctypes.c_int64),
        ("length", ctypes.c_int64),
        ("start", ctypes.c_int64),
        ("stride", ctypes.c_int64),
        ("buckets", ctypes.c_int64),
        ("sums", ctypes.c_void_p),
        ("facts", ctypes.c_void_p),
    )


def looped_sketches(xs: Tensor, buckets: int, runs: Runs) -> tuple[Tensor, Tensor] | None:
    """Return what `sketched` of `reducers.kernels.sketches` does of tensors that are stacked along the first axis, and not complex.

    Args:
        runs: of each tensor.

    Returns:
        sums, float64 [rows, buckets], and facts, float64 [rows, 5]. None if there is no loop, `xs` is not in memory that may be
        read here, or there is no memory for the sums.
    """
    function = sketch_for(ELEMENTS.get(xs.dtype, "Float64")) if can_read_values(xs) else None
    if function is None:
        return None
    xs, rows = xs.resolve_neg(), xs.shape[0]
    xs = (xs if xs.dtype in ELEMENTS else xs.to(torch.float64)).contiguous()
    sums, facts = (torch.empty((rows, columns), dtype=torch.float64, device="cpu") for columns in (buckets, _FACTS))
    task = _Sketching(xs.data_ptr(), rows, *runs, buckets, sums.data_ptr(), facts.data_ptr())
    return None if in_threads(function, ctypes.byref(task), 1, torch.get_num_threads(), xs.nbytes) else (sums, facts)
