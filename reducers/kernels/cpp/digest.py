"""Hashes of the bits of CPU tensors in one read, by the loop in C++."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from reducers.kernels.cpp.library import digest
from reducers.kernels.cpp.threads import in_threads
from reducers.kernels.parts import Runs
from reducers.kernels.precision import can_read_values

__all__ = ["looped_digests"]


class _Digesting(ctypes.Structure):
    """The struct `Digesting` in the source."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("runs", ctypes.c_int64),
        ("bytes", ctypes.c_int64),
        ("start", ctypes.c_int64),
        ("stride", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("magnitude", ctypes.c_int64),
        ("highest", ctypes.c_int64),
        ("nan", ctypes.c_int64),
        ("results", ctypes.POINTER(ctypes.c_uint64)),
    )


def looped_digests(x: Tensor, rows: int, runs: Runs, nans: Sequence[int]) -> list[int] | None:
    """Return the two sums of the bits of each of several tensors, which are `x` one after another.

    Args:
        x: contiguous, not empty, and not complex.
        runs: of each tensor.
        nans: see `NANS` of `reducers.kernels.digests`; zeros if there is no NaN to replace.

    Returns:
        from 0 to below 2**64; None if there is no loop, or `x` is not in memory that may be read here.
    """
    function = digest() if can_read_values(x) and sys.byteorder == "little" else None
    if function is None:
        return None
    results, size = (ctypes.c_uint64 * (2 * rows))(), x.dtype.itemsize
    number, length, start, stride = runs
    task = _Digesting(x.data_ptr(), rows, number, length * size, start * size, stride * size, size, *nans, results)
    in_threads(function, ctypes.byref(task), 1, torch.get_num_threads(), x.nbytes)
    return list(results)
