"""Trainings that were written after the rules by people who did not know them, `LATER` and `LAST`, and what their faults share."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.diagnosis.training import Program, Training

__all__ = ["LAST", "LATER", "last", "later", "preprocessed", "relabelled"]

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


def preprocessed(training: Training, change: Callable[[Any], Any]) -> None:
    """Changes the inputs of the training, and those of the test."""
    batch, score = training.batch, training.score
    assert isinstance(score, partial)

    def changed(number: int) -> tuple[Any, Any]:
        """The batch with other inputs."""
        x, y = batch(number)
        return change(x), y

    training.batch = changed
    training.score = partial(score.func, **{**score.keywords, "x": change(score.keywords["x"])})


def relabelled(training: Training, change: Callable[[Any, Any], Any]) -> None:
    """Changes the targets of the training, by the inputs and the targets."""
    batch = training.batch

    def changed(number: int) -> tuple[Any, Any]:
        """The batch with other targets."""
        x, y = batch(number)
        return x, change(x, y)

    training.batch = changed
