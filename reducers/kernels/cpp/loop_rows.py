"""Many CPU tensors in one call of the loop: each is a row of the result, joined with its row of a state."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from reducers.kernels.axes import fills_memory
from reducers.kernels.cpp.library import ELEMENTS, loop_for
from reducers.kernels.cpp.sweeping import LoopCall, call_for, needed_of, task_for
from reducers.kernels.cpp.task import Task
from reducers.kernels.cpp.threads import in_threads
from reducers.state import State

Family = tuple[Mapping[str, str], float, State]
"""The columns, the threshold and the state of one statistic, as `call_for` takes them; the tensors of the state are rows."""

_LENGTH = 8  # of a tensor that stands for all: what the loop is given depends on the length only by the number itself


class RowTables:
    """What the loop is told of many tensors: where they are, and how long. It is kept, because gradients often stay there."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths
        self.sizes = (ctypes.c_int64 * len(lengths))(*lengths)
        self._addresses: list[int] = []

    def placed(self, xs: Sequence[Tensor | None]) -> None:
        """Note where the tensors are now."""
        addresses = [0 if x is None else x.data_ptr() for x in xs]
        if addresses != self._addresses:
            self.addresses = (ctypes.c_void_p * len(addresses))(*addresses)
            self._addresses = addresses


def swept_rows(
    xs: Sequence[Tensor | None], families: Sequence[Family], before: RowTables | None
) -> tuple[list[dict[str, Tensor]], RowTables]:
    """Return the statistics of each tensor over all its elements, joined with those of a state, as rows; and the tables for later.

    One call a family. A row does not depend on the others, nor on threads. It has the bits of an update of its tensor alone, if
    that has eight elements or more.

    Args:
        xs: for each row a tensor, or None if the row stays as it is; of one dtype that `row_dtypes` takes, at least one of them. A
            tensor without elements is as good as None.
        families: for each the state is one of as many rows, or empty; then the row of a missing tensor is that of no elements.
        before: the tables of an earlier call.

    Raises:
        torch.OutOfMemoryError: there is no memory for the loop.
    """
    # Copies live until all is read.
    dense = [None if x is None or not x.numel() else x if x.is_contiguous() and not x.is_neg() else _dense(x) for x in xs]
    dtype = next(x.dtype for x in xs if x is not None)
    lengths = [0 if x is None else x.numel() for x in dense]
    tables = before if before is not None and before.lengths == lengths else RowTables(lengths)
    tables.placed(dense)
    return [_swept(dtype, tables, *family) for family in families], tables


def row_dtypes(columns: Mapping[str, str], dtype: torch.dtype) -> dict[str, torch.dtype] | None:
    """Return the dtypes of what `swept_rows` returns for tensors of this dtype, by key; None if the loop does not take them."""
    names = tuple(columns.values())
    call = _call(names, dtype)
    return None if call is None or not call.joins else dict(zip(columns, call.state_dtypes, strict=True))


def _call(names: tuple[str, ...], dtype: torch.dtype) -> LoopCall | None:
    return call_for((_LENGTH,), (1,), dtype, (0,), names)


def _swept(dtype: torch.dtype, tables: RowTables, columns: Mapping[str, str], threshold: float, state: State) -> dict[str, Tensor]:
    names, rows = tuple(columns.values()), len(tables.lengths)
    call, needed = _call(names, dtype), needed_of(names)
    assert call is not None
    assert needed is not None
    results = [torch.empty(rows, dtype=written, device="cpu") for written in call.dtypes]
    old = [state[key] for key in columns] if state else []
    old = [x if x.dtype is w and x.is_contiguous() else x.to(w).contiguous() for x, w in zip(old, call.dtypes, strict=False)]
    task = task_for(call, dtype, threshold, [result.data_ptr() for result in results])
    for place, value in zip(call.places if old else (), old, strict=True):
        task.before[place] = value.data_ptr()
    function, told = (
        loop_for("rows", ELEMENTS[dtype], needed),
        _Rows(task, ctypes.addressof(tables.addresses), ctypes.addressof(tables.sizes)),
    )
    size = sum(tables.lengths) * dtype.itemsize
    if in_threads(function, ctypes.byref(told), rows, torch.get_num_threads(), size):
        raise torch.OutOfMemoryError("no memory for the partial sums of the parameters of a step")
    if call.dtypes != call.state_dtypes:
        results = [result.to(own) for result, own in zip(results, call.state_dtypes, strict=True)]
    return dict(zip(columns, results, strict=True))


class _Rows(ctypes.Structure):
    """The struct `Rows` in the source."""

    _fields_ = (("like", Task), ("addresses", ctypes.c_void_p), ("lengths", ctypes.c_void_p))


def _dense(x: Tensor) -> Tensor:
    """Return the tensor; a copy if its elements do not fill a piece of memory, or are stored with the other sign."""
    return x if (x.is_contiguous() or fills_memory(x)) and not x.is_neg() else x.resolve_neg().contiguous()
