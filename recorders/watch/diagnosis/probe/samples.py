"""Rules on samples and calls: what a net gives depends on its input alone, not on other samples, earlier calls or chance."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from recorders.capture.operands import leaves
from recorders.recordings.display import shown_name
from recorders.watch.diagnosis.finding import Finding, fault
from recorders.watch.diagnosis.limits import NORMS, PROBE, VARIES
from recorders.watch.diagnosis.probe.example import Example, donors
from recorders.watch.diagnosis.probe.losses import is_ahead
from recorders.watch.diagnosis.probe.probe import (
    Probe,
    Skip,
    attempts,
    differ,
    finite,
    first_wrong,
    is_confined,
    is_continuous,
    is_mask,
    may_communicate,
    mixes,
    off,
    rounding,
    sample_views,
)
from recorders.watch.diagnosis.steps import BATCH_NORMS

_LEFT = 0.1
"""The largest share of its first statistics that is left in a batch norm that can be judged."""
LEAST = 16
"""The fewest queries of an attention that tell."""
RECURRENT = (nn.RNNBase, nn.MultiheadAttention, nn.Transformer, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
"""Modules that take an input of two axes for one sequence."""
SQUASHING = (nn.Sigmoid, nn.Tanh, nn.Softmax, nn.LogSoftmax, nn.Hardtanh, nn.Hardsigmoid)
"""Activation functions that are flat at both ends."""


# The relations


def function_of_inputs(probe: Probe) -> Iterator[Finding]:
    """The net gives the same outputs for the same inputs: no dropout acts in evaluation, and no state is carried over."""
    if differ(probe.base, probe.net.run(probe.few)):
        probe.stateful = True
        yield from _carried(probe, probe.few, training=False)
    elif probe.seen.dropouts and differ(probe.base, probe.net.run(probe.few, draws_again=False)):
        places = list(dict.fromkeys(probe.seen.dropouts))
        more = f", and in {len(places) - 1} more modules" if len(places) > 1 else ""
        what = f"a dropout acts in evaluation mode{more}: one input gives different outputs"
        yield fault("random-in-evaluation", shown_name(places[0]), what)


def _carried(probe: Probe, example: Example, training: bool) -> Iterator[Finding]:
    """A finding if outputs depend on what an earlier call left in plain attributes, such as a hidden state."""
    first = probe.net.run(example, fresh=True, training=training)
    kept = probe.net.kept()
    again = probe.net.run(example, training=training)
    if not differ(first, again):
        return
    before = probe.calls(example, fresh=True, training=training)
    probe.net.restore_buffers()  # statistics and queues are kept in buffers on purpose
    after = probe.calls(example, training=training)

    def wrong(one: Tensor, other: Tensor) -> bool:
        return bool((off(one, other) > rounding(one, other)).any())

    if kept and any(wrong(*pair) for pair in zip(before[-1].outputs, after[-1].outputs, strict=False)):
        mode = "training" if training else "evaluation"
        what = f"one input gives different outputs in {mode} mode, with the same random numbers"
        holders = ", ".join(shown_name(name) for name in list(kept)[:3])
        what, place = f"{what}; tensors are kept by {holders}", shown_name(first_wrong(before, after, wrong))
        yield fault("carries-state", place, what, severity="notice" if _goes_on(probe) else None)


def _goes_on(probe: Probe) -> bool:
    """Whether the target is the next token: then a batch may go on where the one before it ended."""
    return any(is_ahead(probe, target) is not None for _, target in leaves(probe.target))


def state_in_training(probe: Probe) -> Iterator[Finding]:
    """Also in training mode nothing is carried over from call to call."""
    if may_communicate():
        raise Skip("modules may communicate in training mode, and other ranks do not")
    if probe.stateful:
        raise Skip("")
    why: Exception | None = None
    for example in attempts(probe.net, probe.few, probe.whole):
        try:
            yield from list(_carried(probe, example, training=True))
        except Exception as error:
            why = why or error
            continue
        return
    if why is not None:
        raise why


def samples_apart(probe: Probe) -> Iterator[Finding]:
    """The output of a sample does not depend on the others in its batch. It also finds out where the samples are."""
    if probe.few.batch is None:
        raise Skip(probe.few.why)
    outcome = _first_replaced(probe, probe.few)
    if outcome is None:
        raise Skip("no output grows with the number of samples")
    if outcome:
        return
    second = _samples_second(probe)
    if second is not None:
        probe.whole, probe.few, probe.base = second.whole, second.few, second.base
        probe.views = second.views
        return
    tensors = probe.few.samples
    if all(tensor.ndim == 1 for tensor in tensors.values()) or any(
        tensor.ndim == 3 and tensor.shape[1] == 1 for tensor in tensors.values()
    ):
        raise Skip("the example may be one sequence")
    full = probe.whole.samples.values()
    if any(tensor.ndim == 2 and tensor.shape[0] == tensor.shape[1] for tensor in full) and len(tensors) > 1:
        raise Skip("the example may be one graph")
    probe.views = {}  # so that rules on single samples say nothing
    place = probe.place(_replaced_first(probe.few, probe.others), mixes(probe.few.count))
    module = probe.net.modules[place]
    if isinstance(module, BATCH_NORMS):  # without running statistics it is made to
        raise Skip(f"{place} normalises over the batch in evaluation, too")
    what = "in evaluation mode the outputs of samples change if another sample of the batch does"
    if any(name == place or name.startswith(f"{place}." if place else "") for name in probe.seen.batch_softmax):
        what += "; a softmax runs along the axis of the samples"
    alone = isinstance(module, RECURRENT) and all(tensor.ndim == 2 for tensor in tensors.values())
    if alone:
        what += f"; {shown_name(place)} takes an input of two axes for one sequence"
    yield fault("samples-mix", shown_name(place), what, severity="warning" if alone else None)


def _replaced_first(example: Example, others: dict[str, Tensor]) -> Example:
    """The example with another first sample."""
    return example.map_samples(lambda path, tensor: torch.cat((others[path][:1], tensor[1:])))


def _first_replaced(probe: Probe, few: Example) -> bool | None:
    """Whether outputs change for the first sample alone if it is replaced; None if no output has samples. Notes where these are."""
    fewer = probe.run(few.cut(few.count - 1))
    probe.views = sample_views(probe.base, fewer, few.count)
    if not probe.views:
        return None
    after = probe.run(_replaced_first(few, donors(probe.whole, few.count)))
    for path, view in list(probe.views.items()):
        choices = [view, view._replace(in_turn=True)] if view.each > 1 else [view]
        fits = [one for one in choices if is_confined(one(probe.base[path]), one(after[path]))]
        if not fits:
            return False
        probe.views[path] = fits[0]
    return True


def _samples_second(probe: Probe) -> Probe | None:
    """The probe with its samples along the second axis, if outputs show that they are there: then time is first."""
    whole = probe.whole.along(1)
    few = whole.cut()
    if few.count < 2 or any(tensor.ndim != 2 + is_continuous(tensor) for tensor in few.samples.values() if not is_mask(tensor)):
        return None
    try:
        found = Probe(probe.net, whole, few, probe.target, probe.run(few), probe.seen, stateful=probe.stateful)
        apart = _first_replaced(found, few)
        answers = bool((found.effects(found.run(_replaced_first(few, found.others))) > 0).any())
    except Exception:  # it may need as many as there are, if these are no samples
        return None
    return found if apart and answers else None


def samples_told_apart(probe: Probe) -> Iterator[Finding]:
    """Outputs differ between samples. If they do not, the module is named by which they become equal, or after which."""
    count = probe.few.count
    if count < 2:
        raise Skip("")
    outputs = [*probe.base.values()]
    if not any(map(torch.any, outputs)) or not _are_equal(outputs, count):
        return
    if _are_equal(probe.few.samples.values(), count) is not False:
        raise Skip("the samples of the example are equal")
    if _are_equal(probe.run_whole().values(), probe.whole.count) is False:  # a trained net may give one thing for all of a class
        return
    calls = probe.calls(probe.few, fresh=True)
    merging = [call for call in calls if _are_equal(call.inputs, count) is False and _are_equal(call.outputs, count)]
    inner = [call for call in merging if not any(_is_inside(other.name, call.name) for other in merging)]
    within = [call for call in calls if inner and _is_inside(call.name, inner[-1].name)]
    apart = [call for call in within if _are_equal(call.outputs, count) is False]
    if apart:  # between its modules
        what = f"what it gives differs between {count} samples, and what is read of it does not, so all outputs are equal"
        yield fault("equal-outputs", shown_name(apart[-1].name), what, causes=("bottleneck", "wrong-axis", "dead-units"))
    elif inner:
        name, module = inner[-1].name, probe.net.module(inner[-1].name)
        if isinstance(module, BATCH_NORMS) and _is_unsettled(module):
            raise Skip(f"the running statistics of {name} still are near those that it began with")
        what = f"its inputs differ between {count} samples, and its outputs do not, so all outputs are equal"
        yield fault("equal-outputs", shown_name(name), what, causes=_why_equal(module, inner[-1].outputs))


def _is_unsettled(norm: nn.Module) -> bool:
    """Whether a batch norm has seen so few batches that in evaluation it scales by other statistics than those of its inputs."""
    momentum, batches = getattr(norm, "momentum", None), getattr(norm, "num_batches_tracked", None)
    return bool(momentum and isinstance(batches, Tensor) and (1 - momentum) ** int(batches) > _LEFT)


def _is_inside(name: str, other: str) -> bool:
    return name != other and (not other or name.startswith(f"{other}."))


def _are_equal(tensors: Iterable[Tensor], count: int) -> bool | None:
    """Whether the samples of all tensors are equal, but for rounding; None if no tensor has as many."""
    found = []
    for tensor in tensors:
        axis = next((axis for axis in range(min(tensor.ndim, 2)) if tensor.shape[axis] == count), None)
        if axis is None:
            continue
        rows = tensor.movedim(axis, 0)
        if is_continuous(rows):
            variance = float((finite(rows) - finite(rows).mean(0)).square().mean())
            found.append(bool(rows.isfinite().all()) and variance <= VARIES * float(finite(rows).square().mean()))
        else:
            found.append(bool((rows == rows[:1]).all()))
    return all(found) if found else None


def _why_equal(module: nn.Module, outputs: Sequence[Tensor]) -> tuple[str, ...]:
    """The likely causes, by the module that makes samples equal."""
    weight = getattr(module, "weight", None)
    if isinstance(weight, Tensor) and not weight.any():
        return ("normalisation", "initialisation") if type(module).__name__ in NORMS else ("initialisation", "dead-units")
    if isinstance(module, SQUASHING):
        return ("saturation", "initialisation")
    if not any(map(torch.any, outputs)):
        return ("dead-units", "initialisation")
    return ("initialisation", "inputs-not-normalised") if isinstance(weight, Tensor) else ("bottleneck", "wrong-axis", "dead-units")


def attention(probe: Probe) -> Iterator[Finding]:
    """Queries read more than one key, and not all keys alike."""
    if not probe.seen.attention:
        raise Skip("")
    for name, one in probe.seen.attention.items():
        if one.queries >= LEAST and one.alone >= PROBE.most * one.queries:
            yield fault(
                "attention-saturated", shown_name(name), f"{one.alone} of {one.queries} queries of the attention read one key alone"
            )
        elif one.queries >= LEAST and 1 - one.evenness < PROBE.even and one.spread > 0:
            yield fault(
                "attention-uniform",
                shown_name(name),
                f"all {one.queries} queries of the attention read all keys alike: scores differ by at most {one.spread:.1e}",
            )
