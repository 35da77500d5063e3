"""State and Result: what a reducer stores and what it returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias, Union

from torch import Tensor

__all__ = ["Result", "State"]

State: TypeAlias = dict[str, Tensor]
"""The stored tensors of a statistic, by name; `{}` is the empty state, the identity of `merge`."""

Result: TypeAlias = Union[Tensor, Mapping[str, "Result"]]
"""A tensor, or a mapping from names to results."""
