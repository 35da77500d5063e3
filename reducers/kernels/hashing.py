"""Deterministic integer hashing, with the same result on every device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15 - 2**64
"""2**64 over the golden ratio, as int64."""

_FIRST = 0xBF58476D1CE4E5B9 - 2**64
SECOND = 0x94D049BB133111EB - 2**64


def shift_right(x: Tensor, by: int) -> Tensor:
    """Return the logical shift `x >> by` of int64, which fills with zeros; torch has it only for unsigned integers."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def mix(x: Tensor, salt: int) -> Tensor:
    """Hash int64 to int64 by a bijection in which every output bit depends on all input bits: step `salt` of SplitMix64.

    Reference: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, variant 13 of Stafford.
    """
    x = x + signed(salt * GOLDEN)
    x = (x ^ shift_right(x, 30)) * _FIRST
    x = (x ^ shift_right(x, 27)) * SECOND
    return x ^ shift_right(x, 31)


def mixed(x: int, salt: int) -> int:
    """Return what `mix` returns, of a Python integer modulo 2**64, from 0 to below 2**64."""
    x = (x + salt * GOLDEN) % 2**64
    x = (x ^ x >> 30) * _FIRST % 2**64
    x = (x ^ x >> 27) * SECOND % 2**64
    return x ^ x >> 31


def signed(number: int) -> int:
    """Return the integer that int64 holds in place of a number, which is the same modulo 2**64."""
    return (number + 2**63) % 2**64 - 2**63


def words_of(numbers: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """Return numbers as int64, which are the same modulo 2**64."""
    words = [signed(number) for number in numbers]
    if torch.device(device).type == "cpu":
        return torch.tensor(words, device=device)
    # Each by itself: whoever copies a list to a GPU waits for it.
    return torch.stack([torch.full((), word, dtype=torch.int64, device=device) for word in words])


def bits_of(x: Tensor) -> Tensor:
    """Return the bit patterns of the elements of `x` as int64. Complex tensors get one more axis, of length 2."""
    if x.is_complex():
        x = torch.view_as_real(x.resolve_conj())
    if x.is_floating_point():
        # `view` would ignore a lazy negation
        x = x.resolve_neg().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.dtype.itemsize])
    return integers(x)


def integers(x: Tensor) -> Tensor:
    """Return integers as int64; uint64 values above its range wrap around."""
    return x.view(torch.int64) if x.dtype is torch.uint64 else x.to(torch.int64)
