"""SlotTable: partial statistics of observations of one shape in one table. One launch writes a slot, and two join many.

An update by `swept` is two launches, and allocates a table and a state. If many observations are alike, each of them needs one
launch and no allocation: its partial statistics wait in a slot. Later the parts of each slot are joined, in parallel, and then the
slots, one after another, by the kernel that also joins a single observation. Both compute what that one does for one observation
after another. So the bits of the state are those of one update after another, whenever it is joined.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from reducers.kernels.triton.arguments import kept_shape, sweep_plan, takes_columns
from reducers.kernels.triton.join import each_joined, join_partials, new_results
from reducers.kernels.triton.launching import is_aligned
from reducers.kernels.triton.sweep import new_partials, on_device, sweep_launch

_UNUSED = (None,) * 4  # flag, mask, and the tables of many tensors


class SlotTable:
    """How observations of one shape, strides and dtype are written into the slots of a table, and joined: see `Slots`."""

    def __init__(self, like: Tensor, axes: tuple[int, ...], columns: tuple[tuple[str, str], ...], threshold: float) -> None:
        self.like, self.axes, self.columns, self.threshold = like, axes, dict(columns), threshold
        self._names = ",".join(self.columns.values())
        self._one = tuple(new_partials(like, axes, self._names).shape)
        self.size = 8 * torch.Size(self._one).numel()
        self._shape = kept_shape(like, axes)
        self.form = self._one, tuple(self._shape), like.dtype  # the kernel that joins reads all parts of a slot
        self._launch = sweep_launch(like.shape, like.stride(), like.dtype, axes, self._names, threshold, None, False)

    def new_table(self, slots: int, device: torch.device) -> Tensor:
        """Return a table of so many slots. What joins them is compiled then, so that nothing is written that cannot be joined."""
        table = torch.empty((slots, *self._one), dtype=torch.int64, device=device)
        nothing = dict(zip(self.columns, new_results(self._shape, self._names, self.like.dtype, device), strict=True))
        self.join(table, nothing, 0, 0)
        if self._one[1] > 1 and slots > 1:
            self.join(table, nothing, 0, 2)  # whatever is in them
        return table

    def write(self, table: Tensor, x: Tensor, slot: int) -> bool:
        """Write the partial statistics of an observation, which must be like `like`, into a slot: one launch, and no allocation."""
        with on_device(x):
            self._launch((x.get_device(), is_aligned(x), True), (x, table, *_UNUSED), slot)
        return True

    def join(self, table: Tensor, state: Mapping[str, Tensor], first: int, last: int) -> dict[str, Tensor]:
        """Return a state joined with the slots from `first` to `last`, in order. An empty state takes one slot.

        One launch; of several slots two, if they are in parts: first the parts of all slots are joined at once.
        """
        before = [state[key] for key in self.columns] if state else []
        of, parts = (self._names, self.like.dtype), self._one[1]
        ready = last - first > 1 < parts
        with on_device(table):
            if ready:
                table, first, last = each_joined(table, *of, first, last), 0, last - first
            found = join_partials(table, self._shape, *of, before, first, last, ready=ready)
        return dict(zip(self.columns, found, strict=True))

    def rows(self, table: Tensor, first: int, last: int) -> dict[str, Tensor]:
        """Return what the slots from `first` to `last` hold, by column, stacked along a new first axis: three launches."""
        of, shape = (self._names, self.like.dtype), [last - first, *self._shape]
        with on_device(table):
            each = each_joined(table, *of, first, last)
            found = join_partials(_side_by_side(each), shape, *of, [], ready=True)
        return dict(zip(self.columns.values(), found, strict=True))


def _side_by_side(tables: Tensor) -> Tensor:
    """Return several tables of one part as one, whose positions are those of each table, one table after another."""
    # If they have one position, reshape() alone would return a view, and kernels read tables as they lie in memory.
    return tables.permute(1, 2, 0, 3).contiguous().view(1, tables.shape[1], 1, -1)


def slots_for(x: Tensor, axes: Sequence[int], columns: Mapping[str, str], threshold: float) -> SlotTable | None:
    """Return how observations like `x` are written and joined; None if the kernels do not take them.

    Args:
        columns: the keys of the state, and which of `COLUMNS` each of them is.
        threshold: for `active`, at least 0.
    """
    return _slots_for(tuple(x.shape), x.stride(), x.dtype, tuple(axes), tuple(columns.items()), threshold)


@lru_cache(maxsize=1024)
def _slots_for(
    shape: Any, strides: Any, dtype: torch.dtype, axes: tuple[int, ...], columns: Any, threshold: float
) -> SlotTable | None:
    like = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    taken = takes_columns(dtype, dict(columns).values()) and sweep_plan(like, axes) is not None
    return SlotTable(like, axes, columns, threshold) if taken else None
