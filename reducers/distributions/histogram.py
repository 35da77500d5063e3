"""Histograms with fixed bin edges."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor

from reducers.core.constants import is_number
from reducers.core.fields import Add, Field
from reducers.core.reducer import check_size
from reducers.core.statistic import Statistic
from reducers.errors import ArgumentError
from reducers.kernels.binning import bin_counts
from reducers.kernels.counting import device_edges, has_device_bins
from reducers.kernels.precision import comparable, finite, has_memory, real
from reducers.state import Nonfinite, Result, State


@dataclass(frozen=True)
class Histogram(Statistic):
    """Histogram with fixed edges; elements outside the edges and NaN are counted separately.

    Bins are those of `numpy.histogram`: each includes its lower edge and excludes its upper edge, `edges[i] <= x < edges[i + 1]`,
    but the last includes both. Elements are compared with the edges as in float64, so counts are exact. Give either all edges, or
    `low`, `high` and the number of `bins` of equal width, which is faster.

    Args:
        edges: at least two, strictly increasing as floats, in the unit of the data.
        bins: number of bins of equal width from `low` to `high`.
        low: first edge, in the unit of the data.
        high: last edge, in the unit of the data.

    Returns:
        `counts`: int64, of shape `(*kept axes, bins)`; `edges`: float64, of shape (bins + 1,); `under`, `over` and `nan`: int64, in
        the shape of the kept axes: the number of elements below the first edge (including -inf), above the last edge (including
        inf), and of NaN.

    Raises:
        ArgumentError: the edges are not strictly increasing and finite, or both or neither of the two forms are given.
        DTypeError: the input is complex, which has no order, or uint64.

    >>> import torch
    >>> histogram = Histogram(bins=2, low=0.0, high=2.0)
    >>> result = histogram.compute(histogram.update({}, torch.tensor([0.0, 1.0, 1.5, 2.0, 2.1, -1.0, float("nan")])))
    >>> {name: value.tolist() for name, value in result.items()}
    {'counts': [1, 3], 'edges': [0.0, 1.0, 2.0], 'under': 1, 'over': 1, 'nan': 1}
    """

    fields: ClassVar[Mapping[str, Field]] = {"counts": Add()}

    counts_nonfinite: ClassVar[bool] = False  # `counts` has them: NaN in the last bin, infinite ones below and above the edges

    edges: tuple[float, ...] | None = None
    bins: int | None = None
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.edges is not None:
            if (self.bins, self.low, self.high) != (None, None, None):
                raise ArgumentError("Histogram takes either edges, or bins with low and high, and got both")
            if not isinstance(self.edges, tuple) or len(self.edges) < 2 or not all(map(_is_finite_number, self.edges)):
                raise ArgumentError(f"Histogram takes a tuple of at least two finite edges and got {self.edges!r}")
            if not all(low < high for low, high in pairwise(map(float, self.edges))):
                raise ArgumentError(f"Histogram takes edges that are strictly increasing as floats and got {self.edges!r}")
        elif self.bins is None or not (_is_finite_number(self.low) and _is_finite_number(self.high)):
            raise ArgumentError(
                "Histogram takes either edges, or a positive number of bins with finite low and high, "
                f"and got bins={self.bins!r}, low={self.low!r}, high={self.high!r}"
            )
        else:
            check_size(self, "bins")
            low, high, step = self._range
            # rounding moves an edge by less than 4 units in the last place, so these edges differ
            if not 8 * math.ulp(max(abs(low), abs(high))) < step < math.inf:
                why = "low must be less than high" if low >= high else "take fewer bins, or low and high further apart"
                raise ArgumentError(f"Histogram cannot fit {self.bins} distinct bins between low={low!r} and high={high!r}: {why}")

    @property
    def _range(self) -> tuple[float, float, float]:
        """The first edge, the last edge, and the width of the bins between them, if all have one width."""
        assert self.bins is not None
        assert self.low is not None
        assert self.high is not None
        return self.low, self.high, (self.high - self.low) / self.bins

    def _even(self, dtype: torch.dtype) -> tuple[float, float] | None:
        """Return the first edge and the bins a unit, if the index of a bin, computed from these in `dtype`, is off by one at most.

        That is so if bins are much wider than rounding errors, and neither differences nor the bins a unit are too big for `dtype`.
        """
        if self.edges is not None:
            return None
        (low, high, step), numbers = self._range, torch.finfo(dtype)
        most = max(abs(low), abs(high))
        fits = most < numbers.max / 4 and 1 / step < numbers.max / 4
        return (low, 1 / step) if fits and step > 16 * numbers.eps * most else None

    def _edges(self, device: torch.device) -> Tensor:
        """Return the edges in float64, on the CPU, which every device may lack; on the meta device they take no memory."""
        device = device if device.type == "meta" else torch.device("cpu")
        if self.edges is not None:
            return torch.tensor(self.edges, dtype=torch.float64, device=device)
        low, high, step = self._range
        first = torch.arange(self.bins or 0, dtype=torch.float64, device=device) * step + low
        return torch.cat((first, torch.full((1,), float(high), dtype=torch.float64, device=device)))

    @property
    def divisible(self) -> bool:
        return False  # lift splits the tensor itself, and its pieces share one array of counts

    @property
    def batchable(self) -> bool:
        return True

    def swept(self, x: Tensor, axes: tuple[int, ...], state: State) -> State | None:
        if not has_device_bins(x):
            return None
        keep = _recent_bounds if x.device.type == "cpu" else _kept_bounds
        make = keep if has_memory(x) else _make_bounds  # what is made of fake tensors, or inside vmap, may not be kept
        bounds = make(self, x.device, _is_narrow(x))
        return device_edges(x, axes, bounds, self._even(bounds.dtype), state)

    def lift(self, x: Tensor, axes: tuple[int, ...]) -> State:
        x = comparable(x, "Histogram")
        counted = self.swept(x, axes, {})
        if counted is not None:
            return counted
        mask = finite(x)[1]
        if mask is not None:  # NaN goes into the bin of inf, and is subtracted below
            is_nan = x.isnan()
            x = torch.where(is_nan, torch.inf, x)
        bounds = _make_bounds(self, x.device, _is_narrow(x))
        even = self._even(bounds.dtype)
        counts = bin_counts(x, axes, bounds.shape[0] + 1, lambda piece: _bin(piece.to(bounds.dtype), bounds, even))
        nan = torch.zeros_like(counts[..., 0]) if mask is None else is_nan.sum(dim=axes)
        counts[..., -1] -= nan
        return {"counts": torch.cat((counts, nan.unsqueeze(-1)), dim=-1)}

    def lift_masked(self, x: Tensor, mask: Tensor, axes: tuple[int, ...]) -> State:
        counts = super().lift_masked(x, mask, axes)["counts"]
        nan = counts[..., -1] - (~mask).sum(dim=axes)
        return {"counts": torch.cat((counts[..., :-1], nan.unsqueeze(-1)), dim=-1)}

    def nonfinite(self, state: State) -> Nonfinite:
        """Return how many elements were NaN, the last of `counts`; infinite ones are below the first edge or above the last."""
        return Nonfinite(state["counts"][..., -1].sum(), state["counts"].sum())

    def read(self, state: State) -> Result:
        counts = state["counts"]
        return {
            "counts": counts[..., 1:-2].clone(),
            "edges": self._edges(counts.device).to(real(counts[:0]).dtype).to(counts.device),
            "under": counts[..., 0].clone(),
            "over": counts[..., -2].clone(),
            "nan": counts[..., -1].clone(),
        }


def _is_finite_number(value: float | None) -> bool:
    return value is not None and is_number(value) and math.isfinite(value)


def _bin(x: Tensor, bounds: Tensor, even: tuple[float, float] | None) -> Tensor:
    """Return 0 below the first bound, 1 to `bins` inside, and `bins + 1` from the last bound."""
    if even is None:
        return torch.bucketize(x.contiguous(), bounds, right=True, out_int32=True)
    low, bins_a_unit = even
    index = (x - low).mul_(bins_a_unit).clamp(0, bounds.shape[0] - 2).to(torch.int32)
    # rounding may be off by one bin; index_select is many times as fast as indexing by brackets
    lower, upper = (side.index_select(0, index.reshape(-1)).reshape(x.shape) for side in (bounds, bounds[1:]))
    return 1 + index + (x >= upper).int() - (x < lower).int()


def _is_narrow(x: Tensor) -> bool:
    """Return whether float32 holds all elements of `x`, or its device lacks float64."""
    return x.dtype.itemsize <= (4 if x.is_floating_point() else 2) or x.device.type == "mps"


def _make_bounds(histogram: Histogram, device: torch.device, narrow: bool) -> Tensor:
    """Return the edges that elements are compared with, on their device."""
    return _bounds(histogram._edges(device), narrow).to(device, non_blocking=True)


@lru_cache(maxsize=64)
def _recent_bounds(histogram: Histogram, device: torch.device, narrow: bool) -> Tensor:
    """Return the same tensor for every observation, so that no update makes one, or copies it to the device."""
    with torch.inference_mode(False):
        return _make_bounds(histogram, device, narrow)


_kept_bounds = cache(_recent_bounds.__wrapped__)  # for good: what a CUDA graph reads must stay


def _bounds(edges: Tensor, narrow: bool) -> Tensor:
    """Return the edges, rounded up to float32 if `narrow`, so that comparisons are exact; the last is the next number above it."""
    last = edges[-1:]
    exact = torch.cat((edges[:-1], torch.nextafter(last, torch.full_like(last, torch.inf))))
    if not narrow:
        return exact
    nearest = exact.float()
    return torch.where(nearest.double() < exact, torch.nextafter(nearest, torch.full_like(nearest, torch.inf)), nearest)
