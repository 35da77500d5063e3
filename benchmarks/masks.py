"""What masks and weights that differ from element to element cost, against the plain statistic and `x.sum()`, of a 25 MB tensor.

Processor time of one thread, which other work on the machine lengthens less than time on the wall; taken in turn.
Run: python benchmarks/masks.py
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from measure import spread, write

from reducers import Masked, Moments, Summary, WeightedMean, WeightedMoments

ROUNDS = 15
SHAPE = (8192, 768)
PATTERNS = ("... ->", "b c -> c")


def functions(pattern: str) -> dict[str, Callable[[], object]]:
    """What is timed, by name; the first is the yardstick."""
    generator = torch.Generator().manual_seed(0)
    x, weights = torch.randn(SHAPE, generator=generator), torch.rand(SHAPE, generator=generator)
    elements, rows = weights > 0.3, weights[:, :1] > 0.3
    summary, moments, mean = Summary(pattern), WeightedMoments(pattern), WeightedMean(pattern)
    return {
        "x.sum()": x.sum,
        "Summary": lambda: summary.update({}, x),
        "Summary, elements masked": lambda: Masked(summary).update({}, x, elements),
        "Summary, rows masked": lambda: Masked(summary).update({}, x, rows),
        "Moments": lambda: Moments(pattern).update({}, x),
        "WeightedMean": lambda: mean.update({}, x, weights),
        "WeightedMoments": lambda: moments.update({}, x, weights),
    }


def main() -> None:
    torch.set_num_threads(1)
    found = []
    for pattern in PATTERNS:
        timed = functions(pattern)
        times: dict[str, list[float]] = {name: [] for name in timed}
        for _ in range(ROUNDS):
            for name, function in timed.items():
                function()
                started = time.process_time()
                function()
                times[name].append((time.process_time() - started) * 1e3)
        figures = {name: spread(spent) for name, spent in times.items()}
        for name, figure in figures.items():
            ratio = figure["median"] / figures["x.sum()"]["median"]
            found.append({"pattern": pattern, "what": name, **figure, "x sum": ratio})
            print(f"{pattern:10} {name:28} {figure['median']:9.2f} ms {ratio:8.1f} x x.sum()")
    write("masks", rows=found, what="float32, 25 MB, one thread, processor time")


if __name__ == "__main__":
    main()
