"""Cell: a reducer and its state as an `nn.Module`, to which observations are pushed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from recorders.recordings.history import Past
from recorders.recordings.recording import Subrecording
from reducers import Reducer, Result, State, StateError, StateMismatchError
from reducers.core.reducer import check_reducer
from reducers.core.states import check_states, without_values

_PREFIX = "state/"
_SAMPLES = "samples"


def _outside_inference(function: Callable[..., State], *args: Any) -> State:
    """Calls `function` outside of `torch.inference_mode`: a state that is made in it could not be updated outside."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad():
            return function(*args)
    with torch.no_grad():
        return function(*args)


class Cell(Past, nn.Module):
    """A reducer together with its state, as a module with `.to()` and `state_dict()`.

    It is asked like a monitor: `peek`, `value`, `samples`, `to_frame`, `equals`, and `view` if its reducer is a `History`.

    The state is neither a parameter nor a buffer, because its keys and shapes are known only after the first push. `.to(device)`
    moves it, but its dtype never changes, not even by `.half()`. `load_state_dict` works on a new cell. It checks the state as
    `load` does, and raises `StateError` if the reducer has no such state.

    Args:
        reducer: the reducer; several cells may share it, because it stores no data.

    Raises:
        ReducerTypeError: `reducer` is not a reducer instance.

    >>> import torch
    >>> from recorders import Cell
    >>> from reducers import Mean
    >>> cell = Cell(Mean())
    >>> cell.push(torch.tensor([1.0, 2.0]))
    >>> cell.push(torch.tensor(6.0))
    >>> cell.peek(), cell.samples
    (tensor(3., dtype=torch.float64), 2)
    """

    def __init__(self, reducer: Reducer) -> None:
        super().__init__()
        self.reducer = check_reducer(reducer, "Cell")
        self._stored: tuple[State, int] = (reducer.init(), 0)  # bound by one assignment
        self._shapes: State = {}

    @property
    def state(self) -> State:
        """The state, as a new dict of the same tensors."""
        return dict(self._stored[0])

    @property
    def states(self) -> dict[str, State]:
        """The state as that of the leaf "", as monitors have it; without one if nothing was pushed."""
        return {"": state} if (state := self.state) else {}

    @property
    def samples(self) -> int:
        """The number of observations that were pushed, and merged."""
        return self._stored[1]

    def snapshot(self) -> Subrecording:
        """What was pushed so far, without the module."""
        return Subrecording(self.reducer, self.states, self.samples, monitor="Cell")

    def push(self, *xs: Tensor) -> None:
        """Reduce one more observation, without autograd.

        Raises:
            StateMismatchError: the kept shapes changed, also after `clear(keepshape=True)`.
        """
        before, samples = self._stored
        state = _outside_inference(self.reducer.update, before, *xs)
        if self._shapes and state:
            check_states(self.reducer, self._shapes, state)
        self._stored = state, samples + 1

    def forward(self, *xs: Tensor) -> Result:
        """Reduce one more observation, and return the statistic of it alone; `push` costs half of that.

        Raises:
            StateMismatchError: as `push`.
        """
        with torch.no_grad():
            alone = self.reducer.compute(self.reducer.update(self.reducer.init(), *xs))
        self.push(*xs)
        return alone

    def clear(self, keepshape: bool = False) -> None:
        """Reset the state.

        Args:
            keepshape: require later states to have the same shapes as before.
        """
        if not keepshape:
            self._shapes = {}
        elif state := self._stored[0]:
            self._shapes = without_values(state)
        self._stored = self.reducer.init(), 0

    reset = clear

    def merge(self, other: Cell) -> None:
        """Merge the state of another cell, as the later one.

        Raises:
            StateMismatchError: the other cell has another reducer.
        """
        if other.reducer != self.reducer:
            raise StateMismatchError(f"cells of different reducers cannot merge: {self.reducer!r} and {other.reducer!r}")
        (mine, samples), (theirs, more) = self._stored, other._stored
        self._stored = _outside_inference(self.reducer.merge, mine, theirs), samples + more

    def extra_repr(self) -> str:
        return repr(self.reducer)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Cell:
        nn.Module._apply(self, fn, recurse)  # type: ignore[no-untyped-call]
        state, samples = self._stored
        # apply fn to an empty tensor to find the device; the dtype must not change
        moved = {key: value.to(fn(torch.empty(0, dtype=value.dtype, device=value.device)).device) for key, value in state.items()}
        self._stored = moved, samples
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        nn.Module._save_to_state_dict(self, destination, prefix, keep_vars)
        state, samples = self._stored
        # copies, because `torch.save` writes the whole storage of a view
        destination.update({f"{prefix}{_PREFIX}{key}": value.clone() for key, value in state.items()})
        destination[prefix + _SAMPLES] = torch.tensor(samples, device="cpu")

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, metadata: Any, strict: bool, missing_keys: list[str], *args: Any
    ) -> None:
        start = prefix + _PREFIX
        state = {key[len(start) :]: value for key, value in state_dict.items() if key.startswith(start)}
        if not state and prefix + _SAMPLES not in state_dict:  # of a net without this cell
            missing_keys.append(prefix + _SAMPLES)
            return
        if not all(isinstance(value, Tensor) for value in state.values()):
            kinds = {key: type(value).__name__ for key, value in state.items()}
            raise StateError(f"{self.reducer!r:.200} has no such state: its entries must be tensors, and are {kinds!r:.500}")
        self.reducer.check(state)
        samples = _samples_of(state_dict.get(prefix + _SAMPLES), prefix)
        self._stored = _outside_inference(lambda: {key: value.clone() for key, value in state.items()}), samples


def _samples_of(found: object, prefix: str) -> int:
    """The number of observations in a state dict; raises `StateError` if it is none."""
    if isinstance(found, Tensor) and found.dtype == torch.int64 and not found.dim() and (samples := int(found)) >= 0:
        return samples
    raise StateError(f"{prefix}{_SAMPLES} must be the number of observations, a tensor of one int64; it is {found!r:.200}")
