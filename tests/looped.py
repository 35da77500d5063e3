"""The loop in C++ on one tensor, without a reducer."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from reducers import State
from reducers.kernels.dispatch import sweep

__all__ = ["looped"]


def looped(
    x: Tensor,
    axes: tuple[int, ...],
    columns: Mapping[str, str],
    threshold: float = 0.0,
    mask: Tensor | None = None,
    state: State | None = None,
) -> State | None:
    """The columns of `x` over `axes`, by key, joined with those of a state; None if the loop does not take it."""
    return sweep((tuple(columns.items()), threshold), x, axes, state or {}, mask)
