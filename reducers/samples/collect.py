"""Reducers that store observations: the first, the last, all of them, or a fold over all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from reducers.core.inputs import observation
from reducers.core.reducer import Reducer
from reducers.core.states import check_states, concatenated, require_state, to_device
from reducers.errors import ReducerTypeError, StateMismatchError
from reducers.state import State


def keep(x: Tensor) -> Tensor:
    """Return a contiguous copy of `x` with its own storage, and lazy conjugation and negation resolved."""
    return x.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class First(Reducer):
    """The first observation; empty tensors are ignored.

    Returns:
        A tensor in the shape and dtype of the first observation.

    >>> import torch
    >>> first = First()
    >>> first.compute(first.update(first.update({}, torch.tensor([1, 2])), torch.tensor([3])))
    tensor([1, 2])
    """

    ordered: ClassVar[bool] = True

    def update(self, state: State, *xs: Tensor) -> State:
        x = observation(self, xs)
        return {"value": keep(x)} if not state and x.numel() else state

    def merge(self, a: State, b: State) -> State:
        return a or b

    def compute(self, state: State) -> Tensor:
        require_state(self, state)
        return state["value"].clone()


@dataclass(frozen=True)
class Last(Reducer):
    """The last observation; empty tensors are ignored.

    Returns:
        A tensor in the shape and dtype of the last observation.

    >>> import torch
    >>> last = Last()
    >>> last.compute(last.update(last.update({}, torch.tensor([1, 2])), torch.tensor([3])))
    tensor([3])
    """

    ordered: ClassVar[bool] = True

    def update(self, state: State, *xs: Tensor) -> State:
        x = observation(self, xs)
        return {"value": keep(x)} if x.numel() else state

    def merge(self, a: State, b: State) -> State:
        return b or a

    def compute(self, state: State) -> Tensor:
        require_state(self, state)
        return state["value"].clone()


@dataclass(frozen=True)
class Fold(Reducer):
    """A left fold over all observations: `function(function(x1, x2), x3)` and so on; a single x1 is returned unchanged.

    Args:
        function: maps the result so far and the next observation to one tensor. It must be associative
            (`f(f(a, b), c) == f(a, f(b, c))`), else the result depends on how states are merged. It must not work in place:
            `torch.add`, not `torch.Tensor.add_`.

    Returns:
        The last return value of `function`.

    Raises:
        ReducerTypeError: `function` is not callable, or does not return a tensor.

    >>> import torch
    >>> longest = Fold(torch.maximum)
    >>> longest.compute(longest.update(longest.update({}, torch.tensor([1, 5])), torch.tensor([3, 4])))
    tensor([3, 5])
    """

    function: Callable[[Tensor, Tensor], Tensor]

    ordered: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise ReducerTypeError(f"Fold needs a function of two tensors, such as torch.add, and got {self.function!r}")

    def update(self, state: State, *xs: Tensor) -> State:
        x = observation(self, xs)
        return self.merge(state, {"value": keep(x)}) if x.numel() else state

    def merge(self, a: State, b: State) -> State:
        if not a or not b:
            return a or b
        check_states(self, a, b, shapes=False)
        folded = self.function(a["value"], to_device(b, a["value"].device)["value"])
        if not isinstance(folded, Tensor):
            raise ReducerTypeError(f"the function of {self!r} must return a tensor and returned {type(folded).__name__}")
        return {"value": folded.detach().contiguous()}

    def compute(self, state: State) -> Tensor:
        require_state(self, state)
        return state["value"].clone()


@dataclass(frozen=True)
class Collect(Reducer):
    """All observations, concatenated along their first axis; 0-d tensors are stacked.

    Memory grows with the number of elements. Blocks of similar length are concatenated, like the carries of a binary counter, so
    n observations cost O(n log n) copies and the state holds O(log n) tensors, with the keys "0", "1", ... in order of time.

    Returns:
        A tensor of shape (sum of the first axes, ...), in the promoted dtype of the observations.

    Raises:
        StateMismatchError: the axes after the first differ between observations.

    >>> import torch
    >>> collect = Collect()
    >>> state = collect.update({}, torch.tensor([1.0, 2.0]))
    >>> collect.compute(collect.update(state, torch.tensor(3.0)))
    tensor([1., 2., 3.])
    """

    ordered: ClassVar[bool] = True
    bounded: ClassVar[bool] = False

    def update(self, state: State, *xs: Tensor) -> State:
        x = observation(self, xs)
        if not x.numel():
            return state
        return _keyed(self._append(_blocks(state), x.reshape(1) if x.ndim == 0 else x))

    def update_all(self, state: State, xs: Tensor) -> State:
        blocks, x = _blocks(state), xs.flatten(0, 1) if xs.ndim > 1 else xs
        if not x.numel() or any(block.dtype != x.dtype or block.shape[1:] != x.shape[1:] for block in blocks):
            return super().update_all(state, xs)
        sizes = [*map(len, blocks)]
        for _ in range(len(xs)):
            _carry(sizes, len(x) // len(xs))
        same = next((at for at, pair in enumerate(zip(blocks, sizes, strict=False)) if len(pair[0]) != pair[1]), len(blocks))
        joined = concatenated(self, [*(block.to(x.device) for block in blocks[same:]), observation(self, (x,))])
        return _keyed([*blocks[:same], *map(keep, torch.split(joined, sizes[same:]))])

    def merge(self, a: State, b: State) -> State:
        if not a or not b:
            return a or b
        blocks = _blocks(a)
        for block in _blocks(b):
            blocks = self._append(blocks, block)
        return _keyed(blocks)

    def compute(self, state: State) -> Tensor:
        require_state(self, state)
        return concatenated(self, _blocks(state))

    def _append(self, blocks: list[Tensor], block: Tensor) -> list[Tensor]:
        if blocks and blocks[-1].shape[1:] != block.shape[1:]:
            raise StateMismatchError(
                f"{self!r} holds observations of shape (*, {', '.join(map(str, blocks[-1].shape[1:]))}) and now met "
                f"{tuple(block.shape)}: only the first axis may differ; record these separately, or flatten: .premap(torch.ravel)"
            )
        sizes = [*map(len, blocks)]
        _carry(sizes, len(block))
        start = len(sizes) - 1
        carried = [*(earlier.to(block.device) for earlier in blocks[start:]), block]
        return [*blocks[:start], concatenated(self, carried) if len(carried) > 1 else keep(block)]


def _carry(sizes: list[int], rows: int) -> None:
    """Appends a block of so many rows to blocks of these sizes; the last of them become part of it."""
    while sizes and sizes[-1] < 2 * rows:
        rows += sizes.pop()
    sizes.append(rows)


def _blocks(state: State) -> list[Tensor]:
    # a file may list the keys in any order
    return [state[str(index)] for index in range(len(state))]


def _keyed(blocks: list[Tensor]) -> State:
    return {str(index): block for index, block in enumerate(blocks)}
