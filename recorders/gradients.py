"""Monitors of gradients with respect to activations, by hooks on the tensors themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from recorders.capture import capturing
from recorders.constructor import Hook
from recorders.monitor import Monitor
from recorders.operands import leaves, pack, tracing
from reducers import Reducer

__all__ = ["BackwardInputMonitor", "BackwardMonitor", "GradientMonitor"]


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
        self.seen = False
        super().__init__(reducer, module, **options)

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
        seen = () if self.map_ is None and self.op_ is None else (tensor.detach().clone(),)

        def arrive(gradient: Tensor) -> None:
            self._record(None, gradient, *seen, path=path)

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

        def arrive(gradient: Tensor) -> None:  # holds no module: one that keeps its output would need the cycle collector
            if self.registered and self._due(self.module, sighting.training, path):
                self._record(self.module, gradient, *seen, path=path)

        sighting.handle = _hook(tensor, arrive)
        self._watched[tensor] = sighting


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


def _hook(tensor: Tensor, function: Callable[[Tensor], None]) -> Any:
    return tensor.register_hook(function)  # type: ignore[no-untyped-call]
