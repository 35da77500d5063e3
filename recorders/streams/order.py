"""Shuffled orders of rows: functions of the position and the seed, so that a reader may begin anywhere."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

__all__ = ["RUN", "shuffled"]

RUN = 256
"""How many rows that lie beside each other are drawn together by a shuffle with a window."""


def shuffled(positions: Tensor, rows: int, seed: int, window: int | None) -> Tensor:
    """The rows at these positions of a shuffled order; each row is at one position.

    Args:
        positions: int64, from 0 to `rows - 1`.
        rows: the number of rows.
        window: None for a uniform permutation of all rows, which needs 8 bytes a row. Otherwise runs of `RUN` rows are permuted,
            and then the rows of each window of so many positions, so that reading touches few pages of the files at a time.

    >>> shuffled(torch.arange(5), 5, seed=0, window=None).sort().values.tolist()
    [0, 1, 2, 3, 4]
    """
    if window is None:
        return _permutation(rows, seed, -1)[positions]
    windows = positions // window
    inside = positions.clone()
    for number in sorted(set(windows.tolist())):
        start = number * window
        chosen = windows == number
        inside[chosen] = start + _permutation(min(window, rows - start), seed, number)[positions[chosen] - start]
    runs, ends = _runs(rows, seed)
    run = torch.searchsorted(ends, inside, right=True)
    lengths = torch.clamp(rows - runs * RUN, max=RUN)
    return runs[run] * RUN + inside - (ends[run] - lengths[run])


@lru_cache(maxsize=4)
def _runs(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """The runs in their order, and the position at which each ends; only the last of the rows may be shorter."""
    runs = _permutation(-(-rows // RUN), seed, -2)
    return runs, torch.clamp(rows - runs * RUN, max=RUN).cumsum(0)


@lru_cache(maxsize=8)
def _permutation(count: int, seed: int, part: int) -> Tensor:
    # An odd multiplier keeps the seeds of different parts and neighbouring seeds apart.
    mixed = (seed * 0x9E3779B97F4A7C15 + (part + 3) * 0xD1B54A32D192ED03) % (1 << 63)
    return torch.randperm(count, generator=torch.Generator().manual_seed(mixed))
