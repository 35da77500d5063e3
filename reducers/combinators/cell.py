"""Cell: a reducer and its state as an `nn.Module`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from reducers.core.reducer import Reducer, check_reducer
from reducers.core.states import check_states, without_values
from reducers.errors import StateError, StateMismatchError
from reducers.state import Result, State
from reducers.temporal.history import history_of
from reducers.temporal.interpolation import Extrapolation, Interpolation

__all__ = ["Cell"]

_PREFIX = "state/"


def _outside_inference(function: Callable[..., State], *args: Any) -> State:
    """Calls `function` outside of `torch.inference_mode`: a state that is made in it could not be updated outside."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad():
            return function(*args)
    with torch.no_grad():
        return function(*args)


class Cell(nn.Module):
    """A reducer together with its state, as a module with `.to()` and `state_dict()`.

    The state is neither a parameter nor a buffer, because its keys and shapes are known only after the first push. `.to(device)`
    moves it, but its dtype never changes, not even by `.half()`. `load_state_dict` works on a new cell. It checks the state as
    `load` does, and raises `StateError` if the reducer has no such state.

    Args:
        reducer: the reducer; several cells may share it, because it stores no data.

    Raises:
        ReducerTypeError: `reducer` is not a reducer instance.

    >>> import torch
    >>> from reducers import Cell, Mean
    >>> cell = Cell(Mean())
    >>> cell.push(torch.tensor([1.0, 2.0]))
    >>> cell.push(torch.tensor(6.0))
    >>> cell.peek()
    tensor(3., dtype=torch.float64)
    """

    def __init__(self, reducer: Reducer) -> None:
        super().__init__()
        self.reducer = check_reducer(reducer, "Cell")
        self._state: State = reducer.init()
        self._shapes: State = {}

    @property
    def state(self) -> State:
        """The state, as a new dict of the same tensors."""
        return dict(self._state)

    def push(self, *xs: Tensor) -> None:
        """Reduce one more observation, without autograd.

        Raises:
            StateMismatchError: the kept shapes changed, also after `clear(keepshape=True)`.
        """
        state = _outside_inference(self.reducer.update, self._state, *xs)
        if self._shapes and state:
            check_states(self.reducer, self._shapes, state)
        self._state = state

    def forward(self, *xs: Tensor) -> Result:
        """Reduce one more observation, and return the statistic of it alone; `push` costs half of that.

        Raises:
            StateMismatchError: as `push`.
        """
        with torch.no_grad():
            alone = self.reducer.compute(self.reducer.update(self.reducer.init(), *xs))
        self.push(*xs)
        return alone

    def peek(self) -> Result:
        """Return the statistic of all observations.

        Raises:
            EmptyStateError: nothing was pushed.
        """
        return self.reducer.compute(self._state)

    compute = peek

    def latest(self) -> Result:
        """Return the newest result of a `History`.

        Raises:
            NoHistoryError: the reducer is not a `History`.
            EmptyStateError: nothing was pushed.
        """
        return history_of(self.reducer).latest(self._state)

    def view(
        self,
        time: float | Tensor,
        interpolation: Interpolation | None = None,
        *,
        tolerance: float = 1e-7,
        time_constant: float | Tensor | None = None,
        extrapolation: Extrapolation | None = None,
    ) -> Result:
        """Return the result at a time before the newest; see `History.view`.

        Raises:
            NoHistoryError: the reducer is not a `History`.
            EmptyStateError: nothing was pushed.
            ArgumentError: as `History.view`.
        """
        options: Any = {"tolerance": tolerance, "time_constant": time_constant, "extrapolation": extrapolation}
        return history_of(self.reducer).view(self._state, time, interpolation, **options)

    def dump(self) -> Result:
        """Return all results of a `History`, newest first; see `History.dump`.

        Raises:
            NoHistoryError: the reducer is not a `History`.
            EmptyStateError: nothing was pushed.
        """
        return history_of(self.reducer).dump(self._state)

    def clear(self, keepshape: bool = False) -> None:
        """Reset the state.

        Args:
            keepshape: require later states to have the same shapes as before.
        """
        if not keepshape:
            self._shapes = {}
        elif self._state:
            self._shapes = without_values(self._state)
        self._state = self.reducer.init()

    reset = clear

    def merge(self, other: Cell) -> None:
        """Merge the state of another cell, as the later one.

        Raises:
            StateMismatchError: the other cell has another reducer.
        """
        if other.reducer != self.reducer:
            raise StateMismatchError(f"cells of different reducers cannot merge: {self.reducer!r} and {other.reducer!r}")
        self._state = _outside_inference(self.reducer.merge, self._state, other._state)

    def extra_repr(self) -> str:
        return repr(self.reducer)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Cell:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # apply fn to an empty tensor to find the device; the dtype must not change
        self._state = {
            key: value.to(fn(torch.empty(0, dtype=value.dtype, device=value.device)).device) for key, value in self._state.items()
        }
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        # copies, because `torch.save` writes the whole storage of a view
        destination.update({f"{prefix}{_PREFIX}{key}": value.clone() for key, value in self._state.items()})

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        start = prefix + _PREFIX
        state = {key[len(start) :]: value for key, value in state_dict.items() if key.startswith(start)}
        if not all(isinstance(value, Tensor) for value in state.values()):
            kinds = {key: type(value).__name__ for key, value in state.items()}
            raise StateError(f"{self.reducer!r:.200} has no such state: its entries must be tensors, and are {kinds!r:.500}")
        self.reducer.check(state)
        self._state = _outside_inference(lambda: {key: value.clone() for key, value in state.items()})
