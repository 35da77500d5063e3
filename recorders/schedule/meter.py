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

__all__ = ["FIRST", "ROUND", "WINDOW", "MeasuredSteps", "Meter"]

FIRST = 8  # the measured steps that record before the first choice of a cadence, which can only lower it
WINDOW = 64  # those in a window, but for the second, which has a quarter of it; up to four times as many if steps differ much
ROUND = 31 * WINDOW  # the fewest steps from the beginning of one window to that of the next, if there is a budget
SPAN = 8 * WINDOW  # the most steps in a window at a low cadence, at which measured steps are far apart
FEWEST = 5  # the fewest pairs of steps that are compared
EXACT = 0.1  # the standard error of what is clear, as a share of it
CLEAR = 1.5  # the standard errors by which the budget must be exceeded, before fewer steps record
UNSEEN = 1.5  # if all steps record, recording may cost so many times what is timed of it
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


class Cost(NamedTuple):
    """Seconds that recording takes.

    Attributes:
        bare: of a step without a recorder.
        least: what a step costs that does not record.
        recording: what a step costs beyond that if it records; `error` is the standard error, None if it was not compared.
        seen: what was timed of that.
        chosen: the share of the steps that record at cadence 1.
    """

    bare: float
    least: float
    recording: float
    error: float | None
    seen: float
    chosen: float

    @property
    def is_clear(self) -> bool:
        """Whether more steps of the same kind would tell little more."""
        return self.error is None or self.error <= EXACT * self.recording

    def at(self, every: int) -> float:
        """Seconds of recording per step at a cadence."""
        return self.chosen / every * self.recording + self.least

    def share(self, seconds: float) -> float:
        """Seconds of recording per step as a share of the step."""
        return seconds / (self.bare + seconds) if seconds else 0.0

    def exceeds(self, budget: float, every: int) -> bool:
        """Whether recording clearly takes more than the budget at a cadence. If all steps record, not all of it is seen."""
        recording = max(self.seen, self.recording - CLEAR * (self.error or 0.0))
        if every == 1:
            recording = max(recording, UNSEEN * self.seen)
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


class MeasuredSteps:
    """What was measured in some steps: under True of steps that record, under False of others."""

    def __init__(self) -> None:
        self.steps = self.told = self.measured = self.recorded = 0  # told: of which the clock told the meter
        self.chosen = 0  # the steps that would have recorded at cadence 1
        self.pairs: list[tuple[float, float]] = []  # seconds of a step that records, and of one that does not
        self.timed: dict[bool, list[Timed]] = {True: [], False: []}
        self.by_name = {True: defaultdict[str, float](float), False: defaultdict[str, float](float)}
        self.device: list[float] = []  # seconds of work on the device, in steps that record
        self.advances: dict[bool, list[float]] = {True: [], False: []}  # seconds in which the clock advances after the step
        self.joins = defaultdict[str, float](float)  # seconds in which pending observations were reduced
        self.updates = 0.0  # the share of the work of the hooks on optimizers that is done for these monitors

    def difference(self) -> tuple[float, float] | None:
        """The seconds that a step takes longer if it records, a median, and its standard error; None of too few steps."""
        found = [recorded - other for recorded, other in self.pairs]
        if len(found) < FEWEST:
            return None
        middle = median(found)
        return middle, 1.86 * median(abs(each - middle) for each in found) / math.sqrt(len(found))

    def hooks(self) -> tuple[float, float]:
        """Seconds of the hooks on optimizers: in each step, and in one that records, where they read parameters for monitors."""
        always = _median([one.shared for one in self.timed[False] or ([] if self.updates else self.timed[True])])
        return always, self.updates * max(0.0, _mean([one.shared for one in self.timed[True]]) - always)

    def cost(self) -> Cost:
        """What recording costs, by comparison if there is any, otherwise as far as it is timed."""
        (shared, updating), compared = self.hooks(), self.difference()
        idle = _median([one.monitors for one in self.timed[False]])  # a median, because none of them is long on purpose
        advance = _median(self.advances[False] or self.advances[True])  # to a step that does not record no hooks are switched
        seen = max(_mean([one.monitors for one in self.timed[True]]) + updating - idle, _mean(self.device))
        if compared is None:
            bare = _typical([step - own - other for step, own, other in self.timed[False] or self.timed[True]])
        else:
            bare = _typical([without for _, without in self.pairs]) - idle - shared - 2 * advance
        joins = sum(self.joins.values()) / max(1, self.recorded)
        recording, error = (seen, None) if compared is None else (max(seen, compared[0]), compared[1])
        least = idle + shared + advance * self.told / max(1, self.steps)
        return Cost(max(0.0, bare), least, recording + joins, error, seen + joins, min(1.0, self.chosen / max(1, self.steps)))


class Measured:
    """A step that is measured now.

    Attributes:
        records: whether it records.
        before: when the clock began to advance to it; `began` and `ended` are the ends of the step itself.
        joined: what `Meter.joined` was then.
        stopwatch: times the work of the monitors; None if only the step is timed.
    """

    def __init__(self, records: bool, before: float, joined: float, stopwatch: Stopwatch | None) -> None:
        self.records, self.before, self.joined, self.stopwatch = records, before, joined, stopwatch
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
        self._before: MeasuredSteps | None = None
        # The measured steps that recorded, and how many there will be.
        self._window, self._size, self._records = MeasuredSteps(), FIRST, 0
        self._step: Measured | None = None
        self._advancing = 0.0  # when the clock began to advance
        self._rest, self._wait = 0, MANY  # steps until some are measured again; until one that does not record is
        self._joins: dict[str, float] = {}  # seconds of each monitor when they were counted last
        self._pending: list[tuple[MeasuredSteps, list[tuple[Any, Any]]]] = []
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
        self._window, self._records = MeasuredSteps(), 0
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

    def skip(self, steps: int, records: bool | None = None) -> None:
        """Counts steps, and whether they recorded: those of which it is not told did if some monitor always does."""
        records = self._ungated if records is None else records
        if self._on:
            self._window.steps += steps
            self._window.recorded += steps * records
            self._window.chosen += steps * records * self.every_step
            self._rest, self._wait = max(0, self._rest - steps), self._wait - steps

    def begin(self, any_due: bool) -> int:
        """Begins a step; returns the number of coming steps of its kind of which it need not be told.

        Args:
            any_due: whether any monitor that the clock switches records in it.
        """
        records, (step, self._step) = any_due or self._ungated, (self._step, None)
        if step is not None:
            self._take(step, now() if step.records else step.ended)
        if not self.measuring:
            return MANY
        if not (self._on and self.monitors):
            return 0
        resting = self._rest > 0
        self.skip(1, records)
        self._window.told += 1
        if resting or not self._is_measured(records):
            return self._rest or (0 if records else max(0, self._wait - 1))
        if records:
            self._timed, self._half = not self._gaps or next(self._turns), None
        step = Measured(records, self._advancing, self.joined, Stopwatch() if self._timed else None)
        step.began = now() if step.stopwatch is None else step.stopwatch.start(self.monitors.values())
        self._step = step
        return 0

    def _is_measured(self, records: bool) -> bool:
        """Whether to measure the step that begins: one that records, and one that does not an even number of steps later.

        So both have one place in a rhythm of two steps, such as that of a training that does something in every other one.
        """
        if not records and self._wait > 0:
            return False
        self._wait = 2 * self._chance.randint(1, max(1, (self.every_step - 1) // 2)) if records and not self._ungated else MANY
        return True

    def _in_turn(self) -> Iterator[bool]:
        """Yields whether to time the monitors: in one of four measured steps, each time another one of them."""
        while True:
            yield from self._chance.sample([True, False, False, False], 4)

    def end(self) -> int:
        """Ends a step, because the clock begins to advance; returns the cadence from now on."""
        step, self._step = self._step, None  # if this is interrupted, the step is not measured
        if step is not None:
            step.ended = self._advancing = now() if step.stopwatch is None else step.stopwatch.stop()
            self._step = step
        elif not self._rest:
            self._advancing = now()
        if self._pending:
            self._pending = [item for item in self._pending if not _read(*item)]
        return self.every_step

    def _take(self, step: Measured, after: float) -> None:
        """Adds a step to the window; if there are enough of them, another window begins.

        Args:
            after: when the clock had advanced and taken hooks out, after a step that records; when the step ended, after another.
        """
        window, records = self._window, step.records
        advance = step.began - step.before
        window.advances[records].append(advance)
        window.measured += 1
        self._records += records
        self._gaps = self._gaps or not records
        if step.stopwatch is None:
            seconds = after - step.before - self.joined + step.joined
            if records:
                self._half = seconds
            elif self._half is not None:
                window.pairs.append((self._half, seconds + advance))
        else:
            mine = {name: step.stopwatch.seconds[id(monitor)] for name, monitor in self.monitors.items()}
            shared = sum(seconds for key, seconds in step.stopwatch.seconds.items() if isinstance(key, str))
            seconds = step.ended - step.began - self.joined + step.joined
            window.timed[records].append(Timed(seconds, sum(mine.values()), shared))
            for name, seconds in mine.items():
                window.by_name[records][name] += seconds
            if records and step.stopwatch.pairs:
                self._pending = [*self._pending, (window, step.stopwatch.pairs)][-PENDING:]
        if records and self._records in (self._size, 2 * self._size, 4 * self._size):
            self._end_window(window)

    def _end_window(self, window: MeasuredSteps) -> None:
        """Begins another window, unless more steps may tell more."""
        self._count()
        cost = window.cost()
        if (
            cost.is_clear
            or self._records == 4 * self._size
            or (self.budget is not None and cost.exceeds(self.budget, self.every_step))
        ):
            if self.budget is not None:
                self._choose(self.budget, cost, None if self._before is None else self._before.cost())
            else:
                self.measuring = False
                time_joins(self, False)
            self._before, self._window, self._records = window, MeasuredSteps(), 0
            self._window.chosen = self.every_step - 1  # the steps left out after the one that recorded

    def _choose(self, budget: float, cost: Cost, before: Cost | None) -> None:
        every = self.every_step
        if cost.exceeds(budget, every):
            self.every_step = max(every, cost.every_within(budget))
        elif before is not None:
            self.every_step = min(every, cost.every_within(budget * SLACK))
        if before is not None and min(one.share(one.least) for one in (cost, before)) > budget + TOLERANCE:
            self._stop(cost)
        self._gaps = self._gaps and self.every_step == every
        self._size = 2 * FIRST if before is None else max(FIRST, min(WINDOW, SPAN // self.every_step))
        self._rest = 0 if before is None else max(0, ROUND - self._size * self.every_step)

    def _stop(self, cost: Cost) -> None:
        """Ends the recording: a smaller share of recorded steps would not help, because the others exceed the budget already."""
        give_up = self.give_up()
        if give_up is None:
            return
        give_up()
        least = cost.share(cost.least)
        warn_user(
            f"Recorder(budget={self.budget}): recording has stopped. Without it a step takes {1e3 * cost.bare:.2g} ms, "
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

    def measured(self) -> MeasuredSteps:
        """What was measured last: in the present window, unless it has too few steps yet and there is one before it."""
        self._pending = [item for item in self._pending if not _read(*item)]
        if self.measuring:
            self._count()
        return self._window if self._before is None or self._records >= FIRST else self._before

    def by_name(self, window: MeasuredSteps, often: float) -> dict[str, float]:
        """Seconds per step by the name of the monitor; `often` is the share of the steps that record."""
        (elements, _), (_, updating), found = self._elements(), window.hooks(), {}
        for name in self.monitors:
            recorded, idle = (window.by_name[kind][name] / max(1, len(window.timed[kind])) for kind in (True, False))
            recorded += updating * elements[name] / max(1, sum(elements.values())) + window.joins[name] / max(1, window.recorded)
            found[name] = often * recorded + (1 - often) * idle
        return found


def _read(window: MeasuredSteps, pairs: list[tuple[Any, Any]]) -> bool:
    """Adds the device time if its events are finished; returns whether they are. Does not wait."""
    finished = all(end.query() for _, end in pairs)
    if finished:
        window.device.append(sum(start.elapsed_time(end) for start, end in pairs) / 1e3)
    return finished


def _mean(values: list[float]) -> float:
    return fmean(values) if values else 0.0


def _median(values: list[float]) -> float:
    return median(values) if values else 0.0


def _typical(values: list[float]) -> float:
    """The mean without the highest and the lowest tenth: steps may be of several kinds, and some are interrupted."""
    tenth = len(values) // 10
    return _mean(sorted(values)[tenth : len(values) - tenth])
