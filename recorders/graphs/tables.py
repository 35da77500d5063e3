"""Tables whose rows an operator of PyTorch adds in C++: it reads its tensors, and no Python runs."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from recorders._torch import cpu_library
from recorders.graphs.reading import Reader, reading_library

__all__ = ["KEY", "SCHEMA", "OperatorTable", "add_to_operator", "has_filled", "raise_after"]

KEY = 16  # characters at the beginning of a text by which a table is found
SCHEMA = "(Tensor[] sinks, Tensor[] tensors, str text) -> ()"
_INTERFACE = (2 << 56) | (10 << 48)  # the release of PyTorch whose stable interface the source was written for


@cache
def add_to_operator(name: str, slow: str, backward_under_way: int | None) -> bool:
    """Let an operator add rows to tables in C++, on the CPU; return False if that cannot be, because there is no compiler.

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
    """Return, inside the slow operator, whether it was called because its observation is now the last row of a table."""
    library = reading_library()
    return library is not None and bool(library.reducers_filled())


def raise_after(error: BaseException) -> None:
    """Let `error` be raised in this thread as soon as Python goes on after the operator.

    CPython makes an instance of the class that it is given, and raises what it gets.
    """
    again = type("Again", (BaseException,), {"__new__": lambda *_: error})
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(again))  # until it was raised
    _library().reducers_raise_after(again)


def _python_functions() -> Any:
    names = ("PyGILState_Ensure", "PyGILState_Release", "PyThreadState_SetAsyncExc", "Py_DecRef")
    found = (ctypes.c_void_p * len(names))()
    for index, name in enumerate(names):
        found[index] = ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p)
    return found


class _Table(ctypes.Structure):
    _fields_ = (
        ("reader", ctypes.c_void_p),
        ("sinks", ctypes.c_int64),
        ("numbers", ctypes.c_void_p),
        ("key", ctypes.c_char * KEY),
        ("rows", ctypes.c_void_p),
        ("capacity", ctypes.c_int64),
        ("anywhere", ctypes.c_int64),
        ("ready", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("calls", ctypes.c_int64),
        ("timed", ctypes.c_int64),
        ("nanoseconds", ctypes.c_int64),
    )


class OperatorTable:
    """Rows of a reader, which the operator adds as long as the table is `ready`.

    Args:
        reader: what reads the tensors.
        numbers: those that the sinks hold.
        key: what the text begins with, `KEY` characters.
        capacity: the number of rows.
        anywhere: whether calls inside a backward add rows, too.
    """

    def __init__(self, reader: Reader, numbers: Sequence[int], key: str, capacity: int, anywhere: bool) -> None:
        self.reader, self._room = reader, capacity
        self._numbers, self._key, self._anywhere = tuple(numbers), key, anywhere
        self._rows: Tensor | None = None
        self._before: tuple[weakref.ref[OperatorTable], Tensor | None] | None = None  # a table that may be freed, and its memory
        told = (ctypes.c_int64 * len(numbers))(*numbers)
        self._struct = _Table(
            reader=ctypes.addressof(reader.struct),
            sinks=len(numbers),
            numbers=ctypes.addressof(told),
            key=key.encode(),
            capacity=capacity,
            anywhere=anywhere,
        )
        self._library = _library()
        self._library.reducers_add_table(ctypes.byref(self._struct))
        weakref.finalize(self, _remove, self._library, self._struct, (told, reader)).atexit = False

    def another(self) -> OperatorTable:
        """Return a table like this one, which is empty. The operator finds it in place of this one."""
        found = OperatorTable(self.reader, self._numbers, self._key, self._room, self._anywhere)
        found._before = weakref.ref(self), self._rows
        return found

    def _memory(self) -> Tensor:
        """Return the memory for the rows: that of the table before, if it was freed, because new memory takes long to write."""
        if self._rows is None:
            if self._before is not None and self._before[0]() is None:
                self._rows = self._before[1]
            self._before = None
            if self._rows is None:
                with torch.inference_mode(False):
                    self._rows = torch.empty((self._room, self.reader.size), dtype=torch.uint8, device="cpu")
            self._struct.rows = self._rows.data_ptr()
        return self._rows

    @property
    def capacity(self) -> int:
        """The number of rows at which it is full."""
        return int(self._struct.capacity)

    def seal(self) -> None:
        """Make the table full as it is."""
        self._library.reducers_seal(ctypes.byref(self._struct))

    @property
    def count(self) -> int:
        """The number of rows that were added."""
        return int(self._struct.count)

    @property
    def ready(self) -> bool:
        """Whether the operator adds rows without Python. Once it is set to False, no other thread is still adding one."""
        return bool(self._struct.ready)

    @ready.setter
    def ready(self, ready: bool) -> None:
        if ready:
            self._memory()
        self._library.reducers_set_ready(ctypes.byref(self._struct), ready and self.reader.exact)

    @property
    def calls(self) -> int:
        """How often the operator added a row by itself since `take_calls`."""
        return int(self._struct.calls)

    @property
    def seconds(self) -> float:
        """The seconds that these calls took while the table was timed."""
        return 1e-9 * int(self._struct.nanoseconds)

    def time(self, on: bool) -> None:
        """Time such calls, or no longer."""
        self._struct.timed = int(on)

    def take_calls(self) -> int:
        """Return `calls`, and begin to count anew."""
        return int(self._library.reducers_take_calls(ctypes.byref(self._struct)))

    def add(self, row: Tensor) -> bool:
        """Add a row that the reader read; return False if there is no room."""
        self._memory()
        return bool(self._library.reducers_append(ctypes.byref(self._struct), row.data_ptr()))

    def packs(self, start: int, stop: int) -> list[Tensor]:
        """Return the packs of the rows from `start` to `stop`, each [rows, number, *shape]."""
        return self.reader.packs(self._memory()[start:stop])


def _library() -> Any:
    library = reading_library()
    assert library is not None
    return library


def _remove(library: Any, struct: _Table, held: Any) -> None:
    library.reducers_remove_table(ctypes.byref(struct))
