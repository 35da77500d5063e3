"""Meter: what recording costs, if anybody asks, and the cadence that keeps it within a budget.

If there are steps that do not record, because of a budget or of the monitors' own steps, steps that record are compared with them:
the median of the differences counts. The work of each monitor is timed in the first step of a window, which names the costly ones.
If there is nothing to compare with, it is timed in all steps, and is the least that recording costs.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from random import Random
from statistics import fmean, median
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from recorders.errors import RecordingWarning
from recorders.schedule.stopwatch import Stopwatch, now, time_joins
from reducers.errors import warn_user

FIRST = 8  # the measured steps that record before the first choice of a cadence
WINDOW = 64  # those in a window, but for the second, which has a quarter of it; up to four times as many if steps differ much
ROUND = 31 * WINDOW  # the fewest steps from the beginning of one window to that of the next, if there is a budget
SHARE = 4  # a window takes at most one in so many steps, because those that are measured take longer
SPAN = 8 * WINDOW  # the most steps in a window at a low cadence, at which measured steps are far apart
COSTLY = 8  # from this cadence on, the step after one that records is measured, too: recording takes so long that it is slower
SELDOM_TIMED = 8  # pairs of steps for each step that does not record in which the work of monitors is timed
FEWEST = 5  # the fewest pairs of steps that are compared
EXACT = 0.1  # the standard error of what is clear, as a share of it
CLEAR = 1.5  # the standard errors by which the budget must be exceeded, before fewer steps record
UNSEEN = 1.5  # if no steps are compared, recording may cost so many times what is timed of it
SELDOM = 1000  # the lowest cadence: one step in 1000
SLACK = 0.85  # the share of the budget that a higher cadence must fit into, so that the cadence does not alternate
TOLERANCE = 0.01  # a budget that steps without recording exceed by more than this cannot be kept
MANY = 1 << 60


class Cost(NamedTuple):
    """Seconds that recording takes.

    Attributes:
        bare: of a step without a recorder.
        least: what a step costs that does not record.
        recording: what a step costs beyond that if it records; `error` is the standard error, None if it was only timed.
        chosen: the share of the steps that record at cadence 1.
    """

    bare: float
    least: float
    recording: float
    error: float | None
    chosen: float

    def at(self, every: int) -> float:
        """Seconds of recording per step at a cadence."""
        return self.chosen / every * self.recording + self.least

    def share(self, seconds: float) -> float:
        """Seconds of recording per step as a share of the step."""
        return seconds / (self.bare + seconds) if seconds else 0.0

    def exceeds(self, budget: float, every: int) -> bool:
        """Whether recording clearly takes more than the budget at a cadence. What is only timed may take more."""
        recording = UNSEEN * self.recording if self.error is None else self.recording - CLEAR * self.error
        return self.share(self.chosen / every * recording + self.least) > budget

    def every_within(self, budget: float) -> int:
        """The smallest cadence that keeps the cost within the budget.

        If steps that record nothing leave less than a tenth of the budget, a tenth is used all the same, because a lower cadence
        would hardly help. The cadence is never 2, at which no step without recording is an even number of steps after one with it.
        """
        if not self.exceeds(budget, 1) and self.share(self.at(1)) <= budget:
            return 1
        allowed = budget / (1 - budget) * self.bare
        room = max(allowed - self.least, allowed / 10)
        return max(3, min(SELDOM, math.ceil(self.chosen * self.recording / room - 1e-9) if room else SELDOM))


class Timed(NamedTuple):
    """Seconds of a step, of the work of each monitor in it by name, and of what is no work of any monitor."""

    step: float
    work: dict[str, float]
    rest: float


class MeasuredSteps:
    """What was measured in some steps: under True of steps that record, under False of others."""

    def __init__(self, chosen: int = 0, span: int = 1) -> None:
        self.steps = self.told = self.measured = self.records = self.recorded = 0  # told: those of which the clock told the meter
        self.chosen = chosen  # the steps that would have recorded at cadence 1
        self.span = span  # how many steps are measured at once, of which the first may record
        self.pairs: list[tuple[float, float]] = []  # seconds of steps of which one records, and of as many of which none does
        self.timed: dict[bool, list[Timed]] = {True: [], False: []}
        self.advances: dict[bool, list[float]] = {True: [], False: []}  # seconds in which the clock advances to the step
        self.joins = defaultdict[str, float](float)  # seconds in which pending observations were reduced, by monitor
        self.events: list[list[tuple[Any, Any]]] = []  # of the device, in steps that record; unfinished ones may be among them

    def device(self) -> float:
        """Seconds of work on the device in a step that records. Nothing is waited for: 0.0 if no events are finished."""
        done = [pairs for pairs in self.events if all(after.query() for _, after in pairs)]
        return _mean([sum(before.elapsed_time(after) for before, after in pairs) / 1e3 for pairs in done])

    def by_name(self, often: float) -> dict[str, float]:
        """Seconds per step by the name of the monitor; `often` is the share of the steps that record."""
        found = defaultdict[str, float](float)
        for share, timed in ((often, self.timed[True]), (1 - often, self.timed[False])):
            for one in timed:
                for name, seconds in one.work.items():
                    found[name] += share * seconds / len(timed)
        for name, seconds in self.joins.items():
            found[name] += often * seconds / max(1, self.recorded)
        return found

    def cost(self) -> Cost:
        """What recording costs, by comparison if there is any, otherwise as far as it is timed."""
        found, other = self.timed[True], self.timed[False]
        idle = _median([sum(one.work.values()) for one in other])  # a median, because none of them is long on purpose
        rest = _median([one.rest for one in other or found])
        advance = _median(self.advances[False] or self.advances[True])  # to a step that does not record no hooks are switched
        differences = [recorded - without for recorded, without in self.pairs]
        if len(differences) < FEWEST:
            recording, error = max(_mean([sum(one.work.values()) for one in found]) - idle, self.device()), None
            bare = _typical([one.step - sum(one.work.values()) - one.rest for one in other or found])
        else:
            recording = median(differences)
            error = 1.86 * median(abs(each - recording) for each in differences) / math.sqrt(len(differences))
            bare = (median(without for _, without in self.pairs) - (self.span + 1) * advance) / self.span - idle - rest
        recording = max(0.0, recording) + sum(self.joins.values()) / max(1, self.recorded)
        steps = max(1, self.steps)
        return Cost(max(0.0, bare), idle + (rest + advance) * self.told / steps, recording, error, min(1.0, self.chosen / steps))


class Measured(NamedTuple):
    """A step that is measured now.

    Attributes:
        records: whether it records.
        before: when the clock began to advance to it.
        began: when it began itself.
        joined: what `Meter.joined` was then.
        stopwatch: times the work of the monitors; None if only the step is timed.
        more: how many steps after it are measured with it, because recording slows these, too.
    """

    records: bool
    before: float
    began: float
    joined: float
    stopwatch: Stopwatch | None
    more: int


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
        self._half: float | None = None  # seconds of the step that recorded, until there is one to compare with
        self._before: MeasuredSteps | None = None
        self._window, self._size = MeasuredSteps(), FIRST  # the steps of it that record are a multiple of its size in the end
        self._step: Measured | None = None
        self._ended = 0.0  # when the last step ended, because the clock began to advance
        self._rest, self._wait = 0, MANY  # steps until some are measured again; until one that does not record is
        self._chance = Random(0)

    def __reduce__(self) -> tuple[Any, ...]:
        return Meter, (self.budget, self.every_step)

    def ask(self) -> bool:
        """Measures the coming steps, unless some are measured already; returns whether the clock has to tell of them now."""
        if self.measuring:
            return False
        self.measuring = True
        time_joins(self, True)
        self._window, self._size, self._rest = MeasuredSteps(), FIRST if self.budget is not None else WINDOW, 0
        return True

    def add(self, name: str, monitor: Any) -> None:
        """Starts to measure `monitor`."""
        self.switch(True)
        self.monitors[name] = monitor
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
        time_joins(self, on and self.measuring)

    def drop(self) -> None:
        """Discards the measurement of the present step, for example because hooks were changed in it."""
        step, self._step = self._step, None
        if step is not None and step.stopwatch is not None:
            step.stopwatch.stop()

    def skip(self, steps: int, records: bool | None = None) -> None:
        """Counts steps, and whether they recorded: those of which it is not told did if some monitor always does."""
        records = self._ungated if records is None else records
        if self._on:
            self._window.steps += steps
            self._window.recorded += steps * records
            self._window.chosen += steps * records * self.every_step
            self._rest, self._wait = max(0, self._rest - steps), self._wait - steps

    def end(self) -> int:
        """Ends a step, because the clock begins to advance; returns the cadence from now on."""
        step, self._step = self._step, None  # if this is interrupted, the step is not measured
        self._ended = now() if step is None or step.stopwatch is None else step.stopwatch.stop()
        self._step = step
        return self.every_step

    def begin(self, any_due: bool) -> int:
        """Begins a step, as soon as the clock has advanced; returns the number of coming steps of which it need not be told.

        Args:
            any_due: whether any monitor that the clock switches records in it.
        """
        records, (step, self._step) = any_due or self._ungated, (self._step, None)
        if step is not None and step.more:
            self._step = None if records else step._replace(more=step.more - 1)
        elif step is not None:
            self._take(step)
        if not self.measuring:
            return MANY
        if not (self._on and self.monitors):
            return 0
        resting = self._rest > 0
        self.skip(1, records)
        self._window.told += 1
        if self._step is not None:
            return 0
        if resting or (not records and self._wait > 0):
            return self._rest or (0 if records else max(0, self._wait - 1))
        # What a step is compared with comes an even number of steps later: so both have one place in a rhythm of two steps, such as
        # that of a training that does something in every other one.
        more, self._wait = self._window.span - 1, MANY
        if records:
            if not self._ungated:
                self._wait = 2 * self._chance.randint(1, max(1, (self.every_step - 1 - more) // 2))
            self._half = None
            compared = self._window.records and self._window.recorded < self._window.steps
        else:  # what is compared is not slowed by a stopwatch
            compared = SELDOM_TIMED * len(self._window.timed[False]) > len(self._window.pairs)
        stopwatch = None if compared else Stopwatch()
        began = now() if stopwatch is None else stopwatch.start(self.monitors.values())
        self._step = Measured(records, self._ended, began, self.joined, stopwatch, more if compared else 0)
        return 0

    def _take(self, step: Measured) -> None:
        """Adds a step to the window; if there are enough of them, another window begins."""
        window, records, joined, advance = self._window, step.records, self.joined - step.joined, step.began - step.before
        if records:
            window.records += 1
        if step.stopwatch is None and records:  # the clock puts hooks in before it, and takes them out after it
            self._half = now() - step.before - joined
        elif step.stopwatch is None and self._half is not None:  # the clock advances before and after it, too
            window.pairs.append((self._half, self._ended - step.before - joined + advance))
        elif step.stopwatch is not None:
            window.timed[records].append(self._timed(step.stopwatch, records, self._ended - step.began - joined))
            if records and step.stopwatch.events:
                window.events.append(step.stopwatch.events)
        window.advances[records].append(advance)
        window.measured += 1
        if records and window.records % self._size == 0:
            self._end_window(window)

    def _timed(self, stopwatch: Stopwatch, records: bool, seconds: float) -> Timed:
        """The work of hooks on optimizers is that of the monitors whose parameters they read, by the number of elements."""
        work = {name: stopwatch.seconds[id(monitor)] for name, monitor in self.monitors.items()}
        rest = sum(seconds for key, seconds in stopwatch.seconds.items() if isinstance(key, str))
        elements = stopwatch.elements
        mine = {name: elements.get(id(monitor), 0) for name, monitor in self.monitors.items()}
        total = sum(elements.values())
        if records and total:
            work = {name: each + rest * mine[name] / total for name, each in work.items()}
        return Timed(seconds, work, 0.0 if records and any(mine.values()) else rest)

    def _end_window(self, window: MeasuredSteps) -> None:
        """Begins another window, unless more steps may tell more."""
        self._count_joins()
        cost, budget, before = window.cost(), self.budget, self._before
        clear = cost.error is None or cost.error <= EXACT * cost.recording or window.records == 4 * self._size
        if budget is None and clear:
            self.measuring = False
            time_joins(self, False)
        elif budget is None or not (clear or cost.exceeds(budget, self.every_step)):
            return
        else:
            self._choose(budget, cost, before)
        span = 2 if self.every_step >= COSTLY else 1
        self._before, self._window = window, MeasuredSteps(self.every_step - 1, span)  # steps left out after the one that recorded

    def _choose(self, budget: float, cost: Cost, before: MeasuredSteps | None) -> None:
        """Chooses the cadence, and when to measure again. The first choice can only lower the cadence."""
        every = self.every_step
        if cost.exceeds(budget, every):
            self.every_step = max(every, cost.every_within(budget))
        elif before is not None:
            self.every_step = min(every, cost.every_within(budget * SLACK))
        self._size = 2 * FIRST if before is None else max(FIRST, min(WINDOW, SPAN // self.every_step))
        steps = self._size * self.every_step
        self._rest = 0 if before is None else max(ROUND, SHARE * steps) - steps
        give_up = self.give_up()
        least = 0.0 if before is None else min(one.share(one.least) for one in (cost, before.cost()))
        if least > budget + TOLERANCE and give_up is not None:  # fewer recorded steps would not help
            give_up()
            warn_user(
                f"Recorder(budget={budget}): recording has stopped. Without it a step takes {1e3 * cost.bare:.2g} ms, "
                f"and of a step that records nothing the recorder takes {100 * least:.1f} %, so no cadence keeps the budget. "
                f"What was recorded stays. Give a budget of {math.ceil(100 * least + 1) / 100} or more, or none",
                RecordingWarning,
            )

    def _count_joins(self) -> None:
        """Moves the seconds in which pending observations were reduced to the window."""
        for name, monitor in self.monitors.items():
            self._window.joins[name] += monitor.buffer.flush_seconds
            monitor.buffer.flush_seconds = 0.0

    def measured(self) -> MeasuredSteps:
        """What was measured last: in the present window, unless it has too few steps yet and there is one before it."""
        if self.measuring:
            self._count_joins()
        return self._window if self._before is None or self._window.records >= FIRST else self._before


def _mean(values: list[float]) -> float:
    return fmean(values) if values else 0.0


def _median(values: list[float]) -> float:
    return median(values) if values else 0.0


def _typical(values: list[float]) -> float:
    """The mean without the highest and the lowest tenth: steps may be of several kinds, and some are interrupted."""
    tenth = len(values) // 10
    return _mean(sorted(values)[tenth : len(values) - tenth])
