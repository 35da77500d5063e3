"""GraphRing: the ring of all monitors that one call of a compiled graph is for, whose rows an operator adds in C++."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from recorders._torch import NoInference
from recorders.graphs.reading import RowReader, reading_library
from recorders.graphs.sinks import KEY, GraphBatch
from recorders.ring.ring import COPIES, LeafPart, Pending, join_parts, slots_in
from reducers import Reducer, State
from reducers.kernels.locks import new_lock

MOST = 512  # the most rows of a ring
_live: weakref.WeakSet[GraphRing] = weakref.WeakSet()


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
        ("timed", ctypes.c_int64),
        ("nanoseconds", ctypes.c_int64),
    )


class GraphRing:
    """A ring of many monitors: a row is what one call of a graph adds to the states of all of them.

    Its memory is a table of the operator, which adds rows by itself as long as the ring is `ready`. An observation counts for all
    monitors by one assignment, of the count of the rows. Each monitor holds its part as a `Share`, which holds the ring: it is
    freed when the last of them has taken it into its states.

    Args:
        reader: what reads the tensors of a call.
        numbers: those of the sinks.
        anywhere: whether calls inside a backward add rows, too.

    Attributes:
        parts: what is read of the leaves of each monitor.
    """

    def __init__(self, reader: RowReader, numbers: Sequence[int], batch: GraphBatch, anywhere: bool) -> None:
        self._made = reader, numbers, batch, anywhere
        self.reader, self.numbers, self.batch = reader, numbers, batch
        self.parts: list[list[Sequence[LeafPart]]] = []
        self._places: list[list[tuple[int, int]]] = []  # where the slots of these begin and end in a row, in numbers
        place, tensors = 0, iter(reader.parts)
        for paths in batch.paths:
            own = [next(tensors) for _ in paths]
            self.parts.append(own)
            self._places.append([])
            for slots in (slots for leaf in own for slots in slots_in(leaf)):
                self._places[-1].append((place, place + slots.size // 8))
                place += slots.size // 8
        _live.add(self)
        share = COPIES.together // 2 // len(_live)  # a half, because rings that are full wait for all their monitors
        two = 2 * reader.size if 2 * reader.size <= COPIES.together else 0  # with fewer rows nothing could wait
        capacity = min(MOST, min(len(numbers) * COPIES.enough, max(share, two)) // reader.size)
        with NoInference(False):
            self._rows = torch.empty((capacity, place), dtype=torch.float64, device="cpu")
        told = (ctypes.c_int64 * len(numbers))(*numbers)
        self._struct = _Table(
            reader=ctypes.addressof(reader.struct),
            sinks=len(numbers),
            numbers=ctypes.addressof(told),
            key=batch.key.encode(),
            rows=self._rows.data_ptr(),
            capacity=capacity,
            anywhere=anywhere,
        )
        self._lock, self._next = new_lock(), None
        self._library = reading_library()
        self._library.reducers_add_table(ctypes.byref(self._struct))  # in place of one that was found by the same numbers and key
        weakref.finalize(self, _remove, self._library, self._struct, (told, reader)).atexit = False

    _next: GraphRing | None

    @property
    def capacity(self) -> int:
        """The number of rows at which it is full."""
        return int(self._struct.capacity)

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
        self._library.reducers_set_ready(ctypes.byref(self._struct), ready)

    @property
    def seconds(self) -> float:
        """The seconds that calls of the operator took which no Python saw, while they were timed."""
        return 1e-9 * int(self._struct.nanoseconds)

    def time(self, on: bool) -> None:
        """Times such calls, or no longer."""
        self._struct.timed = int(on)

    def add(self, tensors: Sequence[Tensor]) -> bool:
        """Adds a row; returns False if there is no room, or the loops do not take the tensors."""
        layout = self.reader.layout(tensors)
        if layout is None:
            return False
        addresses = (ctypes.c_void_p * len(tensors))(*(x.data_ptr() for x in tensors))
        return bool(self._library.reducers_add(ctypes.byref(self._struct), layout, addresses))

    def seal(self) -> None:
        """Makes the ring full as it is."""
        self._library.reducers_seal(ctypes.byref(self._struct))

    def successor(self) -> GraphRing:
        """Returns the ring for the next observations: this one, unless it is full."""
        with self._lock:
            if self.count < self.capacity:
                return self
            if self._next is None:
                self._next = GraphRing(*self._made)
            return self._next

    def tables(self, index: int, start: int, stop: int) -> list[Tensor]:
        """Returns what the rows from `start` to `stop` hold of the slots of one monitor."""
        return [self._rows[start:stop, first:last].contiguous() for first, last in self._places[index]]


def _remove(library: Any, struct: _Table, held: Any) -> None:
    library.reducers_remove_table(ctypes.byref(struct))


class Share(Pending):
    """What one monitor has in a `GraphRing`."""

    __slots__ = ("index", "key", "paths", "ring", "sealed")

    def __init__(self, ring: GraphRing, index: int) -> None:
        self.ring, self.index, self.sealed = ring, index, False
        self.key = self.paths = ring.batch.paths[index]

    @property
    def count(self) -> int:
        return self.ring.count

    def seal(self) -> None:
        self.ring.seal()
        self.sealed = True

    def successor(self, count: int, rings: int) -> Share:
        ring = self.ring.successor()
        return self if self.sealed or ring is self.ring else Share(ring, self.index)

    def joined(self, reducer: Reducer, states: Mapping[str, State], start: int, stop: int) -> dict[str, State]:
        return join_parts(self.ring.parts[self.index], self.ring.tables(self.index, start, stop), states, 0, stop - start)

    def observation(self, position: int) -> Any:
        return [part.slots.like for parts in self.ring.parts[self.index] for part in parts]
