"""Rules on positions and features of the inputs: which have an effect, and on which outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from recorders.capture.operands import leaves, mapped
from recorders.recordings.display import shown_name
from recorders.watch.diagnosis.finding import Finding, Severity, fault
from recorders.watch.diagnosis.limits import PROBE
from recorders.watch.diagnosis.probe.example import Example
from recorders.watch.diagnosis.probe.probe import Probe, Skip, Wrong, is_continuous, is_mask, off, rounding

__all__ = ["directions", "future", "inputs_used", "order", "others_read", "past_alone"]

GROUPS = 16
"""In how many parts an axis of the inputs is replaced, one after the other, at most."""
# Time


class Positions(NamedTuple):
    """An input that is a sequence: its path, and the number of positions."""

    path: str
    length: int


def _sequence(probe: Probe, floats: bool = True) -> Positions:
    """The input with tokens, (samples, positions), or else with features, (samples, positions, features).

    Raises:
        Skip: there is none.
    """
    if not probe.views:
        raise Skip("")
    tensors = {path: tensor for path, tensor in probe.few.inputs.items() if not is_mask(tensor)}
    tokens = [path for path, tensor in tensors.items() if tensor.ndim == 2 and not is_continuous(tensor)]
    features = [path for path, tensor in tensors.items() if tensor.ndim == 3 and is_continuous(tensor)]
    for path in [*tokens, *(features if floats else ())]:
        if tensors[path].shape[1] >= 4:
            return Positions(path, tensors[path].shape[1])
    raise Skip("")


def _target_of(probe: Probe, path: str) -> Tensor:
    """The target of the samples in `few`, with samples first, if it has the shape of this input.

    Raises:
        Skip: there is none.
    """
    given = probe.few.samples[path]
    axis = probe.few.batch or 0
    for _, tensor in leaves(probe.target):
        if tensor.ndim > axis:
            own = tensor.movedim(axis, 0)[: len(given)]
            if own.shape == given.shape and is_continuous(own) == is_continuous(given):
                return own.to(given.device)
    raise Skip("")


def future(probe: Probe) -> Iterator[Finding]:
    """A net that is to predict what comes next does not see it."""
    sequence = _sequence(probe)
    given, target = probe.few.samples[sequence.path], _target_of(probe, sequence.path)
    counts = target >= 0 if not is_continuous(target) else torch.ones_like(target, dtype=torch.bool)

    def share(target: Tensor, given: Tensor, counts: Tensor) -> float:
        return float((target == given)[counts].double().mean()) if bool(counts.any()) else 0.0

    shifted = share(target[:, :-1], given[:, 1:], counts[:, :-1])
    same = share(target, given, counts)
    if max(shifted, same) < 0.99 or min(shifted, same) > 0.9:
        raise Skip("")
    cut = sequence.length // 2
    others = probe.others[sequence.path]
    changed = probe.few.map_samples(
        lambda path, tensor: torch.cat((tensor[:, :cut], others[:, cut:]), 1) if path == sequence.path else tensor
    )
    early = _early(sequence.length, cut, probe.few.count)
    after = probe.run(changed)
    told = [early(view(probe.base[path]), view(after[path])) for path, view in probe.views.items()]
    if all(one is None for one in told):
        raise Skip("")
    if shifted > same:
        if any(told):
            what = f"the target is the next token, and outputs before position {cut} change if inputs from there on do"
            place = probe.place(changed, early)
            causes = ("wrong-axis", "mask") if _softmax_over_queries(probe, place) else ()
            yield fault("sees-the-future", shown_name(place), what, causes=causes)
    elif not any(told) and (copied := _copied_share(probe, given)) > PROBE.copies and _reads(probe, sequence.path):
        what = (
            f"the target is the input itself, though outputs do not depend on later inputs; {copied:.0%} of the outputs repeat it"
        )
        yield fault("targets-are-inputs", "target", what)


def _reads(probe: Probe, path: str) -> bool:
    """Whether outputs depend on an input, which a decoder may be given in training only."""
    others = probe.others[path]
    return bool(probe.effects(probe.run(probe.few.map_samples(lambda name, tensor: others if name == path else tensor))).any())


def past_alone(probe: Probe) -> Iterator[Finding]:
    """Attention that is to fill in what is missing reads what comes later, too."""
    sequence = _sequence(probe, floats=False)
    if not probe.seen.attention or any(isinstance(module, nn.RNNBase) for module in probe.net.modules.values()):
        raise Skip("")
    given, target = probe.few.samples[sequence.path], _target_of(probe, sequence.path)
    filled = (target >= 0) & (target != given)
    if bool((target >= 0).all()) or not bool(filled.any()):  # only some of the positions are to be filled in
        raise Skip("")
    if float((target[:, :-1] == given[:, 1:])[target[:, :-1] >= 0].double().mean()) > 0.9:
        raise Skip("")
    cut, others = sequence.length // 2, probe.others[sequence.path]
    after = probe.run(
        probe.few.map_samples(
            lambda path, tensor: torch.cat((tensor[:, :cut], others[:, cut:]), 1) if path == sequence.path else tensor
        )
    )
    early = _early(sequence.length, cut, probe.few.count)
    told = [early(view(probe.base[path]), view(after[path])) for path, view in probe.views.items()]
    told = [one for one in told if one is not None]
    if told and not any(told):
        what = f"tokens are to be filled in, and outputs before position {cut} do not depend on inputs from there on"
        yield fault("sees-only-the-past", shown_name(next(iter(probe.seen.attention))), what)


def others_read(probe: Probe) -> Iterator[Finding]:
    """What a net with attention or a recurrent layer gives for a position depends on others, too."""
    reading = [*probe.seen.attention, *(name for name, one in probe.net.modules.items() if isinstance(one, nn.RNNBase))]
    sequence = _sequence(probe)
    if not reading or probe.seen.draws:
        raise Skip("")
    path, at = sequence.path, sequence.length // 2
    others, padding = probe.others[path], _padding(probe, path)
    own = torch.arange(sequence.length, device=others.device) == at

    def differ(kept: Tensor) -> list[bool]:
        after = probe.run(_replaced_masked(probe, path, ~kept.expand(probe.few.count, -1)))
        at_position = _changed(sequence.length, slice(at, at + 1), probe.few.count)
        told = [at_position(view(probe.base[name]), view(after[name])) for name, view in probe.views.items()]
        return [bool(one) for one in told if one is not None]

    if padding is not None and bool(padding.any()):
        raise Skip("")
    alone = differ(own)
    if alone and not any(alone) and all(differ(~own)):
        what = f"what it gives for position {at} does not depend on any other position"
        yield fault("ignores-inputs", shown_name(reading[0]), what, causes=("mask", "bottleneck"))


def _early(length: int, cut: int, count: int) -> Wrong:
    """Whether a tensor differs at positions before the cut."""
    return _changed(length, slice(0, cut), count)


def _changed(length: int, where: slice, count: int) -> Wrong:
    """Whether a tensor differs at some positions; along the first axis that has their number, other than samples."""

    def wrong(before: Tensor, after: Tensor) -> bool | None:
        for axis in (1, 0, 2, 3):
            if before.ndim > axis and before.shape[axis] == length:
                break
        else:
            if not before.ndim or before.shape[0] != count * length:
                return None
            before, after = (torch.unflatten(one, 0, (count, length)) for one in (before, after))
            axis = 1
        apart = off(before, after).narrow(axis, where.start, where.stop - where.start)
        return bool((apart > rounding(before, after)).any())

    return wrong


def _softmax_over_queries(probe: Probe, place: str) -> bool:
    return any(name == place for name in probe.seen.query_softmax)


def _copied_share(probe: Probe, tokens: Tensor) -> float:
    """The share of positions at which the likeliest class is the token that was put in."""
    for path, view in probe.views.items():
        output = view(probe.base[path])
        if output.ndim == 3 and not is_continuous(tokens):
            for classes in (2, 1):
                likeliest = output.argmax(classes)
                if likeliest.shape == tokens.shape:
                    return float((likeliest == tokens).double().mean())
    return 0.0


def order(probe: Probe) -> Iterator[Finding]:
    """The order of positions has an effect in a net with attention."""
    seen = probe.seen.attention.values()
    if not seen or not probe.views or probe.seen.draws or all(1 - one.evenness < PROBE.even for one in seen):
        raise Skip("")
    zero = any(
        parameter.ndim > 1 and parameter.numel() > parameter.shape[-1] and not parameter.any()
        for parameter in probe.net.module("").parameters()
    )
    if zero:
        raise Skip("a parameter is zero, which may be that of positions before the first step")
    try:
        sequence = _sequence(probe)
    except Skip:
        yield from _order_of_patches(probe)
        return
    tensors = probe.few.samples
    length = min([sequence.length, *(int(tensor.min()) for tensor in tensors.values() if _are_lengths(tensor, sequence.length))])
    moved = torch.arange(sequence.length, device="cpu")
    moved[1 : length - 1] = moved[1 : length - 1].flip(0)
    if length < 4:
        raise Skip("")
    main, others = tensors[sequence.path], probe.others[sequence.path]
    along = [path for path, tensor in tensors.items() if tensor.shape[:2] == main.shape[:2] and is_mask(tensor)]

    def permuted(path: str, tensor: Tensor) -> Tensor:
        return tensor[:, moved.to(tensor.device)] if path == sequence.path or path in along else tensor

    inside = slice(1, length - 1)
    if not bool((main[:, inside] != permuted(sequence.path, main)[:, inside]).any()):
        raise Skip("")

    def replaced(path: str, tensor: Tensor) -> Tensor:
        return torch.cat((tensor[:, :1], others[:, inside], tensor[:, length - 1 :]), 1) if path == sequence.path else tensor

    after = probe.run(probe.few.map_samples(permuted))
    if _same_but_for_order(probe, after, probe.run(probe.few.map_samples(replaced)), moved):
        what = "the order of the positions of its inputs has no effect, though it has attention"
        severity: Severity | None = "notice" if is_continuous(main) else None  # a set of vectors has no order
        calls = [call for call in probe.calls(probe.few, fresh=True) if "pos" in call.name.rpartition(".")[2].lower()]
        one = next((call for call in calls if isinstance(probe.net.module(call.name), nn.Embedding) and call.inputs), None)
        if one is not None and bool((one.inputs[0] == one.inputs[0].flatten()[0]).all()):
            what += f", and {shown_name(one.name)} is asked for one position only"
            yield fault("order-has-no-effect", shown_name(one.name), what, causes=("inputs-constant",), severity=severity)
        else:
            yield fault("order-has-no-effect", shown_name(one.name if one else ""), what, severity=severity)


def _are_lengths(tensor: Tensor, length: int) -> bool:
    whole = tensor.ndim == 1 and not is_continuous(tensor) and tensor.dtype != torch.bool
    return whole and bool(((tensor >= 1) & (tensor <= length)).all())


def _same_but_for_order(probe: Probe, after: dict[str, Tensor], replaced: dict[str, Tensor], moved: Tensor) -> bool:
    """Whether outputs are those of `few`, or these with their positions moved, as compared with other values at these positions."""
    for path, view in probe.views.items():
        before, now, other = (view(outputs[path]) for outputs in (probe.base, after, replaced))
        effect = float(off(before, other).double().square().mean())
        same = float(off(before, now).double().square().mean())
        if now.ndim > 1 and now.shape[1] == len(moved):
            same = min(same, float(off(before[:, moved.to(before.device)], now).double().square().mean()))
        if not effect or math.sqrt(same / effect) > PROBE.order:
            return False
    return True


def _order_of_patches(probe: Probe) -> Iterator[Finding]:
    """The order of the patches that the first convolution makes of images has an effect."""
    calls = probe.calls(probe.few, fresh=True)
    weighted = [
        call.name for call in calls if isinstance(probe.net.module(call.name), (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d))
    ]
    first = probe.net.module(weighted[0]) if weighted else None
    if not isinstance(first, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) or tuple(first.kernel_size) != tuple(first.stride):
        raise Skip("")
    if max(first.stride) < 2:
        raise Skip("")

    def inner(patches: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        flat = patches.flatten(2)
        changed = torch.cat((flat[:, :, :1], change(flat[:, :, 1:-1]), flat[:, :, -1:]), 2)
        return torch.unflatten(changed, 2, patches.shape[2:])

    changes: list[Callable[[Tensor], Tensor]] = [lambda flat: flat.flip(2), lambda flat: flat.roll(1, 0)]
    after, replaced = (probe.run(probe.few, change={weighted[0]: partial(inner, change=change)}) for change in changes)
    if _same_but_for_order(probe, after, replaced, torch.arange(0, device="cpu")):
        what = "the order of the patches has no effect, though it has attention"
        yield fault("order-has-no-effect", shown_name(""), what)


# Inputs that have no effect


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
    parts, padding = _parts(size), _padding(probe, path) if axis == 1 else None
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
            silent = _replaced_masked(probe, path, ~padding)
            return fault(
                "mask-inverted", shown_name(_silent_place(probe, silent)), "only the padding has an effect, and no other position"
            )
        counted = held & counted
    judged = counted.any(0)
    used = (answers & counted).any(0)
    if int(judged.sum()) < 3 or int(used.sum()) >= (1 - PROBE.ignored) * int(judged.sum()) or not bool(used.any()):
        return None
    if _fades(probe, path, axis, [part for part, one in zip(parts, used.tolist(), strict=True) if one], effects):
        return None
    unused = [part for part, one, seen in zip(parts, used.tolist(), judged.tolist(), strict=True) if seen and not one]
    layer = shown_name(_silent_place(probe, _replaced_parts(probe, path, unused, axis)))
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


def _silent_place(probe: Probe, changed: Example) -> str:
    """The module from which on a change of the inputs has no effect: the one after the last whose outputs differ."""
    before, after = probe.calls(probe.few, fresh=True), probe.calls(changed, fresh=True)
    silent = [
        not any(
            bool((off(a, b) > 0).any())
            for a, b in zip(one.outputs, other.outputs, strict=False)
            if a.shape == b.shape and a.numel()
        )
        for one, other in zip(before, after, strict=False)
    ]
    last = max((at for at, one in enumerate(silent) if not one), default=-1)
    return before[last + 1].name if last + 1 < len(before) else ""


def _padding(probe: Probe, path: str) -> Tensor | None:
    """Which positions of an input are padding, (samples, positions), by its lengths or its mask; None if that is not known."""
    tensor = probe.few.samples[path]
    length = tensor.shape[1]
    positions = torch.arange(length, device=tensor.device)
    for name, other in probe.few.samples.items():
        if name == path:
            continue
        if _are_lengths(other, length):
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


def _is_constant(values: Tensor) -> bool:
    return bool((values == values[:1]).all())


def _replaced_masked(probe: Probe, path: str, where: Tensor) -> Example:
    """The example with other values in an input at some positions."""
    others = probe.others[path]

    def replaced(name: str, tensor: Tensor) -> Tensor:
        wide = where.reshape(*where.shape, *[1] * (tensor.ndim - 2)) if name == path else where
        return torch.where(wide, others, tensor) if name == path else tensor

    return probe.few.map_samples(replaced)
