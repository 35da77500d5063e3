"""Sums of CPU tensors' elements with random signs, and facts of them, in one read, by the loop in C++."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from reducers.kernels.cpp.library import ELEMENTS, loop_for
from reducers.kernels.cpp.threads import in_threads
from reducers.kernels.parts import Runs
from reducers.kernels.precision import can_read_values

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
    function = loop_for("sketch", ELEMENTS.get(xs.dtype, "Float64")) if can_read_values(xs) else None
    if function is None:
        return None
    xs, rows = xs.resolve_neg(), xs.shape[0]
    xs = (xs if xs.dtype in ELEMENTS else xs.to(torch.float64)).contiguous()
    sums, facts = (torch.empty((rows, columns), dtype=torch.float64, device="cpu") for columns in (buckets, _FACTS))
    task = _Sketching(xs.data_ptr(), rows, *runs, buckets, sums.data_ptr(), facts.data_ptr())
    return None if in_threads(function, ctypes.byref(task), 1, torch.get_num_threads(), xs.nbytes) else (sums, facts)


class SketchWriter:
    """Writes facts and sums of whole contiguous observations of one shape and dtype, float64 [5] and [buckets], to addresses.

    Args:
        like: a tensor of this shape and dtype, on any device; its dtype is one of `ELEMENTS`.
        function: what `loop_for` returns for it.
    """

    def __init__(self, like: Tensor, buckets: int, function: Any) -> None:
        self._function, self._bytes = function, like.nbytes
        self._task = _Sketching(0, 1, 1, like.numel(), 0, 0, buckets, 0, 0)

    def write_at(self, facts: int, sums: int, x: Tensor) -> bool:
        """Write facts and sums of an observation, which must be like `like`; False if there is no memory to read, or to work in."""
        task = _Sketching.from_buffer_copy(self._task)
        try:
            task.x, task.facts, task.sums = x.data_ptr(), facts, sums
        except RuntimeError:  # such as inside vmap
            return False
        return bool(task.x) and in_threads(self._function, ctypes.byref(task), 1, torch.get_num_threads(), self._bytes) == 0
