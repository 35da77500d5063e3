"""What a monitor holds: states, how many observations made them, and small observations that wait to be reduced together.

A small layer costs less than reducing what it returns. So its observations are copied, and those of one shape are reduced together
when there are enough of them, or somebody looks; by the laws of reducers that is the same as one after another.
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

__all__ = ["EMPTY", "Held", "Waiting", "place", "place_of_lifts", "settled"]

SMALL = 1 << 14  # bytes of an observation that waits
ENOUGH = 3 << 16  # bytes that are reduced together
MOST = 96  # observations: more make none of them any cheaper
TOGETHER = 1 << 25  # bytes that all monitors of the process share for this

_places: WeakSet[Waiting] = WeakSet()


class Waiting:
    """Observations of the same leaves, shapes and dtypes, which wait in a buffer for each leaf.

    Whoever reads what a monitor recorded leaves the buffer in its place: `Held` says how many of its observations the states hold
    already. So a signal handler may read while an observation is written, and both mean the same buffer.

    Attributes:
        paths: of the leaves.
        size: bytes of one observation.
        room: how many are enough.
        count: how many are in the buffer; one that is not counted is not there.
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
        _places.add(self)
        self.room = _room(size)

    @property
    def key(self) -> tuple[str, ...]:
        """By what it is found."""
        return self.paths

    def takes(self, x: Tensor) -> bool:
        """Whether this one is of the shape, dtype and device that wait here, and there is room for it."""
        return self.count < self.room and x.shape == self._shape and x.dtype is self._dtype and x.device == self._device

    def takes_all(self, tensors: Sequence[Tensor]) -> bool:
        """The same for all tensors of an observation."""
        return self.takes(tensors[0]) and [(x.shape, x.dtype, x.device) for x in tensors[1:]] == self._rest

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
        slots, *self._others = [buffer.unbind() for buffer in self._buffers]
        self._slots = slots  # last, because they say that all of it is there

    def following(self) -> Waiting:
        """Where the next ones wait: here, or if this is full in the same buffers, smaller if more monitors share the memory."""
        if self.count < self.room:
            return self
        other = copy.copy(self)
        other.count, other.room = 0, _room(self.size)
        if other.room != self.room:
            other._buffers, other._slots, other._others = [], (), []
        _places.add(other)
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


class Lifts(Waiting):
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


class Held(NamedTuple):
    """Bound at once, after all that can fail: states and counts by leaf path, and where observations wait.

    These are found by the paths of their leaves, and those that graphs lift by how they are packed; `reduced` says how many of the
    observations of each the states hold.
    """

    states: dict[str, State]
    counts: dict[str, int]
    waiting: dict[tuple[str, ...], Waiting]
    reduced: Mapping[tuple[str, ...], int] = MappingProxyType({})

    @property
    def anything_waits(self) -> bool:
        """Whether there are observations that the states do not hold."""
        return any(waiting.count != self.reduced.get(key, 0) for key, waiting in self.waiting.items())

    @property
    def samples(self) -> int:
        """How many observations the leaf with most has."""
        counts = dict(self.counts)
        for key, waiting in self.waiting.items():
            _count(counts, waiting.paths, waiting.count - self.reduced.get(key, 0))
        return max(counts.values(), default=0)

    def after(self, states: Mapping[str, State], waiting: Waiting | None) -> Held:
        """With new states of these leaves, one observation more; and perhaps a place where the next ones like it wait."""
        counts = dict(self.counts)
        _count(counts, states, 1)
        return Held({**self.states, **states}, counts, self.waiting, self.reduced).moved(states, waiting)

    def moved(self, paths: Collection[str], waiting: Waiting | None) -> Held:
        """With no place where observations of these leaves wait but this one, of which the states hold nothing."""
        kept = {key: other for key, other in self.waiting.items() if not any(path in paths for path in other.paths)}
        if waiting is not None:
            kept[waiting.key] = waiting
        reduced = {key: count for key, count in self.reduced.items() if kept.get(key) is self.waiting[key]}
        return Held(self.states, self.counts, kept, reduced)


EMPTY = Held({}, {}, {})


def place(paths: tuple[str, ...], tensors: Sequence[Tensor]) -> Waiting | None:
    """Where observations like this one may wait; None where they are too big, or too many others wait already."""
    size = 0
    for x in tensors:
        if type(x) is not Tensor or x.layout is not torch.strided:
            return None
        size += x.numel() * x.itemsize
    return _roomy(Waiting(paths, tensors, size)) if 0 < size <= SMALL else None


def place_of_lifts(layout: str, packs: Sequence[Tensor], paths: tuple[str, ...]) -> Waiting | None:
    """The same for observations that a graph lifted."""
    lifts = Lifts(layout, packs, paths)
    return _roomy(lifts) if 0 < lifts.size <= SMALL else None


def _roomy(waiting: Waiting) -> Waiting | None:
    return waiting if waiting.room > 1 else None


def settled(held: Held, reducer: Reducer) -> tuple[Held, list[tuple[Exception, Any]]]:
    """With nothing that waits; and the observations that cannot be reduced, each with its error."""
    states, counts = dict(held.states), dict(held.counts)
    failed: list[tuple[Exception, Any]] = []
    places: dict[tuple[str, ...], Waiting] = {}
    reduced: dict[tuple[str, ...], int] = {}
    for key, waiting in held.waiting.items():
        start, count = held.reduced.get(key, 0), waiting.count
        try:
            if count != start:
                states.update(waiting.joined(reducer, states, start, count))
                _count(counts, waiting.paths, count - start)
        except Exception:  # one by one, to leave out no more than those that are at fault
            for position in range(start, count):
                try:
                    states.update(waiting.joined(reducer, states, position, position + 1))
                    _count(counts, waiting.paths, 1)
                except Exception as error:
                    failed.append((error, waiting.shown(position)))
        following = waiting.following()
        if following is waiting:
            places[key], reduced[key] = waiting, count
        elif following.room > 1:
            places[key] = following
    return Held(states, counts, places, reduced), failed


def _room(size: int) -> int:
    """How many observations of so many bytes are enough."""
    return min(MOST, min(ENOUGH, TOGETHER // max(1, len(_places))) // max(1, size))


def _count(counts: dict[str, int], paths: Iterable[str], observations: int) -> None:
    for path in paths:
        counts[path] = counts.get(path, 0) + observations
