"""What `attach(optimizer)` alone adds to an optimizer step in which nothing is recorded: SGD on a layer of six parameters.

The hooks on optimizers are those of the whole process, so the bare steps are run with these hooks taken out by the benchmark.
Run: python benchmarks/attach.py
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from measure import spread, write
from torch import nn
from torch.optim import optimizer as optimizers

from recorders import Clock, ForwardMonitor, Recorder
from reducers import Mean

STEPS, ROUNDS = 2_000, 31


def clock(net: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return Clock().attach(optimizer)


def recorder(budget: float | None) -> Callable[[nn.Module, torch.optim.Optimizer], Any]:
    def attach(net: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        return Recorder(ForwardMonitor(Mean(), every_step=1_000_000_000), budget=budget).modules(net).attach(optimizer)

    return attach


WAYS = {
    "a clock": clock,
    "a recorder": recorder(None),
    "a recorder with a budget": recorder(0.03),
}


class Rig:
    """An optimizer with something attached to it."""

    def __init__(self, attach: Callable[[nn.Module, torch.optim.Optimizer], Any]) -> None:
        self.net = nn.Linear(2, 2)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=1e-3)
        self.net(torch.ones(1, 2)).sum().backward()
        self.attached = attach(self.net, self.optimizer)
        self.run(400)  # with a budget the first steps are measured

    def run(self, steps: int = STEPS) -> float:
        """Microseconds a step."""
        started = time.perf_counter()
        for _ in range(steps):
            self.optimizer.step()
        return (time.perf_counter() - started) / steps * 1e6

    def bare(self) -> float:
        """The same without the hooks."""
        hooks: list[dict[int, Any]] = [optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks]
        kept = [dict(each) for each in hooks]
        for each in hooks:
            each.clear()
        try:
            return self.run()
        finally:
            for each, before in zip(hooks, kept, strict=True):
                each.update(before)


def main() -> None:
    torch.set_num_threads(1)
    rows = []
    for name, attach in WAYS.items():
        rig = Rig(attach)
        bare, attached = zip(*[(rig.bare(), rig.run()) for _ in range(ROUNDS)], strict=True)
        added = spread([with_it - without for with_it, without in zip(attached, bare, strict=True)])
        row = {"what": name, "bare us": spread(list(bare))["median"], "added us": added["median"], **added}
        rows.append(row)
        print(f"{name:42} adds {added['median']:5.2f} us to a step of {row['bare us']:5.2f} us", flush=True)
    write("attach", rows=rows)


if __name__ == "__main__":
    main()
