"""Rules on the loss: where it begins, whether it falls, and whether it jumps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import median

from recorders.watch.diagnosis.asked import (
    LEAST,
    blind_loss,
    classes_of,
    drifts,
    is_adversarial,
    is_binary,
    may_broadcast,
    only,
    share_of,
    trivial_loss,
    written,
)
from recorders.watch.diagnosis.evidence import Course, Evidence
from recorders.watch.diagnosis.finding import Finding, Severity, fault
from recorders.watch.diagnosis.layer_rules import gradients_by_depth, why_rising
from recorders.watch.diagnosis.limits import LOSS, shown_range


def loss(known: Evidence) -> Iterator[Finding]:
    """The loss is constant, rises, does not fall, or falls too slowly."""
    course = known.loss
    if course is None or len(course.finite) < LOSS.least or is_adversarial(known):
        return
    start, end, noise, best = course.start(), course.end(), course.noise(), min(course.finite)
    if max(course.finite) == best:
        yield fault("loss-is-constant", "loss", f"the loss is {best:.4g} in all {len(course)} steps")
        return
    if best < 0 or start < Course(course.finite[: max(LEAST, len(course) // 20)]).noise():
        return  # of no fixed scale, as that of a policy gradient
    sure = 3 * noise / math.sqrt(max(3, 0.1 * len(course)))
    trivial = trivial_loss(known)
    hides = 0.0 if _is_rare(known) else min(sure, LOSS.unsure * trivial)
    flat, untrained = _why_flat(known), not start < 0.5 * blind_loss(known)
    if (target := only(known.target)) is not None and drifts(target):  # then the loss of a net that learns need not fall
        untrained, trivial = False, math.nan
    if _climbs(course) and known.early_ratio < LOSS.early:
        yield fault("loss-climbs", "loss", f"the loss rose from {start:.4g} to {end:.4g}, from the first steps on")
    elif end > start + max(sure, LOSS.rises * start):
        yield fault("loss-rises", "loss", f"the loss rose from {start:.4g} to {end:.4g}", causes=why_rising(known))
    elif end > start - max(min(sure, LOSS.unsure * start), LOSS.falls * start) and len(course) >= LOSS.flat and untrained:
        what = f"the loss was {start:.4g} and is {end:.4g} after {len(course)} steps"
        yield _flat(what, flat)
    elif math.isfinite(trivial) and end > LOSS.trivial * trivial - hides and len(course) >= LOSS.long:
        what = f"after {len(course)} steps the loss is {end:.4g}; without any inputs it could be {trivial:.4g}"
        yield _flat(what, flat)
    elif len(course) >= LOSS.long and untrained and not _warms_up(known) and _is_slow(known, course, trivial):
        what = f"the loss fell from {start:.4g} to {end:.4g}, and a typical step changes the weights by {shown_range(known.ratio)}"
        yield fault("loss-falls-slowly", "loss", what)


def _is_rare(known: Evidence) -> bool:
    """Whether labels are 1, or 0, so seldom that the loss of a batch is mostly how many of these are in it."""
    target = only(known.target)
    if target is None or not is_binary(target):
        return False
    ones = target.typical("mean")
    return min(ones, 1 - ones) < LOSS.rare


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
    late = known.ratio < LOSS.slow and _is_late(course)
    return end > 0.4 * start and (late or (known.ratio < LOSS.slow / 2 and from_scratch))


def _warms_up(known: Evidence) -> bool:
    """Whether the learning rate still rises."""
    rate = known.fact("rate")
    return len(rate) > 1 and rate[-1] > rate[len(rate) // 2]


def _is_late(course: Course) -> bool:
    """Whether the loss was half-way down only after half of the time."""
    found = course.finite
    middle = (course.start() + course.end()) / 2
    half = Course(found[: len(found) // 2])
    return half.end() > middle


def _why_flat(known: Evidence) -> tuple[str, ...]:
    ratio, own = known.ratio, [layer.trained for layer in known.layers if layer.has_weights and layer.trained is not None]
    if own and share_of([not trained for trained in own]) > 0.5:
        return ("frozen", "not-in-optimizer")
    if sum(written(known)) >= 2:
        return ("weights-overwritten", "rate-too-high")
    if ratio > LOSS.fast or known.early_ratio > LOSS.early:
        return ("rate-too-high", "initialisation")
    for found in gradients_by_depth(known.gradient_norms, decay=LOSS.decay):
        return (found.kind, "initialisation", "rate-too-low")
    trivial, course = trivial_loss(known), known.loss
    there = course is not None and math.isfinite(trivial) and course.end() < LOSS.near * trivial
    falls = _still_falls(known)
    if ratio < LOSS.slow / 4 or (ratio < LOSS.slow and not there) or (ratio < 2 * LOSS.slow and falls):
        return ("rate-too-low", "not-in-optimizer")
    target, output = only(known.target), only(known.outputs)
    below = known.loss is not None and known.loss.end() < LOSS.trivial * trivial_loss(known)  # where such a loss cannot come
    if target is not None and output is not None and target.floating and not below and not is_binary(target):
        if not may_broadcast(target, output):
            return ("labels-do-not-fit", "noise", "rate-too-high")
        return ("broadcast", "labels-do-not-fit")
    return ("labels-do-not-fit", "noise", "rate-too-high")


def _still_falls(known: Evidence) -> bool:
    """Whether the loss still falls at the end, by more than its noise."""
    if known.loss is None:
        return False
    late = Course(known.loss.finite[len(known.loss) // 2 :])
    return late.start(share=0.2) - late.end(share=0.2) > 3 * late.noise() / math.sqrt(max(3, 0.2 * len(late)))


def jumps(known: Evidence) -> Iterator[Finding]:
    """A loss that fell and is thrown back in one step."""
    found = known.loss.finite if known.loss is not None else []
    if len(found) < LOSS.long or min(found) < 0 or is_adversarial(known):
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


def initial_loss(known: Evidence) -> Iterator[Finding]:
    """A cross entropy that is far above that of equal probabilities in the beginning."""
    labels, classes = only(known.target), classes_of(known)
    if labels is None or known.loss is None or not known.loss.finite or labels.floating:
        return
    if classes < 2 or not 0 <= labels.high < classes:
        return
    first, expected = known.loss.finite[0], math.log(classes)
    output = only(known.outputs)
    most = math.inf if output is None else expected + output.each["max"][0] - output.each["min"][0]  # more is a sum over samples
    if LOSS.initial * expected + 1 < first <= 1.05 * most:
        frozen = any(layer.has_weights and layer.trained is False for layer in known.layers)  # what was trained before may be sure
        severity: Severity | None = "notice" if frozen else "error" if first > 10 * LOSS.initial * expected else None
        what = f"the first loss is {first:.3g}; {classes} equal probabilities have {expected:.3g}"
        yield fault("high-initial-loss", "loss", what, severity=severity)


def exclusive_labels(known: Evidence) -> Iterator[Finding]:
    """A cross entropy of classes that exclude each other, and a target in which several are 1, so that it begins as much higher."""
    labels, classes = only(known.target), classes_of(known)
    if labels is None or known.loss is None or not known.loss.finite or not labels.floating or classes < 2:
        return
    several = labels.typical("mean") * classes
    if (labels.low, labels.high) != (0, 1) or several < 1.2 or labels.typical("count") != labels.typical("samples") * classes:
        return
    if abs(known.loss.finite[0] / (several * math.log(classes)) - 1) < 0.15:
        what = f"{several:.1f} of {classes} labels are 1 in a typical sample, and the first loss is {known.loss.finite[0]:.3g}"
        yield fault("exclusive-labels", "loss", what)


RULES = (
    initial_loss,
    exclusive_labels,
    loss,
    jumps,
)
"""Each looks at what is known of a training, and yields what it finds."""
