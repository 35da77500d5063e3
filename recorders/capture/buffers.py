"""What a monitor holds: states, how many observations made them, and small observations that wait to be reduced together.

A small layer costs less than reducing what it returns. So its observations are copied, and those of one shape are reduced together
when there are enough of them, or somebody looks; by the laws of reducers that is the same as one after another.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor

from recorders.capture.compiled import unpacked
from reducers import Reducer, State

__all__ = ["EMPTY", "MonitorState", "PendingBuffer", "place", "new_lift_buffer", "flush"]

SMALL = 1 << 14  # bytes of an observation that waits
ENOUGH = 3 << 16  # bytes that are reduced together
MOST = 96  # observations: more make none of them any cheaper
TOGETHER = 1 << 25  # bytes that all monitors of the process share for this

_buffers: WeakSet[PendingBuffer] = WeakSet()


class PendingBuffer:
    """Observations of the same leaves, shapes and dtypes, which wait in a buffer for each leaf.

    Attributes:
        paths: of the leaves.
        size: bytes of one observation.
        room: how many are enough.
        count: how many wait; one that is not counted is not there.
    """

    __slots__ = (
        "__weakref__",
        "_buffers",
        "_device",
        "_dtype",
        "_others",
        "_rest",
        "_shape",
        "_slots",
        "count",
        "paths",
        "room",
        "size",
    )

    def __init__(self, paths: tuple[str, ...], tensors: Sequence[Tensor], size: int) -> None:
        first = tensors[0]
        self.paths, self.size, self.count = paths, size, 0
        self._shape, self._dtype, self._device = first.shape, first.dtype, first.device
        self._rest = [(x.shape, x.dtype, x.device) for x in tensors[1:]]
        self._buffers: list[Tensor] = []
        self._slots: tuple[Tensor, ...] = ()
        self._others: list[tuple[Tensor, ...]] = []
        _buffers.add(self)
        self.room = _room(size)

    @property
    def key(self) -> tuple[str, ...]:
        """By what it is found."""
        return self.paths

    def accepts(self, x: Tensor) -> bool:
        """Whether this one is of the shape, dtype and device that wait here."""
        return x.shape == self._shape and x.dtype is self._dtype and x.device == self._device

    def accepts_all(self, tensors: Sequence[Tensor]) -> bool:
        """The same for all tensors of an observation."""
        return self.accepts(tensors[0]) and [(x.shape, x.dtype, x.device) for x in tensors[1:]] == self._rest

    def add(self, x: Tensor) -> bool:
        """Copies an observation of one tensor; returns whether these are enough."""
        count = self.count
        if not self._slots:
            self._allocate()
        self._slots[count].copy_(x)
        self.count = count + 1
        return count + 1 >= self.room

    def add_all(self, tensors: Sequence[Tensor]) -> bool:
        """Copies all tensors of one observation; returns whether these are enough."""
        if not self._slots:
            self._allocate()
        for slots, x in zip(self._others, tensors[1:], strict=True):
            slots[self.count].copy_(x)
        return self.add(tensors[0])

    def _allocate(self) -> None:
        kinds = [(self._shape, self._dtype, self._device), *self._rest]
        self._buffers = [torch.empty((self.room, *shape), dtype=dtype, device=device) for shape, dtype, device in kinds]
        self._slots, *self._others = (buffer.unbind() for buffer in self._buffers)

    def emptied(self) -> PendingBuffer:
        """Where the next ones wait: in the same buffers, or in smaller ones where more monitors share what there is by now."""
        other = copy.copy(self)
        other.count, other.room = 0, _room(self.size)
        if other.room != self.room:
            other._buffers, other._slots, other._others = [], (), []
        _buffers.add(other)
        return other

    def joined(self, reducer: Reducer, states: Mapping[str, State], start: int, stop: int) -> dict[str, State]:
        """The states of the leaves after those of the observations."""
        return {
            path: reducer.update_all(states.get(path, {}), buffer[start:stop])
            for path, buffer in zip(self.paths, self._buffers, strict=True)
        }

    def shown(self, position: int) -> Any:
        """One observation, for messages."""
        return [buffer[position] for buffer in self._buffers]


class PendingLifts(PendingBuffer):
    """Observations that a compiled graph lifted, which wait to be joined: their States, packed as it hands them over."""

    __slots__ = ("_layout",)

    def __init__(self, layout: str, packs: Sequence[Tensor], paths: tuple[str, ...]) -> None:
        super().__init__(paths, packs, sum(pack.numel() * pack.itemsize for pack in packs))
        self._layout = layout

    @property
    def key(self) -> tuple[str, ...]:
        return (self._layout,)

    def joined(self, reducer: Reducer, states: Mapping[str, State], start: int, stop: int) -> dict[str, State]:
        lifted = unpacked(self._layout, [buffer[start:stop] for buffer in self._buffers], dim=1)
        return {path: reducer.merge_stacked(states.get(path, {}), stacked) for path, stacked in lifted.items()}


class MonitorState(NamedTuple):
    """Bound at once, after all that can fail: states and counts by leaf path, and where observations wait.

    These are found by the paths of their leaves, and those that graphs lift by how they are packed.
    """

    states: dict[str, State]
    counts: dict[str, int]
    waiting: dict[tuple[str, ...], PendingBuffer]

    @property
    def has_pending(self) -> bool:
        """Whether there are observations that the states do not hold."""
        return any(waiting.count for waiting in self.waiting.values())

    @property
    def samples(self) -> int:
        """How many observations the leaf with most has."""
        counts = dict(self.counts)
        for waiting in self.waiting.values():
            _count(counts, waiting.paths, waiting.count)
        return max(counts.values(), default=0)

    def after(self, states: Mapping[str, State], waiting: PendingBuffer | None) -> MonitorState:
        """With new states of these leaves, one observation more; and perhaps a place where the next ones like it wait."""
        counts = dict(self.counts)
        _count(counts, states, 1)
        places = {key: other for key, other in self.waiting.items() if states.keys().isdisjoint(other.paths)}
        return MonitorState({**self.states, **states}, counts, places if waiting is None else {**places, waiting.key: waiting})


EMPTY = MonitorState({}, {}, {})


def place(paths: tuple[str, ...], tensors: Sequence[Tensor]) -> PendingBuffer | None:
    """Where observations like this one may wait; None where they are too big, or too many others wait already."""
    size = 0
    for x in tensors:
        if type(x) is not Tensor or x.layout is not torch.strided:
            return None
        size += x.numel() * x.itemsize
    return _roomy(PendingBuffer(paths, tensors, size)) if 0 < size <= SMALL else None


def new_lift_buffer(layout: str, packs: Sequence[Tensor], paths: tuple[str, ...]) -> PendingBuffer | None:
    """The same for observations that a graph lifted."""
    lifts = PendingLifts(layout, packs, paths)
    return _roomy(lifts) if 0 < lifts.size <= SMALL else None


def _roomy(waiting: PendingBuffer) -> PendingBuffer | None:
    return waiting if waiting.room > 1 else None


def flush(held: MonitorState, reducer: Reducer) -> tuple[MonitorState, list[tuple[Exception, Any]]]:
    """With nothing that waits; and the observations that cannot be reduced, each with its error."""
    states, counts = dict(held.states), dict(held.counts)
    failed: list[tuple[Exception, Any]] = []
    for waiting in held.waiting.values():
        count = waiting.count
        try:
            if count:
                states.update(waiting.joined(reducer, states, 0, count))
                _count(counts, waiting.paths, count)
        except Exception:  # one by one, to leave out no more than those that are at fault
            for position in range(count):
                try:
                    states.update(waiting.joined(reducer, states, position, position + 1))
                    _count(counts, waiting.paths, 1)
                except Exception as error:
                    failed.append((error, waiting.shown(position)))
    places = {key: waiting.emptied() for key, waiting in held.waiting.items()}
    return MonitorState(states, counts, {key: waiting for key, waiting in places.items() if waiting.room > 1}), failed


def _room(size: int) -> int:
    """How many observations of so many bytes are enough."""
    return min(MOST, min(ENOUGH, TOGETHER // max(1, len(_buffers))) // max(1, size))


def _count(counts: dict[str, int], paths: Iterable[str], observations: int) -> None:
    for path in paths:
        counts[path] = counts.get(path, 0) + observations
