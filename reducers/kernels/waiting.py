"""Slots of a device, in which observations wait as partial statistics until they are joined."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from reducers.kernels import dispatch
from reducers.kernels.cpp import loop_slots
from reducers.kernels.failing import Kernels, found, given_up, in_triton, is_out_of_memory, tried
from reducers.state import State


class Slots(Protocol):
    """How observations of one shape are written, as partial states, into the slots of a table.

    Attributes:
        like: a tensor on the meta device that has this shape, strides and dtype.
        size: the bytes of a slot.
        form: what a slot holds. Observations of equal forms may be in one table, whatever their shapes.
    """

    form: Any
    like: Tensor
    size: int

    def new_table(self, slots: int, device: torch.device) -> Tensor:
        """Return a table of so many slots."""
        ...

    def write(self, table: Tensor, x: Tensor, slot: int) -> bool:
        """Write the partial state of an observation into a slot; return whether it could be read."""
        ...


class ColumnSlots(Slots, Protocol):
    """Slots that hold partial statistics, and how these are joined.

    Attributes:
        axes: those that are reduced.
        columns: the keys of the state, and which statistic each is.
    """

    axes: tuple[int, ...]
    columns: dict[str, str]

    def join(self, table: Tensor, state: State, first: int, last: int) -> State:
        """Return a state joined with the slots from `first` to `last`, in order. An empty state takes one slot."""
        ...

    def rows(self, table: Tensor, first: int, last: int) -> State:
        """Return what the slots from `first` to `last` hold, by column, stacked along a new first axis."""
        ...


class KernelWriter(Protocol):
    """Writes what a kernel finds in whole contiguous observations of one shape and dtype."""

    def write_to(self, x: Tensor, *to: Tensor) -> None:
        """Write what it finds in an observation into contiguous tensors on its device."""
        ...


class WordSlots(Slots, Protocol):
    """Slots that hold hashes."""

    def words(self, table: Tensor, first: int, last: int) -> Tensor:
        """Return the hashes in the slots from `first` to `last`, int64 [slots, 2], in memory of their own."""
        ...


class WordTable(WordSlots, KernelWriter, Protocol):
    """Slots that hold hashes, and what writes a hash to other memory, too."""


SLOTS = Kernels(
    {"cuda": in_triton("gpu_slots"), "cpu": lambda: loop_slots},
    "keeps observations in slots",
    "each observation is joined to its state at once, which takes longer",
)


def device_slots(x: Tensor, axes: tuple[int, ...], columns: Mapping[str, str], threshold: float = 0.0) -> ColumnSlots | None:
    """Return how observations like `x` wait as partial statistics, or None; the arguments are those of `sweep` of `dispatch.py`."""
    room = found(SLOTS, x) if columns else None
    return None if room is None else room.slots_for(x, axes, columns, threshold)


def joinable(slots: ColumnSlots, state: State) -> bool:
    """Return whether the state is a non-empty one with which the slots can be joined."""
    return bool(state) and dispatch.fits(slots.like, slots.axes, slots.columns, state, slots.like.dtype)


def new_table(slots: Slots, number: int, device: torch.device) -> Tensor | None:
    """Return a table of so many slots; None if there is no memory for it, or the kernels have failed."""
    try:
        return None if given_up(SLOTS, device) else tried(SLOTS, device, slots.new_table, number, device)
    except Exception as error:
        if is_out_of_memory(error):
            return None
        raise


def written(slots: Slots, table: Tensor, x: Tensor, slot: int) -> bool:
    """Write an observation into a slot of a table; return whether that was done. If it fails, there is the one warning.

    A CUDA graph that is captured would write the slot again whenever it is replayed, whatever is in it then. So nothing is written.
    """
    if given_up(SLOTS, table.device) or (type(x) is Tensor and x.is_cuda and torch.cuda.is_current_stream_capturing()):
        return False
    return bool(tried(SLOTS, table.device, slots.write, table, x, slot))
