"""How much memory recording takes: what a long training grows by, what many updates do, and the peak of one update.

Run: python benchmarks/memory.py [steps], python benchmarks/memory.py updates, python benchmarks/memory.py peak
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import write
from torch import nn

from recorders import (
    BackwardInputMonitor,
    BackwardMonitor,
    DifferenceMonitor,
    ForwardInputMonitor,
    ForwardMonitor,
    OptimizerStateMonitor,
    ParameterGradientMonitor,
    ParameterMonitor,
    ParameterUpdateMonitor,
    Recorder,
)
from reducers import EMA, Last, Mean, Moments, Quantile, Reducer, Summary

STEPS = 100_000
WARM_UP = 2_000
UPDATES = 1_000_000
BATCHES = (4, 3, 1)  # sizes that change, so that the allocator is not handed the same blocks every time


def resident() -> float:
    """Resident memory of this process, in MB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def growth(steps: int) -> dict[str, float]:
    """Trains a small net so many steps with every kind of monitor on it.

    Returns:
        resident memory in MB after the warm-up, at its highest after that, and by how much it grew to the end.
    """
    torch.manual_seed(0)
    reducer: Reducer = Mean()
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Linear(4, 2))
    net[1].eval()  # batches of one
    optimizer = torch.optim.Adam(net.parameters())
    recorders = [
        Recorder(
            out=ForwardMonitor(Summary()), ema=ForwardMonitor(EMA("b c -> c", alpha=0.1)), inp=ForwardInputMonitor(Last())
        ).modules(net),
        Recorder(out=BackwardMonitor(Moments()), inp=BackwardInputMonitor(reducer)).modules(net, leaves=True, exclude="0"),
        Recorder(value=ParameterMonitor(reducer), grad=ParameterGradientMonitor(Quantile())).modules(net, types=nn.Linear),
        Recorder(update=ParameterUpdateMonitor(reducer), kept=OptimizerStateMonitor(reducer, "exp_avg")).parameters(net),
        Recorder(DifferenceMonitor(reducer, "running_mean")).modules(net, types=nn.BatchNorm1d),
    ]
    batches = [torch.randn(size, 4) for size in BATCHES]
    start = highest = 0.0
    for step in range(WARM_UP + steps):
        if step == WARM_UP:
            start = resident()
        optimizer.zero_grad()
        net(batches[step % len(batches)]).square().mean().backward()
        optimizer.step()
        if step >= WARM_UP and step % 1_000 == 0:
            highest = max(highest, resident())
    end = resident()
    silent = [row.name for recorder in recorders for row in recorder.report().silent]
    if silent:
        raise RuntimeError(f"nothing was recorded by {silent}")
    return {"start MB": start, "highest MB": max(highest, end), "growth MB": end - start}


def updates() -> dict[str, float]:
    """One monitor, updated a million times: resident memory in MB after the first hundredth, its highest after that, and growth."""
    layer, batches = nn.Identity(), [torch.randn(size, 64) for size in BATCHES]
    recorder = Recorder(ForwardMonitor(Summary("b d -> d"))).modules(layer)
    start = highest = 0.0
    for update in range(UPDATES):
        layer(batches[update % len(batches)])
        if update == UPDATES // 100:
            start = resident()
        elif update % 10_000 == 0:
            highest = max(highest, resident())
    if recorder.samples[0] != UPDATES:
        raise RuntimeError(f"{recorder.samples[0]} of {UPDATES} updates were recorded")
    recorder.compute()
    return {"updates": UPDATES, "start MB": start, "highest MB": highest, "growth MB": resident() - start}


LAYOUTS = {"per tensor": "... ->", "per feature": "b ... d -> d"}
SIZES = (25, 100, 400)
REDUCERS: dict[str, Callable[[str], Reducer]] = {
    "Summary": Summary,
    "Moments": Moments,
    "Quantile": lambda pattern: Quantile(pattern, low=1e-6, high=1e6),
}
PLAIN = "plain PyTorch, eight statistics"


def plain(x: torch.Tensor, pattern: str) -> tuple[torch.Tensor, ...]:
    """What one would write without this library."""
    dims = tuple(range(x.ndim - (pattern != "... ->")))
    ends = x.amin(dims), x.amax(dims), torch.linalg.vector_norm(x, torch.inf, dims)
    return (*ends, x.mean(dims), x.var(dims), (x == 0).sum(dims), x.isnan().sum(dims), x.isinf().sum(dims))


def peak(reducer: str, layout: str, size: int) -> float:
    """MB beyond what was resident before one update of an activation of `size` MB; in a process of its own."""
    pattern = LAYOUTS[layout]
    x = torch.randn(size * 1_000_000 // (4 * 128 * 768), 128, 768)
    layer = nn.Identity()
    if reducer == PLAIN:
        layer.register_forward_hook(lambda module, inputs, output: held.append(plain(output, pattern)))
    held: list[Any] = [] if reducer == PLAIN else [Recorder(ForwardMonitor(REDUCERS[reducer](pattern))).modules(layer)]
    layer(x[:16])  # what is loaded once, by all threads
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # free memory that the allocator holds would hide what is asked for
    before = resident()
    Path("/proc/self/clear_refs").write_text("5")  # the highest so far is what is resident now
    layer(x)
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024 / 1e6 - before


def peaks() -> list[dict[str, Any]]:
    rows = []
    for layout in LAYOUTS:
        for reducer in (*REDUCERS, PLAIN):
            for size in SIZES:
                command = [sys.executable, __file__, "peak", reducer, layout, str(size)]
                found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
                rows.append({"layout": layout, "reducer": reducer, "activation MB": size, "peak MB": found})
                print(f"{layout:12} {reducer:32} {size:4} MB activation: {found:7.1f} MB more at the peak", flush=True)
    return rows


def main() -> None:
    if sys.argv[1:2] == ["peak"]:
        if len(sys.argv) > 2:
            print(json.dumps(peak(sys.argv[2], sys.argv[3], int(sys.argv[4]))))
        else:
            what = (
                "resident memory at its highest in one update of a monitor, beyond that before it, the activation included in both"
            )
            write("memory_peak", rows=peaks(), what=what)
        return
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["updates"]:
        told = updates()
        print(", ".join(f"{name} {value:,.1f}" for name, value in told.items()))
        write(
            "memory_updates", **told, what="one monitor, Summary per feature of 1 to 4 rows of 64; after the first 10,000 updates"
        )
        return
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else STEPS
    figures = growth(steps)
    print(f"{steps:,} steps: " + ", ".join(f"{name} {value:.1f}" for name, value in figures.items()))
    if steps >= STEPS:
        write("soak", steps=steps, **figures, what="a small net trained with every kind of monitor; after a warm-up of 2,000 steps")


if __name__ == "__main__":
    main()
