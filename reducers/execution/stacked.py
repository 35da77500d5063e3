"""Lifts many tensors at once: small tensors become rows of matrices, so that each kernel call handles many of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from reducers.combinators.mapped import Postmap
from reducers.combinators.per_observation import PerObservation
from reducers.combinators.product import Product
from reducers.core.reducer import Reducer
from reducers.core.statistic import Statistic
from reducers.errors import StateMismatchError
from reducers.execution.cuts import Pieces, int_tensor, plan_rows
from reducers.kernels.merging import stack
from reducers.samples.collect import Collect
from reducers.state import State


def is_stackable(reducer: Reducer) -> bool:
    """Return whether `lift_stacked` supports `reducer`: its join works element by element, and its pattern keeps no axis.

    Then states of tensors of any shapes can be stacked, and `merge` of two stacks merges them row by row.

    >>> from reducers import Moments, Product, Quantile, Summary
    >>> is_stackable(Product(a=Summary(), b=Moments())), is_stackable(Summary("b d -> d")), is_stackable(Quantile())
    (True, False, False)
    """
    if isinstance(reducer, Product):
        return reducer.looks_inside and all(is_stackable(part) for _, part in reducer.parts)
    if isinstance(reducer, Postmap):
        return reducer.looks_inside and is_stackable(reducer.reducer)
    return (
        isinstance(reducer, Statistic)
        and reducer.stackable
        and reducer.lifts_together
        and "".join(reducer.pattern.split()) == "...->"
    )


class Kept(NamedTuple):
    """A reducer that keeps something of each observation, so its states grow; what it keeps of many tensors can be stacked.

    Attributes:
        prefix: what stands before its keys in the state of the reducer that it is part of.
        reducer: a `PerObservation` of a statistic that is stackable, or a `Collect` of numbers.
        statistic: what it keeps of each observation; None if it is the observation itself.
    """

    prefix: str
    reducer: Reducer
    statistic: Statistic | None

    def update(self, state: State, kept: State) -> State:
        """Return the state after several observations, given what was kept of each, stacked along a first axis."""
        if isinstance(self.reducer, PerObservation):
            return self.reducer.update_lifted(state, kept)
        return self.reducer.update_all(state, kept[""])


class RowParts(NamedTuple):
    """What a reducer is made of, if its states for many tensors can be rows: one that is stackable, and those that keep."""

    stackable: Reducer | None
    kept: tuple[Kept, ...]


def row_parts(reducer: Reducer, numbers: bool = False) -> RowParts | None:
    """Return the parts of a reducer whose states for many tensors can be rows; None if they cannot.

    Args:
        numbers: whether all observations are numbers (0-d).

    >>> from reducers import Norm, Summary
    >>> row_parts(Product(all=Summary(), each=PerObservation(Norm(), Collect()))).kept[0].prefix
    'each/'
    """
    if is_stackable(reducer):
        return RowParts(reducer, ())
    several = isinstance(reducer, Product) and reducer.looks_inside
    parts = [(f"{name}/", part) for name, part in reducer.parts] if isinstance(reducer, Product) and several else [("", reducer)]
    stackable = {prefix[:-1]: part for prefix, part in parts if is_stackable(part)}
    kept = [_kept(prefix, part, numbers) for prefix, part in parts if prefix[:-1] not in stackable]
    found = tuple(one for one in kept if one is not None)
    return RowParts(Product(**stackable) if stackable else None, found) if len(found) == len(kept) else None


def _kept(prefix: str, reducer: Reducer, numbers: bool) -> Kept | None:
    if type(reducer) is Collect and numbers:
        return Kept(prefix, reducer, None)
    if type(reducer) is not PerObservation or type(reducer.over) is not Collect:
        return None
    inner = reducer.reducer
    return Kept(prefix, reducer, inner) if isinstance(inner, Statistic) and is_stackable(inner) else None


def lift_stacked(reducer: Reducer, xs: Sequence[Tensor]) -> State:
    """Return `update({}, x)` for each of `xs`, stacked along a new first axis, for a reducer that `is_stackable`.

    Args:
        xs: non-empty tensors with the same dtype, on the same device.

    Raises:
        StateMismatchError: the reducer does not lift each row of a matrix separately.

    >>> import torch
    >>> from reducers import Sum
    >>> lift_stacked(Sum(), [torch.ones(3), torch.ones(2, 2)])["sum"]
    tensor([3., 4.], dtype=torch.float64)
    """
    plan = plan_rows(tuple([x.numel() for x in xs]))
    states = [_lift_rows(reducer, _end_to_end(xs, positions).view(len(positions), -1)) for positions in plan.matrices]
    states += [_lift_pieces(reducer, _end_to_end(xs, pieces.positions), pieces) for pieces in plan.pieces]
    if plan.single:
        states.append(stack([reducer.update({}, xs[position].detach()) for position in plan.single]))
    stacked = _end_on_end(states)
    if plan.inverse is None:
        return stacked
    index = int_tensor(plan.inverse, xs[0].device)
    return {key: value[index] for key, value in stacked.items()}


def _end_to_end(xs: Sequence[Tensor], positions: Sequence[int]) -> Tensor:
    """Return the elements of the tensors at these positions, one tensor after the other."""
    chosen = [xs[position] for position in positions]
    return torch.cat([x if x.ndim == 1 else x.reshape(-1) for x in chosen]).detach()


def _end_on_end(states: Sequence[State]) -> State:
    """Return the rows of all of these stacked states."""
    return states[0] if len(states) == 1 else {key: torch.cat([state[key] for state in states]) for key in states[0]}


def _lift_pieces(reducer: Reducer, flat: Tensor, pieces: Pieces) -> State:
    """Return the stacked states of tensors that were cut into pieces, in the order of `pieces`; `flat` has them end to end."""
    rows = (flat.unfold(0, length, 1).index_select(0, int_tensor(starts, flat.device)) for length, starts in pieces.matrices)
    stacked = _end_on_end([_lift_rows(reducer, matrix) for matrix in rows])
    for level in pieces.levels:
        left, right, kept = [int_tensor(indices, flat.device) for indices in level]
        joined = reducer.merge(*({key: value[index] for key, value in stacked.items()} for index in (left, right)))
        stacked = {key: torch.cat((value, stacked[key][kept])) for key, value in joined.items()} if len(kept) else joined
    return stacked


def _lift_rows(reducer: Reducer, rows: Tensor) -> State:
    """Return the stacked states of the rows."""
    if isinstance(reducer, Product):
        return {f"{name}/{key}": value for name, part in reducer.parts for key, value in _lift_rows(part, rows).items()}
    if isinstance(reducer, Postmap):
        return _lift_rows(reducer.reducer, rows)
    assert isinstance(reducer, Statistic)
    stacked = reducer.lifted(rows, (1,))
    if any(value.shape[:1] != rows.shape[:1] for value in stacked.values()):
        raise StateMismatchError(f"{reducer!r} does not lift each row of a matrix separately, so its states cannot be stacked")
    return stacked
