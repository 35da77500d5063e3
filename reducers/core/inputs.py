"""Validates the inputs of `update`: one tensor, or one tensor and a second that broadcasts to it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from reducers.errors import ArgumentError, ReducerTypeError

__all__ = ["align_input", "observation", "observation_with"]


def observation(reducer: object, xs: tuple[Any, ...]) -> Tensor:
    """Return the single tensor in `xs` as a detached, dense, dequantised plain tensor.

    Raises:
        ReducerTypeError: `xs` is not exactly one tensor.
    """
    if len(xs) != 1 or not isinstance(xs[0], Tensor):
        raise ReducerTypeError(f"{reducer!r} reduces one tensor at a time; got ({', '.join(type(x).__name__ for x in xs)})")
    x = xs[0].detach()
    if type(x) is not Tensor and type(x).__torch_dispatch__ is Tensor.__torch_dispatch__:
        x = x.as_subclass(Tensor)  # states hold plain tensors only
    if x.is_quantized:
        return x.dequantize()
    # the layout cannot be read in a traced backward
    return x if torch.compiler.is_compiling() or x.layout is torch.strided else x.to_dense()


def observation_with(reducer: object, xs: tuple[Any, ...], name: str) -> tuple[Tensor, Tensor]:
    """Return the observation and the second input, which gets trailing axes of length 1 so that it broadcasts.

    Args:
        name: what the second input is called in error messages.

    Raises:
        ReducerTypeError: `xs` are not two tensors.
        ArgumentError: the second input does not broadcast to the observation.
    """
    if len(xs) != 2:
        raise ReducerTypeError(f"{reducer!r} takes an observation and its {name}; got {len(xs)} of the 2 tensors")
    x, other = (observation(reducer, (part,)) for part in xs)
    return x, align_input(reducer, other.to(x.device), x, name)


def align_input(reducer: object, other: Tensor, x: Tensor, name: str) -> Tensor:
    """Return `other`, whose axes are the leading axes of `x`, with trailing axes of length 1 up to the rank of `x`.

    Raises:
        ArgumentError: `other` does not broadcast to `x`.
    """
    sizes = (*other.shape, *(1 for _ in range(x.ndim - other.ndim)))
    if other.ndim > x.ndim or any(actual not in (1, expected) for actual, expected in zip(sizes, x.shape, strict=True)):
        raise ArgumentError(
            f"{reducer!r} got {name} of shape {tuple(other.shape)} for an observation of shape {tuple(x.shape)}: its axes must "
            "be the leading axes of the observation, each with the same length or length 1"
        )
    return other.reshape(sizes)
