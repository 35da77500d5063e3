"""One-shot references for histograms, quantiles, sketches and exemplars: NumPy and plain Python, by the definitions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Observations = list[Array]
WORD = 2**64


def per_unit(function: Callable[[Array], Any], keep: tuple[int, ...]) -> Callable[[Observations], dict[str, Array]]:
    """A reference that gives all elements of each unit, finite or not, to a function that returns a dict."""

    def reference(xs: Observations) -> dict[str, Array]:
        whole = np.moveaxis(np.concatenate(xs), keep, range(len(keep)))
        shape = whole.shape[: len(keep)]
        results = [function(row) for row in whole.reshape(int(np.prod(shape)), -1)]
        return {
            name: np.array([result[name] for result in results]).reshape((*shape, *np.shape(results[0][name])))
            for name in results[0]
        }

    return reference


def histogram(edges: Any, keep: tuple[int, ...] = ()) -> Callable[[Observations], dict[str, Array]]:
    def counts(x: Array) -> dict[str, Array]:
        return {
            "counts": np.histogram(x[~np.isnan(x)], bins=edges)[0],
            "under": np.array((x < edges[0]).sum()),
            "over": np.array((x > edges[-1]).sum()),
            "nan": np.array(np.isnan(x).sum()),
        }

    return lambda xs: {**per_unit(counts, keep)(xs), "edges": np.array(edges)}


def bucketed(x: float, bits: int, first: int = -126, end: int = 128) -> float:
    """What stands for x: the harmonic mean of the ends of its bucket."""
    size = abs(x)
    if size < 2.0**first:
        return 0.0
    if size >= 2.0**end:
        return math.copysign(2.0**end, x)
    mantissa, exponent = math.frexp(size)
    low = math.floor(mantissa * 2 ** (bits + 1))
    middle = 2 * low * (low + 1) / (2 * low + 1)
    return math.copysign(math.ldexp(middle, exponent - bits - 1), x)


def quantiles(
    q: float | tuple[float, ...], bits: int, keep: tuple[int, ...] = (), first: int = -126, end: int = 128
) -> Callable[[Observations], Array]:
    """By order statistics of the finite elements of each unit, along the first axis."""

    def of(x: Array) -> Array:
        x = x[np.isfinite(x)]
        if not len(x):
            return np.full_like(q, np.nan)
        ranks = np.maximum(1, np.ceil(np.multiply(q, len(x))))
        exact = np.quantile(x, q, method="inverted_cdf")
        middles = np.array([bucketed(value, bits, first, end) for value in np.ravel(exact)]).reshape(np.shape(exact))
        inside = np.clip(middles, x.min(), x.max())
        return np.where(ranks == 1, x.min(), np.where(ranks == len(x), x.max(), inside))

    def reference(xs: Observations) -> Array:
        found = per_unit(lambda x: {"quantile": of(x)}, keep)(xs)["quantile"]
        return found if isinstance(q, float) else np.moveaxis(found, -1, 0)

    return reference


def count_by_value(values: int) -> Callable[[Array], dict[str, Array]]:
    def counts(x: Array) -> dict[str, Array]:
        inside = x[(x >= 0) & (x < values)].astype(np.int64)
        return {"counts": np.bincount(inside, minlength=values), "outside": np.array(len(x) - len(inside))}

    return counts


def frequent(k: int) -> Callable[[Array], dict[str, Array]]:
    """The k most frequent, exactly."""

    def counts(x: Array) -> dict[str, Array]:
        ranked = sorted(Counter(x.astype(np.int64).tolist()).items(), key=lambda item: (-item[1], item[0]))[:k]
        ranked += [(-1, 0)] * (k - len(ranked))
        return {"values": np.array([v for v, _ in ranked]), "counts": np.array([n for _, n in ranked]), "outside": np.array(0)}

    return counts


def mixed(x: int, salt: int) -> int:
    """SplitMix64, in unsigned arithmetic."""
    x = (x + salt * 0x9E3779B97F4A7C15) % WORD
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % WORD
    return x ^ (x >> 31)


def hyperloglog(x: Array, bits: int) -> float:
    """The estimate of Ertl's algorithm 6 from registers filled one number at a time."""
    registers, ranks = 2**bits, 46
    kept = [0] * registers
    for value in x.astype(np.int64).tolist():
        hashed = mixed(value % WORD, 1)
        low = hashed % 2**ranks
        rank = (low & -low).bit_length() if low else ranks + 1
        kept[hashed >> (64 - bits)] = max(kept[hashed >> (64 - bits)], rank)
    having = Counter(kept)
    total = registers * tau(1 - having[ranks + 1] / registers)
    for rank in range(ranks, 0, -1):
        total = 0.5 * (total + having[rank])
    total += registers * sigma(having[0] / registers)
    return registers**2 / (2 * math.log(2)) / total


def sigma(x: float) -> float:
    if x == 1:
        return math.inf
    total, weight, before = x, 1.0, -1.0
    while total != before:
        x, before = x * x, total
        total, weight = total + x * weight, 2 * weight
    return total


def tau(x: float) -> float:
    if x in (0, 1):
        return 0.0
    total, weight, before = 1 - x, 1.0, -1.0
    while total != before:
        x, before, weight = math.sqrt(x), total, 0.5 * weight
        total -= (1 - x) ** 2 * weight
    return total / 3


def extreme(k: int, largest: bool, keep: tuple[int, ...] = ()) -> Callable[[Observations], dict[str, Array]]:
    """The k finite elements at one end with step and flat position, by sorting all of them."""

    def reference(xs: Observations) -> dict[str, Array]:
        shape = tuple(xs[0].shape[axis] for axis in keep)
        found: dict[tuple[int, ...], list[tuple[float, int, int]]] = {unit: [] for unit in np.ndindex(*shape)}
        for step, x in enumerate(xs):
            for position, (place, value) in enumerate(np.ndenumerate(x)):
                if np.isfinite(value):
                    found[tuple(place[axis] for axis in keep)].append((-value if largest else value, step, position))
        rows = [(sorted(found[unit]) + [(np.nan, -1, -1)] * k)[:k] for unit in np.ndindex(*shape)]
        table = np.array(rows, dtype=np.float64).reshape(*shape, k, 3)
        return {
            "value": -table[..., 0] if largest else table[..., 0],
            "step": table[..., 1],
            "position": table[..., 2],
            "id": np.full((*shape, k), -1),
        }

    return reference


def reservoir(k: int, seed: int) -> Callable[[Observations], dict[str, Array]]:
    """Of float64 observations, by the lots of single samples in unsigned arithmetic."""

    def reference(xs: Observations) -> dict[str, Array]:
        drawn: list[tuple[int, int, int, Array]] = []
        for step, x in enumerate(xs):
            rows = x.reshape(len(x), -1).view(np.uint64).tolist()
            digests = [sum(bits * (mixed(i, 6) | 1) for i, bits in enumerate(row)) % WORD for row in rows]
            whole = sum(mixed(mixed(each, 1) + place, 2) for place, each in enumerate(digests)) % WORD
            for place in range(len(x)):
                lot = mixed(mixed(whole + place, 3), seed)
                drawn.append((lot - WORD if lot >= WORD // 2 else lot, step, place, x[place]))
        drawn = sorted(drawn, key=lambda entry: entry[:3])[:k]
        missing = k - len(drawn)
        return {
            "value": np.array([value for *_, value in drawn] + [np.zeros_like(xs[0][0])] * missing),
            "step": np.array([step for _, step, _, _ in drawn] + [-1] * missing),
            "position": np.array([place for _, _, place, _ in drawn] + [-1] * missing),
            "id": np.full(k, -1),
        }

    return reference
