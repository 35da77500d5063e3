"""Memory on a device to which compiled graphs add observations themselves, also when a CUDA graph replays them.

A CUDA graph replays kernels and runs no Python. So an observation is an operator that launches two of them: one reads the tensor
once, the other joins what was found to accumulators, in place. The graph gets a handle, a tensor on the device with addresses, and
only reads it. So autograd finds nothing changed if two forwards come before their backwards; blocks that share a graph pass handles
of their own; and a CUDA graph, which copies its inputs before a replay, copies addresses. The first number of a handle says whether
the monitor records in this step, so that one graph serves all steps.

A forward that a checkpoint around the graph runs again must not count twice. Only Python can tell, so graphs that are traced within
such a checkpoint call it, and end CUDA graphs there. The kernels, and the memory, are of `reducers/kernels/triton/accumulate.py`.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import torch
from torch import Tensor

from recorders._torch import NoInference, may_run_again, no_modes
from recorders._torch.compiler import make_effectful
from recorders.capture.entering import guarded, timed
from recorders.graphs.sinks import find_spec
from reducers import State, Statistic
from reducers._torch import constant_in_graphs
from reducers.core.inputs import observation
from reducers.core.patterns import arrange
from reducers.errors import warn_user
from reducers.kernels.dispatch import device_accumulation

_owners: WeakValueDictionary[int, Any] = WeakValueDictionary()  # by the address of a handle, and by one that it holds


class Observed(NamedTuple):
    """What a graph tells of an observation of one leaf.

    Attributes:
        slot: that of the handle, the same for this leaf, kept shape and dtype in all graphs of a spec.
        path: that of the leaf.
        columns: which statistics the kernels compute, with commas between them.
        axes: those to reduce, of the tensor as the pattern arranges it.
        threshold: see `Statistic.threshold`.
        info: see `layouts.as_text`.
    """

    slot: int
    path: str
    columns: str
    axes: tuple[int, ...]
    threshold: float
    info: str


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
        owner: the sink that operators find by the handle; it is held weakly.
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


_holders: WeakSet[Any] = WeakSet()
_slots: WeakKeyDictionary[Any, dict[Any, int]] = WeakKeyDictionary()  # of the handles of a spec, by leaf, shape and dtype


def add_holder(sink: Any) -> None:
    """Adds a sink to which `hand_out` gives handles, by `sink.hold(device)`; that does nothing if none is needed."""
    _holders.add(sink)


def can_accumulate(monitor: Any, device: str) -> bool:
    """Whether kernels on this type of device do all that the monitor asks for, so that no Python is needed when a graph runs."""
    gate, reducer = monitor.gate, monitor.reducer
    needs_python = monitor.has_callables or monitor.given or monitor.buffer.shared
    if needs_python or gate.condition is not None or gate.every != 1:
        return False
    return isinstance(reducer, Statistic) and bool(reducer.columns) and device_accumulation(device) is not None


def handle_name(kind: str, index: int | None) -> str:
    """The attribute of a sink's tensor that is its handle for a device; Dynamo makes it an input of the graph."""
    return f"handle_{kind}_{index}"


@constant_in_graphs
def hand_out(key: str, kind: str, index: int | None) -> bool:
    """Called while a graph is traced: whether it gets handles. If so, all sinks get theirs now.

    Blocks share a graph only if all of them have handles when the compiler checks its guards.
    """
    spec = find_spec(key)
    if spec is None or not can_accumulate(spec, kind) or (may_run_again() and not spec.records_recomputed):
        return False
    device = torch.device(kind) if index is None else torch.device(kind, index)
    for holder in list(_holders):
        holder.hold(device)
    return True


def emit_accumulations(handle: Tensor, spec: Any, leaves: Mapping[str, Tensor], info: str) -> bool:
    """Called while AOT traces: adds an operator for each leaf; returns whether kernels take all of them, or nothing was added."""
    found = [_observed(spec, path, leaf, info) for path, leaf in leaves.items()]
    if not all(found):
        return False
    for observed, x in filter(None, found):
        torch.ops.torch_recorders.accumulate(handle, *observed, x)
    return True


def _observed(spec: Any, path: str, leaf: Tensor, info: str) -> tuple[Observed, Tensor] | None:
    reducer: Statistic = spec.reducer  # see `can_accumulate`
    kernels = device_accumulation(leaf.device.type)
    try:
        x, axes = arrange(observation(reducer, (leaf,)), reducer.pattern)
        kept = tuple(size for axis, size in enumerate(x.shape) if axis not in axes)
        # Sizes that are variables of the graph are not compared: that would be a guard.
        if kernels is None or not kernels.takes(x, axes, reducer.columns):
            return None
        if not all(type(size) is int for size in kept) or 0 in kept:
            return None
    except Exception:  # such as a pattern that does not fit: reported when the graph runs
        return None
    columns = ",".join(reducer.columns.values())
    slots = _slots.setdefault(spec, {})
    slot = slots.setdefault((path, columns, kept, x.dtype), len(slots))
    return (Observed(slot, path, columns, axes, reducer.threshold, info), x) if slot < kernels.SLOTS else None


def _accumulate(
    handle: Tensor, slot: int, path: str, columns: str, axes: list[int], threshold: float, info: str, x: Tensor
) -> None:
    guarded("the operator in a compiled graph", _add, handle, Observed(slot, path, columns, tuple(axes), threshold, info), x)


def _add(handle: Tensor, observed: Observed, x: Tensor) -> None:
    kernels = device_accumulation(x.device.type)
    if kernels is None or not kernels.is_captured():
        owner = owner_of(handle)
        if owner is not None:
            timed(owner, owner.accumulate, observed, x)
        return
    # The handle may be a copy that belongs to the CUDA graph. The kernels find out whether there are accumulators of this size.
    try:
        if x.numel():
            kernels.accumulate(x, observed.axes, observed.columns, observed.threshold, handle, observed.slot)
    except Exception as error:
        warn_user(f"an observation was left out of a CUDA graph: {type(error).__name__}: {error}", RuntimeWarning)


# Not tagged `cudagraph_unsafe`: CUDA graphs contain it. Its effect keeps it from being removed, or run again in a backward.
_library: Any = torch.library.Library("torch_recorders", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("accumulate(Tensor handle, int slot, str path, str columns, int[] axes, float threshold, str info, Tensor x) -> ()")
_library.impl("accumulate", _accumulate, "CompositeExplicitAutograd")
torch.library.register_fake("torch_recorders::accumulate", lambda *_: None, lib=_library)
make_effectful(torch.ops.torch_recorders.accumulate.default)
