"""Hooks on tensors for their gradients, set while a graph is traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from recorders._torch import outside_modes
from recorders.capture.compiled import emit_call, emit_keep, emit_leaves
from recorders.capture.entering import guarded
from recorders.capture.receivers import find_receiver, find_twin
from recorders.monitors.origins import first_sight
from reducers._torch import in_graphs, when_dynamo_is_imported

__all__ = ["hook", "hook_given", "hook_in_graph", "kept_in_graph", "watch_uncompiled"]


class Taking(Protocol):
    """A monitor of gradients.

    Attributes:
        bare: whether it has no callables, which would get the tensor.
        given: the names of the values that it takes from the context.
    """

    bare: bool
    given: tuple[str, ...]


def hook(tensor: Tensor, function: Callable[[Tensor], None]) -> Any:
    """Registers a function on the gradient of a tensor; returns the handle."""
    return tensor.register_hook(function)  # type: ignore[no-untyped-call]


def watch_uncompiled(receiver: Tensor, module: nn.Module, value: Any) -> None:
    """Watches the leaves of `value` in plain Python, from within a graph; does nothing if the monitor is gone.

    Call it as an attribute of this module: it is another function once Dynamo is imported.
    """
    monitor = _monitor_of(receiver)
    if monitor is not None:
        monitor._watch_to_its_end(module, value)


def _disable() -> None:
    global watch_uncompiled
    watch_uncompiled = torch.compiler.disable(watch_uncompiled, reason="a leaf outlives the graph")  # type: ignore[no-untyped-call]


when_dynamo_is_imported(_disable)


def hook_given(tensor: Tensor, receiver: Tensor, path: str, seen: tuple[Tensor, ...]) -> None:
    """Called while a graph is traced: registers a hook on an input of the graph, each time that the graph runs."""

    def arrive(gradient: Tensor) -> None:
        guarded("the hook on an input of a graph", _arrived_at_graph, receiver, gradient, seen, path)

    hook(tensor, arrive)


def _arrived_at_graph(receiver: Tensor, gradient: Tensor, seen: tuple[Tensor, ...], path: str) -> None:
    monitor = _monitor_of(receiver)
    if monitor is not None:
        monitor._arrived_at_graph(gradient, seen, path)


def kept_in_graph(twin: Taking, tensor: Tensor, receiver: Tensor) -> tuple[Tensor, ...]:
    """Called while a graph is traced: what the graph keeps for the gradient of `tensor`, which the monitor gets with it."""
    number = (emit_keep(receiver),) if twin.given else ()  # first: checkpointing marks what follows the clone, too
    return number if twin.bare else (tensor.detach().clone(), *number)


def _monitor_of(receiver: Tensor) -> Any:
    """The monitor of a receiver; None if it no longer exists."""
    found = find_receiver(receiver)
    return None if found is None else found.monitor


@in_graphs  # it returns nothing, and would be removed
def hook_in_graph(tensor: Tensor, receiver: Tensor, key: str, path: str, handle: Tensor | None) -> None:
    """Registers a hook on a tensor of the user's graph: a node of it, which runs when AOT traces the graph and its backward.

    If Dynamo traced the hook, compiling would take several times as long. And objects that were changed in the graph before the
    hook would lose their later changes (torch 2.13), which breaks graphs with a key-value cache.
    """
    twin = find_twin(key)
    if twin is None or not tensor.requires_grad or not first_sight(tensor, receiver):
        return
    seen = kept_in_graph(twin, tensor, receiver)

    def arrive(gradient: Tensor) -> None:
        if seen:
            outside_modes(emit_call, receiver, (gradient.detach(), *seen), path)
        else:
            emit_leaves(receiver, key, [path], [gradient], path, handle)

    hook(tensor, arrive)
