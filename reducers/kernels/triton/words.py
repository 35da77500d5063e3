"""Numbers as integers: of one table of partial statistics, with float64 numbers as their bits, or in the order of the numbers."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def as_word(value):
    """Return a number as the int64 of the bits of its float64."""
    return value.to(tl.float64).to(tl.int64, bitcast=True)


@triton.jit
def as_number(word):
    """Return the float64 whose bits these are."""
    return word.to(tl.float64, bitcast=True)


@triton.jit
def as_ordered(number):
    """Return the integer of the bits of a float32 or float64, flipped so that the order of integers is that of numbers."""
    if number.dtype == tl.float64:
        word = number.to(tl.int64, bitcast=True)
        word = word ^ ((word >> 63) & 0x7FFFFFFFFFFFFFFF)
    else:
        word = number.to(tl.int32, bitcast=True)
        word = word ^ ((word >> 31) & 0x7FFFFFFF)
    return word
