"""How close an update on a GPU comes to the speed of its memory, and what one recorded call costs: kernels, memory, waits.

An update is measured as part of a CUDA graph, so that the host does not matter; what it takes of the host stands beside it.
"""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from gpu_timing import QUICK, Effort, Findings, graphed, host_time, in_turn, kernels_of, peak_of, ratios, summary, without_waits
from torch import Tensor, nn

from recorders import ForwardMonitor, Recorder
from reducers import Activity, Digest, Extremes, Histogram, Mean, Moments, Norm, Quantile, Reducer, Sketch, Sparsity, Summary
from reducers.kernels.digests import DIGESTS

__all__ = ["LAYOUTS", "REDUCERS", "bandwidth", "calls", "hashes"]

BYTES = 1 << 28
"""Of a tensor whose bandwidth is measured: so many that the cache of the device does not hold it."""

GRAPH = 4
"""Updates of a CUDA graph."""

EFFORT = Effort(calls=2, seconds=0.03)

ROWS = 8192
"""Of the observation of a recorded call: 25 MB of float32."""

CALLS = 100
"""Recorded calls over which kernels are counted, with what is joined only now and then."""

SWEPT: dict[str, Callable[[str], Reducer]] = {
    "Summary": Summary,
    "Moments": Moments,
    "Moments(order=4)": lambda pattern: Moments(pattern, order=4),
    "Norm": Norm,
    "Mean": Mean,
    "Extremes": Extremes,
    "Quantile": Quantile,
    "Histogram": lambda pattern: Histogram(pattern, bins=100, low=-5.0, high=5.0),
}
REDUCERS: dict[str, Callable[[str], Reducer]] = {**SWEPT, "Sparsity": Sparsity, "Activity": Activity}

HASHED: dict[str, Reducer] = {"Digest": Digest(), "Sketch(k=64)": Sketch(64), "Sketch": Sketch(), "Sketch(k=4096)": Sketch(4096)}

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

# By name the pattern, and how an observation of so many elements, and of such a width, is made.
LAYOUTS: dict[str, tuple[str, Callable[[int, int, Any], Tensor]]] = {
    "everything": ("... ->", lambda count, width, options: torch.randn(count // width, width, **options)),
    "last axis kept": ("b d -> d", lambda count, width, options: torch.randn(count // width, width, **options)),
    "channels kept": ("b c h w -> c", lambda count, width, options: torch.randn(count // width // 64, width, 8, 8, **options)),
    "not contiguous": ("b d -> d", lambda count, width, options: torch.randn(count // width, 2 * width, **options)[:, 1::2]),
}


def bandwidth(found: Findings, device: torch.device, quick: bool) -> None:
    """Updates of a big tensor, as shares of a copy of it, and of `x.sum()`, which only reads; their numbers are checked first."""
    size, width, dtypes = (1 << 16, 64, DTYPES[:1]) if quick else (BYTES, 1024, DTYPES)
    if device.type == "cuda":
        _compile_ahead([(who, layout, dtype, size, width) for layout in LAYOUTS for dtype in dtypes for who in SWEPT])
    for layout, (pattern, make) in LAYOUTS.items():
        for dtype in dtypes:
            x = make(size // dtype.itemsize, width, {"dtype": dtype, "device": device})
            of = {"layout": layout, "dtype": str(dtype).removeprefix("torch.")}
            functions: dict[str, Callable[[], object]] = {"copy": x.clone, "x.sum()": x.sum}
            exact = _exact(x, pattern)
            for who, kind in SWEPT.items():
                function = found.tried(partial(_updating, kind(pattern), x, exact), **of, who=who)
                functions.update({who: function} if function else {})
            functions = found.working(functions, **of)
            host = {who: host_time(function) for who, function in functions.items()}
            graphs = {who: graphed(function, device, GRAPH) for who, function in functions.items()}
            times = in_turn(graphs, device, QUICK if quick else EFFORT)
            moved = GRAPH * x.numel() * x.element_size() / 1e6  # GB/s of a millisecond
            for who in [name for name in functions if name in SWEPT]:
                row = {
                    **of,
                    "who": who,
                    "ms": {name: value / GRAPH for name, value in summary(times[who]).items()},
                    "host us": host[who],
                    "host us of x.sum()": host["x.sum()"],
                    "GB/s": moved / summary(times[who])["median"],
                    "copy GB/s": 2 * moved / summary(times["copy"])["median"],
                    "of x.sum()": ratios(times["x.sum()"], times[who]),
                }
                row["of a copy"] = row["GB/s"] / row["copy GB/s"]
                shown = f"{row['GB/s']:.0f} GB/s, {row['of x.sum()']['median']:.0%} of x.sum(); {row['host us']:.0f} us of the host"
                found.add(row, shown)


def hashes(found: Findings, device: torch.device, quick: bool) -> None:
    """Digests and sketches of a big tensor, as multiples of `x.sum()`; that sketches are of all of it is checked first."""
    for dtype in DTYPES[:1] if quick else DTYPES:
        x = torch.randn((1 << 14 if quick else BYTES // dtype.itemsize), dtype=dtype, device=device)
        of = {"dtype": str(dtype).removeprefix("torch.")}
        functions: dict[str, Callable[[], object]] = {"x.sum()": x.sum}
        exact = _exact(x[None], "b d -> b")
        for who, reducer in HASHED.items():
            function = found.tried(partial(_hashing, reducer, x, exact), **of, who=who)
            functions.update({who: function} if function else {})
        host = {who: host_time(function) for who, function in functions.items()}
        graphs = {who: graphed(function, device, GRAPH) for who, function in functions.items()}
        times = in_turn(graphs, device, QUICK if quick else EFFORT)
        for who in [name for name in functions if name in HASHED]:
            row = {
                **of,
                "who": who,
                "ms": {name: value / GRAPH for name, value in summary(times[who]).items()},
                "host us": host[who],
                "host us of x.sum()": host["x.sum()"],
                "x sum": ratios(times[who], times["x.sum()"]),
            }
            found.add(row, f"{row['x sum']['median']:.2f} x x.sum(); {row['host us']:.0f} us of the host")


def _hashing(reducer: Reducer, x: Tensor, exact: Mapping[str, Tensor]) -> Callable[[], object]:
    """The update of one of `HASHED`. A digest is compared with that of plain operations.

    Of a sketch, norm, extremes and count are compared, and its length, which is that of `x`.
    """
    state = reducer.update({}, x)
    if isinstance(reducer, Digest):
        with patch.dict(DIGESTS, clear=True):
            assert torch.equal(state["digest"], reducer.update({}, x)["digest"]), "digest"
    if isinstance(reducer, Sketch):
        result: Any = reducer.compute(state)
        for key, wanted in {"norm": exact["squares"].sqrt(), "min": exact["min"], "max": exact["max"]}.items():
            torch.testing.assert_close(result[key], wanted[0].double(), rtol=1e-6, atol=0, msg=key)
        assert int(result["count"]) == x.numel(), "count"
        length = float(result["sketch"].square().sum() / exact["squares"][0])
        assert abs(length - 1) < 6 * (16 / 7 / reducer.k) ** 0.5, (
            f"the square of the length of the sketch is {length:.3f} of that of x"
        )
    return lambda: reducer.update(state, x)


def _exact(x: Tensor, pattern: str) -> dict[str, Tensor]:
    """What the results of an update are compared with: by plain operations in float64, a part of the tensor at a time."""
    axes = [axis for axis, name in enumerate(pattern.split("->")[0].split()) if name not in pattern.split("->")[1].split()]
    if "..." in pattern:
        axes = list(range(x.ndim))
    found: dict[str, Tensor] = {}
    for part in x.split(max(1, len(x) // 8)):
        wide = part.double()
        sums = {"sum": wide.sum(axes), "squares": wide.square().sum(axes), "min": wide.amin(axes), "max": wide.amax(axes)}
        joins = {"min": torch.minimum, "max": torch.maximum}
        found = {key: joins.get(key, torch.add)(found[key], value) if found else value for key, value in sums.items()}
    return {**found, "count": torch.tensor(x.numel() // found["sum"].numel(), device=x.device)}


def _checked(result: Any, exact: Mapping[str, Tensor]) -> None:
    """Raises AssertionError if the result of an update is not that of float64."""
    count = exact["count"]
    mean = exact["sum"] / count
    variance = (exact["squares"] - count * mean.square()) / (count - 1)
    named = result if isinstance(result, Mapping) else {}
    # Numbers of the benchmark are around 0, so that nothing cancels.
    wanted = {"var": variance, "std": variance.sqrt(), "min": exact["min"], "max": exact["max"], "count": count.expand_as(mean)}
    for key in named.keys() & wanted.keys():
        torch.testing.assert_close(named[key].double(), wanted[key].double(), rtol=1e-6, atol=1e-9, msg=key)
    if "mean" in named:
        torch.testing.assert_close(named["mean"], mean, rtol=0, atol=1e-6 * float(variance.max().sqrt()))
    if "counts" in named and "under" in named:
        counted = named["counts"].sum(-1) + named["under"] + named["over"] + named["nan"]
        assert counted.equal(wanted["count"]), "counts of bins"


def _updating(reducer: Reducer, x: Tensor, exact: Mapping[str, Tensor] | None = None) -> Callable[[], object]:
    state = reducer.update({}, x)
    if exact is not None:
        _checked(reducer.compute(state), exact)
        if isinstance(reducer, Norm):
            torch.testing.assert_close(reducer.compute(state), exact["squares"].sqrt(), rtol=1e-6, atol=0)
        if isinstance(reducer, Mean):
            _checked({"mean": reducer.compute(state)}, exact)
    return lambda: reducer.update(state, x)


def _compile_ahead(rows: list[tuple[Any, ...]]) -> None:
    """Compile kernels in several processes, which leave them in Triton's cache: in this one it would take minutes."""
    with multiprocessing.get_context("spawn").Pool(min(12, os.cpu_count() or 1)) as pool:
        pool.map(_compile, rows, chunksize=1)


def _compile(row: tuple[Any, ...]) -> None:
    who, layout, dtype, size, width = row
    pattern, make = LAYOUTS[layout]
    try:
        _updating(SWEPT[who](pattern), make(size // dtype.itemsize, width, {"dtype": dtype, "device": "cuda"}))()
    except Exception as problem:  # the row itself says so, too
        print(f"{who} over {layout}, {dtype}: {problem}", flush=True)


def calls(found: Findings, device: torch.device, quick: bool) -> None:
    """What one recorded call of a layer starts, takes and waits for; the call of the bare layer does nothing."""
    if device.type != "cuda":
        found.leave_out("launches, memory and waits are counted on a GPU only", who="all")
    x = torch.randn(64 if quick else ROWS, 768, device=device)
    for name, kind in REDUCERS.items():
        for pattern in ("b d -> d",) if quick else ("... ->", "b d -> d"):
            of = {"who": name, "pattern": pattern}
            found.tried(partial(_call, found, kind(pattern), x, 4 if quick else CALLS, of), **of)


def _call(found: Findings, reducer: Reducer, x: Tensor, number: int, of: dict[str, str]) -> None:
    layer = nn.Identity()
    recorder = Recorder(ForwardMonitor(reducer, on_error="raise")).modules(layer)

    def several() -> None:
        for _ in range(number):
            layer(x)
        assert recorder[0].states, "nothing was recorded"  # reduces what waits to be reduced together with others

    several()  # compiles what is called every time, and what is called only now and then
    if x.device.type != "cuda":
        found.add(dict(of), "runs")
        return
    waits = ""
    try:
        with without_waits():
            several()
    except Exception as problem:
        waits = str(problem).splitlines()[0]
    names, added = kernels_of(several), peak_of(several)
    row = {**of, "waits": waits, "added bytes": added, "launches": len(names) / number, "kernels": dict(Counter(names))}
    found.add(row, f"{row['launches']:.2f} launches, {added / 1e6:.2f} MB added, {f'waits: {waits}' if waits else 'no wait'}")
