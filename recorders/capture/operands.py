"""Operands: the leaves of nested values with their paths, tensors without their autograd graph, and tensors without values."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from recorders._torch import graph_task, inside_transform, is_batched, is_being_traced, is_fake
from recorders.errors import OperandError
from reducers._torch import constant_in_graphs

TRACED = "traced (torch.jit.trace or make_fx)"


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors in `value`, each with its path: keys, indices and field names joined by dots; "" for a single tensor.

    Walks tuples, named tuples, lists, mappings and dataclasses, and so the outputs of Hugging Face models; and `Data`, `Batch` and
    `HeteroData` of PyTorch Geometric. Other objects that hold tensors, such as a key-value cache, are ignored.

    >>> import torch
    >>> [path for path, _ in leaves({"logits": torch.ones(1), "states": (torch.ones(1), torch.ones(2))})]
    ['logits', 'states.0', 'states.1']
    """
    if isinstance(value, Tensor):
        yield path, value
        return
    for key, item in items(value):
        name = key.replace(".", "\\.")
        yield from leaves(item, f"{path}.{name}" if path else name)


def items(value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the key and the item of each item of a tuple, list, mapping, dataclass or graph; of other values nothing."""
    if isinstance(value, Mapping):
        yield from ((_key(key, value), item) for key, item in value.items())
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from zip(value._fields, value, strict=True)
    elif isinstance(value, (tuple, list)):
        yield from ((str(index), item) for index, item in enumerate(value))
    elif not isinstance(value, type) and is_dataclass(value):
        yield from ((field.name, getattr(value, field.name, None)) for field in fields(value))
    elif _is_graph(value):
        held: dict[Any, Any] = value.to_dict()  # type: ignore[union-attr]
        yield from ((" ".join(key) if isinstance(key, tuple) else key, item) for key, item in held.items())


def _is_graph(value: Any) -> bool:
    """Whether this is a graph of PyTorch Geometric, told without the import of it."""
    return hasattr(type(value), "edge_stores") and hasattr(type(value), "to_dict")


def _key(key: Any, mapping: Mapping[Any, Any]) -> str:
    """The text of a key; of a key that is no text, with its type if a text like it is a key, too, as in {1: a, "1": b}."""
    text = str(key)
    return f"{type(key).__name__}({text})" if not isinstance(key, str) and text in mapping else text


def detached(value: Any) -> Any:
    """Returns the same structure with every tensor detached, so that a callable may keep its arguments; of DTensors the local part.

    So a callable cannot make ranks communicate in a hook.
    """
    if type(value) is Tensor:  # as nearly always
        return value.detach()
    return mapped(value, lambda tensor: plain(tensor) if is_spread(tensor) else tensor.detach())


def mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Returns the same structure with `function` applied to every tensor."""
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
    if not isinstance(value, type) and is_dataclass(value):
        clone = copy.copy(value)
        for field in fields(value):
            if hasattr(value, field.name):
                object.__setattr__(clone, field.name, mapped(getattr(value, field.name), function))
        return clone
    if _is_graph(value):
        return copy.copy(value).apply(function)  # type: ignore[union-attr]
    return value


def plain(tensor: Tensor) -> Tensor:
    """Returns the values of `tensor` as a reducer takes them: detached, in a plain `Tensor` without a subclass.

    A quantised tensor is dequantised. A nested one is its rows, one below the other, without padding. Of a DTensor the part that
    this rank holds is returned, so that nothing is communicated.

    Raises:
        OperandError: the tensor is of a subclass that does not keep its values in its own memory.
    """
    found = plain_or_spread(tensor)
    return found if type(found) is Tensor else plain(found.to_local())  # type: ignore[attr-defined]


def plain_or_spread(tensor: Tensor) -> Tensor:
    """The tensor as a monitor takes it, but a DTensor stays one, for `placement`."""
    found = tensor.detach()
    if found.is_nested:
        return torch.cat([plain(part).flatten(0, max(part.ndim - 2, 0)) for part in found.unbind()])
    if type(found) is Tensor:
        return found.dequantize() if found.is_quantized else found
    if is_spread(found):
        return found
    if hasattr(found, "trigger_wait"):  # the result of a collective of the user, under way
        return plain_or_spread(found.trigger_wait())
    if type(found).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise OperandError(
            f"a {type(found).__name__} keeps its values in other tensors: return one of those with op_=lambda ...: tensor"
        )
    return found.as_subclass(Tensor)


def local_part(tensor: Tensor) -> Tensor:
    """The part of a DTensor that this rank holds; any other tensor as it is."""
    return tensor.to_local() if is_spread(tensor) else tensor  # type: ignore[attr-defined]


def is_spread(tensor: Tensor) -> bool:
    """Whether this is a DTensor, told without the import of its module, which takes a second."""
    return type(tensor) is not Tensor and hasattr(tensor, "to_local") and hasattr(tensor, "device_mesh")


def symbolic(value: Any) -> bool:
    """Whether `torch.fx` is tracing a program; its proxies are then in the places of tensors."""
    if isinstance(value, torch.fx.Proxy):
        return True
    return any(symbolic(item) for _, item in items(value))


def pack(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Returns the inputs of a call: a single one as it is, several as a tuple, keywords as a dict by name or index, or None."""
    if not kwargs:
        return args[0] if len(args) == 1 else args or None
    if not args and len(kwargs) == 1:
        return next(iter(kwargs.values()))
    return {**{str(index): value for index, value in enumerate(args)}, **kwargs}


def as_operand(value: Any) -> Any:
    """Returns a Python number as a tensor (float64 or int64), a NumPy number or array as a tensor, anything else unchanged."""
    if isinstance(value, (bool, int)):
        return torch.tensor(value, device="cpu")
    if isinstance(value, float):
        return torch.tensor(value, dtype=torch.float64, device="cpu")
    if hasattr(value, "__array__") and not isinstance(value, (Tensor, type)):
        with contextlib.suppress(TypeError):  # an array of objects
            return torch.as_tensor(value, device="cpu")
    return value


def as_operands(value: Any) -> Any:
    """Returns a nested value with its numbers and arrays as tensors."""
    if isinstance(value, Mapping):
        return {key: as_operands(item) for key, item in value.items()}
    if type(value) in (tuple, list):
        return [as_operands(item) for item in value]
    return as_operand(value)


def transient(tensor: Tensor) -> bool:
    """Whether a tensor has no values of its own: meta and fake tensors, and tensors inside vmap, grad and functionalisation."""
    return inside_transform() or _without_values(tensor)


def _without_values(tensor: Tensor) -> bool:
    return tensor.is_meta or is_batched(tensor) or (type(tensor) is not Tensor and is_fake(tensor))


def change_count(tensor: Tensor) -> int:
    """How often a tensor was changed in place; 0 of one made in inference mode, for which PyTorch raises an error instead."""
    return 0 if tensor.is_inference() else tensor._version


def why_no_numbers(tensors: Collection[Tensor]) -> str:
    """Returns the reason why these tensors cannot be recorded; "" if they can."""
    if tracing():
        return TRACED
    unreal = tensors and (inside_transform() or any(map(_without_values, tensors)))
    return "not a real tensor (meta, fake, vmap or grad)" if unreal else ""


def recomputing() -> bool:
    """Whether this code runs inside a backward pass. A forward is then a recomputation of activation checkpointing."""
    return graph_task() != -1


def tracing() -> bool:
    """Whether a program is traced that must contain nothing of a monitor.

    These are the programs of `torch.export`, `torch.jit.trace` and `make_fx`, and parts of compiled programs inside vmap and grad,
    where tensors have no values of their own.
    """
    if torch.compiler.is_compiling():
        return torch.compiler.is_exporting() or _transforming()
    return is_being_traced()


@constant_in_graphs
def _transforming() -> bool:
    return inside_transform()


def shapes(value: Any) -> str:
    """Returns the shapes and dtypes of the tensors in `value`, for messages.

    >>> shapes((torch.ones(2, 3), "text"))
    '0: (2, 3) float32'
    """
    try:
        shown = [_shape(path, tensor) for path, tensor in leaves(value)]
    except Exception as error:  # a value that contains itself has no end
        return f"{type(value).__name__} of unknown shape ({type(error).__name__})"
    return ", ".join(shown[:8]) + (" and more" if len(shown) > 8 else "") if shown else f"no tensor, but {type(value).__name__}"


def _shape(path: str, tensor: Tensor) -> str:
    shape = f"nested, of {tensor.size(0)} tensors," if tensor.is_nested else tuple(tensor.shape)
    return f"{f'{path}: ' if path else ''}{shape} {str(tensor.dtype).removeprefix('torch.')}"
