"""MonitorState: the states of a monitor, how many observations made them, and buffers of observations not reduced yet.

Reducing the output of a small layer costs more than the layer itself. So small observations are copied into a buffer, and those of
one shape are reduced together when the buffer is full or somebody reads. By the laws of reducers the result is the same.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet

import torch
from torch import Tensor

from recorders.capture.packs import unpacked
from reducers import Reducer, State

__all__ = ["EMPTY", "MonitorState", "Pending", "PendingBuffer", "flush", "new_buffer", "new_lift_buffer"]

SMALL = 1 << 14  # the most bytes of an observation that is buffered
ENOUGH = 3 << 16  # the bytes of a full buffer
MOST = 96  # the most observations in a buffer: more make none of them cheaper
TOGETHER = 1 << 25  # the bytes of all buffers of the process

_all_buffers: WeakSet[PendingBuffer] = WeakSet()


class Pending(Protocol):
    """Observations of some leaves that the states of a monitor do not include yet. All kinds of buffers have these methods."""

    @property
    def key(self) -> tuple[str, ...]:
        """The key by which `MonitorState` finds it."""

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of the leaves."""

    @property
    def exact(self) -> bool:
        """Whether no bit of the states depends on when the observations are reduced."""

    @property
    def count(self) -> int:
        """The number of observations in it."""

    @property
    def capacity(self) -> int:
        """The number of observations at which it is flushed."""

    def add(self, x: Tensor) -> bool | None:
        """Adds an observation of one tensor; returns whether the buffer is full then, or None if it does not accept the tensor."""

    def add_all(self, tensors: Sequence[Tensor]) -> bool | None:
        """Adds an observation of several tensors; returns what `add` returns."""

    def next_buffer(self) -> Pending:
        """Returns the buffer for the next observations: this one, unless it is full."""

    def merged(self, reducer: Reducer, states: Mapping[str, State], start: int, stop: int) -> dict[str, State]:
        """Returns new states of the leaves: `states` with the observations from `start` to `stop`."""

    def observation(self, position: int) -> Any:
        """Returns one observation, for messages."""


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
    exact = False

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
        return self.paths

    def add(self, x: Tensor) -> bool | None:
        count = self.count
        if count >= self.capacity or x.shape != self._shape or x.dtype is not self._dtype or x.device != self._device:
            return None
        if not self._slots:
            self._allocate()
        self._slots[count].copy_(x)
        self.count = count + 1
        return count + 1 >= self.capacity

    def add_all(self, tensors: Sequence[Tensor]) -> bool | None:
        if self.count >= self.capacity or [(x.shape, x.dtype, x.device) for x in tensors[1:]] != self._rest:
            return None
        if self._rest:
            if not self._slots:
                self._allocate()
            for slots, x in zip(self._others, tensors[1:], strict=True):
                slots[self.count].copy_(x)  # not counted yet, and overwritten if the first tensor is not accepted
        return self.add(tensors[0])

    def _allocate(self) -> None:
        kinds = [(self._shape, self._dtype, self._device), *self._rest]
        self._buffers = [torch.empty((self.capacity, *shape), dtype=dtype, device=device) for shape, dtype, device in kinds]
        slots, *self._others = [buffer.unbind() for buffer in self._buffers]
        self._slots = slots  # last, because `add` takes them for the sign that everything is allocated

    def next_buffer(self) -> PendingBuffer:
        """Returns this one, or if it is full one with the same memory; with less if more monitors share the memory by now."""
        if self.count < self.capacity:
            return self
        other = copy.copy(self)
        other.count, other.capacity = 0, _capacity(self.size)
        if other.capacity != self.capacity:
            other._buffers, other._slots, other._others = [], (), []
        _all_buffers.add(other)
        return other

    def merged(self, reducer: Reducer, states: Mapping[str, State], start: int, stop: int) -> dict[str, State]:
        return {
            path: reducer.update_all(states.get(path, {}), buffer[start:stop])
            for path, buffer in zip(self.paths, self._buffers, strict=True)
        }

    def observation(self, position: int) -> Any:
        return [buffer[position] for buffer in self._buffers]

    @property
    def layout(self) -> str | None:
        """How a compiled graph packed the lifts; None if these are observations."""
        return None

    def rows(self, start: int) -> tuple[Tensor, ...]:
        """Copies of the observations from `start` on, one tensor for each leaf or pack."""
        kinds = [(self._shape, self._dtype, self._device), *self._rest]
        if not self._buffers:
            return tuple(torch.empty((0, *shape), dtype=dtype, device=device) for shape, dtype, device in kinds)
        return tuple(buffer[start : self.count].clone() for buffer in self._buffers)

    def fill(self, rows: Sequence[Tensor], start: int, capacity: int) -> None:
        """Takes in what `rows` of another buffer returned, which had this start and capacity."""
        self.capacity, self.count = capacity, start + len(rows[0])
        if self.count:
            self._allocate()
            for buffer, some in zip(self._buffers, rows, strict=True):
                buffer[start : self.count] = some


class PendingLifts(PendingBuffer):
    """Lifts of observations that a compiled graph made, packed as the graph hands them over."""

    __slots__ = ("_layout",)

    def __init__(self, layout: str, packs: Sequence[Tensor], paths: tuple[str, ...]) -> None:
        super().__init__(paths, packs, sum(pack.numel() * pack.itemsize for pack in packs))
        self._layout = layout

    @property
    def layout(self) -> str | None:
        return self._layout

    @property
    def key(self) -> tuple[str, ...]:
        return (self._layout,)

    def merged(self, reducer: Reducer, states: Mapping[str, State], start: int, stop: int) -> dict[str, State]:
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
    pending: dict[tuple[str, ...], Pending]
    reduced: Mapping[tuple[str, ...], int] = MappingProxyType({})
    merged: int = 0

    @property
    def has_pending(self) -> bool:
        """Whether there are observations that the states do not include."""
        return bool(self.pending) and any(pending.count != self.reduced.get(key, 0) for key, pending in self.pending.items())

    @property
    def samples(self) -> int:
        """The number of observations of the leaf that has most."""
        counts = dict(self.counts)
        for key, pending in self.pending.items():
            _count(counts, pending.paths, pending.count - self.reduced.get(key, 0))
        return self.merged + max(counts.values(), default=0)

    def after(self, states: Mapping[str, State], pending: Pending | None) -> MonitorState:
        """Returns this with new states of these leaves, one observation more, and a buffer for the next ones like it, if any."""
        counts = dict(self.counts)
        _count(counts, states, 1)
        if pending is None and not self.pending:
            return MonitorState({**self.states, **states}, counts, self.pending, self.reduced, self.merged)
        return MonitorState({**self.states, **states}, counts, self.pending, self.reduced, self.merged).moved(states, pending)

    def joined(self, states: Mapping[str, State], counts: Mapping[str, int]) -> MonitorState:
        """Returns this with new states of these leaves, into which so many observations more were merged."""
        total = {**self.counts, **{path: self.counts.get(path, 0) + count for path, count in counts.items()}}
        return self._replace(states={**self.states, **states}, counts=total)

    def moved(self, paths: Collection[str], pending: Pending | None) -> MonitorState:
        """Returns this with `pending`, of which the states include nothing, as the only buffer of these leaves."""
        kept = {key: other for key, other in self.pending.items() if not any(path in paths for path in other.paths)}
        if pending is not None:
            kept[pending.key] = pending
        reduced = {key: count for key, count in self.reduced.items() if kept.get(key) is self.pending[key]}
        return MonitorState(self.states, self.counts, kept, reduced, self.merged)


EMPTY = MonitorState({}, {}, {})


def new_buffer(paths: tuple[str, ...], tensors: Sequence[Tensor]) -> PendingBuffer | None:
    """Returns a buffer for observations like this one; None if they are too big, or too many monitors share the memory."""
    size = 0
    for x in tensors:
        if type(x) is not Tensor or x.layout is not torch.strided:
            return None
        size += x.numel() * x.itemsize
    return _roomy(PendingBuffer(paths, tensors, size)) if 0 < size <= SMALL else None


def new_lift_buffer(layout: str, packs: Sequence[Tensor], paths: tuple[str, ...]) -> PendingBuffer | None:
    """Returns a buffer for observations that a graph lifted, or None."""
    lifts = PendingLifts(layout, packs, paths)
    return _roomy(lifts) if 0 < lifts.size <= SMALL else None


def _roomy(pending: PendingBuffer) -> PendingBuffer | None:
    return pending if pending.capacity > 1 else None


def flush(stored: MonitorState, reducer: Reducer, exact_only: bool = False) -> tuple[MonitorState, list[tuple[Exception, Any]]]:
    """Reduces all pending observations, or only those in exact buffers; returns the new state, and what failed with its errors."""
    states, counts = dict(stored.states), dict(stored.counts)
    failed: list[tuple[Exception, Any]] = []
    buffers: dict[tuple[str, ...], Pending] = {}
    reduced: dict[tuple[str, ...], int] = {}
    for key, pending in stored.pending.items():
        start, count = stored.reduced.get(key, 0), pending.count
        if exact_only and not pending.exact:
            buffers[key], reduced[key] = pending, start
            continue
        try:
            if count != start:
                states.update(pending.merged(reducer, states, start, count))
                _count(counts, pending.paths, count - start)
        except Exception:  # then one by one, to leave out only those at fault
            for position in range(start, count):
                try:
                    states.update(pending.merged(reducer, states, position, position + 1))
                    _count(counts, pending.paths, 1)
                except Exception as error:
                    failed.append((error, pending.observation(position)))
        # By the count from before: a graph in another thread may have added observations since.
        next_buffer = pending if count < pending.capacity else pending.next_buffer()
        if next_buffer is pending:
            buffers[key], reduced[key] = pending, count
        elif next_buffer.capacity > 1:
            buffers[key] = next_buffer
    return MonitorState(states, counts, buffers, reduced, stored.merged), failed


def _capacity(size: int) -> int:
    """Returns the capacity of a buffer for observations of so many bytes."""
    return min(MOST, min(ENOUGH, TOGETHER // max(1, len(_all_buffers))) // max(1, size))


def _count(counts: dict[str, int], paths: Iterable[str], observations: int) -> None:
    for path in paths:
        counts[path] = counts.get(path, 0) + observations
