"""Numbers of one table of partial statistics: int64, with float64 numbers as their bits."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["as_number", "as_word"]


@triton.jit
def as_word(value):
    """Return a number as the int64 of the bits of its float64."""
    return value.to(tl.float64).to(tl.int64, bitcast=True)


@triton.jit
def as_number(word):
    """Return the float64 whose bits these are."""
    return word.to(tl.float64, bitcast=True)
