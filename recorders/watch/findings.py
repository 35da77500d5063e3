"""Findings: likely faults of a net that its recording shows, each with a reason and a remedy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

from torch import Tensor

from recorders._torch import outside_modes
from recorders.recorder.recorder import Recorder
from recorders.recorder.report import unexpected
from recorders.recordings.display import shown_name
from recorders.recordings.recording import Recording, Subrecording
from recorders.watch.fault import (
    LINEAR,
    SATURATED_SLOPE,
    UNIT_SHARE,
    UPDATE_LIMITS,
    UPDATE_RANGE,
    WITHOUT_WEIGHTS,
    Finding,
    Findings,
    fault,
    gradients_by_depth,
    is_massive,
    relative_slope,
    shown_outliers,
    shown_range,
)
from recorders.watch.over_time import findings_over_time
from recorders.watch.overview import Layer, overview, pushed
from recorders.watch.spread import Spread
from recorders.watch.timeline import Timeline

__all__ = ["UPDATE_RANGE", "Finding", "Findings", "findings", "left_out_finding", "number_counting"]

_CURVES = {"Tanh": "tanh", "Sigmoid": "sigmoid"}
"""The curves of activation functions that saturate, by class of the module."""
SHOWN = 16
"""The most dead units that a notice names."""


def findings(recorded: Recorder | Recording | Timeline) -> Findings:
    """The likely faults of the net, worst first; empty if none was found.

    Examines what `overview` returns: NaN and infinity, layers that never ran, dead units, saturated units, outlier features,
    gradients that vanish or explode with depth, and weights that change too much, too little or not at all. What was not recorded
    is not examined; `findings(...).examined` says what was, and in how many layers, `unexamined` what was not, and what to record
    for it. An empty list that prints "nothing was examined" says nothing of the net. Thresholds, and their sources, are in
    `recorders.watch.fault`.
    A timeline also tells since when: see `findings_over_time`.

    Dead units of which a layer has no more than `fault.UNIT_SHARE` are no fault, because healthy nets have some too; they are in
    `findings(...).notices`, by their numbers, and in what is printed.

    Weights with `requires_grad=False` are frozen on purpose, which is no fault. A recording does not tell that, so weights that
    never changed are a fault there only if gradients of them came; else `unexamined` names them.

    Args:
        recorded: a recorder, a recording, or a timeline that an `Inspector` wrote. Only a recorder knows why something was not
            recorded.

    >>> import torch
    >>> from recorders import ForwardMonitor
    >>> from reducers import Activity
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
    >>> _ = torch.nn.init.constant_(net[0].bias, -100.0)
    >>> with Recorder(ForwardMonitor(Activity())).modules(net, types=torch.nn.ReLU) as recorder:
    ...     _ = net(torch.ones(8, 2))
    >>> [(finding.layer, finding.what) for finding in findings(recorder)]
    [('1', '3 of 3 units are dead: they were never active')]
    """
    if isinstance(recorded, Timeline):
        return findings_over_time(recorded)
    layers, calls = overview(recorded), pushed(recorded)
    parts = recorded.snapshot()
    dead, few_dead = _dead(layers)
    found = [
        *(list(_nonfinite(layers, calls)) or left_out_finding(parts)),
        *_never_ran(layers),
        *dead,
        *_saturated(layers),
        *_outliers(layers),
    ]
    return Findings(
        [*found, *_gradients(layers), *_updates(layers)], *_coverage(layers, calls, (number_counting(parts), len(parts))), few_dead
    )


_DIED = "units that died on the way"
_Tells: TypeAlias = Callable[[Layer], bool]
_KINDS: dict[str, tuple[_Tells, str]] = {
    "NaN and infinity": (
        lambda layer: bool(layer.since) or any(map(_counts_nonfinite, (layer.output, layer.gradient, layer.weight_gradient))),
        "record a Summary of outputs, gradients or the loss",
    ),
    "layers that never ran": (
        lambda layer: "output" in layer.silent or layer.output is not None or layer.dead is not None or "output" in layer.since,
        "record ForwardMonitor(Summary()) of the layers",
    ),
    "dead units": (
        lambda layer: layer.dead is not None or layer.idle is not None,
        "record ForwardMonitor(Product(activity=Activity('channels'), idle=Idle('channels'))) of the activation functions",
    ),
    _DIED: (
        lambda layer: layer.idle is not None,
        "record Idle('channels') beside Activity, as presets.health() does",
    ),
    "saturated units": (
        lambda layer: layer.units is not None and _curve(layer) is not None,
        "record ForwardMonitor(Summary('channels')) of the activation functions",
    ),
    "outlier features": (
        lambda layer: _largest_and_typical(layer) is not None,
        "record ForwardMonitor(Summary('channels')) of the layers",
    ),
    "gradients that vanish or explode": (
        lambda layer: layer.gradient is not None and math.isfinite(layer.gradient.norm),
        "record BackwardMonitor(Summary()) of several layers",
    ),
    "updates that are too large or too small": (
        lambda layer: layer.update is not None or "update" in layer.silent,
        "record ParameterUpdateMonitor(...), see overview",
    ),
}
"""By kind of fault, whether a layer tells of it, and what to record if none does."""


def _counts_nonfinite(spread: Spread | None) -> bool:
    return spread is not None and not math.isnan(spread.nonfinite)


def _coverage(layers: list[Layer], calls: dict[str, Spread], counting: tuple[int, int]) -> tuple[list[str], list[str]]:
    """The kinds of faults that were not examined, each with what to record; and those that were, each with in how many layers."""
    examined, unexamined = [], []
    for kind, (tells, remedy) in _KINDS.items():
        count, most = sum(map(tells, layers)), len(layers)
        if kind == "NaN and infinity" and not count:
            count, most = sum(map(_counts_nonfinite, calls.values())), most + len(calls)
            count, most = (count, most) if count else counting
        if kind == "saturated units":
            curved = [layer for layer in layers if layer.kind in _CURVES]
            missing = not layers or any(layer.units is None for layer in curved)
        else:
            missing = count < 2 if kind.startswith("gradients") else not count
        if kind == _DIED:  # is examined with dead units; without these there is no layer to record it of
            missing, count = missing and any(layer.dead is not None for layer in layers), 0
        if missing:
            unexamined.append(f"{kind}: {remedy}")
        elif count:
            examined.append(f"{kind}: {count} of {most}")
    if still := [layer.name for layer in layers if _is_still(layer) and layer.trained is None and not _has_gradients(layer)]:
        unexamined.append(f"weights that never changed, perhaps frozen on purpose: {', '.join(still)}")
    return unexamined, examined


def _nonfinite(layers: list[Layer], calls: dict[str, Spread]) -> Iterator[Finding]:
    """One finding, where it began: NaN spreads to what is computed later, from outputs to the loss and to gradients."""
    places: list[tuple[str, str]] = []
    for role, label in (("output", "outputs"), ("gradient", "gradients"), ("weight_gradient", "weight gradients")):
        since = {layer.name: layer.since[role] for layer in layers if layer.since.get(role, -1) >= 0}
        hit = [
            layer
            for layer in layers
            if layer.name in since or ((spread := getattr(layer, role)) is not None and spread.nonfinite > 0)
        ]
        if hit:
            ordered = hit if role == "output" else hit[::-1]  # gradients are computed from the last layer on
            first = min(ordered, key=lambda layer: since.get(layer.name, math.inf))
            spread = getattr(first, role)
            share = f"{spread.nonfinite:,} of {spread.count + spread.nonfinite:,} " if _counts_nonfinite(spread) else ""
            what = f"{share}{label} are NaN or infinite"
            what += f", for the first time in observation {since[first.name]}" if first.name in since else ""
            places.append((first.name, what + (f", and in {len(hit) - 1} more layers" if len(hit) > 1 else "")))
    for name, spread in calls.items():
        if spread.nonfinite > 0:
            places.append((name, f"{spread.nonfinite:,} of {spread.observations:,} values are NaN or infinite"))
    if places:
        (name, what), *later = places
        also = "".join(f"; {place}: {text}" for place, text in later)
        yield fault("nonfinite", name, what + also)


def _never_ran(layers: list[Layer]) -> Iterator[Finding]:
    called = [layer.name for layer in layers if "output" not in layer.silent]
    ran = {"(net)"} if called else set()  # modules of which a part was called, as those of a GAN are
    ran |= {name[:at] for name in called for at, sign in enumerate(name) if sign == "."}
    for layer in layers:
        # Nobody calls containers, and the attention of PyTorch uses the weights of its out_proj without calling it. What has no
        # weights has nothing to learn: the dropout of attention, which is fused, is not called.
        used = (
            layer.kind in ("NonDynamicallyQuantizableLinear", "ModuleList", "ModuleDict", "ParameterList", "ParameterDict")
            or (layer.kind in WITHOUT_WEIGHTS if layer.has_weights is None else not layer.has_weights)
            or layer.name in ran
            or layer.shared
            or "output" in layer.failed
            or _has_gradients(layer)
            or layer.ratio_at(1.0) > 0
        )
        if "output" in layer.silent and not used:
            yield fault("never ran", layer.name, "no output was recorded" + _because(layer.silent["output"]))


def _has_gradients(layer: Layer) -> bool:
    return layer.weight_gradient is not None and layer.weight_gradient.norm > 0


def _dead(layers: list[Layer]) -> tuple[list[Finding], list[Finding]]:
    """The layers in which most units are dead, and those in which some are."""
    most: list[Finding] = []
    some: list[Finding] = []
    before: Tensor | None = None  # which units were dead in the layer before
    for layer in layers:
        never, dead = layer.dead, _dead_units(layer)
        if dead is not None and dead.any() and not _inherited(dead, before):
            units = dead.flatten().nonzero().flatten().tolist()
            found = most if len(units) > UNIT_SHARE * dead.numel() else some
            which = "" if found is most else f" ({', '.join(map(str, units[:SHOWN]))}{', ...' if len(units) > SHOWN else ''})"
            how = "they were never active"
            if layer.idle is not None and (never is None or not never.equal(dead)):
                since = int(layer.idle.flatten()[units].min())
                how = f"they were not active in the last {since} of {layer.idle_of[0]} observations, or longer"
            found.append(fault("dead", layer.name, f"{len(units)} of {dead.numel()} units{which} are dead: {how}"))
        before = dead
    return most, some


def _dead_units(layer: Layer) -> Tensor | None:
    """Which units are dead; None of a layer of which they are no units, or unknown."""
    return None if layer.kind in LINEAR or not layer.first else layer.gone


def _inherited(dead: Tensor, before: Tensor | None) -> bool:
    """Whether the units were dead in the layer before, which may happen to a pooling layer."""
    return before is not None and dead.shape == before.shape and bool((before >= dead).all())


def _saturated(layers: list[Layer]) -> Iterator[Finding]:
    for layer in layers:
        curve = _curve(layer)
        # The last sigmoid gives a probability, which may be near 0 or 1.
        if layer.units is None or curve is None or (curve == "sigmoid" and layer is layers[-1]):
            continue
        mean = layer.units["mean"]
        square = layer.units["var"].nan_to_num() + mean.square()
        slope = relative_slope(mean, square, curve)
        stuck = int((slope < SATURATED_SLOPE).sum())
        if stuck > UNIT_SHARE * slope.numel():
            what = f"{stuck} of {slope.numel()} units are saturated: nearly all outputs lie at the ends of the {curve}"
            yield fault("saturated", layer.name, what)


def _curve(layer: Layer) -> str | None:
    """The activation function if it is one that saturates, else None."""
    if layer.kind:
        return _CURVES.get(layer.kind)
    # If the class is unknown: outputs that come near -1 or 1 and never exceed them are those of a tanh.
    out = layer.output
    squashed = out is not None and -1 <= out.low < 0 and out.high <= 1 and max(-out.low, out.high) > 0.99
    return "tanh" if squashed else None


def _outliers(layers: list[Layer]) -> Iterator[Finding]:
    """One finding, where they begin: later layers hand them on."""
    known = {layer.name: sizes for layer in layers if (sizes := _largest_and_typical(layer)) is not None}
    hit = [name for name, sizes in known.items() if is_massive(*sizes)]
    if hit:
        yield fault("outliers", hit[0], shown_outliers(*known[hit[0]], len(hit) - 1))


def _largest_and_typical(layer: Layer) -> tuple[float, float] | None:
    """The largest magnitude of the outputs, and the typical one: a quartile, or the median of the root mean squares of features."""
    if layer.output is None or math.isnan(layer.output.high):
        return None
    largest = max(-layer.output.low, layer.output.high)
    if not math.isnan(layer.output.quartile):
        return largest, layer.output.quartile
    if layer.units is None or layer.units["mean"].numel() < 3:
        return None
    return largest, (layer.units["var"].nan_to_num() + layer.units["mean"].square()).sqrt().nanmedian().item()


def _gradients(layers: list[Layer]) -> Iterator[Finding]:
    norms = {layer.name: layer.gradient.norm for layer in layers if layer.gradient is not None and _is_inside(layer)}
    yield from gradients_by_depth(norms)


def _is_inside(layer: Layer) -> bool:
    """Whether its gradient tells of the depth of the net: not that of a loss, which is 1, nor of a module that contains layers."""
    gradient = layer.gradient
    alone = gradient is not None and gradient.count + gradient.nonfinite == gradient.observations > 0
    return not (layer.whole or alone)


def _updates(layers: list[Layer]) -> Iterator[Finding]:
    low, high = UPDATE_LIMITS
    for layer in layers:
        if "output" in layer.silent:
            continue
        if _is_still(layer):
            if layer.trained or (layer.trained is None and _has_gradients(layer)):
                yield fault("frozen", layer.name, "the weights never changed" + _because(layer.silent.get("update", "")))
        elif layer.ratio > high and layer.growth > 1:
            what = f"updates are too large: a typical step changes the weights by {shown_range(layer.ratio)}"
            yield fault("too large", layer.name, what)
        elif layer.ratio_at(1.0) < low:  # the largest step, because steps may get small as a training converges
            what = f"updates are too small: the largest step changes the weights by {shown_range(layer.ratio_at(1.0))}"
            yield fault("too small", layer.name, what)


def _is_still(layer: Layer) -> bool:
    """Whether the weights never changed."""
    return "update" in layer.silent or (layer.update is not None and not bool(layer.update.any()))


def _because(reason: str) -> str:
    return f": {reason}" if reason else ""


def left_out_finding(parts: Mapping[str, Subrecording]) -> list[Finding]:
    """One finding, of the first subrecorder of which elements were left out; none if there is none."""
    hit = unexpected(parts)
    for name, holes in hit.items():
        leaf, share = next(iter(holes.items()))
        also = f", and in {len(hit) - 1} more subrecorders" if len(hit) > 1 else ""
        what = f"{share}{f' in {leaf}' * bool(leaf)}: they are NaN or infinite, and results leave them out{also}"
        return [fault("nonfinite", shown_name(name), what)]
    return []


def number_counting(parts: Mapping[str, Subrecording]) -> int:
    """Of how many subrecorders the reducer counts what it leaves out."""
    return sum(map(_counts, parts.values()))


def _counts(part: Subrecording) -> bool:
    reducer = part.reducer
    try:
        states = [state for state in part.states.values() if state]
        return reducer is not None and any(outside_modes(reducer.nonfinite, state) is not None for state in states)
    except Exception:  # a reducer of the user's may raise anything
        return False
