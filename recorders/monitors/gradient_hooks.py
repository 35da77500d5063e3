"""The sites of gradients with respect to activations: hooks on the tensors themselves, in eager mode and in graphs.

A hook on a tensor gets the total gradient of that tensor, from all its uses. Unlike `register_full_backward_hook` it works with
nested outputs, and with operations that change the output in place. `torch.compile` traces the hook into its backward graph, unless
the tensor is a leaf of autograd: then the monitor breaks the graph once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, is_grad_enabled, nn
from torch.utils.weak import WeakIdKeyDictionary

from recorders._torch import graph_task, made_by_graph, outside_modes
from recorders.capture.calls import Call, forward_frame, kept
from recorders.capture.calls import keep as keep_in_call
from recorders.capture.context import capturing
from recorders.capture.entering import guarded
from recorders.capture.given import Block, block_of, keep, under
from recorders.capture.layouts import PlacementInfo
from recorders.capture.operands import TRACED, leaves, pack, symbolic, tracing
from recorders.graphs.sinks import find_sink, find_spec
from recorders.graphs.trace import emit_call, emit_failure, emit_keep, emit_leaves
from recorders.monitors.graphs import handle_in_graph, in_due_step, is_due_in_graph, wanted_in_graph
from recorders.monitors.origins import first_sight, origin_of
from recorders.monitors.record import Observer
from recorders.monitors.sightings import Living, Sighting, Use, tell_of_gradients
from reducers._torch import constant_in_graphs, in_graphs, when_dynamo_is_imported

__all__ = ["NO_TENSOR", "Watch", "attach_to_inputs", "attach_to_outputs", "receive_gradient", "trace_watch"]

NO_TENSOR = "there is no tensor in it"
INSIDE = "all uses are inside its compiled graph, its hook is not"


class Watch:
    """The tensors whose gradients a monitor waits for.

    Attributes:
        seen: whether the module was called.
        partial: whether a compiled graph returned one of the tensors, so that a hook outside of it misses a part of the gradient.
        ends: whether there is a hook for the ends of calls, too.
    """

    def __init__(self) -> None:
        self.watched: Any = WeakIdKeyDictionary()
        self.sightings: Living[Sighting] = Living()  # those of tensors that only graphs hold, too
        self.seen = self.partial = self.ends = False

    def end(self) -> None:
        """Removes the hooks from all tensors."""
        for sighting in self.sightings.all():
            sighting.handle.remove()
            sighting.forget()
        self.watched, self.sightings = WeakIdKeyDictionary(), Living()

    def forget(self) -> None:
        """Leaves out the gradients to come of leaves of autograd, of which no graph tells."""
        for tensor, sighting in list(self.watched.items()):
            if tensor.is_leaf:
                sighting.last = None

    @constant_in_graphs
    def note_call(self) -> bool:
        """Called while a graph is traced. As a constant, because within checkpointing a graph must not change attributes."""
        self.seen = True
        return True


def attach_to_outputs(monitor: Any, module: nn.Module) -> list[Any]:
    """Hooks what the module returns, in each call."""
    hook = monitor._hook(partial(_after, monitor), "output_gradient")
    return [module.register_forward_hook(hook, prepend=monitor.prepend)]


def attach_to_inputs(monitor: Any, module: nn.Module) -> list[Any]:
    """Hooks what the module is given, in each call."""
    monitor.watch.ends = False
    hook = monitor._hook(partial(_before, monitor), "input_gradient")
    return [module.register_forward_pre_hook(hook, prepend=monitor.prepend, with_kwargs=True)]


def _after(monitor: Any, module: nn.Module, *args: Any) -> None:
    watch_to_its_end(monitor, module, args[-1])


def _before(monitor: Any, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Keeps calls that used leaves of autograd to their ends: then the graph of what the module returns is known."""
    uses = watch(monitor, module, pack(args, kwargs))
    if not uses:
        return
    if not monitor.watch.ends:
        monitor.hooks.handles.append(module.register_forward_hook(monitor._hook(partial(_end, monitor))))
        monitor.watch.ends = True
    keep_in_call(forward_frame(), _key(monitor), uses)


def _end(monitor: Any, module: nn.Module, *args: Any) -> None:
    frame = forward_frame()
    uses = kept(frame, _key(monitor))
    if uses:
        keep_in_call(frame, _key(monitor), None)
        tell_of_gradients([tensor for _, tensor in leaves(args[-1])], uses, monitor._fail)


def _key(monitor: Any) -> str:
    return f"leaves of monitor {id(monitor)}"


def watch(monitor: Any, module: nn.Module, value: Any) -> list[tuple[Sighting, Use]]:
    """Puts hooks on the tensors in `value`; returns the uses of leaves of autograd, of which nobody has taken note."""
    if not monitor.gate.on:
        return []
    if tracing() or not monitor.gate.active:
        monitor._skip(TRACED if tracing() else "not in its steps")
        return []
    if capturing():
        monitor._skip("called by a monitor")
        return []
    monitor.watch.seen = True
    if not is_grad_enabled():
        monitor._skip("no gradient will come (no_grad)")
        return []
    found = list(leaves(value))
    used: list[tuple[Sighting, Use]] = []
    for path, tensor in found:
        if tensor.requires_grad:
            used += watch_leaf(monitor, module, path, tensor)
        else:
            monitor._skip("no gradient will come (frozen or not floating point)")
    if not found:
        monitor._skip("traced (torch.fx)" if symbolic(value) else NO_TENSOR)
    return used


def watch_to_its_end(monitor: Any, module: nn.Module, value: Any) -> None:
    """Does so when the call has ended, or in a graph that is broken for it."""
    for sighting, use in watch(monitor, module, value):
        sighting.use(use)


def watch_leaf(monitor: Any, module: nn.Module, path: str, tensor: Tensor) -> list[tuple[Sighting, Use]]:
    """Puts a hook on a tensor, unless it has one; returns the use, if the tensor is a leaf of autograd."""
    version = 0 if tensor.is_leaf else tensor._version  # a leaf keeps its hooks when an optimizer changes it in place
    sighting: Sighting | None = monitor.watch.watched.get(tensor)
    if sighting is None and graph_task() != -1:
        sighting = _recomputed(monitor.watch, tensor)
    training, known = monitor._training(module), sighting is not None and sighting.version == version
    before = sighting.last if known and sighting is not None else None
    kept: Tensor | None = None
    if before is not None and before.tensor is not None and not tensor.is_leaf:
        kept = before.tensor  # of the same version, so of the same values
    elif _needs_tensor(monitor) and monitor.gate.records_in(training):
        # A clone, because operations in place after this module would change the output before the gradient arrives.
        kept = tensor.detach().clone()
    use = Use(training, keep(monitor) if monitor.given else None, kept)
    if sighting is None or not known:
        sighting = monitor.watch.watched[tensor] = _hooked(monitor, tensor, version, path)
    if tensor.is_leaf:
        return [(sighting, use)]
    sighting.use(use)
    return []


def _needs_tensor(monitor: Observer) -> bool:
    """Whether callables or the kind itself may look at the tensor, beside its gradient."""
    return monitor.has_callables or not monitor.as_seen


def _hooked(monitor: Any, tensor: Tensor, version: int, path: str) -> Sighting:
    sighting, leaf = Sighting(version), tensor.is_leaf
    monitor.watch.partial = monitor.watch.partial or made_by_graph(tensor)

    def arrive(gradient: Tensor | None) -> None:  # no reference to the module: if it keeps its output, that would be a cycle
        guarded(monitor._fail, arrived, monitor, gradient, sighting, leaf, path)

    sighting.handle = _hook(tensor, arrive)
    monitor.watch.sightings.add(sighting)
    return sighting


def _recomputed(watch: Watch, tensor: Tensor) -> Sighting | None:
    """In a backward, the sighting of a tensor that nested checkpoints saved, and gave back as another object."""
    node = tensor.grad_fn
    same = (known for known in watch.watched if node is not None and known.grad_fn is node)
    return next((watch.watched[known] for known in same if known.output_nr == tensor.output_nr), None)


def arrived(monitor: Any, gradient: Tensor | None, sighting: Sighting, leaf: bool, path: str) -> None:
    """Records a gradient that has come to a tensor."""
    use = sighting.take_leaf() if leaf else sighting.last
    if use is None:
        monitor._skip("its module was not called in the forward of this gradient")
        return
    if use.block is not None:
        use.block.used = True
    if gradient is None:
        monitor._skip(INSIDE)
    elif monitor._due(monitor.module, use.training, path) and (path or not monitor._waits(gradient)):
        _see(monitor, gradient, use.tensor, use.block, path)


def _see(
    monitor: Any, gradient: Tensor, tensor: Tensor | None, block: Block | None, path: str, info: PlacementInfo | None = None
) -> None:
    call = Call("gradient", monitor.module, gradient=gradient, tensor=tensor)
    if block is None:
        monitor._see(call, path, info)
    else:
        under(block, monitor._see, call, path, info)


def _hook(tensor: Tensor, function: Callable[[Tensor], None]) -> Any:
    """Registers a function on the gradient of a tensor; returns the handle."""
    return tensor.register_hook(function)  # type: ignore[no-untyped-call]


# In graphs


def trace_watch(spec: Any, sink: Tensor, module: nn.Module, value: Any) -> None:
    """Called while a graph is traced: hooks the tensors in `value`."""
    found = [(path, tensor) for path, tensor in leaves(value) if tensor.requires_grad]
    handle = None if tracing() else handle_in_graph(spec, sink, [tensor for _, tensor in found])
    if tracing() or (handle is None and not in_due_step(spec)):  # a graph in which nothing is recorded has no hooks on tensors
        return
    spec.watch.note_call()
    if any(tensor.is_leaf for _, tensor in found):
        watch_uncompiled(sink, module, value)
    elif is_grad_enabled() and wanted_in_graph(spec, module):
        alone = not _needs_tensor(spec) and not spec.given
        for path, tensor in found:
            origin = origin_of(tensor, sink)
            if origin == "made here":
                hook_in_graph(tensor, sink, spec.spec_key, path, handle)
            elif origin == "given" or (origin == "given within" and alone):
                hook_given(tensor, sink, path, kept_in_graph(spec, tensor, sink))
            elif origin != "hooked":  # the hook is outside of the checkpoint, and what it would need inside
                emit_failure(sink)


def watch_uncompiled(sink: Tensor, module: nn.Module, value: Any) -> None:
    """Watches the leaves of `value` in plain Python, from within a graph; does nothing if the monitor is gone.

    It is another function once Dynamo is imported.
    """
    monitor = _monitor_of(sink)
    if monitor is not None:
        watch_to_its_end(monitor, module, value)


def _disable() -> None:
    global watch_uncompiled
    watch_uncompiled = torch.compiler.disable(watch_uncompiled, reason="a leaf outlives the graph")  # type: ignore[no-untyped-call]


when_dynamo_is_imported(_disable)


def hook_given(tensor: Tensor, sink: Tensor, path: str, seen: tuple[Tensor, ...]) -> None:
    """Called while a graph is traced: registers a hook on an input of the graph, each time that the graph runs."""

    def arrive(gradient: Tensor) -> None:
        guarded("the hook on an input of a graph", _arrived_at_graph, sink, gradient, seen, path)

    _hook(tensor, arrive)


def _arrived_at_graph(sink: Tensor, gradient: Tensor, seen: tuple[Tensor, ...], path: str) -> None:
    monitor = _monitor_of(sink)
    if monitor is not None:
        receive_gradient(monitor, lambda: (gradient, *seen), path)  # the mode was asked when the graph was traced


def receive_gradient(monitor: Any, found: Callable[[], Any], path: str, info: PlacementInfo | None = None) -> None:
    """Records what a graph hands over: the gradient, the tensor if it is needed, and the number of what was given, if any."""
    if is_due_in_graph(monitor, path):
        gradient, *seen = found()
        block = block_of(seen.pop()) if monitor.given else None
        _see(monitor, gradient, seen[0] if seen else None, block, path, info)


def kept_in_graph(spec: Any, tensor: Tensor, sink: Tensor) -> tuple[Tensor, ...]:
    """Called while a graph is traced: what the graph keeps for the gradient of `tensor`, which the monitor gets with it."""
    number = (emit_keep(sink),) if spec.given else ()  # first: checkpointing marks what follows the clone, too
    return (tensor.detach().clone(), *number) if _needs_tensor(spec) else number


def _monitor_of(sink: Tensor) -> Any:
    """The monitor of a sink; None if it no longer exists."""
    found = find_sink(sink)
    return None if found is None else found.monitor


@in_graphs  # it returns nothing, and would be removed
def hook_in_graph(tensor: Tensor, sink: Tensor, key: str, path: str, handle: Tensor | None) -> None:
    """Registers a hook on a tensor of the user's graph: a node of it, which runs when AOT traces the graph and its backward.

    If Dynamo traced the hook, compiling would take several times as long. And objects that were changed in the graph before the
    hook would lose their later changes (torch 2.13), which breaks graphs with a key-value cache.
    """
    spec = find_spec(key)
    if spec is None or not tensor.requires_grad or not first_sight(tensor, sink):
        return
    seen = kept_in_graph(spec, tensor, sink)

    def arrive(gradient: Tensor) -> None:
        if seen:
            outside_modes(emit_call, sink, (gradient.detach(), *seen), path)
        else:
            emit_leaves(sink, key, [path], [gradient], path, handle)

    _hook(tensor, arrive)
