"""What an observation is written as: a copy, or the partial state that it adds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from recorders._torch import NoInference
from recorders.ring.ring import Room
from reducers import Reducer, State
from reducers.core.statistic import Statistic, slots_of, update_slots
from reducers.kernels.waiting import SLOTS, Slots, new_table, written

__all__ = ["COPIES", "PARTIAL", "PARTIAL_ON", "SMALL", "Copies", "PartialStates", "copies_of", "partial_states_of"]

SMALL = 1 << 14  # the most bytes of an observation that is copied
COPIES = Room(3 << 16, 1 << 25, 96)
PARTIAL = Room(1 << 23, 1 << 28, 32)  # the launch that joins so many is 3 % of all
PARTIAL_ON = {"cpu": Room(3 << 16, 1 << 25, 32)}  # devices that gain nothing by more memory: a join costs as much as what it saves
LOOKS = 1024  # shapes and strides that are remembered
RECENT = 8  # shapes that were met once, of which a second observation makes a ring of copies


class Copies:
    """Copies of observations with equal shapes, dtypes and devices. See `Codec`."""

    room = COPIES

    def __init__(self, paths: tuple[str, ...], tensors: Sequence[Tensor], size: int) -> None:
        self.paths, self.size = paths, size
        self._kinds = [(x.shape, x.dtype, x.device) for x in tensors]

    def new_memory(self, rows: int) -> tuple[list[Tensor], list[tuple[Tensor, ...]]]:
        with NoInference(False):  # otherwise the copies could be read in inference mode only
            stacked = [torch.empty((rows, *shape), dtype=dtype, device=device) for shape, dtype, device in self._kinds]
            return stacked, [buffer.unbind() for buffer in stacked]

    def write(self, memory: tuple[list[Tensor], list[tuple[Tensor, ...]]], tensors: Sequence[Tensor], row: int) -> bool:
        for rows, x in zip(memory[1], tensors, strict=True):
            rows[row].copy_(x)
        return True

    def join(
        self, memory: tuple[list[Tensor], Any], reducer: Reducer, states: Mapping[str, State], start: int, stop: int
    ) -> dict[str, State]:
        return {
            path: reducer.update_all(states.get(path, {}), stacked[start:stop])
            for path, stacked in zip(self.paths, memory[0], strict=True)
        }

    def shown(self, memory: tuple[list[Tensor], Any], row: int) -> Any:
        return [stacked[row] for stacked in memory[0]]


class PartialStates:
    """What observations with equal kept axes and dtypes add to states, as a kernel computes it. See `Codec`.

    An observation is one launch on a GPU, or one call of a loop on a CPU, which reads it once, and allocates nothing. Another joins
    all rows, one after another. So the bits of the states are those of one update after another, however many rows there are and
    whoever looks when. All shapes and strides are of one class whose partial states have the same form.
    """

    def __init__(self, reducer: Statistic, paths: tuple[str, ...], tensors: Sequence[Tensor], kinds: Sequence[Slots]) -> None:
        self.paths, self.size = paths, sum(kind.size for kind in kinds)
        self.room = PARTIAL_ON.get(tensors[0].device.type, PARTIAL)
        self._reducer, self._kinds = reducer, kinds
        self._devices = [x.device for x in tensors]
        self._known: dict[Any, tuple[Sequence[Slots], bool]] = {}  # what writes, and whether copies would cost less, by look
        self._recent: dict[Any, None] = {}  # looks that were met lately, of which copies would cost less
        looks = _looks(tensors)
        if self._meet(looks, tensors, copies=True) is not None and self._known[looks][1]:
            self._recent[looks] = None

    def new_memory(self, rows: int) -> list[Tensor] | None:
        with NoInference(False):
            made = [new_table(kind, rows, device) for kind, device in zip(self._kinds, self._devices, strict=True)]
        tables = [table for table in made if table is not None]
        return tables if len(tables) == len(made) else None

    def write(self, memory: list[Tensor], tensors: Sequence[Tensor], row: int) -> bool:
        looks = _looks(tensors)
        known = self._known.get(looks) or self._meet(looks, tensors, copies=True)
        if known is None:
            return False
        writers, copies = known
        if copies:
            if looks in self._recent:
                return False
            self._recent[looks] = None
            if len(self._recent) > RECENT:
                del self._recent[next(iter(self._recent))]
        for writer, table, x in zip(writers, memory, tensors, strict=True):  # noqa: SIM110 - a generator costs each observation
            if not written(writer, table, x, row):
                return False
        return True

    def prefers_copies(self, tensors: Sequence[Tensor]) -> bool:
        """Whether it refuses an observation because it is small, and one like it came lately: a ring for copies costs less."""
        return _looks(tensors) in self._recent

    def keep(self, tensors: Sequence[Tensor]) -> None:
        """Lets observations that look like this one be written from now on, because there is no room for copies."""
        self._meet(looks := _looks(tensors), tensors, copies=False)
        self._recent.pop(looks, None)

    def _meet(self, looks: Any, tensors: Sequence[Tensor], copies: bool) -> tuple[Sequence[Slots], bool] | None:
        """Returns, and remembers, how observations like these are written; None if they are of another class.

        Args:
            copies: whether copies of small ones are made if they come again.
        """
        found = _kernels_of(self._reducer, tensors)
        if found is None or [one.form for one in found] != [kind.form for kind in self._kinds]:
            return None
        if len(self._known) >= LOOKS:
            self._known = {}
        known = self._known[looks] = found, copies and sum(x.nbytes for x in tensors) <= SMALL
        return known

    def join(self, memory: list[Tensor], reducer: Reducer, states: Mapping[str, State], start: int, stop: int) -> dict[str, State]:
        assert isinstance(reducer, Statistic)
        return {
            path: update_slots(reducer, states.get(path, {}), kind, table, start, stop)
            for path, kind, table in zip(self.paths, self._kinds, memory, strict=True)
        }

    def shown(self, memory: list[Tensor], row: int) -> Any:
        """Returns tensors without numbers, which have the shapes and dtypes of the first observation of the class."""
        return [kind.like for kind in self._kinds]


def copies_of(paths: tuple[str, ...], tensors: Sequence[Tensor]) -> Copies | None:
    """Returns how observations like this one are copied; None if they are too big, or have no elements."""
    size = 0
    for x in tensors:
        size += x.nbytes
    return Copies(paths, tensors, size) if 0 < size <= SMALL else None


def partial_states_of(reducer: Reducer, paths: tuple[str, ...], tensors: Sequence[Tensor]) -> PartialStates | None:
    """Returns how observations like this one are written as partial states; None if no kernel does that."""
    if tensors[0].device.type not in SLOTS or not isinstance(reducer, Statistic):
        return None
    kinds = _kernels_of(reducer, tensors)
    return None if kinds is None else PartialStates(reducer, paths, tensors, kinds)


def _kernels_of(reducer: Statistic, tensors: Sequence[Tensor]) -> list[Slots] | None:
    with NoInference(False):
        found = [kind for x in tensors if (kind := slots_of(reducer, x)) is not None]
    return found if len(found) == len(tensors) else None


def _looks(tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    """Returns what the kernels are made for."""
    return tuple([(x.shape, x.stride(), x.dtype, x.device, x.is_neg()) for x in tensors])
