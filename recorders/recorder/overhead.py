"""What recording costs, as it is shown, and the budget that limits it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["Overhead", "check_budget", "shown_cadence"]


@dataclass(frozen=True)
class Overhead:
    """What recording costs a step, on average over steps that were measured lately.

    Attributes:
        seconds: of a step, that recording takes: what monitors do, of all threads together; what PyTorch does to call them; and
            what belongs to none of them: the clock, taking hooks out and putting them back, and measuring.
        step_seconds: a whole step, recording included.
        by_name: the seconds by subrecorder, without what belongs to none of them.
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


def _shown(seconds: float) -> str:
    """
    >>> _shown(0.0123), _shown(0.000_05)
    ('12.3 ms', '50 us')
    """
    for scale, unit in ((1.0, "s"), (1e3, "ms")):
        if seconds * scale >= 0.9995:  # which is rounded up
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
