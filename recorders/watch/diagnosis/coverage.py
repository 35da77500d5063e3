"""Coverage: which kinds of faults were looked for, in how many layers, and what to record for the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TypeAlias

from recorders._torch import outside_modes
from recorders.recordings.recording import Subrecording
from recorders.watch.diagnosis.evidence import Evidence
from recorders.watch.diagnosis.layer_rules import CURVES, counts_nonfinite, curve, largest_and_typical
from recorders.watch.overview import Layer

_DIED = "units that died on the way"
_Tells: TypeAlias = Callable[[Layer], bool]
_KINDS: dict[str, tuple[_Tells, str]] = {
    "NaN and infinity": (
        lambda layer: bool(layer.since) or any(map(counts_nonfinite, (layer.output, layer.gradient, layer.weight_gradient))),
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
        lambda layer: layer.units is not None and curve(layer) is not None,
        "record ForwardMonitor(Summary('channels')) of the activation functions",
    ),
    "outlier features": (
        lambda layer: largest_and_typical(layer) is not None,
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


def coverage(evidence: Evidence, parts: Mapping[str, Subrecording]) -> tuple[list[str], list[str]]:
    """The kinds of faults that were not examined, each with what to record; and those that were, each with in how many layers."""
    layers, calls, counting = evidence.layers, evidence.calls, (number_counting(parts), len(parts))
    examined, unexamined = [], []
    for kind, (tells, remedy) in _KINDS.items():
        count, most = sum(map(tells, layers)), len(layers)
        if kind == "NaN and infinity" and not count:
            count, most = sum(map(counts_nonfinite, calls.values())), most + len(calls)
            count, most = (count, most) if count else counting
        if kind == "saturated units":
            curved = [layer for layer in layers if layer.kind in CURVES]
            missing = not layers or any(layer.units is None for layer in curved)
        else:
            missing = count < 2 if kind.startswith("gradients") else not count
        if kind == _DIED:  # is examined with dead units; without these there is no layer to record it of
            missing, count = missing and any(layer.dead is not None for layer in layers), 0
        if missing:
            unexamined.append(f"{kind}: {remedy}")
        elif count:
            examined.append(f"{kind}: {count} of {most}")
    if copies := sum(bool(part.copies) for part in parts.values()):
        examined.append(f"copies of ranks: {copies} of {len(parts)}")
    if still := [layer.name for layer in layers if layer.still and layer.trained is None and not layer.has_gradients]:
        unexamined.append(f"weights that never changed, perhaps frozen on purpose: {', '.join(still)}")
    return unexamined, examined


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
