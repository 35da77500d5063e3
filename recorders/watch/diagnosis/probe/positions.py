"""Rules on positions: on which others outputs depend, and whether their order has an effect."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from recorders.capture.operands import leaves
from recorders.recordings.display import shown_name
from recorders.watch.diagnosis.finding import Finding, Severity, fault
from recorders.watch.diagnosis.limits import PROBE, WIDE
from recorders.watch.diagnosis.probe.example import Example
from recorders.watch.diagnosis.probe.inputs import are_lengths, padding_of, replaced_where, silent_place
from recorders.watch.diagnosis.probe.losses import shifts_target
from recorders.watch.diagnosis.probe.probe import Probe, Skip, Wrong, is_continuous, is_mask, off, rounding

# Time


class Positions(NamedTuple):
    """An input that is a sequence: its path, and the number of positions."""

    path: str
    length: int


def _sequences(probe: Probe, floats: bool = True) -> Iterator[Positions]:
    """The inputs with tokens, (samples, positions), and those with features, (samples, positions, features)."""
    if not probe.views:
        return
    tensors = {path: tensor for path, tensor in probe.few.inputs.items() if not is_mask(tensor)}
    tokens = [path for path, tensor in tensors.items() if tensor.ndim == 2 and not is_continuous(tensor)]
    features = [path for path, tensor in tensors.items() if tensor.ndim == 3 and is_continuous(tensor)]
    for path in [*tokens, *(features if floats else ())]:
        if tensors[path].shape[1] >= 4:
            yield Positions(path, tensors[path].shape[1])


def _sequence(probe: Probe, floats: bool = True) -> Positions:
    """The first of these inputs.

    Raises:
        Skip: there is none.
    """
    found = next(_sequences(probe, floats), None)
    if found is None:
        raise Skip("")
    return found


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
    for sequence in _sequences(probe):
        with contextlib.suppress(Skip):  # the target is of another input
            yield from _future_of(probe, sequence)
            return
    raise Skip("")


def _future_of(probe: Probe, sequence: Positions) -> Iterator[Finding]:
    given, target = probe.few.samples[sequence.path], _target_of(probe, sequence.path)
    counts = target >= 0 if not is_continuous(target) else torch.ones_like(target, dtype=torch.bool)

    def share(target: Tensor, given: Tensor, counts: Tensor) -> float:
        return float((target == given)[counts].double().mean()) if bool(counts.any()) else 0.0

    ahead = share(target[:, :-1], given[:, 1:], counts[:, :-1])
    same = share(target, given, counts)
    if max(ahead, same) < 0.99 or min(ahead, same) > 0.9:
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
    if any(told) and (ahead > same or shifts_target(probe)):
        what = f"the target is the next token, and outputs before position {cut} change if inputs from there on do"
        place = probe.place(changed, early)
        causes = ("wrong-axis", "mask") if _mixes_positions(probe, place) else ()
        yield fault("sees-the-future", shown_name(place), what, causes=causes)
    elif same > ahead and not any(told) and (copied := _copied_share(probe, given)) > PROBE.copies and _reads(probe, sequence.path):
        what = (
            f"the target is the input itself, though outputs do not depend on later inputs; {copied:.0%} of the outputs repeat it"
        )
        yield fault("targets-are-inputs", "target", what)


def _reads(probe: Probe, path: str) -> bool:
    """Whether outputs depend on an input, which a decoder may be given in training only."""
    return bool(probe.effects(probe.run(_replaced(probe, path, probe.others[path]))).any())


def _replaced(probe: Probe, path: str, samples: Tensor) -> Example:
    """The example with other samples as one of its inputs."""
    return probe.few.map_samples(lambda name, tensor: samples if name == path else tensor)


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
    others, padding = probe.others[path], padding_of(probe, path)
    own = torch.arange(sequence.length, device=others.device) == at

    def differ(kept: Tensor) -> list[bool]:
        after = probe.run(replaced_where(probe, path, ~kept.expand(probe.few.count, -1)))
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


def _mixes_positions(probe: Probe, place: str) -> bool:
    """Whether the future comes by something else than a mask: a softmax over queries, or where no attention may read ahead.

    A convolution that is padded on both sides lacks what a mask is to attention.
    """
    if isinstance(probe.net.module(place), (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        return False
    ahead = {*probe.seen.reads_ahead} & {*probe.seen.attention}
    near = any(not place or f"{name}.".startswith(f"{place}.") or place.startswith(f"{name}.") for name in ahead)
    return place in probe.seen.query_softmax or not near


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
    length = min([sequence.length, *(int(tensor.min()) for tensor in tensors.values() if are_lengths(tensor, sequence.length))])
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


def features(probe: Probe) -> Iterator[Finding]:
    """A net tells the numbers along the last axis of its inputs apart: their order has an effect.

    Nothing is said of a net for which the order of all numbers has none: they may be a set.
    """
    if not probe.views or probe.seen.draws:
        raise Skip("")
    asked = {path: one for path, one in probe.few.samples.items() if is_continuous(one) and one.ndim > 2 and one.shape[-1] >= WIDE}
    if not asked:
        raise Skip("")
    for path, given in asked.items():
        flat = given.flatten(1)
        changes = (given[..., _mixed(given)], flat[:, _mixed(flat)].view_as(given), probe.others[path])
        apart, all_apart, other = (float(probe.effects(probe.run(_replaced(probe, path, one))).amax()) for one in changes)
        least = PROBE.order * other
        if apart <= least < all_apart and other > PROBE.differs:
            what = f"the order of the {given.shape[-1]} numbers along the last axis of an input has no effect: "
            what += "only their mean or sum is read"
            place = silent_place(probe, _replaced(probe, path, changes[0]))
            yield fault("ignores-inputs", shown_name(place), what, severity="warning")
            return


def _mixed(tensor: Tensor) -> Tensor:
    """The indices along the last axis, in an order that is the same each time."""
    order = torch.randperm(tensor.shape[-1], generator=torch.Generator().manual_seed(0), device="cpu")
    return order.to(tensor.device)
