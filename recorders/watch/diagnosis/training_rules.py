"""Rules on the training as a whole: its steps, its loss, its inputs and its target."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from statistics import fmean, median, pvariance

from torch import nn

from recorders.watch.diagnosis.batches import FEATURES, LABELS, SAMPLES
from recorders.watch.diagnosis.evidence import BatchCourse, Course, Evidence
from recorders.watch.diagnosis.finding import Finding, fault
from recorders.watch.diagnosis.layer_rules import gradients_by_depth, why_rising
from recorders.watch.diagnosis.limits import (
    COARSE,
    DECAYS,
    DISCARDED,
    FIRST_STEPS,
    FLAT,
    LARGE_INPUT,
    LARGE_OUTPUT,
    LARGE_TARGET,
    LOSS,
    RATE_ENDS,
    RESHAPING,
    SHRUNK,
    SORTED,
    VARIES,
    shown_range,
)
from recorders.watch.diagnosis.steps import BATCH_NORMS
from recorders.watch.overview import Layer

LEAST = 10
"""The number of steps, or batches, from which on a share of them tells something."""


LATE = 10
"""The number of the last batches that tell how a training ended."""


def _finite(values: Sequence[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


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


def discarded(known: Evidence) -> Iterator[Finding]:
    """Gradients are cleared again and again before a step. Once is usual: the loss of a generator reaches both nets."""
    cleared = known.fact("discarded")
    if cleared and median(cleared) >= DISCARDED:
        what = f"in a typical step gradients were cleared {median(cleared):.0f} times before the optimizer stepped"
        yield fault("gradients-discarded", "optimizer", what)


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
            what = f"from step {step[over]:.0f} of {step[-1]:.0f} on the learning rate is {rate[-1]:.1e}, after {highest:.1e}"
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
    coarse, ratio = max(known.fact("coarse"), default=0.0), known.ratio
    if coarse > 0.5 and ratio < COARSE:
        what = f"{coarse:.0%} of the weights have 16 bits, and a typical step changes them by {ratio:.1e} of their norm"
        yield fault("coarse-weights", "optimizer", what)


def between_steps(known: Evidence) -> Iterator[Finding]:
    """Something else than the optimizer writes to the weights."""
    written = known.fact("written")
    if sum(written) >= 2:
        what = f"in {sum(written):.0f} of {len(written)} steps the weights were written to since the step before"
        # In each step it is meant, as the clipping of weights is.
        yield fault("written-between-steps", "net", what, severity="warning" if _share(written) < 0.8 else "notice")


def modes(known: Evidence) -> Iterator[Finding]:
    """Training in evaluation mode, evaluation in training mode, batch norms that stand still, much dropout."""
    evaluating = known.fact("evaluating")
    if evaluating and _share([share == 1 for share in evaluating]) > 0.5:
        yield fault("evaluation-mode", "net", "dropout and batch norms are in evaluation mode while the optimizer steps")
    if known.inference > 0.5:
        yield fault("training-mode", "net", "dropout and batch norms are in training mode while gradients are off")
    if still := max(known.fact("still"), default=0.0):
        where = _first(known, lambda module: isinstance(module, BATCH_NORMS) and module.momentum == 0)
        yield fault("statistics-stand-still", where, f"the momentum of {still:.0f} batch norms is 0")
    dropout = max(known.fact("dropout"), default=0.0)
    if dropout >= 0.8:
        where = _first(known, lambda module: getattr(module, "p", 0) == dropout)
        yield fault("much-dropout", where, f"a dropout leaves out {dropout:.0%} of its inputs")


def _first(known: Evidence, holds: Callable[[nn.Module], bool]) -> str:
    """The first module of which it holds; "net" if the modules are not known."""
    return next((name for name, module in known.modules.items() if holds(module)), "net")


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
    finite = known.loss.finite if known.loss is not None else []
    thrown = len(finite) > LEAST and fmean(finite[1:LEAST]) > LOSS.thrown * finite[0] > 0
    soon = known.ratio > 0.1 * FIRST_STEPS  # a small head grows, and is then changed less
    if known.early_ratio > (FIRST_STEPS if soon else 3 * FIRST_STEPS) or (known.early_ratio > LOSS.early and thrown):
        what = f"each of the first steps changes the weights by {shown_range(known.early_ratio)}"
        yield fault("updates-too-large", "optimizer", what, 0, causes=("rate-too-high", "loss-scale"))


def weight_decay(known: Evidence) -> Iterator[Finding]:
    """A weight decay that takes off much of the weights in each step, or is most of what Adam sees."""
    decay = max(known.fact("decay"), default=0.0)
    if not decay:
        return
    if any(known.fact("coupled")):
        pairs = [
            (course.values[at], gradient.values[at])
            for layer, courses in known.weights.items()
            for path, course in courses.items()
            if "bias" not in path and (gradient := known.gradients.get(layer, {}).get(path)) is not None
            for at in range(min(len(course), len(gradient), LEAST))
        ]
        shares = [decay * weight / max(gradient, 1e-30) for weight, gradient in pairs if math.isfinite(weight + gradient)]
        if shares and median(shares) > DECAYS.of_gradient:
            what = f"the weight decay of {decay:g} adds {median(shares):.0f} times as much to a typical gradient as the loss does"
            yield fault("strong-weight-decay", "optimizer", what)
    else:
        rate = max(known.fact("rate"), default=0.0)
        if rate * decay > DECAYS.of_weights:
            what = f"each step takes {rate * decay:.2%} off the weights: a weight decay of {decay:g} at a learning rate of {rate:g}"
            yield fault("strong-weight-decay", "optimizer", what)


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
    if best < 0 or start < Course(course.finite[: max(LEAST, len(course) // 20)]).noise():
        return  # of no fixed scale, as that of a policy gradient
    sure = 3 * noise / math.sqrt(max(3, 0.1 * len(course)))
    trivial = _trivial_loss(known)
    flat, untrained = _why_flat(known), not start < 0.5 * _blind_loss(known)
    if _climbs(course) and known.early_ratio < LOSS.early:
        yield fault("loss-climbs", "loss", f"the loss rose from {start:.4g} to {end:.4g}, from the first steps on")
    elif end > start + max(sure, LOSS.rises * start):
        yield fault("loss-rises", "loss", f"the loss rose from {start:.4g} to {end:.4g}", causes=why_rising(known))
    elif end > start - max(min(sure, LOSS.unsure * start), LOSS.falls * start) and len(course) >= LOSS.flat and untrained:
        what = f"the loss was {start:.4g} and is {end:.4g} after {len(course)} steps"
        yield _flat(what, flat)
    elif math.isfinite(trivial) and end > LOSS.trivial * trivial - sure and len(course) >= LOSS.long:
        what = f"after {len(course)} steps the loss is {end:.4g}; without any inputs it could be {trivial:.4g}"
        yield _flat(what, flat)
    elif len(course) >= LOSS.long and untrained and not _warms_up(known) and _is_slow(known, course, trivial):
        what = f"the loss fell from {start:.4g} to {end:.4g}, and a typical step changes the weights by {shown_range(known.ratio)}"
        yield fault("loss-falls-slowly", "loss", what)


def _flat(what: str, causes: Sequence[str]) -> Finding:
    """A loss that does not fall; if the shapes of output and target tell why, a finding of these."""
    if causes[0] == "broadcast":  # not of the binary cross entropy, which refuses such shapes
        return fault("shapes-broadcast", "(net)", f"output and target have as many elements along different axes, and {what}")
    return fault("loss-does-not-fall", "loss", what, causes=causes)


def _climbs(course: Course) -> bool:
    """Whether the loss rises from the first steps on, by far and to the end: one that is minimised falls at first."""
    found = course.finite
    quarters = [median(found[at * len(found) // 4 : (at + 1) * len(found) // 4]) for at in range(4)]
    first = found[: max(LEAST, len(found) // 10)]
    rising = all(after > before for before, after in pairwise(quarters))
    return rising and quarters[-1] > 2 * course.start() and median(first[len(first) // 2 :]) > median(first[: len(first) // 2])


def _is_slow(known: Evidence, course: Course, trivial: float) -> bool:
    """Whether small updates explain that the loss of a net that was not trained before has not come far."""
    start, end = course.start(), course.end()
    from_scratch = math.isfinite(trivial) and start > 0.6 * trivial
    return (known.ratio < LOSS.slow and _is_late(course)) or (known.ratio < LOSS.slow / 2 and from_scratch and end > 0.4 * start)


def _warms_up(known: Evidence) -> bool:
    """Whether the learning rate still rises."""
    rate = known.fact("rate")
    return len(rate) > 1 and rate[-1] > rate[len(rate) // 2]


def jumps(known: Evidence) -> Iterator[Finding]:
    """A loss that fell and is thrown back in one step."""
    found = known.loss.finite if known.loss is not None else []
    if len(found) < LOSS.long or min(found) < 0 or _is_adversarial(known):
        return
    noise = Course(found).noise()
    for at in range(20, len(found) - 15):
        before, after = median(found[at - 10 : at]), median(found[at : at + 15])
        fallen = median(found[:3]) - before
        rises = after - before > max(8 * noise, 0.5 * fallen) and after > max(4 * before, 0.1 * found[0])
        if rises and found[at] - found[at - 1] > 0.5 * (after - before) and fallen > 8 * noise:
            what = f"the loss jumped from {before:.3g} to {after:.3g} within a step"
            yield fault("loss-jumps", "loss", what, at, causes=("weights-overwritten", "rate-too-high"))
            return


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
    first, blind = known.loss.finite[0], _blind_loss(known)
    if not target.floating:
        classes = _classes(known)
        is_entropy = classes >= 2 and target.high < classes and 0.5 < first / math.log(classes) < LOSS.initial
        return blind if is_entropy and classes <= LABELS else math.nan
    if _is_binary(target):
        return blind if 0.3 < first < 2 else math.nan
    # The square error of the first outputs, if they do not go with the target yet.
    apart = target.each["mean"][0] - output.each["mean"][0]
    square = apart**2 + target.each["std"][0] ** 2 + output.each["std"][0] ** 2
    return blind if 0.8 < first / square < 1.25 else math.nan


def _blind_loss(known: Evidence) -> float:
    """The least cross entropy, or mean square error, without any inputs, if the loss is one; NaN if the target is not known."""
    target = _one(known.target)
    if target is None:
        return math.nan
    if not target.floating:
        return target.entropy if target.low >= 0 else math.nan
    if _is_binary(target):
        ones = target.typical("mean")
        return -ones * math.log(ones) - (1 - ones) * math.log(1 - ones) if 0 < ones < 1 else math.nan
    within = target.typical("within")
    return within if within > 0 else math.nan


def _is_binary(target: BatchCourse) -> bool:
    ones = target.typical("mean")
    return target.low == 0 and target.high == 1 and abs(target.typical("std") ** 2 - ones * (1 - ones)) < 1e-3


def _as_many(batches: BatchCourse, other: BatchCourse) -> bool:
    return batches.typical("count") == other.typical("count")


def _one(batches: Mapping[str, BatchCourse]) -> BatchCourse | None:
    """The only one; what is one number beside others, as the loss that a net returns, does not count."""
    several = [one for one in batches.values() if len(batches) == 1 or max(one.each["count"], default=0) > 1]
    return several[0] if len(several) == 1 else None


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
    ratio, own = known.ratio, [layer.trained for layer in known.layers if layer.has_weights and layer.trained is not None]
    if own and _share([not trained for trained in own]) > 0.5:
        return ("frozen", "not-in-optimizer")
    if sum(known.fact("written")) >= 2:
        return ("weights-overwritten", "rate-too-high")
    if ratio > LOSS.fast or known.early_ratio > LOSS.early:
        return ("rate-too-high", "initialisation")
    for found in gradients_by_depth(known.gradient_norms, decay=LOSS.decay):
        return (found.kind, "initialisation", "rate-too-low")
    trivial, course = _trivial_loss(known), known.loss
    there = course is not None and math.isfinite(trivial) and course.end() < LOSS.near * trivial
    if ratio < LOSS.slow / 4 or (ratio < LOSS.slow and (not there or _still_falls(known))):
        return ("rate-too-low", "not-in-optimizer")
    target, output = _one(known.target), _one(known.outputs)
    below = known.loss is not None and known.loss.end() < LOSS.trivial * _trivial_loss(known)  # where such a loss cannot come
    if target is not None and output is not None and target.floating and not below and not _is_binary(target):
        if not _may_broadcast(target, output):
            return ("labels-do-not-fit", "noise", "rate-too-high")
        return ("broadcast", "labels-do-not-fit")
    return ("labels-do-not-fit", "noise", "rate-too-high")


def _may_broadcast(target: BatchCourse, output: BatchCourse) -> bool:
    """Whether both have as many elements, along another number of axes."""
    return _as_many(target, output) and target.typical("axes") != output.typical("axes")


def _still_falls(known: Evidence) -> bool:
    """Whether the loss still falls at the end, by more than its noise."""
    if known.loss is None:
        return False
    late = Course(known.loss.finite[len(known.loss) // 2 :])
    return late.start(share=0.2) - late.end(share=0.2) > 3 * late.noise() / math.sqrt(max(3, 0.2 * len(late)))


# Inputs, target and outputs


def inputs(known: Evidence) -> Iterator[Finding]:
    """Inputs that are constant, not finite or far from normalised, and batches that come again."""
    constant = [batches.low == batches.high for batches in known.inputs.values() if len(batches) >= 2]
    for path, batches in known.inputs.items():
        where = f"inputs:{path}" if path else "inputs"
        wrong = sum(not finite for finite in batches.each["finite"])
        if wrong:
            yield fault("nonfinite-inputs", where, f"in {wrong} of {len(batches)} batches there is NaN or infinity")
        spread = batches.typical("std")
        if len(batches) >= 2 and batches.low == batches.high:
            if not batches.floating and not all(constant):
                continue  # a mask of which nothing is masked
            yield fault("constant-inputs", where, f"all values are {batches.low:.4g}")
        elif batches.floating and spread < FLAT * max(1.0, abs(batches.typical("mean"))):
            yield fault(
                "constant-inputs", where, f"all values are near {batches.typical('mean'):.4g}, with a deviation of {spread:.1e}"
            )
        elif batches.floating:
            largest = max(abs(batches.low), abs(batches.high))
            far = largest > LARGE_INPUT or abs(batches.typical("mean")) > 10 * batches.typical("std")
            if far and not _scales_inputs(known):
                what = f"values from {batches.low:.4g} to {batches.high:.4g}, with a mean of {batches.typical('mean'):.4g}"
                yield fault("large-inputs", where, what)
        norms = [norm for norm in batches.each["norm"] if math.isfinite(norm)]
        if len(norms) >= LEAST and len({*norms}) == 1 and batches.low < batches.high:
            what = f"all {len(norms)} batches that were recorded are the same"
            whole = (
                max(batches.each["samples"]) > SAMPLES or not known.target
            )  # a table may be one batch, points of an equation are
            yield fault("repeated-batches", where, what, severity="notice" if whole else "warning")
        one = max(batches.each["samples"]) == 1 if batches.floating else _one_label(known)
        if one and len(batches) >= LEAST:
            norms_too = any(known.fact("norms"))
            what = "each batch has one sample" + ", and batch norms are in the net" * norms_too
            yield fault("batches-of-one", where, what, severity="error" if norms_too else "warning")


def _scales_inputs(known: Evidence) -> bool:
    """Whether the first layer gives numbers of a usual size: the net itself may divide its inputs, or normalise them."""
    layers = (layer for layer in known.layers if layer.output is not None and not layer.whole and layer.kind not in RESHAPING)
    first = next(layers, None)
    return first is not None and first.output is not None and first.output.rms < LARGE_OUTPUT


def _one_label(known: Evidence) -> bool:
    """Whether the target of each batch is one number."""
    target = _one(known.target)
    return target is not None and max(target.each["count"]) == 1


def target(known: Evidence) -> Iterator[Finding]:
    """A target that is constant, sorted or large."""
    for path, batches in known.target.items():
        where = f"target:{path}" if path else "target"
        if len(batches) >= LEAST and batches.low == batches.high:
            yield fault("constant-target", where, f"all values are {batches.low:.4g}")
        elif len(batches) >= LEAST and _has_equal_samples(batches):
            yield fault("constant-target", where, "all samples of a batch have the same values")
        elif not batches.floating and len(batches) >= LEAST and batches.typical("count") > 1:
            alike = _share([low == high for low, high in zip(batches.each["min"], batches.each["max"], strict=True)])
            if alike > 0.5:
                yield fault("sorted-target", where, f"in {alike:.0%} of the batches all labels are equal")
            else:
                yield from _sorted(batches, where)
        elif batches.floating and max(abs(batches.low), abs(batches.high)) > LARGE_TARGET and not _is_scaled(known, batches):
            yield fault("large-target", where, f"values from {batches.low:.4g} to {batches.high:.4g}")
        elif batches.floating:
            yield from _sorted(batches, where)


def _has_equal_samples(batches: BatchCourse) -> bool:
    """Whether the samples of each batch have the same classes or tokens, which differ within a sample."""
    differ = min(_finite(batches.each["std"]), default=0.0) > 0
    return differ and not batches.floating and max(_finite(batches.each["within"]), default=1.0) == 0


def _is_scaled(known: Evidence, target: BatchCourse) -> bool:
    """Whether the first outputs are where the target is: a net may scale them itself."""
    output = _one(known.outputs)
    if output is None:
        return False
    spread = target.typical("std")
    return abs(output.each["mean"][0] - target.typical("mean")) < spread and output.each["std"][0] > 0.02 * spread


def _sorted(batches: BatchCourse, where: str) -> Iterator[Finding]:
    """BatchCourse whose means differ more than those of batches drawn at random, if there is one value for each sample."""
    if len(batches) < LEAST or max(batches.each["count"]) > max(batches.each["samples"]):
        return
    means, count = [mean for mean in batches.each["mean"] if math.isfinite(mean)], min(FEATURES, batches.typical("count"))
    expected = batches.typical("std") ** 2 / count
    if count > 1 and expected > 0 and pvariance(means) > SORTED * expected:
        times = pvariance(means) / expected
        yield fault(
            "sorted-target", where, f"the means of batches vary {times:.0f} times as much as those of batches drawn at random"
        )


def outputs(known: Evidence) -> Iterator[Finding]:
    """Outputs that are the same for all inputs."""
    output, given = _one(known.outputs), _one(known.inputs)
    if output is None or not output.floating or len(output) < LEAST or (given is not None and given.low == given.high):
        return
    last = [within for within in output.each["within"][-5:] if math.isfinite(within)]
    size = output.typical("mean") ** 2 + output.typical("std") ** 2
    if last and size > 0 and max(last) < VARIES * size:
        yield fault(
            "equal-outputs",
            "(net)",
            f"the variance of outputs over the samples of a batch is {max(last):.1e}, of a mean square of {size:.1e}",
        )


def probabilities(known: Evidence) -> Iterator[Finding]:
    """Probabilities where the loss expects logits: it cannot fall below a floor."""
    output, course, labels = _one(known.outputs), known.loss, _one(known.target)
    if output is None or labels is None or course is None or len(course.finite) < LOSS.least or not output.floating:
        return
    if output.low < 0 or output.high > 1 + 1e-4 or labels.low < 0:
        return
    units = _classes(known)
    sure = output.high > 0.8 or len(course) >= LOSS.long
    if not labels.floating and units >= 2 and labels.high < units:
        floor = math.log(
            1 + (units - 1) / math.e
        )  # of the cross entropy of logits that are at most 1 for one class and 0 for others
        sure = sure and abs(output.typical("mean") * units - 1) < 1e-3
    elif labels.high <= 1 and output.low < 0.45 and output.high > 0.55:
        ones = labels.typical("mean")
        floor = math.log1p(math.exp(-1)) * ones + math.log(2) * (1 - ones)
    else:
        return
    end = course.end()
    if sure and 0.9 * floor < end < 1.6 * floor + 1:
        what = f"the net returns probabilities; taken as logits they allow no loss below {floor:.3g}, and it ends at {end:.3g}"
        yield fault("probabilities-as-logits", _last(known), what)


def wrong_probabilities(known: Evidence) -> Iterator[Finding]:
    """Logits of labels of 0 and 1 that say on average something else than how often these come.

    A bias of the last layer makes both equal wherever the loss is that of these labels. So does a linear layer, nearly.
    """
    output, labels = _one(known.outputs), _one(known.target)
    if output is None or labels is None or len(output) < LEAST or known.loss is None or len(known.loss) < LOSS.long:
        return
    if not output.floating or labels.low != 0 or labels.high != 1 or output.typical("count") != labels.typical("count"):
        return
    ones = labels.typical("mean")
    binary = _is_binary(labels)
    if _classes(known) > 1 and abs(ones * _classes(known) - 1) < 0.05:
        return  # one of several classes, which a softmax makes probabilities of
    says = [_median(_finite(batches[-LATE:])) for batches in (output.each["sigmoid"], labels.each["mean"])]
    if binary and (output.low < 0 or output.high > 1) and abs(says[0] - says[1]) > LOSS.probability:
        what = f"the mean probability is {says[0]:.2f} at the end, and {says[1]:.2f} of the labels are 1"
        yield fault("wrong-probabilities", "(net)", what)


def broadcast(known: Evidence) -> Iterator[Finding]:
    """A square error of each output with each target: shapes broadcast, and the loss is that of all pairs.

    The mean over all pairs follows from means and variances alone, whatever belongs to what.
    """
    output, labels, course = _one(known.outputs), _one(known.target), known.loss
    if output is None or labels is None or course is None or not (output.floating and labels.floating):
        return
    count = output.typical("count")
    if not _may_broadcast(labels, output) or not 1 < count <= FEATURES or len(course) < LEAST:
        return
    pairs = [
        (mean - other) ** 2 + std**2 + spread**2
        for mean, std, other, spread in zip(
            output.each["mean"], output.each["std"], labels.each["mean"], labels.each["std"], strict=False
        )
    ]
    off = [abs(loss - pair) for loss, pair in zip(course.values, pairs, strict=False) if pair > 0]
    if len(off) >= LEAST and median(off) < 1e-3 * median(pairs):
        axes = f"{output.typical('axes'):.0f} and {labels.typical('axes'):.0f}"
        what = f"output and target have {axes} axes, and the loss compares each output with each target"
        yield fault("shapes-broadcast", "(net)", what)


def rectified(known: Evidence) -> Iterator[Finding]:
    """Logits of classes that are never negative, and exactly 0 at the least: a ReLU after the last layer."""
    output, labels = _one(known.outputs), _one(known.target)
    if output is None or len(output) < LEAST or not output.floating or _classes(known) < 2:
        return
    if labels is not None and (labels.floating or labels.high >= _classes(known)):
        return
    if labels is not None and all(low == 0 for low in output.each["min"]) and output.high > 1:
        yield fault(
            "rectified-outputs", _last(known), f"logits are never below 0, and 0 in each batch; the largest is {output.high:.3g}"
        )


def unreachable(known: Evidence) -> Iterator[Finding]:
    """Outputs that keep to one side of zero, or within one, and a target that does not."""
    labels = _one(known.target)
    output = None if labels is None else _one({path: one for path, one in known.outputs.items() if _as_many(one, labels)})
    if output is None or labels is None or not (output.floating and labels.floating) or len(output) < LEAST:
        return
    near = abs(output.typical("mean") - labels.typical("mean")) < 0.3 * labels.typical("std")
    moves = not near or output.typical("std") > 0.1 * labels.typical("std")  # not of a net that returns the mean
    if moves and output.low >= 0 and labels.typical("min") < -0.1 * labels.typical("std"):
        what = f"outputs are never below 0, and the target goes down to {labels.low:.3g}"
        yield fault("unreachable-target", _last(known), what)
    elif len(output) >= LOSS.least and output.low >= -1 and 0.95 < output.high <= 1 and labels.high > 1.5:
        what = f"outputs are never above 1, and the target goes up to {labels.high:.3g}"
        yield fault("unreachable-target", _last(known), what)


def foreign(known: Evidence) -> Iterator[Finding]:
    """An optimizer that holds parameters the net does not have, and lacks some of the net."""
    held, trainable, strange = (max(known.fact(name), default=0.0) for name in ("held", "trainable", "foreign"))
    if strange and held < trainable:
        what = f"it holds {strange:.0f} parameters that the net does not have, and {held:.0f} of the {trainable:.0f} of the net"
        yield fault("foreign-parameters", "optimizer", what)


def _output(known: Evidence) -> Layer | None:
    """The row of what the net returns: its own, or that of the last layer."""
    rows = [layer for layer in known.layers if layer.output is not None]
    own = [layer for layer in rows if layer.name.partition(":")[0] in ("(net)", "output")]
    return next((layer for layer in own if layer.units is not None), next(iter(own or rows[-1:]), None))


def exclusive_labels(known: Evidence) -> Iterator[Finding]:
    """A cross entropy of classes that exclude each other, and a target in which several are 1, so that it begins as much higher."""
    labels, classes = _one(known.target), _classes(known)
    if labels is None or known.loss is None or not known.loss.finite or not labels.floating or classes < 2:
        return
    several = labels.typical("mean") * classes
    if (labels.low, labels.high) != (0, 1) or several < 1.2 or labels.typical("count") != labels.typical("samples") * classes:
        return
    if abs(known.loss.finite[0] / (several * math.log(classes)) - 1) < 0.15:
        what = f"{several:.1f} of {classes} labels are 1 in a typical sample, and the first loss is {known.loss.finite[0]:.3g}"
        yield fault("exclusive-labels", "loss", what)


def _last(known: Evidence) -> str:
    """The last layer, which most likely makes what the net returns."""
    inside = [layer.name for layer in known.layers if layer.output is not None and not layer.whole]
    return inside[-1].partition(":")[0] if inside else "(net)"


def initial_loss(known: Evidence) -> Iterator[Finding]:
    """A cross entropy that is far above that of equal probabilities in the beginning."""
    labels, classes = _one(known.target), _classes(known)
    if labels is None or known.loss is None or not known.loss.finite or labels.floating:
        return
    if classes < 2 or not 0 <= labels.high < classes:
        return
    first, expected = known.loss.finite[0], math.log(classes)
    output = _one(known.outputs)
    most = math.inf if output is None else expected + output.each["max"][0] - output.each["min"][0]  # more is a sum over samples
    if LOSS.initial * expected + 1 < first <= 1.05 * most:
        yield fault(
            "high-initial-loss", "loss", f"the first loss is {first:.3g}; {classes} equal probabilities have {expected:.3g}"
        )


RULES = (
    not_cleared,
    discarded,
    foreign,
    rates,
    optimizer_state,
    between_steps,
    modes,
    gradient_sizes,
    first_steps,
    weight_decay,
    weight_sizes,
    inputs,
    target,
    outputs,
    probabilities,
    wrong_probabilities,
    broadcast,
    rectified,
    unreachable,
    initial_loss,
    exclusive_labels,
    loss,
    jumps,
)
"""Each looks at what is known of a training, and yields what it finds."""
