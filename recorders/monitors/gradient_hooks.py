"""The sites of gradients with respect to activations: hooks on the tensors themselves, in eager mode and in graphs.

A hook on a tensor gets the total gradient of that tensor, from all its uses. Unlike `register_full_backward_hook` it works with
nested outputs, and with operations that change the output in place. `torch.compile` traces the hook into its backward graph, unless
the tensor is a leaf of autograd: then the monitor breaks the graph once, or leaves the tensor out if there must be one graph.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, is_grad_enabled, nn
from torch.utils.weak import WeakIdKeyDictionary

from recorders._torch import compiler, graph_task, made_by_graph, outside_modes
from recorders.capture.calls import Call, keep_for_end, take_kept
from recorders.capture.context import capturing
from recorders.capture.entering import Fail, guarded
from recorders.capture.given import Block, block_of, keep, under
from recorders.capture.layouts import PlacementInfo
from recorders.capture.operands import TRACED, leaves, pack, symbolic, tracing
from recorders.graphs.caching import cacheable
from recorders.graphs.sinks import find_sink, find_spec, key_in_graph
from recorders.graphs.trace import emit_call, emit_failure, emit_keep, emit_leaves
from recorders.monitors.graphs import handle_in_graph, in_due_step, is_due_in_graph, wanted_in_graph
from reducers._torch import constant_in_graphs, in_graphs, when_dynamo_is_imported

NO_TENSOR = "there is no tensor in it"
INSIDE = "all uses are inside its compiled graph, its hook is not"

_numbers = itertools.count()


class Use:
    """A call of a module that used a tensor.

    Attributes:
        training: whether it counts as training.
        block: what was given then.
        tensor: a clone of the tensor, if anybody needs it.
        backward: the number of the last backward in which a gradient came to what the call returned.
        number: of later calls it is higher.
    """

    __slots__ = ("__weakref__", "backward", "block", "number", "tensor", "training")

    def __init__(self, training: bool, block: Block | None, tensor: Tensor | None) -> None:
        self.training, self.block, self.tensor = training, block, tensor
        self.backward: int | None = None
        self.number = next(_numbers)

    def after(self, earlier: Use | None) -> Use:
        """Returns this call, which is given what both were given if that is the same."""
        if earlier is not None and self.block and earlier.block:
            self.block = earlier.block.followed_by(self.block)
        return self


class Sighting:
    """A tensor with a hook for its gradient.

    A leaf of autograd outlives the graph of a call, and keeps its hook. A gradient that comes to it later, from another graph, is
    no observation of the module. So the graph tells, and holds, the calls of a leaf: see `tell_of_gradients`.

    Attributes:
        version: that of the tensor.
        handle: that of the hook.
        last: the last call that used the tensor, with what the earlier ones were given; of a leaf only until the next gradient, and
            only if the graph cannot tell the call.
        calls: the calls of a leaf that graphs tell.
    """

    def __init__(self, version: int) -> None:
        self.version = version
        self.handle: Any = None
        self.last: Use | None = None
        self.calls: WeakSet[Use] = WeakSet()

    def use(self, call: Use) -> None:
        """Notes a call of which no graph tells."""
        self.last = call.after(self.last)

    def take_leaf(self) -> Use | None:
        """Returns the last of the calls from which a gradient comes to a leaf now; None if it comes from elsewhere."""
        found = [call for call in _living(self.calls) if call.backward == graph_task()]
        found += [self.last] if self.last is not None else []
        self.last, last = None, None
        for call in sorted(found, key=lambda call: call.number):
            last = call.after(last)
        return last

    def forget(self) -> None:
        """Drops the clones that calls of a leaf hold."""
        self.last = None
        for call in _living(self.calls):
            call.tensor = None


def _living(known: WeakSet[Any]) -> list[Any]:
    """What is in a set that other threads may add to meanwhile: one call of C copies its references."""
    references: set[Any] = known.data.copy()  # type: ignore[attr-defined]
    return [found for reference in references if (found := reference()) is not None]


def tell_of_gradients(outputs: Iterable[Tensor], calls: Sequence[tuple[Sighting, Use]], fail: Fail) -> None:
    """Lets the graph of what a module returned tell its calls of leaves when a gradient comes to it, and hold them.

    If it returned nothing with a gradient, nobody tells: then the next gradient of the leaf counts as one of the call.
    """

    telling = [x for x in outputs if x.requires_grad and not x.is_leaf]
    for output in telling:
        _hook(output, partial(_tell, fail, [call for _, call in calls]))
    for sighting, call in calls:
        if telling:
            sighting.calls.add(call)
        else:
            sighting.use(call)


def _tell(fail: Fail, calls: Sequence[Use], gradient: Tensor) -> None:
    guarded(fail, _come, calls)


def _come(calls: Sequence[Use]) -> None:
    for call in calls:
        call.backward = graph_task()


class Watch:
    """The tensors whose gradients a monitor waits for.

    Attributes:
        seen: whether the module was called.
        partial: whether a compiled graph returned one of the tensors, so that a hook outside of it misses a part of the gradient.
        ends: whether there is a hook for the ends of calls, too.
    """

    def __init__(self) -> None:
        self.watched: Any = WeakIdKeyDictionary()
        self.sightings: WeakSet[Sighting] = WeakSet()  # those of tensors that only graphs hold, too
        self.seen = self.partial = self.ends = False

    def end(self) -> None:
        """Removes the hooks from all tensors."""
        for sighting in _living(self.sightings):
            sighting.handle.remove()
            sighting.forget()
        self.watched, self.sightings = WeakIdKeyDictionary(), WeakSet()

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
    """Notes the uses at once: the call has ended, or its graph is broken for it."""
    for sighting, use in watch(monitor, module, args[-1]):
        sighting.use(use)


def _before(monitor: Any, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Keeps calls that used leaves of autograd to their ends: then the graph of what the module returns is known."""
    uses = watch(monitor, module, pack(args, kwargs))
    if not uses:
        return
    if not monitor.watch.ends:
        monitor.hooks.handles.append(module.register_forward_hook(monitor._hook(partial(_end, monitor))))
        monitor.watch.ends = True
    keep_for_end(monitor, uses)


def _end(monitor: Any, module: nn.Module, *args: Any) -> None:
    uses = take_kept(monitor)
    if uses:
        tell_of_gradients([tensor for _, tensor in leaves(args[-1])], uses, monitor._fail)


def watch(monitor: Any, module: nn.Module, value: Any) -> list[tuple[Sighting, Use]]:
    """Puts hooks on the tensors in `value`; returns the uses of leaves of autograd, of which nobody has taken note."""
    if not monitor.gate.on:
        return []
    if reason := TRACED if tracing() else "" if monitor.gate.active else "not in its steps":
        monitor._skip(reason)
        return []
    if capturing():
        monitor._skip("called by a monitor")
        return []
    monitor.watch.seen = True
    if not is_grad_enabled():
        monitor._skip("no gradient will come (no_grad)")
        return []
    found, used = list(leaves(value)), list[tuple[Sighting, Use]]()
    for path, tensor in found:
        if not tensor.requires_grad:
            monitor._skip("no gradient will come (frozen or not floating point)")
            continue
        sighting, use = watch_tensor(monitor, module, path, tensor)
        if tensor.is_leaf:
            used.append((sighting, use))
        else:
            sighting.use(use)
    if not found:
        monitor._skip("traced (torch.fx)" if symbolic(value) else NO_TENSOR)
    return used


def watch_tensor(monitor: Any, module: nn.Module, path: str, tensor: Tensor) -> tuple[Sighting, Use]:
    """Puts a hook on a tensor, unless it has one; returns its sighting, and the use of it."""
    version = 0 if tensor.is_leaf else tensor._version  # a leaf keeps its hooks when an optimizer changes it in place
    sighting: Sighting | None = monitor.watch.watched.get(tensor)
    if sighting is None and graph_task() != -1:
        sighting = _recomputed(monitor.watch, tensor)
    if sighting is not None and sighting.version != version:
        sighting = None
    training, before = monitor._training(module), None if sighting is None else sighting.last
    kept: Tensor | None = None
    if before is not None and before.tensor is not None and not tensor.is_leaf:
        kept = before.tensor  # of the same version, so of the same values
    elif _needs_tensor(monitor) and monitor.gate.records_in(training):
        # A clone, because operations in place after this module would change the output before the gradient arrives.
        kept = tensor.detach().clone()
    use = Use(training, keep(monitor) if monitor.given else None, kept)
    if sighting is None:
        sighting = monitor.watch.watched[tensor] = _hooked(monitor, tensor, version, path)
    return sighting, use


def _needs_tensor(monitor: Any) -> bool:
    """Whether callables or the kind itself may look at the tensor, beside its gradient."""
    return monitor.has_callables or not monitor.as_seen


def _hooked(monitor: Any, tensor: Tensor, version: int, path: str) -> Sighting:
    sighting, leaf = Sighting(version), tensor.is_leaf
    monitor.watch.partial = monitor.watch.partial or made_by_graph(tensor)
    # No reference to the module: if it keeps its output, that would be a cycle.
    sighting.handle = _hook(tensor, partial(_arrive, monitor, sighting, leaf, path))
    monitor.watch.sightings.add(sighting)
    return sighting


def _arrive(monitor: Any, sighting: Sighting, leaf: bool, path: str, gradient: Tensor | None) -> None:
    guarded(monitor._fail, arrived, monitor, gradient, sighting, leaf, path)


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


def _hook(tensor: Tensor, function: Callable[[Tensor], Any]) -> Any:
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
    if any(tensor.is_leaf for _, tensor in found) and not compiler.must_be_one_graph():
        watch_uncompiled(sink, module, value)
    elif is_grad_enabled() and wanted_in_graph(spec, module):
        alone = not _needs_tensor(spec) and not spec.given
        for path, tensor in found:
            origin = "leaf" if tensor.is_leaf else origin_of(tensor, sink)
            if origin == "made here":
                hook_in_graph(tensor, sink, key_in_graph(spec.spec_key, handle), path, handle)
            elif origin == "given" or (origin == "given within" and alone):
                hook_given(tensor, sink, path, kept_in_graph(spec, tensor, sink))
            elif origin != "hooked":  # a leaf; or the hook is outside of the checkpoint, and what it would need inside
                emit_failure(sink)


def watch_uncompiled(sink: Tensor, module: nn.Module, value: Any) -> None:
    """Watches the leaves of `value` in plain Python, from within a graph. It is another function once Dynamo is imported."""
    monitor = _monitor_of(sink)
    if monitor is not None:
        _after(monitor, module, value)


def _disable() -> None:
    global watch_uncompiled
    watch_uncompiled = torch.compiler.disable(watch_uncompiled, reason="a leaf outlives the graph")  # type: ignore[no-untyped-call]


when_dynamo_is_imported(_disable)


def hook_given(tensor: Tensor, sink: Tensor, path: str, seen: tuple[Tensor, ...]) -> None:
    """Called while a graph is traced: registers a hook on an input of the graph, each time that the graph runs."""

    def arrive(gradient: Tensor) -> None:
        guarded("the hook on an input of a graph", _arrived_at_graph, sink, gradient, seen, path)

    _hook(tensor, arrive)


# If the user compiles a whole step, its backward runs as plain Python within it, and Dynamo would compile what hooks call.
compiler.never_trace(_arrive)
compiler.never_trace(_tell)
compiler.never_trace_what_it_defines(hook_given)


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


@cacheable
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


compiler.never_trace_what_it_defines(hook_in_graph)

_sighted: Any = WeakIdKeyDictionary()  # by traced tensor: by sink the version that has a hook


def first_sight(tensor: Tensor, sink: Tensor) -> bool:
    """Whether this sink has no hook yet on this version of a traced tensor. The record is freed with the traced tensors."""
    versions = _sighted.setdefault(tensor, WeakIdKeyDictionary())
    if versions.get(sink) == tensor._version:
        return False
    versions[sink] = tensor._version
    return True


_origin = ["unknown"]  # the last answer of Dynamo, which works for one thread at a time


def _ask_origin(context: Any) -> None:
    tensor, sink = context.get_local("tensor"), context.get_local("sink")
    node: Any = tensor.as_proxy().node
    _origin[0] = "unknown"
    with compiler.told_if_missing():
        if node.op != "placeholder" and compiler.is_node_in_reach(context, node):
            _origin[0] = "made here"
        else:
            given = "given within" if compiler.is_nested(context) else "given"
            _origin[0] = given if first_sight(tensor.as_fake(), sink.as_fake()) else "hooked"


@constant_in_graphs
def _answered_origin() -> str:
    return _origin[0]


def origin_of(tensor: Tensor, sink: Tensor) -> str:
    """Called while a graph is traced: where a tensor comes from.

    Returns:
        "made here"; "given" if it is an input of the graph, "given within" if that is seen within a checkpoint; "hooked" if it has
        a hook; "unknown" if this torch does not tell.
    """
    compiler.comptime(_ask_origin)
    origin: str = _answered_origin()
    return origin
