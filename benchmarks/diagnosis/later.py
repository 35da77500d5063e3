"""`LATER`: trainings that were written after the rules, by people who did not know them, with the faults that they thought of."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.diagnosis.training import Program, Training

__all__ = ["LATER", "later"]

LATER: dict[str, Program] = {}
"""By name."""


def later(learns: float, chance: float) -> Callable[[Callable[[int], Training]], Program]:
    """Registers a function of a seed that makes a healthy training, under its own name with `-` for `_`."""

    def register(make: Callable[[int], Training]) -> Program:
        name = make.__name__.replace("_", "-")
        LATER[name] = Program(name, make, learns, chance)
        return LATER[name]

    return register
