"""Runs of a net in which each call of a module is seen, with its inputs and outputs, and may be given other inputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from recorders._torch import compiled_in_place, outside_modes
from recorders.capture.operands import leaves, mapped, recomputing
from recorders.recorder.selection import Criteria, select_modules
from recorders.watch.diagnosis.probe.example import Example
from recorders.watch.divergence.restoring import Restored


@dataclass(eq=False)
class TracedCall:
    """One call of a module in one run.

    Attributes:
        name, number: of the module, and how often it was called before in this run.
        parent: the call that it is part of; None for that of the net.
        operators: how many operators it called by itself, not by modules inside it.
        inputs, outputs: copies of its tensors.
        shapes: of its outputs.
        end: how many calls ended before it.
    """

    name: str
    number: int
    module: nn.Module
    parent: TracedCall | None
    operators: int = 0
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    shapes: tuple[torch.Size, ...] = ()
    end: int = 0

    @property
    def key(self) -> tuple[str, int]:
        """What names it in a run."""
        return self.name, self.number

    @property
    def path(self) -> Iterator[TracedCall]:
        """Itself, and the calls that it is part of."""
        call: TracedCall | None = self
        while call is not None:
            yield call
            call = call.parent


class Watcher:
    """What is told of each call of a module. The base does nothing."""

    def before(self, call: TracedCall, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Called before the forward; returns what the module is given in place of these arguments, or None."""
        return None

    def after(self, call: TracedCall, output: Any) -> Any:
        """Called after the forward; returns what is returned in place of this output, or None."""
        return None


class Net:
    """A net that is run several times on one batch, each time from the state in which it is now.

    Args:
        net: is changed while it runs, and put back after.
        example: what it is called with.
        start: all that a run may change; put back before each run and after it.

    Attributes:
        names: by id of a module, its name.
        is_compiled: whether it, or a part of it, is run by `torch.compile`.
        calls: of the last run, in the order in which they began.
    """

    def __init__(self, net: nn.Module, example: Example, start: Restored) -> None:
        self.net, self.example, self._start = net, example, start
        places = select_modules(net, Criteria(), recursive=True)
        self.names = {id(place.module): place.name for place in places}
        self.modules = {place.name: place.module for place in places}
        self.is_compiled = any(compiled_in_place(module) or _wraps_compiled(module) for module in net.modules())
        self.calls: list[TracedCall] = []
        self._inside: list[TracedCall] = []
        self._counts: Counter[str] = Counter()
        self._ended = 0
        self._orders: dict[nn.Parameter, Tensor] = {}

    def lay_out_as(self, other: nn.Module) -> None:
        """Lets parameters lie in memory, while it runs, as those of the same names in another net, whose kernels add likewise."""
        named = dict(other.named_parameters(remove_duplicate=False))
        for name, own in self.net.named_parameters():
            like = named.get(name)
            if like is not None and own.shape == like.shape and own.layout is like.layout is torch.strided:
                relaid = torch.empty_like(like, dtype=own.dtype, device=own.device, requires_grad=False)
                if type(own.data) is type(like.data) is Tensor and relaid.stride() != own.stride():
                    self._orders[own] = relaid

    def run(self, watcher: Watcher | None = None, *contexts: Any, then: Callable[[Any], object] = lambda output: None) -> Any:
        """Run it within these contexts, and call `then` with what it returns; returns that."""
        self.calls, self._inside, self._counts, self._ended = [], [], Counter(), 0
        lying: list[tuple[nn.Parameter, Tensor]] = []
        try:
            self._start.restore()
            for parameter, relaid in self._orders.items():
                lying.append((parameter, parameter.data))
                parameter.data = relaid.copy_(parameter.data)
            batch = self.example.map(lambda path, tensor: given(tensor))
            with self._hooked(watcher), ExitStack() as stack:
                for context in contexts:
                    stack.enter_context(context)
                output = self.net(*batch.args, **batch.kwargs)
                then(output)
                return output
        finally:
            for parameter, data in lying:
                parameter.data = data
            self._start.restore()

    def count(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an operator, and count it for the innermost call of a module that is running."""
        if self._inside:
            self._inside[-1].operators += 1
        return operator(*args, **kwargs)

    @contextmanager
    def _hooked(self, watcher: Watcher | None) -> Iterator[None]:
        handles: list[Any] = []
        try:
            for module in {id(m): m for m in self.net.modules()}.values() if watcher is not None else ():
                if id(module) in self.names:
                    handles.append(module.register_forward_pre_hook(self._before(watcher), with_kwargs=True))
                    handles.append(module.register_forward_hook(self._after(watcher), with_kwargs=True, always_call=True))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _before(self, watcher: Any) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if recomputing():
                return None
            name = self.names[id(module)]
            call = TracedCall(name, self._counts[name], module, self._inside[-1] if self._inside else None)
            self._counts[name] += 1
            self.calls.append(call)
            self._inside.append(call)
            return outside_modes(watcher.before, call, args, kwargs)  # what it computes is not part of the net

        return hook

    def _after(self, watcher: Any) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            if recomputing() or not self._inside or self._inside[-1].module is not module:
                return None
            call = self._inside.pop()
            call.end = self._ended
            self._ended += 1
            call.shapes = tuple(tensor.shape for _, tensor in leaves(output))
            return outside_modes(watcher.after, call, output)

        return hook


def copied(value: Any) -> list[Tensor]:
    """Copies of the tensors in a value."""
    return [tensor.detach().clone() for _, tensor in leaves(value)]


def given(tensor: Tensor) -> Tensor:
    """A copy of a tensor of the batch, of which a gradient can be asked if one could before."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def replaced(value: Any, by: dict[int, Tensor]) -> Any:
    """Returns the structure with other tensors, by the id of those that are there."""
    return mapped(value, lambda tensor: by.get(id(tensor), tensor))


def only_compiled(net: nn.Module) -> list[str]:
    """The names of the outermost modules that `torch.compile` runs."""
    found = [name for name, module in net.named_modules() if compiled_in_place(module) or _wraps_compiled(module)]
    names = [name.replace("_orig_mod.", "").removesuffix("_orig_mod").removesuffix(".") for name in found]
    return [name for name in names if not any(other != name and (not other or name.startswith(f"{other}.")) for other in names)]


def _wraps_compiled(module: nn.Module) -> bool:
    return "_orig_mod" in module._modules
