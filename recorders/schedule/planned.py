"""StepPlans: which tensors the monitors read at an optimizer step, and where their rows are, found once for many steps.

To notify each of thousands of monitors takes longer than to reduce their small tensors. Most monitors record all parameters at
every step, or every so many, and read them in one way. Of these a plan holds the positions of the parameters and the rows of the
states. Before it is used, all that it was made from is compared, in a few passes: the listeners, the parameters of the optimizer
and of the modules, the gates, and the kinds of tensors that are read. If anything differs, a new plan is made.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter, methodcaller
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.optim import Optimizer

from recorders.capture.batching import StepBatch
from recorders.capture.stacks import StackRow, StateStack
from recorders.schedule.readings import Group, Reading, change, group_of, nothing, picked

__all__ = ["NOT_DUE", "Listeners", "StepPlans"]

NOT_DUE = "not due (every)"

Listeners = Mapping[int, tuple["weakref.ref[nn.Module]", "weakref.ref[Any]"]]
MOST_PLANS = 8  # of one optimizer: for other moments, and for steps in which other monitors are due
LONGEST_WAIT = 64  # steps without a new plan, if the plans before could not be used


class _Turn:
    """Monitors that are due in the same steps, because they have the same `every`, and were called as often.

    Attributes:
        every: the option of the monitors.
        counts: those of the monitors.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self.counts: list[dict[str, int]] = []
        self._gates: list[Any] = []

    def add(self, monitor: Any) -> None:
        self.counts.append(monitor.counts)
        if self.every != 1:
            self._gates.append(monitor.gate)

    def fits(self, stream: object) -> bool:
        """Returns whether each of them was called before, and as often as the others."""
        found = {gate.eligible.get(stream) for gate in self._gates}
        return not self._gates or (len(found) == 1 and None not in found)

    def begin(self, stream: object) -> bool:
        """Counts a call of each; returns whether they are due."""
        for counts in self.counts:
            counts["calls"] = counts.get("calls", 0) + 1
        eligible = self._gates[0].eligible.get(stream, -1) + 1 if self._gates else 0
        for gate in self._gates:
            gate.eligible[stream] = eligible
        due = eligible % self.every == 0
        for counts in () if due else self.counts:
            counts[NOT_DUE] = counts.get(NOT_DUE, 0) + 1
        return due


class _Plan:
    """What the monitors read at some moments of a step.

    Attributes:
        others: the numbers of the listeners that must be notified.
        used: how often the plan was used.
        groups: what is read of the other listeners.
    """

    def __init__(
        self, listeners: Listeners, mine: set[int], optimizer: Optimizer, moments: Sequence[str], step_batch: StepBatch
    ) -> None:
        self.others: list[int] = []
        self.used = 0
        self.groups: dict[Any, Group] = {}
        self._mine, self._left = mine, StateStack.left
        self._turns: dict[Any, _Turn] = {}  # of the monitors that read something; a monitor that is reset leaves its stacks
        self._gates: list[Any] = []
        self._absent: dict[Reading, list[int]] = {}  # positions of parameters of which there is nothing to read
        self._skipping: list[weakref.ref[Any]] = []  # the monitor of each of them
        readings = {number: _reading(monitor(), moments) for number, (_, monitor) in listeners.items()}
        modules: dict[int, nn.Module] = {}
        for number, (ref, _) in listeners.items():
            module = ref()
            if module is not None and readings[number] not in (None, nothing):
                modules[id(module)] = module
        self._modules = [weakref.ref(module) for module in modules.values()]
        self._names = [name for module in modules.values() for name in module._parameters]
        self._ids = [id(parameter) for module in modules.values() for parameter in module._parameters.values()]
        places = {key: position for position, key in enumerate(self._ids)}
        for number, refs in listeners.items():
            reading = readings[number]
            if reading is None or not self._take(refs, reading, places, optimizer, step_batch):
                self.others.append(number)

    def _take(self, refs: Any, reading: Reading, places: Mapping[int, int], optimizer: Optimizer, batch: StepBatch) -> bool:
        """Adds what a monitor reads; returns False if it has to be notified."""
        module, monitor = refs[0](), refs[1]()
        if module is None or monitor is None:
            return False
        leaves = [] if reading is nothing else monitor._among(module, self._mine)
        try:
            tensors = reading([parameter for _, parameter in leaves], optimizer)
        except Exception:  # such as of a state that is no dictionary: the monitor meets it again when it is notified, and tells
            return False
        every, gate = monitor.gate.every, monitor.gate
        counted = reading is not change  # which belongs to a call that was counted before the step
        calls = every == 1 or gate.eligible.get(weakref.ref(optimizer))
        turn = self._turns.setdefault((counted, every, calls), _Turn(every))
        rows = [monitor.buffer.stored.pending.get((path,)) for path, _ in leaves]
        if len(tensors) != len(leaves) or not all(
            x is None or (isinstance(x, Tensor) and isinstance(row, StackRow) and StepBatch.accepts(batch, x))
            for x, row in zip(tensors, rows, strict=True)
        ):
            return False
        for (path, parameter), x, row in zip(leaves, tensors, rows, strict=True):
            position = places[id(parameter)]
            if x is None:
                self._absent.setdefault(reading, []).append(position)
                self._skipping += [refs[1]] if monitor.absence else []
            else:
                key = reading, id(monitor.buffer.common), x.dtype, x.device, turn
                if key not in self.groups:
                    self.groups[key] = group_of(reading)(reading, monitor.buffer.common, x.dtype, x.device, turn)
                self.groups[key].add(refs, path, position, x, row)
        if leaves:
            self._gates.append(gate)
        if counted and any(x is not None for x in tensors):
            turn.add(monitor)
        return True

    def gather(self, mine: set[int], optimizer: Optimizer, step_batch: StepBatch) -> bool:
        """Gathers all that is read in the step; returns False, and gathers nothing, if the plan does not fit any more."""
        if self._left != StateStack.left or self._mine != mine or not step_batch.usable:
            return False
        for gate in self._gates:
            if not (gate.on and gate.active):
                return False
        owned = [*map(_owned, _alive(self._modules))]
        parameters = [*chain.from_iterable(map(_values, owned))]
        if self._ids != [*map(id, parameters)] or self._names != [*chain.from_iterable(owned)]:
            return False
        skipping = _alive(self._skipping)
        try:
            found = [(group, group.read(parameters, optimizer)) for group in self.groups.values()]
            absent = [x for reading, there in self._absent.items() for x in reading(picked(parameters, there), optimizer)]
        except Exception:
            return False
        if any(tensors is None for _, tensors in found) or any(x is not None for x in absent):
            return False
        if not all(turn.fits(weakref.ref(optimizer)) for turn in self._turns.values()):
            return False
        due = {turn for turn in self._turns.values() if turn.begin(weakref.ref(optimizer))}
        for monitor in skipping:
            monitor._skip(monitor.absence)
        for group, tensors in found:
            if group.turn in due:
                group.gather(tensors or (), step_batch)
            else:
                group.leave_out()
        self.used += 1
        return True


class StepPlans:
    """The plans of all optimizers. If plans cannot be used, because each step differs from the one before, few are made."""

    def __init__(self) -> None:
        self._plans: WeakKeyDictionary[Optimizer, dict[Any, _Plan]] = WeakKeyDictionary()
        self._wait: WeakKeyDictionary[Optimizer, tuple[int, int]] = WeakKeyDictionary()  # steps without a plan: to come, last time

    def gather(
        self, listeners: Listeners, mine: set[int], optimizer: Optimizer, moments: tuple[str, ...], step_batch: StepBatch
    ) -> Iterator[int]:
        """Gathers what is read by plan; returns the numbers of the listeners that must be notified."""
        key = moments, tuple(listeners)
        plans = self._plans.setdefault(optimizer, {})
        plan = plans.get(key)
        if plan is not None:
            if plan.gather(mine, optimizer, step_batch):
                return iter(plan.others)
            del plans[key]
        coming, last = self._wait.get(optimizer, (0, 0))
        if plan is not None and plan.groups:  # each plan that served only the step for which it was made doubles the wait
            coming = last = 0 if plan.used > 1 else min(2 * last + 1, LONGEST_WAIT)
        if not coming and step_batch.usable:
            plan = _Plan(listeners, mine, optimizer, moments, step_batch)
            while len(plans) >= MOST_PLANS:
                del plans[next(iter(plans))]
            plans[key] = plan
            if plan.gather(mine, optimizer, step_batch):
                return iter(plan.others)
        self._wait[optimizer] = max(0, coming - 1), last
        return iter(key[1])


def _reading(monitor: Any, moments: Sequence[str]) -> Reading | None:
    """Returns what a monitor reads at the only one of the moments that concerns it; None if it has to be notified, or is gone."""
    if monitor is None:
        return None
    readings = [reading for moment in moments if (reading := monitor._reading(moment)) is not nothing]
    return nothing if not readings else readings[0] if len(readings) == 1 else None


def _alive(refs: Sequence[weakref.ref[Any]]) -> list[Any]:
    return [found for ref in refs if (found := ref()) is not None]


_owned, _values = attrgetter("_parameters"), methodcaller("values")
