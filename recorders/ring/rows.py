"""ParameterRows: what monitors of parameters have recorded, one row for each parameter, joined with a whole step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from recorders.ring.ring import Pending
from reducers import Reducer, State, StateMismatchError
from reducers.combinators.rows import RowSweep, swept_dtypes
from reducers.combinators.stacked import int_tensor, lift_stacked
from reducers.kernels.locks import new_lock

__all__ = ["LOCK", "Leaf", "LeafRow", "ParameterRows", "RowBlock"]

LOCK = new_lock()  # shared by all monitors of parameters: their states change together

Leaf = tuple[Any, str]
"""A weak reference to a monitor, and the path of one of its parameters."""
Stacked = tuple[State, list[int]]
"""States as rows, and the number of observations of each row. A row without observations means nothing."""


class RowBlock:
    """Leaves whose rows are in the same tensors: of one reducer, and of parameters of one dtype on one device.

    Attributes:
        leaves: the leaf of each row.
        kernel: whether a kernel writes the joined rows; otherwise the observations are lifted, and the lifts joined.
        checked: whether the reducer was found to lift each row of a matrix like a tensor by itself.
    """

    def __init__(self, reducer: Reducer) -> None:
        self.reducer, self.sweep = reducer, RowSweep()
        self.leaves: list[Leaf] = []
        self.kernel = self.checked = False


class LeafRow(Pending):
    """Observations that are in a row of some `ParameterRows` already.

    Attributes:
        rows, block, index: where it is.
        base: the state of the leaf from before. It is merged with the row when somebody looks, so looking changes nothing.
    """

    __slots__ = ("base", "block", "index", "key", "paths", "rows")

    def __init__(self, path: str, rows: ParameterRows, block: int, index: int, base: State) -> None:
        self.key = self.paths = (path,)
        self.rows, self.block, self.index, self.base = rows, block, index, base

    @classmethod
    def of(cls, path: str, state: State, count: int) -> LeafRow:
        """Returns a row that goes on from a state as if that had been a row from the beginning."""
        rows = ParameterRows([1])
        rows.now = (({key: value.unsqueeze(0) for key, value in state.items()}, [count]),)
        return cls(path, rows, 0, 0, {})

    @property
    def count(self) -> int:
        return self.rows.now[self.block][1][self.index]

    def joined(self, reducer: Reducer, states: Mapping[str, State], start: int, stop: int) -> dict[str, State]:
        """Returns the state of the leaf: `base` merged with the row."""
        row = {key: value[self.index].clone() for key, value in self.rows.now[self.block][0].items()}
        return {self.paths[0]: reducer.merge(self.base, row)}

    def observation(self, position: int) -> Any:
        """Returns the rows, because a row does not keep single observations."""
        return self.rows.now[self.block][0]

    def leave(self) -> None:
        """Lets the next step look whether the leaf is still in this row."""
        self.rows.open[self.block].add(self.index)


class ParameterRows:
    """The states of many leaves, by block. Those who are in them keep them alive.

    Attributes:
        now: the rows of each block. A step binds all of it by one assignment, so an interrupted step is in all rows or in none.
        open: by block, the rows that the next step looks up: their leaves have no row yet, or may have left it.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.now: tuple[Stacked, ...] = tuple([({}, [0] * size) for size in sizes])
        self.open = [set(range(size)) for size in sizes]

    def write(self, blocks: Sequence[RowBlock], found: Sequence[Any]) -> list[Any]:
        """Joins the observations of a step to the rows; returns what of `found` could not be joined. `LOCK` must be held.

        Args:
            blocks: all of them.
            found: for some of them, as `recorders.schedule.table.Found`, what was read.
        """
        joined: dict[int, Stacked] = {}
        failed = []
        for one in found:
            try:
                joined[one.block.number] = self._joined(one.block.number, one.block, one.xs, one.due)
            except Exception:
                failed.append(one)
        now = [*self.now]
        for number, rows in joined.items():
            now[number] = rows
        self.now = (*now,)
        for one in found:
            if self.open[one.block.number] and one.block.number in joined:
                self.open[one.block.number].difference_update(one.rows())
        return failed

    def _joined(self, number: int, block: RowBlock, xs: Sequence[Any], due: list[int] | None) -> Stacked:
        """Returns the rows of a block, joined with the observations of those that are due; None if all are."""
        lifts: State | None = None
        fresh: list[int] = []  # those due that hold nothing yet
        rows: Sequence[int] = range(len(xs)) if due is None else due
        if not self.open[number].isdisjoint(rows):
            dtypes = swept_dtypes(block.reducer, xs[rows[0]])
            block.kernel = dtypes is not None
            if dtypes is None:
                lifts = lift_stacked(block.reducer, [xs[row] for row in rows])
                wanted = _kinds(lifts)
            else:
                wanted = {key: (torch.Size(), dtype, xs[rows[0]].device) for key, dtype in dtypes.items()}
            fresh = self._placed(number, block, xs, rows, wanted)
        state, counts = self.now[number]
        if due is None:
            counts = [*map((1).__add__, counts)]
        else:
            counts = [*counts]
            for row in due:
                counts[row] += 1
        if block.kernel:
            swept = self._swept(block, state, xs, fresh) if fresh else block.sweep.update(block.reducer, state, xs)
            if swept is not None:
                return swept, counts
            block.kernel = False  # it has failed; there was a warning
        if lifts is None:
            lifts = lift_stacked(block.reducer, xs if due is None else [xs[row] for row in due])
        if len(fresh) == len(xs):
            return lifts, counts
        if state and _kinds(state) != _kinds(lifts):
            raise StateMismatchError(f"{block.reducer!r} lifts the parameters of a step to other states than before")
        if due is None and not fresh:
            return block.reducer.merge(state, lifts), counts
        new = {*fresh}
        places = [place for place, row in enumerate(rows) if row not in new]
        if places:
            old = [rows[place] for place in places]
            state = _written(state, len(xs), old, block.reducer.merge(_picked(state, old), _picked(lifts, places)))
        if fresh:
            state = _written(state, len(xs), fresh, _picked(lifts, [place for place, row in enumerate(rows) if row in new]))
        return state, counts

    def _swept(self, block: RowBlock, state: State, xs: Sequence[Any], fresh: list[int]) -> State | None:
        """Returns the rows as a kernel joins them, if some hold nothing yet; None if there is no kernel after all."""
        first = RowSweep().update(block.reducer, {}, [xs[row] for row in fresh])
        if first is None or len(fresh) == len(xs):
            return first
        new = {*fresh}
        old = [None if row in new else x for row, x in enumerate(xs)]
        if {*map(type, old)} != {type(None)}:
            swept = block.sweep.update(block.reducer, state, old)
            if swept is None:
                return None
            state = swept
        return _written(state, len(xs), fresh, first)

    def _placed(self, number: int, block: RowBlock, xs: Sequence[Any], due: Sequence[int], wanted: dict[str, Any]) -> list[int]:
        """Gives leaves their rows here; returns the rows without observations. A row elsewhere that fits is taken over as it is."""
        fresh: list[int] = []
        bound: list[tuple[Any, str, int, LeafRow | None]] = []
        moved = defaultdict[tuple[ParameterRows, int], list[tuple[int, int]]](list)
        for index in due:
            if index not in self.open[number]:
                continue
            ref, path = block.leaves[index]
            monitor = ref()
            row = None if monitor is None else monitor.buffer.stored.pending.get((path,))
            if isinstance(row, LeafRow) and row.rows is self and (row.block, row.index) == (number, index):
                if not row.count:
                    fresh.append(index)
            elif isinstance(row, LeafRow) and row.count and _kinds(row.rows.now[row.block][0]) == wanted:
                moved[row.rows, row.block].append((index, row.index))
                bound.append((monitor, path, index, row))
                row.leave()
            else:
                if isinstance(row, LeafRow):
                    row.leave()
                fresh.append(index)
                bound.append((monitor, path, index, None))
        if fresh and not block.checked:
            alone = block.reducer.update({}, xs[fresh[0]].detach())
            if {key: value.shape for key, value in alone.items()} != {key: shape for key, (shape, _, _) in wanted.items()}:
                raise StateMismatchError(f"{block.reducer!r} lifts the rows of a matrix to other shapes than each row by itself")
            block.checked = True
        state, counts = self.now[number]
        counts = [*counts]
        for index in fresh:
            counts[index] = 0  # of a leaf that has left
        for (rows, other), pairs in moved.items():
            theirs, numbers = rows.now[other]
            targets, sources = [target for target, _ in pairs], [source for _, source in pairs]
            same = not state and targets == sources == [*range(len(counts))] == [*range(len(numbers))]
            state = theirs if same else _written(state, len(counts), targets, _picked(theirs, sources))
            for target, source in pairs:
                counts[target] = numbers[source]
        self.now = (*self.now[:number], (state, counts), *self.now[number + 1 :])  # nobody has these rows yet
        for monitor, path, index, row in bound:
            if monitor is not None and row is not None:
                stored = monitor.buffer.stored
                here = LeafRow(path, self, number, index, row.base)
                monitor.buffer.stored = stored._replace(pending={**stored.pending, here.key: here})
            elif monitor is not None:
                held = monitor.buffer.flush()
                base = {key: value.to(xs[index].device) for key, value in held.states.get(path, {}).items()}
                monitor.buffer.stored = held.moved((path,), LeafRow(path, self, number, index, base))
        return fresh


def _kinds(stacked: State) -> dict[str, Any]:
    """Returns the shape of a row, the dtype and the device of each tensor."""
    return {key: (value.shape[1:], value.dtype, value.device) for key, value in stacked.items()}


def _picked(stacked: State, indices: list[int]) -> State:
    """Returns these rows."""
    rows = int_tensor(indices, next(iter(stacked.values())).device)
    return {key: value[rows] for key, value in stacked.items()}


def _written(state: State, size: int, indices: list[int], rows: State) -> State:
    """Returns the state with these rows at these indices; if it is empty, one of `size` rows."""
    targets = int_tensor(indices, next(iter(rows.values())).device)
    return {
        key: (state[key] if state else value.new_zeros((size, *value.shape[1:]))).index_copy(0, targets, value)
        for key, value in rows.items()
    }
