"""MonitorState: the states of a monitor, how many observations made them, and buffers of small observations not reduced yet.

Reducing the output of a small layer costs more than the layer itself. So small observations are copied into a buffer, and those of
one shape are reduced together when the buffer is full or somebody reads. By the laws of reducers the result is the same.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor

from recorders.capture.compiled import unpacked
from reducers import Reducer, State

__all__ = ["EMPTY", "MonitorState", "PendingBuffer", "flush", "new_buffer", "new_lift_buffer"]

SMALL = 1 << 14  # the most bytes of an observation that is buffered
ENOUGH = 3 << 16  # the bytes of a full buffer
MOST = 96  # the most observations in a buffer: more make none of them cheaper
TOGETHER = 1 << 25  # the bytes of all buffers of the process

_all_buffers: WeakSet[PendingBuffer] = WeakSet()


class PendingBuffer:
    """Observations with the same leaves, shapes and dtypes that are not reduced yet, in one tensor for each leaf.

    Reading a monitor leaves the buffer in place; `MonitorState` says how many of its observations the states include already. So a
    signal handler may read while an observation is being written: both use the same buffer.

    Attributes:
        paths: the paths of the leaves.
        size: the bytes of one observation.
        capacity: the number of observations at which the buffer is flushed.
        count: the number of observations in the buffer; an observation that is not counted is not in it.
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
        "capacity",
        "count",
        "paths",
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
        _all_buffers.add(self)
        self.capacity = _capacity(size)

    @property
    def key(self) -> tuple[str, ...]:
        """By what it is found."""
        return self.paths

    def accepts(self, x: Tensor) -> bool:
        """Whether this one is of the shape, dtype and device that wait here, and there is room for it."""
        return self.count < self.capacity and x.shape == self._shape and x.dtype is self._dtype and x.device == self._device

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
        return count + 1 >= self.capacity

    def add_all(self, tensors: Sequence[Tensor]) -> bool:
        """Copies all tensors of one observation; returns whether these are enough."""
        if not self._slots:
            self._allocate()
        for slots, x in zip(self._others, tensors[1:], strict=True):
            slots[self.count].copy_(x)
        return self.add(tensors[0])

    def _allocate(self) -> None:
        kinds = [(self._shape, self._dtype, self._device), *self._rest]
        self._buffers = [torch.empty((self.capacity, *shape), dtype=dtype, device=device) for shape, dtype, device in kinds]
        slots, *self._others = [buffer.unbind() for buffer in self._buffers]
        self._slots = slots  # last, because they say that all of it is there

    def next_buffer(self) -> PendingBuffer:
        """Where the next ones wait: here, or if this is full in the same buffers, smaller if more monitors share the memory."""
        if self.count < self.capacity:
            return self
        other = copy.copy(self)
        other.count, other.capacity = 0, _capacity(self.size)
        if other.capacity != self.capacity:
            other._buffers, other._slots, other._others = [], (), []
        _all_buffers.add(other)
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
    """What a monitor has recorded, bound by one assignment after everything that can fail.

    Attributes:
        states: by leaf path.
        counts: the number of observations in the states, by leaf path.
        pending: buffers of observations, by the paths of their leaves; those of lifts from graphs by their layout.
        reduced: the number of observations of each buffer that the states include already.
        merged: the number of observations that other monitors or recordings have brought in.
    """

    states: dict[str, State]
    counts: dict[str, int]
    pending: dict[tuple[str, ...], PendingBuffer]
    reduced: Mapping[tuple[str, ...], int] = MappingProxyType({})
    merged: int = 0

    @property
    def has_pending(self) -> bool:
        """Whether there are observations that the states do not hold."""
        return any(pending.count != self.reduced.get(key, 0) for key, pending in self.pending.items())

    @property
    def samples(self) -> int:
        """How many observations the leaf with most has."""
        counts = dict(self.counts)
        for key, pending in self.pending.items():
            _count(counts, pending.paths, pending.count - self.reduced.get(key, 0))
        return self.merged + max(counts.values(), default=0)

    def after(self, states: Mapping[str, State], pending: PendingBuffer | None) -> MonitorState:
        """With new states of these leaves, one observation more; and perhaps a place where the next ones like it wait."""
        counts = dict(self.counts)
        _count(counts, states, 1)
        return MonitorState({**self.states, **states}, counts, self.pending, self.reduced, self.merged).moved(states, pending)

    def moved(self, paths: Collection[str], pending: PendingBuffer | None) -> MonitorState:
        """With no place where observations of these leaves wait but this one, of which the states hold nothing."""
        kept = {key: other for key, other in self.pending.items() if not any(path in paths for path in other.paths)}
        if pending is not None:
            kept[pending.key] = pending
        reduced = {key: count for key, count in self.reduced.items() if kept.get(key) is self.pending[key]}
        return MonitorState(self.states, self.counts, kept, reduced, self.merged)


EMPTY = MonitorState({}, {}, {})


def new_buffer(paths: tuple[str, ...], tensors: Sequence[Tensor]) -> PendingBuffer | None:
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


def _roomy(pending: PendingBuffer) -> PendingBuffer | None:
    return pending if pending.capacity > 1 else None


def flush(held: MonitorState, reducer: Reducer) -> tuple[MonitorState, list[tuple[Exception, Any]]]:
    """With nothing that waits; and the observations that cannot be reduced, each with its error."""
    states, counts = dict(held.states), dict(held.counts)
    failed: list[tuple[Exception, Any]] = []
    places: dict[tuple[str, ...], PendingBuffer] = {}
    reduced: dict[tuple[str, ...], int] = {}
    for key, pending in held.pending.items():
        start, count = held.reduced.get(key, 0), pending.count
        try:
            if count != start:
                states.update(pending.joined(reducer, states, start, count))
                _count(counts, pending.paths, count - start)
        except Exception:  # one by one, to leave out no more than those that are at fault
            for position in range(start, count):
                try:
                    states.update(pending.joined(reducer, states, position, position + 1))
                    _count(counts, pending.paths, 1)
                except Exception as error:
                    failed.append((error, pending.shown(position)))
        next_buffer = pending.next_buffer()
        if next_buffer is pending:
            places[key], reduced[key] = pending, count
        elif next_buffer.capacity > 1:
            places[key] = next_buffer
    return MonitorState(states, counts, places, reduced, held.merged), failed


def _capacity(size: int) -> int:
    """How many observations of so many bytes are enough."""
    return min(MOST, min(ENOUGH, TOGETHER // max(1, len(_all_buffers))) // max(1, size))


def _count(counts: dict[str, int], paths: Iterable[str], observations: int) -> None:
    for path in paths:
        counts[path] = counts.get(path, 0) + observations
