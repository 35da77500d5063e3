"""Counts of values between fixed edges."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from reducers.binning import tally
from reducers.core import Result, State, Statistic
from reducers.errors import ArgumentError
from reducers.numeric import comparable, real

__all__ = ["Histogram"]


@dataclass(frozen=True)
class Histogram(Statistic):
    """Counts between fixed edges; what lies outside and what is NaN is counted too, so that nothing is lost.

    Bins are those of `numpy.histogram`: each holds its lower edge and not its upper one, `edges[i] <= x < edges[i + 1]`, but the
    last one, which holds both. Elements are compared with the edges in float64, so counts are exact. Give either all edges, or
    `low`, `high` and how many `bins` of equal width lie between them, which is faster.

    Args:
        edges: at least two, strictly rising, in the unit of the data.
        bins: how many bins lie between `low` and `high`.
        low: first edge, in the unit of the data.
        high: last edge, in the unit of the data.

    Returns:
        `counts`: int64, of shape (*kept axes, bins); `edges`: float64, of shape (bins + 1,); `under`, `over` and `nan`: int64, in
        the shape of the kept axes: how many elements lie below the first edge (-inf too), above the last (inf too), or are NaN.

    Raises:
        ArgumentError: the edges do not rise or are not finite, or they are given twice or not at all.
        DTypeError: complex numbers, which have no order, or uint64.

    >>> import torch
    >>> histogram = Histogram(bins=2, low=0.0, high=2.0)
    >>> result = histogram.compute(histogram.update({}, torch.tensor([0.0, 1.0, 1.5, 2.0, 2.1, -1.0, float("nan")])))
    >>> {name: value.tolist() for name, value in result.items()}
    {'counts': [1, 3], 'edges': [0.0, 1.0, 2.0], 'under': 1, 'over': 1, 'nan': 1}
    """

    edges: tuple[float, ...] | None = None
    bins: int | None = None
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.edges is not None:
            if (self.bins, self.low, self.high) != (None, None, None):
                raise ArgumentError("Histogram takes either edges, or bins with low and high, and got both")
            if not isinstance(self.edges, tuple) or len(self.edges) < 2 or not all(map(_number, self.edges)):
                raise ArgumentError(f"Histogram takes a tuple of at least two finite edges and got {self.edges!r}")
            if not all(low < high for low, high in pairwise(self.edges)):
                raise ArgumentError(f"Histogram takes edges that rise strictly and got {self.edges!r}")
        elif not (isinstance(self.bins, int) and self.bins > 0 and _number(self.low) and _number(self.high)):
            raise ArgumentError(
                "Histogram takes either edges, or a positive number of bins with finite low and high, "
                f"and got bins={self.bins!r}, low={self.low!r}, high={self.high!r}"
            )
        elif not all(low < high for low, high in pairwise(self._edges)):
            raise ArgumentError(f"between low={self.low!r} and high={self.high!r} there is no room for {self.bins} bins")

    @property
    def _edges(self) -> tuple[float, ...]:
        if self.edges is not None:
            return tuple(map(float, self.edges))
        assert self.bins is not None
        assert self.low is not None
        assert self.high is not None
        step = (self.high - self.low) / self.bins
        return (*(i * step + self.low for i in range(self.bins)), float(self.high))

    @property
    def divisible(self) -> bool:
        return False  # a lift is cut inside, where its pieces share one array of counts

    def lift(self, x: Tensor, axes: tuple[int, ...]) -> State:
        x = comparable(x, "Histogram")
        edges = self._edges
        # the next number above the last edge is the first that is outside
        bounds = _like(x, (*edges[:-1], math.nextafter(edges[-1], math.inf)))
        return {"counts": tally(x, axes, len(edges) + 2, lambda piece: self._bin(piece, bounds))}

    def _bin(self, x: Tensor, bounds: Tensor) -> Tensor:
        """0 below the first edge, then the bins from 1, then one number above the last edge and one for NaN."""
        x = real(x)
        last = bounds.shape[0] - 1
        if self.edges is not None:
            index = torch.bucketize(x.contiguous(), bounds, right=True, out_int32=True)
        else:
            assert self.low is not None
            assert self.high is not None
            guess = (x - self.low) * (last / (self.high - self.low))
            index = guess.clamp(0, last - 1).nan_to_num(0.0).to(torch.int32)
            # rounding may have put it one bin off
            index = index + (x >= bounds[index + 1]).int() - (x < bounds[index]).int() + 1
        return torch.where(x.isnan(), last + 2, index)

    def join(self, a: State, b: State) -> State:
        return {"counts": a["counts"] + b["counts"]}

    def read(self, state: State) -> Result:
        counts = state["counts"]
        return {
            "counts": counts[..., 1:-2].clone(),
            "edges": _like(counts, self._edges),
            "under": counts[..., 0].clone(),
            "over": counts[..., -2].clone(),
            "nan": counts[..., -1].clone(),
        }


def _number(value: float | None) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _like(x: Tensor, numbers: tuple[float, ...]) -> Tensor:
    """float64 on the device of `x` (float32 where it has none), copied there without waiting for it."""
    dtype = torch.float32 if x.device.type == "mps" else torch.float64
    return torch.tensor(numbers, dtype=dtype).to(x.device, non_blocking=True)
