"""Every reducer against the floor: one `update` on a 25 MB activation, as a multiple of `x.sum()` of that tensor in the same run.

For the main ones also how that grows with the size, from 4 KB to 1 GB, and bfloat16. Beside them plain PyTorch for such work.
Run: python benchmarks/floor.py
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from measure import alternate, write
from torch import Tensor

import reducers
from reducers import (
    CKA,
    EMA,
    Activity,
    BottomK,
    Collect,
    ConditionalCumulativeTrace,
    ConditionalNearestTrace,
    Count,
    CountByValue,
    Covariance,
    CrossCovariance,
    CumulativeTrace,
    Difference,
    Digest,
    DistinctCount,
    EveryNth,
    Extremes,
    Fingerprints,
    First,
    FirstNonfinite,
    Fold,
    Geometry,
    GroupBy,
    HeavyHitters,
    Histogram,
    History,
    Idle,
    Last,
    Masked,
    Max,
    Mean,
    Min,
    MinibatchCKA,
    Moments,
    NearestTrace,
    Norm,
    PerObservation,
    Product,
    Quantile,
    Reducer,
    Reservoir,
    ScaledCumulativeTrace,
    ScaledNearestTrace,
    Scan,
    Sketch,
    Sparsity,
    Sum,
    Summary,
    TimeSince,
    TopK,
    WeightedMean,
    WeightedMoments,
    Whole,
    Window,
)

LAYOUTS = {
    "per tensor": ((64, 128, 768), "... ->", None),
    "per feature": ((64, 128, 768), "b ... d -> d", (0, 1)),
    "per channel": ((32, 64, 56, 56), "b c ... -> c", (0, 2, 3)),
}
SIZES = tuple(1 << power for power in range(10, 29, 3))
"""Elements: in float32 from 4 KB to 1 GB."""

Row = dict[str, Any]


def patterned(pattern: str) -> dict[str, Reducer]:
    """Those that keep what a pattern says."""
    kinds = (Count, Sum, Mean, Min, Max, Extremes, Norm, Moments, Summary, Activity, Idle, Sparsity, FirstNonfinite, TopK, BottomK)
    return {
        **{kind.__name__: kind(pattern) for kind in kinds},
        "Moments(order=4)": Moments(pattern, order=4),
        "Quantile": Quantile(pattern, low=1e-6, high=1e6),
        "Histogram": Histogram(pattern, bins=100, low=-3.0, high=3.0),
        "EMA": EMA(pattern, alpha=0.1),
        "Product(Moments, Min, Max)": Product(moments=Moments(pattern), low=Min(pattern), high=Max(pattern)),
        "Prefilter(Mean)": Mean(pattern).prefilter(_positive),
        "Premap(Mean)": Mean(pattern).premap(torch.abs),
        "Postmap(Moments)": Moments(pattern).postmap(_deviation),
        "Window(Summary)": Window(Summary(pattern), 4),
        "EveryNth(Mean)": EveryNth(Mean(pattern), 1),
        "History(Mean)": History(Mean(pattern), duration=4.0),
        "Difference(Mean)": Difference(Mean(pattern)),
        "PerObservation(Mean, Mean)": PerObservation(Mean(pattern), Mean("o ... -> ...")),
    }


def whole() -> dict[str, Reducer]:
    """Those that take an observation whole."""
    keep: dict[str, Any] = {"time_constant": 20.0}
    return {
        "Digest": Digest(),
        "Sketch": Sketch(),
        "Fingerprints": Fingerprints(),
        "First": First(),
        "Last": Last(),
        "Collect": Collect(),
        "Whole(last=2)": Whole(last=2),
        "Fold(maximum)": Fold(torch.maximum),
        "Scan(leaky)": Scan(_leaky, 0.0),
        "Reservoir": Reservoir(),
        "Geometry": Geometry(),
        "TimeSince": TimeSince(_positive),
        "NearestTrace": NearestTrace(**keep, target=0.0, tolerance=1.0),
        "CumulativeTrace": CumulativeTrace(**keep, target=0.0, tolerance=1.0),
        "ScaledNearestTrace": ScaledNearestTrace(**keep, criterion=_positive),
        "ScaledCumulativeTrace": ScaledCumulativeTrace(**keep, criterion=_positive),
    }


def of_two(x: Tensor, pattern: str) -> dict[str, tuple[Reducer, Tensor]]:
    """Those that take a second tensor, with it."""
    positive, labels = x > 0, torch.arange(len(x)) % 10
    found: dict[str, tuple[Reducer, Tensor]] = {
        "WeightedMean": (WeightedMean(pattern), x.abs()),
        "WeightedMoments": (WeightedMoments(pattern), x.abs()),
        "Masked(Summary)": (Masked(Summary(pattern)), positive),
        "GroupBy(Mean), 10 groups": (GroupBy(Mean(pattern), groups=10), labels),
    }
    if pattern == "... ->":
        found["ConditionalNearestTrace"] = ConditionalNearestTrace(time_constant=20.0), positive
        found["ConditionalCumulativeTrace"] = ConditionalCumulativeTrace(time_constant=20.0), positive
        found["MinibatchCKA"] = MinibatchCKA(), x.flip(0)
    else:
        found["CrossCovariance"] = CrossCovariance(pattern, pattern), x.flip(0)
        found["CKA"] = CKA(pattern, pattern), x.flip(0)
    return found


def of_integers(pattern: str) -> dict[str, Reducer]:
    return {
        "CountByValue": CountByValue(pattern, values=1000),
        "DistinctCount": DistinctCount(pattern),
        "HeavyHitters": HeavyHitters(pattern),
    }


def plain(x: Tensor, axes: tuple[int, ...] | None) -> dict[str, Callable[[], Any]]:
    """What one would write without this library."""

    def eight() -> tuple[Tensor, ...]:
        dims = tuple(range(x.ndim)) if axes is None else axes
        ends = (x.amin(dims), x.amax(dims), torch.linalg.vector_norm(x, torch.inf, dims))
        return (x.mean(dims), x.var(dims), *ends, (x == 0).sum(dims), x.isnan().sum(dims), x.isinf().sum(dims))

    found: dict[str, Callable[[], Any]] = {"plain PyTorch, eight statistics": eight}
    if axes is None:
        found["plain torch.histogram"] = lambda: torch.histogram(x, 100, range=(-3.0, 3.0))
        found["plain torch.histc"] = lambda: torch.histc(x, 100, -3.0, 3.0)
        found["plain torch.quantile"] = lambda: torch.quantile(x.flatten(), torch.tensor((0.25, 0.5, 0.75)))
    return found


def of_one(pattern: str, axes: tuple[int, ...] | None) -> dict[str, Reducer]:
    """All that take one tensor of floats."""
    return {**patterned(pattern), **(whole() if axes is None else {"Covariance": Covariance(pattern)})}


def without_row() -> list[str]:
    """The names of public reducers that are not timed."""
    timed: set[type] = set(map(type, of_integers("... ->").values()))
    for _, pattern, axes in LAYOUTS.values():
        timed |= set(map(type, of_one(pattern, axes).values()))
        timed |= {type(reducer) for reducer, _ in of_two(torch.ones(2, 2), pattern).values()}
    public = {getattr(reducers, name) for name in reducers.__all__ if inspect.isclass(getattr(reducers, name))}
    return sorted(
        kind.__name__ for kind in public if issubclass(kind, Reducer) and not inspect.isabstract(kind) and kind not in timed
    )


def updating(reducer: Reducer, *xs: Tensor) -> Callable[[], Any]:
    """One update of a state that has seen something."""
    return partial(reducer.update, reducer.update({}, *xs), *xs)


def measured(layout: str, x: Tensor, functions: dict[str, Callable[[], Any]], seconds: float = 0.3, **more: Any) -> list[Row]:
    """Rows of what all of it costs against `x.sum()`, which is timed in turn with the others and so finds the cache as they do."""
    times = alternate({"x.sum()": x.sum, **functions}, seconds=seconds, least=3)
    floor, rows = times["x.sum()"]["median"], []
    for name, time in times.items():
        rows.append({"layout": layout, "reducer": name, "ms": time, "x floor": time["median"] / floor, **more})
        print(f"{layout:22} {name:32} {time['median']:9.3f} ms  {time['median'] / floor:8.1f} x floor", flush=True)
    return rows


def all_reducers() -> list[Row]:
    if lacking := without_row():
        raise RuntimeError(f"benchmarks/floor.py has no row for {lacking}: add them")
    rows: list[Row] = []
    generator = torch.Generator().manual_seed(0)
    for layout, (shape, pattern, axes) in LAYOUTS.items():
        x = torch.randn(shape, generator=generator)
        one, two = of_one(pattern, axes), of_two(x, pattern)
        functions = {
            **{name: updating(reducer, x) for name, reducer in one.items()},
            **{name: updating(reducer, x, other) for name, (reducer, other) in two.items()},
            **plain(x, axes),
        }
        rows += measured(layout, x, functions)
    tokens = torch.randint(1000, (16, 128, 768), generator=generator, dtype=torch.int32)
    rows += measured("per tensor, 6 MB of int32", tokens, {name: updating(r, tokens) for name, r in of_integers("... ->").items()})
    return rows


def main_ones(pattern: str) -> dict[str, Reducer]:
    every = patterned(pattern)
    return {name: every[name] for name in ("Mean", "Norm", "Moments", "Summary", "Quantile", "Activity")}


def half_precision() -> list[Row]:
    rows = []
    for layout, (shape, pattern, _) in LAYOUTS.items():
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
        functions = {name: updating(reducer, x) for name, reducer in main_ones(pattern).items()}
        rows += measured(f"{layout}, bfloat16", x, functions, 0.3)
    return rows


def by_size() -> list[Row]:
    rows = []
    for size in SIZES:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if free < 3 * 4 * size:
            print(f"{4 * size / 1e6:.0f} MB left out: {free / 1e6:.0f} MB of memory are free")
            continue
        x = torch.randn((size // 64, 64), generator=torch.Generator().manual_seed(0))
        functions = {name: updating(reducer, x) for name, reducer in main_ones("... ->").items()}
        rows += measured(f"{4 * size / 1e6:.3g} MB", x, functions, 0.2, bytes=4 * size)
    return rows


def _positive(x: Tensor) -> Tensor:
    return x > 0


def _leaky(x: Tensor, so_far: Tensor) -> Tensor:
    return 0.9 * so_far + x


def _deviation(result: dict[str, Tensor]) -> Tensor:
    return result["std"]


def main() -> None:
    what = "one update of a state that saw one observation; floor: x.sum() of the same tensor, timed in turn; 25 MB unless said"
    write("floor", rows=all_reducers(), bfloat16=half_precision(), sizes=by_size(), what=what)


if __name__ == "__main__":
    main()
