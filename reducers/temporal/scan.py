"""Scan: any function of an observation and the result so far."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from reducers.core.constants import Constant, as_constant, constant_tensor, numbers
from reducers.core.inputs import observation
from reducers.core.reducer import Reducer
from reducers.core.states import require_state, to_device
from reducers.errors import NotMergeableError, ReducerTypeError
from reducers.samples.collect import keep
from reducers.state import Result, State

_VALUE = "value"


@dataclass(frozen=True)
class Scan(Reducer):
    """The last of `s = function(x, s)` over all observations x, in their order: for recurrences that do not merge.

    States of two parts of a stream cannot be merged, because the function knows only how to go on from a result. So a recording is
    made in one process, and can be saved, loaded (with `load(path, reducers={name: scan})`) and continued. If the function is
    associative use `Fold`, which merges; so does a `Statistic`. `History(Scan(function), duration=...)` keeps past results.

    Args:
        function: maps an observation and the result so far to the next result: a tensor of any shape, or a mapping from names to
            such results. If observations consist of several tensors, the result comes last: `function(x, y, s)`. It must not work
            in place.
        initial: the result before the first observation. None is passed to the function as it is; a number, or a tensor, which is
            kept as nested tuples and passed in float64, complex128, int64 or bool; or a function of the first observation.

    Returns:
        The last return value of `function`.

    Raises:
        ReducerTypeError: `function` is not callable, or does not return tensors; or `initial` is none of these.
        NotMergeableError: two states that are not empty are merged.

    >>> import torch
    >>> logistic = Scan(lambda x, s: x * s * (1 - s), initial=0.5)
    >>> state = logistic.update({}, torch.tensor([2.0, 4.0]))
    >>> logistic.compute(logistic.update(state, torch.tensor([2.0, 1.0])))
    tensor([0.5000, 0.0000])
    """

    function: Callable[..., Result]
    initial: Constant | Tensor | Callable[..., Result] | None = None

    ordered: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise ReducerTypeError(f"Scan needs a function of an observation and the result so far; got {self.function!r}")
        if not callable(self.initial):
            object.__setattr__(self, "initial", as_constant(self.initial))
            if self.initial is not None and not all(isinstance(number, (int, float, complex)) for number in numbers(self.initial)):
                raise ReducerTypeError(f"Scan takes initial None, a number, a tensor or a function, and got {self.initial!r}")

    def update(self, state: State, *xs: Tensor) -> State:
        observed = [observation(self, (x,)) for x in xs or (None,)]
        if not observed[0].numel():
            return state
        device = observed[0].device
        so_far = _nested(to_device(state, device)) if state else self._before(observed, device)
        return self._flat(_VALUE, self.function(*observed, so_far))

    def merge(self, a: State, b: State) -> State:
        if a and b:
            raise NotMergeableError(
                f"{self!r} cannot merge two states, because its function only goes on from one of them: record the stream in one "
                "piece, or use Fold with an associative function, or a Statistic"
            )
        return a or b

    def compute(self, state: State) -> Result:
        require_state(self, state)
        return _nested({key: value.clone() for key, value in state.items()})

    def _before(self, observed: list[Tensor], device: torch.device) -> Any:
        """Return the result before the first observation."""
        if callable(self.initial):
            return self.initial(*observed)
        return None if self.initial is None else constant_tensor(self.initial).to(device, non_blocking=True)

    def _flat(self, path: str, result: Any) -> State:
        """Return copies of the tensors of a result, by path."""
        if isinstance(result, Tensor):
            return {path: keep(result)}
        if not isinstance(result, Mapping) or not result or not all(isinstance(key, str) and "/" not in key for key in result):
            wanted = "a tensor, or a mapping from names without '/' to tensors"
            raise ReducerTypeError(f"the function of {self!r} must return {wanted}; it returned {result!r}")
        return {key: value for name, part in result.items() for key, value in self._flat(f"{path}/{name}", part).items()}


def _nested(state: State) -> Result:
    """Return the result that `_flat` made a state of."""
    if _VALUE in state:
        return state[_VALUE]
    nested: dict[str, Any] = {}
    for path, value in state.items():
        _, *outer, last = path.split("/")
        inside = nested
        for name in outer:
            inside = inside.setdefault(name, {})
        inside[last] = value
    return nested
