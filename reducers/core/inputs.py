"""Validates the inputs of `update`: one tensor, one and a second that broadcasts to it, or a part of a larger one."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from reducers.errors import ArgumentError, ReducerTypeError, StateMismatchError
from reducers.kernels.parts import TensorPart

_MOST = 1 << 59  # elements of a tensor: places in its memory are counted in int64


def observation(reducer: object, xs: tuple[Any, ...]) -> Tensor:
    """Return the single tensor in `xs` as a detached, dense, dequantised plain tensor.

    Raises:
        ReducerTypeError: `xs` is not exactly one tensor.
    """
    if len(xs) != 1 or not isinstance(xs[0], Tensor):
        got = ", ".join(type(x).__name__ for x in xs)
        hint = "; make a tensor of it by torch.as_tensor(x)" if len(xs) == 1 else ""
        raise ReducerTypeError(f"{reducer!r} reduces one tensor at a time; got ({got}){hint}")
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
    if len(xs) > 2:
        raise ReducerTypeError(
            f"{reducer!r} takes an observation and its {name}, but neither ids nor a payload; got {len(xs)} tensors: the "
            "`position` of an element in the result of TopK or BottomK says of which sample it is"
        )
    if len(xs) != 2:
        raise ReducerTypeError(
            f"{reducer!r} takes an observation and its {name}; got {len(xs)} of the 2 tensors: call update(state, x, {name}); a "
            f"monitor takes the second by given='{name}', in `with recorder.given({name}=...):`"
        )
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


def check_part(reducer: Any) -> None:
    """Check the field `part` of a reducer that is being made, and make it a `TensorPart`: a recipe has plain tuples.

    Raises:
        ArgumentError: it is not the shape of a tensor and the index of one of its elements.
    """
    part = reducer.part
    if part is None:
        return
    if isinstance(part, tuple) and len(part) == 2 and all(isinstance(sizes, tuple) for sizes in part):
        shape, start = part
        sizes = (*shape, *start)
        are_sizes = all(type(size) is int for size in sizes) and len(shape) == len(start) <= 64 and math.prod(shape) < _MOST
        if are_sizes and all(0 <= at < size for at, size in zip(start, shape, strict=True)):
            object.__setattr__(reducer, "part", TensorPart(shape, start))
            return
    raise ArgumentError(
        f"{type(reducer).__name__} takes as part the shape of the whole tensor and the index in it of the first element of the "
        f"part, such as TensorPart((1024, 512), (256, 0)); it got {part!r:.200}"
    )


def checked_part(reducer: Any, xs: Tensor) -> TensorPart | None:
    """Return the part of which observations are, stacked along the first axis; None if they are whole.

    Raises:
        ArgumentError: an observation reaches beyond the end of the whole, or has another number of axes.
    """
    part: TensorPart | None = reducer.part
    shape = tuple(xs.shape[1:])
    if part is None:
        return None
    fits = len(shape) == len(part.shape) and all(
        at + size <= whole for at, size, whole in zip(part.start, shape, part.shape, strict=True)
    )
    if not fits:
        raise ArgumentError(
            f"{reducer!r} got an observation of shape {shape}, which is no part of a tensor of shape {part.shape} from "
            f"{part.start} on"
        )
    return part


def check_equally_often(reducer: object, number: int, other: int) -> None:
    """Check that there were as many observations of one part as of another.

    Raises:
        StateMismatchError: there were not.
    """
    if number != other:
        raise StateMismatchError(
            f"{reducer!r}: of one part there were {number} observations, of another {other}: ranks must observe their parts "
            "equally often"
        )
