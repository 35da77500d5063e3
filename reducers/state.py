"""State and Result: what a reducer keeps, and what it gives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias, Union

from torch import Tensor

__all__ = ["Result", "State"]

State: TypeAlias = dict[str, Tensor]
"""The numbers of a statistic, by name; `{}` is the empty state, the identity of `merge`."""

Result: TypeAlias = Union[Tensor, Mapping[str, "Result"]]
"""A tensor, or results by name."""
