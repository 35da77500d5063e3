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

PRIME = 2**61 - 1
NAN = 0x7FF8 << 48


def integers(values: Any) -> Array:
    """Integers of any size, as an array."""
    return np.array(values, dtype=object)


def digest(xs: Observations) -> dict[str, Any]:
    """That of float64 or complex128, word by word."""
    found = 0
    for x in xs:
        real = np.ascontiguousarray(x).view(np.float64).ravel()
        words = np.where(np.isnan(real), NAN, real.view(np.uint64).astype(object))
        places = np.arange(len(words))
        spread = (words ^ words >> 32) * 0x9E3779B97F4A7C15 % 2**64
        weights = mixed(integers(places % 1024), 1) | integers([1])
        terms = (spread ^ spread >> 32) * weights
        blocks = [int(terms[places // 1024 == block].sum()) for block in range(1 + (len(words) - 1) // 1024)]
        kind = zlib.crc32(f"torch.{x.dtype}".encode())
        for size in x.shape:
            kind = mixed(kind + size, 4)
        whole = sum(mixed(mixed(one, 2) + block, 3) for block, one in enumerate(blocks))
        found = (found * (mixed(0, 6) % PRIME) + (mixed(whole + kind, 5) & PRIME)) % PRIME
    return {"digest": found, "observations": len(xs)}


def sketch(k: int) -> Callable[[Observations], dict[str, Any]]:
    def reference(xs: Observations) -> dict[str, Any]:
        sums = np.zeros(k)
        flat = [np.ascontiguousarray(x).view(np.float64).ravel() for x in xs]
        for x in flat:
            for index, value in enumerate(np.where(np.isfinite(x), x, 0)):
                negative = mixed(index // 64, 7) >> index % 64 & 1
                sums[(index + (mixed(index // k, 8) >> 33)) % k] += -value if negative else value
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
