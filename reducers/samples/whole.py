"""Whole: all observations, or the last ones, each kept in its own shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from reducers.core.inputs import observation
from reducers.core.reducer import Reducer, check_size
from reducers.core.states import require_state
from reducers.errors import StateError
from reducers.samples.collect import keep
from reducers.state import Result, State


@dataclass(frozen=True)
class Whole(Reducer):
    """All observations, or the last ones, each in its own shape and dtype: both may change from one to the next.

    `Collect` concatenates observations, so it loses where one ends and the next begins. The state has a tensor for each
    observation, so `torch.compile` compiles every update anew (monitors in compiled graphs do not). Without `last`, memory grows
    without bound. `Reservoir().premap(lambda x: x[None])` draws from all observations, if they have one shape.

    Args:
        last: number of observations to keep, the newest ones; None for all.

    Returns:
        a mapping from the number of an observation ("0", "1", ...) to the observation, in order; observations without elements are
        not counted.

    Raises:
        ArgumentError: `last` is not a positive integer.

    >>> import torch
    >>> whole = Whole(last=2)
    >>> state = {}
    >>> for x in (torch.zeros(5), torch.ones(2, 3), torch.tensor([1, 2])):
    ...     state = whole.update(state, x)
    >>> {name: tuple(x.shape) for name, x in whole.compute(state).items()}
    {'1': (2, 3), '2': (2,)}
    """

    last: int | None = None

    ordered: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.last is not None:
            check_size(self, "last")

    @property
    def bounded(self) -> bool:  # type: ignore[override]
        return self.last is not None

    def update(self, state: State, *xs: Tensor) -> State:
        x = observation(self, xs)
        return self._newest({**state, str(self._count(state)): keep(x)}) if x.numel() else state

    def merge(self, a: State, b: State) -> State:
        start = self._count(a)
        return self._newest({**a, **{str(start + int(key)): keep(b[key]) for key in sorted(b, key=int)}})

    def _check(self, state: State) -> None:
        for key in state:
            if not key.isdecimal() or key != str(int(key)):
                raise StateError(f"{self!r} has no such state: its keys are the numbers of observations, and one is {key!r:.100}")

    def compute(self, state: State) -> Result:
        require_state(self, state)
        return {key: state[key].clone() for key in sorted(state, key=int)}  # a file may list the keys in any order

    def _count(self, state: State) -> int:
        """The number of observations so far, also of those that were dropped."""
        return len(state) if self.last is None else 1 + max([-1, *(int(key) for key in state)])

    def _newest(self, state: State) -> State:
        if self.last is None or len(state) <= self.last:
            return state
        return {key: state[key] for key in sorted(state, key=int)[-self.last :]}
