"""What a hook hands over: tensor leaves of nested values, named by their paths, cut off from the autograd graph."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["as_operand", "detached", "isolated", "leaves", "pack", "recomputing", "shapes", "transient"]


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
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(detached, value))
    if isinstance(value, (tuple, list)):
        return type(value)([detached(item) for item in value])
    if type(value) is dict:
        return {key: detached(item) for key, item in value.items()}
    if isinstance(value, Mapping):
        clone: Any = copy.copy(value)
        for key, item in value.items():
            clone[key] = detached(item)
        return clone
    if is_dataclass(value) and not isinstance(value, type):
        clone = copy.copy(value)
        for field in fields(value):
            if hasattr(value, field.name):
                object.__setattr__(clone, field.name, detached(getattr(value, field.name)))
        return clone
    return value


def pack(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The inputs of a call: the only one as it is, several positional ones as a tuple, keywords as a dict by name or index."""
    if not kwargs:
        return args[0] if len(args) == 1 else args
    if not args and len(kwargs) == 1:
        return next(iter(kwargs.values()))
    return {**{str(index): value for index, value in enumerate(args)}, **kwargs}


def as_operand(value: Any) -> Any:
    """A Python number as a tensor (float64 or int64); anything else as it is."""
    if isinstance(value, (bool, int)):
        return torch.tensor(value)
    return torch.tensor(value, dtype=torch.float64) if isinstance(value, float) else value


def transient(tensor: Tensor) -> bool:
    """Whether a tensor holds no numbers of its own: meta and fake tensors, and those inside vmap, grad and functionalisation."""
    if tensor.is_meta or torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    return type(tensor) is not Tensor and type(tensor).__name__ in ("FakeTensor", "FunctionalTensor")


def recomputing() -> bool:
    """Whether this forward runs inside a backward pass: activation checkpointing at work, on a call that was seen before."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def shapes(value: Any) -> str:
    """The shapes and dtypes of the tensors in `value`, for messages.

    >>> shapes((torch.ones(2, 3), "text"))
    '0: (2, 3) float32'
    """
    shown = [f"{f'{path}: ' if path else ''}{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for path, t in leaves(value)]
    return ", ".join(shown[:8]) + (" and more" if len(shown) > 8 else "") if shown else f"no tensor, but {type(value).__name__}"


@contextlib.contextmanager
def _modes_off(device: str) -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(device, enabled=False):
        yield


def isolated(operands: tuple[Any, ...]) -> contextlib.AbstractContextManager[None]:
    """The user's inference mode and autocast do not reach into a State; free where neither is on."""
    if not torch.is_inference_mode_enabled() and not torch._C._is_any_autocast_enabled():
        return contextlib.nullcontext()
    return _modes_off(next((tensor.device.type for operand in operands for _, tensor in leaves(operand)), "cpu"))
