"""What many monitors see at one moment, reduced together: all parameters of an optimizer in one pass.

States of many leaves are stacked in a `Batch`, a row for each. A step lifts all tensors at once, joins both stacks by one merge,
and binds the outcome by one assignment. Nobody takes a row out: a monitor keeps what its leaf was before, and where somebody
looks, that and the row are merged. So a look changes nothing, and a step knows nothing of the monitors that look.
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
from recorders.capture.buffers import Held, Waiting
from recorders.capture.context import as_monitor
from recorders.capture.operands import tracing
from reducers import Reducer, State, StateMismatchError
from reducers.combinators.stacked import int_tensor, lift_stacked

__all__ = ["LOCK", "Batch", "Together", "common"]

LOCK = threading.RLock()  # of all monitors that share batches, whose states change together
MANY = 4  # batches from which on those who are in them make a new one
LARGE = 1 << 15  # elements from which a difference is not worth two passes


class BatchMonitor(Protocol):
    """A monitor that may be observed together with others."""

    _common: Reducer
    _held: Held

    def _settled(self) -> Held:
        """What is held, with nothing that waits."""

    def _record(self, module: nn.Module | None, *operands: Any, path: str = "") -> None:
        """One observation, alone."""

    def _fail(self, error: Exception, module: nn.Module | None, operands: tuple[Any, ...]) -> None:
        """Tells of what was left out."""


_Now = tuple[State, Sequence[int]]
Found = dict[str, tuple[Any, ...]]
_Seen = tuple[BatchMonitor, nn.Module, str, tuple[Any, ...], Waiting | None]


def common(reducer: Reducer) -> Reducer:
    """One of all reducers that are equal to this one, by which they are known without comparing them again."""
    try:
        return _first(reducer)
    except TypeError:  # holds something that has no hash
        return reducer


@lru_cache(maxsize=256)
def _first(reducer: Reducer) -> Reducer:
    return reducer


class Batch:
    """Rows of states that are joined together, and how many observations made each; both are bound at once.

    Attributes:
        left: how often a monitor has left a batch, of whichever: a row that was found before may be nobody's now.
    """

    left: ClassVar[int] = 0

    def __init__(self) -> None:
        self.now: _Now = {}, ()

    def fits(self, lifted: State) -> bool:
        """Whether rows like these join those that are there."""
        return _kinds(self.now[0]) == _kinds(lifted)

    def after(self, reducer: Reducer, lifted: State, places: Mapping[int, int]) -> _Now:
        """The rows with those lifted, of which `places` says which goes where."""
        stacked, counts = self.now
        if len(next(iter(lifted.values()))) == len(counts) and [*places] == [*places.values()] == [*range(len(counts))]:
            return reducer.merge(stacked, lifted), [count + 1 for count in counts]
        device = next(iter(stacked.values())).device
        come, go = int_tensor([*places], device), int_tensor([*places.values()], device)
        joined = reducer.merge(
            {key: value[go] for key, value in stacked.items()}, {key: value[come] for key, value in lifted.items()}
        )
        more = list(counts)
        for place in places.values():
            more[place] += 1
        return {key: value.index_copy(0, go, joined[key]) for key, value in stacked.items()}, more


class Row(Waiting):
    """The observations of one leaf that a batch has joined, on top of what the leaf was before.

    Attributes:
        base: the state of the leaf before.
        seen: how many of the observations are in what the monitor holds already.
    """

    __slots__ = ("base", "batch", "index", "seen")

    def __init__(self, path: str, batch: Batch, index: int, base: State, seen: int = 0) -> None:
        self.paths, self.size, self.room = (path,), 0, 2
        self.batch, self.index, self.base, self.seen = batch, index, base, seen

    @property
    def count(self) -> int:  # type: ignore[override]
        """How many wait."""
        return self._total() - self.seen

    def _total(self) -> int:
        counts = self.batch.now[1]
        return counts[self.index] if counts else 0

    def takes(self, x: Tensor) -> bool:
        """Alone, none."""
        return False

    def emptied(self) -> Row:
        return Row(self.paths[0], self.batch, self.index, self.base, self._total())

    def joined(self, reducer: Reducer, states: Mapping[str, State], start: int, stop: int) -> dict[str, State]:
        row = {key: value[self.index].clone() for key, value in self.batch.now[0].items()}
        return {self.paths[0]: reducer.merge(self.base, row)}

    def shown(self, position: int) -> Any:
        return self.batch.now[0]


class Together:
    """What the monitors that are told of one moment see, gathered, and reduced when all were told."""

    def __init__(self) -> None:
        self._groups: defaultdict[Any, list[_Seen]] = defaultdict(list)
        self._copies: tuple[list[Tensor], list[Tensor]] = [], []
        self._changes: list[tuple[Tensor, Tensor]] = []
        self._left = Batch.left
        self._usable = not torch.compiler.is_compiling() and not tracing()
        self._usable = self._usable and not inside_transform()

    def takes(self, x: Tensor) -> bool:
        """Whether a tensor may be observed together with others: a plain one that holds numbers."""
        kind = type(x)
        plain = kind is Tensor or kind is nn.Parameter
        return plain and self._usable and x.layout is torch.strided and not x.is_meta and x.numel() > 0

    def gather(self, monitor: BatchMonitor, module: nn.Module, found: Found) -> Found:
        """Gathers those observations of a monitor that may be; returns the others. What is reduced is the first operand.

        Their rows are looked up here, while what belongs to the monitor is in the cache: to come back to each takes longer than all
        that is computed, where parameters are small.
        """
        others, common, waiting = {}, id(monitor._common), monitor._held.waiting
        for path, operands in found.items():
            x = operands[0]
            if self.takes(x):
                self._groups[common, x.dtype, x.device].append((monitor, module, path, operands, waiting.get((path,))))
            else:
                others[path] = operands
        return others

    def keep(self, kept: Tensor, x: Tensor) -> None:
        """Copies `x` into `kept`, once all were told."""
        self._copies[0].append(kept)
        self._copies[1].append(x.detach())

    def add_change(self, monitor: BatchMonitor, module: nn.Module, path: str, after: Tensor, before: Tensor) -> None:
        """Gathers what has changed; `before` is overwritten with it."""
        row = monitor._held.waiting.get((path,))
        self._groups[id(monitor._common), before.dtype, before.device].append((monitor, module, path, (before,), row))
        self._changes.append((before, after.detach()))

    def record(self) -> None:
        """Reduces all that was gathered."""
        if not self._groups and not self._copies[0]:
            return
        failed = as_monitor(self._record_all)
        for group in failed:  # alone, each tells what is wrong with it, and the others are recorded
            for monitor, module, path, operands, _row in group:
                monitor._record(module, *operands, path=path)

    def _record_all(self) -> list[list[_Seen]]:
        """Returns the groups that could not be reduced together."""
        with LOCK:
            if self._copies[0]:
                torch._foreach_copy_(*self._copies)
            self._subtract()
            return [group for group in self._groups.values() if not _observe(group, self._left)]

    def _subtract(self) -> None:
        befores, afters = [], []
        for before, after in self._changes:
            if after.numel() >= LARGE and after.device.type == "cpu":
                torch.sub(after, before, out=before)
            else:
                befores.append(before)
                afters.append(after)
        if befores:
            torch._foreach_sub_(befores, afters)
            torch._foreach_neg_(befores)


def _observe(group: list[_Seen], left: int) -> bool:
    """Observations of one reducer, dtype and device, bound together; False, and nothing is bound, where one of them fails.

    `left` is what `Batch.left` was before their rows were found.
    """
    reducer = group[0][0]._common
    try:
        lifted = lift_stacked(reducer, [operands[0] for _, _, _, operands, _ in group])
        places: dict[Batch, dict[int, int]] = {}
        apart: list[int] = []
        for position, (monitor, _, path, _, row) in enumerate(group):
            if left != Batch.left:
                row = monitor._held.waiting.get((path,))
            if isinstance(row, Row) and row.batch.now[1]:
                places.setdefault(row.batch, {})[position] = row.index
            else:
                apart.append(position)
        bound: list[tuple[Batch, _Now]] = []
        for batch, there in places.items():
            if len(places) > MANY or not batch.fits(lifted):
                apart += there
            else:
                bound.append((batch, batch.after(reducer, lifted, there)))
        if apart:
            bound.append(_begun(group, sorted(apart), lifted))
    except Exception:
        return False
    for batch, now in bound:
        batch.now = now
    return True


def _begun(group: list[_Seen], positions: list[int], lifted: State) -> tuple[Batch, _Now]:
    """A new batch of those at these positions. It is empty until what is returned with it is bound."""
    batch, device = Batch(), next(iter(lifted.values())).device
    first, _, _, operands, _ = group[positions[0]]
    wanted = {key: value.shape for key, value in first._common.update({}, operands[0].detach()).items()}
    if wanted != {key: value.shape[1:] for key, value in lifted.items()}:
        raise StateMismatchError(f"{first._common!r} lifts the rows of a matrix to other shapes than each by itself")
    Batch.left += 1
    for index, position in enumerate(positions):
        monitor, _, path, _, _ = group[position]
        held = monitor._settled()
        base = {key: value.to(device) for key, value in held.states.get(path, {}).items()}
        others = {key: waiting for key, waiting in held.waiting.items() if path not in waiting.paths}
        monitor._held = held._replace(waiting={**others, (path,): Row(path, batch, index, base)})
    if len(positions) < len(group):
        come = int_tensor(positions, device)
        lifted = {key: value[come] for key, value in lifted.items()}
    return batch, (lifted, [1] * len(positions))


def _kinds(stacked: State) -> dict[str, Any]:
    return {key: (value.shape[1:], value.dtype, value.device) for key, value in stacked.items()}
