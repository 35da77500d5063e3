"""Shuffled orders of rows: functions of the position and the seed, so that a reader may begin anywhere."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

RUN = 256
"""How many rows that lie beside each other are drawn together by a shuffle with a window."""

_KEPT = 8
"""How many permutations a shuffle keeps: of the runs, and of the windows that are read."""

_RUNS, _ALL = -2, -1


class Shuffle:
    """A shuffled order; each row is at one position. It keeps what it used last, and its memory goes with it.

    Args:
        seed: of the order.
        window: None for a uniform permutation of all rows, which needs 8 bytes a row. Otherwise runs of `RUN` rows are permuted,
            and then the rows of each window of so many positions, so that reading touches few pages of the files at a time.

    >>> Shuffle(seed=0, window=None)(torch.arange(5), 5).sort().values.tolist()
    [0, 1, 2, 3, 4]
    """

    def __init__(self, seed: int, window: int | None) -> None:
        self.seed, self.window = seed, window
        self._permutation = lru_cache(_KEPT)(partial(_permuted, seed))  # not of `self`, which would hold itself
        self._ends = lru_cache(1)(_ends)

    def __call__(self, positions: Tensor, rows: int) -> Tensor:
        """The rows at these positions, which are int64 from 0 to `rows - 1`."""
        if self.window is None:
            return self._permutation(rows, _ALL)[positions]
        windows = positions // self.window
        inside = positions.clone()
        for number in sorted(set(windows.tolist())):
            start = number * self.window
            chosen = windows == number
            count = min(self.window, rows - start)
            inside[chosen] = start + self._permutation(count, number)[positions[chosen] - start]
        return self._in_runs(inside, rows)

    def in_window(self, number: int, rows: int) -> Tensor:
        """The rows of a window, in runs of neighbours; of a shuffle that has a window."""
        assert self.window is not None
        return self._in_runs(torch.arange(number * self.window, min((number + 1) * self.window, rows), device="cpu"), rows)

    def _in_runs(self, inside: Tensor, rows: int) -> Tensor:
        """The rows at positions in an order in which only the runs are permuted."""
        # Only the last of the rows may be in a shorter run; the run that it is in may be at any place.
        runs = self._permutation(-(-rows // RUN), _RUNS)
        ends = self._ends(runs, rows)
        run = torch.searchsorted(ends, inside, right=True)
        lengths = torch.clamp(rows - runs[run] * RUN, max=RUN)
        return runs[run] * RUN + inside - (ends[run] - lengths)

    def __reduce__(self) -> tuple[Any, ...]:
        return Shuffle, (self.seed, self.window)  # a permutation costs less than sending it


def _permuted(seed: int, count: int, part: int) -> Tensor:
    # An odd multiplier keeps the seeds of different parts and neighbouring seeds apart.
    mixed = (seed * 0x9E3779B97F4A7C15 + (part + 3) * 0xD1B54A32D192ED03) % (1 << 63)
    return torch.randperm(count, generator=torch.Generator().manual_seed(mixed), device="cpu")


def _ends(runs: Tensor, rows: int) -> Tensor:
    """Where each run ends, in the order of the runs."""
    return torch.clamp(rows - runs * RUN, max=RUN).cumsum(0)
