"""StepBatch: observations of many monitors at one moment, reduced together, such as all parameters of an optimizer.

A `StateStack` holds the states of many leaves, one row each. In a step all tensors are lifted at once, and the new stack is merged
into the old one. One assignment makes the new rows of all stacks valid. A monitor keeps the state of its leaf from before the
stack. Reading merges that state with the row, and changes neither, so a step does not depend on who reads.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from recorders._torch import copy_all, inside_transform, negate_all, subtract_all
from recorders.capture.context import as_monitor
from recorders.capture.cuda_graphs import CAPTURES
from recorders.capture.entering import failure_of
from recorders.capture.lifts import Lifts
from recorders.capture.operands import tracing
from recorders.capture.stacks import Moment, Rows, StackRow, StateStack, kinds
from recorders.ring.ring import Pending
from reducers import Reducer, StateMismatchError
from reducers.kernels.locks import new_lock

__all__ = ["LOCK", "PlannedRows", "StepBatch", "Targets", "common"]

LOCK = new_lock()  # shared by all monitors whose states change together
MANY = 4  # if the rows of a group are in more stacks than this, they move to one new stack
LARGE = 1 << 15  # elements; a larger tensor on the CPU is subtracted by itself, in one pass instead of two


class StackedMonitor(Protocol):
    """A monitor whose observations may be reduced together with those of others."""

    buffer: Any

    def _record(self, module: nn.Module | None, *operands: Any, path: str = "") -> None:
        """Records one observation alone."""

    def _fail(self, error: Exception, module: nn.Module | None, operands: tuple[Any, ...]) -> None:
        """Reports that an observation was left out."""


class PlannedRows(Protocol):
    """Tensors whose rows were looked up in an earlier step; see `recorders.schedule.planned`."""

    reducer: Reducer

    def targets(self) -> Targets | None:
        """Returns the stacks; None if one of them is gone."""
        ...

    def seen(self, tensors: Sequence[Tensor]) -> list[_Seen]:
        """Returns the observations, as if each monitor had been notified."""
        ...


Found = dict[str, tuple[Any, ...]]
Targets = dict[StateStack, dict[int, int]]  # for each stack, the row for each position in the group
# The monitor, its module, the path of the leaf, the operands, and the buffer of the leaf.
_Seen = tuple[StackedMonitor, nn.Module, str, tuple[Any, ...], Pending | None]


def common(reducer: Reducer) -> Reducer:
    """Returns the same object for all equal reducers, so that they can be compared by `id`."""
    try:
        return _first(reducer)
    except TypeError:  # the reducer holds something that has no hash
        return reducer


@lru_cache(maxsize=256)
def _first(reducer: Reducer) -> Reducer:
    return reducer


class StepBatch:
    """Gathers the observations of the monitors that are notified of a moment, and reduces them when all were notified.

    Attributes:
        usable: whether tensors may be reduced together here: not while a program is traced, or inside vmap or grad.
    """

    def __init__(self) -> None:
        self._groups: defaultdict[Any, list[_Seen]] = defaultdict(list)
        self._planned: list[tuple[PlannedRows, Sequence[Tensor]]] = []
        # As two lists: thousands of pairs would call the garbage collector.
        self._befores, self._afters = list[Tensor](), list[Tensor]()
        self._copies, self._copied = list[Tensor](), list[Tensor]()
        self._left = StateStack.left
        self.usable = not torch.compiler.is_compiling() and not tracing()
        # Replays of a CUDA graph would copy and read the addresses of now.
        self.usable = self.usable and not inside_transform() and not (CAPTURES and CAPTURES[0]())

    def accepts(self, x: Tensor) -> bool:
        """Whether a tensor may be reduced together with others: a plain strided tensor with elements, not on the meta device."""
        kind = type(x)
        plain = kind is Tensor or kind is nn.Parameter
        return plain and self.usable and x.layout is torch.strided and not x.is_meta and x.numel() > 0

    def gather(self, monitor: StackedMonitor, module: nn.Module, found: Found) -> Found:
        """Gathers those observations of a monitor that may be reduced together; returns the others. The first operand is reduced.

        The rows are looked up here, while the data of the monitor is in the cache. If parameters are small, a later look-up for
        each monitor would take longer than all the computation.
        """
        others, common, pending = {}, id(monitor.buffer.common), monitor.buffer.stored.pending
        for path, operands in found.items():
            x = operands[0]
            if self.accepts(x):
                self._groups[common, x.dtype, x.device].append((monitor, module, path, operands, pending.get((path,))))
            else:
                others[path] = operands
        return others

    def add_planned(self, planned: PlannedRows, tensors: Sequence[Tensor], afters: Sequence[Tensor] = ()) -> None:
        """Gathers tensors whose rows are known, if no monitor leaves a stack before they are reduced.

        If there are `afters`, those are parameters after an update, and `tensors` are overwritten with what it changed.
        """
        self._planned.append((planned, tensors))
        self._befores += tensors if afters else ()
        self._afters += afters

    def keep(self, kept: Tensor, x: Tensor) -> None:
        """Copies `x` into `kept` when all monitors were notified."""
        self._copies.append(kept)
        self._copied.append(x)

    def keep_planned(self, planned: PlannedRows, kept: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        """Does the same for many tensors."""
        self._copies += kept
        self._copied += tensors

    def add_change(self, monitor: StackedMonitor, module: nn.Module, path: str, after: Tensor, before: Tensor) -> None:
        """Gathers the update of a parameter; `before` is overwritten with `after - before`."""
        key = id(monitor.buffer.common), before.dtype, before.device
        self._groups[key].append((monitor, module, path, (before,), monitor.buffer.stored.pending.get((path,))))
        self._befores.append(before)
        self._afters.append(after)

    def record(self) -> None:
        """Reduces everything that was gathered, and binds all of it at once: an interrupt leaves either all of it or nothing."""
        if not self._groups and not self._planned and not self._copies:
            return
        raised = None
        for group in as_monitor(self._record_all):  # each records alone: those at fault report it, and the others are recorded
            for monitor, module, path, operands, *_ in group:
                error = failure_of(monitor._fail, partial(monitor._record, module, *operands, path=path))
                raised = raised or error
        if raised is not None:
            raise raised

    def _record_all(self) -> list[list[_Seen]]:
        """Returns the groups that could not be reduced together."""
        failed = []
        with LOCK:
            if self._copies:
                copy_all(self._copies, self._copied)
            self._subtract()
            moment, stacks = Moment(), []
            groups = list(self._groups.values())
            for planned, tensors in self._planned:
                found = _prepare_planned(planned, tensors, moment) if self._left == StateStack.left else None
                if found is None:
                    groups.append(planned.seen(tensors))
                else:
                    stacks += found
            for group in groups:
                found = _prepare(group, self._left, moment)
                if found is None:
                    failed.append(group)
                else:
                    stacks += found
            moment.recorded = True
            for stack in stacks:
                stack.forget()
        return failed

    def _subtract(self) -> None:
        """Overwrites the tensors before updates with the updates."""
        sizes = map(Tensor.numel, self._afters)
        large = {place for place, size in enumerate(sizes) if size >= LARGE and self._afters[place].device.type == "cpu"}
        for place in large:
            torch.sub(self._afters[place], self._befores[place], out=self._befores[place])
        befores = [x for place, x in enumerate(self._befores) if place not in large]
        if befores:
            subtract_all(befores, [x for place, x in enumerate(self._afters) if place not in large])
            negate_all(befores)


def _prepare(group: list[_Seen], left: int, moment: Moment) -> list[StateStack] | None:
    """Prepares observations of one reducer, dtype and device, to become valid when `moment` is recorded.

    Returns the stacks that hold them. If one of the observations fails, returns None and prepares nothing. `left` is the value of
    `StateStack.left` from before the rows were looked up.
    """
    reducer = group[0][0].buffer.common
    try:
        targets: Targets = {}
        unplaced: list[int] = []
        for position, (monitor, _, path, _, row) in enumerate(group):
            if left != StateStack.left:
                row = monitor.buffer.stored.pending.get((path,))
            if isinstance(row, StackRow):
                targets.setdefault(row.stack, {})[position] = row.index
            else:
                unplaced.append(position)
        lifts, prepared, unfit = _reduce(reducer, [operands[0] for _, _, _, operands, _ in group], targets, moment)
        if unplaced or unfit:
            prepared.append(_new_stack(group, sorted([*unplaced, *unfit]), lifts))
    except Exception:
        return None
    for stack, rows in prepared:
        stack.prepare(moment, rows)
    return [stack for stack, _ in prepared]


def _prepare_planned(planned: PlannedRows, tensors: Sequence[Tensor], moment: Moment) -> list[StateStack] | None:
    """Does the same for tensors whose rows are known. Returns None if the rows do not fit any more, or an observation fails."""
    targets = planned.targets()
    if targets is None:
        return None
    try:
        _, prepared, unfit = _reduce(planned.reducer, tensors, targets, moment)
    except Exception:
        return None
    if unfit:
        return None
    for stack, rows in prepared:
        stack.prepare(moment, rows)
    return [stack for stack, _ in prepared]


def _reduce(
    reducer: Reducer, xs: Sequence[Tensor], targets: Targets, moment: Moment
) -> tuple[Lifts, list[tuple[StateStack, Rows]], list[int]]:
    """Reduces tensors of one dtype and device to rows, and merges these with the rows of the stacks that have some for them.

    Returns the lifts, the new rows of each stack, and the positions that need a new stack.
    """
    lifts = Lifts(reducer, xs)
    prepared: list[tuple[StateStack, Rows]] = []
    unfit: list[int] = []
    for stack, indices in targets.items():
        rows = stack.rows(moment)
        if len(targets) > MANY or kinds(rows[0]) != lifts.kinds:  # they also differ if the rows were never recorded
            unfit += indices
        else:
            prepared.append((stack, lifts.merged(stack, rows, indices)))
    return lifts, prepared, unfit


def _new_stack(group: list[_Seen], positions: list[int], lifts: Lifts) -> tuple[StateStack, Rows]:
    """Returns a new stack for the leaves at these positions, and its first rows. The stack is empty until these are recorded."""
    stack = StateStack()
    first, _, _, operands, *_ = group[positions[0]]
    wanted = {key: value.shape for key, value in first.buffer.common.update({}, operands[0].detach()).items()}
    if wanted != {key: shape for key, (shape, _, _) in lifts.kinds.items()}:
        raise StateMismatchError(f"{first.buffer.common!r} lifts the rows of a matrix to other shapes than each row by itself")
    rows = lifts.first(stack, positions)
    device = next(iter(rows[0].values())).device
    StateStack.left += 1
    for index, position in enumerate(positions):
        monitor, _, path, *_ = group[position]
        held = monitor.buffer.flush()
        base = {key: value.to(device) for key, value in held.states.get(path, {}).items()}
        monitor.buffer.stored = held.moved((path,), StackRow(path, stack, index, base))
    return stack, rows
