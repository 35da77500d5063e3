"""Many tensors lifted at once: small ones become the rows of matrices, so that a pass goes over all of them and not over each."""

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
from reducers.state import State

__all__ = ["lift_stacked", "numbers", "stacks"]

FEW = 4  # tensors that are lifted as fast one after another
PADDED = 1.25  # how much longer than the shortest the longest row of a matrix is


def stacks(reducer: Reducer) -> bool:
    """Whether states of `reducer` may be stacked whatever the shapes of the tensors: `merge` of two such stacks merges row by row.

    So it is where a join works element by element and no axis is kept.

    >>> from reducers import Moments, Product, Quantile, Summary
    >>> stacks(Product(a=Summary(), b=Moments())), stacks(Summary("b d -> d")), stacks(Quantile())
    (True, False, False)
    """
    if isinstance(reducer, Product):
        return all(stacks(part) for _, part in reducer.parts)
    if isinstance(reducer, Postmap):
        return stacks(reducer.reducer)
    return (
        isinstance(reducer, Statistic)
        and reducer.stackable_join
        and reducer.divisible
        and "".join(reducer.pattern.split()) == "...->"
    )


def lift_stacked(reducer: Reducer, xs: Sequence[Tensor]) -> State:
    """What `update({}, x)` gives for each of `xs`, stacked along a new first axis; for a reducer that `stacks`.

    Args:
        xs: of one dtype, on one device, none of them empty.

    Raises:
        StateMismatchError: the reducer does not lift the rows of a matrix as it lifts each by itself.

    >>> import torch
    >>> from reducers import Sum
    >>> lift_stacked(Sum(), [torch.ones(3), torch.ones(2, 2)])
    {'sum': tensor([3., 4.], dtype=torch.float64)}
    """
    matrices, alone, back = _plan(tuple([x.numel() for x in xs]), xs[0].is_floating_point())
    states = []
    for positions, lengths in matrices:
        flat: Tensor = _flatten_dense_tensors([xs[position] for position in positions]).detach()  # type: ignore[no-untyped-call]
        if lengths is None:
            states.append(_lift(reducer, flat.view(len(positions), -1), None))
        else:
            shown = torch.arange(max(lengths), device=flat.device) < numbers(lengths, flat.device)[:, None]
            states.append(_lift(reducer, flat.new_zeros(shown.shape).masked_scatter_(shown, flat), shown))
    lone = [reducer.update({}, xs[position].detach()) for position in alone]
    if lone:
        states.append({key: torch.stack([state[key] for state in lone]) for key in lone[0]})
    found = {key: torch.cat([state[key] for state in states]) for key in states[0]}
    if any(len(value) != len(xs) for value in found.values()):
        raise StateMismatchError(f"{reducer!r} does not lift each row of a matrix by itself, so its states cannot be stacked")
    if back is None:
        return found
    index = numbers(back, xs[0].device)
    return {key: value[index] for key, value in found.items()}


def numbers(found: Sequence[int], device: torch.device) -> Tensor:
    """As a tensor, without waiting for the device."""
    return torch.tensor(found).to(device, non_blocking=True)


def _lift(reducer: Reducer, rows: Tensor, shown: Tensor | None) -> State:
    """Of each row by itself, of what is shown of it."""
    if isinstance(reducer, Product):
        return {f"{name}/{key}": value for name, part in reducer.parts for key, value in _lift(part, rows, shown).items()}
    if isinstance(reducer, Postmap):
        return _lift(reducer.reducer, rows, shown)
    assert isinstance(reducer, Statistic)
    return reducer.lift(rows, (1,)) if shown is None else reducer.lift_masked(rows, shown, (1,))


_Matrix = tuple[tuple[int, ...], tuple[int, ...] | None]


@lru_cache(maxsize=64)
def _plan(lengths: tuple[int, ...], pads: bool) -> tuple[list[_Matrix], list[int], list[int] | None]:
    """Which tensors make a matrix, with their lengths where these differ; those lifted alone; and the way back to their order."""
    by_length: dict[int, list[int]] = {}
    alone: list[int] = []
    for position, length in enumerate(lengths):
        (alone if length >= BIG else by_length.setdefault(length, [])).append(position)
    matrices: list[_Matrix] = []
    odd: list[int] = []
    for length, positions in by_length.items():
        enough = max(FEW, CHUNK // length)
        parts = [tuple(positions[start : start + enough]) for start in range(0, len(positions), enough)]
        for part in parts:
            if len(part) < FEW:
                odd += part
            else:
                matrices.append((part, None))
    odd.sort(key=lengths.__getitem__)
    while odd:
        longest = lengths[odd[0]] * PADDED
        count = next((i for i, position in enumerate(odd) if lengths[position] > longest), len(odd))
        count = min(count, max(FEW, CHUNK // lengths[odd[0]]))
        part, odd = tuple(odd[:count]), odd[count:]
        if count < FEW or not pads:
            alone += part
        else:
            matrices.append((part, tuple([lengths[position] for position in part])))
    order = [position for positions, _ in matrices for position in positions] + alone
    back = [0] * len(order)
    for place, position in enumerate(order):
        back[position] = place
    return matrices, alone, None if order == sorted(order) else back
