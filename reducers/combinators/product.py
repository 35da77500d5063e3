"""Product: several named reducers over the same observations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from reducers.core.fields import Reduction
from reducers.core.reducer import Reducer, check_reducer
from reducers.core.states import most_nonfinite, require_state
from reducers.errors import ReducerTypeError, StateMismatchError
from reducers.kernels.parts import TensorPart
from reducers.state import Nonfinite, Result, State


@dataclass(frozen=True, init=False, repr=False)
class Product(Reducer):
    """Several named reducers over the same observations; the state is the union of their states, with keys `part/key`.

    `Product(a=A, b=B).compute(...) == {"a": A.compute(...), "b": B.compute(...)}`

    Returns:
        A mapping from the name of each part to its result.

    Raises:
        ReducerTypeError: there are no parts, a name is empty or contains `/`, or a part is not a reducer instance.

    >>> import torch
    >>> from reducers import Count, Mean
    >>> both = Product(n=Count(), mean=Mean())
    >>> both.compute(both.update({}, torch.tensor([1.0, 3.0])))
    {'n': tensor(2), 'mean': tensor(2., dtype=torch.float64)}
    """

    parts: tuple[tuple[str, Reducer], ...]

    looks_inside: ClassVar[bool] = True

    def __init__(self, /, *unnamed: Reducer, **parts: Reducer) -> None:
        if unnamed:
            raise ReducerTypeError(f"each part of a Product has a name: write Product(a={unnamed[0]!r}, ...)")
        if not parts:
            raise ReducerTypeError("Product needs at least one named part: Product(mean=Mean(), top=Max())")
        for name, part in parts.items():
            if not name or "/" in name:
                raise ReducerTypeError(f"Product part name {name!r} must be non-empty and without '/', which separates state keys")
            check_reducer(part, f"Product({name}=...)")
        object.__setattr__(self, "parts", tuple(parts.items()))

    @classmethod
    def from_fields(cls, **fields: Any) -> Product:
        return cls(**dict(fields["parts"]))

    def __repr__(self) -> str:
        return f"Product({', '.join(f'{name}={part!r}' for name, part in self.parts)})"

    @property
    def ordered(self) -> bool:  # type: ignore[override]
        return any(part.ordered for _, part in self.parts)

    @property
    def bounded(self) -> bool:  # type: ignore[override]
        return all(part.bounded for _, part in self.parts)

    @property
    def batchable(self) -> bool:
        return any(part.batchable for _, part in self.parts)

    def _split(self, state: State) -> dict[str, State]:
        split: dict[str, State] = {name: {} for name, _ in self.parts}
        for key, value in state.items():
            name, _, rest = key.partition("/")
            if name not in split:
                raise StateMismatchError(f"{self!r} has no part {name!r}: the state was made by another reducer")
            split[name][rest] = value
        return split

    def update(self, state: State, *xs: Tensor) -> State:
        split = self._split(state)
        return {f"{name}/{key}": value for name, part in self.parts for key, value in part.update(split[name], *xs).items()}

    def update_masked(self, state: State, x: Tensor, mask: Tensor) -> State:
        split = self._split(state)
        updated = {name: part.update_masked(split[name], x, mask) for name, part in self.parts}
        return {f"{name}/{key}": value for name, part_state in updated.items() for key, value in part_state.items()}

    def update_all(self, state: State, xs: Tensor) -> State:
        split = self._split(state)
        return {f"{name}/{key}": value for name, part in self.parts for key, value in part.update_all(split[name], xs).items()}

    def merge_all(self, states: Sequence[State]) -> State:
        split = [self._split(state) for state in states]
        merged = ((name, part.merge_all([parts[name] for parts in split])) for name, part in self.parts)
        return {f"{name}/{key}": value for name, state in merged for key, value in state.items()}

    def merge(self, a: State, b: State) -> State:
        left, right = self._split(a), self._split(b)
        return {f"{name}/{key}": value for name, part in self.parts for key, value in part.merge(left[name], right[name]).items()}

    def of_part(self, part: TensorPart) -> Product:
        return Product(**{name: one.of_part(part) for name, one in self.parts})

    def join_parts(self, a: State, b: State) -> State:
        left, right = self._split(a), self._split(b)
        joined = {name: part.join_parts(left[name], right[name]) for name, part in self.parts}
        return {f"{name}/{key}": value for name, state in joined.items() for key, value in state.items()}

    def reductions_of(self, state: State) -> Mapping[str, Reduction]:
        split = self._split(state)
        return {f"{name}/{key}": op for name, part in self.parts for key, op in part.reductions_of(split[name]).items()}

    def _check(self, state: State) -> None:
        split = self._split(state)
        for name, part in self.parts:
            part.check(split[name])

    def compute(self, state: State) -> Result:
        require_state(self, state)
        split = self._split(state)
        return {name: part.compute(split[name]) for name, part in self.parts if split[name]}

    def nonfinite(self, state: State) -> Nonfinite | None:
        split = self._split(state)
        return most_nonfinite([part.nonfinite(split[name]) for name, part in self.parts if split[name]])
