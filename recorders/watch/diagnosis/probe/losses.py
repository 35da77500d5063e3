"""Rules on the loss: which cross entropy of outputs and target it is."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from recorders.watch.diagnosis.finding import Finding, fault
from recorders.watch.diagnosis.limits import PROBE
from recorders.watch.diagnosis.probe.outputs import class_axis, judged, target_of
from recorders.watch.diagnosis.probe.probe import Probe, Skip, is_continuous

MOST_CLASSES = 64
"""The most classes of which it is asked whether the net says them."""


def loss_of_outputs(probe: Probe) -> Iterator[Finding]:
    """The loss is the cross entropy of outputs and target as they lie, and of no other position.

    It was recorded before the last step, with dropout. So it is compared by far, and told only if another reading fits.
    """
    if probe.loss is None or not math.isfinite(probe.loss) or not probe.views:
        raise Skip("")
    outputs = probe.run_whole()
    target = target_of(probe, probe.whole.count)
    if target is None or is_continuous(target):
        raise Skip("")
    for path in judged(probe, outputs, target):
        axis = class_axis(outputs[path], target)
        if axis is None:
            continue
        found = _read(probe, outputs[path], target, axis)
        if found:
            kind, where, what = found
            yield fault(kind, where, f"the loss is {probe.loss:.3g}, {what}")
            return


def classes_told(probe: Probe) -> Iterator[Finding]:
    """A net that tells most classes also predicts each of the others now and then."""
    outputs = probe.run_whole()
    target = target_of(probe, probe.whole.count)
    if target is None or is_continuous(target) or not probe.views:
        raise Skip("")
    shift = is_ahead(probe, target)
    for path in judged(probe, outputs, target):
        axis = class_axis(outputs[path], target)
        if axis is None:
            continue
        said, meant = outputs[path].argmax(axis), target
        if shift:
            said, meant = said[:, :-shift], meant[:, shift:]
        said, meant = said[meant >= 0], meant[meant >= 0]
        counts = {label: int((meant == label).sum()) for label in sorted({*meant.tolist()})[:MOST_CLASSES]}
        unsaid = [label for label, count in counts.items() if count >= PROBE.labels and not bool((said == label).any())]
        rest = ~torch.isin(meant, torch.tensor(unsaid, device=meant.device))
        right = float((said == meant)[rest].double().mean()) if bool(rest.any()) else 0.0
        known = len({*said[rest].tolist()} & {*counts})
        if unsaid and known > max(1, len(unsaid)) and right > PROBE.told:
            what = f"the net never says class {unsaid[0]}, which {counts[unsaid[0]]} of {len(meant)} labels are; "
            what += f"of the others {right:.0%} are right"
            yield fault("class-ignored", "loss", what)
            return


def shifts_target(probe: Probe) -> bool:
    """Whether the loss was far nearer to that of predicting the next token of a target than to that of the target as it is."""
    if probe.loss is None or not math.isfinite(probe.loss):
        return False
    outputs, target = probe.run_whole(), target_of(probe, probe.whole.count)
    if target is None or is_continuous(target) or is_ahead(probe, target) != 1:
        return False
    for path in judged(probe, outputs, target):
        axis = class_axis(outputs[path], target)
        if axis is not None and int(target.max()) < outputs[path].shape[axis]:
            logits = outputs[path].movedim(axis, 1)
            ahead, same = (abs(_entropy(logits, target, shift) - probe.loss) for shift in (1, 0))
            return ahead < PROBE.loss_near * same
    return False


def _read(probe: Probe, output: Tensor, target: Tensor, axis: int) -> tuple[str, str, str] | None:
    logits, loss = output.movedim(axis, 1), probe.loss or 0.0
    classes = logits.shape[1]
    if int(target.max()) >= classes:
        return None
    shift = is_ahead(probe, target)
    meant = _entropy(logits, target, shift)
    if not math.isfinite(meant) or abs(meant - loss) <= PROBE.loss_off * max(abs(loss), 0.1):
        return None

    def fits(other: float) -> bool:
        return abs(other - loss) <= min(PROBE.loss_near * abs(meant - loss), max(0.5 * abs(loss), 0.05))

    if loss < 0 and fits(-meant):
        return "ascends", "loss", "which is the cross entropy with the wrong sign: it falls without end as the net errs"
    if logits.ndim > 2 and not shift:
        readings = (output.reshape(-1, classes), output.transpose(1, -1).reshape(-1, classes), _as_first(output, classes))
        if any(fits(_entropy(one, target.reshape(len(one), *one.shape[2:]), 0)) for one in readings):
            what = f"that of outputs {tuple(output.shape)} which are reshaped, not transposed; else it would be {meant:.3g}"
            return "outputs-reshaped", "(net)", what
    if shift is not None and logits.ndim == 3:
        for by in (0, 1, 2, 3):
            if by != shift and fits(_entropy(logits, target, by)):
                ahead = by + (1 - shift)
                what = f"that of predictions {ahead} positions ahead; of those one ahead it would be {meant:.3g}"
                return "targets-displaced", "target", what
    return None


def _as_first(output: Tensor, classes: int) -> Tensor:
    """The outputs as (samples, classes, positions), taken as they lie in memory."""
    return output.reshape(len(output), classes, -1)


def is_ahead(probe: Probe, target: Tensor) -> int | None:
    """By how many positions the loss has to shift the target of a net that predicts the next token; None of another net."""
    if target.ndim != 2 or float((target >= 0).double().mean()) < 0.5:  # some are to be filled in
        return None
    for tokens in probe.whole.inputs.values():
        if tokens.shape == target.shape and not is_continuous(tokens):
            counts = target >= 0
            if float((tokens == target)[counts].double().mean()) > 0.99:
                return 1
            if float((tokens[:, 1:] == target[:, :-1])[counts[:, :-1]].double().mean()) > 0.99:
                return 0
    return None


def _entropy(logits: Tensor, target: Tensor, shift: int | None) -> float:
    if shift:
        logits, target = logits[:, :, :-shift], target[:, shift:]
    return float(F.cross_entropy(logits.double(), target.long()))
