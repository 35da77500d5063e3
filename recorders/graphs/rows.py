"""Rows of what compiled graphs hand over: partial states of one monitor, or what one call makes for many monitors at once."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from recorders._torch import NoInference
from recorders.graphs.batches import GraphBatch
from recorders.graphs.codec import leaf_paths, leaves_of, unpacked
from recorders.ring.ring import COPIES, SMALL, Copies, Pending
from reducers import Reducer, State
from reducers.kernels.locks import new_lock

__all__ = ["GraphRing", "PackedStates", "Packs", "Rows", "Share", "capacity_for", "packed_states_of", "parts"]

MOST = 512  # the most rows for many monitors: to join those of one monitor by itself takes longer than to add hundreds


class PackedStates(Copies):
    """Partial states of one monitor, packed as the graph hands them over. See `recorders.ring.ring.Codec`."""

    def __init__(self, layout: str, packs: Sequence[Tensor]) -> None:
        super().__init__(leaf_paths(layout), packs, sum(pack.nbytes for pack in packs))
        self._layout = layout

    def write(self, memory: Any, tensors: Sequence[Tensor], row: int) -> bool:
        return [(x.shape, x.dtype, x.device) for x in tensors] == self._kinds and super().write(memory, tensors, row)

    def join(self, memory: Any, reducer: Reducer, states: Mapping[str, State], start: int, stop: int) -> dict[str, State]:
        lifted = unpacked(self._layout, [stacked[start:stop] for stacked in memory[0]], dim=1)
        return {path: reducer.merge_stacked(states.get(path, {}), stacked) for path, stacked in lifted.items()}


def packed_states_of(layout: str, packs: Sequence[Tensor]) -> PackedStates | None:
    """Returns how partial states like these are kept; None if they are too big."""
    states = PackedStates(layout, packs)
    return states if 0 < states.size <= SMALL else None


def capacity_for(size: int, monitors: int) -> int:
    """Returns how many rows of so many bytes wait for so many monitors."""
    return min(MOST, monitors * COPIES.enough // max(1, size), COPIES.together // max(1, size))


def parts(offsets: str, packs: Sequence[Tensor], dim: int = 0) -> list[Tensor]:
    """Returns the packs of one monitor, as views of those of all monitors."""
    numbers = list(map(int, offsets.split()))
    return [
        packs[index].narrow(dim, start, length) for index, start, length in zip(*(numbers[i::3] for i in range(3)), strict=True)
    ]


class Rows(Protocol):
    """The memory of a `GraphRing`: in Python, or a table to which an operator adds in C++.

    Attributes:
        ready: whether nothing has to be asked of the monitors before a row is added.
        count: the number of rows that were added.
        capacity: the number of rows that there is room for.
        calls: how many were added without a look at the monitors, since `take_calls`.
    """

    ready: bool

    @property
    def capacity(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def calls(self) -> int: ...

    def take_calls(self) -> int:
        """Returns `calls`, and begins to count anew."""

    def add(self, observation: Any) -> bool:
        """Adds a row; returns False if there is no room, or the observation does not fit."""

    def packs(self, start: int, stop: int) -> list[Tensor]:
        """Returns the packs of the rows from `start` to `stop`, each [rows, number, *shape]."""

    def seal(self) -> None:
        """Makes the rows full as they are."""

    def another(self) -> Rows:
        """Returns rows like these, without an observation."""


class Packs:
    """Rows of what a graph lifted, in one tensor for each pack, on its device. See `Rows`.

    Args:
        packs: an observation like those that will be added.
    """

    def __init__(self, packs: Sequence[Tensor], monitors: int) -> None:
        self._room, self._kinds = capacity_for(sum(pack.nbytes for pack in packs), monitors), _kinds(packs)
        self.capacity = self._room
        self._empty()

    def _empty(self) -> None:
        with NoInference(False):
            self._packs = [torch.empty((self._room, *shape), dtype=dtype, device=device) for shape, dtype, device in self._kinds]
        self.ready, self.count, self.calls = False, 0, 0
        self._lock = new_lock()

    def another(self) -> Packs:
        other = copy.copy(self)
        other.capacity = self._room
        other._empty()
        return other

    def take_calls(self) -> int:
        found, self.calls = self.calls, 0
        return found

    def add(self, observation: Sequence[Tensor]) -> bool:
        with self._lock:
            if self.count >= self.capacity or _kinds(observation) != self._kinds:
                return False
            for own, pack in zip(self._packs, observation, strict=True):
                own[self.count].copy_(pack)
            self.count += 1
            return True

    def add_at_once(self, observation: Sequence[Tensor]) -> bool:
        """Adds a row if nothing has to be asked of the monitors, and there will be room for another one."""
        if not self.ready or self.count + 1 >= self.capacity:
            return False
        added = self.add(observation)
        self.calls += added
        return added

    def packs(self, start: int, stop: int) -> list[Tensor]:
        return [pack[start:stop] for pack in self._packs]

    def seal(self) -> None:
        with self._lock:
            self.capacity = min(self.count, self.capacity)


class GraphRing:
    """A ring of many monitors: a row is what one call of a graph makes for all of them.

    An observation counts for all monitors by one assignment, of the count of the rows. Each monitor holds its part as a `Share`,
    which holds the ring: it is freed when the last of them has taken it into its states.

    Attributes:
        layouts: how the observations of each monitor are packed.
        offsets: which part of the packs they are.
        copies: whether they are the tensors themselves, not partial states of them.
        paths: of the leaves of each monitor.
        keys: by which each monitor finds its `Share`.
        rows: the observations.
    """

    def __init__(self, batch: GraphBatch, rows: Rows) -> None:
        self.rows = rows
        self.layouts, self.offsets, self.copies = batch.layouts, batch.offsets, batch.copies
        self.paths = [leaf_paths(layout) for layout in self.layouts]
        self.keys = self.paths if self.copies else [(layout,) for layout in self.layouts]
        self._lock = new_lock()
        self._next: GraphRing | None = None
        self._packs: tuple[int, int, list[Tensor]] = (0, 0, [])
        self._joined: tuple[int, int, list[tuple[Reducer, str, dict[str, State]]]] = (0, 0, [])
        self._alike: dict[str, list[int]] = defaultdict(list)  # monitors whose states have the same keys, dtypes and shapes
        self._kind = [self._describe(index) for index in range(len(self.layouts))]
        for index, kind in enumerate(self._kind):
            self._alike[kind].append(index)

    def _describe(self, index: int) -> str:
        packs = self.packs_of(index, 0, 0)
        return f"{self.layouts[index]} {[(pack.shape, pack.dtype) for pack in packs]}"

    @property
    def is_full(self) -> bool:
        """Whether there is no room for another observation."""
        return self.rows.count >= self.rows.capacity

    def successor(self) -> GraphRing:
        """Returns the ring for the next observations: this one, unless it is full."""
        with self._lock:
            if not self.is_full:
                return self
            if self._next is None:
                self._next = copy.copy(self)
                self._next.rows, self._next._next, self._next._lock = self.rows.another(), None, new_lock()
                self._next._joined, self._next._packs = (0, 0, []), (0, 0, [])
            return self._next

    def packs_of(self, index: int, start: int, stop: int) -> list[Tensor]:
        """Returns the packs of one monitor, of the observations from `start` to `stop`."""
        return parts(self.offsets[index], self._packs_of_all(start, stop), dim=1)

    def _packs_of_all(self, start: int, stop: int) -> list[Tensor]:
        """Returns those of all monitors, which ask for the same ones after each other."""
        known = self._packs
        if known[:2] != (start, stop) or not known[2]:
            known = self._packs = start, stop, self.rows.packs(start, stop)
        return known[2]

    def joined(self, index: int, reducer: Reducer, start: int, stop: int) -> dict[str, State]:
        """Returns the joined rows of one monitor; those of all monitors whose states are alike are joined at once, and kept."""
        kind = self._kind[index]
        if self._joined[:2] != (start, stop):
            self._joined = (start, stop, [])
        known = self._joined[2]
        states = next((states for other, of, states in known if of == kind and other == reducer), None)
        if states is None:
            states = self._join(self._alike[kind], reducer, start, stop)
            known.append((reducer, kind, states))
        place = self._alike[kind].index(index)
        return {path: {key: value[place].clone() for key, value in state.items()} for path, state in states.items()}

    def _join(self, alike: Sequence[int], reducer: Reducer, start: int, stop: int) -> dict[str, State]:
        packs = self._packs_of_all(start, stop)
        found = [unpacked(self.layouts[index], parts(self.offsets[index], packs, dim=1), dim=1) for index in alike]
        return {
            path: reducer.merge_stacked({}, {key: torch.stack([one[path][key] for one in found], 1) for key in state})
            for path, state in found[0].items()
        }


class Share(Pending):
    """What one monitor has in a `GraphRing`."""

    __slots__ = ("index", "key", "paths", "ring", "sealed")

    def __init__(self, ring: GraphRing, index: int) -> None:
        self.ring, self.index, self.sealed = ring, index, False
        self.key, self.paths = ring.keys[index], ring.paths[index]

    @property
    def count(self) -> int:
        return self.ring.rows.count

    def seal(self) -> None:
        self.ring.rows.seal()
        self.sealed = True

    def successor(self, count: int, rings: int) -> Share:
        ring = self.ring.successor()
        return self if self.sealed or ring is self.ring else Share(ring, self.index)

    def joined(self, reducer: Reducer, states: Mapping[str, State], start: int, stop: int) -> dict[str, State]:
        if self.ring.copies:
            observations = self._leaves(start, stop)
            return {path: reducer.update_all(states.get(path, {}), xs) for path, xs in zip(self.paths, observations, strict=True)}
        if getattr(reducer, "stackable_join", False):
            joined = self.ring.joined(self.index, reducer, start, stop)
            return {path: reducer.merge(states.get(path, {}), state) for path, state in joined.items()}
        found = unpacked(self.ring.layouts[self.index], self.ring.packs_of(self.index, start, stop), dim=1)
        return {path: reducer.merge_stacked(states.get(path, {}), stacked) for path, stacked in found.items()}

    def observation(self, position: int) -> Any:
        found = self._leaves if self.ring.copies else lambda *rows: self.ring.packs_of(self.index, *rows)
        return [tensor[0] for tensor in found(position, position + 1)]

    def _leaves(self, start: int, stop: int) -> list[Tensor]:
        """Returns the observations themselves, one tensor for each leaf."""
        found = leaves_of(self.ring.layouts[self.index], self.ring.packs_of(self.index, start, stop), dim=1)
        return [found[path] for path in self.paths]


def _kinds(packs: Sequence[Tensor]) -> list[Any]:
    return [(pack.shape, pack.dtype, pack.device) for pack in packs]
