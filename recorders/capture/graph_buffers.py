"""GraphBuffer: lifts that a compiled graph hands over for many monitors at once, and that wait to be joined together."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from recorders.capture.buffers import ENOUGH, TOGETHER
from recorders.capture.compiled import columns, unpacked
from reducers import Reducer, State

__all__ = ["GraphBuffer", "GraphRow", "parts"]

MOST = 512  # the most observations in a buffer: to join those of one monitor by itself takes longer than to add hundreds


def parts(span: str, packs: Sequence[Tensor], dim: int = 0) -> list[Tensor]:
    """Returns the packs of one monitor, as views of those of all monitors."""
    numbers = list(map(int, span.split()))
    return [
        packs[index].narrow(dim, start, length) for index, start, length in zip(*(numbers[i::3] for i in range(3)), strict=True)
    ]


class GraphBuffer:
    """Observations of many monitors that one call of a graph makes at once, in one tensor for each of its packs.

    An observation counts for all monitors by one assignment, of `count`. Each monitor holds its part as a `GraphRow`, and the row
    holds the buffer: it is freed when the last row is flushed.

    Attributes:
        layouts: how the lifts of each monitor are packed.
        keys: by which each monitor finds its `GraphRow`.
        spans: which part of the packs they are.
        capacity: the number of observations at which the monitors are flushed.
        count: the number of observations in it.
        unchanged_since: the change after which all its monitors were found to record, and their observations to wait in it.
        calls: how often it was added to without a look at the monitors: calls that are not counted by these yet.
    """

    def __init__(self, layouts: Sequence[str], spans: Sequence[str], packs: Sequence[Tensor]) -> None:
        size = sum(pack.nbytes for pack in packs)
        self.layouts, self.spans, self.count = tuple(layouts), tuple(spans), 0
        self.keys = [(layout,) for layout in layouts]
        self.unchanged_since, self.calls = -1, 0
        self.capacity = min(MOST, len(layouts) * ENOUGH // max(1, size), TOGETHER // max(1, size))
        self._kinds = [(pack.shape, pack.dtype, pack.device) for pack in packs]
        self._packs = [torch.empty((self.capacity, *shape), dtype=dtype, device=device) for shape, dtype, device in self._kinds]
        self._lock = threading.RLock()
        self._next: GraphBuffer | None = None
        self._joined: tuple[int, int, list[tuple[Reducer, str, dict[str, State]]]] = (0, 0, [])
        self._alike: dict[str, list[int]] = defaultdict(list)  # the monitors whose lifts have the same keys, dtypes and shapes
        self._kind = [self._describe(index) for index in range(len(layouts))]
        for index, kind in enumerate(self._kind):
            self._alike[kind].append(index)

    def _describe(self, index: int) -> str:
        packs = [part[0] for part in parts(self.spans[index], self._packs, dim=1)] if self.capacity else []
        return f"{self.layouts[index]} {[(pack.shape, pack.dtype) for pack in packs]}"

    def add(self, packs: Sequence[Tensor], read: Callable[[Sequence[Tensor]], None] | None = None) -> bool | None:
        """Adds an observation of each monitor; returns whether the buffer is full then, or None if it does not accept them.

        Args:
            read: writes the packs after these into the tensors that it is given.
        """
        with self._lock:
            if self.count >= self.capacity or any(
                pack.shape != shape or pack.dtype is not dtype or pack.device != device
                for pack, (shape, dtype, device) in zip(packs, self._kinds, strict=False)
            ):
                return None
            for own, pack in zip(self._packs, packs, strict=False):
                own[self.count].copy_(pack)
            if read is not None:
                read([own[self.count] for own in self._packs[len(packs) :]])
            self.count += 1
            return self.count >= self.capacity

    def successor(self) -> GraphBuffer:
        """Returns the buffer for the next observations: this one, unless it is full."""
        with self._lock:
            if self.count < self.capacity:
                return self
            if self._next is None:
                self._next = GraphBuffer(self.layouts, self.spans, [pack[0] for pack in self._packs])
            return self._next

    def lifts(self, index: int, start: int, stop: int) -> list[Tensor]:
        """Returns the packs of one monitor, of the observations from `start` to `stop`."""
        return parts(self.spans[index], [pack[start:stop] for pack in self._packs], dim=1)

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
        lifts = [unpacked(self.layouts[index], self.lifts(index, start, stop), dim=1) for index in alike]
        return {
            path: reducer.merge_stacked({}, {key: torch.stack([one[path][key] for one in lifts], 1) for key in state})
            for path, state in lifts[0].items()
        }


class GraphRow:
    """A `Pending`: what one monitor has in a `GraphBuffer`."""

    __slots__ = ("buffer", "index", "key", "layout", "paths")
    exact = False

    def __init__(self, buffer: GraphBuffer, index: int) -> None:
        self.buffer, self.index, self.layout = buffer, index, buffer.layouts[index]
        self.key = (self.layout,)
        self.paths = tuple(dict.fromkeys(path for path, *_ in columns(self.layout)))

    @property
    def count(self) -> int:
        """The number of observations in it."""
        return self.buffer.count

    @property
    def capacity(self) -> int:
        """The number of observations at which it is flushed."""
        return self.buffer.capacity

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
        if getattr(reducer, "stackable_join", False):
            joined = self.buffer.joined(self.index, reducer, start, stop)
            return {path: reducer.merge(states.get(path, {}), state) for path, state in joined.items()}
        lifts = unpacked(self.layout, self.buffer.lifts(self.index, start, stop), dim=1)
        return {path: reducer.merge_stacked(states.get(path, {}), stacked) for path, stacked in lifts.items()}

    def observation(self, position: int) -> Any:
        """Returns one observation, for messages."""
        return [pack[0] for pack in self.buffer.lifts(self.index, position, position + 1)]

    def rows(self, start: int) -> tuple[Tensor, ...]:
        """Copies of the observations from `start` on, one tensor for each pack of the monitor."""
        return tuple(pack.clone() for pack in self.buffer.lifts(self.index, start, self.count))
