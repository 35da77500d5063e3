"""Meter: what recording costs, if anybody asks, and the cadence that keeps it within a budget.

If there are steps that record nothing, because of a budget or of the monitors' own steps, steps that record are compared with them:
the median of the differences is what recording costs. In one measured step of four, or in each if all record, the work of each
monitor is timed: this names the costly ones, and is the least that recording costs.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from random import Random
from statistics import fmean, median
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from recorders.errors import RecordingWarning
from recorders.schedule.steps import parameters_watched
from recorders.schedule.stopwatch import Stopwatch, now, time_joins
from reducers.errors import warn_user

__all__ = ["FIRST", "ROUND", "WINDOW", "Meter", "Window"]

FIRST = 8  # the measured steps before the first choice of a cadence, which can only lower it
WINDOW = 64  # the measured steps that record, in a window
ROUND = 31 * WINDOW  # the fewest steps from the beginning of one window to that of the next, if there is a budget
SPAN = 8 * WINDOW  # the most steps in a window at a low cadence, at which measured steps are far apart
FEWEST = 5  # the fewest steps of each kind that are compared
CLEAR = 3  # the standard errors that no difference exceeds by chance
UNSEEN = 1.5  # if all steps record, recording costs up to so many times what is timed of it
SELDOM = 1000  # the lowest cadence: one step in 1000
SLACK = 0.85  # the share of the budget that a higher cadence must fit into, so that the cadence does not alternate
TOLERANCE = 0.01  # a budget that steps without recording exceed by more than this cannot be kept
MANY = 1 << 60
PENDING = 8  # the most timed steps whose device events may be unfinished


class Timed(NamedTuple):
    """Seconds of a step in which the work of monitors was timed: of the step, of the monitors, of the hooks that they share."""

    step: float
    monitors: float
    shared: float


class Window:
    """What was measured in some steps, under True of steps that record, under False of others; and what it says of the cost."""

    def __init__(self) -> None:
        self.steps = self.recorded = self.told = 0  # told: of which the clock told the meter
        self.chosen = 0.0  # the steps that would have recorded at cadence 1
        self.measured = 0  # of the steps
        self.pairs: list[tuple[float, float]] = []  # seconds of a step that records, and of one that does not
        self.timed: dict[bool, list[Timed]] = {True: [], False: []}
        self.by_name = {True: defaultdict[str, float](float), False: defaultdict[str, float](float)}
        self.device: list[float] = []  # seconds of work on the device, in steps that record
        self.advances: dict[bool, list[float]] = {True: [], False: []}  # seconds of the clock after the step
        self.joins = defaultdict[str, float](float)  # in which pending observations were reduced
        self.updates = 0.0  # the share of the work of the hooks on optimizers that is done for these monitors

    @property
    def compared(self) -> bool:
        """Whether there are enough steps of both kinds to compare them."""
        return len(self.pairs) >= FEWEST

    @property
    def difference(self) -> tuple[float, float]:
        """The seconds that a step takes longer if it records, a median, and its standard error, from the absolute deviation."""
        found = [busy - idle for busy, idle in self.pairs]
        middle = median(found)
        return middle, 1.86 * median(abs(each - middle) for each in found) / math.sqrt(len(found))

    @property
    def shared(self) -> float:
        """Seconds of the hooks on optimizers in each step, whether it records or not."""
        return _median([one.shared for one in self.timed[False] or ([] if self.updates else self.timed[True])])

    @property
    def updating(self) -> float:
        """Seconds in which those hooks reduce parameters for these monitors, in a step that records."""
        return self.updates * max(0.0, _mean([one.shared for one in self.timed[True]]) - self.shared)

    @property
    def idle(self) -> float:
        """Seconds of the monitors in a step that does not record: a median, because none of them is long on purpose."""
        return _median([one.monitors for one in self.timed[False]])

    @property
    def seen(self) -> float:
        """Seconds of the work that is timed, in a step that records beyond those in another one."""
        return max(_mean([one.monitors for one in self.timed[True]]) + self.updating - self.idle, self.on_device)

    @property
    def on_device(self) -> float:
        """Seconds of the monitors' work on the device, in a step that records."""
        return _mean(self.device)

    @property
    def joining(self) -> float:
        """Seconds in which pending observations are reduced, for each step that records."""
        return sum(self.joins.values()) / max(1, self.recorded)

    @property
    def recording(self) -> float:
        """Seconds that recording takes in a step: by comparison, unless this says nothing else than what is timed."""
        found, error = self.difference if self.compared else (0.0, math.inf)
        return (found if abs(found - self.seen) > CLEAR * error else self.seen) + self.joining

    @property
    def advance(self) -> float:
        """Seconds that the clock takes to advance, if it does not know already that nothing is to be done."""
        return _median(self.advances[False] or self.advances[True])

    @property
    def least(self) -> float:
        """Seconds of recording in a step that does not record."""
        return self.idle + self.shared + self.advance * self.told / max(1, self.steps)

    @property
    def bare(self) -> float:
        """Seconds of a step without a recorder."""
        if self.compared:
            return max(0.0, _typical([idle for _, idle in self.pairs]) - self.idle - self.shared - 2 * self.advance)
        return max(0.0, _typical([step - own - shared for step, own, shared in self.timed[False] or self.timed[True]]))

    def often(self, every: int) -> float:
        """The share of all steps that record at a cadence."""
        return min(1.0, self.chosen / max(1, self.steps)) / every

    def cost(self, every: int) -> float:
        """Seconds of recording per step at a cadence."""
        return self.often(every) * self.recording + self.least

    def share(self, every: int) -> float:
        """The cost at a cadence as a share of the step. If all steps record, not all of it is seen."""
        unseen = self.often(every) * max(0.0, UNSEEN * self.seen + self.joining - self.recording) if every == 1 else 0.0
        return _share(self.cost(every) + unseen, self.bare)

    @property
    def least_share(self) -> float:
        """The share of a step that records nothing."""
        return _share(self.least, self.bare)

    def every_within(self, budget: float) -> int:
        """The smallest cadence that keeps the cost within the budget.

        If steps that record nothing leave less than a tenth of the budget, a tenth is used all the same, because a lower cadence
        would hardly help. The cadence is never 2, at which no step without recording is an even number of steps after one with it.
        """
        if self.share(1) <= budget:
            return 1
        allowed = budget / (1 - budget) * self.bare
        room = max(allowed - self.least, allowed / 10)
        return max(3, min(SELDOM, math.ceil(self.often(1) * self.recording / room - 1e-9) if room else SELDOM))


class Measured:
    """A step that is measured now.

    Attributes:
        busy: whether it records.
        before: when the clock began to advance to it; `began` and `ended` are the ends of the step itself.
        joined: what `Meter.joined` was then.
        stopwatch: times the work of the monitors; None if only the step is timed.
    """

    def __init__(self, busy: bool, before: float, joined: float, stopwatch: Stopwatch | None) -> None:
        self.busy, self.before, self.joined, self.stopwatch = busy, before, joined, stopwatch
        self.began = self.ended = 0.0


class Meter:
    """Measures what the monitors of a recorder cost, and chooses the cadence for a budget.

    Attributes:
        budget: the share of the steps' time that recording may take; None for no limit.
        every_step: the cadence: one in this many of the steps that monitors choose is recorded.
        measuring: whether the clock has to tell of its steps.
        monitors: those of the recorder, by name.
        joined: seconds in which pending observations were reduced.
        give_up: is called if no cadence keeps the budget.
    """

    def __init__(self, budget: float | None = None, every_step: int = 1) -> None:
        self.budget, self.every_step, self.measuring, self.joined = budget, every_step, False, 0.0
        self.monitors: WeakValueDictionary[str, Any] = WeakValueDictionary()
        self.give_up: Callable[[], Callable[[], None] | None] = lambda: None  # a weak reference to it
        self._on, self._ungated = True, False  # whether hooks are on, and whether all steps record
        self._gaps, self._timed = False, True  # whether a step came that does not record; whether monitors are timed in this pair
        self._half: float | None = None  # seconds of the step that recorded, until there is one to compare with
        self._before, self._window, self._size, self._records = Window(), Window(), FIRST, 0  # the measured steps that recorded
        self._step: Measured | None = None
        self._advancing = 0.0  # when the clock began to advance
        self._rest, self._wait = 0, MANY  # steps until some are measured again; until one that does not record is
        self._joins: dict[str, float] = {}  # seconds of each monitor when they were counted last
        self._pending: list[tuple[Window, list[tuple[Any, Any]]]] = []
        self._chance = Random(0)
        self._turns = self._in_turn()

    def __reduce__(self) -> tuple[Any, ...]:
        return Meter, (self.budget, self.every_step)

    def ask(self) -> bool:
        """Measures the coming steps, unless some are measured already; returns whether the clock has to tell of them now."""
        if self.measuring:
            return False
        self.measuring = True
        time_joins(self, True)
        self._size, self._rest = FIRST if self.budget is not None else WINDOW, 0
        self._window, self._records = Window(), 0
        self._joins = {name: monitor.buffer.flush_seconds for name, monitor in self.monitors.items()}
        return True

    def add(self, name: str, monitor: Any) -> None:
        """Starts to measure `monitor`."""
        self.switch(True)
        self.monitors[name] = monitor
        self._joins[name] = monitor.buffer.flush_seconds
        self._ungated = self._ungated or not monitor.gate.chooses_steps

    def remove(self, name: str) -> None:
        """Stops measuring the monitor of that name."""
        self.drop()
        self.monitors.pop(name, None)
        self._ungated = any(not one.gate.chooses_steps for one in self.monitors.values())

    def switch(self, on: bool) -> None:
        """Notes that hooks were put on or taken off; nothing is measured while they are off."""
        self.drop()
        self._on = on

    def drop(self) -> None:
        """Discards the measurement of the present step, for example because hooks were changed in it."""
        step, self._step = self._step, None
        if step is not None and step.stopwatch is not None:
            step.stopwatch.stop()

    def skip(self, steps: int, busy: bool | None = None) -> None:
        """Counts steps, and whether they recorded: those of which it is not told did if some monitor always does."""
        busy = self._ungated if busy is None else busy
        if self._on:
            self._window.steps += steps
            self._window.recorded += steps * busy
            self._window.chosen += steps * busy * self.every_step
            self._rest, self._wait = max(0, self._rest - steps), self._wait - steps

    def begin(self, records: bool) -> int:
        """Begins a step; returns the number of coming steps of its kind of which it need not be told.

        Args:
            records: whether any monitor that the clock switches records in it.
        """
        busy, (step, self._step) = records or self._ungated, (self._step, None)
        if step is not None:
            self._take(step, now())
        if not self.measuring:
            return MANY
        if not (self._on and self.monitors):
            return 0
        resting = self._rest > 0
        self.skip(1, busy)
        self._window.told += 1
        if resting or not self._is_measured(busy):
            return self._rest or (0 if busy else max(0, self._wait - 1))
        if busy:
            self._timed, self._half = not self._gaps or next(self._turns), None
        step = self._step = Measured(busy, self._advancing, self.joined, Stopwatch() if self._timed else None)
        if step.stopwatch is not None:
            step.began = step.stopwatch.start(self.monitors.values())
        return 0

    def _is_measured(self, busy: bool) -> bool:
        """Whether to measure the step that begins: one that records, and one that does not an even number of steps later.

        So both have one place in a rhythm of two steps, such as that of a training that does something in every other one.
        """
        if not busy and self._wait > 0:
            return False
        self._wait = 2 * self._chance.randint(1, max(1, (self.every_step - 1) // 2)) if busy and not self._ungated else MANY
        return True

    def _in_turn(self) -> Iterator[bool]:
        """Yields whether to time the monitors: in one of four measured steps, each time another one of them."""
        while True:
            yield from self._chance.sample([True, False, False, False], 4)

    def end(self) -> int:
        """Ends a step, because the clock begins to advance; returns the cadence from now on."""
        step = self._step
        if step is not None:
            step.ended = self._advancing = now() if step.stopwatch is None else step.stopwatch.stop()
        elif not self._rest:
            self._advancing = now()
        if self._pending:
            self._pending = [item for item in self._pending if not _read(*item)]
        return self.every_step

    def _take(self, step: Measured, after: float) -> None:
        """Adds a step to the window, when the clock has advanced; if there are enough of them, another window begins."""
        window, busy = self._window, step.busy
        window.advances[busy].append(after - step.ended)
        window.measured += 1
        self._records += busy
        self._gaps = self._gaps or not busy
        if step.stopwatch is None:
            seconds = after - step.before - self.joined + step.joined
            if busy:
                self._half = seconds
            elif self._half is not None:
                window.pairs.append((self._half, seconds))
        else:
            mine = {name: step.stopwatch.seconds[id(monitor)] for name, monitor in self.monitors.items()}
            shared = sum(seconds for key, seconds in step.stopwatch.seconds.items() if isinstance(key, str))
            seconds = step.ended - step.began - self.joined + step.joined
            window.timed[busy].append(Timed(seconds, sum(mine.values()), shared))
            for name, seconds in mine.items():
                window.by_name[busy][name] += seconds
            if busy and step.stopwatch.pairs:
                self._pending = [*self._pending, (window, step.stopwatch.pairs)][-PENDING:]
        if self._records >= self._size:
            self._count()
            if self.budget is not None:
                self._choose(self.budget, window, self._before)
            else:
                self.measuring = False
                time_joins(self, False)
            self._before, self._window, self._records = window, Window(), 0

    def _choose(self, budget: float, window: Window, before: Window) -> None:
        first, every = not before.steps, self.every_step
        if window.share(every) > budget:
            self.every_step = max(every, window.every_within(budget))
        elif not first:
            self.every_step = min(every, window.every_within(budget * SLACK))
        if not first and min(window.least_share, before.least_share) > budget + TOLERANCE:
            self._stop(window)
        self._gaps = self._gaps and self.every_step == every
        self._size = max(FIRST, min(WINDOW, SPAN // self.every_step))
        self._rest = 0 if first else max(0, ROUND - self._size * self.every_step)

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

    def _count(self) -> None:
        """Counts in the window what is done for several of its steps, or for several monitors."""
        for name, monitor in self.monitors.items():
            seconds = monitor.buffer.flush_seconds
            self._window.joins[name] += seconds - self._joins.get(name, 0.0)
            self._joins[name] = seconds
        elements, total = self._elements()
        self._window.updates = sum(elements.values()) / max(1, total)

    def _elements(self) -> tuple[dict[str, int], int]:
        """The elements that the hooks on optimizers read for each monitor, and for all monitors of the process."""
        found: dict[int, int] = {id(monitor): elements for monitor, elements in parameters_watched()}
        return {name: found.get(id(monitor), 0) for name, monitor in self.monitors.items()}, sum(found.values())

    def measured(self) -> Window:
        """What was measured last: in the present window, unless it has too few steps yet and there is one before it."""
        self._pending = [item for item in self._pending if not _read(*item)]
        if self.measuring:
            self._count()
        return self._window if self._records >= FIRST or not self._before.steps else self._before

    def by_name(self, window: Window) -> dict[str, float]:
        """Seconds per step by the name of the monitor."""
        often, (elements, _) = window.often(self.every_step), self._elements()
        total, found = max(1, sum(elements.values())), {}
        for name in self.monitors:
            busy, idle = (window.by_name[kind][name] / max(1, len(window.timed[kind])) for kind in (True, False))
            busy += window.updating * elements[name] / total + window.joins[name] / max(1, window.recorded)
            found[name] = often * busy + (1 - often) * idle
        return found


def _read(window: Window, pairs: list[tuple[Any, Any]]) -> bool:
    """Adds the device time if its events are finished; returns whether they are. Does not wait."""
    finished = all(end.query() for _, end in pairs)
    if finished:
        window.device.append(sum(start.elapsed_time(end) for start, end in pairs) / 1e3)
    return finished


def _share(cost: float, bare: float) -> float:
    return cost / (bare + cost) if cost else 0.0


def _mean(values: list[float]) -> float:
    return fmean(values) if values else 0.0


def _median(values: list[float]) -> float:
    return median(values) if values else 0.0


def _typical(values: list[float]) -> float:
    """The mean without the highest and the lowest tenth: steps may be of several kinds, and some are interrupted."""
    tenth = len(values) // 10
    return _mean(sorted(values)[tenth : len(values) - tenth])
