"""States with a fixed number of slots, best first; each slot holds a sample or element, and its step, position and id."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from reducers.core.checks import check_keys, check_shape
from reducers.core.inputs import observation
from reducers.core.reducer import Reducer
from reducers.core.states import check_states, concatenated, to_device
from reducers.errors import ReducerTypeError, StateMismatchError
from reducers.kernels.precision import aligned
from reducers.state import State

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_ORDERED = (torch.float64, torch.float32, torch.float16, torch.bfloat16, *_INTEGERS)
_UNINDEXED = (torch.uint16, torch.uint32, torch.uint64, torch.complex32)


def sample_inputs(reducer: Reducer, xs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the observation, the ids of its samples (int64 or None) and the payload (or None), detached, on one device.

    Raises:
        ReducerTypeError: `xs` are not one to three tensors, or the ids are not integers.
        StateMismatchError: ids or payload do not have one row per sample.
    """
    if not 1 <= len(xs) <= 3 or not all(isinstance(x, Tensor) for x in xs):
        got = ", ".join(type(x).__name__ for x in xs)
        raise ReducerTypeError(f"{reducer!r} takes a tensor, and optionally ids of its samples and a payload; got ({got})")
    x, *rest = (observation(reducer, (value,)).resolve_conj().resolve_neg() for value in xs)
    samples = x.shape[0] if x.ndim else 1
    ids, payload = (value.to(x.device) for value in rest) if len(rest) == 2 else (rest[0].to(x.device) if rest else None, None)
    if ids is not None and (ids.is_floating_point() or ids.is_complex()):
        raise ReducerTypeError(f"{reducer!r} takes integer ids and got {ids.dtype}; the payload comes third")
    if ids is not None and (ids.ndim != 1 or ids.shape[0] != samples):
        raise StateMismatchError(f"{reducer!r} got ids of shape {tuple(ids.shape)} for {samples} samples: give one id per sample")
    if payload is not None and (payload.ndim == 0 or payload.shape[0] != samples):
        raise StateMismatchError(
            f"{reducer!r} got a payload of shape {tuple(payload.shape)} for {samples} samples: give one row per sample"
        )
    return x, None if ids is None else ids.to(torch.int64), payload


def apply_indexing(x: Tensor, index: Callable[[Tensor], Tensor]) -> Tensor:
    """Return `index(x)`, a function that only moves elements; dtypes that torch cannot index are viewed as integers for it."""
    if x.dtype not in _UNINDEXED and not (x.is_floating_point() and x.dtype.itemsize == 1):
        return index(x)
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.dtype.itemsize]
    return index(x.view(integer)).view(x.dtype)


def merge_slots(reducer: Reducer, a: State, b: State, by: str, descending: bool, k: int) -> State:
    """Return the k best slots of two states, sorted by the key `by`; equal slots keep their order, and empty slots are last.

    The steps of `b` continue after the observations of `a`.
    """
    if not a or not b:
        return a or b
    check_states(reducer, a, b)
    b = to_device(b, a["observations"].device)
    later = {**b, "step": torch.where(b["step"] < 0, -1, b["step"] + a["observations"])}
    axis = a["step"].ndim - 1
    slots = {key: concatenated(reducer, aligned(value, later[key]), axis) for key, value in a.items() if key != "observations"}
    order = slots[by].sort(dim=-1, descending=descending, stable=True).indices
    empty = (slots["step"] < 0).gather(-1, order).to(torch.uint8)
    best = _gather_slots(slots, order.gather(-1, empty.sort(dim=-1, stable=True).indices[..., :k]))
    return {**best, "observations": a["observations"] + b["observations"]}


def check_slots(reducer: Reducer, state: State, by: str, k: int) -> None:
    """Raise `StateError` if this is no state of k slots, of which those with the best `by` are kept."""
    check_keys(reducer, state, {by, "value", "step", "position", "id", "observations"}, {"payload"})
    check_shape(reducer, state, "observations", (), torch.int64)
    kept = state["step"].shape[:-1]
    for key in {by, "step", "position", "id"}:
        check_shape(reducer, state, key, (*kept, k), *(_ORDERED if key == "value" else (torch.int64,)))
    for key in {"value", "payload"} & state.keys():
        check_shape(reducer, state, key, (*kept, k, *state[key].shape[len(kept) + 1 :]))


def pad_slots(slots: State, k: int, fills: Mapping[str, float]) -> State:
    """Return the slots with empty ones appended up to k; keys that `fills` lacks are filled with -1."""
    axis = slots["step"].ndim - 1
    missing = k - slots["step"].shape[axis]
    if missing <= 0:
        return slots
    padded = {}
    for key, value in slots.items():
        shape = [*value.shape[:axis], missing, *value.shape[axis + 1 :]]
        empty = torch.full(shape, fills.get(key, -1), dtype=value.dtype, device=value.device)
        padded[key] = torch.cat((value, empty), dim=axis)
    return padded


def _gather_slots(slots: State, order: Tensor) -> State:
    """Return the slots at the indices `order` along its last axis; the values may have more axes after it."""
    gathered = {}
    for key, value in slots.items():
        index = order.reshape(*order.shape, *(1,) * (value.ndim - order.ndim))
        index = index.expand(*order.shape, *value.shape[order.ndim :])
        gathered[key] = apply_indexing(value, partial(torch.gather, dim=order.ndim - 1, index=index))
    return gathered
