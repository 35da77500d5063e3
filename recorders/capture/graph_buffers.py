"""GraphBuffer: what a compiled graph hands over for many monitors at once, and that waits to be joined together."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from recorders.capture.buffers import ENOUGH, TOGETHER
from recorders.capture.gathering import Together
from recorders.capture.packs import leaf_paths, leaves_of, unpacked
from reducers import Reducer, State
from reducers.kernels.locks import new_lock

__all__ = ["GraphBuffer", "GraphRow", "LiftRows", "Rows", "capacity_for", "parts"]

MOST = 512  # the most observations in a buffer: to join those of one monitor by itself takes longer than to add hundreds


def capacity_for(size: int, monitors: int) -> int:
    """Returns how many observations of so many bytes wait in a buffer of so many monitors."""
    return min(MOST, monitors * ENOUGH // max(1, size), TOGETHER // max(1, size))


def parts(span: str, packs: Sequence[Tensor], dim: int = 0) -> list[Tensor]:
    """Returns the packs of one monitor, as views of those of all monitors."""
    numbers = list(map(int, span.split()))
    return [
        packs[index].narrow(dim, start, length) for index, start, length in zip(*(numbers[i::3] for i in range(3)), strict=True)
    ]


class Rows(Protocol):
    """The memory of a buffer: a row for each observation.

    Attributes:
        ready: whether nothing has to be asked of the monitors before a row is added.
    """

    ready: bool

    @property
    def capacity(self) -> int:
        """The number of rows that there is room for."""

    @property
    def count(self) -> int:
        """The number of rows that were added."""

    @property
    def calls(self) -> int:
        """How many were added without a look at the monitors, since `take_calls`."""

    def take_calls(self) -> int:
        """Returns `calls`, and begins to count anew."""

    def add(self, observation: Any) -> bool:
        """Adds a row; returns False if there is no room, or the observation does not fit."""

    def packs(self, start: int, stop: int) -> list[Tensor]:
        """Returns the packs of the rows from `start` to `stop`, each [rows, number, *shape]."""

    def another(self) -> Rows:
        """Returns rows like these, without an observation."""


class LiftRows:
    """Rows of what a graph lifted, in one tensor for each pack, on its device. See `Rows`.

    Args:
        packs: an observation like those that will be added.
    """

    def __init__(self, packs: Sequence[Tensor], monitors: int) -> None:
        self._monitors, self._kinds = monitors, [(pack.shape, pack.dtype, pack.device) for pack in packs]
        self.capacity = capacity_for(sum(pack.nbytes for pack in packs), monitors)
        self._packs = [torch.empty((self.capacity, *shape), dtype=dtype, device=device) for shape, dtype, device in self._kinds]
        self.ready, self.count, self.calls = False, 0, 0
        self._lock = new_lock()

    def another(self) -> LiftRows:
        return LiftRows([pack[0] for pack in self._packs], self._monitors)

    def take_calls(self) -> int:
        found, self.calls = self.calls, 0
        return found

    def add(self, observation: Sequence[Tensor]) -> bool:
        with self._lock:
            kinds = [(pack.shape, pack.dtype, pack.device) for pack in observation]
            if self.count >= self.capacity or kinds != self._kinds:
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


class GraphBuffer:
    """Observations of many monitors that one call of a graph makes at once.

    An observation counts for all monitors by one assignment, of the count of its rows. Each monitor holds its part as a `GraphRow`,
    which holds the buffer: it is freed when the last of them is flushed.

    Attributes:
        layouts: how the observations of each monitor are packed.
        spans: which part of the packs they are.
        copies: whether they are the tensors themselves, not lifts of them.
        paths: of the leaves of each monitor.
        keys: by which each monitor finds its `GraphRow`.
        rows: the observations.
    """

    def __init__(self, together: Together, rows: Rows) -> None:
        self.rows = rows
        self.layouts, self.spans, self.copies = together.layouts, together.spans, together.copies
        self.paths = [leaf_paths(layout) for layout in self.layouts]
        self.keys = self.paths if self.copies else [(layout,) for layout in self.layouts]
        self._lock = new_lock()
        self._next: GraphBuffer | None = None
        self._packs: tuple[int, int, list[Tensor]] = (0, 0, [])
        self._joined: tuple[int, int, list[tuple[Reducer, str, dict[str, State]]]] = (0, 0, [])
        self._alike: dict[str, list[int]] = defaultdict(list)  # the monitors whose lifts have the same keys, dtypes and shapes
        self._kind = [self._describe(index) for index in range(len(self.layouts))]
        for index, kind in enumerate(self._kind):
            self._alike[kind].append(index)

    def _describe(self, index: int) -> str:
        packs = self.lifts(index, 0, 0)
        return f"{self.layouts[index]} {[(pack.shape, pack.dtype) for pack in packs]}"

    @property
    def is_full(self) -> bool:
        """Whether there is no room for another observation."""
        return self.rows.count >= self.rows.capacity

    def successor(self) -> GraphBuffer:
        """Returns the buffer for the next observations: this one, unless it is full."""
        with self._lock:
            if not self.is_full:
                return self
            if self._next is None:
                self._next = copy.copy(self)
                self._next.rows, self._next._next, self._next._lock = self.rows.another(), None, new_lock()
                self._next._joined, self._next._packs = (0, 0, []), (0, 0, [])
            return self._next

    def lifts(self, index: int, start: int, stop: int) -> list[Tensor]:
        """Returns the packs of one monitor, of the observations from `start` to `stop`."""
        return parts(self.spans[index], self._packs_of(start, stop), dim=1)

    def _packs_of(self, start: int, stop: int) -> list[Tensor]:
        """Returns those of all monitors, which ask for the same ones after each other."""
        known = self._packs
        if known[:2] != (start, stop) or not known[2]:
            known = self._packs = start, stop, self.rows.packs(start, stop)
        return known[2]

    def joined(self, index: int, reducer: Reducer, start: int, stop: int) -> dict[str, State]:
        """Returns the joined lifts of one monitor; those of all monitors whose lifts are alike are joined at once, and kept."""
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
        packs = self._packs_of(start, stop)
        lifts = [unpacked(self.layouts[index], parts(self.spans[index], packs, dim=1), dim=1) for index in alike]
        return {
            path: reducer.merge_stacked({}, {key: torch.stack([one[path][key] for one in lifts], 1) for key in state})
            for path, state in lifts[0].items()
        }


class GraphRow:
    """A `Pending`: what one monitor has in a `GraphBuffer`."""

    __slots__ = ("buffer", "index", "key", "paths")
    exact = False

    def __init__(self, buffer: GraphBuffer, index: int) -> None:
        self.buffer, self.index = buffer, index
        self.key, self.paths = buffer.keys[index], buffer.paths[index]

    @property
    def layout(self) -> str | None:
        """How the lifts are packed; None if these are observations."""
        return None if self.buffer.copies else self.buffer.layouts[self.index]

    @property
    def count(self) -> int:
        """The number of observations in it."""
        return self.buffer.rows.count

    @property
    def capacity(self) -> int:
        """The number of observations at which it is flushed."""
        return self.buffer.rows.capacity

    def add(self, x: Tensor) -> bool | None:
        """Returns None: only the buffer takes observations."""
        return None

    def add_all(self, tensors: Sequence[Tensor]) -> bool | None:
        """Returns None: only the buffer takes observations."""
        return None

    def next_buffer(self) -> GraphRow:
        """Returns this one, or if the buffer is full the same monitor's in the next one."""
        buffer = self.buffer.successor()
        return self if buffer is self.buffer else GraphRow(buffer, self.index)

    def merged(self, reducer: Reducer, states: Mapping[str, State], start: int, stop: int) -> dict[str, State]:
        """Returns new states of the leaves: `states` with the observations from `start` to `stop`."""
        if self.buffer.copies:
            observations = self._leaves(start, stop)
            return {path: reducer.update_all(states.get(path, {}), xs) for path, xs in zip(self.paths, observations, strict=True)}
        if getattr(reducer, "stackable_join", False):
            joined = self.buffer.joined(self.index, reducer, start, stop)
            return {path: reducer.merge(states.get(path, {}), state) for path, state in joined.items()}
        lifts = unpacked(self.buffer.layouts[self.index], self.buffer.lifts(self.index, start, stop), dim=1)
        return {path: reducer.merge_stacked(states.get(path, {}), stacked) for path, stacked in lifts.items()}

    def observation(self, position: int) -> Any:
        """Returns one observation, for messages."""
        return [tensor[0] for tensor in self._tensors(position, position + 1)]

    def rows(self, start: int) -> tuple[Tensor, ...]:
        """Copies of the observations from `start` on, one tensor for each leaf, or pack of lifts."""
        return tuple(tensor.clone() for tensor in self._tensors(start, self.count))

    def _tensors(self, start: int, stop: int) -> list[Tensor]:
        return self._leaves(start, stop) if self.buffer.copies else self.buffer.lifts(self.index, start, stop)

    def _leaves(self, start: int, stop: int) -> list[Tensor]:
        """Returns the observations themselves, one tensor for each leaf."""
        found = leaves_of(self.buffer.layouts[self.index], self.buffer.lifts(self.index, start, stop), dim=1)
        return [found[path] for path in self.paths]
