"""Hashes of the bits of CPU tensors in one read, by the loop in C++, which returns them, or writes them into a table."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from reducers.kernels.cpp.library import loop_for
from reducers.kernels.cpp.threads import in_threads
from reducers.kernels.parts import Runs
from reducers.kernels.precision import can_read_values


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
        ("kinds", ctypes.c_uint64 * 2),
        ("results", ctypes.c_void_p),
    )


def looped_digests(x: Tensor, rows: int, runs: Runs, nans: Sequence[int], kinds: Sequence[int]) -> list[int] | None:
    """Return the two sums of the bits of each of several tensors, which are `x` one after another.

    Args:
        x: contiguous, not empty, and not complex.
        runs: of each tensor.
        nans: see `NANS` of `reducers.kernels.digests`; zeros if there is no NaN to replace.
        kinds: what is added to the two sums of each tensor.

    Returns:
        from 0 to below 2**64; None if there is no loop, or `x` is not in memory that may be read here.
    """
    function = loop_for("digest") if can_read_values(x) and sys.byteorder == "little" else None
    if function is None:
        return None
    results, size = (ctypes.c_uint64 * (2 * rows))(), x.dtype.itemsize
    number, length, start, stride = runs
    places = length * size, start * size, stride * size
    task = _Digesting(x.data_ptr(), rows, number, *places, size, *nans, (ctypes.c_uint64 * 2)(*kinds), ctypes.addressof(results))
    in_threads(function, ctypes.byref(task), 1, torch.get_num_threads(), x.nbytes)
    return list(results)


class DigestSlots:
    """How hashes of whole contiguous observations of one shape and dtype wait in a table, int64 [slots, 2]: see `Slots`."""

    size = 16
    form = "digest"

    def __init__(self, like: Tensor, nans: Sequence[int], kinds: Sequence[int], function: Any) -> None:
        self.like, self._bytes, self._function = like, like.numel() * like.itemsize, function
        self._task = _Digesting(0, 1, 1, self._bytes, 0, 0, like.itemsize, *nans, (ctypes.c_uint64 * 2)(*kinds), 0)

    def new_table(self, slots: int, device: torch.device) -> Tensor:
        """Return a table of so many slots."""
        return torch.empty((slots, 2), dtype=torch.int64, device=device)

    def write(self, table: Tensor, x: Tensor, slot: int) -> bool:
        """Write the hash of an observation, which must be like `like`, into a slot; False if it has no memory of its own."""
        return self.write_at(table.data_ptr() + self.size * slot, x)

    def words(self, table: Tensor, first: int, last: int) -> Tensor:
        """Return the hashes in the slots from `first` to `last`."""
        return table[first:last].clone()

    def write_at(self, address: int, x: Tensor) -> bool:
        """Write the hash of an observation to an address; see `write`."""
        task = _Digesting.from_buffer_copy(self._task)
        try:
            task.x, task.results = x.data_ptr(), address
        except RuntimeError:  # such as inside vmap
            return False
        return bool(task.x) and in_threads(self._function, ctypes.byref(task), 1, torch.get_num_threads(), self._bytes) == 0
