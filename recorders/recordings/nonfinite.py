"""How many elements of what was recorded were left out because they are NaN or infinite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from recorders._torch import outside_modes
from reducers import Reducer, State

__all__ = ["LeftOut", "left_out"]


class LeftOut(NamedTuple):
    """How many elements were not finite.

    Attributes:
        number: of elements; of rows, if the reducer leaves out rows as a whole.
        of: how many there were; None if the reducer does not count them.

    >>> str(LeftOut(1, 4)), str(LeftOut(3, None)), str(LeftOut(1, 10**6))
    ('25 % of 4 elements not finite', '3 elements not finite', '0.0001 % of 1,000,000 elements not finite')
    """

    number: int
    of: int | None

    def __str__(self) -> str:
        if self.of is None or self.of < self.number:  # a damaged file may say so
            return f"{self.number:,} elements not finite"
        return f"{100 * self.number / self.of:.2g} % of {self.of:,} elements not finite".replace("1e+02 %", "100 %")


def left_out(reducer: Reducer | None, states: Mapping[str, State]) -> dict[str, LeftOut]:
    """The leaves of which elements were left out, and how many; those that do not tell are left out too. Waits for the device."""
    found = {}
    for leaf, state in states.items() if reducer is not None else ():
        try:
            told = outside_modes(reducer.nonfinite, state) if state else None  # type: ignore[union-attr]
            if told is not None and (number := int(told.number)) > 0:
                found[leaf] = LeftOut(number, None if told.of is None else int(told.of))
        except Exception:  # a reducer of the user's may raise anything, and its results are shown all the same
            continue
    return found
