"""How the loop goes through a tensor: along a run of neighbours in memory, which are all reduced or all kept."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from reducers.kernels.axes import Axis, merged
from reducers.kernels.columns import COLUMNS

RESULTS = tuple(dict.fromkeys(column.result or name for name, column in COLUMNS.items()))
"""What the loop returns, in the order of `enum Result` in `accumulate.h`: some columns are one result."""

KINDS = {torch.float64: 0, torch.int64: 1, torch.float32: 2}
"""The dtypes in which results are written, and what `Task` calls them."""

MOST_AXES = 8
MOST_RESULTS = 24  # of any loop, with places for more
LEAST_RUN = 8  # neighbours that are worth a run


class Axes(ctypes.Structure):
    """The struct of the same name in the source."""

    _fields_ = (
        ("number", ctypes.c_int64),
        ("sizes", ctypes.c_int64 * MOST_AXES),
        ("strides", ctypes.c_int64 * MOST_AXES),
        ("mask_strides", ctypes.c_int64 * MOST_AXES),
    )


class Task(ctypes.Structure):
    """The struct of the same name in the source."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("mask", ctypes.c_void_p),
        ("about_zero", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("length", ctypes.c_int64),
        ("mask_stride", ctypes.c_int64),
        ("kept", Axes),
        ("reduced", Axes),
        ("threshold", ctypes.c_double),
        ("results", ctypes.c_void_p * MOST_RESULTS),
        ("kinds", ctypes.c_int64 * MOST_RESULTS),
        ("before", ctypes.c_void_p * MOST_RESULTS),
    )


def task_of(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    axes: tuple[int, ...],
    mask_strides: tuple[int, ...] | None,
    least: int = LEAST_RUN,
) -> Task | None:
    """Return the sizes and strides of a task; None if there is no element, runs are shorter than `least`, or too many axes remain.

    The source divides by sizes, and a tensor without elements has no address.
    """
    if 0 in shape:
        return None
    others = strides if mask_strides is None else mask_strides
    found = [(shape[axis], strides[axis], others[axis]) for axis in range(len(shape))]
    kept = merged([found[axis] for axis in range(len(shape)) if axis not in axes])
    # The order in which elements are added is that of memory.
    reduced = merged(sorted((found[axis] for axis in axes if shape[axis] > 1), key=lambda axis: axis[1:], reverse=True))
    columns = reduced[-1][1] != 1 or (kept[-1][1] == 1 and reduced[-1][0] < least <= kept[-1][0])
    size, stride, other = (kept if columns else reduced).pop()
    if stride != 1 or (mask_strides is not None and other not in (0, 1)) or len(kept) > MOST_AXES or len(reduced) > MOST_AXES:
        return None
    if size < least:
        return None
    task = Task(columns=columns, length=size, mask_stride=0 if mask_strides is None else other)
    task.kept, task.reduced = axes_of(kept), axes_of(reduced)
    return task


def axes_of(axes: Sequence[Axis]) -> Axes:
    """Return them as the source takes them, innermost first."""
    lists = [(*values, *(0,) * (MOST_AXES - len(axes))) for values in (zip(*reversed(axes), strict=True) if axes else ((), (), ()))]
    return Axes(len(axes), *((ctypes.c_int64 * MOST_AXES)(*values) for values in lists))
