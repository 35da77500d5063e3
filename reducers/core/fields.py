"""Fields: what a state is made of, declared once: how each entry of two states joins, and what kernels compute for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from reducers.errors import ArgumentError, ReducerTypeError
from reducers.kernels.columns import COLUMNS, WEIGHTED
from reducers.kernels.precision import aligned
from reducers.state import State

Reduction: TypeAlias = Literal["sum", "min", "max"]
"""How two tensors of one shape merge, element by element; the lowest and the highest of a number and NaN are NaN, those of an
integer and a float are float64."""

_JOINS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"sum": torch.add, "min": torch.minimum, "max": torch.maximum}
_KNOWN = {*COLUMNS, *WEIGHTED}


@dataclass(frozen=True)
class Field:
    """One entry of a state, which joins element by element.

    Args:
        column: which column of `reducers.kernels.columns` it is, of the elements that `lift` is given; "" if it is none, or if no
            kernel may compute it.

    Raises:
        ArgumentError: there is no such column.
    """

    column: str = ""

    reduction: ClassVar[Reduction | None] = None
    """How two of them join; None if `join` of the statistic does it."""

    def __post_init__(self) -> None:
        if self.column and self.column not in _KNOWN:
            raise ArgumentError(f"kernels have no column {self.column!r}; they have {', '.join(sorted(_KNOWN))}")


@dataclass(frozen=True)
class Add(Field):
    """An entry of which two are added, such as a count."""

    reduction: ClassVar[Reduction | None] = "sum"


@dataclass(frozen=True)
class Least(Field):
    """An entry of which the lower one is kept."""

    reduction: ClassVar[Reduction | None] = "min"


@dataclass(frozen=True)
class Greatest(Field):
    """An entry of which the higher one is kept."""

    reduction: ClassVar[Reduction | None] = "max"


@dataclass(frozen=True)
class Joined(Field):
    """An entry that `join` of the statistic merges, such as a mean: element by element, with the help of other entries."""


def join_fields(fields: Mapping[str, Field], a: State, b: State) -> State:
    """Return the entries that merge by themselves, merged.

    Raises:
        ReducerTypeError: there is an entry that is no field, which would be lost.
    """
    joined = {}
    for key, value in a.items():  # no comprehension, which would be a call more in each update
        if key not in fields:
            raise ReducerTypeError(f"`lift` returns {key!r}, which `fields` do not name: they name {', '.join(map(repr, fields))}")
        if how := fields[key].reduction:
            other = b[key]
            joined[key] = _JOINS[how](value, other) if value.dtype is other.dtype else _JOINS[how](*aligned(value, other))
    return joined


def columns_of(fields: Mapping[str, Field]) -> dict[str, str]:
    """Return which column each entry is; empty if one of them is none."""
    columns: dict[str, str] = {}
    for key, field in fields.items():
        if not field.column:
            return {}
        columns[key] = field.column
    return columns
