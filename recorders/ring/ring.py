"""Ring: observations that wait, each as a row, until all of them are joined into the states of a monitor.

Reducing the output of a small layer costs more than the layer itself. By the laws of reducers the result is the same if many
observations are reduced together. So an observation is written as a row of a ring, and the rows are joined when the ring is full or
somebody reads. What is written, and how rows are joined, is the codec of the ring: a copy of the observation, or the partial state
that it adds. Compiled graphs have another one, see `recorders/graphs/ring.py`.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor

from recorders._torch import NoInference
from reducers import PerObservation, Reducer, State
from reducers.core.statistic import Statistic, slot_columns
from reducers.execution.rows import reducers_in
from reducers.kernels.waiting import SLOTS, Slots, new_table, written


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


_GOLDEN = 5**0.5 / 2 - 0.5  # its multiples, without their whole parts, are spread evenly, and so are those of every second ring


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
        self._turns = itertools.count()  # whose next number no two threads get

    def capacity(self, size: int, rings: int = 1) -> int:
        """Returns how many rows of so many bytes a ring may have, as one of several of a monitor."""
        own, shared = self.enough // max(1, rings), self.together // max(1, len(self.rings))
        return min(self.most, min(own, shared) // max(1, size))

    def first(self, rows: int) -> int:
        """Returns at how many rows a ring with memory for `rows` is full for the first time, which differs from ring to ring.

        Otherwise the rings of all layers, which begin in the same step, would be joined in the same step ever after.
        """
        return rows - int(next(self._turns) * _GOLDEN % 1 * rows)


class Ring(Pending):
    """Rows of observations of one class.

    Attributes:
        codec: what is written, and how it is joined.
        rows: for how many it has memory.
        capacity: the number of rows at which they are joined.
        sealed: whether no further observation waits here.
    """

    __slots__ = ("__weakref__", "_memory", "capacity", "codec", "count", "key", "paths", "rows", "sealed")
    count: int

    def __init__(self, key: Hashable, codec: Copies | PartialStates, rings: int = 1) -> None:
        self.key, self.codec, self.paths = key, codec, codec.paths
        self.count, self.sealed = 0, False
        self._memory: Any = None
        codec.room.rings.add(self)
        self.rows = codec.room.capacity(codec.size, rings)
        self.capacity = codec.room.first(self.rows) if codec.spread else self.rows

    def add(self, tensors: Sequence[Tensor]) -> bool | None:
        """Writes an observation, and counts it by one assignment; returns whether the ring is full then, or None if not written."""
        count = self.count
        if count >= self.capacity:
            return None
        if self._memory is None:
            rows = min(self.rows, self.codec.room.capacity(self.codec.size))  # others came since this one was made
            self.rows, self.capacity = rows, min(self.capacity, rows)
            self._memory = self.codec.new_memory(rows) if rows > 1 else None
            if self._memory is None:
                self.capacity = 0
                return None
        if not self.codec.write(self._memory, tensors, count):
            return None  # it is of another class
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
        room = self.codec.room
        rows = room.capacity(self.codec.size, rings)
        if rows < 2:
            return None
        other = copy.copy(self)
        # One that is not full is renewed because of another, which other monitors may get in the same step.
        begins = self.codec.spread and self.count < self.capacity
        other.count, other.rows, other.capacity = 0, rows, room.first(rows) if begins else rows
        if rows != self.rows:
            other._memory = None
        room.rings.add(other)
        return other


COPIES = Room(3 << 16, 1 << 25, 96)
PARTIAL = Room(1 << 23, 1 << 28, 32)  # the launches that join so many are 6 % of all
PARTIAL_ON = {"cpu": Room(3 << 16, 1 << 25, 32)}  # devices that gain nothing by more memory: a join costs as much as what it saves
LOOKS = 64  # shapes and strides that are remembered: what reads them takes as much memory as a ring


# What is written is the codec of a ring: the class of observations that it takes, memory for rows of them, and how rows are joined.


class Copies:
    """Writes copies of observations with equal shapes, dtypes and devices."""

    room = COPIES
    spread = False  # they are reduced together, so bits depend on how many there are
    largest = 1 << 14  # the most bytes of an observation that is copied

    def __init__(self, paths: tuple[str, ...], tensors: Sequence[Tensor]) -> None:
        self.paths, self.size = paths, sum(x.nbytes for x in tensors)
        self._kinds = [(x.shape, x.dtype, x.device) for x in tensors]

    def new_memory(self, rows: int) -> tuple[list[Tensor], list[tuple[Tensor, ...]]]:
        with NoInference(False):  # otherwise the copies could be read in inference mode only
            stacked = [torch.empty((rows, *shape), dtype=dtype, device=device) for shape, dtype, device in self._kinds]
            return stacked, list(zip(*[buffer.unbind() for buffer in stacked], strict=True))

    def write(self, memory: tuple[list[Tensor], list[tuple[Tensor, ...]]], tensors: Sequence[Tensor], row: int) -> bool:
        for copied, x in zip(memory[1][row], tensors):  # noqa: B905 - of one length; to ask would cost each observation
            copied.copy_(x)
        return True

    def join(
        self, memory: tuple[list[Tensor], Any], reducer: Reducer, states: Mapping[str, State], start: int, stop: int
    ) -> dict[str, State]:
        return {
            path: reducer.update_all(states.get(path, {}), stacked[start:stop])
            for path, stacked in zip(self.paths, memory[0], strict=True)
        }

    def shown(self, memory: tuple[list[Tensor], Any], row: int) -> Any:
        return [stacked[row] for stacked in memory[0]]


class LeafPart(NamedTuple):
    """What an observation of a leaf adds to one of the reducers that a reducer is made of.

    Attributes:
        path: that of the leaf.
        prefix: what stands before the keys of the part in the state of the whole.
        reducer: the part.
        slots: how it is written; several statistics may have the same.
    """

    path: str
    prefix: str
    reducer: Reducer
    slots: Slots


def parts_of(
    reducer: Reducer, path: str, x: Tensor, find: Callable[[Reducer, Tensor], Slots | None] | None = None
) -> list[LeafPart] | None:
    """Returns what an observation of a leaf adds to each reducer that a reducer is made of; None if one of them takes no slots.

    A statistic that only needs columns of each observation shares the slots of another one that has them: both are read at once.

    Args:
        find: returns the slots of a reducer for tensors like `x`, if not its own `slots_for`.
    """
    if isinstance(reducer, Statistic):  # as below, in fewer calls
        slots = reducer.slots_for(x) if find is None else find(reducer, x)
        return None if slots is None else [LeafPart(path, "", reducer, slots)]
    reducers, find = reducers_in(reducer), find or (lambda one, x: one.slots_for(x))
    found = {prefix: find(one, x) for prefix, one in reducers if not _needs_columns(one)}
    for prefix, one in reducers:
        if isinstance(one, Statistic) and _needs_columns(one):
            having = (found[other] for other, host in reducers if found.get(other) is not None and _has_columns(host, one))
            found[prefix] = next(having, None) or find(one, x)
    parts = [LeafPart(path, prefix, one, slots) for prefix, one in reducers if (slots := found[prefix]) is not None]
    return parts if len(parts) == len(reducers) else None


def _needs_columns(reducer: Reducer) -> bool:
    """Whether slots of another statistic may hold all that this one needs of an observation."""
    return isinstance(reducer, Statistic) and bool(reducer.row_columns) and not reducer.columns


def _has_columns(host: Reducer, other: Statistic) -> bool:
    """Whether slots of `host` hold all that `other` needs of an observation."""
    if not isinstance(host, Statistic):
        return False
    same = host.pattern == other.pattern and (host.threshold == other.threshold or "active" not in other.row_columns)
    return same and other.row_columns <= {*slot_columns(host).values()}


def slots_in(parts: Sequence[LeafPart]) -> list[Slots]:
    """Returns the slots of the parts of a leaf, each once."""
    return [parts[0].slots] if len(parts) == 1 else [*{id(part.slots): part.slots for part in parts}.values()]


def join_parts(
    leaves: Sequence[Sequence[LeafPart]], tables: Sequence[Tensor], states: Mapping[str, State], start: int, stop: int
) -> dict[str, State]:
    """Returns new states of the leaves: `states` with the rows from `start` to `stop` of their tables, in order.

    Args:
        tables: of each leaf those of `slots_in`.
    """
    if len(leaves) == 1 and len(leaves[0]) == 1 and not leaves[0][0].prefix:  # as below, in fewer calls
        (part,) = leaves[0]
        return {part.path: part.reducer.update_slots(states.get(part.path, {}), part.slots, tables[0], start, stop)}
    found: dict[str, State] = {}
    own_tables = iter(tables)
    for parts in leaves:
        table_of = {id(slots): next(own_tables) for slots in slots_in(parts)}
        for part in parts:
            found.setdefault(part.path, {}).update(_joined_part(part, table_of[id(part.slots)], states, start, stop))
    return found


def _joined_part(part: LeafPart, table: Tensor, states: Mapping[str, State], start: int, stop: int) -> State:
    state, prefix = states.get(part.path, {}), part.prefix
    own = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
    return {prefix + key: value for key, value in part.reducer.update_slots(own, part.slots, table, start, stop).items()}


class PartialStates:
    """Writes what observations with equal kept axes and dtypes add to states, as a kernel computes it.

    An observation is one launch on a GPU, or one call of a loop on a CPU, which reads it once, and allocates nothing. Another, or
    two on a GPU, join all rows, one after another. So the bits of the states are those of one update after another, however many
    rows there are and whoever looks when. All shapes and strides are of one class whose partial states have the same form.

    Args:
        least: the bytes of the smallest observation that is written; less are copied, as those of tokens that follow a long prompt.
    """

    def __init__(self, reducer: Reducer, tensors: Sequence[Tensor], parts: Sequence[Sequence[LeafPart]], least: int = 0) -> None:
        self.least = least
        kinds = _indexed(parts)
        self.paths, self.size = tuple(own[0].path for own in parts), sum(kind.size for _, kind in kinds)
        self.room = PARTIAL_ON.get(tensors[0].device.type, PARTIAL)
        # On a GPU, where a join is a launch. What is reduced of the results of several observations has other bits then.
        self.spread = self.room is PARTIAL and not any(isinstance(part.reducer, PerObservation) for own in parts for part in own)
        self._reducer, self._parts = reducer, parts
        self._kinds = [(kind, tensors[index].device) for index, kind in kinds]
        self._forms = [kind.form for _, kind in kinds]
        self._known: dict[Any, Sequence[tuple[int, Slots]]] = {}  # what writes observations of a look, and of which tensor

    def is_for_bigger(self, tensors: Sequence[Tensor]) -> bool:
        """Returns whether this observation is copied instead; an empty one is not."""
        return 0 < bytes_of(tensors) < self.least

    def new_memory(self, rows: int) -> list[Tensor] | None:
        with NoInference(False):
            made = [new_table(kind, rows, device) for kind, device in self._kinds]
        tables = [table for table in made if table is not None]
        return tables if len(tables) == len(made) else None

    def write(self, memory: list[Tensor], tensors: Sequence[Tensor], row: int) -> bool:
        looks = tuple([(x.shape, x.stride(), x.dtype, x.device, x.is_neg()) for x in tensors])
        writers = self._known.get(looks)
        if writers is None:
            if self.is_for_bigger(tensors):
                return False
            found = _kernels_of(self._reducer, self.paths, tensors)
            if found is None:
                return False
            writers = _indexed(found)
            if [kind.form for _, kind in writers] != self._forms:
                return False  # of another class
            if len(self._known) >= LOOKS:
                self._known = {}
            self._known[looks] = writers
        for (index, writer), table in zip(writers, memory, strict=True):  # noqa: SIM110 - a generator costs each observation
            if not written(writer, table, tensors[index], row):
                return False
        return True

    def join(self, memory: list[Tensor], reducer: Reducer, states: Mapping[str, State], start: int, stop: int) -> dict[str, State]:
        return join_parts(self._parts, memory, states, start, stop)

    def shown(self, memory: list[Tensor], row: int) -> Any:
        """Returns tensors without numbers, which have the shapes and dtypes of the first observation of the class."""
        return [own[0].slots.like for own in self._parts]


def bytes_of(tensors: Sequence[Tensor]) -> int:
    """Returns the bytes of an observation."""
    size = 0
    for x in tensors:  # a sum would be two calls more
        size += x.nbytes
    return size


def partial_states_of(reducer: Reducer, paths: tuple[str, ...], tensors: Sequence[Tensor], least: int = 0) -> PartialStates | None:
    """Returns how observations like this one, of at least so many bytes, are written as partial states; None if no kernel does."""
    if tensors[0].device.type not in SLOTS:
        return None
    parts = _kernels_of(reducer, paths, tensors)
    return None if parts is None else PartialStates(reducer, tensors, parts, least)


def _indexed(parts: Sequence[Sequence[LeafPart]]) -> list[tuple[int, Slots]]:
    """Returns the slots of all leaves, each with the index of its leaf."""
    if len(parts) == 1 and len(parts[0]) == 1:
        return [(0, parts[0][0].slots)]
    return [(index, slots) for index, own in enumerate(parts) for slots in slots_in(own)]


def _kernels_of(reducer: Reducer, paths: tuple[str, ...], tensors: Sequence[Tensor]) -> list[list[LeafPart]] | None:
    with NoInference(False):
        found = []
        for path, x in zip(paths, tensors, strict=True):
            own = parts_of(reducer, path, x)
            if own is None:
                return None
            found.append(own)
    return found
