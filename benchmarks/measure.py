"""How the benchmarks measure: medians of repeated runs, ratios within one process, results as JSON with their machine."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

__all__ = ["RESULTS", "alternate", "machine", "write"]

RESULTS = Path(__file__).parent / "results"


def alternate(functions: dict[str, Callable[[], Any]], *, seconds: float = 1.0, rounds: int = 200) -> dict[str, dict[str, float]]:
    """Times the functions in turn, round after round, so that a drifting machine slows all of them alike.

    Returns:
        by name the median, the tenth and the ninetieth percentile, in milliseconds.
    """
    for function in functions.values():
        function()
        function()
    spent: dict[str, list[float]] = {name: [] for name in functions}
    end = time.perf_counter() + seconds * len(functions)
    for turn in range(rounds):
        for name, function in functions.items():
            started = time.perf_counter()
            function()
            spent[name].append((time.perf_counter() - started) * 1e3)
        if turn >= 4 and time.perf_counter() > end:
            break
    return {
        name: {
            "median": statistics.median(times),
            **dict(zip(("p10", "p90"), statistics.quantiles(times, n=10, method="inclusive")[::8], strict=True)),
        }
        for name, times in spent.items()
    }


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "processor": next(
            (line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")), platform.processor()
        ),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
    }


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def write(name: str, **results: Any) -> Path:
    """Writes `results/name.json` and returns its path."""
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": machine(), **results}, indent=1) + "\n")
    return path
