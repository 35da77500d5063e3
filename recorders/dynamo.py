"""What recorders ask of Dynamo, the tracer of `torch.compile`, by its private interface: which code it leaves alone.

`torch._dynamo` is imported late, because that takes seconds. Every step of an optimizer of PyTorch imports it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import CodeType
from typing import Any

from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

__all__ = ["break_graph", "compile_always", "never_trace", "skip_frames"]


def never_trace(function: Callable[..., Any]) -> None:
    """Run `function`, and all that it calls, as plain Python if it is called outside of a graph while Dynamo is on.

    If a frame that is being traced calls it, Dynamo traces it all the same.
    """
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))


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
