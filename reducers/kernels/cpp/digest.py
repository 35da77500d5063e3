"""Hashes of the bits of CPU tensors in one read, by the loop in C++."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from reducers.kernels.cpp.library import digest
from reducers.kernels.cpp.threads import in_threads
from reducers.kernels.precision import can_read_values

__all__ = ["looped_digests"]


class _Digesting(ctypes.Structure):
    """The struct `Digesting` in the source."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("bytes", ctypes.c_int64),
        ("first", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("magnitude", ctypes.c_int64),
        ("highest", ctypes.c_int64),
        ("nan", ctypes.c_int64),
        ("results", ctypes.POINTER(ctypes.c_uint64)),
    )


def looped_digests(x: Tensor, rows: int, first: int, nans: Sequence[int]) -> list[int] | None:
    """Return the hash of the bits of each of several tensors, which are `x` one after another.

    Args:
        x: contiguous, not empty, and not complex.
        first: the number of the first block.
        nans: see `NANS` of `reducers.kernels.digests`; zeros if there is no NaN to replace.

    Returns:
        from 0 to below 2**64; None if there is no loop, or `x` is not in memory that may be read here.
    """
    function = digest() if can_read_values(x) and sys.byteorder == "little" else None
    if function is None:
        return None
    results = (ctypes.c_uint64 * rows)()
    task = _Digesting(x.data_ptr(), rows, x.nbytes // rows, first, x.dtype.itemsize, *nans, results)
    in_threads(function, ctypes.byref(task), 1, torch.get_num_threads(), x.nbytes)
    return list(results)
