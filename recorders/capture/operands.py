"""What a hook hands over: tensor leaves of nested values, named by their paths, cut off from the autograd graph."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from recorders._torch import graph_task, inside_transform, is_batched, is_being_written_down
from recorders.errors import OperandError

__all__ = [
    "as_operand",
    "detached",
    "leaves",
    "mapped",
    "pack",
    "plain",
    "recomputing",
    "shapes",
    "symbolic",
    "tracing",
    "transient",
    "why_no_numbers",
]


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors in `value`, each with its path: keys, indices and field names joined by dots; "" for a lone tensor.

    Walks tuples, named tuples, lists, mappings and dataclasses (and so the outputs of Hugging Face models); whatever else
    holds tensors, such as a key-value cache, is left alone.

    >>> import torch
    >>> [path for path, _ in leaves({"logits": torch.ones(1), "states": (torch.ones(1), torch.ones(2))})]
    ['logits', 'states.0', 'states.1']
    """
    if isinstance(value, Tensor):
        yield path, value
        return
    for key, item in _items(value):
        name = key.replace(".", "\\.")
        yield from leaves(item, f"{path}.{name}" if path else name)


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((str(key), item) for key, item in value.items())
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from zip(value._fields, value, strict=True)
    elif isinstance(value, (tuple, list)):
        yield from ((str(index), item) for index, item in enumerate(value))
    elif is_dataclass(value) and not isinstance(value, type):
        yield from ((field.name, getattr(value, field.name, None)) for field in fields(value))


def detached(value: Any) -> Any:
    """The same structure with every tensor detached, so that a callable may keep what it is given."""
    return mapped(value, Tensor.detach)


def mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The same structure with `function` applied to every tensor."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*[mapped(item, function) for item in value])
    if isinstance(value, (tuple, list)):
        return type(value)([mapped(item, function) for item in value])
    if type(value) is dict:
        return {key: mapped(item, function) for key, item in value.items()}
    if isinstance(value, Mapping):
        clone: Any = copy.copy(value)
        for key, item in value.items():
            clone[key] = mapped(item, function)
        return clone
    if is_dataclass(value) and not isinstance(value, type):
        clone = copy.copy(value)
        for field in fields(value):
            if hasattr(value, field.name):
                object.__setattr__(clone, field.name, mapped(getattr(value, field.name), function))
        return clone
    return value


def plain(tensor: Tensor) -> Tensor:
    """`tensor` cut off from the autograd graph, as a reducer takes it: the numbers themselves, in a tensor of no subclass.

    A quantised tensor is dequantised. Of a tensor that is spread over processes it is the part that this one holds, so that nothing
    is communicated.

    Raises:
        OperandError: a subclass that keeps its numbers elsewhere than in its own memory.
    """
    found = tensor.detach()
    if type(found) is Tensor:
        return found.dequantize() if found.is_quantized else found
    if hasattr(found, "to_local"):
        return plain(found.to_local())
    if type(found).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise OperandError(
            f"a {type(found).__name__} keeps its numbers in other tensors: hand one of those over with op_=lambda ...: tensor"
        )
    return found.as_subclass(Tensor)


def symbolic(value: Any) -> bool:
    """Whether a program is being written down by `torch.fx`, which hands proxies around in place of tensors."""
    if isinstance(value, torch.fx.Proxy):
        return True
    return any(symbolic(item) for _, item in _items(value))


def pack(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The inputs of a call: the only one as it is, several as a tuple, keywords as a dict by name or index; None without any."""
    if not kwargs:
        return args[0] if len(args) == 1 else args or None
    if not args and len(kwargs) == 1:
        return next(iter(kwargs.values()))
    return {**{str(index): value for index, value in enumerate(args)}, **kwargs}


def as_operand(value: Any) -> Any:
    """A Python number as a tensor (float64 or int64), a NumPy number or array as the tensor it is; anything else as it is."""
    if isinstance(value, (bool, int)):
        return torch.tensor(value)
    if isinstance(value, float):
        return torch.tensor(value, dtype=torch.float64)
    if hasattr(value, "__array__") and not isinstance(value, (Tensor, type)):
        with contextlib.suppress(TypeError):  # an array of objects is none of numbers
            return torch.as_tensor(value)
    return value


def transient(tensor: Tensor) -> bool:
    """Whether a tensor holds no numbers of its own: meta and fake tensors, and those inside vmap, grad and functionalisation."""
    if tensor.is_meta or inside_transform() or is_batched(tensor):
        return True
    return type(tensor) is not Tensor and type(tensor).__name__ in ("FakeTensor", "FunctionalTensor")


def why_no_numbers(tensors: Iterable[Tensor]) -> str:
    """Why these tensors cannot be recorded; "" if they can."""
    if tracing():
        return "traced (torch.jit.trace or make_fx)"
    return "not a real tensor (meta, fake, vmap or grad)" if any(map(transient, tensors)) else ""


def recomputing() -> bool:
    """Whether this forward runs inside a backward pass: activation checkpointing at work, on a call that was seen before."""
    return graph_task() != -1


def tracing() -> bool:
    """Whether a program is being written down with nothing of a monitor in it: `torch.export`, `torch.jit.trace`, `make_fx`, and
    what `torch.compile` finds inside vmap and grad, whose tensors hold no numbers of their own."""
    if torch.compiler.is_compiling():
        return torch.compiler.is_exporting() or _transforming()
    return is_being_written_down()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _transforming() -> bool:
    return inside_transform()


def shapes(value: Any) -> str:
    """The shapes and dtypes of the tensors in `value`, for messages.

    >>> shapes((torch.ones(2, 3), "text"))
    '0: (2, 3) float32'
    """
    try:
        shown = [_shape(path, tensor) for path, tensor in leaves(value)]
    except Exception as error:  # nested tensors have no shape, a value that holds itself has no end
        return f"{type(value).__name__} of unknown shape ({type(error).__name__})"
    return ", ".join(shown[:8]) + (" and more" if len(shown) > 8 else "") if shown else f"no tensor, but {type(value).__name__}"


def _shape(path: str, tensor: Tensor) -> str:
    return f"{f'{path}: ' if path else ''}{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
