"""What the loops in C++ read of the tensors of one call, into one row; and the operator that adds such rows without any Python."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from recorders._torch import NoInference
from recorders.ring.ring import LeafPart, parts_of, slots_in
from reducers import Reducer, Statistic
from reducers._torch import cpu_library
from reducers.core.patterns import arrange, moves_nothing
from reducers.core.statistic import slot_columns
from reducers.execution.rows import statistics_of
from reducers.kernels.cpp.build import GRAPHS, LOOPS, READING
from reducers.kernels.cpp.library import ELEMENTS, in_order, opened
from reducers.kernels.cpp.loop_slots import LoopSlots, slots_for
from reducers.kernels.cpp.sweeping import is_built
from reducers.kernels.cpp.task import MOST_AXES, Task
from reducers.kernels.cpp.threads import pace
from reducers.kernels.locks import new_lock

SEVERAL_THREADS = 1 << 15  # elements of a tensor that several threads read together
MOST_LAYOUTS = 16  # shapes and strides that a reader remembers, as in the source
SCHEMA = "(Tensor[] sinks, Tensor[] tensors, str text) -> ()"
_INTERFACE = (2 << 56) | (10 << 48)  # the release of PyTorch whose stable interface the source was written for


@cache
def reading_library() -> Any:
    """Returns the library of the functions in `reading.cpp`; None if there is none, or PyTorch lacks a function that it needs."""
    library, _ = opened(READING, LOOPS, GRAPHS)
    if library is None or not in_order():
        return None
    address, number = ctypes.c_void_p, ctypes.c_int64
    kinds: dict[str, tuple[Any, list[Any]]] = {
        "reducers_set_pytorch": (ctypes.c_int, [address, address]),
        "reducers_set_slow": (None, [address, address, address]),
        "reducers_raise_after": (None, [ctypes.py_object]),
        "reducers_set_layout": (None, [address, number, address]),
        "reducers_add": (ctypes.c_int, [address, number, address]),
        "reducers_seal": (None, [address]),
        "reducers_set_ready": (None, [address, number]),
        "reducers_filled": (ctypes.c_int, []),
        "reducers_add_table": (None, [address]),
        "reducers_remove_table": (None, [address]),
    }
    for name, (result, arguments) in kinds.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    try:
        found = library.reducers_set_pytorch(cpu_library()._handle, ctypes.byref(pace))
    except OSError:
        return None
    return library if found else None


def is_read(reducer: Reducer, x: Tensor) -> bool:
    """Whether the loops may read tensors like `x` for a reducer, asked while a graph is traced: no size is looked at."""
    statistics = statistics_of(reducer)
    if not statistics or x.device.type != "cpu" or x.dtype not in ELEMENTS or x.ndim > MOST_AXES:
        return False
    return all(
        columns and moves_nothing(one.pattern, x.ndim) and is_built(tuple(columns.values()), x.dtype)
        for one, columns in ((one, slot_columns(one)) for _, one in statistics)
    )


def read_parts_of(reducer: Reducer, path: str, x: Tensor) -> list[LeafPart] | None:
    """Returns what is read of a leaf; None if the loops do not take it.

    Raises:
        PatternError: a pattern does not match the shape of the leaf.
    """
    return parts_of(reducer, path, x, _slots)


def _slots(reducer: Reducer, x: Tensor) -> LoopSlots | None:
    if not isinstance(reducer, Statistic) or x.is_neg() or x.numel() == 0 or x.layout is not torch.strided:
        return None
    x, axes = arrange(x, reducer.pattern)
    return slots_for(x, axes, slot_columns(reducer), reducer.threshold, least=1)


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


class _Layout(ctypes.Structure):
    _fields_ = (("metadata", ctypes.c_void_p), ("families", ctypes.c_int64), ("family", ctypes.c_void_p))


class _Reader(ctypes.Structure):
    _fields_ = (
        ("tensors", ctypes.c_int64),
        ("bytes", ctypes.c_int64),
        ("row", ctypes.c_void_p),
        ("layouts", ctypes.c_int64),
        ("layout", ctypes.c_void_p * MOST_LAYOUTS),
    )


class RowReader:
    """Reads tensors, of any sizes and strides, into a row: what each of them adds to a state, one after another.

    Args:
        parts: what is read of each tensor the first time; later only what has the same form fits.

    Attributes:
        parts: these.
        size: the bytes of a row.
        struct: what the operator in C++ knows of it; see the struct of the same name in the source.
    """

    def __init__(self, parts: Sequence[Sequence[LeafPart]]) -> None:
        self.parts, self.size = parts, sum(slots.size for own in parts for slots in slots_in(own))
        with NoInference(False):  # otherwise it could be written in inference mode only
            self._row = torch.zeros(self.size, dtype=torch.uint8, device="cpu")
        self.struct = _Reader(tensors=len(parts), bytes=self.size, row=self._row.data_ptr())
        self._layouts: dict[Any, int] = {}  # the number by which the source knows tensors with such metadata
        self._memory: dict[int, Any] = {}  # of these, which the source points to
        self._lock = new_lock()

    def layout(self, xs: Sequence[Tensor]) -> int | None:
        """Returns the number by which the source knows tensors like these; None if the loops do not take them."""
        if any(x.is_neg() for x in xs):  # which the source cannot see
            return None
        key = tuple((x.dtype, x.shape, x.stride()) for x in xs)
        with self._lock:
            found = self._layouts.get(key)
            if found is None:
                made = self._new_layout(xs)
                if made is None:
                    return None
                if len(self._layouts) == MOST_LAYOUTS:  # they are numbered anew
                    self._layouts = {}
                found = len(self._layouts)
                reading_library().reducers_set_layout(ctypes.byref(self.struct), found, ctypes.byref(made[0]))
                self._layouts[key], self._memory[found] = found, made
        return found

    def _new_layout(self, xs: Sequence[Tensor]) -> tuple[_Layout, Any] | None:
        dtypes = [number for x in xs if (number := _number_of(x.dtype)) is not None]
        if len(dtypes) < len(xs):
            return None
        families: dict[int, tuple[Any, list[tuple[bool, int, Task]]]] = {}
        start = self._row.data_ptr()
        for index, (x, parts) in enumerate(zip(xs, self.parts, strict=True)):
            for reducer, form in _forms(parts):
                slots = _slots(reducer, x)
                if slots is None or slots.form != form:
                    return None
                _, tasks = families.setdefault(id(slots.function), (slots.function, []))
                tasks.append((x.numel() < SEVERAL_THREADS, index, slots.task_at(start)))
                start += slots.size
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
        metadata = (_Metadata * len(xs))(*map(_metadata, xs, dtypes))
        return _Layout(ctypes.addressof(metadata), len(families), ctypes.addressof(told)), [metadata, told, kept]


def _forms(parts: Sequence[LeafPart]) -> list[tuple[Statistic, Any]]:
    """Of the slots of a leaf, each once: the statistic for which they were found, and their form."""
    owners = {}
    for part in reversed(parts):
        slots, one = part.slots, part.reducer
        if isinstance(slots, LoopSlots) and isinstance(one, Statistic) and slot_columns(one) == slots.columns:
            owners[id(slots)] = one
    return [(owners[id(slots)], slots.form) for slots in slots_in(parts)]


def _number_of(dtype: torch.dtype) -> int | None:
    """Returns the number that PyTorch's C interface gives a dtype; None if it gives none."""
    function = getattr(cpu_library(), f"aoti_torch_dtype_{str(dtype).removeprefix('torch.')}", None)
    return None if function is None else int(function())


def _metadata(x: Tensor, dtype: int) -> _Metadata:
    sizes, strides = (ctypes.c_int64 * MOST_AXES)(*x.shape), (ctypes.c_int64 * MOST_AXES)(*x.stride())
    return _Metadata(dtype, x.ndim, sizes, strides)


@cache
def add_to_operator(name: str, slow: str, backward_under_way: int | None) -> bool:
    """Lets an operator add rows in C++, on the CPU; returns False if that cannot be, because the library was not built.

    There is one such operator in a process.

    Args:
        name: that of an operator with the schema `SCHEMA`, such as "library::record". If a table is not ready, or full after the
            last row was added, it calls `slow`.
        slow: that of another operator with the same schema. It raises no errors, but calls `raise_after`.
        backward_under_way: the address of a function that returns -1 if no backward runs in the calling thread.
    """
    library = reading_library()
    if library is None or backward_under_way is None:
        return False
    namespace, _, rest = name.partition("::")
    try:
        pytorch = cpu_library()
        handle = ctypes.c_void_p()
        where = namespace.encode(), b"CPU", __file__.encode(), 0
        if pytorch.aoti_torch_library_init_impl(*where, ctypes.byref(handle)):
            return False
        _kept.extend((slow.encode(), _python_functions()))
        library.reducers_set_slow(_kept[0], backward_under_way, ctypes.byref(_kept[1]))
        function = ctypes.cast(library.reducers_operator, ctypes.c_void_p)
        return not pytorch.torch_library_impl(handle, rest.encode(), function, ctypes.c_uint64(_INTERFACE))
    except (OSError, AttributeError):  # the release of PyTorch has no such interface
        return False


_kept: list[Any] = []  # what the operator points to


def has_filled() -> bool:
    """Returns, inside the slow operator, whether it was called because its observation is now the last row of a table."""
    library = reading_library()
    return library is not None and bool(library.reducers_filled())


def raise_after(error: BaseException) -> None:
    """Lets `error` be raised in this thread as soon as Python goes on after the operator.

    CPython makes an instance of the class that it is given, and raises what it gets.
    """
    again = type("Again", (BaseException,), {"__new__": lambda *_: error})
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(again))  # until it was raised
    reading_library().reducers_raise_after(again)


def _python_functions() -> Any:
    names = ("PyGILState_Ensure", "PyGILState_Release", "PyThreadState_SetAsyncExc", "Py_DecRef")
    found = (ctypes.c_void_p * len(names))()
    for index, name in enumerate(names):
        found[index] = ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p)
    return found
