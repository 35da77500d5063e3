"""The operators by which compiled graphs hand over observations: they run as plain Python, but for one that may run as C++."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from recorders._torch import graph_task_address
from recorders._torch.compiler import make_effectful
from recorders.capture.entering import guarded, timed
from recorders.capture.layouts import from_text
from recorders.errors import OperandError
from recorders.graphs.reading import SCHEMA, add_to_operator, raise_after
from recorders.graphs.sinks import batch_from_text, find_sink


def can_record() -> bool:
    """Whether the operator `record` adds to rings in C++, from now on."""
    return add_to_operator("torch_recorders::record", "torch_recorders::record_slowly", graph_task_address())


_HERE = "the operator in a compiled graph"


def _record(sinks: list[Tensor], tensors: list[Tensor], text: str) -> None:
    numbers = [*map(int, sinks)]
    first = next(filter(None, map(find_sink, numbers)), None)
    if first is not None:
        guarded(_HERE, timed, numbers, type(first).record_batch, numbers, tensors, batch_from_text(text))


def _record_slowly(sinks: list[Tensor], tensors: list[Tensor], text: str) -> None:
    try:
        _record(sinks, tensors, text)
    except BaseException as error:  # one that is asked for, or of a signal handler: the operator in C++ can pass on none
        raise_after(error)


def _call_sink(method: str, sink: Tensor, *args: Any) -> Any:
    """Calls a method of the sink, if it still exists."""

    def call() -> Any:
        found = find_sink(sink)
        return None if found is None else timed(found, getattr(found, method), *args)

    return guarded(_HERE, call)


def _fail(sink: Tensor) -> None:
    _call_sink("receive_failure", sink)


def _receive_call(sink: Tensor, stream: str, layout: str, tensors: list[Tensor], numbers: list[int], info: str) -> None:
    def operands() -> Any:  # clones, because the graph reuses the memory of its own
        return decoded(layout, [tensor.clone() for tensor in tensors], numbers)

    _call_sink("receive_call", sink, operands, stream, from_text(info))


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


# With a layout that the compiler may not choose, it would copy what has another one, or none yet.
_define(f"record{SCHEMA}", _record, lambda *_: None, torch.Tag.flexible_layout)
_define(f"record_slowly{SCHEMA}", _record_slowly)
_define("fail(Tensor sink) -> ()", _fail)
_define("receive_call(Tensor sink, str stream, str layout, Tensor[] tensors, SymInt[] numbers, str info) -> ()", _receive_call)
_define("keep_given(Tensor sink) -> Tensor", _keep_given, _no_number)


# How nested operands are passed on: as tensors, numbers and a text


def encoded(value: Any) -> tuple[str, list[Tensor], list[int]]:
    """Returns the layout of nested operands, its tensors and its integers; called while a graph is traced.

    >>> import torch
    >>> layout, tensors, numbers = encoded({"logits": torch.ones(1), "loss": None, "steps": [2, "two"]})
    >>> decoded(layout, tensors, numbers)
    {'logits': tensor([1.]), 'loss': None, 'steps': [2, 'two']}
    """
    tensors: list[Tensor] = []
    numbers: list[int] = []
    return _layout(value, tensors, numbers), tensors, numbers


def _layout(value: Any, tensors: list[Tensor], numbers: list[int]) -> str:
    """Returns a Python literal: a kind and its arguments. Numbers may vary from call to call, so they are not in it."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return "('tensor',)"
    if value is None or isinstance(value, (str, bool)):
        return f"('constant', {value!r})"
    if isinstance(value, int):
        numbers.append(value)
        return "('number',)"
    if isinstance(value, float):
        tensors.append(torch.tensor(value, dtype=torch.float64, device="cpu"))
        return "('float',)"
    kind = type(value)
    name = f"{kind.__module__}:{kind.__qualname__}"
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        parts = "".join([_layout(item, tensors, numbers) + ", " for item in value])
        return f"('{'tuple' if isinstance(value, tuple) else 'list'}', [{parts}])"
    form = "named"
    if is_dataclass(value):
        items: Any = [(field.name, getattr(value, field.name, None)) for field in fields(value)]
    elif isinstance(value, Mapping):
        form, items = "dict", list(value.items())
    elif isinstance(value, tuple):
        items = [(field, getattr(value, field)) for field in value._fields]  # type: ignore[attr-defined]
    else:
        return f"('other', {name!r})"
    parts = ""
    for key, item in items:
        shown = repr(key) if isinstance(key, (str, int)) else repr(str(key))
        parts += f"({shown}, {_layout(item, tensors, numbers)}), "
    return f"({form!r}, {name!r}, [{parts}])"


def decoded(layout: str, tensors: list[Tensor], numbers: list[int]) -> Any:
    """Returns the value that was encoded. What `encoded` does not walk, such as a key-value cache, becomes an `Absent`."""
    return _build(_parsed(layout), iter(tensors), iter(numbers))


@lru_cache(maxsize=4096)
def _parsed(layout: str) -> Any:
    return ast.literal_eval(layout)


def _build(tree: Any, tensors: Iterator[Tensor], numbers: Iterator[int]) -> Any:
    kind, *rest = tree
    if kind == "tensor":
        return next(tensors)
    if kind == "float":
        return next(tensors).item()
    if kind == "number":
        return next(numbers)
    if kind == "constant":
        return rest[0]
    if kind == "other":
        return Absent(rest[0])
    if kind in ("tuple", "list"):
        items = [_build(item, tensors, numbers) for item in rest[0]]
        return tuple(items) if kind == "tuple" else items
    named = {key: _build(item, tensors, numbers) for key, item in rest[1]}
    cls = _class(rest[0])
    try:
        return named if kind == "dict" and cls in (dict, None) else _instance(cls, named)
    except Exception:  # its class does not allow a new instance like this; callables only need the fields
        return SimpleNamespace(**{str(key): value for key, value in named.items()})


def _class(name: str) -> Any:
    module, _, qualname = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found


def _instance(cls: Any, named: dict[Any, Any]) -> Any:
    if issubclass(cls, tuple):
        return cls(**named)
    if issubclass(cls, Mapping):  # such as the outputs of `transformers`, which are dataclasses
        return cls(**named) if hasattr(cls, "__dataclass_fields__") else cls(named)
    instance = object.__new__(cls)
    for name, value in named.items():
        object.__setattr__(instance, name, value)
    return instance


class Absent:
    """Stands for an operand that a graph cannot pass on, such as a key-value cache. Reading an attribute raises an OperandError."""

    def __init__(self, name: str) -> None:
        object.__setattr__(self, "_name", name)

    def __getattr__(self, attr: str) -> Any:
        raise OperandError(
            f"a compiled graph cannot pass a {self._name} to filter_, map_ or op_, and one of these read its {attr!r}: "
            "use the other operands, which are tensors, or keep this module out of the graph with torch.compiler.disable"
        )
