"""ParameterRows: what monitors of parameters have recorded, one row for each parameter, joined with a whole step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recorders.ring.ring import Pending
from reducers import Collect, Reducer, State, StateMismatchError
from reducers.execution.cuts import int_tensor
from reducers.execution.rows import RowSweep, swept_dtypes
from reducers.execution.stacked import Kept, lift_stacked, row_parts
from reducers.kernels.locks import new_lock

LOCK = new_lock()  # shared by all monitors of parameters: their states change together

_ALL = Collect()
_THERE = "there"  # which rows have an observation; no key of a state stands alone beside it
MOST = 64  # steps of a log that are not put together yet


class Log(NamedTuple):
    """What a part of a reducer has kept of the observations of each step.

    Attributes:
        blocks: by key the state of a `Collect` of what was kept, [steps, rows, ...].
        recent: what was kept of the last steps, by key [rows, ...].
    """

    blocks: Mapping[str, State] = MappingProxyType({})
    recent: tuple[State, ...] = ()

    def after(self, kept: State) -> Log:
        """Returns this with one step more."""
        recent = (*self.recent, kept)
        return Log(self.blocks, recent) if len(recent) < MOST else Log(_after(self.blocks, recent))

    def columns(self) -> State:
        """Returns all of it, by key [steps, rows, ...]; {} if there is nothing."""
        blocks = _after(self.blocks, self.recent) if self.recent else self.blocks
        return {key: _ALL.compute(state) for key, state in blocks.items()}

    def without(self, row: int) -> Log:
        """Returns this without the observations of a row."""
        columns = self.columns()
        if columns:
            columns[_THERE][:, row] = False
        return Log({key: _ALL.update({}, column) for key, column in columns.items()})


def _after(blocks: Mapping[str, State], recent: Sequence[State]) -> dict[str, State]:
    stacked = {key: torch.stack([kept[key] for kept in recent]) for key in recent[0]}
    return {key: _ALL.update(blocks.get(key, {}), steps) for key, steps in stacked.items()}


class Stacked(NamedTuple):
    """States as rows. A row without observations means nothing.

    Attributes:
        state: of what is stackable in the reducer.
        counts: the number of observations of each row.
        logs: for each part of the reducer that keeps something of each observation, what it has kept.
    """

    state: State
    counts: list[int]
    logs: tuple[Log, ...] = ()

    def without(self, row: int) -> Stacked:
        """Returns this without the observations of a row."""
        counts = [*self.counts]
        counts[row] = 0
        return Stacked(self.state, counts, tuple([log.without(row) for log in self.logs]))


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
        parts = row_parts(reducer, numbers=reading.together is not None)
        if reading.together is not None:
            like = torch.empty((), dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)
        self._rows = None if parts is None or parts.stackable is None else Joiner(parts.stackable, like)
        self.kept = () if parts is None else parts.kept
        self._lifters = [None if part.statistic is None else Joiner(part.statistic, like) for part in self.kept]

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
        state, counts, logs = rows
        mine: Sequence[int] = range(len(xs)) if due is None else due
        joiner = self._rows
        if joiner is not None:
            fresh = [row for row in mine if not counts[row]] if 0 in counts else []
            if len(fresh) < len(mine):
                new = {*fresh}
                old = [None if row in new else x for row, x in enumerate(xs)] if fresh else xs
                state = joiner.update(state, old, joiner.sweep)
            if fresh:
                first = joiner.update({}, [xs[row] for row in fresh], RowSweep())
                if state and _kinds(state) != _kinds(first):
                    raise joiner.mismatch()
                state = first if len(fresh) == len(xs) else _written(state, len(xs), fresh, first)
        if self.kept:
            logs = logs or (Log(),) * len(self.kept)
            logs = tuple([log.after(self._lifted(lifter, xs, due)) for log, lifter in zip(logs, self._lifters, strict=True)])
        if due is None:
            return Stacked(state, [*map((1).__add__, counts)], logs)
        counts = [*counts]
        for row in due:
            counts[row] += 1
        return Stacked(state, counts, logs)

    def _lifted(self, lifter: Joiner | None, xs: Sequence[Any], due: list[int] | None) -> State:
        """Returns what a part of the reducer keeps of the observations of a step."""
        seen = xs if due is None else [xs[row] for row in due]
        lifts = {"": torch.stack([*seen])} if lifter is None else lifter.update({}, seen, lifter.sweep)
        if due is None:
            return {**lifts, _THERE: torch.ones(len(xs), dtype=torch.bool, device=self.device)}
        there = torch.ones(len(due), dtype=torch.bool, device=self.device)
        return _written({}, len(xs), due, {**lifts, _THERE: there})


class Joiner:
    """Joins observations to rows, for a reducer that is stackable.

    Args:
        like: a tensor like the observations.

    Attributes:
        sweep: what knows the tensors of all rows.
    """

    def __init__(self, reducer: Reducer, like: Tensor) -> None:
        self.reducer, self.device = reducer, like.device
        self._kernel = swept_dtypes(reducer, like) is not None  # whether one joins; if not, lifts are joined
        self.sweep = RowSweep()
        self._checked = False  # whether the reducer was found to lift each row of a matrix like a tensor by itself

    def update(self, state: State, xs: Sequence[Any], sweep: RowSweep) -> State:
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
            raise self.mismatch()
        if len(rows) == len(xs):
            return self.reducer.merge(state, lifts)
        index = int_tensor(rows, self.device)
        return _written(state, len(xs), rows, self.reducer.merge({key: value[index] for key, value in state.items()}, lifts))

    def mismatch(self) -> StateMismatchError:
        """Returns the error that is raised if lifts are of other kinds than the rows."""
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
        return self.rows.now[self.block].counts[self.index]

    def joined(self, reducer: Reducer, states: Mapping[str, State], start: int, stop: int) -> dict[str, State]:
        """Returns the state of the leaf: `base` merged with the row."""
        row = {key: value[self.index].clone() for key, value in self.rows.now[self.block].state.items()}
        for part, columns in self.rows.kept(self.block):
            there = columns[_THERE][:, self.index]
            kept = {key: column[there, self.index] for key, column in columns.items() if key != _THERE}
            row.update((part.prefix + key, value) for key, value in part.update({}, kept).items())
        return {self.paths[0]: reducer.merge(self.base, row)}

    def observation(self, position: int) -> Any:
        """Returns the rows, because a row does not keep single observations."""
        return self.rows.now[self.block].state

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
        self.now: tuple[Stacked, ...] = tuple([Stacked({}, [0] * len(block.leaves)) for block in blocks])
        self._in_place: InPlace | None = None
        self._looked: dict[int, tuple[Stacked, list[tuple[Kept, State]]]] = {}

    def kept(self, block: int) -> list[tuple[Kept, State]]:
        """Returns the parts of the reducer of a block that keep something of each observation, with the columns of its log."""
        stacked = self.now[block]
        looked = self._looked.get(block)
        if looked is None or looked[0] is not stacked:  # once for all rows
            parts = zip(self._blocks[block].kept, stacked.logs, strict=True)
            looked = self._looked[block] = (stacked, [(part, log.columns()) for part, log in parts])
        return looked[1]

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
        now = [*self.now]
        for block in self._blocks:
            for index, (ref, path) in enumerate(block.leaves):
                monitor = ref()
                if monitor is None:
                    continue
                monitor.buffer.changes.tell(in_place)
                row = monitor.buffer.stored.pending.get((path,))
                if not (isinstance(row, LeafRow) and row.rows is self and (row.block, row.index) == (block.number, index)):
                    now[block.number] = now[block.number].without(index)
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
