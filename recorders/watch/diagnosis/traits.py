"""Traits: the statistics of a run, by layer and phase, by which it is compared with good runs."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from torch import Tensor

from recorders.watch.diagnosis.evidence import BatchCourse, Course, Evidence
from recorders.watch.overview import Layer
from recorders.watch.spread import Spread

FIRST = 10
"""The number of steps of the early phase."""
LEAST = 4
"""The number of values from which on a phase is compared."""
PARTS = 8
"""The number of equal parts of a training in which the loss is compared."""
TINY = 1e-12
"""What is smaller in magnitude counts as this, so that zeros have a logarithm."""


Causes: TypeAlias = tuple[tuple[str, ...], tuple[str, ...]]


class Key(NamedTuple):
    """What a trait is of.

    Attributes:
        role: "layers", of which the statistic is the class; "outputs", "gradients", "updates", "weights", "loss", "inputs",
            "target", or the name of a fact of steps, see `FACTS`.
        where: the layer, "loss", "inputs", "target", "outputs", "optimizer" or "(net)".
        statistic: what was measured.
        phase: "early", "middle" or "late"; of the loss also a part, such as "part 3 of 8"; "whole" if the recording does not tell
            steps apart.
    """

    role: str
    where: str
    statistic: str
    phase: str


class Trait(NamedTuple):
    """One statistic of a run in one phase.

    Attributes:
        key: what it is of.
        values: in the order of the steps; if `ratio`, natural logarithms.
        steps: of the clock, one for each value; empty if they are not known.
        margin: how far another good run may differ, if nothing more is known; in the unit of `values`.
        chance: how much more, because the layer is so small that its initial weights are a matter of chance.
        ratio: whether values are compared by their ratio, as sizes are, not by their difference.
        paced: whether it moves as a training goes on, which other runs may do faster.
        causes: the likely causes if it is above those of good runs, and if it is below.
    """

    key: Key
    values: Sequence[float]
    steps: Sequence[int]
    margin: float
    chance: float = 0.0
    ratio: bool = False
    paced: bool = False
    causes: Causes = ((), ())


FACTOR, OF_GRADIENTS, OF_WEIGHTS = 3.0, 5.0, 2.0
"""By which factors sizes may differ: of outputs and updates, of gradients, and of weights.

They are ours. Of 27 kinds of healthy nets, two that differ by their seed differ at most by a third of the margins of weights and
updates, and by two thirds of those of gradients, of which those of keys and queries of attention differ most.
"""

_FACTS: dict[str, tuple[str, Callable[[float], float], float, bool, Causes]] = {
    "rate": ("learning rate", float, 2.0, True, (("rate-too-high",), ("rate-too-low",))),
    "decay": ("weight decay", float, 2.0, True, (("weight-decay",), ())),
    "epsilon": ("epsilon", float, 5.0, True, (("epsilon",), ())),
    "momentum": ("momentum, subtracted from 1,", lambda value: 1 - value, 2.0, True, ((), ("momentum",))),
    "second momentum": ("second beta, subtracted from 1,", lambda value: 1 - value, 5.0, True, (("momentum",), ("momentum",))),
    "dropout": ("largest share that a dropout leaves out", float, 0.15, False, (("dropout",), ())),
    "evaluating": (
        "share of dropouts and batch norms in evaluation mode",
        float,
        0.15,
        False,
        (("eval-mode", "statistics-frozen"), ("train-mode",)),
    ),
    "coarse": ("share of weights of 16 bits or fewer", float, 0.15, False, (("lost-updates",), ())),
    "ascends": ("share of steps that maximize", float, 0.15, False, (("ascent",), ("ascent",))),
    "kept": ("share of steps with gradients that were not cleared", float, 0.15, False, (("gradients-not-cleared",), ())),
    "written": ("share of steps before which weights were written to", float, 0.15, False, (("weights-overwritten",), ())),
    "held": ("number of parameters that the optimizer holds", float, 0.15, False, ((), ("not-in-optimizer", "stale-optimizer"))),
    "trainable": ("number of parameters that require a gradient", float, 0.15, False, ((), ("frozen",))),
    "foreign": ("number of parameters held that the net does not have", float, 0.15, False, (("stale-optimizer",), ())),
    "without gradient": ("number of parameters held that got no gradient", float, 0.15, False, (("detached", "never-ran"), ())),
    "still": ("number of batch norms whose statistics do not move", float, 0.15, False, (("statistics-frozen",), ())),
}
"""Of each fact of a step: what it is, what is compared, how far it may differ, whether by a factor, and the likely causes."""
_OF_NET = frozenset({"dropout", "evaluating", "trainable", "still"})


def length(known: Evidence) -> int:
    """The number of steps of a run, as far as it is known: that of losses, else of the last step recorded; 0 if nothing tells."""
    if known.loss is not None:
        return len(known.loss)
    return int(max(known.fact("step"), default=-1)) + 1


def has_class(layer: Layer) -> bool:
    """Whether its class is known, and is compared: that of the net itself is the user's own matter."""
    return bool(layer.kind) and not layer.name.startswith("(net)")


def traits(known: Evidence) -> Iterator[Trait]:
    """All traits of a run, in network order."""
    clock = [int(step) for step in known.fact("step")]
    elements = {layer.name: _elements(layer) for layer in known.layers}
    seldom = _seldom(known.gradients)
    gradients, updates = (
        {layer: of for layer, of in found.items() if _unnumbered(layer) not in seldom} for found in (known.gradients, known.updates)
    )
    for layer in known.layers:
        if has_class(layer):
            yield Trait(Key("layers", layer.name, layer.kind, "whole"), [1.0], [], 0.5)
        if not layer.whole and _unnumbered(layer.name) not in seldom:  # what contains others gives what its last one gives
            yield from _of_layer(layer, with_gradient=not known.gradients)
    yield from _of_parameters("gradients", "norm of the gradient", gradients, elements, clock, OF_GRADIENTS, _OF_GRADIENTS)
    yield from _of_neighbours(gradients, elements, clock)
    yield from _of_parameters(
        "updates", "size of an update, relative to the weights,", updates, elements, clock, FACTOR, _OF_UPDATES
    )
    yield from _of_parameters("weights", "norm", known.weights, elements, clock, OF_WEIGHTS, _OF_WEIGHTS)
    yield from _of_loss(known.loss)
    for role, found in (("inputs", known.inputs), ("target", known.target), ("outputs", known.outputs)):
        for path, batches in found.items():
            yield from _of_batches(role, f"{role}:{path}" if path else role, batches, clock)
    for fact in _FACTS:
        yield from _of_fact(fact, known, clock)


_NONE: Causes = ((), ())
_OF_GRADIENTS: Causes = (("exploding-gradients", "loss-scale"), ("vanishing-gradients", "loss-scale"))
_OF_UPDATES: Causes = (("rate-too-high",), ("rate-too-low",))
_OF_WEIGHTS: Causes = (("rate-too-high", "weights-overwritten"), ("weight-decay", "weights-overwritten"))
_RESHAPED: Causes = (("wrong-axis", "broadcast"), ("wrong-axis", "bottleneck"))
_AT_FIRST: Causes = (("initialisation",), ("initialisation",))

_Courses: TypeAlias = Mapping[str, Mapping[str, Course]]


def _seldom(gradients: _Courses) -> frozenset[str]:
    """Names, but for numbers, of layers that only some batches use, as of experts: which is used how much is a matter of chance."""
    longest = max((len(course) for of in gradients.values() for course in of.values()), default=0)
    return frozenset(_unnumbered(layer) for layer, of in gradients.items() if any(_is_seldom(one, longest) for one in of.values()))


def _is_seldom(course: Course, longest: int) -> bool:
    """Whether gradients stay away and come again."""
    came = [comes for comes, _ in itertools.groupby(course.finite, key=bool)]  # in turn
    return len(course) < longest or sum(came) > 1


def _unnumbered(name: str) -> str:
    return re.sub(r"\d+", "#", name)


def _of_layer(layer: Layer, with_gradient: bool) -> Iterator[Trait]:
    """What was recorded of all steps together.

    The largest few gradients make most of their norm. So they are compared `with_gradient` only if those of weights, which are
    known step by step, are not.
    """
    units = layer.units["mean"].numel() if layer.units is not None else 0
    chance = 1 / math.sqrt(max(units, 1))
    out, gradient = layer.output, layer.gradient if with_gradient else None
    share = (out.mean / out.rms) if out is not None and out.count and out.rms > 0 else math.nan
    gone = layer.gone
    sizes = ("initialisation", "normalisation"), ("initialisation", "normalisation", "vanishing-gradients")
    found: dict[tuple[str, str, float, Causes], float] = {
        ("outputs", "root mean square of the outputs", FACTOR, sizes): math.nan if out is None else out.rms,
        ("outputs", "magnitude of the mean of the outputs, relative to their root mean square,", 0.0, _NONE): abs(share),
        ("outputs", "number of elements of an output", 2.0, _RESHAPED): _elements_of(out),
        ("outputs", "share of dead units", 0.0, (("dead-units",), ())): _share(gone),
        ("gradients", "norm of the gradient of the outputs", OF_GRADIENTS, _OF_GRADIENTS): _norm(gradient)
        if with_gradient
        else math.nan,
    }
    for (role, statistic, factor, causes), value in found.items():
        if math.isfinite(value):
            ratio = factor > 0
            compared, margin = (_log(value), math.log(factor)) if ratio else (value, 0.4)
            yield Trait(Key(role, layer.name, statistic, "whole"), [compared], [], margin, chance, ratio, causes=causes)


def _elements_of(spread: Spread | None) -> float:
    return spread.count / spread.observations if spread is not None and spread.count and spread.observations else math.nan


def _share(units: Tensor | None) -> float:
    return float(units.double().mean()) if units is not None and units.numel() else math.nan


def _norm(spread: Spread | None) -> float:
    return math.nan if spread is None else spread.norm


def _of_parameters(
    role: str,
    statistic: str,
    found: _Courses,
    elements: Mapping[str, int],
    clock: Sequence[int],
    factor: float,
    causes: Causes,
) -> Iterator[Trait]:
    """The courses of weights; not of biases, which begin at zero, so that their sizes mean little."""
    for layer, courses in found.items():
        for path, course in courses.items():
            if _is_weight(path):
                chance = _chance(elements.get(layer, 0))
                for phase, values, steps in _phases(course.values, clock):
                    key = Key(role, layer, f"{statistic} of {path}" if path else statistic, phase)
                    why = _AT_FIRST if role == "weights" and phase == "early" else causes
                    compared = [_log(value) for value in values]
                    yield Trait(key, compared, steps, math.log(factor), chance, ratio=True, paced=True, causes=why)


def _of_neighbours(found: _Courses, elements: Mapping[str, int], clock: Sequence[int]) -> Iterator[Trait]:
    """The ratio of the gradients of each layer to those of the next, which depends less on how far the training is."""
    norms = {layer: _together(courses) for layer, courses in found.items()}
    known = [(layer, course) for layer, course in norms.items() if course]
    for (layer, here), (after, there) in itertools.pairwise(known):
        if len(here) == len(there):
            ratios = [one / other if other > TINY and one > TINY else math.nan for one, other in zip(here, there, strict=True)]
            chance = _chance(min(elements.get(layer, 0), elements.get(after, 0)))
            for phase, values, steps in _phases(ratios, clock):
                key = Key("gradients", layer, f"norm of the gradient, relative to that at {after},", phase)
                compared, margin = [_log(value) for value in values], math.log(OF_GRADIENTS)
                yield Trait(key, compared, steps, margin, chance, ratio=True, paced=True, causes=_OF_GRADIENTS)


def _of_loss(course: Course | None) -> Iterator[Trait]:
    """The loss at the start and in equal parts of the training, compared by how far it falls."""
    if course is None or len(course.finite) < LEAST:
        return
    starts = [round(len(course) * part / PARTS) for part in range(PARTS + 1)]
    parts = [course.values[start:end] for start, end in itertools.pairwise(starts)]
    middles = [Course(part).end(share=1.0) for part in parts]
    known = [middle for middle in middles if math.isfinite(middle)] or [0.0]
    margin = max(0.25 * (max(known) - min(known)), 3 * course.noise(), 0.05 * abs(course.start()))
    changes = [abs(after - before) for before, after in itertools.pairwise(middles)]
    for number, (start, values) in enumerate(zip([0, *starts], [course.values[:FIRST], *parts], strict=False)):
        found = [(value, start + at) for at, value in enumerate(values) if math.isfinite(value)]
        # Another run may be ahead or behind by such a part.
        pace = max((change for change in changes[max(number - 2, 0) : max(number, 1)] if math.isfinite(change)), default=0.0)
        if len(found) >= LEAST:
            phase = f"part {number} of {PARTS}" if number else "early"
            key, values = Key("loss", "loss", "loss", phase), [value for value, _ in found]
            causes = _OF_LOSS if number else _OF_FIRST_LOSS
            yield Trait(key, values, [step for _, step in found], margin + pace * bool(number), causes=causes)


_OF_FIRST_LOSS: Causes = (("wrong-loss", "loss-scale", "initialisation"), ("loss-scale", "wrong-loss"))
_OF_LOSS: Causes = (("labels-do-not-fit", "noise", "wrong-loss"), ("wrong-loss",))
_OF_BATCHES: dict[tuple[str, str], Causes] = {
    ("outputs", "elements"): _RESHAPED,
    ("outputs", "samples"): _RESHAPED,
    ("outputs", "axes"): _RESHAPED,
    ("inputs", "mean"): (("inputs-not-normalised",), ("inputs-not-normalised",)),
    ("inputs", "std"): (("inputs-not-normalised",), ("inputs-not-normalised", "inputs-constant")),
    ("inputs", "min"): (("inputs-not-normalised",), ("outliers", "inputs-not-normalised")),
    ("inputs", "max"): (("outliers", "inputs-not-normalised"), ("inputs-not-normalised",)),
    ("target", "mean"): (("target-scale",), ("target-scale",)),
    ("target", "std"): (("target-scale",), ("target-scale", "labels-constant")),
    ("target", "min"): (("target-scale",), ("outliers", "target-scale")),
    ("target", "max"): (("outliers", "target-scale"), ("target-scale",)),
    ("outputs", "std"): (("initialisation", "rate-too-high"), ("output-activation", "bottleneck")),
    ("inputs", "entropy"): (("noise",), ("inputs-constant",)),
    ("target", "entropy"): (("labels-do-not-fit",), ("labels-constant",)),
}
"""By role and column, the likely causes if it is above, and below."""


def _of_batches(role: str, where: str, batches: BatchCourse, clock: Sequence[int]) -> Iterator[Trait]:
    """What a typical batch of inputs, target or outputs is like."""
    width, deviation = batches.high - batches.low, batches.typical("std")
    if not math.isfinite(width) or not math.isfinite(deviation):
        return
    found = {
        "samples": ("number of samples", True, math.log(2.0)),
        "elements": ("number of elements of a sample", True, math.log(2.0)),
        "axes": ("number of axes", False, 0.5),
        "alike": ("variance between samples, of all,", False, 0.4),
        "mean": ("mean", False, 0.5 * deviation),
        "std": ("standard deviation", True, math.log(2.0)),
        "min": ("minimum", False, 0.5 * width),
        "max": ("maximum", False, 0.5 * width),
    }
    paced = role == "outputs"  # of the net, which learns; a softmax leaves open where they lie
    if paced:
        found = {name: found[name] for name in ("samples", "elements", "axes")}
        found["std"] = ("standard deviation", True, math.log(FACTOR))
    each = {**batches.each, **_further(batches)}
    for column, (statistic, ratio, margin) in found.items():
        for phase, values, steps in _phases(each[column], clock):
            compared = [_log(value) for value in values] if ratio else values
            key, causes = Key(role, where, f"{statistic} of a typical batch", phase), _OF_BATCHES.get((role, column), _NONE)
            yield Trait(key, compared, steps, margin, ratio=ratio, paced=paced, causes=causes)
    if not batches.floating:
        causes = _OF_BATCHES.get((role, "entropy"), _NONE)
        yield Trait(Key(role, where, "entropy of the labels", "whole"), [batches.entropy], [], 0.3, causes=causes)


def _further(batches: BatchCourse) -> dict[str, list[float]]:
    """Further columns, made of those of `BATCH`."""
    count, samples, deviation, within = (batches.each[name] for name in ("count", "samples", "std", "within"))
    return {
        "elements": [one / max(of, 1.0) for one, of in zip(count, samples, strict=True)],
        "alike": [one / of**2 if of > TINY else math.nan for one, of in zip(within, deviation, strict=True)],
    }


def _of_fact(fact: str, known: Evidence, clock: Sequence[int]) -> Iterator[Trait]:
    statistic, read, margin, ratio, causes = _FACTS[fact]
    course = known.steps[fact].values if known.steps is not None and fact in known.steps else []
    for phase, values, steps in _phases([read(value) for value in course], clock):
        # A thing that seldom happens is seen by its share, not by what is typical.
        compared = [_log(value) for value in values] if ratio else [math.fsum(values) / len(values)] * len(values)
        key = Key(fact, "(net)" if fact in _OF_NET else "optimizer", statistic, phase)
        # A schedule goes at another pace if the run has another length.
        yield Trait(key, compared, steps, math.log(margin) if ratio else margin, ratio=ratio, paced=fact == "rate", causes=causes)


def _phases(values: Sequence[float], clock: Sequence[int]) -> Iterator[tuple[str, list[float], list[int]]]:
    """The finite values and their steps, early, in the middle and late."""
    count = len(values)
    steps = [clock[at * len(clock) // count] if clock else at for at in range(count)]
    half = (steps[FIRST] + steps[-1]) / 2 if count > FIRST else 0.0
    phases: dict[str, list[tuple[float, int]]] = {"early": [], "middle": [], "late": []}
    for at, (value, step) in enumerate(zip(values, steps, strict=True)):
        phase = "early" if at < FIRST else "middle" if step <= half else "late"
        if math.isfinite(value):
            phases[phase].append((value, step))
    for phase, found in phases.items():
        if len(found) >= LEAST:
            yield phase, [value for value, _ in found], [step for _, step in found]


def _together(courses: Mapping[str, Course]) -> list[float]:
    """The norm of all weights of a layer at each step."""
    each = [course.values for path, course in courses.items() if _is_weight(path)]
    return [math.sqrt(math.fsum(value * value for value in at)) for at in zip(*each, strict=False)] if each else []


def _elements(layer: Layer) -> int:
    gradient = layer.weight_gradient
    return round(gradient.count / gradient.observations) if gradient is not None and gradient.observations else 0


def _chance(elements: int) -> float:
    """How much sizes differ by chance: the norm of n random weights differs by 1 / sqrt(2 n) of it; this is four times as much."""
    return 4 / math.sqrt(2 * max(elements, 1))


def _is_weight(path: str) -> bool:
    return "bias" not in path.rpartition(".")[2]


def _log(value: float) -> float:
    return math.log(max(abs(value), TINY))
