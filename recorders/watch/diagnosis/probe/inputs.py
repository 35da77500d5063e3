"""Rules on inputs: which parts of them have an effect, and which none."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from recorders.capture.operands import mapped
from recorders.recordings.display import shown_name
from recorders.watch.diagnosis.finding import Finding, fault
from recorders.watch.diagnosis.limits import PROBE
from recorders.watch.diagnosis.probe.example import Example
from recorders.watch.diagnosis.probe.probe import Probe, Skip, is_continuous, is_mask, off, rounding

GROUPS = 16
"""In how many parts an axis of the inputs is replaced, one after the other, at most."""


def inputs_used(probe: Probe) -> Iterator[Finding]:
    """Most of what comes in has an effect, and what a mask leaves out has none."""
    if not probe.views:
        raise Skip("")
    if probe.seen.draws:
        raise Skip("the net draws random numbers, which may choose what it reads")
    tensors = probe.few.samples
    for path, tensor in tensors.items():
        if tensor.ndim < 2 or (is_mask(tensor) and len(tensors) > 1) or tensor.dtype == torch.bool:
            continue
        full = float(_effects_of(probe, path, [slice(None)], 1).amax())
        if full < 1e-6:  # an argument without effect, such as labels
            continue
        for axis in range(1, tensor.ndim):
            found = _along(probe, path, axis, full)
            if found is not None:
                yield found
                break


def _parts(size: int) -> list[slice]:
    each = -(-size // GROUPS)
    return [slice(start, min(start + each, size)) for start in range(0, size, each)]


def _replaced_parts(probe: Probe, path: str, parts: Sequence[slice], axis: int) -> Example:
    """The example with parts along an axis of an input replaced by those of other samples."""
    others = probe.others[path]

    def replaced(name: str, tensor: Tensor) -> Tensor:
        if name != path:
            return tensor
        found = tensor.movedim(axis, 0).clone()
        for part in parts:
            found[part] = others.movedim(axis, 0)[part]
        return found.movedim(0, axis)

    return probe.few.map_samples(replaced)


def _effects_of(probe: Probe, path: str, parts: Sequence[slice], axis: int) -> Tensor:
    return probe.effects(probe.run(_replaced_parts(probe, path, parts, axis)))


def _along(probe: Probe, path: str, axis: int, full: float) -> Finding | None:
    """A finding if most parts along an axis have no effect."""
    tensor, others = probe.few.samples[path], probe.others[path]
    size = tensor.shape[axis]
    if size < 3:
        return None
    parts, padding = _parts(size), padding_of(probe, path) if axis == 1 else None
    moved, moved_others = tensor.movedim(axis, 0), others.movedim(axis, 0)
    counted = torch.stack([(moved[part] != moved_others[part]).movedim(1, 0).flatten(1).any(1) for part in parts], 1).cpu()
    effects = torch.full(counted.shape, math.nan, dtype=torch.float64, device="cpu")
    for place, part in enumerate(parts):  # (samples, parts)
        if bool(counted[:, place].any()):
            effects[:, place] = _effects_of(probe, path, [part], axis)
        answered = int((effects > 1e-7 * max(full, 1.0)).any(0).sum())
        if padding is None and answered > (1 - PROBE.ignored) * len(parts):
            return None
    answers = effects > 1e-7 * max(full, 1.0)
    if padding is not None:
        held, left = (torch.stack([(padding == which)[:, part].all(1).cpu() for part in parts], 1) for which in (False, True))
        real, out = answers[held & counted], answers[left & counted]
        if len(real) and len(out) and not bool(real.any()) and float(out.double().mean()) > 0.5:
            silent = replaced_where(probe, path, ~padding)
            return fault(
                "mask-inverted", shown_name(silent_place(probe, silent)), "only the padding has an effect, and no other position"
            )
        counted = held & counted
    judged = counted.any(0)
    used = (answers & counted).any(0)
    if int(judged.sum()) < 3 or int(used.sum()) >= (1 - PROBE.ignored) * int(judged.sum()) or not bool(used.any()):
        return None
    if _fades(probe, path, axis, [part for part, one in zip(parts, used.tolist(), strict=True) if one], effects):
        return None
    unused = [part for part, one, seen in zip(parts, used.tolist(), judged.tolist(), strict=True) if seen and not one]
    layer = shown_name(silent_place(probe, _replaced_parts(probe, path, unused, axis)))
    of = "positions" if size <= GROUPS else "parts"
    what = f"{len(unused)} of {int(judged.sum())} {of} along axis {axis} of an input {tuple(tensor.shape)} have no effect at all"
    return fault("ignores-inputs", layer, what)


def directions(probe: Probe) -> Iterator[Finding]:
    """Both directions of a recurrent net are read."""
    both = [name for name, module in probe.net.modules.items() if isinstance(module, nn.RNNBase) and module.bidirectional]
    if not both or not probe.views:
        raise Skip("")
    for name in both:
        backward, forward = (
            float(probe.effects(probe.run(probe.few, change={name: partial(_without, batch=batch, backward=way)})).amax())
            for way in (True, False)
            for batch in [0 if getattr(probe.net.module(name), "batch_first", False) else 1]
        )
        if (backward == 0) != (forward == 0):
            unread = "backward" if backward == 0 else "forward"
            yield fault("ignores-inputs", name, f"what it gives in the {unread} direction has no effect")


def _without(output: Any, *, batch: int, backward: bool) -> Any:
    """The outputs and the states of a recurrent net of two directions, with one direction of each sample that of another."""
    outputs, states = output
    if not isinstance(outputs, Tensor) or outputs.ndim != 3:
        raise Skip("")

    def other(halves: Tensor, axis: int, samples: int) -> Tensor:
        ways = list(halves.unbind(axis))
        ways[backward] = ways[backward].roll(1, samples - (samples > axis))
        return torch.stack(ways, axis)

    width = outputs.shape[-1]
    exchanged = other(torch.unflatten(outputs, -1, (2, -1)), 2, batch).reshape(*outputs.shape[:-1], width)
    return exchanged, mapped(states, lambda state: other(torch.unflatten(state, 0, (-1, 2)), 1, 2).flatten(0, 1))


def _fades(probe: Probe, path: str, axis: int, used: Sequence[slice], effects: Tensor) -> bool:
    """Whether effects become smaller from position to position, as in a recurrent net, and so end by rounding."""
    sizes = effects.nan_to_num(0).amax(0)
    found = [float(size) for size in sizes if size > 0]
    for part in [*used[:2], *used[-2:]] if len(used) > 4 else used:
        length = part.stop - part.start
        if length > 1:
            steps = sorted({2**power for power in range(5) if 2**power < length} | {0})
            alone = sorted({part.start + step for step in steps} | {part.stop - 1 - step for step in steps})
            found += [float(_effects_of(probe, path, [slice(at, at + 1)], axis).amax()) for at in alone]
    found = [size for size in found if size > 0]
    return min(found) < PROBE.fades * max(found)


def silent_place(probe: Probe, changed: Example) -> str:
    """The module from which on a change of the inputs has no effect but rounding: the one after the last whose outputs differ."""
    before, after = probe.calls(probe.few, fresh=True), probe.calls(changed, fresh=True)
    silent = [
        not any(
            bool((off(a, b) > rounding(a, b)).any())
            for a, b in zip(one.outputs, other.outputs, strict=False)
            if a.shape == b.shape and a.numel()
        )
        for one, other in zip(before, after, strict=False)
    ]
    last = max((at for at, one in enumerate(silent) if not one), default=-1)
    return before[last + 1].name if last + 1 < len(before) else ""


def padding_of(probe: Probe, path: str) -> Tensor | None:
    """Which positions of an input are padding, (samples, positions), by its lengths or its mask; None if that is not known."""
    tensor = probe.few.samples[path]
    length = tensor.shape[1]
    positions = torch.arange(length, device=tensor.device)
    for name, other in probe.few.samples.items():
        if name == path:
            continue
        if are_lengths(other, length):
            return positions >= other[:, None]
        if other.shape == tensor.shape[:2] and is_mask(other) and bool(other.any()) and not bool(other.all()):
            mask = other.bool()
            constant = [_is_constant(tensor[which]) for which in (mask, ~mask)]
            if constant[0] != constant[1]:
                return mask if constant[0] else ~mask
            if "pad" in name.lower():
                return mask
            if "attention" in name.lower():
                return ~mask
    return None


def are_lengths(tensor: Tensor, length: int) -> bool:
    """Whether it holds the lengths of sequences, of at most this length."""
    whole = tensor.ndim == 1 and not is_continuous(tensor) and tensor.dtype != torch.bool
    return whole and bool(((tensor >= 1) & (tensor <= length)).all())


def _is_constant(values: Tensor) -> bool:
    return bool((values == values[:1]).all())


def replaced_where(probe: Probe, path: str, where: Tensor) -> Example:
    """The example with other values in an input at some positions."""
    others = probe.others[path]

    def replaced(name: str, tensor: Tensor) -> Tensor:
        wide = where.reshape(*where.shape, *[1] * (tensor.ndim - 2)) if name == path else where
        return torch.where(wide, others, tensor) if name == path else tensor

    return probe.few.map_samples(replaced)
