"""Window: sums over measured steps, the cost of recording they give, and the cadence that keeps it within a budget."""

from __future__ import annotations

import math
from statistics import median

from recorders.schedule.call_cost import CallCost, CallCounts
from recorders.schedule.stopwatch import Sample, Seconds

__all__ = ["FIRST", "Sums", "Window"]

FIRST = 8  # the fewest measured steps that give a result
SELDOM = 1000  # the lowest cadence: one step in 1000


class Sums:
    """Sums over measured steps of one kind: busy (something records) or idle."""

    def __init__(self) -> None:
        self.steps = self.device_steps = 0
        self.total = self.device = 0.0
        self.seconds, self.ways = Seconds(), CallCounts()
        self.each: list[float] = []  # seconds in monitors, by step
        self.rest: list[float] = []  # the remaining seconds, by step
        self.upkeep: list[float] = []  # of those, the seconds in the clock, by step

    def __add__(self, other: Sums) -> Sums:
        both = Sums()
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
        """Adds one step, which took `seconds`."""
        spent = sum(sample.seconds.values())
        self.steps += 1
        self.total += seconds
        self.seconds.add(sample.seconds)
        self.ways.add(sample.calls)
        self.each.append(spent)
        self.rest.append(seconds - spent)
        self.upkeep.append(sample.upkeep)

    def call_seconds(self, way: CallCost) -> float:
        """Seconds per step that PyTorch takes to call hooks."""
        return sum(way.cost(*calls) for calls in self.ways.values()) / max(1, self.steps)

    @property
    def typical(self) -> float:
        """Median seconds in monitors."""
        return _median(self.each)

    @property
    def on_host(self) -> float:
        """Mean seconds in monitors."""
        return sum(self.seconds.values()) / max(1, self.steps)

    @property
    def on_device(self) -> float:
        """Mean seconds of the monitors' work on the device."""
        return self.device / max(1, self.device_steps)


class Window:
    """Some measured steps, and the number of all steps of each kind in the same time."""

    def __init__(self) -> None:
        self.busy, self.idle = Sums(), Sums()
        self.steps = self.recorded = self.chosen = self.samples = self.switches = 0
        self.flushes = Seconds()  # seconds in which buffers were reduced, by name
        self.sampling = self.switching = 0.0
        self.advances: list[float] = []  # seconds that the clock takes between two steps
        self.way = CallCost()

    def __add__(self, other: Window) -> Window:
        both = Window()
        both.busy, both.idle = self.busy + other.busy, self.idle + other.idle
        both.steps, both.chosen, both.samples = self.steps + other.steps, self.chosen + other.chosen, self.samples + other.samples
        both.recorded = self.recorded + other.recorded
        both.flushes.add(self.flushes)
        both.flushes.add(other.flushes)
        both.switches, both.switching = self.switches + other.switches, self.switching + other.switching
        both.sampling, both.advances, both.way = self.sampling + other.sampling, self.advances + other.advances, other.way
        return both

    @property
    def frequency(self) -> float:
        """The share of all steps that would record at cadence 1."""
        return min(1.0, self.chosen / self.steps) if self.steps else 1.0

    @property
    def bare(self) -> float:
        """Seconds per step without recording."""
        taken = 0.0
        for sums, ways in ((self.busy, self.outside), (self.idle, self.idle.call_seconds(self.way))):
            taken += sums.total - sums.steps * (sums.on_host + ways) - sum(sums.upkeep)
        return max(0.0, taken) / max(1, self.busy.steps + self.idle.steps)

    @property
    def outside(self) -> float:
        """Seconds per busy step that recording costs outside of the monitors.

        These are the calls of hooks and the clock or, if larger, the difference of busy and idle steps minus two standard errors.
        """
        calls = self.busy.call_seconds(self.way)
        calls += _median(self.busy.upkeep) - _median(self.idle.upkeep) if self.idle.steps else 0.0
        if min(self.busy.steps, self.idle.steps) < FIRST:
            return calls
        error = math.hypot(_error(self.busy.rest), _error(self.idle.rest))
        return max(calls, median(self.busy.rest) - median(self.idle.rest) - 2 * error)

    @property
    def upkeep(self) -> float:
        """Seconds per step, busy or idle, that the clock takes."""
        return _median(self.idle.upkeep or self.busy.upkeep) + _median(self.advances)

    @property
    def switch_cost(self) -> float:
        """Additional seconds per busy step if others are idle: for switching hooks, and for measuring two steps."""
        return 2 * (self.switching / max(1, self.switches) + self.sampling / max(1, self.samples))

    @property
    def flushing(self) -> float:
        """Seconds per busy step in which buffers are reduced, in this step or in a later one."""
        return sum(self.flushes.values()) / max(1, self.recorded)

    @property
    def _recording(self) -> float:
        """Seconds of recording per busy step, on the host or on the device, whichever is longer."""
        return max(self.busy.on_host + self.outside + self.flushing, self.busy.on_device)

    @property
    def _idle(self) -> float:
        """The same per idle step; a median, because no idle step takes long on purpose."""
        return max(self.idle.typical + self.idle.call_seconds(self.way), self.idle.on_device)

    def cost(self, every: int) -> float:
        """Seconds of recording per step at cadence `every`."""
        often = self.frequency / every
        return often * self._recording + (1 - often) * self._idle + self.upkeep + (often * self.switch_cost if often < 1 else 0.0)

    def share(self, every: int) -> float:
        """The same as a share of the step."""
        cost = self.cost(every)
        return cost / (self.bare + cost) if cost else 0.0

    def every_within(self, budget: float) -> int:
        """The smallest `every` that keeps the cost within the budget.

        The cost of idle steps counts. If it leaves less than a tenth of the budget, a tenth is used for recording all the same,
        because a lower cadence would hardly help.
        """
        if self.share(1) <= budget:
            return 1
        allowed = budget / (1 - budget) * self.bare
        beyond = self.frequency * (self._recording - self._idle + self.switch_cost)
        room = max(allowed - self._idle - self.upkeep, allowed / 10)
        return max(1, min(SELDOM, math.ceil(beyond / room - 1e-9) if room else SELDOM))

    @property
    def least_share(self) -> float:
        """The share of a step that records nothing."""
        cost = self._idle + self.upkeep
        return cost / (self.bare + cost) if cost else 0.0

    def exceeds(self, budget: float) -> bool:
        """Whether idle steps alone exceed the budget."""
        return self.least_share > budget


def _median(values: list[float]) -> float:
    return median(values) if values else 0.0


def _error(values: list[float]) -> float:
    """The standard error of the median, estimated from the median absolute deviation."""
    middle = median(values)
    return 1.86 * median(abs(value - middle) for value in values) / math.sqrt(len(values))
