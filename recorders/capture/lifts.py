"""Lifts: what the tensors of a step add to stacks of states. On a GPU nothing is lifted: kernels write the joined rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from recorders.capture.stacks import Rows, StateStack, kinds
from reducers import Reducer, State
from reducers.combinators.rows import swept_dtypes
from reducers.combinators.stacked import int_tensor, lift_stacked

__all__ = ["Lifts"]


class Lifts:
    """The lifts of tensors of one dtype, on one device, as rows that are merged with those of stacks."""

    def __init__(self, reducer: Reducer, xs: Sequence[Tensor]) -> None:
        self._reducer, self._xs = reducer, xs
        self._dtypes = swept_dtypes(reducer, xs[0])  # None if the tensors are lifted

    @property
    def kinds(self) -> dict[str, Any]:
        """The shape of a row, the dtype and the device of each tensor of the lifts, as `kinds` returns them."""
        if self._dtypes is None:
            return kinds(self._lifted)
        return {key: (torch.Size(), dtype, self._xs[0].device) for key, dtype in self._dtypes.items()}

    def merged(self, stack: StateStack, rows: Rows, indices: Mapping[int, int]) -> Rows:
        """Returns the rows of a stack merged with the lifts; `indices` maps the position of a lift to its row."""
        stacked, counts = rows
        if self._dtypes is not None:
            xs: list[Tensor | None] = [None] * len(counts)
            for position, index in indices.items():
                xs[index] = self._xs[position]
            swept = stack.sweep.update(self._reducer, stacked, xs)
            if swept is not None:
                return swept, [count + (x is not None) for count, x in zip(counts, xs, strict=True)]
        lifted = self._lifted
        if len(self._xs) == len(counts) and [*indices] == [*indices.values()] == [*range(len(counts))]:
            return self._reducer.merge(stacked, lifted), [count + 1 for count in counts]
        device = next(iter(stacked.values())).device
        sources, targets = int_tensor([*indices], device), int_tensor([*indices.values()], device)
        merged = self._reducer.merge(
            {key: value[targets] for key, value in stacked.items()}, {key: value[sources] for key, value in lifted.items()}
        )
        new_counts = list(counts)
        for index in indices.values():
            new_counts[index] += 1
        return {key: value.index_copy(0, targets, merged[key]) for key, value in stacked.items()}, new_counts

    def first(self, stack: StateStack, positions: Sequence[int]) -> Rows:
        """Returns the lifts at these positions as the first rows of a stack."""
        rows: State | None = None
        if self._dtypes is not None:
            rows = stack.sweep.update(self._reducer, {}, [self._xs[position] for position in positions])
        if rows is None:
            rows = self._lifted
            if len(positions) < len(self._xs):
                sources = int_tensor(positions, self._xs[0].device)
                rows = {key: value[sources] for key, value in rows.items()}
        return rows, [1] * len(positions)

    @cached_property
    def _lifted(self) -> State:
        return lift_stacked(self._reducer, self._xs)
