"""States of a fixed number of slots, best first: exemplars with where each of them came from."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from reducers.core.inputs import observation
from reducers.core.reducer import Reducer
from reducers.errors import ReducerTypeError, StateMismatchError
from reducers.state import State

__all__ = ["after", "first", "moved", "pick", "sample_inputs"]

_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)


def sample_inputs(reducer: Reducer, xs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The tensor itself, the ids of its samples (int64), and the payload, all detached and on one device.

    Raises:
        ReducerTypeError: there are none or more than three, one is no tensor, or ids are no integers.
        StateMismatchError: ids or payload are not one for each sample.
    """
    if not 1 <= len(xs) <= 3 or not all(isinstance(x, Tensor) for x in xs):
        got = ", ".join(type(x).__name__ for x in xs)
        raise ReducerTypeError(f"{reducer!r} takes a tensor, ids of its samples and a payload, the last two if wanted; got ({got})")
    x, *rest = (observation(reducer, (value,)).resolve_conj().resolve_neg() for value in xs)
    samples = x.shape[0] if x.ndim else 1
    ids, payload = (value.to(x.device) for value in rest) if len(rest) == 2 else (rest[0].to(x.device) if rest else None, None)
    if ids is not None and (ids.is_floating_point() or ids.is_complex()):
        raise ReducerTypeError(f"{reducer!r} takes ids that are integers and got {ids.dtype}; the payload comes third")
    if ids is not None and (ids.ndim != 1 or ids.shape[0] != samples):
        raise StateMismatchError(f"{reducer!r} got ids of shape {tuple(ids.shape)} for {samples} samples: give one for each")
    if payload is not None and (payload.ndim == 0 or payload.shape[0] != samples):
        raise StateMismatchError(
            f"{reducer!r} got a payload of shape {tuple(payload.shape)} for {samples} samples: one row for each"
        )
    return x, None if ids is None else ids.to(torch.int64), payload


def moved(x: Tensor, move: Callable[[Tensor], Tensor]) -> Tensor:
    """`move(x)`, which only moves elements: as signed integers where torch cannot move the dtype."""
    if x.dtype not in _UNSIGNED and not (x.is_floating_point() and x.dtype.itemsize == 1):
        return move(x)
    signed = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.dtype.itemsize]
    return move(x.view(signed)).view(x.dtype)


def pick(slots: State, order: Tensor) -> State:
    """The slots at `order`, indices along the last axis of order; what a slot holds may have more axes behind it."""
    picked = {}
    for key, value in slots.items():
        index = order.reshape(*order.shape, *(1,) * (value.ndim - order.ndim))
        index = index.expand(*order.shape, *value.shape[order.ndim :])
        picked[key] = moved(value, partial(torch.gather, dim=order.ndim - 1, index=index))
    return picked


def first(slots: State, by: str, k: int, descending: bool) -> State:
    """The k slots with the greatest (or least) value under `by`; of equal ones the earlier; those without a step come last."""
    order = slots[by].sort(dim=-1, descending=descending, stable=True).indices
    empty = (slots["step"] < 0).gather(-1, order).to(torch.uint8)
    return pick(slots, order.gather(-1, empty.sort(dim=-1, stable=True).indices[..., :k]))


def after(a: State, b: State, seen: Tensor) -> State:
    """The slots of `a` and then those of `b`, whose steps count on from the `seen` observations of `a`."""
    later = {**b, "step": torch.where(b["step"] < 0, -1, b["step"] + seen)}
    axis = a["step"].ndim - 1
    return {key: torch.cat((value, later[key]), dim=axis) for key, value in a.items()}
