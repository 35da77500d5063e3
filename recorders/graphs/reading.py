"""What graphs hand over on a CPU, read in C++ by one call: results of one dtype and shape lie next to each other, to be joined.

What is read is told by a text, because it is an argument of an operator: the same graph may run in another process.
"""

from __future__ import annotations

import ast
import ctypes
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from reducers.combinators.rows import statistics_of
from reducers.core.inputs import observation
from reducers.core.patterns import arrange
from reducers.core.reducer import Reducer
from reducers.kernels.axes import merged
from reducers.kernels.dispatch import BIG_IN_GRAPH
from reducers.kernels.locks import new_lock
from reducers.kernels.loop.building import ELEMENTS
from reducers.kernels.loop.layout import MOST_AXES, Axes, Task, axes_of
from reducers.kernels.loop.libraries import library as library_of
from reducers.kernels.loop.plain import plain_table
from reducers.kernels.loop.sweeping import are_numbers, column_dtype, is_built, prepared, task_for
from reducers.kernels.loop.threads import pace

__all__ = [
    "GraphObservation",
    "Pack",
    "Reader",
    "TensorReading",
    "as_text",
    "copied_observation",
    "graph_observations",
    "is_faster_outside",
    "kinds_of",
    "reader_of",
    "reading_library",
]

SEVERAL_THREADS = 1 << 15  # elements of a tensor that several threads read together
MOST_LAYOUTS = 16  # shapes and strides that a reader remembers, as in the source


class Pack(NamedTuple):
    """A tensor for results: how many there are, of which shape and dtype."""

    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class TensorReading(NamedTuple):
    """What is read of a tensor.

    Attributes:
        axes: those that are reduced.
        names: the columns, as for `looped`; none if the tensor is kept as it is.
        threshold: the magnitude above which an element is active.
        places: for each column the pack that its result is in, and the place there.
    """

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
    if x.numel() == 0 or not is_built(names, x.dtype) or reading_library() is None:
        return None
    return {key: Pack(1, kept, column_dtype(name, x.dtype)) for key, name in columns.items()}


def as_text(readings: Sequence[TensorReading], packs: Sequence[Pack]) -> str:
    """Return the text of what a reader reads, into which packs."""
    told = [(reading.axes, reading.names, reading.threshold.hex(), reading.places) for reading in readings]
    return repr((told, [(pack.number, pack.shape, str(pack.dtype).removeprefix("torch.")) for pack in packs]))


@cache
def reading_library() -> Any:
    """Return the library of the functions in `reading.cpp`; None if it cannot be compiled."""
    library = library_of(Path(__file__).parent / "reading.cpp", [], ["libtorch_cpu.so"])
    if library is None:
        return None
    address, number = ctypes.c_void_p, ctypes.c_int64
    kinds: dict[str, tuple[Any, list[Any]]] = {
        "reducers_set_pace": (None, [address]),
        "reducers_set_slow": (None, [address, address, address]),
        "reducers_raise_after": (None, [ctypes.py_object]),
        "reducers_read": (ctypes.c_int, [address, number, address, address]),
        "reducers_set_layout": (None, [address, number, address]),
        "reducers_append": (ctypes.c_int, [address, address]),
        "reducers_seal": (None, [address]),
        "reducers_set_ready": (None, [address, number]),
        "reducers_filled": (ctypes.c_int, []),
        "reducers_take_calls": (number, [address]),
        "reducers_add_table": (None, [address]),
        "reducers_remove_table": (None, [address]),
    }
    for name, (result, arguments) in kinds.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    library.reducers_set_pace(ctypes.byref(pace))
    return library


@lru_cache(maxsize=1024)
def reader_of(text: str) -> Reader:
    """Return the reader of a text of `as_text`."""
    told, packs = ast.literal_eval(text)
    readings = [TensorReading(axes, names, float.fromhex(limit), places) for axes, names, limit, places in told]
    return Reader(readings, [Pack(number, shape, getattr(torch, dtype)) for number, shape, dtype in packs])


class _Metadata(ctypes.Structure):
    _fields_ = (
        ("dtype", ctypes.c_int64),
        ("axes", ctypes.c_int64),
        ("sizes", ctypes.c_int64 * MOST_AXES),
        ("strides", ctypes.c_int64 * MOST_AXES),
    )


class _Family(ctypes.Structure):
    _fields_ = (
        ("loop", ctypes.c_void_p),
        ("number", ctypes.c_int64),
        ("big", ctypes.c_int64),
        ("tasks", ctypes.c_void_p),
        ("sources", ctypes.c_void_p),
    )


class _Copy(ctypes.Structure):
    _fields_ = (
        ("source", ctypes.c_int64),
        ("place", ctypes.c_int64),
        ("bytes", ctypes.c_int64),
        ("element", ctypes.c_int64),
        ("axes", Axes),
    )


class _Layout(ctypes.Structure):
    _fields_ = (
        ("metadata", ctypes.c_void_p),
        ("families", ctypes.c_int64),
        ("copies", ctypes.c_int64),
        ("family", ctypes.c_void_p),
        ("copy", ctypes.c_void_p),
    )


class _Reader(ctypes.Structure):
    _fields_ = (
        ("tensors", ctypes.c_int64),
        ("bytes", ctypes.c_int64),
        ("row", ctypes.c_void_p),
        ("layouts", ctypes.c_int64),
        ("layout", ctypes.c_void_p * MOST_LAYOUTS),
    )


class Reader:
    """Reads tensors, of any sizes and strides, into a row: the bytes of all packs.

    Attributes:
        size: the bytes of a row.
        struct: what the operator in C++ knows of it; see the struct of the same name in the source.
        exact: whether the loops have read all tensors so far as they were given.
    """

    def __init__(self, readings: Sequence[TensorReading], packs: Sequence[Pack]) -> None:
        self._readings, self._packs = readings, packs
        found = {pack for reading in readings if reading.names for pack, _ in reading.places}
        # The loop writes no narrower floats.
        self._dtypes = [torch.float32 if n in found and pack.dtype in ELEMENTS else pack.dtype for n, pack in enumerate(packs)]
        self._places, self.size = [], 0
        for pack, dtype in zip(packs, self._dtypes, strict=True):
            self._places.append(self.size)
            self.size += -(-pack.number * math.prod(pack.shape) * dtype.itemsize // 8) * 8
        with torch.inference_mode(False):  # otherwise they could be written in inference mode only
            self._row = torch.zeros(self.size, dtype=torch.uint8, device="cpu")
        self._views = [view[0] for view in self._wide(self._row.unsqueeze(0))]
        self.struct = _Reader(tensors=len(readings), bytes=self.size, row=self._row.data_ptr())
        self.exact = True
        self._layouts: dict[Any, int] = {}  # the number by which the source knows tensors with such metadata
        self._memory: dict[int, Any] = {}  # of these, which the source points to
        self._lock = new_lock()

    def packs(self, rows: Tensor) -> list[Tensor]:
        """Return the packs of rows, uint8 [rows, bytes], each [rows, number, *shape]; most are views."""
        wide = self._wide(rows)
        return [view.to(pack.dtype) for view, pack in zip(wide, self._packs, strict=True)]

    def _wide(self, rows: Tensor) -> list[Tensor]:
        found = []
        for pack, dtype, start in zip(self._packs, self._dtypes, self._places, strict=True):
            shape = (pack.number, *pack.shape)
            numbers = rows[:, start : start + math.prod(shape) * dtype.itemsize].view(dtype)
            found.append(numbers.view(len(rows), *shape))
        return found

    def read(self, xs: Sequence[Tensor]) -> Tensor:
        """Return a row of the results; also if there is no compiler, or no memory for the loops.

        Args:
            xs: tensors on the CPU with memory of their own.
        """
        found = torch.empty(self.size, dtype=torch.uint8, device="cpu")
        with self._lock:
            tensors = [x.resolve_neg() for x in xs]
            layout = self._layout(tensors)
            if layout is None:  # the loops take no tensor without neighbours in memory
                tensors = [x.contiguous() for x in tensors]
                layout = self._layout(tensors)
            self.exact = self.exact and layout is not None and all(map(_same_memory, tensors, xs))
            library = reading_library()
            if layout is not None and library is not None:
                addresses = (ctypes.c_void_p * len(tensors))(*(x.data_ptr() for x in tensors))
                if not library.reducers_read(ctypes.byref(self.struct), layout, addresses, found.data_ptr()):
                    return found
        views = [view[0] for view in self._wide(found.unsqueeze(0))]
        for x, reading in zip(tensors, self._readings, strict=True):
            table = plain_table(x, reading.axes, reading.names, reading.threshold, None) if reading.names else [x]
            for row, (pack, place) in zip(table, reading.places, strict=True):
                views[pack][place].copy_(row)
        return found

    def _layout(self, xs: Sequence[Tensor]) -> int | None:
        """Return the number by which the source knows tensors like these; None if the loops do not take them."""
        key = tuple((x.dtype, x.shape, x.stride()) for x in xs)
        found = self._layouts.get(key)
        if found is None:
            library = reading_library()
            made = None if library is None else self._made_layout(xs, library)
            if made is None:
                return None
            if len(self._layouts) == MOST_LAYOUTS:  # they are numbered anew
                self._layouts = {}
            found = len(self._layouts)
            library.reducers_set_layout(ctypes.byref(self.struct), found, ctypes.byref(made[0]))
            self._layouts[key], self._memory[found] = found, made
        return found

    def _made_layout(self, xs: Sequence[Tensor], library: Any) -> tuple[_Layout, Any] | None:
        dtypes = [number for x in xs if (number := _number_of(library, x.dtype)) is not None]
        if len(dtypes) < len(xs):
            return None
        families: dict[int, tuple[Any, list[tuple[bool, int, Task]]]] = {}
        copies: list[_Copy] = []
        for index, (x, reading) in enumerate(zip(xs, self._readings, strict=True)):
            if not reading.names:
                copies.append(_copy(index, x, self._place(*reading.places[0])))
                continue
            call = prepared(x, reading.axes, reading.names, None, least=1)
            if call is None:
                return None
            addresses = [self._views[pack][place].data_ptr() for pack, place in reading.places]
            task = task_for(call, x.dtype, reading.threshold, addresses)
            _, tasks = families.setdefault(id(call.function), (call.function, []))
            tasks.append((x.numel() < SEVERAL_THREADS, index, task))
        kept: list[Any] = []
        told = (_Family * len(families))()
        for family, (function, found) in zip(told, families.values(), strict=True):
            found.sort(key=lambda one: one[:2])
            own = (Task * len(found))(*(task for *_, task in found))
            sources = (ctypes.c_int64 * len(found))(*(index for _, index, _ in found))
            family.loop, family.tasks = ctypes.cast(function, ctypes.c_void_p), ctypes.addressof(own)
            family.number, family.big = len(found), sum(not small for small, *_ in found)
            family.sources = ctypes.addressof(sources)
            kept += [own, sources, function]
        metadata, kept_copies = (_Metadata * len(xs))(*map(_metadata, xs, dtypes)), (_Copy * len(copies))(*copies)
        layout = _Layout(
            ctypes.addressof(metadata), len(families), len(copies), ctypes.addressof(told), ctypes.addressof(kept_copies)
        )
        return layout, [metadata, told, kept, kept_copies]

    def _place(self, pack: int, place: int) -> int:
        """Return where in a row a result of a pack begins."""
        return self._places[pack] + place * math.prod(self._packs[pack].shape) * self._dtypes[pack].itemsize


def _copy(source: int, x: Tensor, place: int) -> _Copy:
    axes = merged((size, stride, stride) for size, stride in zip(x.shape, x.stride(), strict=True))
    run = axes.pop()[0] if axes[-1][1] == 1 else 1
    return _Copy(source, place, run * x.itemsize, x.itemsize, axes_of(axes))


def _number_of(library: Any, dtype: torch.dtype) -> int | None:
    """Return the number that PyTorch's C interface gives a dtype; None if it gives none."""
    function = getattr(library, f"aoti_torch_dtype_{str(dtype).removeprefix('torch.')}", None)
    return None if function is None else int(function())


def _metadata(x: Tensor, dtype: int) -> _Metadata:
    sizes, strides = (ctypes.c_int64 * MOST_AXES)(*x.shape), (ctypes.c_int64 * MOST_AXES)(*x.stride())
    return _Metadata(dtype, x.ndim, sizes, strides)


def _same_memory(x: Tensor, other: Tensor) -> bool:
    return x.data_ptr() == other.data_ptr() and not other.is_neg()


class GraphObservation(NamedTuple):
    """An observation as a statistic arranges it, for a `Reader`.

    Attributes:
        x: the tensor.
        axes: those that are reduced.
        columns: the keys of the state, and which statistic each of them is; none if the tensor is kept as it is.
        threshold: see `Statistic.threshold`.
        kinds: the shape and the dtype of what the state will hold, by key; by "" those of the tensor that is kept.
    """

    x: Tensor
    axes: tuple[int, ...]
    columns: Mapping[str, str]
    threshold: float
    kinds: Mapping[str, Pack]


def graph_observations(reducer: Reducer, x: Tensor) -> list[GraphObservation] | None:
    """Return the observation as each of the statistics that `reducer` is made of arranges it, with the keys of the reducer's state.

    Returns:
        None if the loop does not compute all of them, or there is no compiler for it.

    Raises:
        PatternError: a pattern does not match the shape of `x`.
    """
    found = []
    for prefix, statistic in statistics_of(reducer) or ():
        if not statistic.columns:
            return None
        arranged, axes = arrange(observation(statistic, (x,)), statistic.pattern)
        columns = {prefix + key: column for key, column in statistic.columns.items()}
        kinds = kinds_of(arranged, axes, columns)
        if kinds is None:
            return None
        found.append(GraphObservation(arranged.resolve_neg(), axes, columns, statistic.threshold, kinds))
    return found or None


def copied_observation(reducer: Reducer, x: Tensor) -> list[GraphObservation] | None:
    """Return the observation as it is, in the form of the same, if it is small and `reducer` takes many at once; otherwise None."""
    small = are_numbers(x.shape) and 0 < x.numel() < BIG_IN_GRAPH and x.ndim <= MOST_AXES
    if not small or x.device.type != "cpu" or not reducer.batchable or reading_library() is None:
        return None
    return [GraphObservation(x.resolve_neg().resolve_conj(), (), {}, 0.0, {"": Pack(1, tuple(x.shape), x.dtype)})]


def is_faster_outside(xs: Iterable[Tensor]) -> bool:
    """Return whether an update outside of the graph takes less than what the compiler makes of it: if tensors on a CPU are big.

    Sorting and counting bins take several times as long in a graph, and minutes to compile in a net of many layers.
    """
    found = list(xs)
    on_cpu = all(x.device.type == "cpu" for x in found)
    return on_cpu and (not are_numbers([size for x in found for size in x.shape]) or sum(x.numel() for x in found) >= BIG_IN_GRAPH)
