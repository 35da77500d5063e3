"""How many elements a reducer leaves out because they are not finite, counted in one shot: for the column of the table of cases."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "INTEGERS_ONLY",
    "SHOWN",
    "LeftOut",
    "by_rows",
    "changes",
    "elements",
    "grouped",
    "masked",
    "nan",
    "norms",
    "some",
    "weighted",
]

Array = NDArray[Any]
Observations = list[Array]
LeftOut = Callable[[Observations], int] | str
"""From all observations to the number; or why nothing is left out."""

SHOWN = "what is not finite is in the result"
INTEGERS_ONLY = "it takes integers only"


def elements(xs: Observations) -> int:
    return sum(int((~np.isfinite(x)).sum()) for x in xs)


def nan(xs: Observations) -> int:
    return sum(int(np.isnan(x).sum()) for x in xs)


def some(which: slice | Callable[[Array], Array], count: LeftOut = elements) -> LeftOut:
    """Of some of the observations, or of some elements of each."""
    assert callable(count)
    return lambda xs: count(xs[which] if isinstance(which, slice) else [which(x) for x in xs])


def masked(count: Callable[[Observations], int] = elements) -> LeftOut:
    """Of the first three columns, where the last one is above 0."""
    return some(lambda x: x[x[:, 3] > 0, :3], count)


def grouped(xs: Observations) -> int:
    """Of the first three columns, where the last one makes a label from 0 up."""
    labels = [np.nan_to_num(x[:, 3], nan=0, posinf=0, neginf=0).astype(np.int64) % 4 - 1 for x in xs]
    return elements([x[label >= 0, :3] for x, label in zip(xs, labels, strict=True)])


def weighted(xs: Observations) -> int:
    """Of the first three columns; an element also counts if its weight, the last column, is not finite."""
    return sum(int((~np.isfinite(x[:, :3] + x[:, 3:])).sum()) for x in xs)


def by_rows(xs: Observations) -> int:
    """Rows in which an element is not finite; further axes are those of more rows."""
    rows = [np.moveaxis(x, 1, -1).reshape(-1, x.shape[1]) for x in xs]
    return sum(int((~np.isfinite(x).all(axis=1)).sum()) for x in rows)


def norms(xs: Observations) -> int:
    """Observations whose norm is not finite."""
    return sum(not np.isfinite(x).all() for x in xs)


def changes(xs: Observations) -> int:
    """Elements of the differences of consecutive observations of one shape."""
    with np.errstate(invalid="ignore"):
        return elements([y - x for x, y in pairwise(xs) if x.shape == y.shape])
