"""What recording costs, measured in some of the steps, and how seldom to record so that it stays within a budget.

Some steps of the clock are measured. What they cost is averaged over a window of them, from which the cadence is chosen.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakValueDictionary

from recorders.errors import RecordingWarning
from recorders.stopwatch import Sample, Seconds

if TYPE_CHECKING:
    from recorders.monitor import Monitor

__all__ = ["Meter", "Overhead", "check_budget"]

APART = 31  # steps from one that is measured to the next; odd, for what waits is reduced every 96th time or so
FIRST, WINDOW = 8, 64  # measured steps after which the cadence is chosen: at first, which may only lower it, and later
SPAN = 8 * WINDOW  # steps, from where on a window is shorter where records are far apart
SLACK = 0.85  # of the budget, that a higher cadence must keep within: nothing flutters between two
SELDOM = 1000  # the lowest cadence
PATIENCE = 300  # forwards with gradients on, before anybody may expect the first step
PENDING = 8  # measured steps whose events of a device are waited for


@dataclass(frozen=True)
class Overhead:
    """What recording costs a step, on average over steps that were measured lately.

    Attributes:
        seconds: of a step, spent in what monitors do; of all threads together.
        step_seconds: a whole step, recording included.
        by_name: the seconds by subrecorder.
        steps: how many steps were measured for this.
        every_step: the cadence in force: of the steps that the monitors choose, one in so many is recorded.
        budget: the share of the steps that recording may take, None where it was not limited.
        device_seconds: of a step, that work of the monitors took on a CUDA device, gaps between its kernels included; None without.
        note: what is not in it.

    >>> cost = Overhead(0.002, 0.1, {"out/0": 0.0015, "out/2": 0.0005}, steps=72, every_step=1)
    >>> cost.share
    0.02
    >>> print(cost)
    recording takes 2 ms of a step of 100 ms: 2 %, measured on the host over 72 steps
    out/0: 1.5 ms
    out/2: 500 us
    """

    seconds: float
    step_seconds: float
    by_name: Mapping[str, float]
    steps: int
    every_step: int
    budget: float | None = None
    device_seconds: float | None = None
    note: str = ""

    @property
    def share(self) -> float:
        """Of the time of a step, that recording takes on the host."""
        return self.seconds / self.step_seconds if self.step_seconds else math.nan

    @property
    def where(self) -> Literal["host", "host and device"]:
        """Where it was measured."""
        return "host" if self.device_seconds is None else "host and device"

    def __str__(self) -> str:
        cadence = f"; {shown_cadence(self.every_step, self.budget)}" if self.budget is not None else ""
        if not self.steps:
            return f"nothing was measured{cadence}; {self.note}"
        device = "" if self.device_seconds is None else f", {_shown(self.device_seconds)} on the device"
        head = f"recording takes {_shown(self.seconds)} of a step of {_shown(self.step_seconds)}: {100 * self.share:.2g} %"
        ordered = sorted(self.by_name.items(), key=lambda item: -item[1])
        rows = [f"{name or '(net)'}: {_shown(seconds)}" for name, seconds in ordered[:10]]
        if rest := ordered[10:]:
            rows.append(f"{len(rest)} more: {_shown(sum(seconds for _, seconds in rest))}")
        head += f"{device}, measured on the {self.where} over {self.steps} steps{cadence}"
        return "\n".join([head, *rows, *([self.note] if self.note else [])])


class _Sums:
    """Measured steps of one kind: those in which anything records, or the others."""

    def __init__(self) -> None:
        self.steps = self.device_steps = 0
        self.total = self.device = 0.0
        self.seconds = Seconds()
        self.each: list[float] = []

    def __add__(self, other: _Sums) -> _Sums:
        both = _Sums()
        for sums in (self, other):
            both.steps += sums.steps
            both.total += sums.total
            both.device_steps += sums.device_steps
            both.device += sums.device
            both.seconds.add(sums.seconds)
            both.each += sums.each
        return both

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
        self.steps = self.chosen = 0

    def __add__(self, other: _Window) -> _Window:
        both = _Window()
        both.busy, both.idle = self.busy + other.busy, self.idle + other.idle
        both.steps, both.chosen = self.steps + other.steps, self.chosen + other.chosen
        return both

    @property
    def frequency(self) -> float:
        """Of all steps, those that would record without a cadence."""
        return min(1.0, self.chosen / self.steps) if self.steps else 1.0

    @property
    def bare(self) -> float:
        """Seconds of a step, but for recording."""
        steps = self.busy.steps + self.idle.steps
        spent = sum(self.busy.seconds.values()) + sum(self.idle.seconds.values())
        return max(0.0, self.busy.total + self.idle.total - spent) / max(1, steps)

    @property
    def _recording(self) -> float:
        """Seconds of a step that records, on the host or on the device, where it takes longer."""
        return max(self.busy.on_host, self.busy.on_device)

    @property
    def _idle(self) -> float:
        """The same for the other steps, of which none takes long on purpose."""
        return max(self.idle.usual, self.idle.on_device)

    def cost(self, every: int) -> float:
        """Seconds of recording a step where one in so many of the chosen steps records."""
        often = self.frequency / every
        return often * self._recording + (1 - often) * self._idle

    def share(self, every: int) -> float:
        """The same, of the step."""
        cost = self.cost(every)
        return cost / (self.bare + cost) if cost else 0.0

    def every_within(self, budget: float) -> int:
        """The highest cadence that keeps within the budget.

        Hooks that record nothing cost something too. Where they leave less than a tenth of the budget, recording takes a tenth:
        a lower cadence would hardly help.
        """
        if self.share(1) <= budget:
            return 1
        allowed = budget / (1 - budget) * self.bare
        beyond, room = self.frequency * (self._recording - self._idle), max(allowed - self._idle, allowed / 10)
        return max(1, min(SELDOM, math.ceil(beyond / room - 1e-9) if room else SELDOM))

    def beyond(self, budget: float) -> bool:
        """Whether hooks that record nothing take more than the budget."""
        return self._idle > budget / (1 - budget) * self.bare


class Meter:
    """Measures what the monitors of a recorder cost, in some of the steps of its clock, and chooses the cadence for a budget.

    Attributes:
        budget: the share of the steps that recording may take; None where it is only measured.
        every_step: the cadence: of the steps that monitors choose, one in so many is recorded.
        on: whether there is anything to measure: hooks are on.
    """

    def __init__(self, budget: float | None = None, every_step: int = 1) -> None:
        self.budget, self.every_step, self.on = budget, every_step, True
        self.monitors: WeakValueDictionary[str, Monitor] = WeakValueDictionary()
        self._sample: Sample | None = None
        self._before, self._window, self._size = _Window(), _Window(), FIRST
        self._dense = FIRST + WINDOW  # measured steps in a row, before they get apart
        self._ago = APART  # steps that record since the last one that was measured
        self._wants_idle = False
        self._pending: list[tuple[_Sums, list[tuple[Any, Any]]]] = []
        self._advanced = self._told = False

    def add(self, name: str, monitor: Monitor) -> None:
        """Measures `monitor` too."""
        self.switch(True)
        self.monitors[name] = monitor

    def remove(self, name: str) -> None:
        """Measures it no more."""
        self.drop()
        self.monitors.pop(name, None)

    def switch(self, on: bool) -> None:
        """Hooks were put on or taken off."""
        self.drop()
        self.on = on

    def drop(self) -> None:
        """Leaves the step that is being measured out: something else than recording went on in it."""
        sample, self._sample = self._sample, None
        if sample is not None:
            sample.close()

    def end(self) -> int:
        """A step has ended; returns the cadence from now on."""
        self._advanced = True
        sample, self._sample = self._sample, None
        if sample is not None and (seconds := sample.end()) is not None:
            sums = self._window.busy if sample.busy else self._window.idle
            sums.steps += 1
            sums.total += seconds
            sums.seconds.add(sample.seconds)
            sums.each.append(sum(sample.seconds.values()))
            if sample.pairs:
                self._pending = [*self._pending, (sums, sample.pairs)][-PENDING:]
        self._pending = [item for item in self._pending if not _read(*item)]
        if self._window.busy.steps >= self._size:
            self._choose()
        return self.every_step

    def begin(self, records: bool) -> None:
        """A step begins; `records` says whether any monitor with steps of its own, or a budget, does in it."""
        if not self.on or not self.monitors:
            return
        busy = records or self.budget is None
        self._window.steps += 1
        self._window.chosen += self.every_step * busy
        self._ago += busy
        if busy and self._ago >= (1 if self._dense else max(1, APART // self.every_step) | 1):
            self._ago, self._dense, self._wants_idle = 0, max(0, self._dense - 1), self.every_step > 1
        elif busy or not self._wants_idle:
            return
        else:
            self._wants_idle = False
        self._sample = Sample(busy)
        self._sample.begin(self.monitors)

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
        names = [*self.monitors]
        by_name = {
            name: often * both.busy.seconds[name] / max(1, both.busy.steps)
            + (1 - often) * both.idle.seconds[name] / max(1, both.idle.steps)
            for name in names
        }
        seconds = often * both.busy.on_host + (1 - often) * both.idle.on_host
        device = None
        if both.busy.device_steps:
            device = often * both.busy.on_device + (1 - often) * both.idle.on_device
        return Overhead(seconds, both.bare + seconds, by_name, steps, self.every_step, self.budget, device, self._note(both))

    def _nothing(self) -> str:
        if not self._advanced:
            return "the clock has not advanced: call recorder.attach(optimizer), or recorder.step() after every step"
        return "the first step is left out, as warm-up, and steps in which hooks are put on or off; no other has ended yet"

    def _note(self, both: _Window) -> str:
        left_out = ["reading results", "switching monitors between steps"]
        if any(monitor.compiled for monitor in self.monitors.values()):
            left_out.append("what compiled graphs compute for it in their own kernels")
        parts = [f"not in it: {', '.join(left_out)}"]
        if both.busy.device_steps:
            parts.append("on the device, gaps between the kernels of a hook are counted too")
        if self.budget is not None and both.beyond(self.budget):
            parts.append("no cadence keeps within the budget: hooks that record nothing take more of it; put on fewer monitors")
        return "; ".join(parts)

    def __reduce__(self) -> tuple[Any, ...]:
        return Meter, (self.budget, self.every_step)


def check_budget(budget: Any) -> float | None:
    """`budget`, if it is one.

    Raises:
        ValueError: it is no share.
    """
    number = isinstance(budget, (int, float)) and not isinstance(budget, bool)
    if budget is None or (number and 0 < budget < 1):
        return None if budget is None else float(budget)
    raise ValueError(
        f"Recorder(budget={budget!r}): budget is the share of the steps' time that recording may take, above 0 and below 1: "
        "0.03 for 3 %; it is no name for a group of monitors"
    )


def shown_cadence(every_step: int, budget: float | None) -> str:
    """In words.

    >>> shown_cadence(4, 0.03)
    'one in 4 of the steps for a budget of 3 %'
    """
    often = "all steps" if every_step == 1 else f"one in {every_step} of the steps"
    return often if budget is None else f"{often} for a budget of {100 * budget:.3g} %"


def _read(sums: _Sums, pairs: list[tuple[Any, Any]]) -> bool:
    """Adds what the device took, once it is known; nothing is waited for."""
    if not all(end is None or end.query() for _, end in pairs):
        return False
    sums.device_steps += 1
    sums.device += sum(start.elapsed_time(end) for start, end in pairs if end is not None) / 1e3
    return True


def _shown(seconds: float) -> str:
    """
    >>> _shown(0.0123), _shown(0.000_05)
    ('12.3 ms', '50 us')
    """
    for scale, unit in ((1.0, "s"), (1e3, "ms")):
        if seconds * scale >= 0.9995:  # which is rounded up
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
