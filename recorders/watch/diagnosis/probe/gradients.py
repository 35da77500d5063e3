"""Rule on gradients: they are those of the outputs, so that no `detach()` hides a part of the way from a weight to an output."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from recorders.recordings.display import shown_name
from recorders.watch.diagnosis.finding import Finding, fault
from recorders.watch.diagnosis.limits import PROBE
from recorders.watch.diagnosis.probe.probe import Probe, Skip, may_communicate

SUMS = 4
"""How many sums of each output, with random weights, are differentiated."""
OUTPUTS = 4
"""The most outputs that are looked at."""
PERIOD = 2**16 + 1
"""How many different weights there are in a sum, at most."""
MODULES = 16
"""About so many modules are asked for the last one that is wrong, and then those after it, up to the next of them."""


def gradients_whole(probe: Probe) -> Iterator[Finding]:
    """If weights move a little, outputs change as their gradients tell: in training mode, with the same random numbers.

    The copy runs once with gradients and twice with all weights moved; if both disagree, twice for each of some modules.
    A gradient without a change is that of a step function, such as a quantisation, and one of the opposite sign is reversed on
    purpose: nothing is said of nets with these.
    """
    slopes = Slopes(probe)
    whole = slopes.gaps([*slopes.told])
    if not whole or max(whole) < PROBE.cut:
        return
    own = [
        (name, [one for one in module.parameters(recurse=False) if one in slopes.told])
        for name, module in probe.net.modules.items()
    ]
    named = [(name, parameters) for name, parameters in own if parameters]

    def last_wrong(places: Iterable[int]) -> tuple[int, float] | None:
        gaps = {place: max(slopes.gaps(named[place][1]), default=0.0) for place in places}
        return next(((place, gap) for place, gap in reversed(gaps.items()) if gap > PROBE.cut), None)

    each = -(-len(named) // MODULES)
    found = last_wrong(range(0, len(named), each))
    if found is not None:
        place, gap = last_wrong(range(found[0] + 1, min(found[0] + each, len(named)))) or found
        name = named[place][0]
        what = f"if its weights move, {gap:.0%} of the change of the outputs is not what their gradients tell"
        # A head may be kept from training what it reads: then all of it is cut there, and other outputs agree.
        kept_apart = gap > 0.99 and (slopes.detached or min(whole) < PROBE.cut)
        yield fault("gradient-cut", shown_name(name), what, severity="notice" if kept_apart else None)


class Slopes:
    """How fast sums of the outputs change if weights move in random directions: as their gradients tell, and as it is seen.

    Attributes:
        told: by parameter that is trained, by its gradients, float64 (outputs, `SUMS`).
        detached: whether there are outputs without gradients.

    Raises:
        Skip: the outputs have no gradients, there are too many weights, or numbers of 16 bits are too coarse for small steps.
    """

    def __init__(self, probe: Probe) -> None:
        parameters: list[Tensor] = [*dict.fromkeys(one for one in probe.net.module("").parameters() if one.requires_grad)]
        if probe.stateful or not parameters or any(one.dtype not in (torch.float32, torch.float64) for one in parameters):
            raise Skip("")
        if sum(one.numel() for one in parameters) > PROBE.weights:
            raise Skip(f"the net has more than {PROBE.weights:,} weights")
        if may_communicate():
            raise Skip("modules may communicate in training mode, and other ranks do not")
        self._probe = probe
        outputs = probe.net.run(probe.few, fresh=True, training=True, gradients=True)
        graded = [path for path, one in outputs.items() if one.requires_grad and one.numel()]
        self.detached = len(graded) < len(outputs)
        self._paths = graded[:OUTPUTS]
        if not graded or not all(bool(outputs[path].isfinite().all()) for path in graded):
            raise Skip("")
        self._sizes = {path: float(outputs[path].detach().double().square().mean().sqrt()) or 1.0 for path in self._paths}
        still = _without_gradients(probe)
        self._directions = {one: _direction(one, still.get(one, ()), place) for place, one in enumerate(parameters)}
        self.told = {one: torch.zeros(len(self._paths), SUMS, dtype=torch.float64, device="cpu") for one in parameters}
        self._before = self._numbers(outputs)
        with torch.enable_grad():
            sums = [one.unbind() for one in self._sums(outputs)]
        for row, values in enumerate(sums):
            for column, value in enumerate(values):
                for parameter, gradient in zip(
                    parameters, torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True), strict=True
                ):
                    if gradient is not None:
                        self.told[parameter][row, column] = (gradient.to_dense() * self._directions[parameter]).double().sum()

    def gaps(self, parameters: Sequence[Tensor]) -> list[float]:
        """How far what gradients tell is from what is seen, relative to that, for each output that changes if these weights move.

        It is empty if steps forth and back tell different things, as at the corner of a ReLU.

        Raises:
            Skip: a step function, or a reversed gradient, is in the way.
        """
        told = torch.stack([self.told[one] for one in parameters]).sum(0)
        forth, back = ((self._moved(parameters, step) - self._before) / step for step in (PROBE.step, -PROBE.step))
        found = []
        for one, other, expected in zip(forth, back, told, strict=True):
            seen = (one + other) / 2
            size, length, off = float(seen.norm()), float(expected.norm()), float((seen - expected).norm())
            is_reversed = length > PROBE.felt * size and float(seen @ expected) < -0.9 * size * length
            if size < PROBE.felt * length or is_reversed:
                raise Skip("")
            if off > PROBE.cut * size and float((one - other).norm()) > 0.5 * off:
                return []
            if size > PROBE.felt:
                found.append(off / size)
        return found

    def _moved(self, parameters: Sequence[Tensor], step: float) -> Tensor:
        kept = [one.detach().clone() for one in parameters]
        try:
            for one in parameters:
                one.add_(self._directions[one], alpha=step)
            return self._numbers(self._probe.net.run(self._probe.few, fresh=True, training=True))
        finally:
            for one, before in zip(parameters, kept, strict=True):
                one.copy_(before)

    def _numbers(self, outputs: dict[str, Tensor]) -> Tensor:
        return torch.stack([*self._sums(outputs)]).detach().double().cpu()

    def _sums(self, outputs: dict[str, Tensor]) -> Iterator[Tensor]:
        """The sums of each output, relative to its size: (`SUMS`,). Of a large output, many elements have one weight."""
        draws = torch.Generator().manual_seed(0)
        for path in self._paths:
            one = outputs[path].flatten()
            width = min(one.numel(), PERIOD)
            rest = one.numel() % width
            added = one[rest:].view(-1, width).sum(0, dtype=torch.float64)
            added = torch.cat((added[:rest] + one[:rest], added[rest:]))
            weights = torch.randn((SUMS, width), generator=draws, dtype=torch.float64, device="cpu").to(one.device)
            yield weights @ added / (self._sizes[path] * one.numel() ** 0.5)


def _direction(parameter: Tensor, still: Sequence[int], seed: int) -> Tensor:
    """Random numbers as large as the weights, with some rows of zeros; of weights that are zero, small ones."""
    draws = torch.Generator().manual_seed(seed)
    size = float(parameter.detach().double().square().mean().sqrt()) or 0.02
    found = torch.randn(parameter.shape, generator=draws, device="cpu").to(parameter) * size
    for row in still:
        found[row] = 0
    return found


def _without_gradients(probe: Probe) -> dict[Tensor, list[int]]:
    """By weight of an embedding, the rows that get no gradients on purpose, those of padding."""
    found: dict[Tensor, list[int]] = {}
    for module in probe.net.modules.values():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            if module.scale_grad_by_freq:
                raise Skip("")
            if module.padding_idx is not None:
                found.setdefault(module.weight, []).append(module.padding_idx)
    return found
