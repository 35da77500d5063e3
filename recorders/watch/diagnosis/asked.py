"""What several rules ask of the evidence."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from statistics import pvariance
from typing import NamedTuple

from torch import Tensor, nn

from recorders.capture.contents import own_parameters
from recorders.capture.operands import is_spread
from recorders.watch.diagnosis.batches import FEATURES, LABELS, SAMPLES
from recorders.watch.diagnosis.evidence import BatchCourse, Course, Evidence, finite
from recorders.watch.diagnosis.finding import Severity
from recorders.watch.diagnosis.limits import FIRST_STEPS, LOSS, MOVED, SORTED
from recorders.watch.overview import Layer

LEAST = 10
"""The number of steps, or batches, from which on a share of them tells something."""
LATE = 10
"""The number of the last batches that tell how a training ended."""


def held_by(module: object, name: str) -> nn.Parameter | None:
    """A parameter that a module has itself; None of one that it computes, since spectral norms change buffers if they are asked."""
    return own_parameters(module)[1].get(name) if isinstance(module, nn.Module) else None


def share_of(values: Sequence[float]) -> float:
    """The mean, as a share of what is 0 or 1; NaN if there is none."""
    return sum(values) / len(values) if values else math.nan


def only(batches: Mapping[str, BatchCourse]) -> BatchCourse | None:
    """The only one; what is one number beside others, as the loss that a net returns, does not count."""
    several = [one for one in batches.values() if len(batches) == 1 or max(one.each["count"], default=0) > 1]
    return several[0] if len(several) == 1 else None


def as_many(batches: BatchCourse, other: BatchCourse) -> bool:
    """Whether both have as many elements."""
    return batches.typical("count") == other.typical("count")


def is_binary(target: BatchCourse) -> bool:
    """Whether all values are 0 or 1: then how far those of a batch vary follows from their mean."""
    each = zip(finite(target.each["mean"]), finite(target.each["std"]), strict=False)
    return target.low == 0 and target.high == 1 and all(abs(std**2 - mean * (1 - mean)) < 1e-3 for mean, std in each)


def spread_of_means(target: BatchCourse) -> float:
    """How many times as much the means of batches vary as those of random ones; 0 if samples have several values each."""
    if len(target) < LEAST or max(target.each["count"]) > max(target.each["samples"]):
        return 0.0
    means, count = finite(target.each["mean"]), min(FEATURES, target.typical("count"))
    expected = target.typical("std") ** 2 / count
    return pvariance(means) / expected if count > 1 and expected > 0 else 0.0


def drifts(target: BatchCourse) -> bool:
    """Whether the numbers of a target go one way, and those of most batches overlap with those of the batch before.

    So does the target of temporal-difference learning, which is made of outputs of the net. Batches of data that is sorted lie
    beside each other, and the data comes again after a pass.
    """
    if not target.floating or is_binary(target) or spread_of_means(target) <= SORTED:
        return False
    ends = [*zip(target.each["min"], target.each["max"], strict=True)]
    beside = share_of([low >= above or high <= below for (below, above), (low, high) in pairwise(ends)])
    means = finite(target.each["mean"])
    back = min(_farthest_fall([sign * mean for mean in means]) for sign in (1, -1))
    return beside < 0.5 and back < 0.5 * (max(means) - min(means))


def _farthest_fall(values: Sequence[float]) -> float:
    """How far values fall at most below one that came before."""
    return max(highest - value for highest, value in zip(accumulate(values, max), values, strict=True))


def has_unit_length(batches: BatchCourse) -> bool:
    """Whether each sample is a vector of length 1, as far as the norms of batches tell."""
    each = zip(*(batches.each[name] for name in ("count", "samples", "axes", "norm")), strict=True)
    return all(
        axes == 2 and abs(norm**2 / min(samples, max(SAMPLES, FEATURES * samples // max(count, 1))) - 1) < 1e-3
        for count, samples, axes, norm in each
    )


def if_too_large(known: Evidence) -> Severity:
    """How bad steps are that are too large: less than an error if the loss has come down from that of the first step all the same.

    Those that leave much of the initial weights are a notice, if the loss has come down by most.
    """
    if not known.learns or known.loss is None or known.loss.finite[0] <= 0:
        return "error"
    left = known.loss.end() / known.loss.finite[0]  # it may have been thrown up since, and come back
    mild = left < LOSS.most and known.early_ratio <= FIRST_STEPS
    return "notice" if mild else "warning" if left < LOSS.learns else "error"


def may_broadcast(target: BatchCourse, output: BatchCourse) -> bool:
    """Whether both have as many elements, along another number of axes."""
    return as_many(target, output) and target.typical("axes") != output.typical("axes")


def is_adversarial(known: Evidence) -> bool:
    """Whether several optimizers take turns, as those of a GAN: then no loss need fall."""
    return 2 <= len({*known.fact("optimizer")}) <= 4


def output_row(known: Evidence) -> Layer | None:
    """The row of what the net returns: its own, or that of the last layer."""
    rows = [layer for layer in known.layers if layer.output is not None]
    own = [layer for layer in rows if layer.name.partition(":")[0] in ("(net)", "output")]
    return next((layer for layer in own if layer.units is not None), next(iter(own or rows[-1:]), None))


def is_readable(tensor: Tensor) -> bool:
    """Whether rules may look at the numbers of a parameter: there are some, and no other rank has to be asked for them."""
    return tensor.is_floating_point() and not tensor.is_meta and tensor.numel() > 0 and not is_spread(tensor)


def classes_of(known: Evidence) -> int:
    """The number of units that the net returns; 0 if not known."""
    row = output_row(known)
    return 0 if row is None or row.units is None else row.units["mean"].numel()


def last_layer(known: Evidence) -> str:
    """The last layer, which most likely makes what the net returns."""
    inside = [layer.name for layer in known.layers if layer.output is not None and not layer.whole]
    return inside[-1].partition(":")[0] if inside else "(net)"


def blind_loss(known: Evidence) -> float:
    """The least cross entropy, or mean square error, without any inputs, if the loss is one; NaN if the target is not known."""
    target = only(known.target)
    if target is None:
        return math.nan
    if not target.floating:
        return target.entropy if target.low >= 0 else math.nan
    if is_binary(target):
        ones = target.typical("mean")
        return -ones * math.log(ones) - (1 - ones) * math.log(1 - ones) if 0 < ones < 1 else math.nan
    within = target.typical("within")
    return within if within > 0 else math.nan


def trivial_loss(known: Evidence) -> float:
    """The loss of a net that knows the target's frequencies or mean and nothing of the inputs; NaN if that is not known.

    It is known of a cross entropy, which begins near the entropy of equal probabilities, and of a mean square error, which begins
    near the mean square distance of target and outputs.
    """
    target, output = only(known.target), only(known.outputs)
    if target is None or output is None or known.loss is None or not known.loss.finite:
        return math.nan
    first, blind = known.loss.finite[0], blind_loss(known)
    if not target.floating:
        classes = classes_of(known)
        is_entropy = classes >= 2 and target.high < classes and 0.5 < first / math.log(classes) < LOSS.initial
        return blind if is_entropy and classes <= LABELS else math.nan
    if is_binary(target):
        falls_there = first >= 2 and 1 / LOSS.near < known.loss.end() / blind < LOSS.near
        return blind if 0.3 < first < 2 or falls_there else math.nan
    # The square errors of the first outputs, if they do not go with the target yet.
    means = zip(target.each["mean"], output.each["mean"], strict=False)
    spreads = zip(target.each["std"], output.each["std"], strict=False)
    squares = [(one - other) ** 2 + std**2 + spread**2 for (one, other), (std, spread) in zip(means, spreads, strict=False)]
    near = [0.6 * square < loss < 1.6 * square for loss, square in zip(known.loss.values, squares[:3], strict=False)]
    return blind if squares and all(near) and 0.8 * squares[0] < known.loss.values[0] < 1.25 * squares[0] else math.nan


class Moved(NamedTuple):
    """Between which steps weights changed.

    Attributes:
        at: for each pair of steps in a row that were recorded, 1 if any weights were not what the first one left, else 0.
        layers: those whose weights were not.
    """

    at: list[float]
    layers: list[str]


def moved_between(known: Evidence) -> Moved:
    """Between which steps weights changed, by their norms after one step and before the next."""
    steps: dict[float, list[float]] = {}
    for number, step in zip(known.fact("optimizer"), known.fact("step"), strict=False):
        steps.setdefault(number, []).append(step)
    found, layers = dict[float, float](), list[str]()
    for layer, courses in known.before.items():
        for path, course in courses.items():
            before, after = course.values, known.weights.get(layer, {}).get(path, Course([])).values
            at = next((one for one in steps.values() if len(one) == len(before) == len(after)), None)
            if at is None or before == after:  # of a step with a closure both are read after it
                continue
            for place in range(1, len(at)):
                if at[place] == at[place - 1] + 1:
                    moved = abs(before[place] - after[place - 1]) > MOVED * after[place - 1]
                    found[at[place]] = max(found.get(at[place], 0.0), float(moved))
                    if moved and layer not in layers:
                        layers.append(layer)
    return Moved([found[step] for step in sorted(found)], layers)


def written(known: Evidence) -> list[float]:
    """Of steps, 1 if weights were written to since the step before, else 0."""
    facts, moved = known.fact("written"), moved_between(known).at
    return moved if sum(moved) > sum(facts) else facts
