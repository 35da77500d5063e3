"""How cost grows: with layers (10 to 10,000), with updates (to 1,000,000) and with statistics a layer (1 to 20).

How it grows with the size of a tensor is in floor.py. Run: python benchmarks/growth.py
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import islice
from typing import Any

import torch
from measure import alternate, spread, write
from torch import Tensor, nn

from recorders import ForwardMonitor, Recorder
from reducers import Activity, Count, Max, Mean, Min, Moments, Norm, Product, Quantile, Reducer, Sparsity, Sum, Summary

LAYERS = (10, 100, 1_000, 10_000)
UPDATES = (1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000)
CALLS = 32
"""Forwards before a reading."""
WINDOW = 1_000
STATISTICS: dict[str, Reducer] = {
    "mean": Mean(),
    "max": Max(),
    "min": Min(),
    "norm": Norm(),
    "moments": Moments(),
    "sparsity": Sparsity(),
    "sum": Sum(),
    "count": Count(),
    "l1": Norm(p=1),
    "quantile": Quantile(),
    "summary": Summary(),
    "shape": Moments(order=4),
    "largest": Norm(p=float("inf")),
    "rms": Norm(normalize=True),
    "small": Sparsity(eps=0.1),
    "activity": Activity("... ->"),
    "l3": Norm(p=3),
    "nonzero": Norm(p=0),
    "skew": Moments(order=3),
    "population": Moments(correction=0),
}
"""Twenty, of which the first so many are taken."""
SHAPES = {"8x64": (8, 64), "2 MB": (64, 128, 64)}

Row = dict[str, Any]


def forwards(net: nn.Module, x: Tensor, recorder: Recorder | None = None) -> Callable[[], None]:
    """Some forwards, and what is put off until the results are read."""

    def run() -> None:
        for _ in range(CALLS):
            net(x)
        if recorder is not None:
            recorder.compute()

    return run


def by_layers() -> list[Row]:
    rows, x = [], torch.randn(8, 64)
    for count in LAYERS:
        bare, watched = (nn.Sequential(*(nn.Linear(64, 64) for _ in range(count))) for _ in range(2))
        started = time.perf_counter()
        recorder = Recorder(ForwardMonitor(Summary())).children(watched)
        attached = time.perf_counter() - started
        times = alternate({"bare": forwards(bare, x), "recorded": forwards(watched, x, recorder)}, rounds=50, least=2)
        each = (times["recorded"]["median"] - times["bare"]["median"]) / CALLS / count * 1e3
        rows.append({"layers": count, "ms a forward": _share(times, CALLS), "us a layer beyond bare": each, "attach s": attached})
        print(f"{count:6} layers: {each:7.2f} us a layer and call beyond the bare net, attached in {attached:.3f} s", flush=True)
    return rows


def by_updates() -> list[Row]:
    """What the last thousand updates of one monitor took, after so many."""
    layer, x, rows, done = nn.Identity(), torch.randn(8, 64), [], 0
    recorder = Recorder(ForwardMonitor(Summary())).modules(layer)
    for total in UPDATES:
        while done < total - WINDOW:
            layer(x)
            done += 1
        took = []
        for _ in range(10):
            started = time.perf_counter()
            for _ in range(WINDOW // 10):
                layer(x)
            took.append((time.perf_counter() - started) / WINDOW * 10 * 1e6)
        done += WINDOW
        rows.append({"updates": total, "us an update": spread(took)})
        print(f"{total:9,} updates: {rows[-1]['us an update']['median']:7.2f} us each at the end", flush=True)
    if recorder.samples[0] != UPDATES[-1]:
        raise RuntimeError(f"{recorder.samples[0]} of {UPDATES[-1]} updates were recorded")
    return rows


def by_statistics() -> list[Row]:
    rows = []
    for label, shape in SHAPES.items():
        x = torch.randn(shape)
        functions: dict[str, Callable[[], Any]] = {"x.sum()": x.sum}
        for count in (1, 2, 5, 10, 20):
            reducer = Product(**dict(islice(STATISTICS.items(), count)))
            state = reducer.update({}, x)
            functions[str(count)] = lambda reducer=reducer, state=state, x=x: reducer.update(state, x)
        times = alternate(functions, seconds=0.5, rounds=500)
        for count, figure in list(times.items())[1:]:
            ratios = {f"x {base}": figure["median"] / times[key]["median"] for base, key in (("floor", "x.sum()"), ("one", "1"))}
            rows.append({"observation": label, "statistics": int(count), "ms": figure, **ratios})
            print(f"{label:5} {count:>3} statistics: {figure['median']:7.3f} ms, {ratios['x one']:6.2f} x one", flush=True)
    return rows


def _share(times: dict[str, dict[str, float]], of: int) -> dict[str, dict[str, float]]:
    return {name: {key: value / of for key, value in figure.items()} for name, figure in times.items()}


def main() -> None:
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    write(
        "growth",
        layers=by_layers(),
        statistics=by_statistics(),
        updates=by_updates(),
        what="Summary of 8x64 outputs of Linear(64, 64), 32 forwards and the reading; one monitor; products; one thread",
    )


if __name__ == "__main__":
    main()
