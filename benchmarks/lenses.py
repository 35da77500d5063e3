"""What each lens adds to a training step: 20 small linear layers with ReLU, each with a weight and a bias, batches of 16.

Run: python benchmarks/lenses.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from measure import alternate, write
from torch import nn

from recorders import Inspector, lenses

STEPS = 20

LENSES: dict[str, Callable[[], lenses.Lens]] = {
    name: getattr(lenses, name)
    for name in (
        "OutputActivation",
        "OutputNorm",
        "OutputGradientGeometry",
        "ParameterNorm",
        "ParameterGradientGeometry",
        "ParameterGradientActivation",
        "ParameterUpdateGeometry",
        "UpdateRatio",
        "DeadUnits",
        "NonFinite",
        "Quantiles",
        "Outliers",
        "EffectiveRank",
    )
}


def training(lens: Callable[[], lenses.Lens] | None) -> Callable[[], Any]:
    """A function that takes `STEPS` steps."""
    torch.manual_seed(0)
    net = nn.Sequential(*(module for _ in range(20) for module in (nn.Linear(32, 32), nn.ReLU())))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    batch = torch.randn(16, 32)
    inspector = None if lens is None else Inspector(net, lens())

    def steps() -> Any:
        for _ in range(STEPS):
            optimizer.zero_grad()
            net(batch).square().mean().backward()
            optimizer.step()
        return inspector  # which lives as long as the function

    return steps


def main() -> None:
    torch.set_num_threads(1)
    found = alternate({"bare": training(None), **{name: training(lens) for name, lens in LENSES.items()}}, seconds=1.5)
    steps = {name: {key: value / STEPS for key, value in times.items()} for name, times in found.items()}
    bare = steps["bare"]["median"]
    print(f"a bare step takes {bare:.2f} ms")
    for name in LENSES:
        print(f"{name:28} adds {steps[name]['median'] - bare:6.2f} ms a step, {steps[name]['median'] / bare:.2f}x in all")
    write("lenses", milliseconds_a_step=steps)


if __name__ == "__main__":
    main()
