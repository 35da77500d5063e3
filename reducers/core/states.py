"""Functions on states of any reducer: move, check, copy, rename keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from reducers.errors import EmptyStateError, StateMismatchError
from reducers.state import Nonfinite, Result, State


def prefixed(name: str, state: State) -> State:
    """Return `state` with its keys prefixed by `name/`."""
    return {f"{name}/{key}": value for key, value in state.items()}


def substate(state: State, name: str) -> State:
    """Return the entries whose keys start with `name/`, without that prefix."""
    return {key[len(name) + 1 :]: value for key, value in state.items() if key.startswith(f"{name}/")}


def without_values(state: State) -> State:
    """Return tensors of the same keys, shapes, dtypes and devices that take no memory, for `check_states`."""
    return {key: value.new_empty(()).expand(value.shape) for key, value in state.items()}


def to_device(state: State, device: torch.device) -> State:
    """Return `state` on `device`: the same object if it is there already."""
    for value in state.values():
        if value.device != device:
            return {key: value.to(device) for key, value in state.items()}
    return state


def concatenated(reducer: object, parts: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Return the parts of a state concatenated; raise `StateMismatchError` if they do not fit, such as float8 beside float32."""
    try:
        return torch.cat(list(parts), dim=axis)
    except RuntimeError as error:
        raise StateMismatchError(f"{reducer!r} cannot join what it keeps: {error}") from error


def copy_aliased(result: Result, state: State) -> Result:
    """Return `result` with copies of the tensors that it shares with `state`, so that the caller may write into it."""
    if isinstance(result, Tensor):
        for value in state.values():
            if value is result:
                return result.clone()
        return result
    return {key: copy_aliased(value, state) for key, value in result.items()}


def most_nonfinite(counts: Sequence[Nonfinite | None]) -> Nonfinite | None:
    """Return the count of what was left out that is highest, preferably one that says of how many; None if there is none."""
    found = [one for one in counts if one is not None]
    told = [one for one in found if one.of is not None] or found
    if len(told) < 2:
        return told[0] if told else None
    numbers = torch.stack([one.number for one in told])
    best = numbers.argmax()
    totals = [one.of for one in told if one.of is not None]
    return Nonfinite(numbers[best], torch.stack(totals)[best] if totals else None)


def tree_map(function: Callable[..., Tensor], *results: Result) -> Result:
    """Apply `function` to the corresponding tensors of several results of the same structure."""
    if isinstance(results[0], Tensor):
        return function(*results)
    parts = [result for result in results if not isinstance(result, Tensor)]
    return {name: tree_map(function, *(part[name] for part in parts)) for name in parts[0]}


def require_state(reducer: object, state: State) -> None:
    """Raise `EmptyStateError` if `state` is empty."""
    if not state:
        raise EmptyStateError(f"{reducer!r} has nothing to compute: the state has no observations yet")


def check_states(reducer: object, a: State, b: State, shapes: bool = True) -> None:
    """Raise `StateMismatchError`, which lists both sides, if two states cannot both belong to `reducer`."""
    if a.keys() != b.keys():
        raise StateMismatchError(
            f"{reducer!r} cannot merge states with different keys: {sorted(a)} and {sorted(b)}; were they made by the same reducer?"
        )
    if shapes:
        for key, value in a.items():
            if value.shape != b[key].shape:
                raise StateMismatchError(
                    f"{reducer!r} keeps shape {tuple(value.shape)} for {key!r} so far and now met {tuple(b[key].shape)}: "
                    "the kept axes must not change; keep fewer axes in the pattern, or record these shapes separately"
                )
