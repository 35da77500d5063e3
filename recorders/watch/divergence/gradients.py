"""Gradients of two nets whose forwards agree: the first module, from the loss backwards, that hands on another gradient."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from recorders.capture.operands import leaves
from recorders.watch.divergence.distance import NOISE, distance
from recorders.watch.divergence.tracing import TracedCall, Watcher, replaced

_OfCall: TypeAlias = "dict[tuple[str, int], Tensor | None]"


@dataclass
class Gradients:
    """The gradients of one run.

    Attributes:
        calls: those of outputs and inputs of calls, by name, number, "in" or "out", and position; None if none came.
        parameters: those of parameters, by name.
        ends: how many calls ended before each, by name and number.
    """

    calls: dict[tuple[str, int], _OfCall] = field(default_factory=dict)
    parameters: dict[str, Tensor | None] = field(default_factory=dict)
    ends: dict[tuple[str, int], TracedCall] = field(default_factory=dict)


@dataclass(frozen=True)
class GradientsApart:
    """A call whose outputs get equal gradients, and that hands on others.

    Attributes:
        call: of the first net.
        parameter: the parameter of it with another gradient; "" if it is that of an input.
        distance: of the gradients.
        missing: "first" or "second" if that net has none.
    """

    call: TracedCall
    parameter: str
    distance: float
    missing: str


class GradientWatcher(Watcher):
    """Keeps the gradients of inputs and outputs of each call. It is given views of its inputs, whose gradients are of it alone."""

    def __init__(self) -> None:
        self.found = Gradients()

    def before(self, call: TracedCall, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Gives the call views of its inputs."""
        own = self.found.calls.setdefault(call.key, {})
        self.found.ends[call.key] = call
        by: dict[int, Tensor] = {}
        if torch.is_grad_enabled():
            for position, (_, tensor) in enumerate(leaves((args, kwargs))):
                if tensor.requires_grad and tensor.is_floating_point() and id(tensor) not in by:
                    by[id(tensor)] = tensor.view_as(tensor)
                    self._watch(own, ("in", position), by[id(tensor)])
        return replaced((args, kwargs), by) if by else None

    def after(self, call: TracedCall, output: Any) -> None:
        """Waits for the gradients of the outputs."""
        own = self.found.calls[call.key]
        for position, (_, tensor) in enumerate(leaves(output)):
            own["out", position] = None
            if tensor.requires_grad:
                self._watch(own, ("out", position), tensor)

    def backward(self, loss: Tensor, net: nn.Module) -> None:
        """Run the backward of a loss, and keep the gradients of the parameters."""
        named = dict(net.named_parameters(remove_duplicate=False))
        for parameter in named.values():
            parameter.grad = None
        loss.backward()  # type: ignore[no-untyped-call]
        self.found.parameters = {
            name.replace("_orig_mod.", ""): None if p.grad is None else p.grad.detach().clone() for name, p in named.items()
        }

    @staticmethod
    def _watch(own: _OfCall, key: tuple[str, int], tensor: Tensor) -> None:
        own[key] = None

        def keep(gradient: Tensor) -> None:
            own[key] = gradient.detach().clone()

        tensor.register_hook(keep)  # type: ignore[no-untyped-call]


class GradientPair:
    """The gradients of two nets.

    Args:
        partners: by name and number of a call of the first net, those of its partner.
        allowed: how far apart gradients may be.
        again: those of the first net with rounded operators: by how much they move is noise; None if that is not known.
    """

    def __init__(
        self,
        a: Gradients,
        b: Gradients,
        partners: Mapping[tuple[str, int], tuple[str, int]],
        allowed: float,
        again: Gradients | None = None,
    ) -> None:
        self.a, self.b, self.again, self.partners, self.allowed = a, b, again, partners, allowed
        self._owners: dict[int, tuple[str, int]] = {}  # a parameter's gradient is complete after the first call that uses it
        for key, call in a.ends.items():
            for parameter in call.module.parameters(recurse=False):
                self._owners.setdefault(id(parameter), key)

    def first_apart(self) -> GradientsApart | None:
        """The innermost call that gets equal gradients and hands on others, the last of several in the forward; None if none."""
        received: dict[tuple[str, int], GradientsApart] = {}
        found: list[GradientsApart] = []
        for key, call in self.a.ends.items():
            if key in self.partners:
                received[key] = self._worst(call, self._of_call(call, "out"))
                if received[key].distance <= self.allowed or call.parent is None:
                    handed = self._worst(call, [*self._of_call(call, "in"), *self._of_parameters(call)])
                    found += [handed] if handed.distance > self.allowed else []
        inner = [one for one in found if not any(other is not one and one.call in other.call.path for other in found)]
        late = [one for one in received.values() if one.distance > self.allowed]
        last = max(late, key=lambda one: one.call.end, default=None)
        if last is not None and not any(one.call.end > last.call.end for one in inner):  # what is between modules hands on another
            above = list(last.call.path)[1:]
            agree = [call for call in above if call.key in received and received[call.key].distance <= self.allowed]
            return replace(last, call=(agree or above or [last.call])[0])
        return max(inner, key=lambda one: one.call.end, default=None)

    @staticmethod
    def _worst(call: TracedCall, of: list[tuple[float, str, str]]) -> GradientsApart:
        far, parameter, missing = max(of, key=lambda item: item[0], default=(0.0, "", ""))
        return GradientsApart(call, parameter, far, missing)

    def _of_call(self, call: TracedCall, when: str) -> list[tuple[float, str, str]]:
        own, other = self.a.calls[call.key], self.b.calls.get(self.partners[call.key], {})
        again = {} if self.again is None else self.again.calls.get(call.key, {})
        return [self._compared(own[key], other[key], again.get(key), "") for key in own if key[0] == when and key in other]

    def _of_parameters(self, call: TracedCall) -> list[tuple[float, str, str]]:
        found = []
        for name, parameter in call.module.named_parameters(recurse=False):
            first, second = (f"{of}.{name}" if of else name for of in (call.name, self.partners[call.key][0]))
            if self._owners[id(parameter)] == call.key and first in self.a.parameters and second in self.b.parameters:
                again = None if self.again is None else self.again.parameters.get(first)
                found.append(self._compared(self.a.parameters[first], self.b.parameters[second], again, name))
        return found

    @staticmethod
    def _compared(own: Tensor | None, other: Tensor | None, again: Tensor | None, name: str) -> tuple[float, str, str]:
        far = _far(own, other)
        missing = "" if (own is None) == (other is None) else "first" if own is None else "second"
        is_noise = again is not None and far <= NOISE * _far(own, again)
        return (0.0 if is_noise else far), name, missing


def _far(a: Tensor | None, b: Tensor | None) -> float:
    if a is None or b is None:
        kept = a if a is not None else b
        return math.inf if kept is not None and bool((kept != 0).any()) else 0.0  # no gradient is one of zeros
    return distance(a, b)
