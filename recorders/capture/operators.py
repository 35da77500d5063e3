"""The operators by which compiled graphs hand over observations: they run as plain Python, but for one that may run as C++."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from recorders._torch import graph_task_address
from recorders._torch.compiler import make_effectful
from recorders.capture import packing
from recorders.capture.entering import guarded, timed
from recorders.capture.gathering import from_text as together_from
from recorders.capture.layouts import from_text
from recorders.capture.receivers import find_receiver
from reducers.kernels.loop.tables import SCHEMA, add_to_operator, raise_after

__all__ = ["can_record", "operands_of"]


def can_record() -> bool:
    """Whether the operator `record` adds to tables in C++, from now on."""
    return add_to_operator("torch_recorders::record", "torch_recorders::record_slowly", graph_task_address())


def operands_of(layout: str, tensors: list[Tensor], numbers: list[int]) -> Any:
    """Returns the operands given to `emit_call`, with cloned tensors, because the graph reuses the memory of its own."""
    return packing.unpacked(layout, [tensor.clone() for tensor in tensors], numbers)


def _call_receiver(method: str, receiver: Tensor, *args: Any) -> Any:
    """Calls a method of the receiver, if it still exists; called by all operators when the graph runs."""

    def call() -> Any:
        found = find_receiver(receiver)
        return None if found is None else timed(found, getattr(found, method), *args)

    return guarded(_HERE, call)


def _receive(receiver: Tensor, stream: str, layout: str, packs: list[Tensor], told: str) -> None:
    _call_receiver("receive", receiver, layout, packs, stream, from_text(told))


def _receive_together(receivers: list[Tensor], packs: list[Tensor], text: str) -> None:
    _call_receivers("receive_together", receivers, packs, text)


def _record(receivers: list[Tensor], tensors: list[Tensor], text: str) -> None:
    _call_receivers("record_together", receivers, tensors, text)


def _record_slowly(receivers: list[Tensor], tensors: list[Tensor], text: str) -> None:
    try:
        _call_receivers("record_together", receivers, tensors, text)
    except BaseException as error:  # of a signal handler: the operator in C++ that calls this can pass on none
        raise_after(error)


def _call_receivers(method: str, receivers: list[Tensor], tensors: list[Tensor], text: str) -> None:
    """Calls a method of the class of the receivers, if one of them still exists."""
    try:
        numbers = [*map(_number, receivers)]
    except AttributeError:  # the graph handed over copies
        numbers = [*map(int, receivers)]
    first = next(filter(None, map(find_receiver, numbers)), None)
    if first is not None:
        guarded(_HERE, timed, numbers, getattr(type(first), method), numbers, tensors, together_from(text))


_number = attrgetter("number")
_HERE = "the operator in a compiled graph"


def _receive_leaves(receiver: Tensor, stream: str, paths: list[str], tensors: list[Tensor], told: str) -> None:
    _call_receiver("receive_leaves", receiver, dict(zip(paths, tensors, strict=True)), stream, from_text(told))


def _fail(receiver: Tensor) -> None:
    _call_receiver("receive_failure", receiver)


def _receive_call(receiver: Tensor, stream: str, layout: str, tensors: list[Tensor], numbers: list[int], told: str) -> None:
    _call_receiver("receive_call", receiver, lambda: operands_of(layout, tensors, numbers), stream, from_text(told))


def _keep_given(receiver: Tensor) -> Tensor:
    number: Tensor | None = _call_receiver("keep_given", receiver)
    return torch.tensor(-1, device="cpu") if number is None else number


def _no_number(receiver: Tensor) -> Tensor:
    return torch.empty((), dtype=torch.int64, device="cpu")


_library: Any = torch.library.Library("torch_recorders", "DEF")  # type: ignore[no-untyped-call]


def _define(schema: str, run: Callable[..., Any], fake: Callable[..., Any] = lambda *_: None, *tags: torch.Tag) -> None:
    # A CUDA graph replays kernels and would skip the operator, so CUDA graphs must end before it. They do, because the receiver is
    # on the CPU: the compiler finds no tag behind an effect (torch 2.13).
    _library.define(schema, tags=(torch.Tag.cudagraph_unsafe, *tags))
    name = schema.partition("(")[0]
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"torch_recorders::{name}", fake, lib=_library)
    # Without an effect it would be removed, or run again in a backward. Ordered, because some statistics depend on the order.
    make_effectful(getattr(torch.ops.torch_recorders, name).default)


_define("receive(Tensor receiver, str stream, str layout, Tensor[] packs, str told) -> ()", _receive)
_define("receive_together(Tensor[] receivers, Tensor[] packs, str text) -> ()", _receive_together)
# With a layout that the compiler may not choose, it would copy what has another one, or none yet.
_define(f"record{SCHEMA}", _record, lambda *_: None, torch.Tag.flexible_layout)
_define(f"record_slowly{SCHEMA}", _record_slowly)
_define("receive_leaves(Tensor receiver, str stream, str[] paths, Tensor[] leaves, str told) -> ()", _receive_leaves)
_define("fail(Tensor receiver) -> ()", _fail)
_define("receive_call(Tensor receiver, str stream, str layout, Tensor[] tensors, SymInt[] numbers, str told) -> ()", _receive_call)
_define("keep_given(Tensor receiver) -> Tensor", _keep_given, _no_number)
