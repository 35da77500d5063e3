"""Evidence: what a recorder or a recording tells of a training, as the rules read it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median, median_low
from typing import Any, TypeVar

from torch import Tensor, nn

from recorders.recorder.recorder import Recorder
from recorders.recorder.selection import Criteria, select_modules
from recorders.recordings.display import shown_name
from recorders.recordings.distributed.differing import Differing
from recorders.recordings.recording import Recording, Subrecording
from recorders.watch.diagnosis.batches import BATCH, LABELS
from recorders.watch.diagnosis.limits import LOSS
from recorders.watch.diagnosis.steps import FACTS, StepMonitor
from recorders.watch.overview import Layer, layer_names, overview, pushed
from recorders.watch.spread import Spread

Sliced = TypeVar("Sliced", Tensor, Sequence[float])

TARGETS = ("target", "targets", "label", "labels", "y")
"""The names under which targets are pushed."""


@dataclass(frozen=True)
class Course:
    """Values in the order in which they came.

    >>> course = Course([4.0, 3.0, 2.5, 2.25, 2.0, 2.0])
    >>> course.start(), course.end(), course.noise()
    (3.0, 2.0, 0.15131722...)
    """

    values: Sequence[float]

    def __len__(self) -> int:
        return len(self.values)

    @property
    def finite(self) -> list[float]:
        """Those that are finite."""
        return finite(self.values)

    def start(self, least: int = 3, share: float = 0.05) -> float:
        """The median of the first values: a share of all, and at least a few; NaN if there is none."""
        return middle(self.finite[: max(least, int(share * len(self)))])

    def end(self, least: int = 3, share: float = 0.1) -> float:
        """The median of the last values; NaN if there is none."""
        return middle(self.finite[-max(least, int(share * len(self))) :])

    def noise(self) -> float:
        """The standard deviation of the values about their trend; NaN of fewer than three.

        It is the median of how far each value is from the mean of its neighbours, which a trend, straight or bent, hardly moves.
        """
        found = self.finite
        off = [abs(before - 2 * value + after) for before, value, after in zip(found, found[1:], found[2:], strict=False)]
        return 1.4826 * middle(off) / math.sqrt(6)


def middle(values: Sequence[float]) -> float:
    """The median; NaN if there is no value."""
    return median(values) if values else math.nan


@dataclass(frozen=True)
class BatchCourse:
    """What the batches of the inputs, the target or the outputs were like.

    Attributes:
        each: by name, see `BATCH`, the values of each batch.
        labels: how often each label came in all of them, modulo `LABELS`; zeros of floating-point numbers.
    """

    each: Mapping[str, Sequence[float]]
    labels: Sequence[float]

    def __len__(self) -> int:
        return len(self.each["count"])

    @property
    def floating(self) -> bool:
        """Whether the values are floating-point numbers, not classes or tokens."""
        return any(self.each["floating"])

    @property
    def low(self) -> float:
        """The least value that was seen; NaN if none was."""
        return min(finite(self.each["min"]), default=math.nan)

    @property
    def high(self) -> float:
        """The largest value that was seen; NaN if none was."""
        return max(finite(self.each["max"]), default=math.nan)

    def typical(self, name: str) -> float:
        """The median over batches; NaN if there is none."""
        return middle(finite(self.each[name]))

    @property
    def entropy(self) -> float:
        """Of the labels, in nats: the cross entropy of a net that knows how often each comes, and nothing of its inputs."""
        total = sum(self.labels)
        return -sum(count / total * math.log(count / total) for count in self.labels if count) if total else math.nan


def finite(values: Sequence[float]) -> list[float]:
    """The values that are finite."""
    return [value for value in values if math.isfinite(value)]


@dataclass(frozen=True)
class Evidence:
    """What is known of a training.

    Attributes:
        layers: one row a layer, in network order; see `overview`.
        calls: what was pushed, by name; see `pushed`.
        loss: the loss of each step; None if it was not pushed. Of several ranks this, `inputs`, `outputs`, `target` and `steps`
            are those of the first.
        inputs, outputs, target: the batches of the net, by the path of the leaf.
        steps: by name of a fact the values at each step that was recorded; see `FACTS`. None if no step was.
        inference: the share of dropouts and the like that were in training mode while gradients were off; NaN if not known.
        gradients, updates, weights, before: by layer and name of the parameter, the norm of its gradient at each step, the norm
            of the change over that of the weights, and the norm of the weights after the step, and before it.
        differing: by layer, what ranks should have recorded alike and did not.
        compared: by class of the monitor, the number of tensors of which copies of several ranks were compared.
        elsewhere: the number of steps of any optimizers of the process; only a recorder knows it.
        modules: the modules by the names of layers, in network order; only a recorder knows them.
    """

    layers: Sequence[Layer]
    calls: Mapping[str, Spread] = field(default_factory=dict)
    loss: Course | None = None
    inputs: Mapping[str, BatchCourse] = field(default_factory=dict)
    outputs: Mapping[str, BatchCourse] = field(default_factory=dict)
    target: Mapping[str, BatchCourse] = field(default_factory=dict)
    steps: Mapping[str, Course] | None = None
    inference: float = math.nan
    gradients: Mapping[str, Mapping[str, Course]] = field(default_factory=dict)
    updates: Mapping[str, Mapping[str, Course]] = field(default_factory=dict)
    weights: Mapping[str, Mapping[str, Course]] = field(default_factory=dict)
    before: Mapping[str, Mapping[str, Course]] = field(default_factory=dict)
    differing: Mapping[str, Sequence[Differing]] = field(default_factory=dict)
    compared: Mapping[str, int] = field(default_factory=dict)
    elsewhere: int = 0
    modules: Mapping[str, nn.Module] = field(default_factory=dict)

    @property
    def gradient_norms(self) -> dict[str, float]:
        """The norm of the gradient of the outputs of each layer that tells of the depth of the net."""
        inside = [layer for layer in self.layers if layer.gradient is not None and _is_inside(layer)]
        return {layer.name: layer.gradient.norm for layer in inside if layer.gradient is not None}

    @property
    def learns(self) -> bool:
        """Whether the loss has come down, by a quarter at least."""
        return self.loss is not None and self.loss.end() < LOSS.learns * self.loss.start()

    @property
    def ratio(self) -> float:
        """The typical size of an update relative to the weights, over all layers; NaN if not known."""
        return middle(finite([course.start(share=1.0) for course in self._weight_updates()]))

    @property
    def early_ratio(self) -> float:
        """The largest of the first updates, relative to the weights, of most layers at least; NaN if not known.

        A small head may have larger ones in health, also if it is one of two layers.
        """
        begun = [course.values[:4] for course in self._weight_updates() if finite(course.values[:1])]  # others begin at zero
        return median_low([max(finite(values)) for values in begun]) if begun else math.nan

    def _weight_updates(self) -> list[Course]:
        return [course for layer in self.updates.values() for path, course in layer.items() if "bias" not in path]

    def fact(self, name: str) -> list[float]:
        """The values of a fact at the steps that were recorded, but for those that are not known."""
        return [] if self.steps is None else self.steps[name].finite


def _is_inside(layer: Layer) -> bool:
    """Whether its gradient tells of the depth of the net: not that of a loss, which is 1, nor of a module that contains layers."""
    gradient = layer.gradient
    alone = gradient is not None and gradient.count + gradient.nonfinite == gradient.observations > 0
    return not (layer.whole or alone)


def evidence(recorded: Recorder | Recording) -> Evidence:
    """Reads what was recorded."""
    parts = recorded.snapshot()
    names = layer_names(parts)
    ranks = max((len(part.ranks) for part in parts.values()), default=0) or 1
    found: dict[str, Any] = {"inputs": {}, "outputs": {}, "target": {}, "gradients": {}, "updates": {}, "weights": {}}
    found |= {"before": {}, "differing": {}, "compared": {}}
    for name, part in parts.items():
        group = name.partition("/")[0]
        if part.copies:
            found["compared"][part.monitor] = found["compared"].get(part.monitor, 0) + part.copies
        if part.differing and part.monitor != "StepMonitor":  # one rank may evaluate alone, or clear gradients twice
            told = [replace(one, leaf=one.leaf or part.attr or "") for one in part.differing]
            found["differing"].setdefault(names[name], []).extend(told)
        if part.monitor == "StepMonitor" and part.samples:
            found["steps"] = _steps(part.peek(), ranks)
        elif part.monitor == "NetInputMonitor" and group == "inference":
            found["inference"] = float(part.peek()) if part.samples else math.nan
        elif part.monitor in ("NetInputMonitor", "NetOutputMonitor"):
            found["inputs" if part.monitor == "NetInputMonitor" else "outputs"] = _batches(part, ranks)
        elif part.monitor == "CallMonitor" and group.lower() in TARGETS:
            found["target"] = _batches(part, ranks)
        elif part.monitor == "CallMonitor" and group.lower() == "loss":
            found["loss"] = _loss(part, ranks)
        elif (kept := _COURSES.get(part.monitor)) is not None:
            role, key = kept
            courses = {path: _course(result, key) for path, result in part.leaves().items()}
            found[role][names[name]] = {path: course for path, course in courses.items() if course is not None}
    if found["differing"] and found.get("steps") is not None:  # then there is a course of each copy, one after another
        most = len(found["steps"]["step"])
        for role in ("gradients", "updates", "weights", "before"):
            for layer, courses in found[role].items():
                found[role][layer] = {path: Course(course.values[:most]) for path, course in courses.items()}
    if isinstance(recorded, Recorder):
        found["elsewhere"] = max((one.steps_anywhere for one in recorded.values() if isinstance(one, StepMonitor)), default=0)
        found["modules"] = _modules(recorded, names)
    return Evidence(overview(recorded), pushed(recorded), **found)


_COURSES = {
    "ParameterGradientMonitor": ("gradients", "size"),
    "ParameterUpdateMonitor": ("updates", "course"),
    "ParameterMonitor": ("weights", ""),
    "PreStepParameterMonitor": ("before", ""),
}
"""By class of the monitor, which courses it records, and under which name in its result."""


def _course(result: Any, key: str) -> Course | None:
    values = result.get(key) if isinstance(result, Mapping) else result
    return Course(values.double().ravel().tolist()) if isinstance(values, Tensor) and values.ndim else None


def _of_the_first(values: Sliced, ranks: int) -> Sliced:
    """What the first of several ranks recorded of data of its own: they are merged one after another."""
    return values[: -(-len(values) // ranks)]


def _steps(rows: Tensor, ranks: int) -> dict[str, Course]:
    """What steps tell; of several ranks, if they do not tell the same, those of the first, after which the steps begin anew."""
    begun = (rows[1:, FACTS.index("step")] < rows[:-1, FACTS.index("step")]).nonzero()
    if ranks > 1 and len(begun):
        rows = rows[: int(begun[0]) + 1]
    return {fact: Course(rows[:, column].tolist()) for column, fact in enumerate(FACTS)}


def _loss(part: Subrecording, ranks: int) -> Course | None:
    courses = (_course(result, "course") for result in part.leaves().values())
    return next((Course(_of_the_first(course.values, ranks)) for course in courses if course is not None and len(course)), None)


def _batches(part: Subrecording, ranks: int) -> dict[str, BatchCourse]:
    found = {}
    for path, rows in part.leaves().items():
        if isinstance(rows, Tensor) and rows.ndim == 2 and rows.shape[1] == len(BATCH) + LABELS:
            columns = _of_the_first(rows, ranks).double().T.tolist()
            labels = [sum(column) for column in columns[len(BATCH) :]]
            found[path] = BatchCourse(dict(zip(BATCH, columns, strict=False)), labels)
    return found


def _modules(recorder: Recorder, names: Mapping[str, str]) -> dict[str, nn.Module]:
    """By layer the module, also after hooks were taken off."""
    found: dict[str, nn.Module] = {}
    for net in recorder._live_nets():
        for place in select_modules(net, Criteria(), recursive=True):
            found.setdefault(shown_name(place.name), place.module)
    layers = {*names.values()}
    return {name: module for name, module in found.items() if name in layers}
