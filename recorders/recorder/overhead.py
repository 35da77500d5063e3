"""Overhead: what recording costs, as it is shown, and the budget that limits it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from recorders.recordings.display import Rows, ShownAsTable, shown_name
from recorders.schedule.meter import Meter


@dataclass(frozen=True, repr=False)
class Overhead(ShownAsTable):
    """What recording costs per step, as measured in some steps.

    Host time is measured without waiting for devices. The time in which pending observations are reduced is shared out over the
    steps that record. Reading results is not counted.

    Attributes:
        seconds: what recording takes of a step: what steps that record take longer than others, or if there are no others the work
            of the monitors in all threads; the clock, and what monitors cost in steps that record nothing.
        step_seconds: the duration of a step, recording included.
        by_name: the seconds of the work of each subrecorder.
        steps: the number of measured steps.
        every_step: the present cadence: one in this many of the steps that monitors choose is recorded.
        budget: the share of the steps' time that recording may take; None for no limit.
        device_seconds: what monitors take of a step on the current stream of a CUDA device, gaps between kernels included; None
            without such a device.
        note: what is not included.
        lower_bound: whether every step recorded. Then there is nothing to compare with, and what PyTorch takes to call hooks, and
            what recording slows down elsewhere, is not included. `docs/speed.md` shows how much that is.
        error: the standard error of `seconds`, if steps were compared.
        loops: where the loops that reduce CPU tensors are compiled and kept, or why they are not.
        troubles: what makes recording slower than it could be: no loops in C++, a kernel that failed.

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
    lower_bound: bool = False
    error: float | None = None
    loops: str = ""
    troubles: tuple[str, ...] = ()

    @property
    def share(self) -> float:
        """The share of a step's time that recording takes on the host."""
        return self.seconds / self.step_seconds if self.step_seconds else math.nan

    @property
    def where(self) -> Literal["host", "host and device"]:
        """Where it was measured."""
        return "host" if self.device_seconds is None else "host and device"

    def __str__(self) -> str:
        ordered = self._ordered()
        rows = [f"{name or '(net)'}: {_shown(seconds)}" for name, seconds in ordered[:10]]
        if rest := ordered[10:]:
            rows.append(f"{len(rest)} more: {_shown(sum(seconds for _, seconds in rest))}")
        return "\n".join([self._total(), *rows, *([self.note] if self.note and self.steps else []), *self.troubles])

    def title_shown(self) -> str:
        """The total."""
        return "; ".join([self._total(), *self.troubles])

    def _total(self) -> str:
        cadence = shown_cadence(self.every_step, self.budget)
        if not self.steps:
            return f"nothing was measured{cadence}; {self.note}"
        device = "" if self.device_seconds is None else f", {_shown(self.device_seconds)} on the device"
        took = f"{'at least ' * self.lower_bound}{_shown(self.seconds)}" + (f" (+- {_shown(self.error)})" if self.error else "")
        head = f"recording takes {took} of a step of {_shown(self.step_seconds)}: {100 * self.share:.2g} %"
        return f"{head}{device}, measured on the {self.where} over {self.steps} steps{cadence}"

    def rows_shown(self) -> Rows:
        """One row for each subrecorder, most costly first."""
        ordered = self._ordered()
        return ("name", "time in a step"), ([(shown_name(name), _shown(seconds))] for name, seconds in ordered), len(ordered)

    def _ordered(self) -> list[tuple[str, float]]:
        return sorted(self.by_name.items(), key=lambda item: -item[1])


def overhead(meter: Meter, *, started: bool) -> Overhead:
    """What a meter measured; `started` is whether its clock advances."""
    found, every, budget = meter.measured(), meter.every_step, meter.budget
    if not found.measured:
        note = "the next steps are: call overhead() again after some of them, the first of which is left out"
        if not started:
            note = "the clock has not advanced: call recorder.attach(optimizer), or recorder.step() after every step"
        return Overhead(math.nan, math.nan, {}, 0, every, budget, note=note)
    cost = found.cost()
    often, seconds = cost.chosen / every, cost.at(every)
    left_out = ["reading results"]
    if cost.error is None:
        left_out.append("what recording slows down elsewhere: no steps without recording were measured")
        if any(monitor.compiled for monitor in meter.monitors.values()):
            left_out.append("what compiled graphs compute for it in their own kernels")
    note = f"not included: {', '.join(left_out)}"
    if budget is not None and cost.share(cost.least) > budget:
        note += "; no cadence keeps within the budget: steps that record nothing exceed it already"
    works = found.by_name(often)
    by_name = {name: works[name] for name in meter.monitors}
    error = None if cost.error is None else often * cost.error
    device = often * found.device() or None
    return Overhead(seconds, cost.bare + seconds, by_name, found.measured, every, budget, device, note, cost.error is None, error)


def check_budget(budget: object) -> float | None:
    """`budget` as a float, or None; raises `ValueError` if it is not a number between 0 and 1."""
    if budget is None:
        return None
    if isinstance(budget, (int, float)) and not isinstance(budget, bool) and 0 < budget < 1:
        return float(budget)
    raise ValueError(
        f"Recorder(budget={budget!r}): budget is the share of the steps' time that recording may take, above 0 and below 1: "
        "0.03 for 3 %. A group of monitors cannot be called 'budget'"
    )


def shown_cadence(every_step: int, budget: float | None) -> str:
    """The cadence in words, to be put behind other words; "" without a budget.

    >>> shown_cadence(4, 0.03)
    ', one in 4 of the steps for a budget of 3 %'
    """
    often = "all steps" if every_step == 1 else f"one in {every_step} of the steps"
    return "" if budget is None else f", {often} for a budget of {100 * budget:.3g} %"


def _shown(seconds: float) -> str:
    """
    >>> _shown(0.0123), _shown(0.000_05)
    ('12.3 ms', '50 us')
    """
    for scale, unit in ((1.0, "s"), (1e3, "ms")):
        if seconds * scale >= 0.9995:  # below, it would be rounded to three digits of the smaller unit
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
