"""The vocabulary of columns: what kernels compute of a tensor in one read, in which dtype, and what they add up for it.

A statistic names the column that each entry of its state is. The loops in C++ and the kernels in Triton know the columns by this
table, and tests compare their sources with it. Nothing of a kernel is imported here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntFlag
from functools import lru_cache
from typing import Literal

import torch


class Needs(IntFlag):
    """What a kernel adds up in one read: the bits of `enum What` in `cpp/accumulate.h`."""

    NOTHING = 0
    SUM = 1
    SQUARES = 2
    EXTREMES = 4
    ZEROS = 8
    MAGNITUDES = 16
    ACTIVE = 32
    POWERS = 64


@dataclass(frozen=True)
class Column:
    """What a kernel computes of the finite elements at each kept position.

    Attributes:
        kind: its dtype. A count is int64; a total is int64 if the elements are integers, else float64; an element has their dtype;
            a number is float64.
        needs: what is added up for it.
        power: of the distances from the mean; a state needs all powers below it to be joined. 0 if it is none of these.
        is_total: whether a launch on a GPU computes one column like this at most.
        result: which result of the loops in C++ it is, if not one of its own name.
    """

    kind: Literal["count", "total", "element", "number"]
    needs: Needs = Needs.NOTHING
    power: int = 0
    is_total: bool = False
    result: str = ""


COLUMNS = {
    "count": Column("count"),
    "nan": Column("count"),
    "inf": Column("count"),
    "zeros": Column("count", Needs.ZEROS),
    "mean": Column("number", Needs.SUM, power=1),
    "m2": Column("number", Needs.SUM | Needs.SQUARES, power=2),
    "sum": Column("total", Needs.SUM, is_total=True),
    "exact": Column("total", Needs.SUM, is_total=True, result="sum"),
    "squares": Column("number", Needs.SQUARES, is_total=True),
    "min": Column("element", Needs.EXTREMES),
    "max": Column("element", Needs.EXTREMES),
    "peak": Column("number", Needs.EXTREMES, is_total=True),
    "magnitudes": Column("number", Needs.MAGNITUDES, is_total=True, result="total"),
    "active": Column("count", Needs.ACTIVE, is_total=True, result="total"),
    "m3": Column("number", Needs.SUM | Needs.SQUARES | Needs.POWERS, power=3),
    "m4": Column("number", Needs.SUM | Needs.SQUARES | Needs.POWERS, power=4),
    "nonfinite": Column("count"),
}
"""The columns, in the order of `enum Result` in `cpp/accumulate.h`.

`sum` is as exact as `mean`, `exact` is added in float64; `magnitudes` and `squares` are sums of |x| and x^2; `active` counts
elements of |x| above a threshold; `peak` is the largest |x|; `m2` to `m4` are sums of powers of the distances from the mean. `nan`,
`inf` and `nonfinite`, which is both, count what is not finite.
"""

WEIGHTED = ("weight", "squares", "mean", "m2", "sum", "nonfinite")
"""What is computed of a tensor and weights, in the order of the `enum Result` in `cpp/weighting.cpp`."""

BINNED = ("counts", "min", "max", "nonfinite")
"""What is computed with counts of bins, in the order of the `enum Result` in `cpp/binned.cpp`."""

_NUMBER = Column("number")  # such as the sum of the weights, which no other kernel knows


@lru_cache(maxsize=1024)
def column_dtypes(names: tuple[str, ...], dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """Return the dtypes of columns in a state, for tensors that are reduced in a dtype."""
    dtypes = {
        "count": torch.int64,
        "total": torch.float64 if dtype.is_floating_point else torch.int64,
        "element": dtype,
        "number": torch.float64,
    }
    return tuple(dtypes[COLUMNS.get(name, _NUMBER).kind] for name in names)


@lru_cache(maxsize=256)
def needs_of(names: tuple[str, ...]) -> Needs:
    """Return all that is added up for these columns."""
    found = Needs.NOTHING
    for name in names:
        found |= COLUMNS[name].needs
    return found


def joinable(names: Iterable[str]) -> bool:
    """Return whether states of these columns can be joined: each power of the distances needs those below it, and the count."""
    powers = {COLUMNS[name].power for name in names} - {0}
    return not powers or ("count" in names and powers == set(range(1, max(powers) + 1)))
