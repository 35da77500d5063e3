"""Rules on how a net is built, seen in a run: what is between its layers, and what its modules are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from recorders.capture.operands import leaves
from recorders.recordings.display import shown_name
from recorders.watch.diagnosis.finding import Finding, fault
from recorders.watch.diagnosis.limits import PROBE, WIDE
from recorders.watch.diagnosis.probe.outputs import judged, target_of
from recorders.watch.diagnosis.probe.probe import Probe, Skip, is_continuous
from recorders.watch.diagnosis.probe.seen import Seen
from recorders.watch.diagnosis.steps import DROPOUTS


def activations_between(probe: Probe) -> Iterator[Finding]:
    """Layers do not follow each other by linear operations alone.

    A narrow layer between wider ones is a factorisation, which people mean. So is what attention or several layers read.
    """
    lineage = probe.seen.lineage
    readers = Counter(first for first, _ in lineage.pairs)
    for (first, second), (before, after) in lineage.pairs.items():
        narrow = before.outputs < min(before.inputs, after.outputs) or before.outputs < WIDE
        otherwise = first == second or readers[first] > 1 or bool({first, second} & lineage.attended) or first in lineage.elsewhere
        if before.usual and after.usual and not narrow and not otherwise:
            what = f"no activation function is between it and {shown_name(first)}"
            yield fault("linear-net", shown_name(second), what)
            return


def scores_scaled(probe: Probe) -> Iterator[Finding]:
    """Scores of attention are scaled before their softmax, if they need it."""
    lineage = probe.seen.lineage
    if not (lineage.unscaled or probe.seen.attention):
        raise Skip("")
    large = [name for name, one in lineage.unscaled.items() if one.spread > PROBE.unscaled]
    untrained = _spreads_of_shuffled(probe) if large else {}
    for name in large:
        one = lineage.unscaled[name]
        if untrained.get(name, one.spread) > PROBE.unscaled:
            what = (
                f"its scores, products of {one.width} numbers, are not scaled down before the softmax; those of a query have a "
                f"standard deviation of {one.spread:.1f}"
            )
            yield fault("attention-unscaled", shown_name(name), what)
            return


def _spreads_of_shuffled(probe: Probe) -> dict[str, float]:
    """The spreads of scores by module, if the weights that make queries and keys are shuffled, as they were before training.

    What a net learns makes scores large, whatever they were at the start.
    """
    layers = [probe.net.module(name) for name in probe.seen.lineage.attended]
    weights = [one for layer in layers for one in layer.parameters(recurse=False) if one.ndim > 1]
    kept = [one.detach().clone() for one in weights]
    draws, seen = torch.Generator().manual_seed(0), Seen(PROBE.alone)
    try:
        for one in weights:
            one.copy_(one.flatten()[torch.randperm(one.numel(), generator=draws, device="cpu").to(one.device)].view_as(one))
        probe.net.run(probe.few, fresh=True, seen=seen)
    finally:
        for one, before in zip(weights, kept, strict=True):
            one.copy_(before)
    return {name: found.spread for name, found in seen.lineage.unscaled.items()}


def layers_used_once(probe: Probe) -> Iterator[Finding]:
    """No container holds one layer with parameters in several places, as `[layer] * 3` makes."""
    for name, module in probe.net.module("").named_modules():
        if not isinstance(module, (nn.Sequential, nn.ModuleList)):
            continue
        inner = [one for one in module._modules.values() if one is not None and next(one.parameters(), None) is not None]
        twice = [one for one in {*inner} if inner.count(one) > 1]
        if twice:
            times, places = inner.count(twice[0]), [key for key, one in module._modules.items() if one is twice[0]]
            where = f"{name}.{places[0]}" if name else places[0]
            yield fault("repeated-layer", shown_name(where), f"{times} places of {shown_name(name)} hold this one layer")
            return


def dropout_last(probe: Probe) -> Iterator[Finding]:
    """No dropout acts on what the net returns: in training mode none of many outputs is set to zero by one."""
    drops = any(isinstance(module, DROPOUTS) and module.p > 0 for module in probe.net.modules.values()) or probe.seen.dropouts
    if not drops or probe.stateful or not probe.views:
        raise Skip("")
    seen = Seen(PROBE.alone)
    after = probe.net.run(probe.few, fresh=True, training=True, seen=seen)
    for path in judged(probe, probe.base, target_of(probe, probe.few.count)):
        before, now = probe.base[path], after.get(path)
        if path not in seen.lineage.dropped or now is None or now.shape != before.shape or before.numel() < PROBE.outputs:
            continue
        share = float(((now == 0) & (before != 0)).double().mean())
        if share > PROBE.dropped:
            what = f"in training mode {share:.0%} of what the net returns is set to zero"
            yield fault("dropout-on-outputs", shown_name((seen.dropouts or [""])[-1]), what)
            return


def widths_used(probe: Probe) -> Iterator[Finding]:
    """The outputs of a wide layer differ between samples in more than one direction."""
    if probe.whole.count < PROBE.samples or not probe.views:
        raise Skip("")
    for call in probe.calls(probe.whole, fresh=True):
        if not isinstance(probe.net.module(call.name), nn.Linear) or not call.inputs or not call.outputs:
            continue
        given, rows = call.inputs[0], call.outputs[0]
        if rows.ndim != 2 or len(rows) < PROBE.samples or rows.shape[1] < WIDE or given.shape[1] < WIDE:
            continue
        before, after = _second(given), _second(rows)
        if before > 10 * PROBE.rank and after < PROBE.rank:
            what = f"its {rows.shape[1]} units differ between {len(rows)} samples in one direction only"
            yield fault("one-direction", shown_name(call.name), what)
            return


def first_reads(probe: Probe) -> Iterator[Finding]:
    """The first layer reads more than one number of samples that have many: nothing averages all of them before."""
    given = [*probe.few.inputs.values()]
    if len(given) != 1 or not is_continuous(given[0]) or given[0][0].numel() < WIDE:
        raise Skip("")
    calls = probe.calls(probe.few, fresh=True)
    first = next((call for call in calls if next(probe.net.module(call.name).parameters(recurse=False), None) is not None), None)
    if first is not None and first.inputs and sum(one.numel() for one in first.inputs) == probe.few.count:
        what = f"it reads one number of each sample, of {given[0][0].numel()} that there are"
        yield fault("bottleneck", shown_name(first.name), what, causes=("bottleneck", "wrong-axis"))


def passed_on(probe: Probe) -> Iterator[Finding]:
    """Not all that a net says of a sample passes through two numbers between wide layers, unless these are a code of it."""
    targets = [tensor for _, tensor in leaves(probe.target)]
    if not targets or not probe.views or any(is_continuous(one) and one.numel() > 2 * probe.whole.count for one in targets):
        raise Skip("")
    wide = [(name, module) for name, module in probe.net.modules.items() if isinstance(module, nn.Linear)]
    narrow = [
        name
        for (name, module), (_, after) in pairwise(wide)
        if module.out_features == after.in_features == 2 and min(module.in_features, after.out_features) >= 2 * WIDE
    ]
    given = {call.name: call.outputs[0] for call in (probe.calls(probe.few, fresh=True) if narrow else ()) if call.name in narrow}
    others = probe.few.map_samples(lambda path, tensor: probe.others[path])
    for name, output in given.items():
        effects = probe.effects(probe.net.run(others, fresh=True, change={name: partial(_instead, output)}))
        if float(effects.amax()) <= PROBE.differs < float(probe.effects(probe.run(others)).amax()):
            yield fault("bottleneck", shown_name(name), "all that the net says of a sample passes through its two units")
            return


def _instead(kept: Tensor, output: Tensor) -> Tensor:
    return kept


def _second(rows: Tensor) -> float:
    """How far rows differ in their second direction, relative to the first; NaN if they do not differ."""
    sizes = torch.linalg.svdvals((rows - rows.mean(0)).double())
    return float(sizes[1] / sizes[0])
