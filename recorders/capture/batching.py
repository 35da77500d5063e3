"""Observations of many monitors at one moment, reduced together: all parameters of an optimizer in one pass.

A `StateStack` holds the states of many leaves, one row each. A step lifts all tensors at once, merges the two stacks, and makes the
new rows of all stacks valid by one assignment. A monitor keeps the state of its leaf from before the stack; reading merges that
state and the row, and changes neither. So a step does not depend on who reads.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from recorders._torch import inside_transform
from recorders.capture.buffers import PendingBuffer
from recorders.capture.context import as_monitor
from recorders.capture.operands import tracing
from reducers import Reducer, State, StateMismatchError
from reducers.combinators.stacked import int_tensor, lift_stacked

__all__ = ["LOCK", "StateStack", "StepBatch", "common"]

LOCK = threading.RLock()  # of all monitors that share batches, whose states change together
MANY = 4  # batches from which on those who are in them make a new one
LARGE = 1 << 15  # elements from which a difference is not worth two passes


class StackedMonitor(Protocol):
    """A monitor that may be observed together with others."""

    buffer: Any

    def _record(self, module: nn.Module | None, *operands: Any, path: str = "") -> None:
        """One observation, alone."""

    def _fail(self, error: Exception, module: nn.Module | None, operands: tuple[Any, ...]) -> None:
        """Tells of what was left out."""


_Rows = tuple[State, Sequence[int]]
Found = dict[str, tuple[Any, ...]]
# the monitor, its module, the path of the leaf, the operands, where its observations wait; of an update, the parameter after it
_Seen = tuple[StackedMonitor, nn.Module, str, tuple[Any, ...], PendingBuffer | None, Tensor | None]


def common(reducer: Reducer) -> Reducer:
    """One of all reducers that are equal to this one, by which they are known without comparing them again."""
    try:
        return _first(reducer)
    except TypeError:  # holds something that has no hash
        return reducer


@lru_cache(maxsize=256)
def _first(reducer: Reducer) -> Reducer:
    return reducer


class Moment:
    """One moment at which many monitors were told, such as the end of an optimizer step.

    Attributes:
        recorded: whether what was seen then counts. Batches read it, so that to set it binds the new rows of all of them at once.
    """

    __slots__ = ("recorded",)

    def __init__(self) -> None:
        self.recorded = False


class StateStack:
    """Rows of states that are joined together, and how many observations made each.

    Attributes:
        left: how often a monitor has left a batch, of whichever: a row that was found before may be nobody's now.
    """

    left: ClassVar[int] = 0

    def __init__(self) -> None:
        self._before: _Rows = {}, ()
        self._after: tuple[Moment, _Rows] = Moment(), ({}, ())

    @property
    def now(self) -> _Rows:
        """The rows after the last moment that was recorded."""
        moment, rows = self._after
        return rows if moment.recorded else self._before

    def rows(self, moment: Moment) -> _Rows:
        """The rows now, or if some were prepared for `moment` already, as it leaves them."""
        prepared, rows = self._after
        return rows if prepared is moment else self.now

    def prepare(self, moment: Moment, rows: _Rows) -> None:
        """These are the rows as soon as `moment` is recorded; until then, or if it never is, they are those before."""
        self._before = self.now
        self._after = moment, rows

    def forget(self) -> None:
        """Frees the rows before the moment that was recorded last."""
        self._before = self.now


class StackRow(PendingBuffer):
    """The observations of one leaf that a batch has joined, on top of what the leaf was before.

    Attributes:
        base: the state of the leaf before.
    """

    __slots__ = ("base", "batch", "index")

    def __init__(self, path: str, batch: StateStack, index: int, base: State) -> None:
        self.paths, self.size, self.capacity = (path,), 0, 2
        self.batch, self.index, self.base = batch, index, base

    @property
    def count(self) -> int:  # type: ignore[override]
        """How many the batch has joined."""
        counts = self.batch.now[1]
        return counts[self.index] if counts else 0

    def accepts(self, x: Tensor) -> bool:
        """Alone, none."""
        return False

    def next_buffer(self) -> StackRow:
        return self

    def joined(self, reducer: Reducer, states: Mapping[str, State], start: int, stop: int) -> dict[str, State]:
        row = {key: value[self.index].clone() for key, value in self.batch.now[0].items()}
        return {self.paths[0]: reducer.merge(self.base, row)}

    def shown(self, position: int) -> Any:
        return self.batch.now[0]


class StepBatch:
    """What the monitors that are told of one moment see, gathered, and reduced when all were told."""

    def __init__(self) -> None:
        self._groups: defaultdict[Any, list[_Seen]] = defaultdict(list)
        self._changing: set[Any] = set()  # groups with updates
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._left = StateStack.left
        self._usable = not torch.compiler.is_compiling() and not tracing()
        self._usable = self._usable and not inside_transform()

    def accepts(self, x: Tensor) -> bool:
        """Whether a tensor may be observed together with others: a plain one that holds numbers."""
        kind = type(x)
        plain = kind is Tensor or kind is nn.Parameter
        return plain and self._usable and x.layout is torch.strided and not x.is_meta and x.numel() > 0

    def gather(self, monitor: StackedMonitor, module: nn.Module, found: Found) -> Found:
        """Gathers those observations of a monitor that may be; returns the others. What is reduced is the first operand.

        Their rows are looked up here, while what belongs to the monitor is in the cache: to come back to each takes longer than all
        that is computed, where parameters are small.
        """
        others, common, pending = {}, id(monitor.buffer.common), monitor.buffer.stored.pending
        for path, operands in found.items():
            x = operands[0]
            if self.accepts(x):
                self._groups[common, x.dtype, x.device].append((monitor, module, path, operands, pending.get((path,)), None))
            else:
                others[path] = operands
        return others

    def keep(self, kept: Tensor, x: Tensor) -> None:
        """Copies `x` into `kept`, once all were told."""
        self._copies.append((kept, x.detach()))

    def add_change(self, monitor: StackedMonitor, module: nn.Module, path: str, after: Tensor, before: Tensor) -> None:
        """Gathers what has changed; `before` is overwritten with it."""
        key = id(monitor.buffer.common), before.dtype, before.device
        self._changing.add(key)
        self._groups[key].append((monitor, module, path, (before,), monitor.buffer.stored.pending.get((path,)), after.detach()))

    def record(self) -> None:
        """Reduces all that was gathered, and binds it at once: an interrupt leaves either all of it or nothing."""
        if not self._groups and not self._copies:
            return
        failed = as_monitor(self._record_all)
        for group in failed:  # alone, each tells what is wrong with it, and the others are recorded
            for monitor, module, path, operands, *_ in group:
                monitor._record(module, *operands, path=path)

    def _record_all(self) -> list[list[_Seen]]:
        """Returns the groups that could not be reduced together."""
        failed = []
        with LOCK:
            if self._copies:
                torch._foreach_copy_([kept for kept, _ in self._copies], [x for _, x in self._copies])
            self._subtract()
            moment, batches = Moment(), []
            for group in self._groups.values():
                found = _observe(group, self._left, moment)
                if found is None:
                    failed.append(group)
                else:
                    batches += found
            moment.recorded = True
            for batch in batches:
                batch.forget()
        return failed

    def _subtract(self) -> None:
        befores, afters = [], []
        for before, after in [(seen[3][0], seen[5]) for key in self._changing for seen in self._groups[key]]:
            if after is None:
                continue
            if after.numel() >= LARGE and after.device.type == "cpu":
                torch.sub(after, before, out=before)
            else:
                befores.append(before)
                afters.append(after)
        if befores:
            torch._foreach_sub_(befores, afters)
            torch._foreach_neg_(befores)


def _observe(group: list[_Seen], left: int, moment: Moment) -> list[StateStack] | None:
    """Prepares observations of one reducer, dtype and device, for when `moment` is recorded.

    Returns the batches that they are in; None, and nothing is prepared, if one of them fails. `left` is what `Batch.left` was
    before their rows were found.
    """
    reducer = group[0][0].buffer.common
    try:
        lifted = lift_stacked(reducer, [operands[0] for _, _, _, operands, _, _ in group])
        places: dict[StateStack, dict[int, int]] = {}
        apart: list[int] = []
        for position, (monitor, _, path, _, row, _) in enumerate(group):
            if left != StateStack.left:
                row = monitor.buffer.stored.pending.get((path,))
            if isinstance(row, StackRow):
                places.setdefault(row.batch, {})[position] = row.index
            else:
                apart.append(position)
        prepared: list[tuple[StateStack, _Rows]] = []
        for batch, there in places.items():
            rows = batch.rows(moment)
            if len(places) > MANY or _kinds(rows[0]) != _kinds(lifted):  # or its rows were never recorded
                apart += there
            else:
                prepared.append((batch, _joined(reducer, rows, lifted, there)))
        if apart:
            prepared.append(_begun(group, sorted(apart), lifted))
    except Exception:
        return None
    for batch, rows in prepared:
        batch.prepare(moment, rows)
    return [batch for batch, _ in prepared]


def _joined(reducer: Reducer, rows: _Rows, lifted: State, places: Mapping[int, int]) -> _Rows:
    """The rows with those lifted, of which `places` says which goes where."""
    stacked, counts = rows
    if len(next(iter(lifted.values()))) == len(counts) and [*places] == [*places.values()] == [*range(len(counts))]:
        return reducer.merge(stacked, lifted), [count + 1 for count in counts]
    device = next(iter(stacked.values())).device
    come, go = int_tensor([*places], device), int_tensor([*places.values()], device)
    joined = reducer.merge({key: value[go] for key, value in stacked.items()}, {key: value[come] for key, value in lifted.items()})
    more = list(counts)
    for place in places.values():
        more[place] += 1
    return {key: value.index_copy(0, go, joined[key]) for key, value in stacked.items()}, more


def _begun(group: list[_Seen], positions: list[int], lifted: State) -> tuple[StateStack, _Rows]:
    """A new batch of those at these positions, and its rows. It is empty until these are recorded."""
    batch, device = StateStack(), next(iter(lifted.values())).device
    first, _, _, operands, *_ = group[positions[0]]
    wanted = {key: value.shape for key, value in first.buffer.common.update({}, operands[0].detach()).items()}
    if wanted != {key: value.shape[1:] for key, value in lifted.items()}:
        raise StateMismatchError(f"{first.buffer.common!r} lifts the rows of a matrix to other shapes than each by itself")
    StateStack.left += 1
    for index, position in enumerate(positions):
        monitor, _, path, *_ = group[position]
        held = monitor.buffer.flush()
        base = {key: value.to(device) for key, value in held.states.get(path, {}).items()}
        monitor.buffer.stored = held.moved((path,), StackRow(path, batch, index, base))
    if len(positions) < len(group):
        come = int_tensor(positions, device)
        lifted = {key: value[come] for key, value in lifted.items()}
    return batch, (lifted, [1] * len(positions))


def _kinds(stacked: State) -> dict[str, Any]:
    return {key: (value.shape[1:], value.dtype, value.device) for key, value in stacked.items()}
