"""Slots of a CPU: the loop writes the statistics of an observation into a table, and another joins many of them in one call."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from reducers.kernels.cpp.library import join
from reducers.kernels.cpp.sweeping import LoopCall, call_for, task_for
from reducers.kernels.cpp.task import LEAST_RUN, Task
from reducers.kernels.cpp.threads import in_threads
from reducers.state import State


class LoopSlots:
    """How observations of one shape, strides and dtype are written into the slots of a table, and joined: see `Slots`.

    The slots of all shapes with equal kept axes have one form: nothing else of an observation is in them.

    A table is float64 [slots, columns, kept positions]. It holds what an update would join to a state, and the join is that of an
    update. So the bits of the state are those of one update after another, whenever they are joined.
    """

    def __init__(
        self, like: Tensor, axes: tuple[int, ...], columns: Mapping[str, str], threshold: float, call: LoopCall, join_rows: Any
    ) -> None:
        self.like, self.axes, self.columns = like, axes, dict(columns)
        self._call, self._join, self.function = call, join_rows, call.function
        self._positions = math.prod(call.kept)
        self.form = call.kept, like.dtype
        self.size = 8 * len(columns) * self._positions
        self._places = (ctypes.c_int64 * len(columns))(*call.places)
        self._task = task_for(call, like.dtype, threshold, [0] * len(columns))
        self._task.kinds = type(self._task.kinds)()  # all float64

    def new_table(self, slots: int, device: torch.device) -> Tensor:
        """Return a table of so many slots."""
        return torch.empty((slots, len(self.columns), self._positions), dtype=torch.float64, device=device)

    def write(self, table: Tensor, x: Tensor, slot: int) -> bool:
        """Write the statistics of an observation, which must be like `like`, into a slot; nothing is allocated.

        Returns:
            False if the tensor has no memory of its own, or there is none for the loop.
        """
        try:
            start, task = x.data_ptr(), self.task_at(table.data_ptr() + slot * self.size)
        except RuntimeError:  # such as inside vmap
            return False
        task.x, size = start, self.like.numel() * self.like.itemsize
        return bool(start) and in_threads(self.function, ctypes.byref(task), 1, torch.get_num_threads(), size) == 0

    def task_at(self, address: int) -> Task:
        """Return the task that writes the statistics to this address; it lacks the tensor."""
        task = Task.from_buffer_copy(self._task)
        for number, place in enumerate(self._call.places):
            task.results[place] = address + 8 * number * self._positions
        return task

    def join(self, table: Tensor, state: State, first: int, last: int) -> State:
        """Return a state joined with the slots from `first` to `last`, in order. An empty state takes one slot or more."""
        call = self._call
        results = [table.new_empty(call.kept, dtype=dtype) for dtype in call.dtypes]
        before = [state[key].to(dtype) for key, dtype in zip(self.columns, call.dtypes, strict=True)] if state else []
        task = task_for(call, self.like.dtype, 0.0, [result.data_ptr() for result in results])
        for place, value in zip(call.places if before else (), before, strict=True):
            task.before[place] = value.data_ptr()
        start = table.data_ptr() + first * self.size
        self._join(ctypes.byref(task), start, last - first, self._places, len(results), self._positions)
        found = [result.to(dtype) for result, dtype in zip(results, call.state_dtypes, strict=True)]
        return dict(zip(self.columns, found, strict=True))

    def rows(self, table: Tensor, first: int, last: int) -> State:
        """Return what the slots from `first` to `last` hold, by column, stacked along a new first axis."""
        held = table[first:last].reshape(last - first, len(self.columns), *self._call.kept).unbind(1)
        return {name: x.to(dtype) for name, x, dtype in zip(self.columns.values(), held, self._call.state_dtypes, strict=True)}


def slots_for(
    x: Tensor, axes: Sequence[int], columns: Mapping[str, str], threshold: float, least: int = LEAST_RUN
) -> LoopSlots | None:
    """Return how observations like `x` are written and joined; None if the loop does not take them, or there is none.

    Args:
        columns: the keys of the state, and which statistic each of them is, as for `call_for`.
        threshold: the magnitude above which an element is active.
        least: the neighbours in memory that are worth a run of the loop.
    """
    return _slots_for(tuple(x.shape), x.stride(), x.dtype, tuple(axes), tuple(columns.items()), threshold, least)


@lru_cache(maxsize=1024)
def _slots_for(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: torch.dtype,
    axes: tuple[int, ...],
    columns: tuple[tuple[str, str], ...],
    threshold: float,
    least: int,
) -> LoopSlots | None:
    names = tuple(name for _, name in columns)
    call = call_for(shape, strides, dtype, axes, names, None, least)
    if call is None or not call.joins:
        return None
    like = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    return LoopSlots(like, axes, dict(columns), threshold, call, join())
