"""ParameterRows: what monitors of parameters have recorded, one row for each parameter, joined with a whole step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from recorders.ring.ring import Pending
from reducers import Reducer, State, StateMismatchError
from reducers.execution.rows import RowSweep, swept_dtypes
from reducers.execution.stacked import int_tensor, lift_stacked
from reducers.kernels.locks import new_lock

__all__ = ["LOCK", "LeafRow", "ParameterRows", "RowBlock"]

LOCK = new_lock()  # shared by all monitors of parameters: their states change together

Stacked = tuple[State, list[int]]
"""States as rows, and the number of observations of each row. A row without observations means nothing."""


class RowBlock:
    """Leaves whose rows are in the same tensors: of one reducer, and of parameters of one dtype on one device, read in one way.

    Attributes:
        number: of the block among those of its `ParameterRows`.
        reading: what is read for it; see `recorders.schedule.table`.
        leaves: for each row a weak reference to a monitor, and the path of one of its parameters.
        views, positions: for each row the view of the monitor, and the position of the parameter, in the table of the optimizer.
    """

    def __init__(self, number: int, reading: Any, reducer: Reducer, like: Tensor) -> None:
        self.number, self.reading, self.reducer, self.dtype, self.device = number, reading, reducer, like.dtype, like.device
        self.leaves, self.views, self.positions = list[tuple[Any, str]](), list[Any](), list[int]()
        self._types: set[type] = {Tensor}  # as gradients and states are that are not there yet
        self._kernel, self._sweep = (
            swept_dtypes(reducer, like) is not None,
            RowSweep(),
        )  # whether it joins; if not, lifts are joined
        self._checked = False  # whether the reducer was found to lift each row of a matrix like a tensor by itself

    def continues(self, other: RowBlock) -> bool:
        """Whether the rows of both are those of the same leaves, read and reduced in the same way."""
        return all(getattr(self, name) == getattr(other, name) for name in _SAME)

    def add(self, view: Any, path: str, position: int, like: Tensor) -> None:
        """Adds a row."""
        self.leaves.append((view.monitor, path))
        self.views.append(view)
        self.positions.append(position)
        self._types.add(type(like))

    def fits(self, xs: Sequence[Any]) -> bool:
        """Whether all of these are tensors like those for which the block was made."""
        return (
            self._types.issuperset(map(type, xs))
            and {*map(_dtype, xs)} == {self.dtype}
            and {*map(_device, xs)} == {self.device}
            and {*map(_layout, xs)} == {torch.strided}
        )

    def joined(self, rows: Stacked, xs: Sequence[Any], due: list[int] | None) -> Stacked:
        """Returns the rows, joined with the observations of those that are due; None if all are."""
        state, counts = rows
        mine: Sequence[int] = range(len(xs)) if due is None else due
        fresh = [row for row in mine if not counts[row]] if 0 in counts else []
        if len(fresh) < len(mine):
            new = {*fresh}
            old = [None if row in new else x for row, x in enumerate(xs)] if fresh else xs
            state = self._update(state, old, self._sweep)
        if fresh:
            first = self._update({}, [xs[row] for row in fresh], RowSweep())
            if state and _kinds(state) != _kinds(first):
                raise self._mismatch()
            state = first if len(fresh) == len(xs) else _written(state, len(xs), fresh, first)
        if due is None:
            return state, [*map((1).__add__, counts)]
        counts = [*counts]
        for row in due:
            counts[row] += 1
        return state, counts

    def _update(self, state: State, xs: Sequence[Any], sweep: RowSweep) -> State:
        """Returns the rows joined with these observations; of None a row stays as it is. If there is no state, none is None."""
        if self._kernel:
            swept = sweep.update(self.reducer, state, xs)
            if swept is not None:
                return swept
            self._kernel = False  # it has failed; there was a warning
        rows = [row for row, x in enumerate(xs) if x is not None]
        lifts = lift_stacked(self.reducer, [xs[row] for row in rows])
        if not self._checked:
            alone = self.reducer.update({}, xs[rows[0]].detach())
            if {key: value.shape for key, value in alone.items()} != {key: value.shape[1:] for key, value in lifts.items()}:
                raise StateMismatchError(f"{self.reducer!r} lifts the rows of a matrix to other shapes than each row by itself")
            self._checked = True
        if not state:
            return lifts
        if _kinds(state) != _kinds(lifts):
            raise self._mismatch()
        if len(rows) == len(xs):
            return self.reducer.merge(state, lifts)
        index = int_tensor(rows, self.device)
        return _written(state, len(xs), rows, self.reducer.merge({key: value[index] for key, value in state.items()}, lifts))

    def _mismatch(self) -> StateMismatchError:
        return StateMismatchError(f"{self.reducer!r} lifts the parameters of a step to other states than before")


class LeafRow(Pending):
    """Observations that are in a row of some `ParameterRows` already.

    Attributes:
        rows, block, index: where it is.
        base: the state of the leaf from before. It is merged with the row when somebody looks, so looking changes nothing.
    """

    __slots__ = ("base", "block", "index", "key", "paths", "rows", "sealed")

    def __init__(self, path: str, rows: ParameterRows, block: int, index: int, base: State) -> None:
        self.key = self.paths = (path,)
        self.rows, self.block, self.index, self.base, self.sealed = rows, block, index, base, False

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

    def seal(self) -> None:
        self.sealed = True

    def successor(self, count: int, rings: int) -> LeafRow | None:
        return None if self.sealed else self


class InPlace:
    """Is `ready` as long as the monitors of all leaves are in their rows; see `recorders.ring.changes`."""

    ready = True


class ParameterRows:
    """The states of many leaves, by block. Those who are in them keep them alive.

    Attributes:
        now: the rows of each block. A step binds all of it by one assignment, so an interrupted step is in all rows or in none.
    """

    def __init__(self, blocks: Sequence[RowBlock]) -> None:
        self._blocks = blocks
        self.now: tuple[Stacked, ...] = tuple([({}, [0] * len(block.leaves)) for block in blocks])
        self._in_place: InPlace | None = None

    @classmethod
    def of(cls, blocks: Sequence[RowBlock]) -> ParameterRows:
        """Returns the rows that the leaves of these blocks are in, if no others are in them; otherwise new ones.

        Monitors that were off and are on again, or are read by two optimizers in turn, go on in their rows: a new row has to be
        merged with the state of its leaf, one by one, when somebody looks.
        """
        monitor, path = blocks[0].leaves[0][0](), blocks[0].leaves[0][1]
        row = None if monitor is None else monitor.buffer.stored.pending.get((path,))
        if (
            isinstance(row, LeafRow)
            and len(row.rows._blocks) == len(blocks)
            and all(map(RowBlock.continues, blocks, row.rows._blocks))
        ):
            return row.rows
        return cls(blocks)

    def write(self, found: Sequence[Any]) -> list[Any]:
        """Joins the observations of a step to the rows; returns what of `found` could not be joined. `LOCK` must be held.

        Args:
            found: for some of the blocks, as `recorders.schedule.table.Found`, what was read.
        """
        if self._in_place is None or not self._in_place.ready:
            self._place()
        now, failed = [*self.now], []
        for one in found:
            try:
                now[one.block.number] = one.block.joined(now[one.block.number], one.xs, one.due)
            except Exception:
                failed.append(one)
        self.now = (*now,)
        return failed

    def _place(self) -> None:
        """Gives leaves that are not in their rows empty ones: they are new, or have left since. Their states become the base."""
        in_place, absent = InPlace(), []
        now = [(state, [*counts]) for state, counts in self.now]
        for block in self._blocks:
            for index, (ref, path) in enumerate(block.leaves):
                monitor = ref()
                if monitor is None:
                    continue
                monitor.buffer.changes.tell(in_place)
                row = monitor.buffer.stored.pending.get((path,))
                if not (isinstance(row, LeafRow) and row.rows is self and (row.block, row.index) == (block.number, index)):
                    now[block.number][1][index] = 0
                    absent.append((monitor, block, index, path))
        self.now = (*now,)  # nobody has the rows that are empty now
        for monitor, block, index, path in absent:  # this is a change, so the next step looks again, and finds them
            held = monitor.buffer.flush()
            base = {key: value.to(block.device) for key, value in held.states.get(path, {}).items()}
            monitor.buffer.stored = held.moved(LeafRow(path, self, block.number, index, base))
        self._in_place = in_place


def _kinds(stacked: State) -> dict[str, Any]:
    """Returns the shape of a row, the dtype and the device of each tensor."""
    return {key: (value.shape[1:], value.dtype, value.device) for key, value in stacked.items()}


def _written(state: State, size: int, indices: list[int], rows: State) -> State:
    """Returns the state with these rows at these indices; if it is empty, one of `size` rows."""
    targets = int_tensor(indices, next(iter(rows.values())).device)
    return {
        key: (state[key] if state else value.new_zeros((size, *value.shape[1:]))).index_copy(0, targets, value)
        for key, value in rows.items()
    }


_SAME = "number", "reading", "reducer", "dtype", "device", "leaves"
_dtype, _device, _layout = attrgetter("dtype"), attrgetter("device"), attrgetter("layout")
