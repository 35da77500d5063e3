"""Trainings that were written after the rules, with faults, by people who did not know them: `LATER`, and `LAST`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks.diagnosis.training import Program, Training

__all__ = ["LAST", "LATER", "last", "later"]

LATER: dict[str, Program] = {}
"""Those that rules were mended by since, by name."""
LAST: dict[str, Program] = {}
"""Those that were written last, by name."""


def _registers(into: dict[str, Program], learns: float, chance: float) -> Callable[[Callable[[int], Training]], Program]:
    """Registers a function of a seed that makes a healthy training, under its own name with `-` for `_`."""

    def register(make: Callable[[int], Training]) -> Program:
        name = make.__name__.replace("_", "-")
        into[name] = Program(name, make, learns, chance)
        return into[name]

    return register


later = partial(_registers, LATER)
last = partial(_registers, LAST)
