"""Methods that choose the range of numbers which integers cover, from their distribution."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from recorders.watch.calibration.distribution import Distribution
from reducers import affine_qparams
from reducers.errors import ArgumentError


class ClippingRange(NamedTuple):
    """The numbers that integers cover; those beyond are clipped.

    Attributes:
        low: the least, float64: one number, or one for each channel or group.
        high: the greatest, in the same shape.
    """

    low: Tensor
    high: Tensor


Method: TypeAlias = Callable[[Distribution, int, bool], ClippingRange]
"""Called with the distribution, the bits of the integers, and whether zero is in their middle."""

_FACTORS = 100  # ranges that `mse` tries
_BINS = 2048
_FIRST = 128
_MOST_BITS = 11
_ROUNDING = 1e-12


def minmax(distribution: Distribution, bits: int = 8, symmetric: bool = False) -> ClippingRange:
    """The range from the least to the greatest number, which clips nothing. It is exact.

    Args:
        distribution: of the numbers.
        bits: of no consequence here, as `symmetric` is.
        symmetric: see `bits`.

    >>> import torch
    >>> [end.item() for end in minmax(Distribution.of_tensor(torch.tensor([-1.0, 3.0])))]
    [-1.0, 3.0]
    """
    return ClippingRange(distribution.low, distribution.high)


def percentile(percent: float) -> Method:
    """A method that clips all but so many percent of the numbers.

    If zero is in the middle of the integers, it keeps the smallest magnitudes, as the histogram calibrators of ModelOpt and
    TensorRT do; else it clips half of the rest at either end, as the percentile calibrater of ONNX Runtime does. Of a `Quantile`,
    an end has its relative error, at most `Quantile.error`.

    Args:
        percent: how many to keep, above 0 and up to 100, such as 99.99.

    Raises:
        ArgumentError: `percent` is out of range.

    >>> import torch
    >>> [end.item() for end in percentile(90)(Distribution.of_tensor(torch.arange(-4.0, 16.0)), 8, True)]
    [-13.0, 13.0]
    """
    if not isinstance(percent, (int, float)) or not 0 < percent <= 100:
        raise ArgumentError(f"percentile takes a percentage above 0 and up to 100 and got {percent!r}")
    share = percent / 100

    def keep(distribution: Distribution, bits: int = 8, symmetric: bool = False) -> ClippingRange:
        if share == 1:
            return minmax(distribution)
        if symmetric:
            largest = distribution.magnitudes().quantile(share)
            return ClippingRange(-largest, largest)
        return ClippingRange(distribution.quantile((1 - share) / 2), distribution.quantile((1 + share) / 2))

    return keep


def mse(distribution: Distribution, bits: int = 8, symmetric: bool = False) -> ClippingRange:
    """The range with the least mean squared error between the numbers and the integers they are rounded to, times the scale.

    It is the best of 100 ranges: the widest times 1 %, 2 % and so on, as the observers of llm-compressor and torchao search it. The
    error is measured with the scale and the zero point of `affine_qparams`. Numbers of an interval count as spread evenly over it,
    as in the `HistogramObserver` of PyTorch. If each counts by the importance of its input, this is the method of the imatrix
    observer of llm-compressor.

    Of a `Quantile`, the root mean squared error of the range is at most that of the best of the 100, plus `2**(1 - Quantile.bits)`
    times the root mean square of the numbers: the distance to the nearest level changes by no more than the number does, and an
    interval is at most `2**-Quantile.bits` times as wide as its numbers are large. This holds for magnitudes from its `low` to its
    `high`. Usually the loss is far smaller, as errors within an interval have both signs.

    Args:
        distribution: of the numbers.
        bits: of the integers, from 2 to 16.
        symmetric: whether zero is in the middle of the integers.

    Raises:
        ArgumentError: there are no such integers, or no finite numbers.

    >>> import torch
    >>> x = torch.cat((torch.linspace(-1, 1, 1000), torch.tensor([4.0])))
    >>> [round(end.item(), 2) for end in mse(Distribution.of_tensor(x), bits=4, symmetric=True)]
    [-1.76, 1.76]
    """
    if symmetric:
        high = torch.maximum(-distribution.low, distribution.high)
        low = -high
    else:
        low, high = distribution.low.clamp(max=0.0), distribution.high.clamp(min=0.0)
    best = torch.ones_like(low)
    least = torch.full_like(low, torch.inf)
    for number in range(_FACTORS, 0, -1):
        factor = number / _FACTORS
        error = _squared_error(distribution, low * factor, high * factor, bits, symmetric)
        best, least = torch.where(error < least, factor, best), torch.minimum(error, least)
    return ClippingRange(low * best, high * best)


def _squared_error(distribution: Distribution, low: Tensor, high: Tensor, bits: int, symmetric: bool) -> Tensor:
    """The sum of the squared errors, of shape (...)."""
    scale, zero_point = (each.double().unsqueeze(-1) for each in affine_qparams(low, high, bits, symmetric=symmetric))
    first, last = -(2 ** (bits - 1)) - zero_point, 2 ** (bits - 1) - 1 - zero_point

    def integral(x: Tensor) -> tuple[Tensor, Tensor]:
        """The integral of the squared distance to the nearest level, from 0 to x, in units of the scale; and the distance at x."""
        level = x.round().clamp(first, last)  # beyond the last level the distance goes on growing, and so does the cube
        rest = x - level
        return level / 12 + rest**3 / 3, rest

    lower, upper = distribution.lower / scale, distribution.upper / scale
    (start, rest), (stop, _) = integral(lower), integral(upper)
    width = upper - lower
    mean = torch.where(width > 0, (stop - start) / width, rest.square())
    return (distribution.mass * mean).sum(dim=-1) * scale.squeeze(-1).square()


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
