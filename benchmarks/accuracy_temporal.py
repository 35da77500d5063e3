"""How exact averages, traces, histories, masks, weights and groups are: measured errors beside the bounds that are promised.

Run: python benchmarks/accuracy_temporal.py; with inferno-ai installed, its reducers run side by side with those of the same name.
"""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np
import torch
from measure import write
from numpy.typing import NDArray
from torch import Tensor

from reducers import (
    EMA,
    ConditionalCumulativeTrace,
    ConditionalNearestTrace,
    CumulativeTrace,
    Difference,
    EveryNth,
    GroupBy,
    History,
    Last,
    Masked,
    Mean,
    Moments,
    NearestTrace,
    Reducer,
    ScaledCumulativeTrace,
    ScaledNearestTrace,
    State,
    TimeSince,
    WeightedMoments,
    Window,
)

STEPS, PARTS, TAU = 20_000, 1000, 20.0
FADE = np.exp(np.longdouble(-1) / np.longdouble(TAU))
Step = Callable[[NDArray[Any], NDArray[Any]], NDArray[Any]]


def positive(x: Tensor) -> Tensor:
    return x > 0


def observations(offset: float = 0.0, size: int = 8) -> list[Tensor]:
    drawn = np.random.default_rng(0).normal(offset, 1.0, (STEPS, size))
    return list(torch.from_numpy(drawn.astype(np.float32)))


def one_pass(reducer: Reducer, xs: list[tuple[Tensor, ...]]) -> State:
    state: State = {}
    for x in xs:
        state = reducer.update(state, *x)
    return state


def in_parts(reducer: Reducer, xs: list[tuple[Tensor, ...]]) -> State:
    length = len(xs) // PARTS
    return reduce(reducer.merge, [one_pass(reducer, xs[start : start + length]) for start in range(0, len(xs), length)])


def worst(found: Tensor, exact: NDArray[Any]) -> float:
    """Largest error relative to the exact value; absolute where that is 0."""
    error = np.abs(found.numpy().astype(np.longdouble) - exact)
    return float((error / np.where(exact == 0, 1, np.abs(exact))).max())


def row(what: str, data: str, error: float, bound: float, against: str) -> dict[str, Any]:
    print(f"{what:52} {data:28} {error:12.4g}  bound {bound:.4g}  against {against}")
    return {"what": what, "data": data, "error": error, "bound": bound, "against": against}


def recursive(offset: float) -> list[tuple[str, Reducer, Step, bool]]:
    """Reducers of data about an offset, the recursions they stand for, and whether these start at the first observation."""

    def ema(alpha: float) -> Step:
        a = np.longdouble(alpha)
        return lambda s, x: a * x + (1 - a) * s

    return [
        ("EMA(alpha=0.1)", EMA(alpha=0.1), ema(0.1), True),
        ("EMA(alpha=1e-4)", EMA(alpha=1e-4), ema(1e-4), True),
        (
            "NearestTrace",
            NearestTrace(time_constant=TAU, target=offset, tolerance=0.5),
            lambda s, x: np.where(np.abs(x - offset) <= 0.5, 1, FADE * s),
            False,
        ),
        (
            "CumulativeTrace",
            CumulativeTrace(time_constant=TAU, target=offset, tolerance=0.5),
            lambda s, x: FADE * s + (np.abs(x - offset) <= 0.5),
            False,
        ),
        (
            "ScaledNearestTrace",
            ScaledNearestTrace(time_constant=TAU, criterion=lambda x: x > offset, scale=2.0),
            lambda s, x: np.where(x > offset, 2 * x + 1, FADE * s),
            False,
        ),
        (
            "ScaledCumulativeTrace",
            ScaledCumulativeTrace(time_constant=TAU, criterion=lambda x: x > offset, scale=2.0),
            lambda s, x: FADE * s + np.where(x > offset, 2 * x + 1, 0),
            False,
        ),
    ]


def recursions() -> list[dict[str, Any]]:
    rows = []
    for data, offset in (("normal, 20,000 steps", 0.0), ("mean 1e4, std 1, 20,000 steps", 1e4)):
        xs = observations(offset)
        for what, reducer, step, starts_at_first in recursive(offset):
            exact = xs[0].numpy().astype(np.longdouble) if starts_at_first else np.zeros(8, np.longdouble)
            for x in xs[starts_at_first:]:
                exact = step(exact, x.numpy().astype(np.longdouble))
            single = [(x,) for x in xs]
            rows.append(
                row(f"{what}: one pass", data, worst(reducer.compute(one_pass(reducer, single)), exact), 1e-12, "longdouble")
            )
            rows.append(
                row(f"{what}: 1,000 parts", data, worst(reducer.compute(in_parts(reducer, single)), exact), 1e-12, "longdouble")
            )
    since = TimeSince(lambda x: x > 2, step_time=0.1)
    last = [max(step for step, x in enumerate(xs) if x[unit] > 2) for xs in [observations()] for unit in range(8)]
    expected = np.array([0.1 * (STEPS - 1 - step) for step in last], np.longdouble)
    found = since.compute(in_parts(since, [(x,) for x in observations()]))
    rows.append(row("TimeSince: 1,000 parts", "normal, 20,000 steps", worst(found, expected), 0, "step counted in integers"))
    return rows


def selections() -> list[dict[str, Any]]:
    rows = []
    moments = Moments("... ->")
    for data, offset in (("normal", 0.0), ("mean 1e4, std 1", 1e4)):
        xs = observations(offset)
        single, whole = [(x,) for x in xs], np.stack([x.numpy() for x in xs]).astype(np.longdouble)
        generator = torch.Generator().manual_seed(0)
        masks = list(torch.rand(STEPS, 8, generator=generator) < 0.5)
        weights = list(torch.rand(STEPS, 8, generator=generator, dtype=torch.float64))
        mask, weight = (np.stack([part.numpy() for part in parts]) for parts in (masks, weights))
        weight = weight.astype(np.longdouble)
        mean = (weight * whole).sum() / weight.sum()
        var = (weight * (whole - mean) ** 2).sum() / (weight.sum() - (weight**2).sum() / weight.sum())
        named = {"masked": list(zip(xs, masks, strict=True)), "weighted": list(zip(xs, weights, strict=True))}
        checks: list[tuple[str, Reducer, list[tuple[Tensor, ...]], Any]] = [
            ("WeightedMoments: var", WeightedMoments(), named["weighted"], var),
            ("Masked(Moments): var", Masked(moments), named["masked"], whole[mask].var(ddof=1)),
            ("Window(Moments, 50): var", Window(moments, 50), single, whole[-50:].var(ddof=1)),
            ("EveryNth(Moments, 7): var", EveryNth(moments, 7), single, whole[::7].var(ddof=1)),
            ("Difference(Moments): var", Difference(moments), single, np.diff(whole, axis=0).var(ddof=1)),
        ]
        for what, reducer, inputs, exact in checks:
            result = reducer.compute(in_parts(reducer, inputs))
            assert not isinstance(result, Tensor)
            found = result["var"]
            assert isinstance(found, Tensor)
            rows.append(row(f"{what}, 1,000 parts", data, worst(found, np.asarray(exact)), 1e-12, "longdouble"))
        grouped = GroupBy(Mean(), 2)
        result = grouped.compute(in_parts(grouped, [(x, part.long()) for x, part in named["masked"]]))
        assert isinstance(result, Tensor)
        exact = np.array([whole[~mask].mean(), whole[mask].mean()])
        rows.append(row("GroupBy(Mean, 2), 1,000 parts", data, worst(result, exact), 1e-12, "longdouble"))
    return rows


def past() -> list[dict[str, Any]]:
    """Views between two results against plain arithmetic, after a merge of 1,000 parts."""
    rows = []
    history = History(Last(), step_time=0.5, duration=10.0, inclusive=True)
    xs = observations()
    state = in_parts(history, [(x,) for x in xs])
    newest_first = np.stack([x.numpy() for x in xs[::-1]]).astype(np.longdouble)
    times = np.random.default_rng(1).uniform(0, 10, 200)
    older, newer = np.ceil(times / 0.5).astype(int), np.floor(times / 0.5).astype(int)
    since = (older * 0.5 - times)[:, None].astype(np.longdouble)
    before, after = newest_first[older], newest_first[newer]
    expected = {
        "previous": before,
        "nearest": np.where(since > 0.25, after, before),
        "linear": before + (after - before) * (since / 0.5),
        "expdecay": before * np.exp(-since / 3),
        "elapsed": before + since,
    }
    for how, exact in expected.items():
        found = history.view(state, torch.from_numpy(times).expand(8, -1), how, time_constant=3.0)
        assert isinstance(found, Tensor)
        error = float(np.abs(found.T.numpy() - exact).max())
        bound = 0 if how in ("previous", "nearest") else 1e-12
        rows.append(row(f"History.view, {how}: absolute", "200 times, 1,000 parts", error, bound, "longdouble"))
    return rows


def beside_inferno() -> list[dict[str, Any]]:
    """The same stream through both, in float64: all of `dump`, and views at random times."""
    try:
        general, stats, trace = (
            importlib.import_module(f"inferno.observe.reducers.{name}") for name in ("general", "stats", "trace")
        )
    except ImportError:
        return []
    torch.set_default_dtype(torch.float64)  # what its records are kept in
    time: dict[str, Any] = {"time_constant": TAU, "step_time": 0.5}
    kept: dict[str, Any] = {"duration": 4.0, "inclusive": True}
    pairs: list[tuple[Any, Reducer, bool]] = [
        (stats.EMAReducer(0.5, 0.3, **kept), EMA(alpha=0.3), False),
        (stats.CAReducer(0.5, **kept), Mean("a -> a"), False),
        (general.PassthroughReducer(0.5, **kept), Last(), False),
        *(
            (general.EventReducer(0.5, positive, start, **kept), TimeSince(positive, 0.5, start), False)
            for start in ("inf", "zero", "nan")
        ),
        (
            trace.NearestTraceReducer(0.5, TAU, 2.0, 0.0, 0.5, **kept),
            NearestTrace(amplitude=2.0, target=0.0, tolerance=0.5, **time),
            False,
        ),
        (
            trace.CumulativeTraceReducer(0.5, TAU, 2.0, 0.0, 0.5, **kept),
            CumulativeTrace(amplitude=2.0, target=0.0, tolerance=0.5, **time),
            False,
        ),
        (
            trace.ScaledNearestTraceReducer(0.5, TAU, 2.0, 0.7, positive, **kept),
            ScaledNearestTrace(amplitude=2.0, scale=0.7, criterion=positive, **time),
            False,
        ),
        (
            trace.ScaledCumulativeTraceReducer(0.5, TAU, 2.0, 0.7, positive, **kept),
            ScaledCumulativeTrace(amplitude=2.0, scale=0.7, criterion=positive, **time),
            False,
        ),
        (
            trace.ConditionalNearestTraceReducer(0.5, TAU, 2.0, 0.7, **kept),
            ConditionalNearestTrace(amplitude=2.0, scale=0.7, **time),
            True,
        ),
        (
            trace.ConditionalCumulativeTraceReducer(0.5, TAU, 2.0, 0.7, **kept),
            ConditionalCumulativeTrace(amplitude=2.0, scale=0.7, **time),
            True,
        ),
    ]
    xs = [x.double() for x in observations()[:300]]
    times = torch.rand(8, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 4
    rows = []
    for theirs, ours, conditional in pairs:
        history, state = History(ours, 0.5, 4.0, True), {}
        for x in xs:
            inputs = (x, x > 0.5) if conditional else (x,)
            theirs(*inputs)
            state = history.update(state, *inputs)
        error = 0.0
        for a, b in ((theirs.dump(), history.dump(state)), (theirs.view(times), history.view(state, times))):
            assert isinstance(b, Tensor)
            assert torch.equal(a.isfinite(), b.isfinite())
            error = max(error, torch.where(a.isfinite(), a - b, 0.0).abs().max().item())
        kind = f"{type(ours).__name__}, {ours.initial}" if isinstance(ours, TimeSince) else type(ours).__name__
        what = f"History({kind}): absolute, dump and views"
        rows.append(row(what, "normal, 300 steps", error, 1e-12, f"inferno {type(theirs).__name__}"))
    torch.set_default_dtype(torch.float32)
    return rows


def main() -> None:
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what inferno imports is not ours to mend
        rows = [*recursions(), *selections(), *past(), *beside_inferno()]
    assert all(math.isfinite(one["error"]) for one in rows)
    write("accuracy_temporal", what="largest relative errors, unless absolute is told; a bound of 0: exact", rows=rows)


if __name__ == "__main__":
    main()
