"""Probe: a copy of a net and an example, with the outputs of it, and how outputs of other inputs compare."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from recorders.watch.diagnosis.limits import PROBE
from recorders.watch.diagnosis.probe.copied import CopiedNet, ModuleCall
from recorders.watch.diagnosis.probe.example import Example, donors
from recorders.watch.diagnosis.probe.seen import Seen


class Skip(Exception):
    """A relation cannot be examined in this net; the message says why, and is "" if it has no meaning here."""


class SampleView(NamedTuple):
    """Where the samples are in an output: along an axis, of which each sample has `each` in a row, or every `each`-th."""

    axis: int
    each: int = 1
    in_turn: bool = False

    def __call__(self, output: Tensor) -> Tensor:
        """The output with the samples along the first axis."""
        if self.each == 1:
            return output.movedim(self.axis, 0)
        shape = (self.each, -1) if self.in_turn else (-1, self.each)
        split = torch.unflatten(output, self.axis, shape)
        return split.movedim(self.axis + self.in_turn, 0)


Wrong: TypeAlias = Callable[[Tensor, Tensor], bool | None]
"""Whether a tensor of a module is wrong, from what it was before and is after a change; None if it cannot be told."""


def attempts(net: CopiedNet, few: Example, whole: Example) -> Iterator[Example]:
    """What to run a net on, each if it failed on the one before: few samples, all, and few with a state of as many."""
    yield few
    if whole.count != few.count:
        yield whole
    for axis in (0, 1):  # a hidden state of `nn.LSTM` has its layers first
        if few.count and net.cut_kept(few.count, axis):
            yield few


@dataclass
class Probe:
    """A copy of a net, with an example of what it is called with.

    Attributes:
        net: the copy.
        whole: the example as it was given.
        few: its first samples, or all if the net does not run on few.
        target: of the training, if it was given.
        base: the outputs of `few`.
        seen: what the first run showed.
        views: by path of an output that has samples, where these are.
        stateful: whether runs depend on those before.
        loss: of the last steps, if it was recorded.
    """

    net: CopiedNet
    whole: Example
    few: Example
    target: Any
    base: dict[str, Tensor]
    seen: Seen
    views: dict[str, SampleView] = field(default_factory=dict)
    stateful: bool = False
    loss: float | None = None
    _of_whole: dict[str, Tensor] | None = None

    @property
    def others(self) -> dict[str, Tensor]:
        """For each sample of `few` another one, by path of the input."""
        return donors(self.whole, self.few.count)

    def run(self, example: Example, **options: Any) -> dict[str, Tensor]:
        """The outputs of an example, of a net that no earlier run has changed."""
        return self.net.run(example, fresh=self.stateful, **options)

    def run_whole(self) -> dict[str, Tensor]:
        """The outputs of the whole example, of which there is one run for all that ask."""
        if self._of_whole is None:
            self._of_whole = self.run(self.whole) if self.whole.count > self.few.count else self.base
        return self._of_whole

    def effects(self, outputs: dict[str, Tensor]) -> Tensor:
        """How far outputs are from those of `few`, by sample, relative to the largest magnitude of each output."""
        found = torch.zeros(self.few.count, dtype=torch.float64, device="cpu")
        for path, view in self.views.items():
            if path in outputs and outputs[path].shape == self.base[path].shape:
                scale = largest(self.base[path]) or 1.0
                apart = off(view(self.base[path]), view(outputs[path])).reshape(self.few.count, -1).amax(1)
                found = torch.maximum(found, apart.double().cpu() / scale)
        return found

    def calls(self, example: Example, **options: Any) -> list[ModuleCall]:
        """The calls of modules in a run of an example."""
        calls: list[ModuleCall] = []
        self.net.run(example, calls=calls, **options)
        return calls

    def place(self, changed: Example, wrong: Wrong) -> str:
        """The module by which outputs become wrong in a run of `changed`, compared with `few`."""
        return first_wrong(self.calls(self.few, fresh=True), self.calls(changed, fresh=True), wrong)


def first_wrong(before: Sequence[ModuleCall], after: Sequence[ModuleCall], wrong: Wrong) -> str:
    """The first module whose outputs are wrong in the second of two runs while its inputs are not; "" if there is none."""

    def any_wrong(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
        return any(wrong(one, other) for one, other in zip(tensors, others, strict=False) if one.shape == other.shape)

    for one, other in zip(before, after, strict=False):
        if one.name != other.name:
            break
        if any_wrong(one.outputs, other.outputs) and not any_wrong(one.inputs, other.inputs):
            return one.name
    return ""


# Comparing tensors


def finite(tensor: Tensor) -> Tensor:
    """The values as float64, zeros in place of NaN and infinity; one zero if there is no value."""
    return tensor.double().nan_to_num(0, 0, 0) if tensor.numel() else torch.zeros(1, dtype=torch.float64, device=tensor.device)


def off(before: Tensor, after: Tensor) -> Tensor:
    """By how much each element differs; what is not finite in both does not, and differs by 1 from what is."""
    if not before.is_floating_point():
        return (before != after).double()
    wide = torch.promote_types(before.dtype, torch.float32) if before.dtype.itemsize > 1 else torch.float32
    apart = (before.to(wide) - after.to(wide)).abs()
    if not apart.numel() or bool(apart.amax().isfinite()):
        return apart
    ill = before.isfinite() != after.isfinite()
    return (finite(before) - finite(after)).abs() + ill


def largest(tensor: Tensor) -> float:
    """The largest magnitude of the finite values; 0 if there is none."""
    found = float(tensor.abs().amax()) if tensor.is_floating_point() and tensor.numel() else math.nan
    return found if math.isfinite(found) else float(finite(tensor).abs().amax())


def differ(before: dict[str, Tensor], after: dict[str, Tensor]) -> bool:
    """Whether outputs differ by more than rounding."""
    if before.keys() != after.keys():
        return True
    for path, one in before.items():
        if one.shape != after[path].shape:
            return True
        if one.numel() and float(off(one, after[path]).amax()) > PROBE.differs * largest(one):
            return True
    return False


def rounding(before: Tensor, after: Tensor) -> float:
    """The largest difference of two tensors that counts as rounding."""
    apart = off(before, after)
    if not apart.numel():
        return 0.0
    return max(PROBE.differs * float(apart.amax()), 1e-6 * largest(before))


def is_confined(before: Tensor, after: Tensor) -> bool:
    """Whether tensors, with the samples along the first axis, differ in the first sample alone, but for rounding."""
    return not bool((off(before, after)[1:] > rounding(before, after)).any())


def mixes(count: int) -> Wrong:
    """Whether a tensor of any module differs beyond the first sample, by its sizes: along whichever axis samples may be."""

    def wrong(before: Tensor, after: Tensor) -> bool | None:
        views = [SampleView(axis) for axis in range(min(before.ndim, 2)) if before.shape[axis] == count]
        if before.ndim and before.shape[0] > count and before.shape[0] % count == 0:
            each = before.shape[0] // count
            views += [SampleView(0, each), SampleView(0, each, in_turn=True)]
        return not any(is_confined(view(before), view(after)) for view in views) if views else None

    return wrong


def sample_views(few: dict[str, Tensor], fewer: dict[str, Tensor], count: int) -> dict[str, SampleView]:
    """Where the samples are in outputs, from those of `count` samples and of one less."""
    found = {}
    for path, one in few.items():
        other = fewer.get(path)
        if other is None or one.ndim != other.ndim:
            continue
        sizes = [(axis, a, b) for axis, (a, b) in enumerate(zip(one.shape, other.shape, strict=True)) if a != b]
        if len(sizes) == 1 and sizes[0][1] * (count - 1) == sizes[0][2] * count:
            found[path] = SampleView(sizes[0][0], sizes[0][1] // count)
    return found


def may_communicate() -> bool:
    """Whether modules may wait for other ranks in training mode, as synchronised batch norms do."""
    there = torch.distributed.is_available() and torch.distributed.is_initialized()
    return there and torch.distributed.get_world_size() > 1


def is_continuous(tensor: Tensor) -> bool:
    """Whether its values are real or complex numbers, not tokens, classes or truth values."""
    return tensor.is_floating_point() or tensor.is_complex()


def is_mask(tensor: Tensor) -> bool:
    """Whether it holds only zeros and ones in the place of tokens."""
    return tensor.dtype == torch.bool or (tensor.ndim == 2 and bool(((tensor == 0) | (tensor == 1)).all()))
