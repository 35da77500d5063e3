"""State, Result and Nonfinite: what a reducer stores, what it returns, and what it left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias, Union

from torch import Tensor

State: TypeAlias = dict[str, Tensor]
"""The stored tensors of a statistic, by name; `{}` is the empty state, the identity of `merge`."""

Result: TypeAlias = Union[Tensor, Mapping[str, "Result"]]
"""A tensor, or a mapping from names to results."""


class Nonfinite(NamedTuple):
    """How many elements were NaN or infinite, and so left out of a result.

    Attributes:
        number: int64, 0-d; of rows, if a reducer leaves out rows as a whole.
        of: how many there were, int64, 0-d; None if the state does not say.
    """

    number: Tensor
    of: Tensor | None
