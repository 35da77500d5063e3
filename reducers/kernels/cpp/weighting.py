"""Weighted statistics of a CPU tensor in one read of elements and weights, by the loop in C++."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from reducers.kernels.chunks import BIG
from reducers.kernels.columns import WEIGHTED, column_dtypes
from reducers.kernels.cpp.library import ELEMENTS, WEIGHTS, loop_for
from reducers.kernels.cpp.task import KINDS, LEAST_RUN, Task, task_of
from reducers.kernels.cpp.threads import in_threads
from reducers.state import State

_PLAIN = {Tensor, nn.Parameter}


def looped_weights(
    x: Tensor, weights: Tensor, axes: tuple[int, ...], columns: Sequence[str], state: State | None = None
) -> State | None:
    """Return weighted statistics of the finite elements of `x` over `axes`, joined with those of a state, in float64 throughout.

    Args:
        weights: real numbers from 0 up, in the shape of `x`, of any strides. What is not finite is excluded, with its element.
        columns: the keys of the state: `weight` and `squares`, the sums of the weights and of their squares; `sum`, that of weights
            times elements; `mean`, the weighted one; `m2`, the weighted sum of squared deviations from it; `nonfinite`, how many
            elements are excluded.
        state: what was observed before, with the same keys, shapes and dtypes; or nothing.

    Returns:
        `nonfinite` int64, all else float64, in the shape of the kept axes. None if there are no loops, or the dtype or the
        strides of a tensor are not supported.
    """
    x, weights = x.resolve_neg(), weights.resolve_neg()
    if {x.device.type, weights.device.type} != {"cpu"} or not {type(x), type(weights)} <= _PLAIN:
        return None
    task = _task(tuple(x.shape), x.stride(), weights.stride(), axes)
    elements, kind = ELEMENTS.get(x.dtype), WEIGHTS.get(weights.dtype)
    big = x.numel() >= BIG  # smaller ones are reduced in float64 without the loop
    function = None if elements is None or kind is None or (task is None and not big) else loop_for("weighted", elements, kind)
    if function is None:
        return None
    if task is None:
        x, weights = x.contiguous(), weights.contiguous()
        task = _task(tuple(x.shape), x.stride(), weights.stride(), axes, 1)
    if task is None:
        return None
    kept = tuple(size for axis, size in enumerate(x.shape) if axis not in axes)
    dtypes = column_dtypes(tuple(columns), torch.float64)
    found = {key: torch.empty(kept, dtype=dtype, device="cpu") for key, dtype in zip(columns, dtypes, strict=True)}
    before = state or {}
    if not {*map(type, (*found.values(), *before.values()))} <= _PLAIN:
        return None
    return found if _run(function, Task.from_buffer_copy(task), x, weights, found, before) else None


@lru_cache(maxsize=1024)
def _task(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    weight_strides: tuple[int, ...],
    axes: tuple[int, ...],
    least: int = LEAST_RUN,
) -> Task | None:
    return task_of(shape, strides, axes, weight_strides, least)


def _run(function: Any, task: Task, x: Tensor, weights: Tensor, results: State, before: State) -> bool:
    """Write the results; return False if a tensor has no memory of its own, or there is none."""
    try:
        task.x, task.mask = x.data_ptr(), weights.data_ptr()
        for column, result in results.items():
            place = WEIGHTED.index(column)
            task.results[place], task.kinds[place] = result.data_ptr(), KINDS[result.dtype]
        for column, value in before.items():
            task.before[WEIGHTED.index(column)] = value.data_ptr()
    except RuntimeError:  # such as inside vmap
        return False
    if not task.x or not task.mask:
        return False
    return in_threads(function, ctypes.byref(task), 1, torch.get_num_threads(), x.nbytes + weights.nbytes) == 0
