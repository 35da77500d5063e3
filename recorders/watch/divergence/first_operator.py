"""The first operator of a module by which two nets part, found by the flow of its values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any

import torch
from torch import Tensor

from recorders.capture.operands import leaves
from recorders.watch.divergence.comparing import Comparing
from recorders.watch.divergence.distance import distance
from recorders.watch.divergence.operators import OperatorCall, OperatorLog
from recorders.watch.divergence.tracing import TracedCall, Watcher, copied

_NEVER_FAR = 1e4  # masks are filled with more


@dataclass
class Flow:
    """The operators of a module, and what they lead to.

    Attributes:
        ends: what goes out, each tensor with the operator that wrote it.
    """

    calls: list[OperatorCall] = field(default_factory=list)
    inputs: list[Tensor] = field(default_factory=list)
    ends: list[tuple[Tensor, OperatorCall | None]] = field(default_factory=list)

    @property
    def values(self) -> list[Tensor]:
        """All tensors that are seen."""
        seen = [tensor for call in self.calls for tensor in (*call.inputs, *call.outputs)]
        return [*self.inputs, *seen, *(tensor for tensor, _ in self.ends)]

    @property
    def kinds(self) -> set[tuple[str, torch.Size]]:
        """What makes tensors of which shapes: names of operators, and views as one kind."""
        return {(_kind(call), tensor.shape) for call in self.calls for tensor in call.outputs}


class Logging(Watcher):
    """Has the operators logged that one call of a module calls; modules in it that agree count as one operator each.

    Args:
        log: is switched on and off.
        target: the call.
        agreed: the calls that count as one operator.
        until: the call at whose inputs it ends; None for the end of the target.
        comparing: what gives modules their inputs, up to the target; None in the first net.
    """

    def __init__(
        self,
        log: OperatorLog,
        target: tuple[str, int],
        agreed: Iterable[tuple[str, int]],
        until: tuple[str, int] | None,
        comparing: Comparing | None = None,
    ) -> None:
        self.log, self.flow = log, Flow(log.calls)
        self._target, self._agreed, self._until, self._comparing = target, set(agreed) - {target}, until, comparing
        self._within = self._done = False
        self._skipped: tuple[TracedCall, list[Tensor]] | None = None
        log.on = False

    def before(self, call: TracedCall, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Begins, or leaves out a module."""
        tensors = [tensor for _, tensor in leaves((args, kwargs))]
        if self._within and not self._done and self._skipped is None:
            if call.key == self._until:
                self._end(tensors)
            elif call.key in self._agreed:
                self._skipped, self.log.on = (call, tensors), False
        changed = None
        if self._comparing is not None and not self._done and (not self._within or self._skipped is not None):
            changed = self._comparing.before(call, args, kwargs)
        if call.key == self._target and not self._done:
            self._within = self.log.on = True
            self.flow.inputs = copied(changed or (args, kwargs))
        return changed

    def after(self, call: TracedCall, output: Any) -> None:
        """Ends, or goes on after a module."""
        tensors = [tensor for _, tensor in leaves(output)]
        if self._skipped is not None and self._skipped[0] is call:
            inputs = self._skipped[1]
            self._skipped, self.log.on = None, True
            self.log.add_module(call.name, inputs, tensors)
        if call.key == self._target and not self._done:
            self._end(tensors)

    def _end(self, tensors: list[Tensor]) -> None:
        self.log.on, self._done = False, True
        self.flow.ends = [(tensor.detach().clone(), self.log.writer(tensor)) for tensor in tensors]


def first_apart(a: Flow, b: Flow, tolerance: float) -> tuple[OperatorCall | None, OperatorCall | None]:
    """The first operator of each net whose output the other has not, though it has all its inputs; None if there is none.

    Only operators count that lead to what goes out and differs, so it does not matter by which operators a part is computed that
    comes out equal.
    """
    found = _frontier(a, _Pool(b, tolerance)), _frontier(b, _Pool(a, tolerance))
    if not any(found):
        return first_unlike(a.calls, b.calls)
    first, second = found
    return first or _like(second, b.calls, a.calls), second or _like(first, a.calls, b.calls)


def _like(call: OperatorCall | None, own: list[OperatorCall], others: list[OperatorCall]) -> OperatorCall | None:
    """The call of the other net that stands for one: the same operator, as many calls of it before, and as many in all."""
    if call is None or call.is_module:
        return None
    mine, theirs = ([each for each in calls if each.name == call.name] for calls in (own, others))
    return theirs[mine.index(call)] if len(mine) == len(theirs) else None


def first_unlike(a: list[OperatorCall], b: list[OperatorCall]) -> tuple[OperatorCall | None, OperatorCall | None]:
    """The first place at which two sequences of operators differ by kind or settings; None where a sequence has nothing there."""
    first, second = ([call.key for call in calls] for calls in (a, b))
    for kind, a_from, a_to, b_from, b_to in SequenceMatcher(None, first, second, autojunk=False).get_opcodes():
        if kind != "equal":
            return a[a_from] if a_from < a_to else None, b[b_from] if b_from < b_to else None
    return None, None


def _frontier(flow: Flow, other: _Pool) -> OperatorCall | None:
    apart = {id(call) for call in flow.calls if not other.has_all(call)}
    waiting = [call for tensor, call in flow.ends if call is not None and not other.has(tensor)]
    seen: set[int] = set()
    found: list[OperatorCall] = []
    while waiting:
        call = waiting.pop()
        if id(call) in seen or id(call) not in apart:
            continue
        seen.add(id(call))
        before = [read for read in call.reads if read is not None and id(read) in apart]
        waiting += before
        if not before:
            found.append(call)
    return min(found, key=lambda call: call.index, default=None)


class _Pool:
    """Tensors of one net, of which can be asked whether one is like a tensor of the other."""

    def __init__(self, flow: Flow, tolerance: float) -> None:
        self._tolerance, self._kinds = tolerance, flow.kinds
        self._by_size: dict[int, list[tuple[Tensor, float, float]]] = {}
        known: set[int] = set()
        for tensor in flow.values:
            if id(tensor) not in known:
                known.add(id(tensor))
                self._by_size.setdefault(tensor.numel(), []).append((tensor, *_measures(tensor)))

    def has_all(self, call: OperatorCall) -> bool:
        """Whether there are the outputs of an operator, or it only shows a parameter that there is not."""
        if call.is_view and call.inputs and call.reads[0] is None and not self.has(call.inputs[0]):
            return True
        return all(self.has(tensor, exactly=(_kind(call), tensor.shape) in self._kinds) for tensor in call.outputs)

    def has(self, tensor: Tensor, exactly: bool = False) -> bool:
        """Whether there is a tensor of the same numbers: in the same shape, or, if not `exactly`, ordered otherwise."""
        total, top = _measures(tensor)
        likely = [
            other
            for other, its_total, its_top in self._by_size.get(tensor.numel(), [])
            if max(top, its_top) > _NEVER_FAR or abs(total - its_total) <= self._tolerance * max(top, its_top) * tensor.numel()
            if other.is_floating_point() == tensor.is_floating_point() or tensor.numel() == 0
        ]
        same = [other for other in likely if other.shape == tensor.shape]
        if any(distance(tensor, other) <= self._tolerance for other in same):
            return True
        return not exactly and any(
            distance(_sorted(tensor), _sorted(other)) <= self._tolerance for other in likely if other.shape != tensor.shape
        )


def _kind(call: OperatorCall) -> str:
    return "view" if call.is_view else call.name


def _measures(tensor: Tensor) -> tuple[float, float]:
    if not tensor.numel() or tensor.is_complex():
        return 0.0, torch.inf
    size = tensor.double().abs().nan_to_num(0, 0, 0)
    return float(size.sum()), torch.inf if bool((~tensor.isfinite()).any()) else float(size.max())


def _sorted(tensor: Tensor) -> Tensor:
    flat = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return flat.reshape(-1).sort().values
