"""Meter: measures the cost of recording in some of the steps, and chooses a cadence that keeps the cost within a budget.

The cost has three parts: the work of the monitors, which is timed; the calls of their hooks by PyTorch; and the work of the clock
at every step. The calls are measured at the end of measured steps, on modules made for this purpose: the caches are then as the
training leaves them, and a call takes several times as long as in a loop. If some steps record nothing, steps that record are also
compared with them. This shows what recording slows down elsewhere.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from recorders.errors import RecordingWarning
from recorders.recorder.overhead import Overhead
from recorders.recorder.window import FIRST, Sums, Window
from recorders.schedule.call_cost import CallCost
from recorders.schedule.stopwatch import Sample, now
from reducers.errors import warn_user

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.utils.hooks import RemovableHandle

    from recorders.monitors.base import Monitor

__all__ = ["Meter"]

APART = 31  # steps from one measured step to the next; odd, because buffered observations are reduced about every 96 steps
WINDOW = 64  # measured steps between two choices of the cadence; the first choice, after FIRST, can only lower it
SPAN = 8 * WINDOW  # the most steps in a window at a low cadence, where measured steps are far apart
TOLERANCE = 0.01  # a budget that idle steps exceed by more than this cannot be kept
SLACK = 0.85  # share of the budget that a higher cadence must fit into, so that the cadence does not alternate
MANY = 1 << 60
PENDING = 8  # the most measured steps whose device events may be unfinished


class Meter:
    """Measures what the monitors of a recorder cost, in some of the steps of its clock, and chooses the cadence for a budget.

    Attributes:
        budget: the share of the steps' time that recording may take; None for no limit.
        every_step: the cadence: one in this many of the steps that monitors choose is recorded.
        on: whether hooks are on; otherwise nothing is measured.
        counting: the handle of the hook with which the clock counts micro-batches.
        give_up: is called if no cadence keeps the budget.
        uneventful: the number of coming steps of which it need not be told, if the clock switches nothing in them. The clock counts
            it down.
    """

    def __init__(self, budget: float | None = None, every_step: int = 1) -> None:
        self.budget, self.every_step, self.on = budget, every_step, True
        self.counting: RemovableHandle | None = None
        self._way = CallCost()
        self.monitors: WeakValueDictionary[str, Monitor] = WeakValueDictionary()
        self._sample: Sample | None = None
        self._before, self._window, self._size = Window(), Window(), FIRST
        self._dense = FIRST + WINDOW  # consecutive steps to measure at first
        self._ago = APART  # recording steps since the last measured one
        self._since: int | None = None  # steps since a recording step was measured; None if no idle step is needed for comparison
        self._ended: float | None = None  # when the previous step's measurement ended
        self._ungated = False
        self._pending: list[tuple[Sums, list[tuple[Any, Any]]]] = []
        self._advanced = False
        self.give_up: Callable[[], Callable[[], None] | None] = lambda: None  # a weak reference to it
        self.uneventful = self._announced = 0
        self._flushed: dict[str, float] = {}  # seconds of each monitor when they were counted last

    def add(self, name: str, monitor: Monitor) -> None:
        """Starts to measure `monitor`."""
        self.switch(True)
        self.monitors[name] = monitor
        self._flushed[name] = monitor.buffer.flush_seconds
        self._ungated = self._ungated or not monitor.gate.chooses_steps

    def remove(self, name: str) -> None:
        """Stops measuring the monitor of that name."""
        self.drop()
        self.monitors.pop(name, None)
        self._ungated = any(not one.gate.chooses_steps for one in self.monitors.values())

    def switch(self, on: bool) -> None:
        """Notes that hooks were put on or taken off."""
        self.drop()
        self.on = on

    def drop(self) -> None:
        """Discards the measurement of the present step, for example because hooks were changed in it."""
        self._count_skipped()
        sample, self._sample, self._ended = self._sample, None, None
        if sample is not None:
            sample.close()

    def _count_skipped(self) -> None:
        """Counts the steps that have passed without notice; there are no more of them until the next `begin`."""
        skipped = self._announced - self.uneventful
        self.uneventful = self._announced = 0
        if skipped and self.on:
            self._window.steps += skipped
            self._window.recorded += self._ungated * skipped
            self._window.chosen += self.every_step * self._ungated * skipped
            self._ago += self._ungated * skipped
            if self._since is not None:
                self._since += skipped

    def end(self) -> int:
        """Ends a step; returns the cadence from now on."""
        self._advanced = True
        self._count_skipped()
        sample, self._sample = self._sample, None
        if sample is not None and (seconds := sample.end()) is not None:
            sums = self._window.busy if sample.busy else self._window.idle
            sums.add(sample, seconds)
            if sample.pairs:
                self._pending = [*self._pending, (sums, sample.pairs)][-PENDING:]
            self._window.way = self._way = self._way.measure()
            self._ended = now()
            self._window.samples += 1
            self._window.sampling += self._ended - sample.ended
        if self._pending:
            self._pending = [item for item in self._pending if not _read(*item)]
        if self._window.busy.steps >= self._size:
            self._choose()
        return self.every_step

    def begin(self, records: bool) -> None:
        """Begins a step; `records` says whether any monitor that the clock switches records in it."""
        started = None
        if self._ended is not None:
            started = now()
            self._window.advances.append(started - self._ended)
            self._ended = None
        if not self.on:
            return
        busy = records or self._ungated
        self._window.steps += 1
        self._window.recorded += busy
        self._window.chosen += self.every_step * busy
        self._ago += busy
        if self.monitors and self._is_measured(busy):
            started = now() if started is None else started
            self._sample = Sample(busy)
            self._window.sampling += self._sample.begin(self.monitors, self.counting) - started
        elif not self._pending:
            self.uneventful = self._announced = self._steps_until_measured(busy)

    def _is_measured(self, busy: bool) -> bool:
        """Whether to measure the step that begins. Idle steps are measured when the caches have recovered from recording."""
        if busy and self._ago >= self._apart:
            self._ago, self._dense = 0, max(0, self._dense - 1)
            self._since = None if self._ungated else 0
            return True
        if busy or self._since is None:
            return False
        self._since += 1
        measured = self._since >= self.every_step // 2
        self._since = None if measured else self._since
        return measured

    @property
    def _apart(self) -> int:
        return 1 if self._dense else max(1, APART // self.every_step) | 1

    def _steps_until_measured(self, busy: bool) -> int:
        """The number of steps like this one, which is not measured, before one that is."""
        if busy:
            return max(0, self._apart - self._ago - 1) if self._ungated else 0
        return MANY if self._since is None else max(0, self.every_step // 2 - self._since - 1)

    def switched(self, started: float) -> None:
        """Adds the time since `started`, in which hooks were taken out or put back."""
        self._window.switches += 1
        self._window.switching += now() - started

    def _choose(self) -> None:
        self._count_flushes()
        window, first = self._window, not self._before.steps
        if self.budget is not None and window.share(self.every_step) > self.budget:
            self.every_step = max(self.every_step, window.every_within(self.budget))
        elif self.budget is not None and not first:
            self.every_step = min(self.every_step, window.every_within(self.budget * SLACK))
        if self.budget is not None and not first and min(window.least_share, self._before.least_share) > self.budget + TOLERANCE:
            self._stop(window)
        self._before, self._window = window, Window()
        self._size = max(FIRST, min(WINDOW, SPAN // self.every_step))

    def _stop(self, window: Window) -> None:
        """Ends the recording: a smaller share of recorded steps would not help, because the others exceed the budget already."""
        give_up = self.give_up()
        if give_up is None:
            return
        give_up()
        least = window.least_share
        warn_user(
            f"Recorder(budget={self.budget}): recording has stopped. Without it a step takes {1e3 * window.bare:.2g} ms, "
            f"and of a step that records nothing the recorder takes {100 * least:.1f} %, so no cadence keeps the budget. "
            f"What was recorded stays. Give a budget of {math.ceil(100 * least + 1) / 100} or more, or none",
            RecordingWarning,
        )

    def _count_flushes(self) -> None:
        for name, monitor in self.monitors.items():
            self._window.flushes[name] += monitor.buffer.flush_seconds - self._flushed[name]
            self._flushed[name] = monitor.buffer.flush_seconds

    def overhead(self) -> Overhead:
        """The cost as measured in the last two windows."""
        self._count_skipped()
        self._count_flushes()
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
        for name in by_name:
            by_name[name] += often * both.flushes[name] / max(1, both.recorded)
        seconds = often * (both.busy.on_host + both.outside + both.flushing)
        seconds += (1 - often) * (both.idle.on_host + both.idle.call_seconds(both.way))
        seconds += both.upkeep + (both.switching + both.sampling) / max(1, both.steps)
        device = None
        if both.busy.device_steps:
            device = often * both.busy.on_device + (1 - often) * both.idle.on_device
        return Overhead(
            seconds, both.bare + seconds, by_name, steps, self.every_step, self.budget, device, self._note(both), _all_record(both)
        )

    def _nothing(self) -> str:
        if not self._advanced:
            return "the clock has not advanced: call recorder.attach(optimizer), or recorder.step() after every step"
        return "the first step is left out, as warm-up, and so are steps in which hooks are put on or off; no other has ended yet"

    def _note(self, both: Window) -> str:
        left_out = ["reading results"]
        if _all_record(both):
            left_out.append("what recording slows down elsewhere: no steps without recording were measured")
        if any(monitor.compiled for monitor in self.monitors.values()):
            left_out.append("what compiled graphs compute for it in their own kernels")
        parts = [f"not included: {', '.join(left_out)}"]
        if both.busy.device_steps:
            parts.append("the device time includes gaps between the kernels of a hook")
        if self.budget is not None and both.exceeds(self.budget):
            parts.append("no cadence keeps within the budget: steps that record nothing exceed it already")
        return "; ".join(parts)

    def __reduce__(self) -> tuple[Any, ...]:
        return Meter, (self.budget, self.every_step)


def _all_record(window: Window) -> bool:
    """Whether too few steps without recording were measured to compare with."""
    return min(window.busy.steps, window.idle.steps) < FIRST


def _read(sums: Sums, pairs: list[tuple[Any, Any]]) -> bool:
    """Adds the device time if its events are finished; returns whether they are. Does not wait."""
    if not all(end is None or end.query() for _, end in pairs):
        return False
    sums.device_steps += 1
    sums.device += sum(start.elapsed_time(end) for start, end in pairs if end is not None) / 1e3
    return True
