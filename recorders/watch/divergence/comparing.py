"""The second net on the inputs that each module of the first one got: where modules or what is between them part."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from recorders.capture.operands import leaves
from recorders.watch.divergence.distance import Tolerance, distance
from recorders.watch.divergence.tracing import TracedCall, Watcher, copied, replaced


class Copying(Watcher):
    """Keeps copies of all inputs and outputs in the calls."""

    def before(self, call: TracedCall, args: Any, kwargs: Any) -> None:
        """Copies the inputs."""
        call.inputs = copied((args, kwargs))

    def after(self, call: TracedCall, output: Any) -> None:
        """Copies the outputs."""
        call.outputs = copied(output)


class Sighted(NamedTuple):
    """One comparison of a call of the second net with its partner in the first.

    Attributes:
        when: "in" or "out": whether inputs or outputs were compared.
        distance: of the tensors that differ most.
    """

    call: TracedCall
    partner: TracedCall
    when: str
    distance: float


@dataclass(frozen=True)
class Compared:
    """The calls of the second net with their partners, by name and number; and how many operators of the first each stands for."""

    partners: Mapping[tuple[str, int], TracedCall]
    operators: Mapping[tuple[str, int], int]

    def partner(self, call: TracedCall) -> TracedCall | None:
        """The partner of a call of the second net."""
        return self.partners.get(call.key)

    def around(self, call: TracedCall, partner: TracedCall) -> tuple[TracedCall, TracedCall]:
        """The innermost calls that are partners, and of which these two are parts: first that of the first net."""
        above = list(partner.path)[1:]
        for outer in list(call.path)[1:]:
            found = self.partner(outer)
            if found is not None and found in above:
                return found, outer
        return above[-1], list(call.path)[-1]

    def allowed(self, sighted: Sighted, tolerance: Tolerance) -> float:
        """How far rounding may bring these tensors apart."""
        inner = sighted.partner if sighted.when == "out" else sighted.partner.parent or sighted.partner
        while inner.key not in self.operators and inner.parent is not None:
            inner = inner.parent
        return tolerance(self.operators.get(inner.key, 1))


class Comparing(Watcher):
    """Compares each call with its partner, and gives it the inputs of that, so that errors do not add up from module to module."""

    def __init__(self, compared: Compared) -> None:
        self.compared = compared
        self.sighted: list[Sighted] = []

    def before(self, call: TracedCall, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Compares the inputs, and replaces them."""
        partner = self.compared.partner(call)
        if partner is None:
            return None
        far, by = 0.0, {}
        for own, other in matched([tensor for _, tensor in leaves((args, kwargs))], partner.inputs):
            apart = distance(other, own)
            far = max(far, apart)
            if apart and own.is_floating_point():
                by[id(own)] = other.to(own.device, own.dtype, copy=True)
        self.sighted.append(Sighted(call, partner, "in", far))
        return replaced((args, kwargs), by) if by else None

    def after(self, call: TracedCall, output: Any) -> None:
        """Compares the outputs."""
        partner = self.compared.partner(call)
        if partner is not None:
            far = seen_apart(partner.outputs, [tensor for _, tensor in leaves(output)])
            self.sighted.append(Sighted(call, partner, "out", far))


def seen_apart(a: list[Tensor], b: list[Tensor]) -> float:
    """The largest distance of tensors that belong together; infinite if there are as many in both and some have other shapes."""
    pairs = matched(b, a)
    if len(pairs) < len(a) == len(b):
        return math.inf
    return max((distance(first, second) for second, first in pairs), default=0.0)


def matched(own: list[Tensor], others: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Pairs of tensors with one shape, in their order: those of floats, and those of integers or truth values."""
    left = list(others)
    found = []
    for tensor in own:
        at = next((i for i, other in enumerate(left) if _form(other) == _form(tensor)), None)
        if at is not None:
            found.append((tensor, left.pop(at)))
    return found


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.is_floating_point() or tensor.is_complex()


def operators_of(calls: list[TracedCall], kept: set[tuple[str, int]]) -> dict[tuple[str, int], int]:
    """By name and number of the kept calls, the operators that they call by themselves or by modules that are not kept."""
    found = dict.fromkeys(kept, 0)
    for call in calls:
        owner = next((outer for outer in call.path if outer.key in kept), None)
        if owner is not None:
            found[owner.key] += call.operators
    return found
