"""How much resident memory a long training grows by with everything recorded.

Run: python benchmarks/memory.py [steps]
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

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


def main() -> None:
    torch.set_num_threads(1)
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else STEPS
    figures = growth(steps)
    print(f"{steps:,} steps: " + ", ".join(f"{name} {value:.1f}" for name, value in figures.items()))
    if steps >= STEPS:
        write("soak", steps=steps, **figures, what="a small net trained with every kind of monitor; after a warm-up of 2,000 steps")


if __name__ == "__main__":
    main()
