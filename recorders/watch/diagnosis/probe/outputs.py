"""Rules on what a net returns: which activation function or normalisation comes last, and along which axis."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from recorders.capture.operands import leaves
from recorders.recordings.display import shown_name
from recorders.watch.diagnosis.finding import Finding, fault
from recorders.watch.diagnosis.limits import PROBE
from recorders.watch.diagnosis.probe.lineage import NORMALISING, Activation
from recorders.watch.diagnosis.probe.probe import Probe, Skip, is_continuous

BOUNDED = frozenset({"relu", "sigmoid", "softmax"})
"""Activation functions whose outputs are never negative."""
SQUASHING = frozenset({"sigmoid", "softmax", "log_softmax"})
"""Those that make probabilities, for which half of all numbers are negative."""
HIDDEN = {"silu": "SiLU", "gelu": "GELU"}
"""Those that are for hidden layers alone: they give hardly anything negative, and no end above."""


def activations_apart(probe: Probe) -> Iterator[Finding]:
    """What becomes probabilities was not made positive before; and no softmax runs along one element."""
    lineage, paths = probe.seen.lineage, judged(probe, probe.base, target_of(probe, probe.few.count))
    for one in (lineage.last[path] for path in paths if path in lineage.last and lineage.last[path].size == 1):
        what = "its softmax runs along an axis of one element, so that it always gives 1"
        yield fault("softmax-axis", shown_name(one.module), what, causes=("output-activation", "wrong-axis"))
        return
    if lineage.inner_softmax is not None:
        what = f"its softmax is between layers: the {lineage.inner_softmax.size} numbers that the next one reads sum to 1"
        causes = ("output-activation", "vanishing-gradients", "saturation")
        yield fault("softmax-axis", shown_name(lineage.inner_softmax.module), what, causes=causes)
        return
    for one in lineage.in_a_row:
        if one.name in SQUASHING and one.after in BOUNDED:
            what = f"a {one.name} reads what a {one.after} gives, which is never negative"
            yield fault("activations-in-a-row", shown_name(one.module), what)
            return


def last_activation(probe: Probe) -> Iterator[Finding]:
    """The last activation function lets outputs be what the target is."""
    lineage, target = probe.seen.lineage, target_of(probe, probe.few.count)
    if not probe.views:
        raise Skip("")
    for path in judged(probe, probe.base, target):
        one, output = lineage.last.get(path), probe.base[path]
        if one is None or not output.numel():
            continue
        found = _of_classes(one, output, target) if target is not None and not is_continuous(target) else None
        found = found or _of_features(one, output) or _of_numbers(one, output, target, probe.few.count)
        if found is not None:
            yield found
            return


def judged(probe: Probe, outputs: Mapping[str, Tensor], target: Tensor | None) -> list[str]:
    """The outputs that the target is of, by their shapes, and if these differ, by their names; if none is, the only output."""
    paths = [path for path in probe.views if path in outputs]
    fitting = [path for path in paths if target is not None and _fits(outputs[path], target)]
    if len({outputs[path].shape for path in fitting}) > 1:  # hidden states may be beside logits
        return [path for path in fitting if "logit" in path.lower()]
    return fitting or (paths if len(paths) == 1 else [])


def _fits(output: Tensor, target: Tensor) -> bool:
    return output.numel() == target.numel() if is_continuous(target) else class_axis(output, target) is not None


def class_axis(output: Tensor, target: Tensor) -> int | None:
    """The axis of the classes in outputs that have one axis more than the labels; None if it cannot be told."""
    if output.ndim != target.ndim + 1:
        return None
    axes = [axis for axis in range(1, output.ndim) if (*output.shape[:axis], *output.shape[axis + 1 :]) == tuple(target.shape)]
    return axes[0] if len(axes) == 1 else None


def target_of(probe: Probe, count: int) -> Tensor | None:
    """The target of the first samples, if it is one tensor."""
    found = [tensor for _, tensor in leaves(probe.target)]
    axis = probe.few.batch or 0
    if len(found) != 1 or found[0].ndim <= axis or found[0].shape[axis] < count:
        return None
    return found[0].narrow(axis, 0, count)


def _of_classes(one: Activation, output: Tensor, target: Tensor) -> Finding | None:
    axis = class_axis(output, target)
    if axis is None:
        return None
    if one.name == "relu" and output.shape[axis] > 1:
        what = "a ReLU makes the logits, so none is below 0"
        return fault("rectified-outputs", shown_name(one.module), what)
    if one.name in HIDDEN and output.shape[axis] > 1:
        what = f"a {HIDDEN[one.name]} makes the logits, so hardly any is below 0"
        return fault("rectified-outputs", shown_name(one.module), what)
    if one.name.endswith("softmax") and one.axis is not None and one.axis != axis:
        what = f"its softmax runs along axis {one.axis} of outputs {tuple(output.shape)}, and the classes are along axis {axis}"
        return fault("softmax-axis", shown_name(one.module), what)
    return None


def _of_features(one: Activation, output: Tensor) -> Finding | None:
    """Of a softmax over something else than the features that the last layer gives, whatever the target is."""
    apart = one.name.endswith("softmax") and 1 < one.features != one.size
    if apart and one.axis is not None and one.axis < output.ndim and output.ndim > 2 and one.features in output.shape:
        what = f"its softmax runs along axis {one.axis} of outputs {tuple(output.shape)}, of which it reads {one.features} features"
        return fault("softmax-axis", shown_name(one.module), what)
    return None


def _of_numbers(one: Activation, output: Tensor, target: Tensor | None, samples: int) -> Finding | None:
    """Of outputs that are numbers: a value, a score, or as many as the target has."""
    alike = target is not None and is_continuous(target) and target.numel() == output.numel()
    single = output.numel() == samples
    below = alike and target is not None and bool((target < 0).any())
    counts = alike and target is not None and not below and bool(((target != 0) & (target != 1)).any())  # or rates
    if one.name == "relu" and (below or (single and not counts)):
        what = "a ReLU makes what the net returns, so none of it is below 0, and where it is 0 no gradient comes back"
        return fault("rectified-outputs", shown_name(one.module), what)
    if one.name in HIDDEN and (target is None or below):
        what = f"a {HIDDEN[one.name]} makes what the net returns, so hardly any of it is below 0"
        return fault("rectified-outputs", shown_name(one.module), what)
    few = output.numel() <= PROBE.single * samples
    if one.name in NORMALISING and (single or few or alike):
        what = "a normalisation makes what the net returns, whose scale and mean it then cannot tell"
        return fault("normalised-outputs", shown_name(one.module), what)
    return None
