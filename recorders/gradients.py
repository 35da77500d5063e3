"""Monitors of gradients with respect to activations, by hooks on the tensors themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch._dynamo.comptime import ComptimeContext, comptime
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
from torch.utils.weak import WeakIdKeyDictionary

from recorders.capture import capturing
from recorders.compiled import hand_over
from recorders.constructor import Hook
from recorders.monitor import Monitor
from recorders.operands import leaves, pack, tracing
from reducers import Reducer

__all__ = ["BackwardInputMonitor", "BackwardMonitor", "GradientMonitor"]


INSIDE = "all uses are inside its compiled graph, its hook is not"


class _Sighting:
    """A tensor whose gradient is awaited: the mode of the call that it was seen in last, and the version that was hooked."""

    def __init__(self, training: bool, version: int, handle: Any) -> None:
        self.training, self.version, self.handle = training, version, handle


class GradientMonitor(Monitor):
    """Gradients with respect to activations, by hooks on the tensors themselves.

    A hook on a tensor sees the total gradient of that tensor, from all its uses. Unlike `register_full_backward_hook` it survives
    in-place operations on the output and nested outputs. It is traced into the backward graph of `torch.compile`, unless there is a
    `filter_`, which looks at numbers, or the tensor is a leaf: then the monitor breaks the graph once.
    """

    def __init__(self, reducer: Reducer, module: nn.Module | None = None, **options: Any) -> None:
        self._watched: Any = WeakIdKeyDictionary()
        self._traced: Any = WeakIdKeyDictionary()
        self.seen = self.partial = False
        super().__init__(reducer, module, **options)
        _monitors[self._graph_name] = self

    def deregister(self) -> Monitor:
        for sighting in self._watched.values():
            sighting.handle.remove()
        self._watched = WeakIdKeyDictionary()
        return super().deregister()

    def _watch(self, module: nn.Module, value: Any) -> None:
        if tracing():
            return
        if not self._awake():  # a graph in which nothing is recorded has no hooks on tensors
            self._skip("not in its steps")
            return
        if not torch.compiler.is_compiling():
            self._watch_eagerly(module, value)
        elif self.filter_ is not None or any(tensor.is_leaf and tensor.requires_grad for _, tensor in leaves(value)):
            self._watch_uncompiled(module, value)
        else:
            self._watch_traced(module, value)

    def _watch_traced(self, module: nn.Module, value: Any) -> None:
        self._see()
        if not torch.is_grad_enabled() or not self._due(module, self._training(module)):
            return
        for path, tensor in leaves(value):
            if tensor.requires_grad:
                self._watch_traced_leaf(path, tensor)

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def _see(self) -> bool:
        """While the graph is traced: within checkpointing a graph may change no attribute."""
        self.seen = True
        return True

    def _watch_traced_leaf(self, path: str, tensor: Tensor) -> None:
        asks = self.map_ is not None or self.op_ is not None
        origin = _origin(tensor, self._graph_name)
        if origin == "made here" and not asks:
            _hook_in_graph(tensor, self._graph_name, path)
        elif origin != "hooked":
            seen = (tensor.detach().clone(),) if asks else ()

            def arrive(gradient: Tensor) -> None:
                self._record(None, gradient, *seen, path=path)

            _hook(tensor, arrive)

    def _first_sight(self, tensor: Tensor) -> bool:
        """Whether a tensor of the tracing is new here, as in eager mode; what is remembered goes with the tracing."""
        version = tensor._version
        if self._traced.get(tensor) == version:
            return False
        self._traced[tensor] = version
        return True

    def _watch_in_graph(self, path: str, tensor: Tensor) -> None:
        if not self._first_sight(tensor):
            return

        def arrive(gradient: Tensor) -> None:
            try:
                hand_over(self._graph_name, self.reducer, {path: (gradient.detach(),)}, path)
            except Exception:  # a reducer that looks at numbers: it gets them when the graph runs
                torch.ops.torch_recorders.observe(self._graph_name, path, gradient.detach())

        _hook(tensor, arrive)

    def _belated(self) -> bool:  # a backward is where checkpointing recomputes, and where gradients come from
        return not self.registered

    @torch.compiler.disable(reason="a leaf outlives the graph, and a filter looks at numbers")  # type: ignore[no-untyped-call, untyped-decorator]
    def _watch_uncompiled(self, module: nn.Module, value: Any) -> None:
        self._watch_eagerly(module, value)

    def _watch_eagerly(self, module: nn.Module, value: Any) -> None:
        if capturing():
            self._skip("called by a monitor")
            return
        self.seen = True
        if not torch.is_grad_enabled():
            self._skip("no gradient will come (no_grad)")
            return
        for path, tensor in leaves(value):
            if tensor.requires_grad:
                self._watch_leaf(module, path, tensor)
            else:
                self._skip("no gradient will come (frozen or not floating point)")

    def _watch_leaf(self, module: nn.Module, path: str, tensor: Tensor) -> None:
        version = 0 if tensor.is_leaf else tensor._version  # a leaf keeps its hooks when an optimizer changes it in place
        known = self._watched.get(tensor)
        if known is not None and known.version == version:  # seen before: its one total gradient is awaited already
            known.training = self._training(module)
            return
        # A clone: an in-place operation after this module would change what a view shows by the time the gradient arrives.
        seen = () if self.map_ is None and self.op_ is None and self.filter_ is None else (tensor.detach().clone(),)
        sighting = _Sighting(self._training(module), version, None)
        self.partial = self.partial or _used_inside(tensor)

        def arrive(gradient: Tensor | None) -> None:  # holds no module: one that keeps its output would need the cycle collector
            self._arrived(gradient, seen, sighting, path)

        sighting.handle = _hook(tensor, arrive)
        self._watched[tensor] = sighting

    def _arrived(self, gradient: Tensor | None, seen: tuple[Tensor, ...], sighting: _Sighting, path: str) -> None:
        if gradient is None:
            self._skip(INSIDE)
        elif self.registered and self._due(self.module, sighting.training, path) and (path or not self._waits(gradient)):
            self._record(self.module, gradient, *seen, path=path)

    def _observed(self, path: str, gradient: Tensor) -> None:
        """What a graph could not lift. Its mode was asked before."""
        if self.registered and self._due(None, self.train_update, path):
            self.compiled = True
            self._record(None, gradient.clone(), path=path)  # the graph reuses the memory of what it hands over


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
        return [module.register_forward_hook(Hook(self._after), prepend=self.prepend)]

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._watch(module, output)


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
        return [module.register_forward_pre_hook(Hook(self._before), prepend=self.prepend, with_kwargs=True)]

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._watch(module, pack(args, kwargs))


def _used_inside(tensor: Tensor) -> bool:
    """Whether a compiled graph returned `tensor` among others, which may be made of it: a hook outside sees no gradient of that."""
    node = tensor.grad_fn
    return type(node).__name__ == "CompiledFunctionBackward" and len(node._input_metadata) > 1  # type: ignore[union-attr]


def _hook(tensor: Tensor, function: Callable[[Tensor], None]) -> Any:
    return tensor.register_hook(function)  # type: ignore[no-untyped-call]


_monitors: WeakValueDictionary[str, GradientMonitor] = WeakValueDictionary()


def _hook_in_graph(tensor: Tensor, name: str, path: str) -> None:
    """A node of the user's graph. It runs where the graph with its backward is traced, behind the compiler's front end.

    A hook that the front end traces takes some times as long to compile. Objects that were changed in the graph before it lose what
    is changed after it (torch 2.13), so that graphs with a key-value cache would break.
    """
    monitor = _monitors.get(name)
    if monitor is not None and tensor.requires_grad:
        monitor._watch_in_graph(path, tensor)


torch.fx.has_side_effect(_hook_in_graph)  # it returns nothing, and would be removed
torch.compiler.allow_in_graph(_hook_in_graph)  # type: ignore[no-untyped-call]


def _observe(name: str, path: str, gradient: Tensor) -> None:
    """A node of the user's backward: what cannot be lifted in a graph is recorded as in eager mode."""
    monitor = _monitors.get(name)
    if monitor is not None:
        monitor._observed(path, gradient)


_library: Any = torch.library.Library("torch_recorders", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("observe(str name, str path, Tensor gradient) -> ()", tags=(torch.Tag.cudagraph_unsafe,))
_library.impl("observe", _observe, "CompositeExplicitAutograd")
_library._register_fake("observe", lambda *_: None)
_register_effectful_op(torch.ops.torch_recorders.observe.default, _EffectType.ORDERED)  # as `take`, which it stands in for


class _Told:
    """What the compiler's front end said last; it works for one thread at a time."""

    origin = ""


def _in_reach(node: torch.fx.Node, context: ComptimeContext) -> bool:
    """Whether what is called now sees the tensor of `node` itself: in its graph, or in checkpoints there, which run in place."""
    tracer: Any = context._i_will_not_complain_if_bc_breaks_InstructionTranslator().output.current_tracer
    while tracer.graph is not node.graph and tracer.source_target is torch.ops.higher_order.tag_activation_checkpoint:
        tracer = tracer.parent
    return tracer.graph is node.graph


def _ask(context: ComptimeContext) -> None:
    tensor, name = context.get_local("tensor"), context.get_local("name").as_python_constant()
    node: Any = tensor.as_proxy().node  # type: ignore[union-attr]
    fake: Any = tensor.as_fake()
    monitor = _monitors[name]
    made = node.op != "placeholder" and _in_reach(node, context)
    in_graph = made and monitor.map_ is monitor.op_ is None  # told apart there
    _Told.origin = "hooked" if not in_graph and not monitor._first_sight(fake) else "made here" if made else "given"


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _told() -> str:
    return _Told.origin


def _origin(tensor: Tensor, name: str) -> str:
    """While a graph is traced: "made here", "given" where it has other uses outside, or "hooked" already by the monitor `name`."""
    comptime(_ask)
    origin: str = _told()
    return origin
