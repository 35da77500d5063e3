"""How operators of graphs pass on what is nested: states packed into few tensors, and operands as tensors, numbers and a text."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from recorders.errors import OperandError
from reducers import State

__all__ = ["decoded", "encoded", "leaf_paths", "leaves_of", "packed", "packed_batch", "unpacked"]

NEXT = "\x1f"  # separates the fields of a layout


def packed(states: Mapping[str, Mapping[str, Any]]) -> tuple[str, list[list[Any]]]:
    """Returns the tensors of states, those of one dtype and shape together, and the layout by which they are found.

    The compiler writes each directly into its stack, so there are fewer tensors to copy.
    """
    packs: list[list[Any]] = []
    layout = ""
    for path, state in states.items():
        for key, value in state.items():
            index = _fitting(packs, value)
            layout += f"{path}{NEXT}{key}{NEXT}{index}{NEXT}{len(packs[index])}{NEXT}"
            packs[index].append(value)
    return layout, packs


def packed_batch(states: Iterable[Mapping[str, Mapping[str, Any]]]) -> tuple[list[str], list[str], list[list[Any]]]:
    """Returns of each observation its layout, and which part of which packs is its own; and the packs."""
    layouts, offsets, packs = list[str](), list[str](), list[list[Any]]()
    for one in states:
        layout, own = packed(one)
        layouts.append(layout)
        offsets.append(" ".join(_extend(packs, pack) for pack in own))
    return layouts, offsets, packs


def _fitting(packs: list[list[Any]], value: Any) -> int:
    """Returns the index of the pack for tensors like `value`, which may be a new one."""
    for index, pack in enumerate(packs):
        # As texts: to compare the symbol of a graph with a number would be a guard.
        if pack[0].dtype == value.dtype and str(tuple(pack[0].shape)) == str(tuple(value.shape)):
            return index
    packs.append([])
    return len(packs) - 1


def _extend(packs: list[list[Any]], pack: Sequence[Any]) -> str:
    """Adds tensors to the pack for those like them; returns the index of the pack, their place in it, and how many they are."""
    index = _fitting(packs, pack[0])
    packs[index].extend(pack)
    return f"{index} {len(packs[index]) - len(pack)} {len(pack)}"


@lru_cache(maxsize=4096)
def columns(layout: str) -> tuple[tuple[str, str, int, int], ...]:
    """Returns for each tensor that a graph passes on: its leaf path, key, pack and index in the pack."""
    parts = layout.split(NEXT)
    return tuple(
        (path, key, int(pack), int(index)) for path, key, pack, index in zip(*(parts[i::4] for i in range(4)), strict=False)
    )


def leaf_paths(layout: str) -> tuple[str, ...]:
    """Returns the paths of the leaves."""
    return tuple(dict.fromkeys(path for path, *_ in columns(layout)))


def leaves_of(layout: str, packs: Sequence[Tensor], dim: int = 0) -> dict[str, Tensor]:
    """Returns the leaves that packs hold as they are, by path; with `dim=1`, of several stacked observations."""
    return {path: packs[pack].select(dim, index) for path, _, pack, index in columns(layout)}


def unpacked(layout: str, packs: Sequence[Tensor], dim: int = 0) -> dict[str, State]:
    """Returns the State of an observation by leaf path, as views of the packs; with `dim=1`, of several stacked observations."""
    lifted: dict[str, State] = {}
    for path, key, pack, index in columns(layout):
        state = lifted.setdefault(path, {})
        if key:
            state[key] = packs[pack].select(dim, index)
    return lifted


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
    if is_dataclass(value):
        items = [(field.name, getattr(value, field.name, None)) for field in fields(value)]
        return _named("dataclass", name, items, tensors, numbers)
    if isinstance(value, Mapping):
        return _named("dict", name, list(value.items()), tensors, numbers)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return _named("namedtuple", name, [(field, getattr(value, field)) for field in value._fields], tensors, numbers)
    if isinstance(value, (tuple, list)):
        parts = "".join([_layout(item, tensors, numbers) + ", " for item in value])
        return f"('{'tuple' if isinstance(value, tuple) else 'list'}', [{parts}])"
    return f"('other', {name!r})"


def _named(kind: str, name: str, items: list[tuple[Any, Any]], tensors: list[Tensor], numbers: list[int]) -> str:
    parts = ""
    for key, item in items:
        shown = repr(key) if isinstance(key, (str, int)) else repr(str(key))
        parts += f"({shown}, {_layout(item, tensors, numbers)}), "
    return f"({kind!r}, {name!r}, [{parts}])"


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
        return named if kind == "dict" and cls in (dict, None) else _instance(kind, cls, named)
    except Exception:  # its class does not allow a new instance like this; callables only need the fields
        return SimpleNamespace(**{str(key): value for key, value in named.items()})


def _class(name: str) -> Any:
    module, _, qualname = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found


def _instance(kind: str, cls: Any, named: dict[Any, Any]) -> Any:
    if kind == "namedtuple" or (kind == "dataclass" and issubclass(cls, Mapping)):  # such as the outputs of `transformers`
        return cls(**named)
    if kind == "dict":
        return cls(named)
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
