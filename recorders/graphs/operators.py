"""The operators by which compiled graphs hand over observations: they run as plain Python, but for one that may run as C++."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from recorders._torch import graph_task_address
from recorders._torch.compiler import make_effectful
from recorders.capture.entering import guarded, timed
from recorders.capture.layouts import from_text
from recorders.graphs.batches import from_text as batch_from
from recorders.graphs.codec import decoded
from recorders.graphs.sinks import find_sink
from recorders.graphs.tables import SCHEMA, add_to_operator, raise_after

__all__ = ["can_record", "operands_of"]


def can_record() -> bool:
    """Whether the operator `record` adds to tables in C++, from now on."""
    return add_to_operator("torch_recorders::record", "torch_recorders::record_slowly", graph_task_address())


def operands_of(layout: str, tensors: list[Tensor], numbers: list[int]) -> Any:
    """Returns the operands given to `emit_call`, with cloned tensors, because the graph reuses the memory of its own."""
    return decoded(layout, [tensor.clone() for tensor in tensors], numbers)


def _call_sink(method: str, sink: Tensor, *args: Any) -> Any:
    """Calls a method of the sink, if it still exists; called by all operators when the graph runs."""

    def call() -> Any:
        found = find_sink(sink)
        return None if found is None else timed(found, getattr(found, method), *args)

    return guarded(_HERE, call)


def _receive(sink: Tensor, stream: str, layout: str, packs: list[Tensor], info: str) -> None:
    _call_sink("receive", sink, layout, packs, stream, from_text(info))


def _receive_batch(sinks: list[Tensor], packs: list[Tensor], text: str) -> None:
    _call_sinks("receive_batch", sinks, packs, text)


def _record(sinks: list[Tensor], tensors: list[Tensor], text: str) -> None:
    _call_sinks("record_batch", sinks, tensors, text)


def _record_slowly(sinks: list[Tensor], tensors: list[Tensor], text: str) -> None:
    try:
        _call_sinks("record_batch", sinks, tensors, text)
    except BaseException as error:  # of a signal handler: the operator in C++ that calls this can pass on none
        raise_after(error)


def _call_sinks(method: str, sinks: list[Tensor], tensors: list[Tensor], text: str) -> None:
    """Calls a method of the class of the sinks, if one of them still exists."""
    try:
        numbers = [*map(_number, sinks)]
    except AttributeError:  # the graph handed over copies
        numbers = [*map(int, sinks)]
    first = next(filter(None, map(find_sink, numbers)), None)
    if first is not None:
        guarded(_HERE, timed, numbers, getattr(type(first), method), numbers, tensors, batch_from(text))


_number = attrgetter("number")
_HERE = "the operator in a compiled graph"


def _receive_leaves(sink: Tensor, stream: str, paths: list[str], tensors: list[Tensor], info: str) -> None:
    _call_sink("receive_leaves", sink, dict(zip(paths, tensors, strict=True)), stream, from_text(info))


def _fail(sink: Tensor) -> None:
    _call_sink("receive_failure", sink)


def _receive_call(sink: Tensor, stream: str, layout: str, tensors: list[Tensor], numbers: list[int], info: str) -> None:
    _call_sink("receive_call", sink, lambda: operands_of(layout, tensors, numbers), stream, from_text(info))


def _keep_given(sink: Tensor) -> Tensor:
    number: Tensor | None = _call_sink("keep_given", sink)
    return torch.tensor(-1, device="cpu") if number is None else number


def _no_number(sink: Tensor) -> Tensor:
    return torch.empty((), dtype=torch.int64, device="cpu")


_library: Any = torch.library.Library("torch_recorders", "DEF")  # type: ignore[no-untyped-call]


def _define(schema: str, run: Callable[..., Any], fake: Callable[..., Any] = lambda *_: None, *tags: torch.Tag) -> None:
    # A CUDA graph replays kernels and would skip the operator, so CUDA graphs must end before it. They do, because the sink is
    # on the CPU: the compiler finds no tag behind an effect (torch 2.13).
    _library.define(schema, tags=(torch.Tag.cudagraph_unsafe, *tags))
    name = schema.partition("(")[0]
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"torch_recorders::{name}", fake, lib=_library)
    # Without an effect it would be removed, or run again in a backward. Ordered, because some statistics depend on the order.
    make_effectful(getattr(torch.ops.torch_recorders, name).default)


_define("receive(Tensor sink, str stream, str layout, Tensor[] packs, str info) -> ()", _receive)
_define("receive_batch(Tensor[] sinks, Tensor[] packs, str text) -> ()", _receive_batch)
# With a layout that the compiler may not choose, it would copy what has another one, or none yet.
_define(f"record{SCHEMA}", _record, lambda *_: None, torch.Tag.flexible_layout)
_define(f"record_slowly{SCHEMA}", _record_slowly)
_define("receive_leaves(Tensor sink, str stream, str[] paths, Tensor[] leaves, str info) -> ()", _receive_leaves)
_define("fail(Tensor sink) -> ()", _fail)
_define("receive_call(Tensor sink, str stream, str layout, Tensor[] tensors, SymInt[] numbers, str info) -> ()", _receive_call)
_define("keep_given(Tensor sink) -> Tensor", _keep_given, _no_number)
