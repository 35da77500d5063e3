"""Readings: what monitors read of parameters at a moment of a step, and groups of leaves that are read in one way.

What an optimizer step changes is read at two moments: before the step the parameters are copied, after it they are compared.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from recorders.capture.batching import StepBatch, Targets
from recorders.capture.kept import Kept
from recorders.capture.stacks import StackRow, StateStack

__all__ = ["Group", "Reading", "before", "change", "group_of", "nothing", "picked"]

Reading = Callable[[Sequence[Any], Optimizer], Sequence[Any]]
"""What a monitor reads of parameters: for each a tensor, or None. An empty sequence if the monitor has to be notified."""


def nothing(parameters: Sequence[Any], optimizer: Optimizer) -> Sequence[Any]:
    """What a monitor reads at a moment that does not concern it."""
    return ()


def before(parameters: Sequence[Any], optimizer: Optimizer) -> Sequence[Any]:
    """The parameters, to be kept until `change` is read."""
    return parameters if all(map(Tensor.is_floating_point, parameters)) else ()


def change(parameters: Sequence[Any], optimizer: Optimizer) -> Sequence[Any]:
    """The parameters, whose change since `before` is reduced."""
    return before(parameters, optimizer)


class Group:
    """Leaves that are read in one way, and reduced together: of one reducer, dtype, device and turn."""

    def __init__(self, reading: Reading, reducer: Any, dtype: torch.dtype, device: torch.device, turn: Any) -> None:
        self.reading, self.reducer, self.dtype, self.device, self.turn = reading, reducer, dtype, device, turn
        self.leaves: list[tuple[weakref.ref[Any], weakref.ref[nn.Module], str]] = []
        self.paths: list[str] = []
        self.positions: list[int] = []  # of the parameters, among those of all modules
        self.kinds: list[type] = []
        self._stacks: dict[weakref.ref[StateStack], dict[int, int]] = {}

    def add(self, refs: tuple[Any, Any], path: str, position: int, tensor: Tensor, row: StackRow) -> None:
        self._stacks.setdefault(weakref.ref(row.stack), {})[len(self.leaves)] = row.index
        self.leaves.append((refs[1], refs[0], path))
        self.paths.append(path)
        self.positions.append(position)
        self.kinds.append(type(tensor))

    def read(self, parameters: Sequence[nn.Parameter], optimizer: Optimizer) -> Sequence[Tensor] | None:
        """Returns the tensors; None if they are not of the kinds of which they were when the plan was made."""
        tensors = self.reading(picked(parameters, self.positions), optimizer)
        if [*map(type, tensors)] != self.kinds or {*map(_layout, tensors)} != {torch.strided}:
            return None
        return tensors if self.holds(tensors) else None

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these tensors are of the dtype and the device of the group."""
        return {*map(_dtype, tensors)} == {self.dtype} and {*map(_device, tensors)} == {self.device}

    def gather(self, tensors: Sequence[Tensor], step_batch: StepBatch) -> None:
        """Gathers what was read, because the monitors are due."""
        step_batch.add_planned(self, tensors)

    def leave_out(self) -> None:
        """Gathers nothing, because the monitors are not due."""

    def targets(self) -> Targets | None:
        """Returns the stacks, with the row for each position in the group; None if one of them is gone."""
        found = {ref(): rows for ref, rows in self._stacks.items()}
        return None if None in found else {stack: rows for stack, rows in found.items() if stack is not None}

    def seen(self, tensors: Sequence[Tensor]) -> list[Any]:
        """Returns the observations, as if each monitor had been notified."""
        there = [(monitor(), module(), path, x) for (monitor, module, path), x in zip(self.leaves, tensors, strict=True)]
        return [
            (monitor, module, path, (x,), monitor.buffer.stored.pending.get((path,)))
            for monitor, module, path, x in there
            if monitor is not None and module is not None
        ]


class _Before(Group):
    """Parameters that are kept until the step ends."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._shapes: list[torch.Size] = []

    def add(self, refs: tuple[Any, Any], path: str, position: int, tensor: Tensor, row: StackRow) -> None:
        super().add(refs, path, position, tensor, row)
        self._shapes.append(tensor.shape)

    def read(self, parameters: Sequence[nn.Parameter], optimizer: Optimizer) -> Sequence[Tensor] | None:
        tensors = super().read(parameters, optimizer)
        return tensors if tensors is not None and [*map(_shape, tensors)] == self._shapes else None

    def gather(self, tensors: Sequence[Tensor], step_batch: StepBatch) -> None:
        there = self._kept()
        memory = [copy for kept, path in zip(there, self.paths, strict=True) if (copy := kept.memory.get(path)) is not None]
        if [*map(_shape, memory)] != self._shapes or not self.holds(memory):
            memory = [kept.memory_for(path, x) for kept, path, x in zip(there, self.paths, tensors, strict=True)]
        for kept, path, copy in zip(there, self.paths, memory, strict=True):
            kept.copies[path] = copy
        step_batch.keep_planned(self, memory, tensors)

    def leave_out(self) -> None:
        for kept, path in zip(self._kept(), self.paths, strict=True):
            kept.leave_out([path])

    def _kept(self) -> list[Kept]:
        """What the monitor of each leaf keeps."""
        monitors = [monitor() for monitor, _, _ in self.leaves]
        return [Kept() if monitor is None else monitor.kept for monitor in monitors]


class _Change(_Before):
    """Parameters whose change is reduced, if they were kept."""

    def read(self, parameters: Sequence[nn.Parameter], optimizer: Optimizer) -> Sequence[Tensor] | None:
        there = self._kept()
        copies = [kept.copies.get(path) for kept, path in zip(there, self.paths, strict=True)]
        if all(copy is None for copy in copies):
            return ()
        memory = [kept.memory.get(path) for kept, path in zip(there, self.paths, strict=True)]
        if not all(map(is_, copies, memory)) or any(copy is None for copy in copies):
            return None
        return super().read(parameters, optimizer)

    def gather(self, tensors: Sequence[Tensor], step_batch: StepBatch) -> None:
        if not tensors:
            return
        copies = [kept.copies.pop(path, None) for kept, path in zip(self._kept(), self.paths, strict=True)]
        there = [copy for copy in copies if copy is not None]
        if len(there) == len(copies):
            step_batch.add_planned(self, there, tensors)
            return
        for (ref, module_ref, path), copy, x in zip(self.leaves, copies, tensors, strict=True):  # another thread took some off
            monitor, module = ref(), module_ref()
            if copy is not None and monitor is not None and module is not None:
                step_batch.add_change(monitor, module, path, x, copy)


def group_of(reading: Reading) -> type[Group]:
    """The class of groups for what is read in this way."""
    return _GROUPS.get(reading, Group)


def picked(parameters: Sequence[Any], positions: Sequence[int]) -> Sequence[Any]:
    """Returns the parameters at these positions, which are all of them in most cases."""
    return parameters if positions == [*range(len(parameters))] else [parameters[position] for position in positions]


_shape, _dtype, _device, _layout = attrgetter("shape"), attrgetter("dtype"), attrgetter("device"), attrgetter("layout")
_GROUPS: dict[Reading, type[Group]] = {before: _Before, change: _Change}
