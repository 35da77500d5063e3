"""Monitors of gradients with respect to activations, by hooks on the tensors themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from recorders._torch import ComptimeContext, comptime, outside_modes
from recorders.capture.compiled import emit_call, emit_leaves, find_receiver, find_twin
from recorders.capture.context import capturing
from recorders.capture.operands import leaves, pack, symbolic, tracing
from recorders.monitors.base import Monitor
from recorders.monitors.graphs import in_due_step, is_due_in_graph, wanted_in_graph
from recorders.monitors.options import MonitorOptions
from recorders.monitors.record import add_alone
from recorders.schedule.stopwatch import entrance, tensor_hook
from reducers import Reducer

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["NO_TENSOR", "BackwardInputMonitor", "BackwardMonitor", "GradientMonitor"]


NO_TENSOR = "there is no tensor in it"
INSIDE = "all uses are inside its compiled graph, its hook is not"


class _Sighting:
    """A tensor whose gradient is awaited: the mode of the call that it was seen in last, and the version that was hooked."""

    def __init__(self, training: bool, version: int, handle: Any) -> None:
        self.training, self.version, self.handle = training, version, handle


class GradientMonitor(Monitor):
    """Gradients with respect to activations, by hooks on the tensors themselves.

    A hook on a tensor sees the total gradient of that tensor, from all its uses. Unlike `register_full_backward_hook` it survives
    in-place operations on the output and nested outputs. It is traced into the backward graph of `torch.compile`, unless the tensor
    is a leaf: then the monitor breaks the graph once.
    """

    records_recomputed = True  # a backward is where checkpointing recomputes, and where gradients come from

    def __init__(self, reducer: Reducer, module: nn.Module | None = None, **options: Unpack[MonitorOptions]) -> None:
        self._watched: Any = WeakIdKeyDictionary()
        self._seen = self.partial = False
        super().__init__(reducer, module, **options)

    def deregister(self) -> Monitor:
        for sighting in self._watched.values():
            sighting.handle.remove()
        self._watched = WeakIdKeyDictionary()
        return super().deregister()

    @property
    def seen(self) -> bool:
        """Whether its module was called, or that of a monitor made alike, in a graph that both share."""
        return self._seen or (isinstance(self._twin, GradientMonitor) and self._twin._seen)

    def _trace_watch(self, receiver: Tensor, module: nn.Module, value: Any) -> None:
        if tracing() or not in_due_step(self):  # a graph in which nothing is recorded has no hooks on tensors
            return
        self._see()
        found = [(path, tensor) for path, tensor in leaves(value) if tensor.requires_grad]
        if any(tensor.is_leaf for _, tensor in found):
            _watch_uncompiled(receiver, module, value)
        elif torch.is_grad_enabled() and wanted_in_graph(self, module):
            for path, tensor in found:
                origin = _origin(tensor, receiver)
                if origin == "made here":
                    _hook_in_graph(tensor, receiver, self.twin_key, path)
                elif origin == "given":
                    _hook_given(tensor, receiver, path, () if self.bare else (tensor.detach().clone(),))

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def _see(self) -> bool:
        """While the graph is traced: within checkpointing a graph may change no attribute."""
        self._seen = True
        return True

    def _watch(self, module: nn.Module, value: Any) -> None:
        if tracing() or not self.gate.on:
            return
        if not self.gate.active:
            self._skip("not in its steps")
            return
        if capturing():
            self._skip("called by a monitor")
            return
        self._seen = True
        if not torch.is_grad_enabled():
            self._skip("no gradient will come (no_grad)")
            return
        found = list(leaves(value))
        for path, tensor in found:
            if tensor.requires_grad:
                self._watch_leaf(module, path, tensor)
            else:
                self._skip("no gradient will come (frozen or not floating point)")
        if not found:
            self._skip("traced (torch.fx)" if symbolic(value) else NO_TENSOR)

    def _watch_leaf(self, module: nn.Module, path: str, tensor: Tensor) -> None:
        version = 0 if tensor.is_leaf else tensor._version  # a leaf keeps its hooks when an optimizer changes it in place
        known = self._watched.get(tensor)
        if known is not None and known.version == version:  # seen before: its one total gradient is awaited already
            known.training = self._training(module)
            return
        # A clone: an in-place operation after this module would change what a view shows by the time the gradient arrives.
        seen = () if self.bare else (tensor.detach().clone(),)
        sighting = _Sighting(self._training(module), version, None)
        self.partial = self.partial or _used_inside(tensor)

        def arrive(gradient: Tensor | None) -> None:  # holds no module: one that keeps its output would need the cycle collector
            outside_modes(self._arrived, gradient, seen, sighting, path)

        sighting.handle = _hook(tensor, arrive)
        self._watched[tensor] = sighting

    @tensor_hook
    def _arrived(self, gradient: Tensor | None, seen: tuple[Tensor, ...], sighting: _Sighting, path: str) -> None:
        if gradient is None:
            self._skip(INSIDE)
        elif self._due(self.module, sighting.training, path) and (path or not add_alone(self, gradient)):
            self._record(self.module, gradient, *seen, path=path)

    @entrance
    def _arrived_at_graph(self, gradient: Tensor, seen: tuple[Tensor, ...], path: str) -> None:
        """The gradient of what a graph was given. Its mode was asked when the graph was traced."""
        if is_due_in_graph(self, path):
            self._record(self.module, gradient, *seen, path=path)


class BackwardMonitor(GradientMonitor):
    """Records the gradient of the loss with respect to what a module returns. Operands: gradient, output.

    Each tensor leaf of the output has a gradient, and so a state, of its own. Outputs that get none (frozen, unused, under
    `no_grad`) record nothing. The output is cloned only where a callable asks for it.

    >>> import torch
    >>> from reducers import Sum
    >>> layer = torch.nn.Linear(2, 3)
    >>> monitor = BackwardMonitor(Sum(), layer)
    >>> (layer(torch.ones(1, 2)) * 2).sum().backward()
    >>> monitor.peek()
    tensor(6., dtype=torch.float64)
    """

    def _attach(self, module: nn.Module) -> list[Any]:
        return [module.register_forward_hook(self._hook(self._after, "_trace_after"), prepend=self.prepend)]

    def _after(self, module: nn.Module, *args: Any) -> None:
        self._watch(module, args[-1])

    def _trace_after(self, receiver: Tensor, module: nn.Module, *args: Any) -> None:
        self._trace_watch(receiver, module, args[-1])


class BackwardInputMonitor(GradientMonitor):
    """Records the gradient of the loss with respect to what a module is given. Operands: gradient, input.

    It is the total gradient of that tensor, from all its uses: where a residual connection passes the same tensor by, that
    path counts too.

    >>> import torch
    >>> from reducers import Last
    >>> layer = torch.nn.ReLU()
    >>> monitor = BackwardInputMonitor(Last(), layer)
    >>> layer(torch.tensor([-1.0, 3.0], requires_grad=True)).sum().backward()
    >>> monitor.peek()
    tensor([0., 1.])
    """

    def _attach(self, module: nn.Module) -> list[Any]:
        hook = self._hook(self._before, "_trace_before")
        return [module.register_forward_pre_hook(hook, prepend=self.prepend, with_kwargs=True)]

    def _before(self, module: nn.Module, args: tuple[Any, ...], *kwargs: dict[str, Any]) -> None:
        self._watch(module, pack(args, kwargs[0] if kwargs else {}))

    def _trace_before(self, receiver: Tensor, module: nn.Module, args: tuple[Any, ...], *kwargs: dict[str, Any]) -> None:
        self._trace_watch(receiver, module, pack(args, kwargs[0] if kwargs else {}))


def _used_inside(tensor: Tensor) -> bool:
    """Whether a compiled graph returned `tensor` among others, which may be made of it: a hook outside sees no gradient of that."""
    node = tensor.grad_fn
    return type(node).__name__ == "CompiledFunctionBackward" and len(node._input_metadata) > 1  # type: ignore[union-attr]


def _hook(tensor: Tensor, function: Callable[[Tensor], None]) -> Any:
    return tensor.register_hook(function)  # type: ignore[no-untyped-call]


@torch.compiler.disable(reason="a leaf outlives the graph")  # type: ignore[no-untyped-call, untyped-decorator]
def _watch_uncompiled(receiver: Tensor, module: nn.Module, value: Any) -> None:
    monitor = _monitor_of(receiver)
    if monitor is not None:
        monitor._watch(module, value)


def _hook_given(tensor: Tensor, receiver: Tensor, path: str, seen: tuple[Tensor, ...]) -> None:
    """While a graph is traced: it was given this tensor, so the hook goes on outside of the graph, whenever the graph has run."""

    def arrive(gradient: Tensor) -> None:
        outside_modes(_arrived_at_graph, receiver, gradient, seen, path)

    _hook(tensor, arrive)


def _arrived_at_graph(receiver: Tensor, gradient: Tensor, seen: tuple[Tensor, ...], path: str) -> None:
    monitor = _monitor_of(receiver)
    if monitor is not None:
        monitor._arrived_at_graph(gradient, seen, path)


def _monitor_of(receiver: Tensor) -> Any:
    """The monitor of a receiver; None if it no longer exists."""
    found = find_receiver(receiver)
    return None if found is None else found.monitor


def _hook_in_graph(tensor: Tensor, receiver: Tensor, key: str, path: str) -> None:
    """A node of the user's graph. It runs where the graph with its backward is traced, behind the compiler's front end.

    A hook that the front end traces takes some times as long to compile. Objects that were changed in the graph before it lose what
    is changed after it (torch 2.13), so that graphs with a key-value cache would break.
    """
    twin = find_twin(key)
    if twin is None or not tensor.requires_grad or not _first_sight(tensor, receiver):
        return
    seen = () if twin.bare else (tensor.detach().clone(),)

    def arrive(gradient: Tensor) -> None:
        if seen:
            outside_modes(emit_call, receiver, (gradient.detach(), *seen), path)
        else:
            emit_leaves(receiver, key, [path], [gradient], path)

    _hook(tensor, arrive)


torch.fx.has_side_effect(_hook_in_graph)  # it returns nothing, and would be removed
torch.compiler.allow_in_graph(_hook_in_graph)  # type: ignore[no-untyped-call]

_sighted: Any = WeakIdKeyDictionary()


def _first_sight(tensor: Tensor, receiver: Tensor) -> bool:
    """Whether a tensor of the tracing is new to this receiver, as in eager mode; what is remembered goes with the tracing."""
    versions = _sighted.setdefault(tensor, WeakIdKeyDictionary())
    if versions.get(receiver) == tensor._version:
        return False
    versions[receiver] = tensor._version
    return True


class _Listeners:
    """What the compiler's front end said last; it works for one thread at a time."""

    origin = ""


def _in_reach(node: torch.fx.Node, context: ComptimeContext) -> bool:
    """Whether what is called now sees the tensor of `node` itself: in its graph, or in checkpoints there, which run in place."""
    tracer: Any = context._i_will_not_complain_if_bc_breaks_InstructionTranslator().output.current_tracer
    while tracer.graph is not node.graph and tracer.source_target is torch.ops.higher_order.tag_activation_checkpoint:
        tracer = tracer.parent
    return tracer.graph is node.graph


def _ask(context: ComptimeContext) -> None:
    tensor, receiver = context.get_local("tensor"), context.get_local("receiver")
    node: Any = tensor.as_proxy().node  # type: ignore[union-attr]
    if node.op != "placeholder" and _in_reach(node, context):
        _Listeners.origin = "made here"
    else:
        fake: Any = tensor.as_fake()
        _Listeners.origin = "given" if _first_sight(fake, receiver.as_fake()) else "hooked"  # type: ignore[arg-type]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _told() -> str:
    return _Listeners.origin


def _origin(tensor: Tensor, receiver: Tensor) -> str:
    """While a graph is traced: "made here", "given" if it has other uses outside, or "hooked" already for this receiver."""
    comptime(_ask)
    origin: str = _told()
    return origin
