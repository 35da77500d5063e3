"""What an update of 25 MB costs beside one busy process a core, as data-loader workers are, and while these processes are stopped.

An update that takes about as long as a slice of the scheduler is interrupted once or not at all: its median jumps between the two,
its mean does not. Quiet and busy phases are taken in turn. Other work on the machine makes both slower: run it on a machine with
nothing else to do.
Run: python benchmarks/load.py
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from measure import spread, write

from reducers import Extremes, Mean, Moments, Norm, Quantile, Reducer, Summary
from reducers.kernels.cpp.threads import ALONE_S

SHAPE = (64, 128, 768)
PHASES, ROUNDS = 25, 10  # a phase is one that lasts, as workers do: the loops learn from calls that waited
SETTLE_S = 0.02
KINDS = (Mean, Norm, Extremes, Moments, Summary, Quantile)


def functions() -> dict[str, Callable[[], Any]]:
    """What is timed, by name; the first is the yardstick."""
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    reducers: list[Reducer] = [kind() for kind in KINDS]
    states = {type(reducer).__name__: (reducer, reducer.update({}, x)) for reducer in reducers}
    updates = {name: lambda reducer=reducer, state=state: reducer.update(state, x) for name, (reducer, state) in states.items()}
    rectified, (quantile, counts) = x.relu(), states["Quantile"]
    return {"x.sum()": x.sum, **updates, "Quantile of a ReLU": lambda: quantile.update(counts, rectified)}


@contextmanager
def busy_processes() -> Iterator[Callable[[bool], None]]:
    """One process a core that computes without end, stopped at first; yields what starts them (True) and stops them (False)."""
    loop = [sys.executable, "-c", "while True: pass"]
    running = [subprocess.Popen(loop) for _ in range(os.cpu_count() or 1)]

    def switch(on: bool) -> None:
        for process in running:
            process.send_signal(signal.SIGCONT if on else signal.SIGSTOP)
        time.sleep(SETTLE_S if on else SETTLE_S + ALONE_S)

    try:
        switch(False)
        yield switch
    finally:
        for process in running:
            process.kill()
            process.wait()


def measured(threads: int) -> list[dict[str, Any]]:
    """Rows of each function with so many threads, quiet and busy."""
    torch.set_num_threads(threads)
    timed = functions()
    times: dict[tuple[str, bool], list[float]] = {(name, busy): [] for busy in (False, True) for name in timed}
    with busy_processes() as switch:
        for phase in range(2 * PHASES):
            switch(busy := phase % 2 == 1)
            for _ in range(ROUNDS):
                for name, function in timed.items():
                    function()
                    started = time.perf_counter()
                    function()
                    times[name, busy].append((time.perf_counter() - started) * 1e3)
    figures = {of: {**spread(spent), "mean": statistics.fmean(spent)} for of, spent in times.items()}
    floor = figures["x.sum()", False]["median"]
    rows = []
    for name in timed:
        quiet, busy = figures[name, False], figures[name, True]
        row = {"threads": threads, "what": name, "quiet": quiet, "busy": busy}
        ratios = {"x quiet": busy["median"] / quiet["median"], "x quiet, mean": busy["mean"] / quiet["mean"]}
        rows.append({**row, "x sum": quiet["median"] / floor, **ratios})
        for state, times_of in (("quiet", quiet), ("busy", busy)):
            print(f"{threads} threads {name:18} {state:6}", *(f"{key} {value:8.2f} ms" for key, value in times_of.items()))
    return rows


def main() -> None:
    rows = [row for threads in (1, os.cpu_count() or 1) for row in measured(threads)]
    write("load", rows=rows, busy_processes=os.cpu_count(), what="float32, 25 MB, everything reduced, time on the wall")


if __name__ == "__main__":
    main()
