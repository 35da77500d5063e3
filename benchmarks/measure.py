"""How the benchmarks measure: medians of repeated runs, ratios within one process, results as JSON with their machine.

Results are written into `results/`, or into the folder that the environment variable BENCHMARK_RESULTS names: to try something
without replacing what the documents show.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

__all__ = ["RESULTS", "alternate", "machine", "spread", "versions", "write"]

RESULTS = Path(os.environ.get("BENCHMARK_RESULTS") or Path(__file__).parent / "results")


def alternate(
    functions: dict[str, Callable[[], Any]], *, seconds: float = 1.0, rounds: int = 200, least: int = 5, burst: float = 0.0
) -> dict[str, dict[str, float]]:
    """Times the functions in turn, round after round, so that a drifting machine slows all of them alike.

    Each takes part until it has had its `seconds` and at least `least` rounds, or `rounds` of them; so slow ones leave early.

    Args:
        burst: seconds for which a function is called again and again in its turn, after a first call that is not timed: nets that
            take turns evict each other's weights from the caches, which one that is trained alone finds there. What takes longer
            than half of it is called once.

    Returns:
        by name the median, the tenth and the ninetieth percentile, in milliseconds.
    """
    for function in functions.values():
        started = time.perf_counter()
        function()
        if time.perf_counter() - started < seconds:
            function()
    calls = {name: _calls_in(burst, function) if burst else 1 for name, function in functions.items()}
    spent: dict[str, list[float]] = {name: [] for name in functions}
    running = dict(functions)
    while running:
        for name, function in list(running.items()):
            if calls[name] > 1:
                function()
            started = time.perf_counter()
            for _ in range(calls[name]):
                function()
            spent[name].append((time.perf_counter() - started) * 1e3 / calls[name])
            turns = len(spent[name])
            if turns >= rounds or (turns >= least and calls[name] * sum(spent[name]) > seconds * 1e3):
                del running[name]
    return {name: spread(times) for name, times in spent.items()}


def _calls_in(burst: float, function: Callable[[], Any]) -> int:
    started = time.perf_counter()
    function()
    return max(1, int(burst / (time.perf_counter() - started)))


def spread(figures: list[float]) -> dict[str, float]:
    """The median, the tenth and the ninetieth percentile."""
    tenths = statistics.quantiles(figures, n=10, method="inclusive")
    return {"median": statistics.median(figures), "p10": tenths[0], "p90": tenths[-1]}


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


def versions(*packages: str) -> dict[str, str]:
    """Of packages, as they are installed; those that are not are left out."""
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def write(name: str, **results: Any) -> Path:
    """Writes `results/name.json` and returns its path."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": machine(), **results}, indent=1) + "\n")
    return path
