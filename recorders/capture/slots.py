"""PendingSlots: observations that wait as partial statistics, in the slots of a table: big ones, or if there is no room for copies.

An observation is one launch on a GPU, or one call of a loop on a CPU, which reads it once, and allocates nothing. When all slots
are full, or somebody looks, another joins them, one after another. So the bits of the states are those of one update after another,
however many slots there are and whoever looks when. Observations that are not like those before are not accepted: those before are
joined first then.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from reducers import Reducer, State
from reducers.core.statistic import Statistic, slots_of, update_slots
from reducers.kernels.waiting import SLOTS, Slots, new_table, written

__all__ = ["PendingSlots", "new_slots"]

MOST = 32  # the most slots of a table: the launch that joins them is 3 % of all then
ENOUGH = 1 << 23  # the bytes of the tables of one monitor
TOGETHER = 1 << 28  # the bytes of all tables of the process
ROOM = {"cpu": (3 << 16, 1 << 25)}  # both, on devices that gain nothing by more: a join costs as much as the call that it saves

_all_tables: WeakSet[PendingSlots] = WeakSet()


class PendingSlots:
    """A `Pending` of observations that have the same leaves, shapes, strides, dtypes and devices.

    Attributes:
        paths: the paths of the leaves.
        size: the bytes of one observation in the tables.
        capacity: the number of slots.
        count: the number of slots in use; a slot that is not counted is written again.
    """

    __slots__ = ("__weakref__", "_kinds", "_looks", "_room", "_tables", "capacity", "count", "paths", "size")
    exact = True

    def __init__(self, paths: tuple[str, ...], tensors: Sequence[Tensor], kinds: Sequence[Slots]) -> None:
        self.paths, self.count, self.size = paths, 0, sum(kind.size for kind in kinds)
        self._kinds, self._looks = kinds, [_look(x) for x in tensors]
        self._tables: list[Tensor] = []
        self._room = ROOM.get(tensors[0].device.type, (ENOUGH, TOGETHER))
        _all_tables.add(self)
        self.capacity = _capacity(self.size, *self._room)

    @property
    def key(self) -> tuple[str, ...]:
        """The paths of the leaves."""
        return self.paths

    def add(self, x: Tensor) -> bool | None:
        """Writes an observation of one tensor; returns whether all slots are full then, or None if it was not written."""
        return self.add_all((x,))

    def add_all(self, tensors: Sequence[Tensor]) -> bool | None:
        """Writes an observation of several tensors; returns what `add` returns."""
        count = self.count
        if count >= self.capacity or [_look(x) for x in tensors] != self._looks or not (self._tables or self._allocate(tensors)):
            return None
        for kind, table, x in zip(self._kinds, self._tables, tensors, strict=True):
            if not written(kind, table, x, count):
                return None
        self.count = count + 1
        return count + 1 >= self.capacity

    def _allocate(self, tensors: Sequence[Tensor]) -> bool:
        """Makes the tables; returns whether there is a kernel, and memory for them."""
        made = [new_table(kind, self.capacity, x.device) for kind, x in zip(self._kinds, tensors, strict=True)]
        self._tables = [table for table in made if table is not None]
        if len(self._tables) < len(made):
            self._tables, self.capacity = [], 0
        return bool(self._tables)

    def next_buffer(self) -> PendingSlots:
        """Returns this one, or if it is full one with the same memory; with less if more monitors share the memory by now."""
        if self.count < self.capacity:
            return self
        other = copy.copy(self)
        other.count, other.capacity = 0, _capacity(self.size, *self._room)
        if other.capacity != self.capacity:
            other._tables = []
        _all_tables.add(other)
        return other

    def merged(self, reducer: Reducer, states: Mapping[str, State], start: int, stop: int) -> dict[str, State]:
        """Returns new states of the leaves: `states` with the observations from `start` to `stop`."""
        assert isinstance(reducer, Statistic)
        return {
            path: update_slots(reducer, states.get(path, {}), kind, table, start, stop)
            for path, kind, table in zip(self.paths, self._kinds, self._tables, strict=True)
        }

    def observation(self, position: int) -> Any:
        """Returns tensors without numbers, which have the shapes and dtypes of one observation."""
        return [torch.empty(shape, dtype=dtype, device="meta") for shape, _, dtype, _, _ in filter(None, self._looks)]


def new_slots(reducer: Reducer, paths: tuple[str, ...], tensors: Sequence[Tensor]) -> PendingSlots | None:
    """Returns slots for observations like this one; None if no kernel writes them, or too many monitors share the memory."""
    if tensors[0].device.type not in SLOTS or not isinstance(reducer, Statistic) or None in map(_look, tensors):
        return None
    kinds = [kind for x in tensors if (kind := slots_of(reducer, x)) is not None]
    if len(kinds) < len(tensors):
        return None
    pending = PendingSlots(paths, tensors, kinds)
    return pending if pending.capacity > 1 else None


def _look(x: Tensor) -> tuple[Any, ...] | None:
    """Returns what observations in one table have in common; None if a kernel cannot read them by their address."""
    if type(x) is not Tensor or x.layout is not torch.strided:
        return None
    return x.shape, x.stride(), x.dtype, x.device, x.is_neg()


def _capacity(size: int, enough: int, together: int) -> int:
    """Returns the number of slots of so many bytes that a monitor may have; `enough` bytes for one, `together` for all."""
    return min(MOST, min(enough, together // max(1, len(_all_tables))) // max(1, size))
