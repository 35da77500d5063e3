"""Every private API of PyTorch that this package uses, checked on torch 2.13; nothing else in it imports one.

All names are there from torch 2.8 on, so eager mode needs no more. Inside compiled graphs they do what they should from 2.13 on.

A name that begins with an underscore may go in any release. If one is gone, this file says what it was for.
"""

from __future__ import annotations

import ctypes
import inspect
import sys
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import chain, repeat, starmap
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import Tensor, fx
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch._dynamo import callback as compilation
from torch._dynamo.comptime import ComptimeContext, comptime
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.module import _has_any_global_hook as has_global_hooks
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes as no_modes

__all__ = [
    "CAPTURES_IN_GRAPHS",
    "ComptimeContext",
    "NoAutocast",
    "NoInference",
    "at_end_of_backward",
    "autocast_is_on",
    "autograd_node",
    "break_graph",
    "compilation",
    "compile_always",
    "comptime",
    "graph_task",
    "graph_task_address",
    "group_timeout",
    "has_compiled",
    "has_dispatch_modes",
    "has_global_hooks",
    "inside_transform",
    "is_batched",
    "is_being_written_down",
    "is_distributed",
    "is_fake",
    "is_plain_moment",
    "make_effectful",
    "may_run_again",
    "never_trace",
    "no_modes",
    "outside_modes",
    "run_of_node",
    "run_uncompiled",
    "set_grad_enabled",
    "skip_frames",
    "style_layouts",
    "without_modes",
]

CAPTURES_IN_GRAPHS = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)  # whether monitors can record there

# Contexts written in C: those written in Python can be interrupted while they end, and then leave a mode as it was inside.
NoInference = torch._C._InferenceMode
NoAutocast = torch._C._DisableAutocast
set_grad_enabled = torch._C._set_grad_enabled  # a function, where torch.set_grad_enabled is a context written in Python

# Functions that a hook calls every time are bound here, because a global is found faster than an attribute.
graph_task = torch._C._current_graph_task_id  # -1 if no backward runs in this thread
autograd_node = torch._C._current_autograd_node  # the node whose backward runs in this thread; None if none does
autocast_is_on = torch._C._is_any_autocast_enabled
is_batched = torch._C._functorch.is_legacy_batchedtensor
_inference_is_on = torch.is_inference_mode_enabled
_interpreter = torch._C._functorch.peek_interpreter_stack
_jit_trace = torch._C._get_tracing_state
_count_dispatch = torch._C._len_torch_dispatch_stack
_count_function = torch._C._len_torch_function_stack
_pop_dispatch = torch._C._pop_torch_dispatch_stack
_pop_function = torch._C._pop_torch_function_stack
_push_dispatch = torch._C._push_on_torch_dispatch_stack
_push_function = torch._C._push_on_torch_function_stack


def without_modes(call: Callable[..., Any], *args: Any) -> Any:
    """Call `call(*args)` without all modes, also those of PyTorch: fake tensors, inference, autocast, gradients, default device."""
    return outside_modes(_run_plainly, call, args)


def _run_plainly(call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    device = torch.device("cpu") if _count_function() else nullcontext()  # a default device is a mode that stays
    with no_modes(), NoInference(False), NoAutocast(), torch.no_grad(), device:
        return call(*args)


def group_timeout(group: Any, device: torch.device) -> float | None:
    """The seconds that collectives of a process group wait for a rank; None if it cannot be told. For errors only."""
    try:
        seconds: float = group._get_backend(device).options._timeout.total_seconds()
    except Exception:
        return None
    return seconds


def is_distributed(module: torch.nn.Module) -> bool:
    """Whether the parameters of a layer, or its inputs and outputs, were spread over ranks by a style of tensor parallelism."""
    return getattr(module, "_distribute_module_applied", False)


def style_layouts(module: torch.nn.Module, side: str) -> tuple[Any, tuple[Any, ...]] | None:
    """The device mesh and the placements of the plain "outputs" or "inputs" of a tensor-parallel layer.

    `ColwiseParallel` and `RowwiseParallel` keep them in the functions that they register as hooks. None if there is no such style.
    """
    outputs = side == "outputs"
    for hook in (module._forward_hooks if outputs else module._forward_pre_hooks).values():
        held = inspect.getclosurevars(hook).nonlocals if inspect.isfunction(hook) else {}
        convert, mesh = held.get("output_fn" if outputs else "input_fn"), held.get("device_mesh")
        if mesh is None or not isinstance(convert, partial) or len(convert.args) != 2:
            continue
        kinds, rest = convert.args  # of outputs the second says whether they become plain
        if convert.func.__name__ == f"_prepare_{side[:-1]}_fn" and isinstance(kinds, tuple) and isinstance(rest, (bool, tuple)):
            return mesh, kinds
    return None


def is_fake(tensor: object) -> bool:
    """Whether this is a tensor of `FakeTensorMode`, which has a shape but no data."""
    return isinstance(tensor, FakeTensor)


# Modes of PyTorch itself, below the user's on the stack: while a program is traced, tensors have no meaning without them.
_INTERNAL = tuple(torch._C._TorchDispatchModeKey.__members__.values())
_PROXY = torch._C._TorchDispatchModeKey.PROXY


def graph_task_address() -> int | None:
    """The address of the function in C++ that `graph_task` calls; None if it is not found."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        return ctypes.cast(library._ZN5torch8autograd25get_current_graph_task_idEv, ctypes.c_void_p).value
    except (OSError, AttributeError):
        return None


def has_compiled() -> bool:
    """Whether `torch.compile` has looked at any program in this process."""
    return bool(torch._dynamo.utils.counters["frames"])


def has_dispatch_modes() -> bool:
    """Whether any dispatch mode is on in this thread."""
    return bool(_count_dispatch())


def inside_transform() -> bool:
    """Whether this code runs inside vmap, grad or functionalisation."""
    return _interpreter() is not None


def is_being_written_down() -> bool:
    """Whether a program is being written down by `torch.jit.trace` or `make_fx`."""
    return _jit_trace() is not None or torch._C._get_dispatch_mode(_PROXY) is not None


def is_plain_moment(tensor: Tensor) -> bool:
    """Whether no mode of PyTorch or of the user is on that would reach what is done with `tensor`."""
    return not (
        _inference_is_on()
        or autocast_is_on()
        or _count_dispatch()
        or is_batched(tensor)
        or _interpreter() is not None
        or _jit_trace() is not None
    )


def run_of_node(target: Any) -> tuple[fx.Interpreter | None, bool]:
    """The run of an FX graph of which a node calls `target` now, as AOT does, and whether no later node of the graph calls it.

    The run is None if there is none: in a backward, and if a graph runs as Python code.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "run_node":
            run, node = frame.f_locals.get("self"), frame.f_locals.get("n")
            if isinstance(run, fx.Interpreter) and isinstance(node, fx.Node):
                return (run, _is_last(node)) if node.target is target else (None, False)
        frame = frame.f_back  # type: ignore[assignment]
    return None, False


def _is_last(node: fx.Node) -> bool:
    later = node.next
    while later.op != "root":
        if later.target is node.target:
            return False
        later = later.next
    return True


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Call `call` when the backward ends that runs in this thread."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def make_effectful(operator: Any) -> None:
    """Keep `operator`, which returns nothing, in compiled graphs, in its order: a graph drops what has no effect."""
    _register_effectful_op(operator, _EffectType.ORDERED)


def may_run_again() -> bool:
    """Whether a checkpoint may run this forward again, or does so: hooks keep what it saves, or a backward is under way."""
    return graph_task() != -1 or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def run_uncompiled(code: CodeType) -> None:
    """Let functions with this code run as they are if they are reached outside a graph; inside one they are traced all the same."""
    set_code_exec_strategy(code, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))


def never_trace(function: Callable[..., Any]) -> None:
    """Run `function`, and all that it calls, as plain Python if it is called outside of a graph while Dynamo is on.

    If a frame that is being traced calls it, Dynamo traces it all the same.
    """
    run_uncompiled(function.__code__)


def skip_frames(code: CodeType, skip: bool) -> None:
    """Run calls of `code` as plain Python, or as usual again. Dynamo sees the functions that it calls in either case."""
    action = _FrameAction.SKIP if skip else _FrameAction.DEFAULT
    set_code_exec_strategy(code, _FrameExecStrategy(action, _FrameAction.DEFAULT))


def compile_always(function: Any) -> None:
    """Trace `function`, or the one that it wraps in the end, as if it had been given to `torch.compile` itself.

    Dynamo leaves frames alone that show no tensors at their start, unless they are the function that the user compiles.
    """
    from torch._dynamo.eval_frame import always_optimize_code_objects

    function = inspect.unwrap(function)
    if inspect.isfunction(function):
        always_optimize_code_objects[function.__code__] = True


def break_graph() -> bool:
    """Called while Dynamo traces: end the graph here; return False if the user demands one graph (`fullgraph=True`)."""
    if _one_graph():
        return False
    import torch._dynamo

    torch._dynamo.graph_break()
    return True


def _one_graph() -> bool:
    """Whether the user demands one graph of the frame that is being traced."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    tracer = InstructionTranslator.current_tx()
    return bool(tracer.one_graph or tracer.error_on_graph_break)


_one_graph._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as torch._dynamo.assume_constant_result does


def outside_modes(call: Callable[..., Any], *args: Any) -> Any:
    """Call `call(*args)` with the user's modes off, and return what it returns; they are on again then, however it ends.

    Modes of `torch.compile` and other tracing stay. So does the default device, unless other function modes are on too.

    >>> import torch
    >>> from torch.overrides import TorchFunctionMode
    >>> class Names(TorchFunctionMode):
    ...     def __torch_function__(self, function, types, args=(), kwargs=None):
    ...         print(function.__name__)
    ...         return function(*args, **(kwargs or {}))
    >>> with Names():
    ...     _ = torch.add(torch.ones(1), 1)
    ...     _ = outside_modes(torch.add, torch.ones(1), 1)
    ones
    add
    ones
    """
    if not _count_dispatch() and not _count_function():
        return call(*args)
    # Both lists are filled, and emptied again, by single calls into C: an asynchronous exception comes before or after them.
    dispatch: list[Any] = [None]
    function: list[Any] = [None]
    put_back: partial[Any] = partial(
        deque, chain(map(_push_dispatch, iter(dispatch.pop, None)), map(_push_function, iter(function.pop, None))), 0
    )
    try:
        dispatch.extend(map(_pop_dispatch, repeat(None, _user_dispatch_modes())))
        function.extend(starmap(_pop_function, repeat((), _user_function_modes())))
        return call(*args)
    finally:
        put_back()


def _user_dispatch_modes() -> int:
    """How many dispatch modes on the stack are the user's."""
    count = _count_dispatch()
    return count and count - sum(torch._C._get_dispatch_mode(key) is not None for key in _INTERNAL)


def _user_function_modes() -> int:
    """How many function modes to take off: none if they only set the default device."""
    modes = map(torch._C._get_function_stack_at, range(_count_function()))
    return 0 if all(isinstance(mode, DeviceContext) for mode in modes) else _count_function()
