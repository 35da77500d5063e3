"""Rules on inputs, target and outputs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from statistics import median

from recorders.watch.diagnosis.asked import (
    LATE,
    LEAST,
    as_many,
    classes_of,
    drifts,
    is_binary,
    last_layer,
    may_broadcast,
    only,
    share_of,
    spread_of_means,
)
from recorders.watch.diagnosis.batches import FEATURES, LABELS
from recorders.watch.diagnosis.evidence import BatchCourse, Evidence, finite, middle
from recorders.watch.diagnosis.finding import Finding, fault
from recorders.watch.diagnosis.limits import (
    FAR,
    FLAT,
    LARGE_INPUT,
    LARGE_OUTPUT,
    LARGE_TARGET,
    LOSS,
    RESHAPING,
    SORTED,
    VARIES,
    WHOLE,
    shown_times,
)


def inputs(known: Evidence) -> Iterator[Finding]:
    """Inputs that are constant, not finite or far from normalised, and batches that come again."""
    constant = [batches.low == batches.high for batches in known.inputs.values() if len(batches) >= 2]
    comes_again = all(map(_comes_again, [*known.inputs.values(), *known.target.values()]))
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
        elif batches.floating and spread < FLAT * (1.0 if _is_far_off(batches) else max(1.0, abs(batches.typical("mean")))):
            yield fault(
                "constant-inputs", where, f"all values are near {batches.typical('mean'):.4g}, with a deviation of {spread:.1e}"
            )
        elif batches.floating:
            largest = max(abs(batches.low), abs(batches.high))
            far = largest > LARGE_INPUT or abs(batches.typical("mean")) > 10 * batches.typical("std")
            if far and not _scales_inputs(known):
                what = f"values from {batches.low:.4g} to {batches.high:.4g}, with a mean of {batches.typical('mean'):.4g}"
                yield fault("large-inputs", where, what)
        if _comes_again(batches) and batches.low < batches.high:
            what = f"all {len(batches)} batches that were recorded are the same"
            # A table may be one batch, points of an equation are, and of all states of a game other actions may be asked for.
            whole = max(batches.each["samples"]) > WHOLE or not known.target or not comes_again
            yield fault("repeated-batches", where, what, severity="notice" if whole else "warning")
        one = max(batches.each["samples"]) == 1 if batches.floating else _one_label(known)
        if one and len(batches) >= LEAST:
            norms_too = any(known.fact("norms"))
            what = "each batch has one sample" + ", and batch norms are in the net" * norms_too
            place = next((layer.name for layer in known.layers if "BatchNorm" in layer.kind), where) if norms_too else where
            yield fault("batches-of-one", place, what, severity="error" if norms_too else "warning")


def _is_far_off(batches: BatchCourse) -> bool:
    """Whether all values lie far from zero, as those of a unit with a large offset do: then they are not normalised."""
    return abs(batches.typical("mean")) > LARGE_INPUT


def _comes_again(batches: BatchCourse) -> bool:
    """Whether all batches are the same, as far as their rows tell.

    The norm alone does not: that of one-hot inputs, or of 1 and -1, is always the same. What two such samples are like besides,
    if each is a batch, no number of a row tells.
    """
    alike = all(len({*finite(batches.each[column])}) <= 1 for column in ("mean", "norm", "within"))
    single = max(batches.each["samples"]) == 1 and _has_two_values(batches)
    return len(finite(batches.each["norm"])) >= LEAST and alike and not single


def _has_two_values(batches: BatchCourse) -> bool:
    """Whether each element of a typical batch is the least or the largest: no other numbers differ as much from their mean."""
    mean, low, high = (batches.typical(column) for column in ("mean", "min", "max"))
    return batches.typical("std") ** 2 > (1 - 1e-3) * (high - mean) * (mean - low)


def _scales_inputs(known: Evidence) -> bool:
    """Whether the first layer gives numbers of a usual size: the net itself may divide its inputs, or normalise them."""
    layers = (layer for layer in known.layers if layer.output is not None and not layer.whole and layer.kind not in RESHAPING)
    first = next(layers, None)
    return first is not None and first.output is not None and first.output.rms < LARGE_OUTPUT


def _one_label(known: Evidence) -> bool:
    """Whether the target of each batch is one number."""
    target = only(known.target)
    return target is not None and max(target.each["count"]) == 1


def target(known: Evidence) -> Iterator[Finding]:
    """A target that is constant, sorted or large."""
    for path, batches in known.target.items():
        where = f"target:{path}" if path else "target"
        if len(batches) >= LEAST and batches.low == batches.high:
            varies = any(other.low < other.high for other in known.target.values())  # this one may be a reward, or a weight
            yield fault("constant-target", where, f"all values are {batches.low:.4g}", severity="notice" if varies else None)
        elif len(batches) >= LEAST and _has_equal_samples(batches):
            yield fault("constant-target", where, "all samples of a batch have the same values")
        elif (not batches.floating or is_binary(batches)) and len(batches) >= LEAST and batches.typical("count") > 1:
            alike = share_of([low == high for low, high in zip(batches.each["min"], batches.each["max"], strict=True)])
            if alike > 0.5 and not (batches.floating and _take_turns(batches)):
                yield fault("sorted-target", where, f"in {alike:.0%} of the batches all labels are equal")
            else:
                yield from _sorted(batches, where)
        elif batches.floating and max(abs(batches.low), abs(batches.high)) > LARGE_TARGET and not _is_scaled(known, batches):
            causes = ("outliers", "target-scale") if _has_outliers(batches) else ()
            yield fault("large-target", where, f"values from {batches.low:.4g} to {batches.high:.4g}", causes=causes)
        elif batches.floating:
            yield from _sorted(batches, where)


def unused_classes(known: Evidence) -> Iterator[Finding]:
    """A cross entropy over many classes, of which most never come."""
    labels, output = only(known.target), only(known.outputs)
    if labels is None or output is None or labels.floating or known.loss is None or not known.loss.finite:
        return
    classes = output.typical("count") / max(labels.typical("count"), 1)
    units, places = classes_of(known), labels.typical("count") / max(labels.typical("samples"), 1)
    if not 4 <= classes <= LABELS or units not in (classes, places):  # as those of a sequence that is shorter than the inputs
        return
    seen, total = sum(count > 0 for count in labels.labels), sum(labels.labels)
    is_entropy = labels.low >= 0 and labels.high < classes and 0.5 < known.loss.finite[0] / math.log(classes) < LOSS.initial
    if is_entropy and 1 < seen <= classes / 2 and total >= 20 * classes:
        yield fault("unused-classes", "target", f"{seen} of {classes:.0f} classes come in {total:,.0f} labels")


def _has_equal_samples(batches: BatchCourse) -> bool:
    """Whether the samples of each batch have the same values, which differ within a sample; not of zeros and ones."""
    differ = min(finite(batches.each["std"]), default=0.0) > 0
    return differ and not is_binary(batches) and max(finite(batches.each["within"]), default=1.0) == 0


def _take_turns(batches: BatchCourse) -> bool:
    """Whether the labels of most batches are others than those of the batch before, as the real and false ones of a GAN."""
    means = batches.each["mean"]
    return share_of([one != other for one, other in pairwise(means)]) > 0.5


def _has_outliers(batches: BatchCourse) -> bool:
    """Whether the largest values are those of few samples, in a typical batch."""
    rows = zip(*(batches.each[column] for column in ("mean", "std", "min", "max")), strict=True)
    sizes = [max(high - mean, mean - low) / std for mean, std, low, high in rows if math.isfinite(mean) and std > 0]
    return bool(sizes) and median(sizes) > FAR


def _is_scaled(known: Evidence, target: BatchCourse) -> bool:
    """Whether the first outputs are where the target is: a net may scale them itself."""
    output = only(known.outputs)
    if output is None:
        return False
    spread = target.typical("std")
    return abs(output.each["mean"][0] - target.typical("mean")) < spread and output.each["std"][0] > 0.02 * spread


def _sorted(batches: BatchCourse, where: str) -> Iterator[Finding]:
    """BatchCourse whose means differ more than those of batches drawn at random, unless they drift as the net learns."""
    times = spread_of_means(batches)
    if times > SORTED and not drifts(batches):
        yield fault(
            "sorted-target", where, f"the means of batches vary {shown_times(times)} as much as those of batches drawn at random"
        )


def outputs(known: Evidence) -> Iterator[Finding]:
    """Outputs that are the same for all inputs."""
    output, given = only(known.outputs), only(known.inputs)
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
    output, course, labels = only(known.outputs), known.loss, only(known.target)
    if output is None or labels is None or course is None or len(course.finite) < LOSS.least or not output.floating:
        return
    if output.low < 0 or output.high > 1 + 1e-4 or labels.low < 0:
        return
    units = classes_of(known)
    sure = output.high > 0.8 or len(course) >= LOSS.long
    if not labels.floating and units >= 2 and labels.high < units:
        # Of the cross entropy of logits that are at most 1 for one class and 0 for others; a net that knows nothing has log(units).
        floor = math.log(1 + (units - 1) / math.e)
        learned = output.high > 0.8 or course.end() < 0.97 * math.log(units)
        sure = sure and learned and abs(output.typical("mean") * units - 1) < 1e-3
    elif labels.high <= 1 and output.low < 0.45 and output.high > 0.55:
        ones = labels.typical("mean")
        floor = math.log1p(math.exp(-1)) * ones + math.log(2) * (1 - ones)
    else:
        return
    end = course.end()
    if sure and 0.9 * floor < end < 1.6 * floor + 1:
        what = f"the net returns probabilities; taken as logits they allow no loss below {floor:.3g}, and it ends at {end:.3g}"
        yield fault("probabilities-as-logits", last_layer(known), what)


def wrong_probabilities(known: Evidence) -> Iterator[Finding]:
    """Logits of labels of 0 and 1 that say on average something else than how often these come.

    A bias of the last layer makes both equal wherever the loss is that of these labels. So does a linear layer, nearly.
    """
    output, labels = only(known.outputs), only(known.target)
    if output is None or labels is None or len(output) < LEAST or known.loss is None or len(known.loss) < LOSS.long:
        return
    if not output.floating or labels.low != 0 or labels.high != 1 or output.typical("count") != labels.typical("count"):
        return
    ones = labels.typical("mean")
    binary = is_binary(labels)
    if classes_of(known) > 1 and abs(ones * classes_of(known) - 1) < 0.05:
        return  # one of several classes, which a softmax makes probabilities of
    says = [middle(finite(batches[-LATE:])) for batches in (output.each["sigmoid"], labels.each["mean"])]
    if binary and (output.low < 0 or output.high > 1) and abs(says[0] - says[1]) > LOSS.probability:
        what = f"the mean probability is {says[0]:.2f} at the end, and {says[1]:.2f} of the labels are 1"
        yield fault("wrong-probabilities", "(net)", what)


def broadcast(known: Evidence) -> Iterator[Finding]:
    """A square error of each output with each target: shapes broadcast, and the loss is that of all pairs.

    The mean over all pairs follows from means and variances alone, whatever belongs to what.
    """
    output, labels, course = only(known.outputs), only(known.target), known.loss
    if output is None or labels is None or course is None or not (output.floating and labels.floating):
        return
    count = output.typical("count")
    if not may_broadcast(labels, output) or not 1 < count <= FEATURES or len(course) < LEAST:
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
    output, labels = only(known.outputs), only(known.target)
    if output is None or len(output) < LEAST or not output.floating or classes_of(known) < 2:
        return
    if labels is not None and (labels.floating or labels.high >= classes_of(known)):
        return
    if labels is not None and all(low == 0 for low in output.each["min"]) and output.high > 1:
        yield fault(
            "rectified-outputs",
            last_layer(known),
            f"logits are never below 0, and 0 in each batch; the largest is {output.high:.3g}",
        )


def unreachable(known: Evidence) -> Iterator[Finding]:
    """Outputs that keep to one side of zero, or within one, and a target that does not; and a loss that falls without end."""
    labels, course = only(known.target), known.loss
    endless = course is not None and len(course) >= LOSS.least and course.end() < -LOSS.endless * max(1.0, abs(course.start()))
    if course is not None and endless and labels is not None and labels.floating and labels.low < 0:
        what = f"the loss falls to {course.end():.3g}; a cross entropy has no end if the target goes down to {labels.low:.3g}"
        yield fault("unreachable-target", last_layer(known), what, causes=("target-scale", "wrong-loss"))
        return
    alike = [] if labels is None else [one for one in known.outputs.values() if as_many(one, labels)]
    if labels is None or not alike or not (alike[0].floating and labels.floating) or len(alike[0]) < LEAST:
        return
    output = alike[0]  # of a mean and a spread, the mean
    floor = math.inf if len(alike) == 1 else -0.9  # of several one may be a share: this is not, if it comes near -1, too
    near = abs(output.typical("mean") - labels.typical("mean")) < 0.3 * labels.typical("std")
    late = middle(finite(output.each["std"][-LATE:]))
    moves = not near or late > 0.1 * labels.typical("std")  # not of a net that returns the mean
    if moves and len(alike) == 1 and output.low >= 0 and labels.typical("min") < -0.1 * labels.typical("std"):
        what = f"outputs are never below 0, and the target goes down to {labels.low:.3g}"
        yield fault("unreachable-target", last_layer(known), what)
    elif len(output) >= LOSS.least and -1 <= output.low < floor and 0.95 < output.high <= 1 and labels.high > 1.5:
        what = f"outputs are never above 1, and the target goes up to {labels.high:.3g}"
        yield fault("unreachable-target", last_layer(known), what)


RULES = (
    inputs,
    target,
    unused_classes,
    outputs,
    probabilities,
    wrong_probabilities,
    broadcast,
    rectified,
    unreachable,
)
"""Each looks at what is known of a training, and yields what it finds."""
