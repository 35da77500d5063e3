"""The range that loses the least information about how numbers are distributed."""

from __future__ import annotations

import torch
from torch import Tensor

from recorders.watch.calibration.distribution import Distribution
from recorders.watch.calibration.methods import ClippingRange
from reducers.errors import ArgumentError

_BINS = 2048
_FIRST = 128
_MOST_BITS = 11
_ROUNDING = 1e-12


def entropy(distribution: Distribution, bits: int = 8, symmetric: bool = True) -> ClippingRange:
    """The range with the least Kullback-Leibler divergence between the magnitudes as they are and as the integers show them.

    It is what the histogram calibrators of TensorRT and ModelOpt compute: from 2048 bins of magnitude, of which the first counts as
    the second, each number of bins from 128 on is tried. Of a `Quantile`, the bins are filled as if numbers were spread evenly
    over a bucket; so the range is that of a histogram in which no number moved by more than `2**-Quantile.bits` of itself.

    Args:
        distribution: of the numbers.
        bits: of the integers, from 2 to 11.
        symmetric: whether zero is in the middle of the integers; else the range ends at the least and the greatest number, too.

    Raises:
        ArgumentError: there are no such integers.

    Reference: S. Migacz, "8-bit inference with TensorRT", GTC 2017.

    >>> import torch
    >>> x = torch.cat((torch.linspace(-1, 1, 10000), torch.tensor([4.0])))
    >>> [round(end.item(), 1) for end in entropy(Distribution.of_tensor(x))]
    [-1.0, 1.0]
    """
    if type(bits) is not int or not 2 <= bits <= _MOST_BITS:
        raise ArgumentError(f"entropy takes 2 to {_MOST_BITS} bits and got {bits!r}")
    magnitudes = distribution.magnitudes()
    largest = torch.stack([_clip(row, 2 ** (bits - 1)) for row in magnitudes.rows()]).reshape(magnitudes.high.shape)
    if symmetric:
        return ClippingRange(-largest, largest)
    return ClippingRange(torch.maximum(distribution.low, -largest), torch.minimum(distribution.high, largest))


def _clip(magnitudes: Distribution, levels: int) -> Tensor:
    """The magnitude from which on numbers are clipped."""
    edges = magnitudes.high * torch.arange(_BINS + 1, dtype=torch.float64, device=magnitudes.high.device) / _BINS
    bins = _even_bins(magnitudes, edges)
    bins[0] = bins[1]
    kept = torch.arange(max(_FIRST, levels), _BINS + 1, device=edges.device)
    found = _divergences(bins, kept, levels)
    return edges[kept[found <= found.min() + _ROUNDING][-1]]


def _divergences(bins: Tensor, kept: Tensor, levels: int) -> Tensor:
    """The divergence for each number of bins that is kept, in nats; infinite if clipped numbers fall on a bin that was empty.

    The bins of a level are shown by their mean, but empty ones stay empty. What is clipped counts in the last bin.
    """
    total, last = bins.sum(), bins[kept - 1]
    below, plogp, filled = (torch.nn.functional.pad(each.cumsum(0), (1, 0)) for each in (bins, _xlogx(bins), (bins > 0).double()))
    bounds = -(-(kept.unsqueeze(-1) * torch.arange(levels + 1, device=kept.device)) // levels)  # rounded up
    inside, clipped = below[kept], total - below[kept]
    sums = below[bounds].diff(dim=-1)
    means = sums / filled[bounds].diff(dim=-1).clamp(min=1)
    actual = plogp[kept] - _xlogx(last) + _xlogx(last + clipped)
    shown = torch.special.xlogy(sums, means).sum(dim=-1) + torch.special.xlogy(clipped, means[:, -1])
    divergence = (actual - shown) / total - total.log() + inside.log()
    return torch.where((last == 0) & (clipped > 0), torch.inf, divergence)


def _xlogx(x: Tensor) -> Tensor:
    product: Tensor = torch.special.xlogy(x, x)
    return product


def _even_bins(magnitudes: Distribution, edges: Tensor) -> Tensor:
    """How much lies between each edge and the next; intervals are spread evenly."""
    wide, between = magnitudes.upper > magnitudes.lower, edges[1:-1]
    points, weights = magnitudes.lower[~wide], magnitudes.mass[~wide]
    bins = torch.bincount(torch.bucketize(points, between, right=True), weights, minlength=_BINS)
    lower, upper, mass = magnitudes.lower[wide], magnitudes.upper[wide], magnitudes.mass[wide]
    share = ((between.unsqueeze(-1) - lower) / (upper - lower)).clamp(0.0, 1.0)
    below = torch.cat((torch.zeros_like(edges[:1]), (mass * share).sum(dim=-1), mass.sum().reshape(1)))
    return bins + below.diff()
