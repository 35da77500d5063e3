"""Rules on layers: what the outputs, gradients and updates of each layer tell."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from statistics import median
from typing import Literal

from torch import Tensor

from recorders.capture.contents import has_own_call
from recorders.watch.diagnosis.evidence import Evidence
from recorders.watch.diagnosis.finding import Finding, Severity, because, fault
from recorders.watch.diagnosis.limits import (
    ACTIVATIONS,
    DEAD_SHARE,
    EQUAL,
    GRADIENT_DECAY,
    LINEAR,
    LOSS,
    NORMS,
    RESHAPING,
    SATURATED_SLOPE,
    SIGMOIDS,
    SIGNAL,
    UNIT_SHARE,
    WEAK,
    WEIGHTED,
    WIDE,
    WITHOUT_WEIGHTS,
    is_massive,
    relative_slope,
    shown_outliers,
)
from recorders.watch.overview import Layer
from recorders.watch.spread import Spread


def gradients_by_depth(norms: Mapping[str, float], since: int | None = None, decay: float = GRADIENT_DECAY) -> Iterator[Finding]:
    """At most one finding: that gradients of the first layers are much smaller, or larger, than those of the last.

    The medians of the first and of the last quarter are compared, not single layers: within a block the gradients of keys of
    attention may be smaller by orders of magnitude, and those of embeddings larger, in health.

    Args:
        norms: by layer, in network order.
        since: the tick since when.
        decay: the smallest ratio that is accepted.

    >>> norms = {"0": 1e-9, "2": 1e-6, "4": 1e-3, "6": 1.0}
    >>> [(finding.layer, finding.what) for finding in gradients_by_depth(norms)]
    [('0', 'gradients vanish on their way back: their norm is 1.0e+00 at 6 and 1.0e-09 here')]
    """
    known = [(norm, name) for name, norm in norms.items() if math.isfinite(norm)]
    if len(known) < 2:
        return
    quarter, third = max(len(known) // 4, 1), max(len(known) // 3, 1)
    first, last = (median(norm for norm, _ in part) for part in (known[:quarter], known[-quarter:]))
    smallest = median([norm for norm, _ in known[-quarter:] if norm > 0] or [0.0])  # a layer without gradients is another fault
    early, late = known[:third], known[-third:]  # in which the layer is named
    if first < decay * last:
        (low, where), (high, other) = min(early), max(late)
        what = f"gradients vanish on their way back: their norm is {high:.1e} at {other} and {low:.1e} here"
        yield fault("vanishing-gradients", where, what, since)
    elif 0 < smallest < decay * first:
        (high, where), (low, other) = max(early), min(pair for pair in late if pair[0] > 0)
        what = f"gradients explode on their way back: their norm is {low:.1e} at {other} and {high:.1e} here"
        yield fault("exploding-gradients", where, what, since)


CURVES = {"Tanh": "tanh", "Sigmoid": "sigmoid"}
"""The curves of activation functions that saturate, by class of the module."""
LEAST_UNITS = 2
"""Fewer units are no units, but a value that may rightly be zero."""
SHOWN = 16
"""The most dead units that a notice names."""


def nonfinite(known: Evidence) -> Iterator[Finding]:
    """One finding, where it began: NaN spreads to what is computed later, from outputs to the loss and to gradients."""
    layers, calls = known.layers, known.calls
    places: list[tuple[str, str]] = []
    for role, label in (("output", "outputs"), ("gradient", "gradients"), ("weight_gradient", "weight gradients")):
        since = {layer.name: layer.since[role] for layer in layers if layer.since.get(role, -1) >= 0}
        hit = [
            layer
            for layer in layers
            if layer.name in since or ((spread := getattr(layer, role)) is not None and spread.nonfinite > 0)
        ]
        if hit:
            inside = [layer for layer in hit if not layer.whole] or hit
            ordered = inside if role == "output" else inside[::-1]  # gradients are computed from the last layer on
            shares = [_share_before(layer, role) for layer in ordered]
            first = ordered[shares.index(min(shares))]
            if role == "output" and len(inside) == len([layer for layer in layers if layer.output is not None and not layer.whole]):
                # All at once, although the inputs were finite: the weights were, after a backward, which begins at the end.
                first = inside[-1] if min(shares) == max(shares) else first
            spread = getattr(first, role)
            share = f"{spread.nonfinite:,} of {spread.count + spread.nonfinite:,} " if counts_nonfinite(spread) else ""
            what = f"{share}{label} are NaN or infinite"
            what += f", for the first time in observation {since[first.name]}" if first.name in since else ""
            places.append((first.name, what + (f", and in {len(hit) - 1} more layers" if len(hit) > 1 else "")))
    for name, spread in calls.items():
        if spread.nonfinite > 0:
            places.append((name, f"{spread.nonfinite:,} of {spread.observations:,} values are NaN or infinite"))
    if places:
        (name, what), *later = places
        also = "".join(f"; {place}: {text}" for place, text in later)
        yield fault("nonfinite", name, what + also, causes=_why_nonfinite(known))


def _share_before(layer: Layer, role: str) -> float:
    """The share of what was recorded of a layer before the first NaN or infinity: some are called more often than others."""
    spread, since = getattr(layer, role), layer.since.get(role, -1)
    return since / max(spread.observations, 1) if since >= 0 and spread is not None else math.inf


def _why_nonfinite(known: Evidence) -> tuple[str, ...]:
    """The likely causes, if anything tells of them."""
    if any(not all(batches.each["finite"]) for batches in [*known.inputs.values(), *known.target.values()]):
        return ("nonfinite-inputs",)
    finite = known.loss.finite if known.loss is not None else []
    rises = len(finite) > 3 and max(finite[-3:]) > 2 * abs(finite[0])
    if not (rises and known.early_ratio > LOSS.early) and [*signal(known), *gradients(known)]:
        return ("exploding-gradients", "initialisation", "rate-too-high")
    if rises:
        return ("rate-too-high", "initialisation")
    return ("nonfinite", "initialisation", "rate-too-high") if known.loss is not None else ()


def why_rising(known: Evidence) -> tuple[str, ...]:
    """The likely causes of a loss that rises: too high a rate changes the weights much at once, an ascent begins gently."""
    gentle = not known.early_ratio > LOSS.early
    fell = known.loss is not None and min(known.loss.finite) < 0.9 * known.loss.start()
    if (gentle or fell) and _rises_late(known):
        return ("schedule", "rate-too-high")
    return ("ascent", "rate-too-high") if gentle else ("rate-too-high", "ascent")


def _rises_late(known: Evidence) -> bool:
    """Whether the learning rate is many times that of the beginning, and still rose in the second half, as no warm-up does."""
    rate, step = known.fact("rate"), known.fact("step")
    if len(rate) < 2 or len(rate) != len(step) or not rate[-1] > 9 * rate[0] > 0:
        return False
    middle = next(one for one, at in zip(rate, step, strict=True) if at >= step[-1] / 2)
    return rate[-1] > 3 * middle


def never_ran(known: Evidence) -> Iterator[Finding]:
    """Layers with weights that were not called: of a part of the net of which none was, told once, as of parts alike in blocks.

    Layers to which no sample was sent, such as experts, are a notice.
    """
    called = [layer.name for layer in known.layers if "output" not in layer.silent]
    ran = {"(net)"} if called else set()  # modules of which a part was called, as those of a GAN are
    ran |= {above for name in called for above in modules_above(name)}
    parts: dict[str, list[Layer]] = {}  # by the largest module of which nothing was called
    some_frozen = any(layer.still and "output" not in layer.silent for layer in known.layers if layer.has_weights)
    for layer in known.layers:
        # Nobody calls containers, and the attention of PyTorch uses the weights of its out_proj without calling it. What has no
        # weights has nothing to learn: the dropout of attention, which is fused, is not called.
        used = (
            layer.kind in ("NonDynamicallyQuantizableLinear", "ModuleList", "ModuleDict", "ParameterList", "ParameterDict")
            or (layer.kind in WITHOUT_WEIGHTS if layer.has_weights is None else not layer.has_weights)
            or layer.name in ran
            or layer.shared
            or ((module := known.modules.get(layer.name)) is not None and has_own_call(module))
            or "output" in layer.failed
            or layer.has_gradients
            or layer.ratio_at(1.0) > 0
        )
        if "output" in layer.silent and not used:
            parts.setdefault(next((one for one in modules_above(layer.name) if one not in ran), layer.name), []).append(layer)
    alike: dict[str, list[str]] = {}
    for part in parts:
        alike.setdefault(re.sub(r"\d+", "0", part), []).append(part)
    for names in alike.values():
        layer = parts[names[0]][0]
        # A file does not tell which layers are frozen, or share weights with one that is called, as the embedding of T5 does.
        severity: Severity | None = "notice" if layer.trained is False or (layer.trained is None and some_frozen) else None
        what = f"no output was recorded{because(layer.silent['output'])}"
        if len(parts[names[0]]) > 1:  # such as the part of a net for pictures, in a training on texts
            what, severity = f"none of its {len(parts[names[0]])} layers was called: {what}", severity or "warning"
        if len(names) > 1:
            what = f"{what}; and so with {len(names) - 1} more like it, to {names[-1]}"
        where = names[0] if len(parts[names[0]]) > 1 else layer.name  # the module around one layer may have been called
        yield fault("never-ran", where, what, severity=severity)
    if empty := [layer.name for layer in known.layers if layer.empty and layer.has_weights]:
        more = f", and so was that of {len(empty) - 1} more layers" if len(empty) > 1 else ""
        yield fault("never-ran", empty[0], f"all it was given was empty, without samples{more}", severity="notice")


def modules_above(name: str) -> list[str]:
    """The names of the modules that contain a module, the outermost first."""
    return [name[:at] for at, sign in enumerate(name) if sign == "."]


def dead(known: Evidence) -> Iterator[Finding]:
    """Layers in which most units are dead; of those in which some are, a notice."""
    before: Tensor | None = None  # which units were dead in the layer before
    for layer in known.layers:
        never, gone = layer.dead, _dead_units(layer)
        if gone is not None and gone.any() and not _inherited(gone, before):
            units = gone.flatten().nonzero().flatten().tolist()
            most = len(units) > UNIT_SHARE * gone.numel()
            which = "" if most else f" ({', '.join(map(str, units[:SHOWN]))}{', ...' if len(units) > SHOWN else ''})"
            how, causes = "they were never active", ("dead-units", "initialisation")
            if layer.idle is not None and (never is None or not never.equal(gone)):
                since = int(layer.idle.flatten()[units].min())
                how = f"they were not active in the last {since} of {layer.idle_of[0]} observations, or longer"
                causes = ("dead-units", "rate-too-high")
            what = f"{len(units)} of {gone.numel()} units{which} are dead: {how}"
            severity = _severity(len(units) / gone.numel())
            if severity == "warning" and known.learns:  # those that are left are enough
                severity = "notice"
            yield fault("dead-units", layer.name, what, causes=causes, severity=severity)
        before = gone


def silent_blocks(known: Evidence) -> Iterator[Finding]:
    """The first block that contains layers, and whose outputs are all zero."""
    zero = [
        layer
        for layer in known.layers
        if layer.whole
        and layer.first
        and (out := layer.output) is not None
        and out.count
        and out.low == out.high == 0
        and layer.name != "(net)"
    ]
    inner = [layer for layer in zero if not any(other.name.startswith(f"{layer.name}.") for other in zero)]
    if inner:
        more = f", and those of {len(inner) - 1} more blocks" if len(inner) > 1 else ""
        yield fault("dead-units", inner[0].name, f"all its outputs were 0{more}")


def _severity(share: float) -> Literal["error", "warning", "notice"]:
    """Of dead units: what a few others still do may be enough."""
    return "error" if share > DEAD_SHARE else "warning" if share > UNIT_SHARE else "notice"


def _dead_units(layer: Layer) -> Tensor | None:
    """Which units are dead; None of a layer of which they are no units, or unknown."""
    without = layer.kind in LINEAR or layer.kind in RESHAPING or not layer.first or layer.whole
    return None if without or layer.gone is None or layer.gone.numel() < LEAST_UNITS else layer.gone


def _inherited(dead: Tensor, before: Tensor | None) -> bool:
    """Whether the units were dead in the layer before, which may happen to a pooling layer."""
    return before is not None and dead.shape == before.shape and bool((before >= dead).all())


def saturated(known: Evidence) -> Iterator[Finding]:
    """Layers of which most units are at the ends of their activation function."""
    for layer in known.layers:
        shape = curve(layer)
        # The last sigmoid gives a probability, which may be near 0 or 1.
        if layer.units is None or shape is None or (shape == "sigmoid" and layer is known.layers[-1]):
            continue
        mean = layer.units["mean"]
        square = layer.units["var"].nan_to_num() + mean.square()
        slope = relative_slope(mean, square, shape)
        stuck = int((slope < SATURATED_SLOPE).sum())
        if stuck > UNIT_SHARE * slope.numel():
            what = f"{stuck} of {slope.numel()} units are saturated: nearly all outputs lie at the ends of the {shape}"
            yield fault("saturated-units", layer.name, what)


def curve(layer: Layer) -> str | None:
    """The activation function if it is one that saturates, else None."""
    if layer.kind:
        return CURVES.get(layer.kind)
    # If the class is unknown: outputs that come near -1 or 1 and never exceed them are those of a tanh.
    out = layer.output
    squashed = out is not None and -1 <= out.low < 0 and out.high <= 1 and max(-out.low, out.high) > 0.99
    return "tanh" if squashed else None


def outliers(known: Evidence) -> Iterator[Finding]:
    """One finding, where they begin: later layers hand them on."""
    found = {layer.name: sizes for layer in known.layers if (sizes := largest_and_typical(layer)) is not None}
    hit = [name for name, sizes in found.items() if is_massive(*sizes)]
    if hit:
        yield fault("outliers", hit[0], shown_outliers(*found[hit[0]], len(hit) - 1))


def largest_and_typical(layer: Layer) -> tuple[float, float] | None:
    """The largest magnitude of the outputs, and the typical one: a quartile, or the median of the root mean squares of features."""
    if layer.output is None or math.isnan(layer.output.high):
        return None
    largest = max(-layer.output.low, layer.output.high)
    if not math.isnan(layer.output.quartile):
        return largest, layer.output.quartile
    if layer.units is None or layer.units["mean"].numel() < 3:
        return None
    return largest, (layer.units["var"].nan_to_num() + layer.units["mean"].square()).sqrt().nanmedian().item()


def gradients(known: Evidence) -> Iterator[Finding]:
    """Gradients that vanish or explode with depth, and those that sigmoids in the place of all activation functions make small."""
    found = [*gradients_by_depth(known.gradient_norms)]
    yield from found or _by_sigmoids(known)


def _by_sigmoids(known: Evidence) -> Iterator[Finding]:
    """At most one finding, if several sigmoids, and no other activation function, are before the last layer with weights."""
    layers = [layer for layer in known.layers if not layer.whole and layer.output is not None]
    last = max((at for at, layer in enumerate(layers) if layer.kind in WEIGHTED), default=0)
    activations = [layer for layer in layers[:last] if layer.kind in ACTIVATIONS]
    norms = known.gradient_norms
    if len(activations) < 2 or any(layer.kind != "Sigmoid" for layer in activations) or len(norms) < 2:
        return
    first, end = [*norms.items()][:: len(norms) - 1]
    if first[1] < SIGMOIDS * end[1]:
        what = f"all {len(activations)} activation functions are sigmoids, and the norm of gradients is {end[1]:.1e} at {end[0]}"
        what += f" and {first[1]:.1e} at {first[0]}"
        loss = known.loss
        slow = loss is not None and len(loss) > LOSS.long and not 0 <= loss.end() < LOSS.well * loss.start()
        yield fault("vanishing-gradients", activations[0].name, what, severity="warning" if slow else "notice")


def counts_nonfinite(spread: Spread | None) -> bool:
    """Whether the reducer counts values that are not finite."""
    return spread is not None and not math.isnan(spread.nonfinite)


def equal_units(known: Evidence) -> Iterator[Finding]:
    """The first layer whose units all give the same, or one of a few things: rounding and Adam part some of the others."""
    for layer in known.layers:
        if layer.units is None or layer.kind in NORMS or layer.whole or not layer.first or layer.has_weights is False:
            continue
        mean, order = layer.units["mean"].double().flatten().sort()
        var = layer.units["var"].double().nan_to_num().flatten()[order]
        if mean.numel() >= EQUAL.least and bool((var > 0).all()):
            steps = (mean.diff().square() + var.diff().abs()) / (mean.square() + var)[1:]
            different = 1 + int((steps >= EQUAL.apart).sum())
            if different <= mean.numel() // 3:
                what = (
                    f"all {mean.numel()} units give the same" if different == 1 else f"{mean.numel()} units give {different} things"
                )
                yield fault("equal-units", layer.name, what)
                return


def linear_net(known: Evidence) -> Iterator[Finding]:
    """Linear layers that follow each other in an `nn.Sequential` without an activation function between them.

    A narrow layer between wider ones is a factorisation, which people mean.
    """
    parents = {layer.name: layer.kind for layer in known.layers}
    before: Layer | None = None
    for layer in known.layers:
        parent = layer.name.rpartition(".")[0] or "(net)"
        if layer.whole or parents.get(parent) != "Sequential" or layer.units is None:
            before = None
        elif layer.kind == "Linear":
            known_between = before is not None and _are_all_known(before.name, layer.name, parents)
            if before is not None and known_between and _width(before) >= min(_width(layer), WIDE):
                what = f"no activation function is between it and {before.name}"
                yield fault("linear-net", layer.name, what)
                return
            before = layer
        elif layer.kind not in RESHAPING:
            before = None


def _are_all_known(first: str, last: str, known: Mapping[str, str]) -> bool:
    """Whether all layers between two of one `nn.Sequential` are known, as far as their numbers tell: some may not be selected."""
    parent, _, start = first.rpartition(".")
    end = last.rpartition(".")[2]
    if not (start.isdecimal() and end.isdecimal()):
        return True
    return all((f"{parent}." if parent else "") + str(number) in known for number in range(int(start), int(end)))


def _width(layer: Layer) -> int:
    return 0 if layer.units is None else layer.units["mean"].numel()


def weak_inputs(known: Evidence) -> Iterator[Finding]:
    """A first layer whose outputs hardly depend on its inputs."""
    layers = (layer for layer in known.layers if layer.units is not None and not layer.whole and layer.has_weights is not False)
    first = next(layers, None)
    if first is None or first.kind not in WEIGHTED or first.units is None:
        return
    if not known.inputs or not all(batches.floating for batches in known.inputs.values()):
        return
    var, square = first.units["var"].double().nan_to_num(), first.units["mean"].double().square()
    share = float((var / (var + square)).nanmedian())
    if share < WEAK:
        what = f"its outputs hardly depend on its inputs: of a typical unit {share:.1%} of the mean square is variance"
        yield fault("weak-inputs", first.name, what)


def shrinking(known: Evidence) -> Iterator[Finding]:
    """The first layer whose outputs are far smaller than what comes in, though not zero."""
    sizes = [batches.typical("norm") / math.sqrt(max(batches.typical("count"), 1)) for batches in known.inputs.values()]
    before = min(sizes, default=math.nan)
    for layer in known.layers:
        if layer.whole or layer.output is None or not layer.output.count:
            continue
        size = layer.output.rms
        if layer.output.nonfinite or size > 1 / SIGNAL.shrunk:
            return  # what comes later is of weights that are lost
        if 0 < size < SIGNAL.shrunk * before:
            what = f"the root mean square of its outputs is {size:.1e}, and {before:.1e} before it"
            causes = ("normalisation", "initialisation") if layer.kind in NORMS else ()
            yield fault("shrinking-signal", layer.name, what, causes=causes)
            return
        before = size


def signal(known: Evidence) -> Iterator[Finding]:
    """Outputs that grow on their way through the net."""
    rows = [layer for layer in known.layers if layer.output is not None and not layer.whole and layer.output.count]
    sizes = [(layer.name, layer.output.rms) for layer in rows if layer.output is not None and math.isfinite(layer.output.rms)]
    if len(sizes) < SIGNAL.layers:
        return
    least, late = SIGNAL.grown * max(sizes[0][1], 1.0), [size for _, size in sizes[len(sizes) // 2 :]]
    if max(late) > least:
        where = next(name for name, size in sizes if size > least)
        yield fault("growing-signal", where, f"the root mean square of outputs grows from {sizes[0][1]:.1e} to {max(late):.1e}")


RULES = (
    nonfinite,
    never_ran,
    dead,
    silent_blocks,
    saturated,
    equal_units,
    outliers,
    weak_inputs,
    linear_net,
    shrinking,
    signal,
    gradients,
)
"""Each looks at what is known of a training, and yields what it finds."""
