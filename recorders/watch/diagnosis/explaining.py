"""Explaining: what tells of one cause is told once, the cause before its consequences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from recorders.watch.diagnosis.asked import if_too_large, share_of, written
from recorders.watch.diagnosis.evidence import Evidence
from recorders.watch.diagnosis.finding import Finding, Severity

ORDER = (
    ("nonfinite-inputs", "constant-inputs", "batches-of-one", "constant-target", "sorted-target", "repeated-batches"),
    (
        "replicas-differ",
        "not-cleared",
        "gradients-discarded",
        "optimizer-made-anew",
        "foreign-parameters",
        "rate-is-zero",
        "ascends",
        "loss-climbs",
        "clipped",
        "coarse-weights",
    ),
    ("nonfinite",),
    (
        "never-ran",
        "frozen-from-start",
        "zero-weights",
        "equal-units",
        "no-gradient",
        "gradient-cut",
        "frozen",
        "shapes-broadcast",
        "exclusive-labels",
        "class-ignored",
        "unused-classes",
        "probabilities-as-logits",
        "rectified-outputs",
        "unreachable-target",
        "softmax-axis",
        "activations-in-a-row",
        "normalised-outputs",
        "outputs-reshaped",
        "targets-displaced",
        "linear-net",
        "wrong-normalisation",
        "shrinking-signal",
        "bottleneck",
        "large-initial-weights",
        "large-initial-bias",
        "repeated-layer",
        "untied-weights",
        "samples-mix",
        "sees-the-future",
        "sees-only-the-past",
        "targets-are-inputs",
        "mask-inverted",
        "carries-state",
        "random-in-evaluation",
        "dropout-on-outputs",
    ),
    ("evaluation-mode", "statistics-stand-still", "much-dropout", "large-epsilon", "odd-momentum", "written-between-steps"),
    (
        "rate-ends-early",
        "strong-weight-decay",
        "shrinking-weights",
        "high-initial-loss",
        "large-inputs",
        "weak-inputs",
        "large-target",
        "wrong-probabilities",
    ),
    (
        "dead-units",
        "saturated-units",
        "attention-unscaled",
        "attention-saturated",
        "one-direction",
        "attention-uniform",
        "ignores-inputs",
        "order-has-no-effect",
        "outliers",
        "growing-signal",
    ),
    ("exploding-gradients", "vanishing-gradients", "tiny-gradients"),
    ("oscillating-weights", "updates-too-large", "updates-too-small", "equal-outputs"),
    ("loss-is-constant", "loss-rises", "loss-does-not-fall", "loss-jumps", "loss-falls-slowly"),
    ("left-range",),
    ("training-mode",),
)
"""Kinds of findings, causes before consequences."""
_PLACE = {kind: place for place, kinds in enumerate(ORDER) for kind in kinds}

BY_SIZES = frozenset({"high-initial-loss", "dead-units", "saturated-units", "outliers", "updates-too-large", "equal-outputs"})
"""What inputs, or initial weights, that are far too large do to a net."""
LOSSES = frozenset(next(kinds for kinds in ORDER if "loss-rises" in kinds))
"""Symptoms that any other fault explains."""
FLAT = frozenset({"loss-does-not-fall", "loss-falls-slowly"})
"""Those of them that tell of what is not learned."""
EVERYWHERE = 0.5
"""The share of the layers from which on a fault of layers is one of the training."""
OF_TRAINING = {"updates-too-large": "optimizer", "updates-too-small": "optimizer", "frozen": "optimizer"}
"""Where a fault is that most layers have."""


def explained(found: Sequence[Finding], known: Evidence) -> tuple[list[Finding], list[Finding]]:
    """The faults, causes before consequences, and the notices."""
    layers = sum(layer.update is not None or "update" in layer.silent for layer in known.layers)
    told = told_once(found, layers, sure=bool(known.weights) and known.loss is not None, too_large=if_too_large(known))
    if any(one.kind == "exploding-gradients" for one in told):  # what makes these grow makes the outputs grow
        told = [replace(one, severity="notice") if one.kind == "growing-signal" else one for one in told]
    told = _with_reasons(told, known)
    faults, notices = ([one for one in told if (one.severity == "notice") == notice] for notice in (False, True))
    kinds = {one.kind for one in faults}
    if "no-gradient" in kinds or "zero-weights" in kinds:  # without a gradient no weight changes
        faults = [one for one in faults if one.kind != "frozen"]
    faults.sort(key=rank_of)  # which keeps the order of layers
    if any(one.kind not in LOSSES and one.severity == "error" for one in faults):
        faults = [one for one in faults if one.kind not in LOSSES or one.cause == "schedule"]
    return faults, notices


def _with_reasons(told: Sequence[Finding], known: Evidence) -> list[Finding]:
    """What may be meant is an error if something went wrong that it explains: odd options, large numbers, weights written to."""
    later = [one for one in told if one.severity == "error" and _PLACE[one.kind] > _PLACE["odd-momentum"]]
    reasons = {"large-epsilon", "odd-momentum"} if later else set()
    if any(one.kind == "updates-too-large" or one.kind in LOSSES for one in later) and share_of(written(known)) > 0.8:
        reasons.add("written-between-steps")  # such as a clipping of weights that keeps them small
    if any(one.kind in BY_SIZES for one in later):
        reasons |= {"large-inputs", "large-initial-weights"}
    told = [replace(one, severity="error") if one.kind in reasons else one for one in told]
    fresh = next((one for one in told if one.kind == "frozen-from-start" and one.severity != "notice"), None)
    return told if fresh is None else [_of_random_layers(one, fresh) if one.kind in FLAT else one for one in told]


def _of_random_layers(one: Finding, fresh: Finding) -> Finding:
    """A loss that hardly falls, of a net of which layers that nobody has trained are frozen."""
    causes = dict.fromkeys((fresh.cause, *one.causes))
    return replace(one, causes=(*causes,), remedy=fresh.remedy)


def rank_of(one: Finding) -> tuple[bool, float]:
    """The place of a fault among all: errors first, and causes before consequences."""
    if one.cause == "schedule" and one.kind in LOSSES:
        return one.severity != "error", _PLACE["rate-ends-early"]
    of_all = one.kind == "updates-too-large" and one.layer == "optimizer"  # which kills units, and not the other way round
    return one.severity != "error", 5.5 if of_all else _PLACE[one.kind]


def told_once(faults: Sequence[Finding], layers: int, sure: bool = False, too_large: Severity = "error") -> list[Finding]:
    """Tells a fault once that several rules see, and one that most layers have as one of the training.

    Args:
        layers: how many have weights that are trained.
        sure: whether causes are those that something tells of.
        too_large: how bad updates are that are too large in most layers.
    """
    faults = [*{(one.kind, one.layer, one.what * (one.kind == "left-range")): one for one in faults[::-1]}.values()][::-1]
    if any(one.kind == "equal-outputs" and one.layer != "(net)" for one in faults):  # a run showed where
        faults = [one for one in faults if (one.kind, one.layer) != ("equal-outputs", "(net)")]
    for kind, place in OF_TRAINING.items():
        alike = [one for one in faults if one.kind == kind]
        frozen = kind == "frozen"
        if len(alike) > (min(2, EVERYWHERE * layers) if frozen else max(1, EVERYWHERE * layers)):
            first, causes = alike[0], Counter(one.causes for one in alike).most_common(1)[0][0]
            if frozen and (len(alike) < layers or (sure and causes[:1] == ("not-in-optimizer",))):
                place = first.layer
            elif causes[:1] == ("detached",):  # at the end nearest to the loss
                place = alike[-1].layer
            others = len({one.layer for one in alike} - {place, first.layer})  # one layer may have several at fault
            where = f", in {first.layer} and {others} more of {layers} layers" if others else ""
            severity = first.severity if frozen else too_large if kind == "updates-too-large" else "error"
            one = replace(first, severity=severity, layer=place, what=first.what + where, causes=causes)
            faults = [one, *(other for other in faults if other.kind != kind)]
    return [*faults]
