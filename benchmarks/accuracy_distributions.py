"""How exact quantiles, histograms, sketches of integers and exemplars are: measured errors beside the bounds that are promised.

Run: python benchmarks/accuracy_distributions.py
"""

from __future__ import annotations

from collections import Counter
from functools import reduce
from typing import Any

import numpy as np
import torch
from measure import write
from scipy import stats
from torch import Tensor

from reducers import CountByValue, DistinctCount, HeavyHitters, Histogram, Quantile, Reducer, Reservoir, State, TopK

PARTS = 1000
SIZE = 1_000_000
SHARES = tuple((np.arange(1, 1000) / 1000).tolist())
DATA = ("normal", "mean 1e4, std 1", "log-normal, sigma 4", "Cauchy", "bimodal, 1e-3 and 50", "integers -1000 to 999", "half zeros")


def samples(name: str) -> Tensor:
    rng = np.random.default_rng(0)
    drawn = {
        "normal": lambda: rng.normal(size=SIZE),
        "mean 1e4, std 1": lambda: rng.normal(1e4, 1.0, size=SIZE),
        "log-normal, sigma 4": lambda: rng.lognormal(0.0, 4.0, size=SIZE),
        "Cauchy": lambda: rng.standard_cauchy(size=SIZE),
        "bimodal, 1e-3 and 50": lambda: np.where(rng.random(SIZE) < 0.3, rng.normal(1e-3, 1e-5, SIZE), rng.normal(50.0, 0.1, SIZE)),
        "integers -1000 to 999": lambda: rng.integers(-1000, 1000, SIZE),
        "half zeros": lambda: np.maximum(rng.normal(size=SIZE), 0.0),
    }[name]()
    return torch.from_numpy(np.asarray(drawn, np.float32))


def merged(reducer: Reducer, x: Tensor) -> State:
    return reduce(reducer.merge, [reducer.update({}, part) for part in x.tensor_split(PARTS)])


def row(what: str, data: str, error: float, bound: float, against: str) -> dict[str, Any]:
    print(f"{what:52} {data:24} {error:12.4g}  bound {bound:.4g}  against {against}")
    return {"what": what, "data": data, "error": float(error), "bound": float(bound), "against": against}


def quantiles() -> list[dict[str, Any]]:
    rows = []
    for bits in (5, 7, 10):
        quantile = Quantile(q=SHARES, bits=bits)
        for data in DATA:
            x = samples(data)
            exact = np.quantile(x.double().numpy(), SHARES, method="inverted_cdf")
            found = quantile.compute(merged(quantile, x)).numpy()
            error = np.where(exact == 0, np.abs(found), np.abs(found - exact) / np.where(exact == 0, 1, np.abs(exact))).max()
            what = f"Quantile(bits={bits}): relative error of 999 shares"
            rows.append(row(what, data, error, quantile.error, "numpy.quantile, inverted_cdf"))
    return rows


def counts() -> list[dict[str, Any]]:
    rows = []
    for data in DATA:
        x = samples(data)
        for histogram in (Histogram(bins=100, low=-3.0, high=3.0), Histogram(edges=(-1e3, -1.0, 0.0, 1e-3, 0.1, 50.0, 1e4))):
            result = histogram.compute(merged(histogram, x))
            expected = np.histogram(x.double().numpy(), bins=result["edges"].numpy())[0]
            kind = "100 equal bins" if histogram.edges is None else "6 given bins"
            error = np.abs(result["counts"].numpy() - expected).max()
            rows.append(row(f"Histogram, {kind}: largest difference of a count", data, error, 0, "numpy.histogram"))
    return rows


def integers() -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    tokens = torch.from_numpy(np.minimum(rng.zipf(1.3, SIZE), 2**31 - 1))
    data, truth = "Zipf 1.3, below 2^31", Counter(tokens.tolist())
    count, hitters = CountByValue(values=50_000), HeavyHitters(k=64)
    tallied = count.compute(merged(count, tokens))["counts"].numpy()
    expected = np.bincount(tokens[tokens < 50_000].numpy(), minlength=50_000)
    rows = [row("CountByValue: largest difference of a count", data, np.abs(tallied - expected).max(), 0, "numpy.bincount")]
    result = hitters.compute(merged(hitters, tokens))
    found = dict(zip(result["values"].tolist(), result["counts"].tolist(), strict=True))
    heavy = {value for value, times in truth.items() if times >= SIZE // 400}
    what = f"HeavyHitters: share missed of {len(heavy)} numbers with 0.25 % or more"
    rows.append(
        row(what, data, len(heavy - found.keys()) / len(heavy), (400 / hitters.width) ** hitters.depth, "collections.Counter")
    )
    over = max(times - truth[value] for value, times in found.items()) / SIZE
    rows.append(row("HeavyHitters: count too high, as a share of all", data, over, 2 / hitters.width, "collections.Counter"))
    for bits in (12, 14):
        distinct = DistinctCount(bits=bits)
        for n in (100, 10_000, 100_000):
            sets = (torch.from_numpy(rng.integers(-(2**62), 2**62, n)) for _ in range(200))
            errors = torch.stack([distinct.compute(distinct.update({}, x)) for x in sets]) / n - 1
            what = f"DistinctCount(bits={bits}): standard error over 200 sets"
            rows.append(
                row(what, f"{n:,} random integers", errors.square().mean().sqrt().item(), 1.04 / 2 ** (bits / 2), "the number")
            )
    return rows


def exemplars() -> list[dict[str, Any]]:
    rows = []
    for data in DATA:
        x = samples(data)
        top = TopK(k=100)
        found = top.compute(merged(top, x))
        sizes = torch.tensor([len(part) for part in x.tensor_split(PARTS)])
        where = (sizes.cumsum(0) - sizes)[found["step"]] + found["position"]
        expected = np.argsort(-x.double().numpy(), kind="stable")[:100]
        rows.append(row("TopK(k=100): wrong elements or places", data, (where.numpy() != expected).sum(), 0, "numpy.argsort"))
    often = np.zeros(PARTS)
    for seed in range(500):
        reservoir = Reservoir(k=100, seed=seed)
        often += np.bincount(
            reservoir.compute(reservoir.update({}, torch.arange(float(PARTS))))["position"].numpy(), minlength=PARTS
        )
    statistic = ((often - 50) ** 2 / 50).sum() / 0.9
    bound = stats.chi2.ppf(0.999, PARTS - 1)
    rows.append(
        row("Reservoir(k=100): chi-square of how often each is drawn", "1,000 samples, 500 seeds", statistic, bound, "uniform")
    )
    return rows


def main() -> None:
    rows = [*quantiles(), *counts(), *integers(), *exemplars()]
    write(
        "accuracy_distributions",
        what="errors after merging 1,000 parts of 1,000,000 elements, unless another size is told; a bound of 0: exact",
        rows=rows,
    )


if __name__ == "__main__":
    main()
