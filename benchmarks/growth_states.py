"""How the cost of an update grows with the size of the state, for every reducer whose state can be made large.

Each is updated `size` times first, then as often again, and the mean of the latter is shown: it includes what comes up seldom, such
as new buffers. Run: python benchmarks/growth_states.py
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from measure import versions, write
from torch import Tensor

from reducers import (
    CKA,
    EMA,
    Activity,
    BottomK,
    Collect,
    Count,
    CountByValue,
    Covariance,
    CrossCovariance,
    CumulativeTrace,
    Difference,
    DistinctCount,
    EveryNth,
    Extremes,
    FirstNonfinite,
    Geometry,
    GroupBy,
    HeavyHitters,
    Histogram,
    History,
    Last,
    Mean,
    MinibatchCKA,
    Moments,
    NearestTrace,
    Norm,
    PerObservation,
    Product,
    Quantile,
    Reducer,
    Reservoir,
    Scan,
    Sparsity,
    Summary,
    TimeSince,
    TopK,
    WeightedMoments,
    Whole,
    Window,
)

SIZES = (10, 100, 1_000)
LEAST, SECONDS = 300, 2.0
Inputs = tuple[Tensor, ...]
Row = tuple[Callable[[int], Any], Callable[[int], Inputs]]


def vector(size: int) -> Inputs:
    return (torch.randn(10_000),)


def rows(size: int) -> Inputs:
    return (torch.randn(64, size),)


def pair(size: int) -> Inputs:
    return torch.randn(64, size), torch.randn(64, size)


def whole_numbers(size: int) -> Inputs:
    return (torch.randint(0, size, (10_000,)),)


CASES: dict[str, dict[str, Row]] = {  # by what the size is a number of, and by name
    "slots, at observations of 10,000 numbers": {
        "History(Last())": (lambda n: History(Last(), duration=float(n)), vector),
        "History(CumulativeTrace())": (lambda n: History(CumulativeTrace(time_constant=20.0), duration=float(n)), vector),
        "Window(Last())": (lambda n: Window(Last(), n), vector),
        "Window(Mean('c -> c'))": (lambda n: Window(Mean("c -> c"), n), vector),
        "EveryNth(Last())": (lambda n: EveryNth(Last(), n), vector),
    },
    "observations so far, of 10,000 numbers": {
        "Collect()": (lambda n: Collect(), vector),
        "Whole()": (lambda n: Whole(), vector),
        "Geometry(Collect())": (lambda n: Geometry(Collect()), vector),
        "PerObservation(Norm(), Collect())": (lambda n: PerObservation(Norm(), Collect()), vector),
    },
    "kept samples, bins, values or groups, at observations of 10,000 numbers": {
        "TopK(k)": (lambda n: TopK(k=n), vector),
        "BottomK(k)": (lambda n: BottomK(k=n), vector),
        "Reservoir(k)": (lambda n: Reservoir(k=n, seed=0), vector),
        "Histogram(bins)": (lambda n: Histogram(bins=n, low=-4.0, high=4.0), vector),
        "Quantile(bits)": (lambda n: Quantile(bits=n.bit_length() - 1), vector),
        "CountByValue(values)": (lambda n: CountByValue(values=n), whole_numbers),
        "HeavyHitters(k)": (lambda n: HeavyHitters(k=n), whole_numbers),
        "DistinctCount(bits)": (lambda n: DistinctCount(bits=max(4, n.bit_length())), whole_numbers),
        "GroupBy(Mean(), groups)": (lambda n: GroupBy(Mean(), n), lambda n: (*vector(n), torch.randint(0, n, (10_000,)))),
    },
    "features, at observations of 64 rows": {
        **{
            f"{type(reducer).__name__}('b c -> c')": (lambda n, reducer=reducer: reducer, rows)
            for reducer in (
                Count("b c -> c"),
                Mean("b c -> c"),
                Extremes("b c -> c"),
                Norm("b c -> c"),
                Sparsity("b c -> c"),
                Activity("b c -> c"),
                Moments("b c -> c"),
                Summary("b c -> c"),
                EMA("b c -> c", alpha=0.5),
                FirstNonfinite("b c -> c"),
                Histogram("b c -> c", bins=64, low=-4.0, high=4.0),
                Quantile("b c -> c", low=1e-3, high=1e3),
            )
        },
        "WeightedMoments('b c -> c')": (lambda n: WeightedMoments("b c -> c"), pair),
        "NearestTrace()": (lambda n: NearestTrace(time_constant=20.0), rows),
        "TimeSince()": (lambda n: TimeSince(torch.signbit), rows),
        "Scan()": (lambda n: Scan(lambda x, s: x + 0.5 * s, 0.0), rows),
        "Difference(Mean('b c -> c'))": (lambda n: Difference(Mean("b c -> c")), rows),
        "Product(mean=..., last=...)": (lambda n: Product(mean=Mean("b c -> c"), last=Last()), rows),
        "Covariance()": (lambda n: Covariance(), rows),
        "CrossCovariance()": (lambda n: CrossCovariance(), pair),
        "CKA()": (lambda n: CKA(), pair),
        "MinibatchCKA()": (lambda n: MinibatchCKA(), pair),
    },
}


def mean_us(update: Callable[[], Any], size: int) -> float:
    """What one of the last `size` of twice as many updates takes; of more if there are few, and of fewer if they are slow."""
    for _ in ("before", "timed"):
        started, done = time.perf_counter(), 0
        while done < max(size, LEAST) and (time.perf_counter() - started < SECONDS or done < 5):
            update()
            done += 1
    return (time.perf_counter() - started) / done * 1e6


def updater(made: Any, xs: Inputs) -> Callable[[], None]:
    """An update of a reducer of ours, or of one of inferno, which holds its state."""
    if not isinstance(made, Reducer):
        return lambda: made(*xs)
    state = made.init()

    def update() -> None:
        nonlocal state
        state = made.update(state, *xs)

    return update


def with_inferno() -> dict[str, dict[str, Row]]:
    try:
        from inferno.observe import PassthroughReducer
    except ImportError:
        return CASES
    theirs: dict[str, Row] = {
        f"inferno's PassthroughReducer(inplace={inplace})": (
            lambda n, inplace=inplace: PassthroughReducer(1.0, duration=float(n), inplace=inplace),
            vector,
        )
        for inplace in (True, False)
    }
    first = next(iter(CASES))
    return {**CASES, first: {**CASES[first], **theirs}}


def main() -> None:
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    found = []
    for grows, cases in with_inferno().items():
        for name, (make, inputs) in cases.items():
            figures = [mean_us(updater(make(size), inputs(size)), size) for size in SIZES]
            found.append({"reducer": name, "size": grows, "us": dict(zip(map(str, SIZES), figures, strict=True))})
            print(f"{name:45} {'; '.join(f'{figure:,.0f}' for figure in figures):>28} us", flush=True)
    write("growth_states", rows=found, packages=versions("inferno-ai", "torch"), what="mean of one update, one thread")


if __name__ == "__main__":
    main()
