"""Monitors of gradients with respect to activations, by hooks on the tensors themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from recorders._torch import graph_task, made_by_graph
from recorders.capture.calls import forward_frame, kept
from recorders.capture.calls import keep as keep_in_call
from recorders.capture.compiled import emit_failure
from recorders.capture.context import capturing
from recorders.capture.entering import guarded
from recorders.capture.given import block_of, keep, under
from recorders.capture.layouts import Told
from recorders.capture.operands import TRACED, leaves, pack, symbolic, tracing
from recorders.monitors import gradient_hooks
from recorders.monitors.base import Monitor
from recorders.monitors.gradient_hooks import hook, hook_given, hook_in_graph, kept_in_graph
from recorders.monitors.graphs import handle_in_graph, in_due_step, is_due_in_graph, wanted_in_graph
from recorders.monitors.options import MonitorOptions
from recorders.monitors.origins import origin_of
from recorders.monitors.record import add_alone
from recorders.monitors.sightings import Call, Living, Sighting, tell_of_gradients
from reducers import Reducer
from reducers._torch import constant_in_graphs

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from typing_extensions import Unpack

__all__ = ["NO_TENSOR", "BackwardInputMonitor", "BackwardMonitor", "GradientMonitor", "global_gradient"]

NO_TENSOR = "there is no tensor in it"
INSIDE = "all uses are inside its compiled graph, its hook is not"


class GradientMonitor(Monitor):
    """Records gradients with respect to activations, by hooks on the tensors themselves.

    A hook on a tensor gets the total gradient of that tensor, from all its uses. Unlike `register_full_backward_hook` it works with
    nested outputs, and with operations that change the output in place. `torch.compile` traces the hook into its backward graph,
    unless the tensor is a leaf of autograd: then the monitor breaks the graph once.
    """

    records_recomputed = True  # gradients arrive during backward, and so do recomputations by checkpointing

    def __init__(self, reducer: Reducer, module: nn.Module | None = None, **options: Unpack[MonitorOptions]) -> None:
        self._watched: Any = WeakIdKeyDictionary()
        self._sightings: Living[Sighting] = Living()  # those of tensors that only graphs hold, too
        self._seen = self.partial = False
        super().__init__(reducer, module, **options)

    def deregister(self) -> Monitor:
        for sighting in self._sightings.all():
            sighting.handle.remove()
            sighting.forget()
        self._watched, self._sightings = WeakIdKeyDictionary(), Living()
        return super().deregister()

    def reset(self, keepshape: bool = False) -> None:
        for tensor, sighting in list(self._watched.items()):
            if tensor.is_leaf:
                sighting.last = None
        super().reset(keepshape)

    clear = reset

    @property
    def seen(self) -> bool:
        """Whether its module was called; or, in a shared graph, the module of a monitor with the same recipe."""
        return self._seen or (self.hooks.twin is not None and bool(self.hooks.twin.monitor._seen))

    def _trace_watch(self, receiver: Tensor, module: nn.Module, value: Any) -> None:
        found = [(path, tensor) for path, tensor in leaves(value) if tensor.requires_grad]
        handle = None if tracing() else handle_in_graph(self, receiver, [tensor for _, tensor in found])
        if tracing() or (handle is None and not in_due_step(self)):  # a graph in which nothing is recorded has no hooks on tensors
            return
        self._see()
        if any(tensor.is_leaf for _, tensor in found):
            gradient_hooks.watch_uncompiled(receiver, module, value)
        elif torch.is_grad_enabled() and wanted_in_graph(self, module):
            for path, tensor in found:
                origin = origin_of(tensor, receiver)
                if origin == "made here":
                    hook_in_graph(tensor, receiver, self.twin_key, path, handle)
                elif origin == "given" or (origin == "given within" and self.bare and not self.given):
                    hook_given(tensor, receiver, path, kept_in_graph(self, tensor, receiver))
                elif origin != "hooked":  # the hook is outside of the checkpoint, and what it would need inside
                    emit_failure(receiver)

    @constant_in_graphs
    def _see(self) -> bool:
        """Called while a graph is traced. As a constant, because within checkpointing a graph must not change attributes."""
        self._seen = True
        return True

    def _watch(self, module: nn.Module, value: Any) -> list[tuple[Sighting, Call]]:
        """Puts hooks on the tensors in `value`; returns the calls that used leaves of autograd, of which nobody has taken note."""
        if not self.gate.on:
            return []
        if tracing() or not self.gate.active:
            self._skip(TRACED if tracing() else "not in its steps")
            return []
        if capturing():
            self._skip("called by a monitor")
            return []
        self._seen = True
        if not torch.is_grad_enabled():
            self._skip("no gradient will come (no_grad)")
            return []
        found = list(leaves(value))
        used: list[tuple[Sighting, Call]] = []
        for path, tensor in found:
            if tensor.requires_grad:
                used += self._watch_leaf(module, path, tensor)
            else:
                self._skip("no gradient will come (frozen or not floating point)")
        if not found:
            self._skip("traced (torch.fx)" if symbolic(value) else NO_TENSOR)
        return used

    def _watch_to_its_end(self, module: nn.Module, value: Any) -> None:
        """Does so when the call has ended, or in a graph that is broken for it."""
        for sighting, call in self._watch(module, value):
            sighting.use(call)

    def _watch_leaf(self, module: nn.Module, path: str, tensor: Tensor) -> list[tuple[Sighting, Call]]:
        """Puts a hook on a tensor, unless it has one; returns the call, if the tensor is a leaf of autograd."""
        version = 0 if tensor.is_leaf else tensor._version  # a leaf keeps its hooks when an optimizer changes it in place
        sighting: Sighting | None = self._watched.get(tensor)
        if sighting is None and graph_task() != -1:
            sighting = self._recomputed(tensor)
        training, known = self._training(module), sighting is not None and sighting.version == version
        before = sighting.last if known and sighting is not None else None
        seen: tuple[Tensor, ...] = ()
        if before is not None and before.seen and not tensor.is_leaf:
            seen = before.seen  # of the same version, so of the same values
        elif not self.bare and self.gate.records_in(training):
            # A clone, because operations in place after this module would change the output before the gradient arrives.
            seen = (tensor.detach().clone(),)
        call = Call(training, keep(self) if self.given else None, seen)
        if sighting is None or not known:
            sighting = self._watched[tensor] = self._hooked(tensor, version, path)
        if tensor.is_leaf:
            return [(sighting, call)]
        sighting.use(call)
        return []

    def _hooked(self, tensor: Tensor, version: int, path: str) -> Sighting:
        sighting, leaf = Sighting(version), tensor.is_leaf
        self.partial = self.partial or made_by_graph(tensor)

        def arrive(gradient: Tensor | None) -> None:  # no reference to the module: if it keeps its output, that would be a cycle
            guarded(self._fail, self._arrived, gradient, sighting, leaf, path)

        sighting.handle = hook(tensor, arrive)
        self._sightings.add(sighting)
        return sighting

    def _recomputed(self, tensor: Tensor) -> Sighting | None:
        """In a backward, the sighting of a tensor that nested checkpoints saved, and gave back as another object."""
        node = tensor.grad_fn
        same = (known for known in self._watched if node is not None and known.grad_fn is node)
        return next((self._watched[known] for known in same if known.output_nr == tensor.output_nr), None)

    def _arrived(self, gradient: Tensor | None, sighting: Sighting, leaf: bool, path: str) -> None:
        call = sighting.take_leaf() if leaf else sighting.last
        if call is None:
            self._skip("its module was not called in the forward of this gradient")
            return
        block = call.block
        if block is not None:
            block.used = True
        if gradient is None:
            self._skip(INSIDE)
        elif self._due(self.module, call.training, path) and (path or not add_alone(self, gradient)):
            if block is None:
                self._record(self.module, gradient, *call.seen, path=path)
            else:
                under(block, self._record, self.module, gradient, *call.seen, path=path)

    def _arrived_at_graph(self, gradient: Tensor, seen: tuple[Tensor, ...], path: str) -> None:
        """Records the gradient of an input of a compiled graph. The mode was asked when the graph was traced."""
        self._receive_call(lambda: (gradient, *seen), path)

    def _receive_call(self, operands: Callable[[], Any], stream: str, told: Told | None = None) -> None:
        """If the monitor takes what was given at the forward, the number of that is the last operand."""
        if not self.given:
            super()._receive_call(operands, stream, told)
        elif is_due_in_graph(self, stream):
            *found, number = operands()
            under(block_of(number), self._record, self.module, *found, path=stream, told=told)


class BackwardMonitor(GradientMonitor):
    """Records the gradient of the loss with respect to what a module returns. Operands: gradient, output.

    Each tensor leaf of the output has a gradient of its own, and so a state of its own. Nothing is recorded for outputs without a
    gradient (frozen, unused, under `no_grad`). The output is cloned only if there are callables, which get it.

    >>> import torch
    >>> from reducers import Sum
    >>> layer = torch.nn.Linear(2, 3)
    >>> monitor = BackwardMonitor(Sum(), layer)
    >>> (layer(torch.ones(1, 2)) * 2).sum().backward()
    >>> monitor.peek()
    tensor(6., dtype=torch.float64)
    """

    side = "outputs"

    def _attach(self, module: nn.Module) -> list[Any]:
        return [module.register_forward_hook(self._hook(self._after, "_trace_after"), prepend=self.prepend)]

    def _after(self, module: nn.Module, *args: Any) -> None:
        self._watch_to_its_end(module, args[-1])

    def _trace_after(self, receiver: Tensor, module: nn.Module, *args: Any) -> None:
        self._trace_watch(receiver, module, args[-1])


def global_gradient(gradient: Tensor, *, group: ProcessGroup | None = None) -> Tensor:
    """An `op_` for gradients with respect to outputs and inputs: those of the mean loss of all ranks, not of the loss of this rank.

    Under data parallelism the loss of a rank is the mean over its part of the batch, so gradients with respect to outputs are
    `world_size` times those of one process with the whole batch. This divides by the number of ranks, 1 without a process group.
    Gradients of parameters need no scaling, because DDP and FSDP2 average them.

    Args:
        gradient: any shape.
        group: the data parallel ranks, all by default; `functools.partial(global_gradient, group=...)` names fewer.

    Returns:
        the gradient divided by the number of ranks.

    >>> import torch
    >>> from reducers import Sum
    >>> layer = torch.nn.Linear(2, 3)
    >>> monitor = BackwardMonitor(Sum(), layer, op_=global_gradient)
    >>> (layer(torch.ones(1, 2)) * 2).sum().backward()  # in one process
    >>> monitor.peek()
    tensor(6., dtype=torch.float64)
    """
    among_ranks = dist.is_available() and dist.is_initialized()
    return gradient / dist.get_world_size(group) if among_ranks else gradient


class BackwardInputMonitor(GradientMonitor):
    """Records the gradient of the loss with respect to what a module is given. Operands: gradient, input.

    This is the total gradient of that tensor, from all its uses: if a residual connection takes the same tensor past the module,
    that path counts too.

    >>> import torch
    >>> from reducers import Last
    >>> layer = torch.nn.ReLU()
    >>> monitor = BackwardInputMonitor(Last(), layer)
    >>> layer(torch.tensor([-1.0, 3.0], requires_grad=True)).sum().backward()
    >>> monitor.peek()
    tensor([0., 1.])
    """

    side = "inputs"
    hooks_change = True  # a second one is put on when an input is a leaf of autograd

    def _attach(self, module: nn.Module) -> list[Any]:
        hook = self._hook(self._before, "_trace_before")
        self._ends, self._key = False, f"leaves of monitor {id(self)}"
        return [module.register_forward_pre_hook(hook, prepend=self.prepend, with_kwargs=True)]

    def _before(self, module: nn.Module, args: tuple[Any, ...], *kwargs: dict[str, Any]) -> None:
        """Keeps calls that used leaves of autograd to their ends: then the graph of what the module returns is known."""
        calls = self._watch(module, pack(args, kwargs[0] if kwargs else {}))
        if not calls:
            return
        if not self._ends:
            self.hooks.handles.append(module.register_forward_hook(self._hook(self._after)))
            self._ends = True
        keep_in_call(forward_frame(), self._key, calls)

    def _after(self, module: nn.Module, *args: Any) -> None:
        frame = forward_frame()
        calls = kept(frame, self._key)
        if calls:
            keep_in_call(frame, self._key, None)
            tell_of_gradients([tensor for _, tensor in leaves(args[-1])], calls, self._fail)

    def _trace_before(self, receiver: Tensor, module: nn.Module, args: tuple[Any, ...], *kwargs: dict[str, Any]) -> None:
        self._trace_watch(receiver, module, pack(args, kwargs[0] if kwargs else {}))
