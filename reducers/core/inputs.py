"""What a reducer is given: one tensor, or one with another beside it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from reducers.errors import ArgumentError, ReducerTypeError

__all__ = ["align_input", "observation", "observation_with"]


def observation(reducer: object, xs: tuple[Any, ...]) -> Tensor:
    """The one tensor in `xs`, detached, dense, dequantised and of no subclass.

    Raises:
        ReducerTypeError: there are several, or something else.
    """
    if len(xs) != 1 or not isinstance(xs[0], Tensor):
        raise ReducerTypeError(f"{reducer!r} reduces one tensor at a time; got ({', '.join(type(x).__name__ for x in xs)})")
    x = xs[0].detach()
    if type(x) is not Tensor and type(x).__torch_dispatch__ is Tensor.__torch_dispatch__:
        x = x.as_subclass(Tensor)  # a state is made of plain tensors
    if x.is_quantized:
        return x.dequantize()
    # a traced backward may not ask for the layout
    return x if torch.compiler.is_compiling() or x.layout is torch.strided else x.to_dense()


def observation_with(reducer: object, xs: tuple[Any, ...], name: str) -> tuple[Tensor, Tensor]:
    """The observation, and what comes beside it with as many axes, so that it broadcasts.

    Raises:
        ReducerTypeError: these are not two tensors.
        ArgumentError: the shapes do not fit.
    """
    if len(xs) != 2:
        raise ReducerTypeError(f"{reducer!r} takes an observation and its {name}; got {len(xs)} of the 2 tensors")
    x, beside = (observation(reducer, (part,)) for part in xs)
    return x, align_input(reducer, beside.to(x.device), x, name)


def align_input(reducer: object, beside: Tensor, x: Tensor, name: str) -> Tensor:
    """`beside`, whose axes are the first ones of `x`, with as many as `x`.

    Raises:
        ArgumentError: the shapes do not fit.
    """
    sizes = (*beside.shape, *(1 for _ in range(x.ndim - beside.ndim)))
    if beside.ndim > x.ndim or any(have not in (1, need) for have, need in zip(sizes, x.shape, strict=True)):
        raise ArgumentError(
            f"{reducer!r} got a {name} of shape {tuple(beside.shape)} for an observation of shape {tuple(x.shape)}: its axes must "
            "be the first ones of the observation, each of the same length or of 1"
        )
    return beside.reshape(sizes)
