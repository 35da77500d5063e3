"""Lifts many tensors at once: small tensors become rows of matrices, so that each kernel call handles many of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from reducers.combinators.mapped import Postmap
from reducers.combinators.product import Product
from reducers.core.reducer import Reducer
from reducers.core.statistic import Statistic
from reducers.errors import StateMismatchError
from reducers.kernels.chunks import BIG, CHUNK
from reducers.kernels.merging import stack
from reducers.state import State

__all__ = ["int_tensor", "is_stackable", "lift_stacked"]

MIN_ROWS = 4  # fewer tensors are lifted as fast one by one
MAX_PADDING = 1.25  # largest ratio of the longest to the shortest row of a padded matrix


def is_stackable(reducer: Reducer) -> bool:
    """Return whether `lift_stacked` supports `reducer`: its join works element by element, and its pattern keeps no axis.

    Then states of tensors of any shapes can be stacked, and `merge` of two stacks merges them row by row.

    >>> from reducers import Moments, Product, Quantile, Summary
    >>> is_stackable(Product(a=Summary(), b=Moments())), is_stackable(Summary("b d -> d")), is_stackable(Quantile())
    (True, False, False)
    """
    if isinstance(reducer, Product):
        return all(is_stackable(part) for _, part in reducer.parts)
    if isinstance(reducer, Postmap):
        return is_stackable(reducer.reducer)
    return (
        isinstance(reducer, Statistic)
        and reducer.stackable_join
        and reducer.divisible
        and "".join(reducer.pattern.split()) == "...->"
    )


def lift_stacked(reducer: Reducer, xs: Sequence[Tensor]) -> State:
    """Return `update({}, x)` for each of `xs`, stacked along a new first axis, for a reducer that `is_stackable`.

    Args:
        xs: non-empty tensors with the same dtype, on the same device.

    Raises:
        StateMismatchError: the reducer does not lift each row of a matrix separately.

    >>> import torch
    >>> from reducers import Sum
    >>> lift_stacked(Sum(), [torch.ones(3), torch.ones(2, 2)])
    {'sum': tensor([3., 4.], dtype=torch.float64)}
    """
    matrices, single, inverse = _plan(tuple([x.numel() for x in xs]), xs[0].is_floating_point())
    states = []
    for positions, lengths in matrices:
        flat: Tensor = _flatten_dense_tensors([xs[position] for position in positions]).detach()  # type: ignore[no-untyped-call]
        if lengths is None:
            states.append(_lift_rows(reducer, flat.view(len(positions), -1), None))
        else:
            mask = torch.arange(max(lengths), device=flat.device) < int_tensor(lengths, flat.device)[:, None]
            states.append(_lift_rows(reducer, flat.new_zeros(mask.shape).masked_scatter_(mask, flat), mask))
    if single:
        states.append(stack([reducer.update({}, xs[position].detach()) for position in single]))
    stacked = {key: torch.cat([state[key] for state in states]) for key in states[0]}
    if any(len(value) != len(xs) for value in stacked.values()):
        raise StateMismatchError(f"{reducer!r} does not lift each row of a matrix separately, so its states cannot be stacked")
    if inverse is None:
        return stacked
    index = int_tensor(inverse, xs[0].device)
    return {key: value[index] for key, value in stacked.items()}


def int_tensor(values: Sequence[int], device: torch.device) -> Tensor:
    """Return the integers as a tensor on `device`, without synchronising it."""
    return torch.tensor(values).to(device, non_blocking=True)


def _lift_rows(reducer: Reducer, rows: Tensor, mask: Tensor | None) -> State:
    """Return the stacked states of the rows, each reduced where its mask is True."""
    if isinstance(reducer, Product):
        return {f"{name}/{key}": value for name, part in reducer.parts for key, value in _lift_rows(part, rows, mask).items()}
    if isinstance(reducer, Postmap):
        return _lift_rows(reducer.reducer, rows, mask)
    assert isinstance(reducer, Statistic)
    return reducer.lift(rows, (1,)) if mask is None else reducer.lift_masked(rows, mask, (1,))


_Matrix = tuple[tuple[int, ...], tuple[int, ...] | None]


@lru_cache(maxsize=64)
def _plan(lengths: tuple[int, ...], can_pad: bool) -> tuple[list[_Matrix], list[int], list[int] | None]:
    """Return the tensors per matrix (and their lengths, if they differ), those to lift singly, and the inverse permutation."""
    by_length: dict[int, list[int]] = {}
    single: list[int] = []
    for position, length in enumerate(lengths):
        (single if length >= BIG else by_length.setdefault(length, [])).append(position)
    matrices: list[_Matrix] = []
    leftover: list[int] = []
    for length, positions in by_length.items():
        max_rows = max(MIN_ROWS, CHUNK // length)
        parts = [tuple(positions[start : start + max_rows]) for start in range(0, len(positions), max_rows)]
        for part in parts:
            if len(part) < MIN_ROWS:
                leftover += part
            else:
                matrices.append((part, None))
    leftover.sort(key=lengths.__getitem__)
    while leftover:
        max_length = lengths[leftover[0]] * MAX_PADDING
        count = next((i for i, position in enumerate(leftover) if lengths[position] > max_length), len(leftover))
        count = min(count, max(MIN_ROWS, CHUNK // lengths[leftover[0]]))
        part, leftover = tuple(leftover[:count]), leftover[count:]
        if count < MIN_ROWS or not can_pad:
            single += part
        else:
            matrices.append((part, tuple([lengths[position] for position in part])))
    order = [position for positions, _ in matrices for position in positions] + single
    inverse = [0] * len(order)
    for place, position in enumerate(order):
        inverse[position] = place
    return matrices, single, None if order == sorted(order) else inverse
