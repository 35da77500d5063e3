"""Evidence: what a recorder or a recording tells of a training, as the rules read it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from torch import Tensor, nn

from recorders.recorder.recorder import Recorder
from recorders.recordings.recording import Recording, Subrecording
from recorders.watch.diagnosis.steps import FACTS
from recorders.watch.overview import Layer, overview, pushed
from recorders.watch.spread import Spread

__all__ = ["Batches", "Course", "Evidence", "evidence"]

TARGETS = ("target", "targets", "label", "labels", "y")
"""The names under which targets are pushed."""


@dataclass(frozen=True)
class Course:
    """Values in the order in which they came.

    >>> course = Course([4.0, 3.0, 2.5, 2.25, 2.0, 2.0])
    >>> course.start(), course.end(), course.noise()
    (3.0, 2.0, 0.26212...)
    """

    values: Sequence[float]

    def __len__(self) -> int:
        return len(self.values)

    @property
    def finite(self) -> list[float]:
        """Those that are finite."""
        return [value for value in self.values if math.isfinite(value)]

    def start(self, least: int = 3, share: float = 0.05) -> float:
        """The median of the first values: a share of all, and at least a few; NaN if there is none."""
        return _median(self.finite[: max(least, int(share * len(self)))])

    def end(self, least: int = 3, share: float = 0.1) -> float:
        """The median of the last values; NaN if there is none."""
        return _median(self.finite[-max(least, int(share * len(self))) :])

    def noise(self) -> float:
        """The standard deviation of the values about their trend, from the median step between neighbours; NaN of fewer than two."""
        found = self.finite
        steps = [abs(after - before) for before, after in itertools.pairwise(found)]
        return 1.4826 * _median(steps) / math.sqrt(2)


def _median(values: Sequence[float]) -> float:
    return median(values) if values else math.nan


@dataclass(frozen=True)
class Batches:
    """What the batches of one input, or of the target, were like.

    Attributes:
        spread: of all of them.
        size: the norm of each batch.
        each: statistics of each batch, by name, as of a `Summary`.
        floating: whether the values are floating-point numbers, not classes or tokens.
    """

    spread: Spread
    size: Sequence[float]
    each: Mapping[str, Sequence[float]]
    floating: bool


@dataclass(frozen=True)
class Evidence:
    """What is known of a training.

    Attributes:
        layers: one row a layer, in network order; see `overview`.
        calls: what was pushed, by name; see `pushed`.
        loss: the loss of each step; None if it was not pushed.
        inputs, target: the batches, by the path of the leaf.
        steps: by name of a fact the values at each step that was recorded; see `FACTS`. None if no step was.
        inference: the share of dropouts and the like that were in training mode while gradients were off; NaN if not known.
        gradients, updates, weights: by layer and name of the parameter, the norm of its gradient at each step, the norm of the
            change over that of the weights, and the norm of the weights.
        net: the net, if a recorder knows it.
    """

    layers: Sequence[Layer]
    calls: Mapping[str, Spread] = field(default_factory=dict)
    loss: Course | None = None
    inputs: Mapping[str, Batches] = field(default_factory=dict)
    target: Mapping[str, Batches] = field(default_factory=dict)
    steps: Mapping[str, Course] | None = None
    inference: float = math.nan
    gradients: Mapping[str, Mapping[str, Course]] = field(default_factory=dict)
    updates: Mapping[str, Mapping[str, Course]] = field(default_factory=dict)
    weights: Mapping[str, Mapping[str, Course]] = field(default_factory=dict)
    net: nn.Module | None = None

    def fact(self, name: str) -> list[float]:
        """The values of a fact at the steps that were recorded, but for those that are not known."""
        return [] if self.steps is None else self.steps[name].finite


def evidence(recorded: Recorder | Recording) -> Evidence:
    """Reads what was recorded."""
    parts = recorded.snapshot()
    found: dict[str, Any] = {"inputs": {}, "target": {}, "gradients": {}, "updates": {}, "weights": {}}
    for name, part in parts.items():
        group, _, layer = name.partition("/")
        if part.monitor == "StepMonitor" and part.samples:
            rows = part.peek()
            found["steps"] = {fact: Course(rows[:, column].tolist()) for column, fact in enumerate(FACTS)}
        elif part.monitor == "NetInputMonitor" and group == "inference":
            found["inference"] = float(part.peek()) if part.samples else math.nan
        elif part.monitor == "NetInputMonitor":
            found["inputs"] = _batches(part)
        elif part.monitor == "CallMonitor" and group.lower() in TARGETS:
            found["target"] = _batches(part)
        elif part.monitor == "CallMonitor" and group.lower() == "loss":
            found["loss"] = _loss(part)
        elif (kept := _COURSES.get(part.monitor)) is not None:
            role, key = kept
            courses = {path: _course(result, key) for path, result in part.leaves().items()}
            found[role][layer or group] = {path: course for path, course in courses.items() if course is not None}
    return Evidence(overview(recorded), pushed(recorded), net=_net(recorded), **found)


_COURSES = {
    "ParameterGradientMonitor": ("gradients", "size"),
    "ParameterUpdateMonitor": ("updates", "course"),
    "ParameterMonitor": ("weights", ""),
}
"""By class of the monitor, which courses it records, and under which name in its result."""


def _course(result: Any, key: str) -> Course | None:
    values = result.get(key) if isinstance(result, Mapping) else result
    return Course(values.double().ravel().tolist()) if isinstance(values, Tensor) and values.ndim else None


def _loss(part: Subrecording) -> Course | None:
    courses = (_course(result, "course") for result in part.leaves().values())
    return next((course for course in courses if course is not None and len(course)), None)


def _batches(part: Subrecording) -> dict[str, Batches]:
    found = {}
    for path, result in part.leaves().items():
        if isinstance(result, Mapping) and {"spread", "each", "size"} <= result.keys():
            floating = result["spread"]["min"].is_floating_point()
            each = {key: values.double().tolist() for key, values in result["each"].items()}
            found[path] = Batches(Spread.of(result["spread"], part.samples), result["size"].double().tolist(), each, floating)
    return found


def _net(recorded: Recorder | Recording) -> nn.Module | None:
    if not isinstance(recorded, Recorder):
        return None
    return next((monitor.module for monitor in recorded.values() if monitor.of_net and monitor.module is not None), None)
