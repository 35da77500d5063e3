"""Accumulators: memory on a device to which compiled graphs add observations themselves, also when a CUDA graph replays them.

The kernels are those of `reducers/kernels/triton/accumulating.py`, and so is the form of the memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from recorders._torch import NoInference, no_modes
from reducers import State
from reducers.kernels.dispatch import device_accumulation

__all__ = ["Accumulators", "Observed", "owner_of"]

_owners: WeakValueDictionary[int, Any] = WeakValueDictionary()  # by the address of a handle, and by one that it holds


class Observed(NamedTuple):
    """What a graph tells of an observation of one leaf.

    Attributes:
        slot: that of the handle, the same for this leaf, kept shape and dtype in all graphs of a twin.
        path: that of the leaf.
        columns: which statistics the kernels compute, with commas between them.
        axes: those to reduce, of the tensor as the pattern arranges it.
        threshold: see `Statistic.threshold`.
        told: see `layouts.as_text`.
    """

    slot: int
    path: str
    columns: str
    axes: tuple[int, ...]
    threshold: float
    told: str


class _Memory(NamedTuple):
    """The accumulators of one leaf, and what was taken out of them and is in no state yet."""

    path: str
    columns: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    words: Tensor
    taken: list[Tensor]


class Accumulators:
    """The accumulators of one monitor on one device.

    Args:
        owner: the receiver that operators find by the handle; it is held weakly.
        due: whether to record.

    Attributes:
        handle: what graphs get. The memory lives as long as it does: a graph that saved it for a backward may outlive the monitor.
    """

    def __init__(self, device: torch.device, owner: Any, due: bool) -> None:
        self._kernels = device_accumulation(device.type)
        self._memory: dict[int, _Memory] = {}
        with NoInference(False), no_modes(), torch.no_grad():
            self.handle, self._missed = self._kernels.new_handle(device)
        self.handle.memory = self._memory, self._missed
        self._owner, self._due = weakref.ref(owner), True
        _owners[self.handle.data_ptr()] = _owners[self._missed.data_ptr()] = owner
        self.show(due)

    def show(self, due: bool) -> None:
        """Says on the device whether to record from now on, in the order of the stream, unseen by autograd, and without waiting."""
        if due != self._due:
            self.handle.data[:1].fill_(int(due))
            self._due = due

    def known(self, observed: Observed) -> bool:
        """Whether there are accumulators in the slot."""
        return observed.slot in self._memory

    def add(self, observed: Observed, x: Tensor) -> bool:
        """Launches the kernels, and makes accumulators for the first observation like this one.

        Returns:
            whether they take the observation; if not, it has another form than those before, and nothing was launched.
        """
        shape = tuple(size for axis, size in enumerate(x.shape) if axis not in observed.axes)
        kind = (observed.path, observed.columns, shape, x.dtype)
        memory = self._memory.get(observed.slot)
        if memory is None:
            words = self._kernels.new_accumulators(x, observed.axes, observed.columns)
            memory = self._memory[observed.slot] = _Memory(*kind, words, [])
            self._kernels.point(self.handle, observed.slot, words)
        if memory[:4] != kind:
            return False
        self._kernels.accumulate(x, observed.axes, observed.columns, observed.threshold, self.handle, observed.slot)
        return True

    def counts(self) -> dict[str, int]:
        """The number of observations by leaf. Waits for the device."""
        parts = [(memory, words) for memory in self._memory.values() for words in (*memory.taken, memory.words)]
        counts: dict[str, int] = {}
        for (memory, _), count in zip(parts, _numbers([words for _, words in parts]), strict=True):
            counts[memory.path] = counts.get(memory.path, 0) + count
        return counts

    def found(self, columns: Mapping[str, str], take: bool) -> list[tuple[str, State, int]]:
        """Returns what was accumulated: the path of the leaf, the state, and of how many observations. Waits for the device.

        Args:
            columns: those of the reducer.
            take: whether the accumulators are emptied. What was in them is found again until `forget` is called.
        """
        parts: list[tuple[_Memory, Tensor]] = []
        for memory in self._memory.values():
            copy = memory.words.clone()
            parts += [(memory, words) for words in (*memory.taken, copy)]
            if take:
                memory.taken.append(copy)
                self._kernels.clear(memory.words, memory.columns, memory.dtype)
        missed, *counts = _numbers([self._missed, *(words for _, words in parts)])
        if take and missed:
            self._missed.zero_()
            owner = self._owner()
            if owner is not None:
                owner.miss(missed)
        return [
            (memory.path, self._kernels.statistics(words, columns, memory.shape, memory.dtype), count)
            for (memory, words), count in zip(parts, counts, strict=True)
            if count
        ]

    def forget(self) -> None:
        """Drops what was taken, which is in the states now."""
        for memory in self._memory.values():
            memory.taken.clear()

    def clear(self) -> None:
        """Deletes all observations, in the order of the stream, and without waiting."""
        self.forget()
        self._missed.zero_()
        for memory in self._memory.values():
            self._kernels.clear(memory.words, memory.columns, memory.dtype)


def owner_of(handle: Tensor) -> Any:
    """Returns the owner of a handle; None if it was freed.

    A CUDA graph, or hooks on saved tensors, may hand over a copy. Then this looks at the device, and waits for it.
    """
    owner = _owners.get(handle.data_ptr())
    return _owners.get(int(handle[1])) if owner is None else owner


def _numbers(words: Sequence[Tensor]) -> list[int]:
    """The first number of each, by one copy from the device."""
    numbers: list[int] = torch.cat([word[:1] for word in words]).tolist() if words else []
    return numbers
