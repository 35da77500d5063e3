"""Rules on the training as a whole: its steps, its loss, its inputs and its target."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from statistics import median

from recorders.watch.diagnosis.batches import LABELS
from recorders.watch.diagnosis.evidence import Batches, Course, Evidence
from recorders.watch.diagnosis.finding import Finding, fault
from recorders.watch.diagnosis.layer_rules import why_rising
from recorders.watch.diagnosis.limits import FIRST_STEPS, LARGE_INPUT, LARGE_TARGET, LOSS, RATE_ENDS, SHRUNK, VARIES, shown_range
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


def first_steps(known: Evidence) -> Iterator[Finding]:
    """The first steps change the weights by about their own size."""
    if known.early_ratio > FIRST_STEPS:
        what = f"each of the first steps changes the weights by {shown_range(known.early_ratio)}"
        yield fault("updates-too-large", "optimizer", what, 0, causes=("rate-too-high", "loss-scale"))


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
    """The loss is constant, rises, does not fall, or falls too slowly."""
    course = known.loss
    if course is None or len(course.finite) < LOSS.least or _is_adversarial(known):
        return
    start, end, noise, best = course.start(), course.end(), course.noise(), min(course.finite)
    if max(course.finite) == best:
        yield fault("loss-is-constant", "loss", f"the loss is {best:.4g} in all {len(course)} steps")
        return
    if min(start, end) < 0 < max(start, end) or abs(start) < Course(course.finite[: len(course) // 3]).noise():
        return  # of no fixed scale, as that of a policy gradient
    sure = 3 * noise / math.sqrt(max(3, 0.1 * len(course)))
    trivial = _trivial_loss(known)
    if end > start + max(sure, LOSS.rises * abs(start)):
        yield fault("loss-rises", "loss", f"the loss rose from {start:.4g} to {end:.4g}", causes=why_rising(known))
    elif end > start - max(sure, LOSS.falls * abs(start)):
        what = f"the loss was {start:.4g} and is {end:.4g} after {len(course)} steps"
        yield fault("loss-does-not-fall", "loss", what, causes=_why_flat(known))
    elif math.isfinite(trivial) and end > LOSS.trivial * trivial - sure and len(course) >= LOSS.long:
        what = f"after {len(course)} steps the loss is {end:.4g}; without any inputs it could be {trivial:.4g}"
        yield fault("loss-does-not-fall", "loss", what, causes=_why_flat(known))
    elif len(course) >= LOSS.long and _is_late(course) and known.ratio < LOSS.slow:
        what = f"the loss fell from {start:.4g} to {end:.4g}, and most of that in the last half, while a typical step changes the weights by {shown_range(known.ratio)}"
        yield fault("loss-falls-slowly", "loss", what)


def _is_adversarial(known: Evidence) -> bool:
    """Whether several optimizers take turns, as those of a GAN: then no loss need fall."""
    return 2 <= len({*known.fact("optimizer")}) <= 4


def _trivial_loss(known: Evidence) -> float:
    """The loss of a net that knows the target's frequencies or mean and nothing of the inputs; NaN if that is not known.

    It is known of a cross entropy, which begins near the entropy of equal probabilities, and of a mean square error, which begins
    near the mean square distance of target and outputs.
    """
    target, output = _one(known.target), _one(known.outputs)
    if target is None or output is None or known.loss is None or not known.loss.finite:
        return math.nan
    first = known.loss.finite[0]
    if not target.floating:
        classes = _classes(known)
        is_entropy = classes >= 2 and target.low >= 0 and target.high < classes and 0.5 < first / math.log(classes) < LOSS.initial
        return target.entropy if is_entropy and classes <= LABELS else math.nan
    ones = target.typical("mean")
    if target.low == 0 and target.high == 1 and abs(target.typical("std") ** 2 - ones * (1 - ones)) < 1e-3:
        return -ones * math.log(ones) - (1 - ones) * math.log(1 - ones) if 0.3 < first < 2 and 0 < ones < 1 else math.nan
    within = target.typical("within")
    square = target.typical("mean") ** 2 + target.typical("std") ** 2 + output.typical("std") ** 2
    return within if within > 0 and 0.5 < first / square < 2 else math.nan


def _one(batches: Mapping[str, Batches]) -> Batches | None:
    return next(iter(batches.values())) if len(batches) == 1 else None


def _classes(known: Evidence) -> int:
    """The number of units that the net returns; 0 if not known."""
    row = _output(known)
    return 0 if row is None or row.units is None else row.units["mean"].numel()


def _is_late(course: Course) -> bool:
    """Whether the loss was half-way down only after half of the time."""
    found = course.finite
    middle = (course.start() + course.end()) / 2
    half = Course(found[: len(found) // 2])
    return half.end() > middle


def _median(values: Sequence[float]) -> float:
    return median(values) if values else math.nan


def _why_flat(known: Evidence) -> tuple[str, ...]:
    ratio = known.ratio
    if ratio > LOSS.fast or known.early_ratio > LOSS.early:
        return ("rate-too-high", "initialisation")
    if ratio < LOSS.slow:
        return ("rate-too-low", "not-in-optimizer")
    target, output = _one(known.target), _one(known.outputs)
    if target is not None and output is not None and target.floating:
        if target.typical("count") == output.typical("count") and target.typical("axes") != output.typical("axes"):
            return ("broadcast", "labels-do-not-fit")
    return ("labels-do-not-fit", "noise", "rate-too-high")


# Inputs, target and outputs


def inputs(known: Evidence) -> Iterator[Finding]:
    """Inputs that are constant, not finite or far from normalised, and batches that come again."""
    for path, batches in known.inputs.items():
        where = f"inputs:{path}" if path else "inputs"
        wrong = sum(not finite for finite in batches.each["finite"])
        if wrong:
            yield fault("nonfinite-inputs", where, f"in {wrong} of {len(batches)} batches there is NaN or infinity")
        if len(batches) >= 2 and batches.low == batches.high:
            yield fault("constant-inputs", where, f"all values are {batches.low:.4g}")
        elif batches.floating:
            largest = max(abs(batches.low), abs(batches.high))
            if largest > LARGE_INPUT or abs(batches.typical("mean")) > 10 * batches.typical("std"):
                what = f"values from {batches.low:.4g} to {batches.high:.4g}, with a mean of {batches.typical('mean'):.4g}"
                yield fault("large-inputs", where, what)
        norms = [norm for norm in batches.each["norm"] if math.isfinite(norm)]
        if len(norms) >= LEAST and len({*norms}) == 1 and batches.low < batches.high:
            yield fault("repeated-batches", where, f"all {len(norms)} batches that were recorded are the same")
        if batches.floating and max(batches.each["samples"]) == 1 and len(batches) >= LEAST:
            norms_too = any(known.fact("norms"))
            what = "each batch has one sample" + ", and batch norms are in the net" * norms_too
            yield fault("batches-of-one", where, what, severity="error" if norms_too else "warning")


def target(known: Evidence) -> Iterator[Finding]:
    """A target that is constant, sorted or large."""
    for path, batches in known.target.items():
        where = f"target:{path}" if path else "target"
        if len(batches) >= LEAST and batches.low == batches.high:
            yield fault("constant-target", where, f"all values are {batches.low:.4g}")
        elif not batches.floating and len(batches) >= LEAST and batches.typical("count") > 1:
            alike = _share([low == high for low, high in zip(batches.each["min"], batches.each["max"], strict=True)])
            if alike > 0.5:
                yield fault("sorted-target", where, f"in {alike:.0%} of the batches all labels are equal")
        elif batches.floating and max(abs(batches.low), abs(batches.high)) > LARGE_TARGET:
            yield fault("large-target", where, f"values from {batches.low:.4g} to {batches.high:.4g}")


def outputs(known: Evidence) -> Iterator[Finding]:
    """Outputs that are the same for all inputs."""
    output, given = _one(known.outputs), _one(known.inputs)
    if output is None or not output.floating or len(output) < LEAST or (given is not None and given.low == given.high):
        return
    last = [within for within in output.each["within"][-5:] if math.isfinite(within)]
    size = output.typical("mean") ** 2 + output.typical("std") ** 2
    if last and size > 0 and max(last) < VARIES * size:
        yield fault("equal-outputs", "(net)", f"the variance of outputs over the samples of a batch is {max(last):.1e}, of a mean square of {size:.1e}")


def probabilities(known: Evidence) -> Iterator[Finding]:
    """Probabilities where the loss expects logits: it cannot fall below a floor."""
    output, course, labels = _one(known.outputs), known.loss, _one(known.target)
    if output is None or labels is None or course is None or len(course.finite) < LOSS.least or not output.floating:
        return
    if output.low < 0 or output.high > 1 + 1e-4 or labels.low < 0:
        return
    units = _classes(known)
    sure = output.high > 0.8 or len(course) >= LOSS.long
    if units >= 2 and abs(output.typical("mean") * units - 1) < 1e-3:
        floor = math.log(1 + (units - 1) / math.e)  # of the cross entropy of logits that are at most 1 for one class and 0 for others
    elif labels.high <= 1 and output.low < 0.45 and output.high > 0.55:
        ones = labels.typical("mean")
        floor = math.log1p(math.exp(-1)) * ones + math.log(2) * (1 - ones)
    else:
        return
    least = min(course.finite)
    if sure and 0.97 * floor < least < 1.6 * floor + 1:
        what = f"the net returns probabilities; taken as logits they allow no loss below {floor:.3g}, and the least was {least:.3g}"
        yield fault("probabilities-as-logits", "(net)", what)


def _output(known: Evidence) -> Layer | None:
    """The row of what the net returns: its own, or that of the last layer."""
    rows = [layer for layer in known.layers if layer.output is not None]
    return next((layer for layer in rows if layer.name.partition(":")[0] in ("(net)", "output")), rows[-1] if rows else None)


def initial_loss(known: Evidence) -> Iterator[Finding]:
    """A cross entropy that is far above that of equal probabilities in the beginning."""
    labels, classes = _one(known.target), _classes(known)
    if labels is None or known.loss is None or not known.loss.finite or labels.floating:
        return
    if classes < 2 or not 0 <= labels.high < classes:
        return
    first, expected = known.loss.finite[0], math.log(classes)
    if first > LOSS.initial * expected + 1:
        yield fault("high-initial-loss", "loss", f"the first loss is {first:.3g}; {classes} equal probabilities have {expected:.3g}")


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
