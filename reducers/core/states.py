"""What is done with states whatever reducer made them: moved, checked, copied."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from reducers.errors import EmptyStateError, StateMismatchError
from reducers.state import Result, State

__all__ = ["check_states", "copy_aliased", "require_state", "to_device", "tree_map"]


def to_device(state: State, device: torch.device) -> State:
    """`state` on `device`; the very same where it is there already."""
    for value in state.values():
        if value.device != device:
            return {key: value.to(device) for key, value in state.items()}
    return state


def copy_aliased(result: Result, state: State) -> Result:
    """`result` with copies of those tensors that are the state's own, so that the caller may write into what he is given."""
    if isinstance(result, Tensor):
        return result.clone() if any(result is value for value in state.values()) else result
    return {key: copy_aliased(value, state) for key, value in result.items()}


def tree_map(function: Callable[..., Tensor], *results: Result) -> Result:
    """`function` of the tensors of several results of one kind, name by name."""
    if isinstance(results[0], Tensor):
        return function(*results)
    parts = [result for result in results if not isinstance(result, Tensor)]
    return {name: tree_map(function, *(part[name] for part in parts)) for name in parts[0]}


def require_state(reducer: object, state: State) -> None:
    """Raises `EmptyStateError` where `state` is empty."""
    if not state:
        raise EmptyStateError(f"{reducer!r} has nothing to compute: no observation was reduced into this state yet")


def check_states(reducer: object, a: State, b: State, shapes: bool = True) -> None:
    """Raises `StateMismatchError`, with both sides listed, where two states cannot belong to `reducer`."""
    if a.keys() != b.keys():
        raise StateMismatchError(
            f"{reducer!r} cannot merge states with different keys: {sorted(a)} and {sorted(b)}; were they made by the same reducer?"
        )
    if shapes:
        for key, value in a.items():
            if value.shape != b[key].shape:
                raise StateMismatchError(
                    f"{reducer!r} keeps shape {tuple(value.shape)} for {key!r} so far and now met {tuple(b[key].shape)}: "
                    "the kept axes must not change; keep fewer axes in the pattern, or record these apart"
                )
