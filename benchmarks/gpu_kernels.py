"""How close an update on a GPU comes to the speed of its memory, and what one recorded call costs: kernels, memory, waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from gpu_timing import QUICK, Effort, Findings, in_turn, kernels_of, peak_of, ratios, without_waits
from measure import spread
from torch import Tensor, nn

from recorders import ForwardMonitor, Recorder
from reducers import Activity, Extremes, Histogram, Mean, Moments, Norm, Quantile, Reducer, Sparsity, Summary

__all__ = ["LAYOUTS", "REDUCERS", "bandwidth", "calls"]

BYTES = 1 << 29
"""Of a tensor whose bandwidth is measured: so many that neither its cache nor the host hides what the device does."""

EFFORT = Effort(calls=5, seconds=0.5)

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

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

# By name the pattern, and how an observation of so many elements, and of such a width, is made.
LAYOUTS: dict[str, tuple[str, Callable[[int, int, Any], Tensor]]] = {
    "everything": ("... ->", lambda count, width, options: torch.randn(count // width, width, **options)),
    "last axis kept": ("b d -> d", lambda count, width, options: torch.randn(count // width, width, **options)),
    "channels kept": ("b c h w -> c", lambda count, width, options: torch.randn(count // width // 64, width, 8, 8, **options)),
    "not contiguous": ("b d -> d", lambda count, width, options: torch.randn(count // width, 2 * width, **options)[:, 1::2]),
}


def bandwidth(found: Findings, device: torch.device, quick: bool) -> None:
    """Updates of a big tensor, as shares of a copy of it, and of `x.sum()`, which only reads."""
    size, width, dtypes = (1 << 16, 64, DTYPES[:1]) if quick else (BYTES, 1024, DTYPES)
    for layout, (pattern, make) in LAYOUTS.items():
        for dtype in dtypes:
            x = make(size // dtype.itemsize, width, {"dtype": dtype, "device": device})
            of = {"layout": layout, "dtype": str(dtype).removeprefix("torch.")}
            functions: dict[str, Callable[[], object]] = {"copy": x.clone, "x.sum()": x.sum}
            for who, kind in SWEPT.items():
                function = found.tried(partial(_updating, kind(pattern), x), **of, who=who)
                functions.update({who: function} if function else {})
            functions = found.working(functions, **of)
            times = in_turn(functions, device, QUICK if quick else EFFORT)
            moved = x.numel() * x.element_size() / 1e6  # GB/s of a millisecond
            for who in [name for name in functions if name in SWEPT]:
                row = {
                    **of,
                    "who": who,
                    "ms": spread(times[who]),
                    "GB/s": moved / spread(times[who])["median"],
                    "copy GB/s": 2 * moved / spread(times["copy"])["median"],
                    "of x.sum()": ratios(times["x.sum()"], times[who]),
                }
                row["of a copy"] = row["GB/s"] / row["copy GB/s"]
                shown = f"{row['GB/s']:.0f} GB/s, {row['of a copy']:.0%} of a copy, {row['of x.sum()']['median']:.0%} of x.sum()"
                found.add(row, shown)


def _updating(reducer: Reducer, x: Tensor) -> Callable[[], object]:
    state = reducer.update({}, x)
    return lambda: reducer.update(state, x)


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
