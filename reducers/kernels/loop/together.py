"""What the loop reads in a graph, in one place: results of one dtype and shape lie in one tensor, to be joined together.

Small tensors are read by one call for all of them; of big ones there are tables already. What is read is told by a text, because it
is an argument of an operator: the same graph may run in another process.
"""

from __future__ import annotations

import ast
import ctypes
import math
import threading
from array import array
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from reducers.kernels.loop.building import ELEMENTS
from reducers.kernels.loop.layout import MOST_AXES, Task
from reducers.kernels.loop.plain import plain_table
from reducers.kernels.loop.sweeping import are_numbers, column_dtype, is_built, prepared, task_for
from reducers.kernels.loop.threads import in_threads

__all__ = ["Pack", "Reading", "as_text", "kinds_of", "read_into", "read_together"]

A_THREAD = 1 << 15  # elements that are worth another thread


class Pack(NamedTuple):
    """A tensor for results: how many there are, of which shape and dtype."""

    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class Reading(NamedTuple):
    """What is read of a tensor.

    Attributes:
        is_table: whether it was read already: the tensor is a table, float64 [names, ...].
        shape: that of the tensor.
        axes: those that are reduced.
        names: the columns, as for `looped`.
        threshold: the magnitude above which an element is active.
        places: for each column the pack that its result is in, and the place there.
    """

    is_table: bool
    shape: tuple[int, ...]
    axes: tuple[int, ...]
    names: tuple[str, ...]
    threshold: float
    places: tuple[tuple[int, int], ...]


def kinds_of(x: Tensor, axes: Sequence[int], columns: Mapping[str, str]) -> dict[str, Pack] | None:
    """Return the shape and the dtype of each result, by key; None if the loop does not compute them of `x`.

    Sizes of reduced axes may be symbols of a graph; those of kept axes may not, because memory for the results is made once.

    Args:
        columns: the keys of the state, and which statistic each of them is, as for `looped`.
    """
    names = tuple(columns.values())
    kept = tuple(size for axis, size in enumerate(x.shape) if axis not in axes)
    if x.device.type != "cpu" or x.dtype not in ELEMENTS or x.ndim > MOST_AXES or not are_numbers(kept):
        return None
    if x.numel() == 0 or not is_built(names, x.dtype):
        return None
    return {key: Pack(1, kept, column_dtype(name, x.dtype)) for key, name in columns.items()}


def as_text(readings: Sequence[Reading], packs: Sequence[Pack]) -> str:
    """Return the text of what `read_together` reads, into which packs."""
    told = [(*reading[:4], reading.threshold.hex(), reading.places) for reading in readings]
    return repr((told, [(pack.number, pack.shape, str(pack.dtype).removeprefix("torch.")) for pack in packs]))


def read_together(xs: Sequence[Tensor], text: str) -> list[Tensor]:
    """Return the packs of a text of `as_text`, one tensor each, of shape [number, *shape]; none if there are no tensors to read."""
    return _reader(text).read(xs) if xs else []


def read_into(out: Sequence[Tensor], xs: Sequence[Tensor], text: str) -> None:
    """Write the same packs into tensors of their shapes and dtypes."""
    if xs:
        _reader(text).read(xs, out)


class _Group(NamedTuple):
    """Readings that one call of the loop does.

    Attributes:
        function: the loop; None if there is none for these tensors.
        indices: which of the tensors they read.
        tasks: what the loop is given: an array.
        addresses: those of the tensors, in the tasks.
    """

    function: Any
    indices: Sequence[int]
    tasks: Any
    addresses: Any


class _Reader:
    """Reads tensors of the same shapes again and again, into memory of its own, so that all addresses of results stay."""

    def __init__(self, readings: Sequence[Reading], packs: Sequence[Pack]) -> None:
        self._readings, self._kinds, self._dtypes = readings, packs, [pack.dtype for pack in packs]
        own = [torch.float32 if dtype in ELEMENTS else dtype for dtype in self._dtypes]  # the loop writes no narrower floats
        with torch.inference_mode(False):  # otherwise they could be written in inference mode only
            self._packs = [
                torch.empty((pack.number, *pack.shape), dtype=dtype, device="cpu") for pack, dtype in zip(packs, own, strict=True)
            ]
        self._tables = [index for index, reading in enumerate(readings) if reading.is_table]
        self._rows = self._found_rows()
        self._most_threads = max(1, sum(math.prod(reading.shape) for reading in readings if not reading.is_table) // A_THREAD)
        self._strides: list[tuple[int, ...]] = []
        self._fill_memory = False  # whether all tensors of these strides do
        self._scattered: list[int] = []  # which tensors have no neighbours in memory, and are copied
        self._groups: list[_Group] = []
        self._lock = threading.Lock()

    def read(self, xs: Sequence[Tensor], out: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Return the packs, or write them into `out`."""
        if not self._lock.acquire(blocking=False):  # another thread reads, or a signal handler runs while this one does
            return _Reader(self._readings, self._kinds).read(xs, out)
        try:
            self._read_all([x.resolve_neg() for x in xs] if any(map(Tensor.is_neg, xs)) else list(xs))
            if out is None:
                return [pack.to(dtype, copy=True) for pack, dtype in zip(self._packs, self._dtypes, strict=True)]
            return [own.copy_(pack) for own, pack in zip(out, self._packs, strict=True)]
        finally:
            self._lock.release()

    def _read_all(self, xs: list[Tensor]) -> None:
        # When a forward ends the caches hold what the net needs: as little as possible is asked of each tensor, by few calls.
        fill_memory = all(map(Tensor.is_contiguous, xs))
        if not (fill_memory and self._fill_memory):
            strides = [x.stride() for x in xs]
            if strides != self._strides:
                self._prepare(xs)
                self._strides, self._fill_memory = strides, fill_memory
        for index in self._scattered:
            xs[index] = xs[index].contiguous()
        for group in self._groups:
            self._read(group, xs)
        if self._tables:
            self._copy_tables([xs[index] for index in self._tables])

    def _read(self, group: _Group, xs: Sequence[Tensor]) -> None:
        group.addresses[:] = array("q", [xs[index].data_ptr() for index in group.indices])
        threads = min(torch.get_num_threads(), self._most_threads)
        tasks, number = ctypes.byref(group.tasks), len(group.indices)
        if group.function is None or in_threads(group.function, tasks, number, threads, 4 * A_THREAD * self._most_threads):
            for index in group.indices:
                self._read_plainly(index, xs[index])

    def _copy_tables(self, tables: Sequence[Tensor]) -> None:
        numbers = torch.cat([table.reshape(-1) for table in tables])
        for pack, (places, rows) in self._rows.items():
            own = self._packs[pack]
            own.index_copy_(0, places, numbers[rows].to(own.dtype).view(-1, *own.shape[1:]))

    def _found_rows(self) -> dict[int, tuple[Tensor, Tensor]]:
        """Return for each pack the places that rows of tables are for, and where in all tables, laid end to end, these are."""
        found: dict[int, tuple[list[int], list[int]]] = {}
        start = 0
        for index in self._tables:
            for pack, place in self._readings[index].places:
                size = self._packs[pack][0].numel()
                places, rows = found.setdefault(pack, ([], []))
                places.append(place)
                rows += range(start, start + size)
                start += size
        return {pack: (_indices(places), _indices(rows)) for pack, (places, rows) in found.items()}

    def _read_plainly(self, index: int, x: Tensor) -> None:
        reading = self._readings[index]
        table = plain_table(x, reading.axes, reading.names, reading.threshold, None)
        for row, (pack, place) in zip(table, reading.places, strict=True):
            self._packs[pack][place].copy_(row)

    def _prepare(self, xs: Sequence[Tensor]) -> None:
        """Write tasks for tensors of these strides."""
        self._scattered, found = [], dict[int, tuple[Any, list[int], list[Task]]]()
        for index, (x, reading) in enumerate(zip(xs, self._readings, strict=True)):
            if reading.is_table:
                continue
            call = prepared(x, reading.axes, reading.names, None, least=1)
            if call is None:
                self._scattered.append(index)
                call = prepared(x.contiguous(), reading.axes, reading.names, None, least=1)
            addresses = [self._packs[pack][place].data_ptr() for pack, place in reading.places]
            function = None if call is None else call.function
            _, indices, tasks = found.setdefault(id(function), (function, [], []))
            indices.append(index)
            tasks.append(Task() if call is None else task_for(call, x.dtype, reading.threshold, addresses))
        arrays = [(function, indices, (Task * len(tasks))(*tasks)) for function, indices, tasks in found.values()]
        self._groups = [_Group(function, indices, tasks, _addresses(tasks)) for function, indices, tasks in arrays]


def _addresses(tasks: Any) -> memoryview:
    """Return the addresses of the tensors in an array of tasks, as numbers: `x` is the first field of a task."""
    return memoryview(tasks).cast("B").cast("q")[:: ctypes.sizeof(Task) // 8]


def _indices(numbers: list[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


@lru_cache(maxsize=1024)
def _reader(text: str) -> _Reader:
    told, packs = ast.literal_eval(text)
    readings = [Reading(done, shape, axes, names, float.fromhex(limit), places) for done, shape, axes, names, limit, places in told]
    return _Reader(readings, [Pack(number, shape, getattr(torch, dtype)) for number, shape, dtype in packs])
