"""Statistics of a CPU tensor in one read, by the loop in C++."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

from reducers.kernels.chunks import BIG
from reducers.kernels.columns import COLUMNS, Needs, column_dtypes, joinable, needs_of
from reducers.kernels.cpp.library import ELEMENTS, loop_for
from reducers.kernels.cpp.task import KINDS, LEAST_RUN, RESULTS, Task, task_of
from reducers.kernels.cpp.threads import in_threads
from reducers.kernels.precision import float32_threshold
from reducers.state import State

Asked: TypeAlias = tuple[tuple[tuple[str, str], ...], float]
"""What a kernel is asked for: the keys of a state, each with the one of `COLUMNS` that it is, and the threshold of `active`."""


def are_numbers(sizes: Sequence[int]) -> bool:
    """Return whether none of these is a symbol of a graph that is compiled for many sizes."""
    return all(type(size) is int for size in sizes)


@dataclass(frozen=True)
class LoopCall:
    """What is the same in all calls with tensors of these sizes, strides and dtypes.

    Attributes:
        task: sizes, strides, and in which dtypes results are written.
        function: the compiled loop.
        kept: the shape of a result.
        dtypes: of the results that the loop writes, in the order of the columns.
        state_dtypes: of the results as they are returned.
        joins: whether states with these columns can be joined: means and powers need those below them.
        places: where each of them is in `RESULTS`.
    """

    task: Task
    function: Any
    kept: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    state_dtypes: tuple[torch.dtype, ...]
    joins: bool
    places: tuple[int, ...]


@dataclass(frozen=True)
class LoopPlan:
    """How the loop reduces tensors and masks of some shape, strides and dtype.

    Attributes:
        call: what is the same for all of them.
        task: that of the call, with the threshold.
        keys: those of the state, in the order of the columns.
        copies: whether tensors are made contiguous first.
    """

    call: LoopCall
    task: Task
    keys: tuple[str, ...]
    copies: bool

    def run(self, x: Tensor, state: State, mask: Tensor | None = None) -> State | None:
        """Return the statistics of `x`, joined with those of a state, in float64 throughout.

        Returns:
            counts int64; `min` and `max` in the dtype of `x`; all else float64, in the shape of the kept axes. None if the state
            has other keys, shapes or dtypes than the results, a tensor has no memory of its own, or there is none for the loop.
        """
        call = self.call
        before = self._before(state) if state else ()
        if before is None:
            return None
        if self.copies:
            x, mask = x.contiguous(), None if mask is None else mask.contiguous()
        results = [x.new_empty(call.kept, dtype=dtype) for dtype in call.dtypes]
        if type(results[0]) is not Tensor:  # while fake tensors are made
            return None
        task = Task.from_buffer_copy(self.task)
        try:
            for place, result in zip(call.places, results, strict=True):
                task.results[place] = result.data_ptr()
            for place, value in zip(call.places, before, strict=False):
                task.before[place] = value.data_ptr()
            task.x, task.mask = x.data_ptr(), 0 if mask is None else mask.data_ptr()
        except RuntimeError:  # such as inside vmap
            return None
        if not task.x or (mask is not None and not task.mask):
            return None
        if in_threads(call.function, ctypes.byref(task), 1, torch.get_num_threads(), x.nbytes) != 0:
            return None
        if call.dtypes != call.state_dtypes:
            results = [result.to(dtype) for result, dtype in zip(results, call.state_dtypes, strict=True)]
        return dict(zip(self.keys, results, strict=True))

    def _before(self, state: State) -> list[Tensor] | None:
        """Return what was observed before, by column, in the dtypes that the loop writes; None if the state does not fit."""
        call = self.call
        if not call.joins or len(state) != len(self.keys):
            return None
        before = []
        for key, dtype, own in zip(self.keys, call.dtypes, call.state_dtypes, strict=True):
            value = state.get(key)
            if type(value) is not Tensor or value.dtype is not own or value.shape != call.kept:
                return None
            if not value.is_contiguous() or value.is_neg():
                return None
            before.append(value if own is dtype else value.to(dtype))
        return before


@lru_cache(maxsize=4096)
def loop_plan(
    asked: Asked,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: torch.dtype,
    axes: tuple[int, ...],
    mask_strides: tuple[int, ...] | None = None,
) -> LoopPlan | None:
    """Return how the loop reduces CPU tensors of this layout over `axes`; None if there are no loops, or they lack something.

    Args:
        mask_strides: those of masks in the shape of the tensors; None without masks.
    """
    columns, threshold = asked
    names = tuple(name for _, name in columns)
    call, copies = call_for(shape, strides, dtype, axes, names, mask_strides), False
    if call is None and math.prod(shape) >= BIG and is_built(names, dtype):  # a copy of smaller ones takes longer than it saves
        dense, copies = torch.empty(shape, device="meta").stride(), True
        call = call_for(shape, dense, dtype, axes, names, None if mask_strides is None else dense, 1)
    if call is None:
        return None
    task = task_for(call, dtype, threshold, [0] * len(names))
    return LoopPlan(call, task, tuple(key for key, _ in columns), copies)


@lru_cache(maxsize=4096)
def call_for(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: torch.dtype,
    axes: tuple[int, ...],
    names: tuple[str, ...],
    mask_strides: tuple[int, ...] | None = None,
    least: int = LEAST_RUN,
) -> LoopCall | None:
    """The call of the loop for CPU tensors of this shape, and masks of these strides."""
    elements, needed = ELEMENTS.get(dtype), needed_of(names)
    if mask_strides is not None and needed is not None and needed & Needs.SQUARES:
        needed |= Needs.SUM  # the centre is not 0 then
    task = None if elements is None or needed is None else task_of(shape, strides, axes, mask_strides, least)
    function = None if task is None or elements is None or needed is None else loop_for("sweep", elements, needed)
    if task is None or function is None:
        return None
    task.about_zero = not any(COLUMNS[name].power for name in names)
    places, dtypes, state_dtypes, joins = _results_of(names, dtype)
    for place, written in zip(places, dtypes, strict=True):
        task.kinds[place] = KINDS[written]
    kept = tuple([size for axis, size in enumerate(shape) if axis not in axes])
    return LoopCall(task, function, kept, dtypes, state_dtypes, joins, places)


@lru_cache(maxsize=256)
def _results_of(names: tuple[str, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    """Return the places, the dtypes as the loop writes them, those of a state, and whether states join; see `Call`."""
    places = tuple(map(_place, names))
    state_dtypes = column_dtypes(names, dtype)
    dtypes = tuple(torch.float32 if found is dtype else found for found in state_dtypes)
    return places, dtypes, state_dtypes, joinable(names)


def is_built(names: tuple[str, ...], dtype: torch.dtype) -> bool:
    """Return whether the loop computes these columns of tensors of a dtype, and there is a compiler for it."""
    elements, needed = ELEMENTS.get(dtype), needed_of(names)
    return elements is not None and needed is not None and loop_for("sweep", elements, needed) is not None


@lru_cache(maxsize=256)
def needed_of(names: tuple[str, ...]) -> Needs | None:
    """Return what the loop must add up for these columns; None if it cannot."""
    if not COLUMNS.keys() >= {*names}:
        return None
    needed = needs_of(names)
    one_result = len({*map(_place, names)}) < len(names)  # for two columns
    one_sum = needed & Needs.MAGNITUDES and needed & (Needs.SUM | Needs.SQUARES)
    return None if not names or one_result or one_sum else needed


def task_for(call: LoopCall, dtype: torch.dtype, threshold: float, results: Sequence[int]) -> Task:
    """Return the task of a call that writes its results to these addresses; it lacks the tensor and the mask.

    Args:
        dtype: of the tensor.
    """
    task = Task.from_buffer_copy(call.task)
    addresses = task.results
    for place, address in zip(call.places, results, strict=True):
        addresses[place] = address
    task.threshold = float32_threshold(threshold, dtype)
    return task


def _place(name: str) -> int:
    return RESULTS.index(COLUMNS[name].result or name)
