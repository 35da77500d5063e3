"""One-shot references of what hashes bits and places, in NumPy and Python's integers."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from references_distributions import mixed

__all__ = ["digest", "fingerprints", "sketch"]

Array = NDArray[Any]
Observations = list[Array]

NAN = 0x7FF8 << 48
FACTOR = (mixed(0, 6) & ~1, mixed(1, 6) | 1)


def integers(values: Any) -> Array:
    """Integers of any size, as an array."""
    return np.array(values, dtype=object)


def times(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    """The product of numbers `a[0] + a[1] w`, in which the square of w is -1 - w."""
    return a[0] * b[0] - a[1] * b[1], a[0] * b[1] + a[1] * b[0] - a[1] * b[1]


def digest(xs: Observations) -> dict[str, Any]:
    """That of float64 or complex128, word by word."""
    found = (0, 0)
    for x in xs:
        real = np.ascontiguousarray(x).view(np.float64).ravel()
        words = np.where(np.isnan(real), NAN, real.view(np.uint64).astype(object))
        reversed_words = integers([int.from_bytes(int(word).to_bytes(8, "little"), "big") for word in words])
        places = integers(np.arange(len(words)))
        spread = places // 512 * 0x9E3779B97F4A7C15 % 2**64
        factors = (spread ^ spread >> 32) * 0x94D049BB133111EB % 2**64 | integers([1])
        swapped = factors % 2**32 * 2**32 | factors >> 32 | integers([1])
        first = (words * (mixed(places % 512, 1) | integers([1])) * factors).sum()
        second = (reversed_words * (mixed(places % 512, 2) | integers([1])) * swapped).sum()
        kind = zlib.crc32(f"torch.{x.dtype}".encode())
        for size in x.shape:
            kind = mixed(kind + size, 4)
        before = times(found, FACTOR)
        found = (before[0] + first + mixed(kind, 5)) % 2**64, (before[1] + second + mixed(kind, 6)) % 2**64
    return {"digest": mixed(mixed(found[0], 7) + found[1], 8) >> 1, "observations": len(xs)}


def within_eight(block: int) -> int:
    """The product of the place of a block in its octet with one hash of this, less another, in the field of eight elements."""
    logarithm, power = [0, 0, 1, 3, 2, 6, 4, 5], [1, 2, 4, 3, 6, 7, 5]
    hashed = mixed(block // 8, 9)
    factor, place = 1 + (hashed >> 32) * 7 // 2**32, block % 8
    return (power[(logarithm[factor] + logarithm[place]) % 7] if place else 0) ^ hashed % 8


def sketch(k: int) -> Callable[[Observations], dict[str, Any]]:
    def reference(xs: Observations) -> dict[str, Any]:
        sums = np.zeros(k)
        flat = [np.ascontiguousarray(x).view(np.float64).ravel() for x in xs]
        for x in flat:
            for index, value in enumerate(np.where(np.isfinite(x), x, 0)):
                turn = mixed(index // k, 8)
                bucket = (index - (turn >> 32) * (k // 64) // 2**32 * 64) % k ^ turn % 64 // 8 * 8 ^ within_eight(index // k)
                negative = mixed(index // k * (k // 64) + bucket // 64, 7) >> bucket % 64 & 1
                sums[bucket] += -value if negative else value
        whole = np.concatenate(flat)
        rest = whole[np.isfinite(whole)]
        ends = (rest.min(), rest.max()) if len(rest) else (np.nan, np.nan)
        return {"sketch": sums, "norm": np.sqrt((rest**2).sum()), "min": ends[0], "max": ends[1], "count": len(rest)}

    return reference


def fingerprints(xs: Observations) -> dict[str, Any]:
    """That of float64 or complex128: a digest and a sketch of each."""
    each = [{**digest([x]), **sketch(64)([x])} for x in xs]
    finite = [np.isfinite(np.ascontiguousarray(x).view(np.float64)) for x in xs]
    return {
        "digest": [one["digest"] for one in each],
        "sketch": np.array([one["sketch"] for one in each]),
        "norm": np.array([one["norm"] for one in each]),
        "nonfinite": [int((~one).sum()) for one in finite],
        "count": [int(one.sum()) for one in finite],
    }
