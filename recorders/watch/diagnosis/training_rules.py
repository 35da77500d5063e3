"""Rules on the training as a whole: its steps, its loss, its inputs and its target."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain

from recorders.watch.diagnosis.evidence import Batches, Course, Evidence
from recorders.watch.diagnosis.finding import Finding, fault
from recorders.watch.diagnosis.limits import LOSS, RATE_ENDS, SHRUNK
from recorders.watch.overview import Layer

LEAST = 10
"""The number of steps, or batches, from which on a share of them tells something."""


def _share(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


# The optimizer


def not_cleared(known: Evidence) -> Iterator[Finding]:
    """Gradients of the step before are still there when new ones are added."""
    kept = known.fact("kept")
    if len(kept) >= 2 and _share(kept) > 0.5:
        yield fault(
            "not-cleared", "optimizer", f"in {sum(kept):.0f} of {len(kept)} steps gradients were added to those of the step before"
        )


def rates(known: Evidence) -> Iterator[Finding]:
    """The learning rate is 0, or ends early."""
    rate = known.fact("rate")
    if not rate:
        return
    highest = max(rate)
    if highest == 0:
        yield fault("rate-is-zero", "optimizer", f"the learning rate is 0 in all {len(rate)} steps recorded")
    elif len(rate) >= LEAST and rate[-1] < RATE_ENDS * highest:
        step = known.fact("step")
        over = next(at for at in range(len(rate) - 1, -1, -1) if rate[at] >= RATE_ENDS * highest) + 1
        if step[over] < 0.5 * step[-1]:
            what = f"from step {step[over]:.0f} on the learning rate is {rate[-1]:.1e}, after {highest:.1e}, and the training has {step[-1]:.0f}"
            yield fault("rate-ends-early", "optimizer", what, int(step[over]))


def optimizer_state(known: Evidence) -> Iterator[Finding]:
    """The optimizer is made anew, climbs, holds foreign parameters, or has odd options."""
    numbers = known.fact("optimizer")
    if len(numbers) >= LEAST and len({*numbers}) > 0.5 * len(numbers):
        yield fault("optimizer-made-anew", "optimizer", f"{len({*numbers})} optimizers made {len(numbers)} steps")
    if any(known.fact("ascends")):
        yield fault("ascends", "optimizer", "maximize=True: each step makes the loss larger", severity="notice")
    epsilon = max(known.fact("epsilon"), default=0.0)
    if epsilon > 1e-3:
        yield fault("large-epsilon", "optimizer", f"its epsilon is {epsilon:g}; the default is 1e-8")
    momentum, second = max(known.fact("momentum"), default=0.0), min(known.fact("second momentum"), default=math.nan)
    if momentum > 0.98:
        yield fault("odd-momentum", "optimizer", f"its momentum is {momentum:g}; 0.9 is usual")
    elif second < 0.5:
        yield fault("odd-momentum", "optimizer", f"its second beta is {second:g}; 0.999 is usual")
    coarse, ratios = max(known.fact("coarse"), default=0.0), [course.start(share=1.0) for course in _all(known.updates)]
    if coarse > 0.5 and ratios and sorted(ratios)[len(ratios) // 2] < 2.0**-9:
        what = f"{coarse:.0%} of the weights have 16 bits, and a typical step changes them by {sorted(ratios)[len(ratios) // 2]:.1e} of their norm"
        yield fault("coarse-weights", "optimizer", what)


def between_steps(known: Evidence) -> Iterator[Finding]:
    """Something else than the optimizer writes to the weights."""
    written = known.fact("written")
    if sum(written) >= 2:
        yield fault(
            "written-between-steps",
            "net",
            f"in {sum(written):.0f} of {len(written)} steps the weights were written to since the step before",
        )


def modes(known: Evidence) -> Iterator[Finding]:
    """Training in evaluation mode, evaluation in training mode, batch norms that stand still, much dropout."""
    evaluating = known.fact("evaluating")
    if evaluating and _share([share == 1 for share in evaluating]) > 0.5:
        yield fault("evaluation-mode", "net", "dropout and batch norms are in evaluation mode while the optimizer steps")
    if known.inference > 0.5:
        yield fault("training-mode", "net", "dropout and batch norms are in training mode while gradients are off")
    if still := max(known.fact("still"), default=0.0):
        yield fault("statistics-stand-still", "net", f"the momentum of {still:.0f} batch norms is 0")
    dropout = max(known.fact("dropout"), default=0.0)
    if dropout >= 0.8:
        yield fault("much-dropout", "net", f"a dropout leaves out {dropout:.0%} of its inputs")


def gradient_sizes(known: Evidence) -> Iterator[Finding]:
    """The norm of all gradients: constant and tiny if they are clipped, tiny from the start if the loss is scaled down."""
    courses = [course.values for course in _all(known.gradients)]
    totals = [math.sqrt(math.fsum(value * value for value in at)) for at in zip(*courses, strict=False)] if courses else []
    totals = [total for total in totals if total > 0 and math.isfinite(total)]
    if len(totals) < LEAST:
        return
    ordered = sorted(totals)
    middle = ordered[len(ordered) // 2]
    if middle < 1e-2 and ordered[-1] - ordered[0] < 1e-2 * middle:
        yield fault("clipped", "optimizer", f"the norm of all gradients is {middle:.1e} in every step")
    elif middle < 1e-6:
        yield fault("tiny-gradients", "loss", f"the norm of all gradients is {middle:.1e} in a typical step")


def weight_sizes(known: Evidence) -> Iterator[Finding]:
    """Weights that shrink towards zero."""
    courses = [course for layer in known.weights.values() for path, course in layer.items() if "bias" not in path]
    ends = [(course.values[0], course.values[-1]) for course in courses if len(course) >= LEAST and course.values[0] > 0]
    shrunk = [after / before for before, after in ends if math.isfinite(after)]
    if shrunk and sorted(shrunk)[len(shrunk) // 2] < SHRUNK:
        what = f"the norm of a typical weight fell to {sorted(shrunk)[len(shrunk) // 2]:.1%} of what it was"
        decay = max(known.fact("decay"), default=0.0)
        yield fault("shrinking-weights", "optimizer", what + (f", at a weight decay of {decay:g}" if decay else ""))


def _all(courses: object) -> list[Course]:
    return [*chain.from_iterable(layer.values() for layer in courses.values())]  # type: ignore[attr-defined]


# The loss


def loss(known: Evidence) -> Iterator[Finding]:
    """The loss does not fall, rises, is constant, or falls too slowly."""
    course = known.loss
    if course is None or len(course.finite) < LOSS.least or _is_adversarial(known):
        return
    start, end, noise = course.start(), course.end(), course.noise()
    best = min(course.finite)
    if min(start, end) < 0 < max(start, end) or (abs(start) < noise):
        return  # of no fixed scale, as that of a policy gradient
    sure = 3 * noise / math.sqrt(max(3, 0.1 * len(course)))
    if max(course.finite) == best:
        yield fault("loss-is-constant", "loss", f"the loss is {best:.4g} in all {len(course)} steps")
    elif end > start + max(sure, LOSS.rises * abs(start)):
        yield fault("loss-rises", "loss", f"the loss rose from {start:.4g} to {end:.4g}", causes=_why_rising(known))
    elif end > start - max(sure, LOSS.falls * abs(start)):
        yield fault(
            "loss-does-not-fall",
            "loss",
            f"the loss was {start:.4g} and is {end:.4g} after {len(course)} steps",
            causes=_why_flat(known),
        )


def _is_adversarial(known: Evidence) -> bool:
    """Whether several optimizers take turns, as those of a GAN: then no loss need fall."""
    return 2 <= len({*known.fact("optimizer")}) <= 4


def _ratio(known: Evidence) -> float:
    """The typical size of an update relative to the weights; NaN if not known."""
    ratios = sorted(
        course.start(share=1.0) for layer in known.updates.values() for path, course in layer.items() if "bias" not in path
    )
    ratios = [ratio for ratio in ratios if math.isfinite(ratio)]
    return ratios[len(ratios) // 2] if ratios else math.nan


def _why_flat(known: Evidence) -> tuple[str, ...]:
    ratio = _ratio(known)
    if ratio > 3e-2:
        return ("rate-too-high", "initialisation")
    if ratio < 1e-4:
        return ("rate-too-low", "not-in-optimizer")
    return ("labels-do-not-fit", "noise", "rate-too-high")


def _why_rising(known: Evidence) -> tuple[str, ...]:
    return ("rate-too-high", "ascent") if _ratio(known) > 3e-2 else ("ascent", "rate-too-high")


# Inputs and target


def inputs(known: Evidence) -> Iterator[Finding]:
    """Inputs that are constant or far from normalised, and batches that come again."""
    for path, batches in known.inputs.items():
        where = f"inputs:{path}" if path else "inputs"
        spread = batches.spread
        if spread.count and len(batches.size) >= 2 and spread.low == spread.high:
            yield fault("constant-inputs", where, f"all {spread.count:,} values are {spread.low:.4g}")
        elif batches.floating and spread.count:
            largest = max(abs(spread.low), abs(spread.high))
            if largest > 50 or abs(spread.mean) > 10 * spread.std:
                yield fault(
                    "large-inputs", where, f"values from {spread.low:.4g} to {spread.high:.4g}, with a mean of {spread.mean:.4g}"
                )
        yield from _repeated(batches, where)


def _repeated(batches: Batches, where: str) -> Iterator[Finding]:
    sizes = [size for size in batches.size if math.isfinite(size)]
    if len(sizes) >= LEAST and len({*sizes}) == 1 and batches.spread.low < batches.spread.high:
        yield fault("repeated-batches", where, f"all {len(sizes)} batches that were recorded are the same")


def target(known: Evidence) -> Iterator[Finding]:
    """A target that is constant, or sorted."""
    for path, batches in known.target.items():
        where, spread = f"target:{path}" if path else "target", batches.spread
        if spread.count and len(batches.size) >= LEAST and spread.low == spread.high:
            yield fault("constant-target", where, f"all {spread.count:,} values are {spread.low:.4g}")
        elif not batches.floating and len(batches.size) >= LEAST and max(batches.each["count"]) > 1:
            alike = _share([low == high for low, high in zip(batches.each["min"], batches.each["max"], strict=True)])
            if alike > 0.5:
                yield fault("sorted-target", where, f"in {alike:.0%} of the batches all labels are equal")
        elif batches.floating and spread.count and max(abs(spread.low), abs(spread.high)) > 50:
            yield fault("large-target", where, f"values from {spread.low:.4g} to {spread.high:.4g}")


def probabilities(known: Evidence) -> Iterator[Finding]:
    """Probabilities where the loss expects logits: it cannot fall below a floor."""
    output, course = _output(known), known.loss
    if output is None or course is None or len(course.finite) < LOSS.least or not known.target:
        return
    labels = next(iter(known.target.values())).spread
    spread = output.output
    if spread is None or not spread.count or spread.low < 0 or spread.high > 1 + 1e-4:
        return
    units = output.units["mean"].numel() if output.units is not None else 0
    sure = spread.high > 0.8 or len(course) >= 100
    if units >= 2 and output.units is not None and abs(float(output.units["mean"].sum()) - 1) < 1e-3:
        floor = math.log(
            1 + (units - 1) / math.e
        )  # of the cross entropy of logits that are at most 1 for one class and 0 for others
    elif labels.low >= 0 and labels.high <= 1 and spread.low < 0.45 and spread.high > 0.55:
        floor = math.log1p(math.exp(-1)) * labels.mean + math.log(2) * (1 - labels.mean)
    else:
        return
    if sure and 0.97 * floor < min(course.finite) < 1.6 * floor + 1:
        what = f"the net returns probabilities, and the loss never was below {min(course.finite):.3g}; as logits they allow no less than {floor:.3g}"
        yield fault("probabilities-as-logits", output.name, what)


def _output(known: Evidence) -> Layer | None:
    """The row of what the net returns: its own, or that of the last layer."""
    rows = [layer for layer in known.layers if layer.output is not None]
    return next((layer for layer in rows if layer.name.partition(":")[0] in ("(net)", "output")), rows[-1] if rows else None)


def initial_loss(known: Evidence) -> Iterator[Finding]:
    """A cross entropy that is far above that of equal probabilities in the beginning."""
    output, course = _output(known), known.loss
    if output is None or output.units is None or course is None or not course.finite or not known.target:
        return
    labels = next(iter(known.target.values()))
    classes = output.units["mean"].numel()
    if labels.floating or not classes >= 2 or not 0 <= labels.spread.high < classes:
        return
    first, expected = course.finite[0], math.log(classes)
    if first > LOSS.initial * expected + 1:
        yield fault(
            "high-initial-loss", "loss", f"the first loss is {first:.3g}; {classes} equal probabilities have {expected:.3g}"
        )


RULES = (
    not_cleared,
    rates,
    optimizer_state,
    between_steps,
    modes,
    gradient_sizes,
    weight_sizes,
    loss,
    probabilities,
    initial_loss,
    inputs,
    target,
)
"""Each looks at what is known of a training, and yields what it finds."""
