"""Quantiles from a histogram that is indexed by the leading bits of floating-point numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from reducers.core.constants import is_number
from reducers.core.fields import Add, Field, Greatest, Least
from reducers.core.reducer import check_size
from reducers.core.states import require_state
from reducers.core.statistic import Statistic
from reducers.errors import ArgumentError
from reducers.kernels.binning import bin_counts
from reducers.kernels.counting import device_bits
from reducers.kernels.precision import comparable, counts_of, extremes, finite, infinite_to_nan, real
from reducers.state import Nonfinite, State

_MAX_BITS = 12
_FLOAT32_EXPONENTS = (-126, 128)  # normal magnitudes lie in [2**-126, 2**128)


@dataclass(frozen=True)
class Quantile(Statistic):
    """Quantiles of the finite elements with a bounded relative error; states merge exactly, and no range is required.

    The sign, the exponent and the first `bits` bits of the mantissa select a bucket; the state counts the elements per bucket, so
    merging adds counts. The quantile q is the smallest element x such that at low a share q of all elements is at most x, as in
    `numpy.quantile` with `method="inverted_cdf"`. The result is the harmonic mean of the bounds of the bucket of x, with a
    relative error of at most `1 / (2**(bits + 1) + 1)`: 1.54 % with 5 bits, 0.39 % with 7. It is clamped to the minimum and the
    maximum, which are stored exactly; so these two, and all quantiles of a constant, are exact (in float64).

    Magnitudes below `low` count as zero: their absolute error is less than `low`. Zero has no sign in the result: it is 0.0, in any
    order. Quantiles of magnitude `high` or more are
    returned as `high`, or as the minimum or maximum. The defaults are 2**-126 and 2**128, the normal range of float32 and
    bfloat16, which includes all of float16, subnormals too. float64 and wide integers use the same buckets, by their float64 bits.

    Memory per kept position: `8 * (2 * log2(high / low) * 2**bits + 3)` bytes plus minimum and maximum: 130 KB by default. Give a
    range if there are many channels: `low=1e-6, high=1e6` takes 20.5 KB, both with 5 bits.

    Args:
        q: one share or several, each from 0 to 1. The state does not depend on it: `at(state, 0.99)` returns any other quantile.
        bits: mantissa bits that select the bucket, 1 to 12. One more bit halves the error and doubles the memory.
        low: smallest magnitude that does not count as zero, in the unit of the data; rounded down to a power of two.
        high: magnitude up to which the error is bounded, in the unit of the data; rounded up to a power of two.

    Returns:
        float64, of shape `(len(q), *kept axes)`, or of the kept axes if `q` is one number; NaN if there are no finite elements.

    Raises:
        ArgumentError: `q`, `bits`, `low` or `high` is out of range.
        DTypeError: the input is complex, which has no order, or uint64.

    Reference: buckets as in Masson, Rim and Lee, "DDSketch", VLDB 2019 (doi:10.14778/3352063.3352135), with the bit pattern in
    place of the logarithm.

    >>> import torch
    >>> quantile = Quantile(q=(0.0, 0.5, 1.0))
    >>> state = quantile.update({}, torch.arange(1.0, 1000.0))
    >>> [round(value, 1) for value in quantile.compute(state).tolist()]
    [1.0, 500.0, 999.0]
    >>> round(quantile.iqr(state).item())
    494
    """

    fields: ClassVar[Mapping[str, Field]] = {"counts": Add(), "min": Least(), "max": Greatest()}

    q: float | tuple[float, ...] = (0.25, 0.5, 0.75)
    bits: int = 5
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_shares(self.q)
        check_size(self, "bits", 1, _MAX_BITS)
        for name in ("low", "high"):
            value = getattr(self, name)
            if value is not None and not (is_number(value) and 2.0**-1022 <= value < math.inf):
                raise ArgumentError(f"Quantile takes a positive finite magnitude, or None, as {name} and got {value!r}")
        first, end = self._exponents
        if first >= end:
            raise ArgumentError(f"Quantile takes low below high and got {self.low!r} and {self.high!r}")

    @property
    def error(self) -> float:
        """The bound of the relative error, for quantiles of magnitude `low` to `high`."""
        return 1 / ((2 << self.bits) + 1)

    @property
    def divisible(self) -> bool:
        return False  # lift splits the tensor itself, and its pieces share one array of counts

    @property
    def batchable(self) -> bool:
        return True

    def swept(self, x: Tensor, axes: tuple[int, ...], state: State) -> State | None:
        return device_bits(x, axes, self.bits, self._exponents, state)

    def lift(self, x: Tensor, axes: tuple[int, ...]) -> State:
        x = comparable(x, "Quantile")
        counted = self.swept(x, axes, {})
        if counted is not None:
            return counted
        filled, mask = finite(x)
        low, high = extremes(x, axes, mask)
        counts = bin_counts(filled, axes, 2 * self._buckets_per_sign + 3, self._bucket)
        nonfinite = counts_of(x, mask, axes)["nonfinite"]
        if mask is not None:  # non-finite elements are zero in `filled`
            counts[..., self._buckets_per_sign + 1] -= nonfinite
        return {"counts": counts, "min": low, "max": high, "nonfinite": nonfinite}

    def nonfinite(self, state: State) -> Nonfinite:
        number = state["nonfinite"].sum()
        return Nonfinite(number, state["counts"].sum() + number)

    def read(self, state: State) -> Tensor:
        return self._quantiles(state, self.q)

    def at(self, state: State, q: float | tuple[float, ...]) -> Tensor:
        """Return the quantiles `q` of a state, in the shape that `compute` has for `q`.

        Raises:
            ArgumentError: a share is not from 0 to 1.
            EmptyStateError: `state` is empty.
        """
        _check_shares(q)
        require_state(self, state)
        return self._quantiles(state, q)

    def iqr(self, state: State) -> Tensor:
        """Return the interquartile range, the quantile 0.75 minus the quantile 0.25: float64, in the shape of the kept axes."""
        return self.at(state, 0.75) - self.at(state, 0.25)

    def edges(self) -> Tensor:
        """Return the ends of the buckets, in increasing order: float64, one more than there are `counts`.

        Bucket i holds the numbers from `edges[i]` to `edges[i + 1]`, with the end that is nearer to zero.

        >>> Quantile(bits=1, low=1.0, high=2.0).edges().tolist()
        [-inf, -2.0, -1.5, -1.0, 1.0, 1.5, 2.0, inf]
        """
        first, _ = self._exponents
        numbers = torch.arange(self._buckets_per_sign + 1, device="cpu")
        starts = 1 + (numbers & ((1 << self.bits) - 1)).double() * 2.0**-self.bits
        above = torch.cat(
            (torch.ldexp(starts, first + (numbers >> self.bits)), torch.full((1,), math.inf, dtype=starts.dtype, device="cpu"))
        )
        return torch.cat((-above.flip(0), above))

    @property
    def _exponents(self) -> tuple[int, int]:
        first, end = _FLOAT32_EXPONENTS
        if self.low is not None:
            first = math.frexp(self.low)[1] - 1
        if self.high is not None:
            mantissa, end = math.frexp(self.high)
            end -= mantissa == 0.5
        return first, end

    @property
    def _buckets_per_sign(self) -> int:
        first, end = self._exponents
        return (end - first) << self.bits

    def _bucket(self, x: Tensor) -> Tensor:
        """Return the bucket index of each element, in increasing order of the elements; zero is in the middle bucket."""
        first, _ = self._exponents
        narrow = x.dtype.itemsize <= 4 if x.is_floating_point() else x.dtype.itemsize <= 2
        x = x.float() if narrow and first >= _FLOAT32_EXPONENTS[0] else real(x)
        integer, mantissa, bias = (torch.int32, 23, 127) if x.dtype is torch.float32 else (torch.int64, 52, 1023)
        pattern = x.resolve_neg().view(integer)
        # flipping all bits but the sign of negative floats makes integer order equal to float order
        number = ((pattern >> (8 * x.dtype.itemsize - 1)) & torch.iinfo(integer).max) ^ pattern
        number = number >> (mantissa - self.bits)
        zero = (bias + first) << self.bits
        number = number - number.clamp(-zero, zero - 1)
        middle = self._buckets_per_sign + 1
        return number.clamp(-middle, middle) + middle

    def _representatives(self, like: Tensor) -> Tensor:
        """Return the value that represents each bucket."""
        first, end = self._exponents
        numbers = torch.arange(self._buckets_per_sign, device=like.device)
        start = 1 + real(numbers & ((1 << self.bits) - 1)) * 2.0**-self.bits
        stop = start + 2.0**-self.bits
        scale = torch.ldexp(real(torch.ones_like(numbers)), first + (numbers >> self.bits))
        inside = 2 * start * stop / (start + stop) * scale
        beyond = torch.full_like(inside[:1], 2.0**end if end < 1024 else math.inf)
        above = torch.cat((inside, beyond))
        return torch.cat((-above.flip(0), torch.zeros_like(beyond), above))

    def _quantiles(self, state: State, q: float | tuple[float, ...]) -> Tensor:
        cumulative = state["counts"].cumsum(-1)
        count = cumulative[..., -1:]
        total = real(count)
        shares = torch.tensor(q if isinstance(q, tuple) else (q,), dtype=total.dtype, device=total.device)
        rank = (shares * total).ceil().long().clamp(min=1)
        bucket = torch.searchsorted(cumulative, rank).clamp(max=cumulative.shape[-1] - 1)
        low, high = (real(infinite_to_nan(state[key])).unsqueeze(-1) for key in ("min", "max"))
        inside = self._representatives(cumulative)[bucket].clamp(low, high)
        quantiles = torch.where(rank <= 1, low, torch.where(rank >= count, high, inside)).movedim(-1, 0).contiguous()
        return quantiles if isinstance(q, tuple) else quantiles[0]


def _check_shares(q: float | tuple[float, ...]) -> None:
    shares = q if isinstance(q, tuple) else (q,)
    if not shares or not all(isinstance(share, (int, float)) and 0 <= share <= 1 for share in shares):
        raise ArgumentError(f"Quantile takes a share from 0 to 1, or a tuple of them, as q and got {q!r}")
