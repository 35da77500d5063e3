"""Quantiles from a histogram over the bits of floating-point numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from reducers.core.states import require_state
from reducers.core.statistic import Statistic
from reducers.errors import ArgumentError
from reducers.kernels.binning import tally
from reducers.kernels.precision import comparable, count_of, extremes, finite, nan_where_infinite, real
from reducers.state import State

__all__ = ["Quantile"]

_MOST_BITS = 12
_FLOAT32 = (-126, 128)  # exponents: normal magnitudes lie in [2**-126, 2**128)


@dataclass(frozen=True)
class Quantile(Statistic):
    """Quantiles of the finite elements with a guaranteed relative error, exactly mergeable, without a range to guess.

    Sign, exponent and the first `bits` bits of the mantissa number a bucket, and buckets are counted: merging adds. The quantile
    q is the smallest element x such that at least a share q of all elements is at most x, as `numpy.quantile` with
    `method="inverted_cdf"` has it. What is returned lies in the bucket of that element, at the harmonic mean of its ends, which
    is off by at most `1 / (2**(bits + 1) + 1)` of the element: 1.54 % with 5 bits, 0.39 % with 7. It is clamped to the least and
    the greatest element, which are kept exactly, so that these two themselves and constants are exact (as far as float64 is).

    Magnitudes below `low` count as zero, so the error there is absolute and less than `low`; quantiles of magnitude `high` and
    more are told from one another only by the least and the greatest element, and otherwise given as `high`. Without `low` and
    `high` that is below 2**-126 and from 2**128, the ends of the normal float32 range (and of bfloat16; of float16 even the
    denormals are inside). float64 and wide integers are bucketed by their float64 bits, in the same buckets.

    Memory per kept position: `8 * (2 * log2(high / low) * 2**bits + 3)` bytes and the two ends; without a range, with 5 bits,
    130 KB. With many channels give a range: `low=1e-6, high=1e6` takes 20.5 KB, both with 5 bits.

    Args:
        q: one share or several, each from 0 to 1. The state does not depend on it: `at(state, 0.99)` asks for any other.
        bits: mantissa bits that number the buckets, 1 to 12. Each more halves the error and doubles the memory.
        low: magnitude that must not count as zero, in the unit of the data; rounded down to a power of two.
        high: magnitude up to which the error is guaranteed, in the unit of the data; rounded up to a power of two.

    Returns:
        float64, of shape (len(q), *kept axes), or of the kept axes where `q` is one number; NaN where nothing finite was seen.

    Raises:
        ArgumentError: `q`, `bits`, `low` or `high` is out of its range.
        DTypeError: complex numbers, which have no order, or uint64.

    Reference: buckets as in Masson, Rim and Lee, "DDSketch", VLDB 2019 (doi:10.14778/3352063.3352135), with the logarithm
    replaced by the bits themselves.

    >>> import torch
    >>> quantile = Quantile(q=(0.0, 0.5, 1.0))
    >>> state = quantile.update({}, torch.arange(1.0, 1000.0))
    >>> [round(value, 1) for value in quantile.compute(state).tolist()]
    [1.0, 500.0, 999.0]
    >>> round(quantile.iqr(state).item())
    494
    """

    q: float | tuple[float, ...] = (0.25, 0.5, 0.75)
    bits: int = 5
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_shares(self.q)
        if not isinstance(self.bits, int) or not 1 <= self.bits <= _MOST_BITS:
            raise ArgumentError(f"Quantile takes from 1 to {_MOST_BITS} bits and got {self.bits!r}")
        for name in ("low", "high"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, (int, float)) and 2.0**-1022 <= value < math.inf):
                raise ArgumentError(f"Quantile takes a positive finite magnitude, or None, as {name} and got {value!r}")
        first, end = self._exponents
        if first >= end:
            raise ArgumentError(f"Quantile takes low below high and got {self.low!r} and {self.high!r}")

    @property
    def error(self) -> float:
        """The greatest relative error of a quantile from `low` to `high`."""
        return 1 / ((2 << self.bits) + 1)

    @property
    def divisible(self) -> bool:
        return False  # a lift is cut inside, where its pieces share one array of counts

    @property
    def batchable(self) -> bool:
        return True

    def lift(self, x: Tensor, axes: tuple[int, ...]) -> State:
        x = comparable(x, "Quantile")
        filled, mask = finite(x)
        if mask is None:
            least, greatest = extremes(x, axes)
        else:
            least, greatest = (torch.where(mask, filled, fill) for fill in (torch.inf, -torch.inf))
            least, greatest = least.amin(dim=axes), greatest.amax(dim=axes)
        counts = tally(filled, axes, 2 * self._per_sign + 3, self._bucket)
        if mask is not None:  # what was not finite is zero in `filled`
            counts[..., self._per_sign + 1] -= count_of(x, None, axes) - mask.sum(dim=axes)
        return {"counts": counts, "min": least, "max": greatest}

    def join(self, a: State, b: State) -> State:
        return {
            "counts": a["counts"] + b["counts"],
            "min": torch.minimum(a["min"], b["min"]),
            "max": torch.maximum(a["max"], b["max"]),
        }

    def read(self, state: State) -> Tensor:
        return self._quantiles(state, self.q)

    def at(self, state: State, q: float | tuple[float, ...]) -> Tensor:
        """Other quantiles of a state, in the shape `compute` would give them.

        Raises:
            ArgumentError: a share is not from 0 to 1.
            EmptyStateError: nothing was reduced into `state`.
        """
        _check_shares(q)
        require_state(self, state)
        return self._quantiles(state, q)

    def iqr(self, state: State) -> Tensor:
        """Interquartile range of a state: the quantile 0.75 less the quantile 0.25, float64, in the shape of the kept axes."""
        return self.at(state, 0.75) - self.at(state, 0.25)

    @property
    def _exponents(self) -> tuple[int, int]:
        first, end = _FLOAT32
        if self.low is not None:
            first = math.frexp(self.low)[1] - 1
        if self.high is not None:
            mantissa, end = math.frexp(self.high)
            end -= mantissa == 0.5
        return first, end

    @property
    def _per_sign(self) -> int:
        first, end = self._exponents
        return (end - first) << self.bits

    def _bucket(self, x: Tensor) -> Tensor:
        """Numbers of buckets, in the order of the numbers: those beyond `high`, the others and zero stand around the middle."""
        first, _ = self._exponents
        narrow = x.dtype.itemsize <= 4 if x.is_floating_point() else x.dtype.itemsize <= 2
        x = x.float() if narrow and first >= _FLOAT32[0] else real(x)
        integer, mantissa, bias = (torch.int32, 23, 127) if x.dtype is torch.float32 else (torch.int64, 52, 1023)
        pattern = x.view(integer)
        # negative floats grow downwards: with all bits but the sign flipped, patterns are in the order of the numbers
        number = ((pattern >> (8 * x.dtype.itemsize - 1)) & torch.iinfo(integer).max) ^ pattern
        number = number >> (mantissa - self.bits)
        zero = (bias + first) << self.bits
        number = number - number.clamp(-zero, zero - 1)
        middle = self._per_sign + 1
        return number.clamp(-middle, middle) + middle

    def _middles(self, like: Tensor) -> Tensor:
        """What stands for each bucket."""
        first, end = self._exponents
        numbers = torch.arange(self._per_sign, device=like.device)
        start = 1 + real(numbers & ((1 << self.bits) - 1)) * 2.0**-self.bits
        stop = start + 2.0**-self.bits
        scale = torch.ldexp(real(torch.ones_like(numbers)), first + (numbers >> self.bits))
        inside = 2 * start * stop / (start + stop) * scale
        beyond = torch.full_like(inside[:1], 2.0**end if end < 1024 else math.inf)
        above = torch.cat((inside, beyond))
        return torch.cat((-above.flip(0), torch.zeros_like(beyond), above))

    def _quantiles(self, state: State, q: float | tuple[float, ...]) -> Tensor:
        reached = state["counts"].cumsum(-1)
        count = reached[..., -1:]
        seen = real(count)
        shares = torch.tensor(q if isinstance(q, tuple) else (q,), dtype=seen.dtype, device=seen.device)
        rank = (shares * seen).ceil().long().clamp(min=1)
        found = torch.searchsorted(reached, rank).clamp(max=reached.shape[-1] - 1)
        least, greatest = (real(nan_where_infinite(state[key])).unsqueeze(-1) for key in ("min", "max"))
        inside = self._middles(reached)[found].clamp(least, greatest)
        quantiles = torch.where(rank <= 1, least, torch.where(rank >= count, greatest, inside)).movedim(-1, 0).contiguous()
        return quantiles if isinstance(q, tuple) else quantiles[0]


def _check_shares(q: float | tuple[float, ...]) -> None:
    shares = q if isinstance(q, tuple) else (q,)
    if not shares or not all(isinstance(share, (int, float)) and 0 <= share <= 1 for share in shares):
        raise ArgumentError(f"Quantile takes a share from 0 to 1, or a tuple of them, as q and got {q!r}")
