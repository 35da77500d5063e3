"""Measures some of the steps, and chooses how seldom to record so that it stays within a budget.

The cost has three parts: what the monitors do, which is timed; what PyTorch does to call them, which it does not do for a module
without hooks; and what the clock does at every step. The second is measured at the end of measured steps, on modules of our own: there
the caches are as the training leaves them, and a call takes several times what it takes in a loop. If there are steps that record
nothing, steps that record are also compared with them, so that what recording slows down elsewhere is seen too.
"""

from __future__ import annotations

import math
import warnings
from statistics import median
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from recorders.errors import RecordingWarning
from recorders.overhead import Overhead
from recorders.stopwatch import Sample, Seconds, Way, Ways, now

if TYPE_CHECKING:
    from recorders.monitor import Monitor

__all__ = ["Meter"]

APART = 31  # steps from one that is measured to the next; odd, for what waits is reduced every 96th time or so
FIRST, WINDOW = 8, 64  # measured steps after which the cadence is chosen: at first, which may only lower it, and later
SPAN = 8 * WINDOW  # steps, from where on a window is shorter where records are far apart
SLACK = 0.85  # of the budget, that a higher cadence must keep within: nothing flutters between two
SELDOM = 1000  # the lowest cadence
PATIENCE = 300  # forwards with gradients on, before anybody may expect the first step
PENDING = 8  # measured steps whose events of a device are waited for


class _Sums:
    """Measured steps of one kind: those in which anything records, or the others."""

    def __init__(self) -> None:
        self.steps = self.device_steps = 0
        self.total = self.device = 0.0
        self.seconds, self.ways = Seconds(), Ways()
        self.each: list[float] = []  # seconds in monitors, of each step
        self.rest: list[float] = []  # the other seconds of it
        self.upkeep: list[float] = []  # of those what the clock took

    def __add__(self, other: _Sums) -> _Sums:
        both = _Sums()
        for sums in (self, other):
            both.steps += sums.steps
            both.total += sums.total
            both.device_steps += sums.device_steps
            both.device += sums.device
            both.seconds.add(sums.seconds)
            both.ways.add(sums.ways)
            both.each += sums.each
            both.rest += sums.rest
            both.upkeep += sums.upkeep
        return both

    def add(self, sample: Sample, seconds: float) -> None:
        """One step more."""
        spent = sum(sample.seconds.values())
        self.steps += 1
        self.total += seconds
        self.seconds.add(sample.seconds)
        self.ways.add(sample.ways)
        self.each.append(spent)
        self.rest.append(seconds - spent)
        self.upkeep.append(sample.upkeep)

    def called(self, way: Way) -> float:
        """Seconds a step that PyTorch takes to call what is ours."""
        return sum(way.cost(*calls) for calls in self.ways.values()) / max(1, self.steps)

    @property
    def usual(self) -> float:
        """Seconds of a step on the host, but for the few that take long."""
        return median(self.each) if self.each else 0.0

    @property
    def on_host(self) -> float:
        """Seconds a step."""
        return sum(self.seconds.values()) / max(1, self.steps)

    @property
    def on_device(self) -> float:
        """Seconds a step."""
        return self.device / max(1, self.device_steps)


class _Window:
    """Some measured steps, and how many steps of each kind went by meanwhile."""

    def __init__(self) -> None:
        self.busy, self.idle = _Sums(), _Sums()
        self.steps = self.chosen = self.samples = self.switches = 0
        self.sampling = self.switching = 0.0
        self.advances: list[float] = []  # what the clock takes between two steps
        self.way = Way()

    def __add__(self, other: _Window) -> _Window:
        both = _Window()
        both.busy, both.idle = self.busy + other.busy, self.idle + other.idle
        both.steps, both.chosen, both.samples = self.steps + other.steps, self.chosen + other.chosen, self.samples + other.samples
        both.switches, both.switching = self.switches + other.switches, self.switching + other.switching
        both.sampling, both.advances, both.way = self.sampling + other.sampling, self.advances + other.advances, other.way
        return both

    @property
    def frequency(self) -> float:
        """Of all steps, those that would record without a cadence."""
        return min(1.0, self.chosen / self.steps) if self.steps else 1.0

    @property
    def bare(self) -> float:
        """Seconds of a step, but for recording."""
        taken = 0.0
        for sums, ways in ((self.busy, self.around), (self.idle, self.idle.called(self.way))):
            taken += sums.total - sums.steps * (sums.on_host + ways) - sum(sums.upkeep)
        return max(0.0, taken) / max(1, self.busy.steps + self.idle.steps)

    @property
    def around(self) -> float:
        """Seconds of a step that records, around what the monitors do: the way to them, and what else is slower than without them.

        The latter is what steps that record take beyond those that do not, as far as it is no chance.
        """
        way = self.busy.called(self.way)
        if min(self.busy.steps, self.idle.steps) < FIRST:
            return way
        error = math.hypot(_error(self.busy.rest), _error(self.idle.rest))
        return max(way, median(self.busy.rest) - median(self.idle.rest) - 2 * error)

    @property
    def upkeep(self) -> float:
        """Seconds of each step, whether it records or not, that the clock takes."""
        within = self.busy.upkeep + self.idle.upkeep
        return (median(within) if within else 0.0) + (median(self.advances) if self.advances else 0.0)

    @property
    def once(self) -> float:
        """Seconds that a step which records costs besides, where others do not: hooks are switched, and two steps are measured."""
        return 2 * (self.switching / max(1, self.switches) + self.sampling / max(1, self.samples))

    @property
    def _recording(self) -> float:
        """Seconds of a step that records, on the host or on the device, where it takes longer."""
        return max(self.busy.on_host + self.around, self.busy.on_device)

    @property
    def _idle(self) -> float:
        """The same for the other steps, of which none takes long on purpose."""
        return max(self.idle.usual + self.idle.called(self.way), self.idle.on_device)

    def cost(self, every: int) -> float:
        """Seconds of recording a step where one in so many of the chosen steps records."""
        often = self.frequency / every
        return often * self._recording + (1 - often) * self._idle + self.upkeep + (often * self.once if often < 1 else 0.0)

    def share(self, every: int) -> float:
        """The same, of the step."""
        cost = self.cost(every)
        return cost / (self.bare + cost) if cost else 0.0

    def every_within(self, budget: float) -> int:
        """The highest cadence that keeps within the budget.

        What steps cost that do not record is part of it. Where they leave less than a tenth of the budget, recording takes a tenth:
        a lower cadence would hardly help.
        """
        if self.share(1) <= budget:
            return 1
        allowed = budget / (1 - budget) * self.bare
        beyond = self.frequency * (self._recording - self._idle + self.once)
        room = max(allowed - self._idle - self.upkeep, allowed / 10)
        return max(1, min(SELDOM, math.ceil(beyond / room - 1e-9) if room else SELDOM))

    def beyond(self, budget: float) -> bool:
        """Whether steps that record nothing take more than the budget."""
        return self._idle + self.upkeep > budget / (1 - budget) * self.bare


def _error(values: list[float]) -> float:
    """The standard error of their median, from how far they are from it."""
    middle = median(values)
    return 1.86 * median(abs(value - middle) for value in values) / math.sqrt(len(values))


class Meter:
    """Measures what the monitors of a recorder cost, in some of the steps of its clock, and chooses the cadence for a budget.

    Attributes:
        budget: the share of the steps that recording may take; None where it is only measured.
        every_step: the cadence: of the steps that monitors choose, one in so many is recorded.
        on: whether there is anything to measure: hooks are on.
        counting: the handle of the hook by which the clock counts micro-batches.
    """

    def __init__(self, budget: float | None = None, every_step: int = 1) -> None:
        self.budget, self.every_step, self.on = budget, every_step, True
        self.counting: Any = None
        self._way = Way()
        self.monitors: WeakValueDictionary[str, Monitor] = WeakValueDictionary()
        self._sample: Sample | None = None
        self._before, self._window, self._size = _Window(), _Window(), FIRST
        self._dense = FIRST + WINDOW  # measured steps in a row, before they get apart
        self._ago = APART  # steps that record since the last one that was measured
        self._since: int | None = None  # steps since one that records was measured; None if no other is wanted to compare it with
        self._ended: float | None = None  # when the measuring of the step before ended
        self._ungated = False
        self._pending: list[tuple[_Sums, list[tuple[Any, Any]]]] = []
        self._advanced = self._told = False

    def add(self, name: str, monitor: Monitor) -> None:
        """Measures `monitor` too."""
        self.switch(True)
        self.monitors[name] = monitor
        self._ungated = any(not one.gated for one in self.monitors.values())

    def remove(self, name: str) -> None:
        """Measures it no more."""
        self.drop()
        self.monitors.pop(name, None)
        self._ungated = any(not one.gated for one in self.monitors.values())

    def switch(self, on: bool) -> None:
        """Hooks were put on or taken off."""
        self.drop()
        self.on = on

    def drop(self) -> None:
        """Leaves the step that is being measured out: something else than recording went on in it."""
        sample, self._sample, self._ended = self._sample, None, None
        if sample is not None:
            sample.close()

    def end(self) -> int:
        """A step has ended; returns the cadence from now on."""
        self._advanced = True
        sample, self._sample = self._sample, None
        if sample is not None and (seconds := sample.end()) is not None:
            sums = self._window.busy if sample.busy else self._window.idle
            sums.add(sample, seconds)
            if sample.pairs:
                self._pending = [*self._pending, (sums, sample.pairs)][-PENDING:]
            self._window.way = self._way = self._way.probed()
            self._ended = now()
            self._window.samples += 1
            self._window.sampling += self._ended - sample.ended
        self._pending = [item for item in self._pending if not _read(*item)]
        if self._window.busy.steps >= self._size:
            self._choose()
        return self.every_step

    def begin(self, records: bool) -> None:
        """A step begins; `records` says whether any monitor with steps of its own, or a budget, does in it."""
        started = None
        if self._ended is not None:
            started = now()
            self._window.advances.append(started - self._ended)
            self._ended = None
        if not self.on or not self.monitors:
            return
        busy = records or self._ungated
        self._window.steps += 1
        self._window.chosen += self.every_step * busy
        self._ago += busy
        if busy and self._ago >= (1 if self._dense else max(1, APART // self.every_step) | 1):
            self._ago, self._dense = 0, max(0, self._dense - 1)
            self._since = None if self._ungated else 0
        elif busy or self._since is None:
            return
        else:
            self._since += 1
            if self._since < self.every_step // 2:  # caches are as they were before
                return
            self._since = None
        started = now() if started is None else started
        self._sample = Sample(busy)
        self._window.sampling += self._sample.begin(self.monitors, self.counting) - started

    def switched(self, started: float) -> None:
        """Hooks were taken out or put back since then."""
        self._window.switches += 1
        self._window.switching += now() - started

    def forwards(self, count: int) -> None:
        """So many forwards have come since the last step."""
        if self.budget is not None and count >= PATIENCE and not self._advanced and not self._told:
            self._told = True
            warnings.warn(
                f"Recorder(budget={self.budget}): {count} forwards with gradients on, and not one step of the clock, by which the "
                "budget is kept: call recorder.attach(optimizer), or recorder.step() after every step",
                RecordingWarning,
                stacklevel=2,
            )

    def _choose(self) -> None:
        window, first = self._window, not self._before.steps
        if self.budget is not None and window.share(self.every_step) > self.budget:
            self.every_step = max(self.every_step, window.every_within(self.budget))
        elif self.budget is not None and not first:
            self.every_step = min(self.every_step, window.every_within(self.budget * SLACK))
        self._before, self._window = window, _Window()
        self._size = max(FIRST, min(WINDOW, SPAN // self.every_step))

    def overhead(self) -> Overhead:
        """What was measured lately."""
        both = self._before + self._window
        steps = both.busy.steps + both.idle.steps
        often = both.frequency / self.every_step
        if not steps:
            return Overhead(math.nan, math.nan, {}, 0, self.every_step, self.budget, note=self._nothing())
        share = {True: often, False: 1 - often}
        by_name = dict.fromkeys(self.monitors, 0.0)
        for kind, sums in ((True, both.busy), (False, both.idle)):
            for name in by_name:
                seconds = sums.seconds[name] + both.way.cost(*sums.ways[name])
                by_name[name] += share[kind] * seconds / max(1, sums.steps)
        seconds = often * (both.busy.on_host + both.around) + (1 - often) * (both.idle.on_host + both.idle.called(both.way))
        seconds += both.upkeep + (both.switching + both.sampling) / max(1, both.steps)
        device = None
        if both.busy.device_steps:
            device = often * both.busy.on_device + (1 - often) * both.idle.on_device
        return Overhead(seconds, both.bare + seconds, by_name, steps, self.every_step, self.budget, device, self._note(both))

    def _nothing(self) -> str:
        if not self._advanced:
            return "the clock has not advanced: call recorder.attach(optimizer), or recorder.step() after every step"
        return "the first step is left out, as warm-up, and steps in which hooks are put on or off; no other has ended yet"

    def _note(self, both: _Window) -> str:
        left_out = ["reading results"]
        if any(monitor.compiled for monitor in self.monitors.values()):
            left_out.append("what compiled graphs compute for it in their own kernels")
        parts = [f"not in it: {', '.join(left_out)}"]
        if both.busy.device_steps:
            parts.append("on the device, gaps between the kernels of a hook are counted too")
        if self.budget is not None and both.beyond(self.budget):
            parts.append("no cadence keeps within the budget: steps that record nothing take more of it")
        return "; ".join(parts)

    def __reduce__(self) -> tuple[Any, ...]:
        return Meter, (self.budget, self.every_step)


def _read(sums: _Sums, pairs: list[tuple[Any, Any]]) -> bool:
    """Adds what the device took, once it is known; nothing is waited for."""
    if not all(end is None or end.query() for _, end in pairs):
        return False
    sums.device_steps += 1
    sums.device += sum(start.elapsed_time(end) for start, end in pairs if end is not None) / 1e3
    return True
