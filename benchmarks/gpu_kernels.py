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

CALLS = 50
"""Recorded calls over which kernels are counted, so that what is joined only now and then has its share."""

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
    size, width, dtypes = (1 << 16, 64, DTYPES[:2]) if quick else (BYTES, 1024, DTYPES)
    for layout, (pattern, make) in LAYOUTS.items():
        for dtype in dtypes:
            x = make(size // dtype.itemsize, width, {"dtype": dtype, "device": device})
            of = {"layout": layout, "dtype": str(dtype).removeprefix("torch.")}
            functions = {name: _updating(kind(pattern), x) for name, kind in SWEPT.items()}
            functions = found.working({"copy": x.clone, "x.sum()": x.sum, **functions}, **of)
            times = in_turn(functions, device, QUICK if quick else EFFORT)
            moved = x.numel() * x.element_size() / 1e6  # GB/s of a millisecond
            for who in SWEPT.keys() & times.keys():
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
        for pattern in ("... ->", "b d -> d"):
            of = {"who": name, "pattern": pattern}
            found.tried(partial(_call, found, kind(pattern), x, 4 if quick else CALLS, of), **of)


def _call(found: Findings, reducer: Reducer, x: Tensor, number: int, of: dict[str, str]) -> None:
    layer = nn.Identity()
    Recorder(ForwardMonitor(reducer, on_error="raise")).modules(layer)

    def several() -> None:
        for _ in range(number):
            layer(x)

    several()  # compiles what is called every time, and what is called only now and then
    waited = ""
    try:
        with without_waits(x.device):
            several()
    except RuntimeError as problem:
        waited = str(problem).splitlines()[0]
    row: dict[str, Any] = {**of, "waits": waited, "added bytes": peak_of(several, x.device)}
    if x.device.type == "cuda":
        names = kernels_of(several)
        row.update({"launches": len(names) / number, "kernels": dict(Counter(names))})
    launched = f"{row['launches']:.2f} launches, " if "launches" in row else ""
    found.add(row, f"{launched}{row['added bytes'] / 1e6:.2f} MB added, {f'waits: {waited}' if waited else 'no wait'}")
