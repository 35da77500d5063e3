"""Ring: observations that wait, each as a row, until all of them are joined into the states of a monitor.

Reducing the output of a small layer costs more than the layer itself. By the laws of reducers the result is the same if many
observations are reduced together. So an observation is written as a row of a ring, and the rows are joined when the ring is full or
somebody reads. What is written, and how rows are joined, is the codec of the ring: see `recorders/ring/codecs.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol
from weakref import WeakSet

from torch import Tensor

from reducers import Reducer, State

__all__ = ["Codec", "Pending", "Ring", "Room"]


class Pending:
    """Observations of some leaves that the states of a monitor do not include yet.

    Attributes:
        key: by which `MonitorState` finds it.
        paths: of the leaves.
        count: the number of observations in it. It only grows: what reads them leaves them in place, and `MonitorState` says how
            many of them the states include. So a signal handler may read while an observation is being written.
    """

    __slots__ = ()
    key: Any
    paths: tuple[str, ...]

    @property
    def count(self) -> int:
        """The number of observations in it."""
        raise NotImplementedError

    def joined(self, reducer: Reducer, states: Mapping[str, State], start: int, stop: int) -> dict[str, State]:
        """Returns new states of the leaves: `states` with the observations from `start` to `stop`."""
        raise NotImplementedError

    def observation(self, position: int) -> Any:
        """Returns one observation, for messages."""
        raise NotImplementedError

    def seal(self) -> None:
        """Lets no further observation in. One that is being written is counted all the same."""

    def successor(self, count: int, rings: int) -> Pending | None:
        """Returns what the next observations wait in, once `count` are in the states: this, unless it is full; None if nothing.

        Args:
            rings: how many rings share the memory of the monitor.
        """
        return self


class Room:
    """The memory that rings of one kind may take.

    Args:
        enough: the bytes of all rings of a monitor.
        together: the bytes of all rings of the process.
        most: the rows of a ring: more make none of them cheaper.
    """

    def __init__(self, enough: int, together: int, most: int) -> None:
        self.enough, self.together, self.most = enough, together, most
        self.rings: WeakSet[Ring] = WeakSet()

    def capacity(self, size: int, rings: int = 1) -> int:
        """Returns how many rows of so many bytes a ring may have, as one of several of a monitor."""
        own, shared = self.enough // max(1, rings), self.together // max(1, len(self.rings))
        return min(self.most, min(own, shared) // max(1, size))


class Codec(Protocol):
    """How observations of one class are written as rows, and how rows are joined.

    Attributes:
        paths: of the leaves of an observation.
        size: the bytes of a row.
        room: the memory that rings with it share.
    """

    paths: tuple[str, ...]
    size: int
    room: Room

    def new_memory(self, rows: int) -> Any:
        """Returns memory for so many rows; None if there is none."""

    def write(self, memory: Any, tensors: Sequence[Tensor], row: int) -> bool:
        """Writes an observation into a row; returns whether it is of the class, and was written."""

    def join(self, memory: Any, reducer: Reducer, states: Mapping[str, State], start: int, stop: int) -> dict[str, State]:
        """Returns new states of the leaves: `states` with the rows from `start` to `stop`, in order."""

    def shown(self, memory: Any, row: int) -> Any:
        """Returns the observation in a row, for messages."""


class Ring(Pending):
    """Rows of observations of one class.

    Attributes:
        codec: what is written, and how it is joined.
        capacity: the number of rows at which they are joined.
        sealed: whether no further observation waits here.
    """

    __slots__ = ("__weakref__", "_memory", "capacity", "codec", "count", "key", "paths", "sealed")
    count: int

    def __init__(self, key: Hashable, codec: Codec, rings: int = 1) -> None:
        self.key, self.codec, self.paths = key, codec, codec.paths
        self.count, self.sealed = 0, False
        self._memory: Any = None
        codec.room.rings.add(self)
        self.capacity = codec.room.capacity(codec.size, rings)

    def add(self, tensors: Sequence[Tensor]) -> bool | None:
        """Writes an observation, and counts it by one assignment; returns whether the ring is full then, or None if not written."""
        count = self.count
        if count >= self.capacity:
            return None
        if self._memory is None:
            self._memory = self.codec.new_memory(self.capacity)
            if self._memory is None:
                self.capacity = 0
                return None
        if not self.codec.write(self._memory, tensors, count):
            return None
        self.count = count + 1
        return count + 1 >= self.capacity

    def joined(self, reducer: Reducer, states: Mapping[str, State], start: int, stop: int) -> dict[str, State]:
        return self.codec.join(self._memory, reducer, states, start, stop)

    def observation(self, position: int) -> Any:
        return self.codec.shown(self._memory, position)

    def seal(self) -> None:
        self.sealed, self.capacity = True, min(self.count, self.capacity)
        self.codec.room.rings.discard(self)

    def successor(self, count: int, rings: int) -> Ring | None:
        return self if self.sealed or count < self.capacity else self.renewed(rings)

    def renewed(self, rings: int) -> Ring | None:
        """Returns an empty ring of this class, with the memory of this one if that is as big; None if there is room for one row."""
        capacity = self.codec.room.capacity(self.codec.size, rings)
        if capacity < 2:
            return None
        other = copy.copy(self)
        other.count, other.capacity = 0, capacity
        if capacity != self.capacity:
            other._memory = None
        self.codec.room.rings.add(other)
        return other
