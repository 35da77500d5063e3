"""Sums of powers of distances: taken about another centre, and turned into moments. Weights may stand for counts.

`ORDER` says up to which power; what is beyond it is not looked at.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def moved(weight, first, second, third, fourth, shift, ORDER: tl.constexpr):
    """Return the sums about a centre that is lower by `shift`."""
    if ORDER > 3:
        fourth += shift * (4 * third + shift * (6 * second + shift * (4 * first + shift * weight)))
    if ORDER > 2:
        third += shift * (3 * second + shift * (3 * first + shift * weight))
    if ORDER > 1:
        second += shift * (2 * first + shift * weight)
    first += shift * weight
    return first, second, third, fourth


@triton.jit
def moments_of(weight, centre, first, second, third, fourth, ORDER: tl.constexpr):
    """Return the mean, and the sums about it. If weights add up to 0 or less, the mean is the sum, as on a CPU."""
    shift = tl.where(weight > 0, first / tl.where(weight > 0, weight, 1.0), first + centre * (weight - 1))
    if ORDER > 3:
        fourth -= shift * (4 * third - shift * (6 * second - 3 * first * shift))
    if ORDER > 2:
        third -= shift * (3 * second - 2 * first * shift)
    if ORDER > 1:
        second += shift * (shift * weight - 2 * first)
    return centre + shift, second, third, fourth
