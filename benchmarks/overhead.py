"""What `Recorder.overhead()` tells, against what recording truly costs, with a budget and without.

The truth is an A/B comparison within one process: the same net is trained in turn with its monitors and without them. For the steps
without them every hook of the monitors is taken out of the modules and the optimizers by the benchmark itself. Time is that of the
processor, on one thread, so that other programs of the machine disturb less. Run: python benchmarks/overhead.py
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from measure import write
from torch import Tensor, nn
from torch.optim import optimizer as optimizers

from recorders import BackwardMonitor, ForwardMonitor, Monitor, ParameterGradientMonitor, ParameterUpdateMonitor, Recorder
from reducers import Summary

BUDGET = 0.03
SECONDS = 5.0  # for each combination, but for the longest steps
MONITORS: dict[str, Callable[[], dict[str, Monitor]]] = {
    "outputs": lambda: {"out": ForwardMonitor(Summary())},
    "everything": lambda: {
        "out": ForwardMonitor(Summary()),
        "back": BackwardMonitor(Summary()),
        "grad": ParameterGradientMonitor(Summary()),
        "update": ParameterUpdateMonitor(Summary()),
    },
}


class Transformer(nn.Module):
    """Two blocks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.blocks(x))
        return y


def mlp(width: int, layers: int) -> nn.Module:
    return nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())), nn.Linear(width, 1))


# by the length of a step: how to make a net, and the shape of its batch
JOBS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "0.4 ms": (lambda: mlp(64, 3), (16, 64)),
    "2 ms": (lambda: mlp(256, 4), (32, 256)),
    "12 ms": (lambda: mlp(512, 5), (128, 512)),
    "100 ms": (lambda: Transformer(256), (8, 64, 256)),
    "1 s": (lambda: Transformer(512), (16, 128, 512)),
}


class Rig:
    """A net in training, with a recorder on it."""

    def __init__(self, job: str, monitors: str, budget: float | None) -> None:
        torch.manual_seed(0)
        make, shape = JOBS[job]
        self.net, self.batch = make(), torch.randn(*shape)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=1e-3)
        self.recorder = Recorder(**MONITORS[monitors](), budget=budget).modules(self.net, leaves=True).attach(self.optimizer)

    def run(self, steps: int) -> float:
        """Seconds of the processor."""
        started = time.process_time()
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.net(self.batch).square().mean().backward()
            self.optimizer.step()
        return time.process_time() - started

    @contextlib.contextmanager
    def bare(self) -> Iterator[None]:
        """Without anything of the recorder."""
        started = time.perf_counter()
        hooks: list[dict[int, Any]] = [optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks]
        for module in self.net.modules():
            hooks += [module._forward_hooks, module._forward_pre_hooks]
        kept = [dict(each) for each in hooks]
        for each in hooks:
            each.clear()
        try:
            yield
        finally:
            for each, before in zip(hooks, kept, strict=True):
                each.update(before)
            meter, away = self.recorder._meter, time.perf_counter() - started
            if (step := meter._step) is not None:  # the step that is being measured did not go on meanwhile
                meter._step = step._replace(before=step.before + away, began=step.began + away)


def measured(job: str, monitors: str, budget: float | None, seconds: float) -> dict[str, Any]:
    rig = Rig(job, monitors, budget)
    rig.run(2)
    step = rig.run(2) / 2
    block = max(1, min(100, int(0.03 / step)))
    warm = 12 if step > 0.3 else int(seconds / 4 / step) + 50  # until the cadence is chosen
    if budget is None:
        rig.recorder.overhead()  # asks for it: 64 steps are measured, and not those that show the truth
        warm = 8 if step > 0.3 else 66
    rig.run(min(warm, 4000))
    told, pairs, ended = [], [], time.perf_counter() + seconds
    while time.perf_counter() < ended or len(pairs) < 2:
        steps = max(2 * block, rig.recorder.clock.cadence if step > 0.3 else 0)  # of long ones at least one that records
        with rig.bare():
            bare = rig.run(block)
        both = rig.run(steps)
        with rig.bare():
            bare += rig.run(block)
        pairs.append((both / steps, bare / block / 2))
        if budget is not None:
            told.append(rig.recorder.overhead().share)
    middle = sorted(bare for _, bare in pairs)[len(pairs) // 2]
    good = [pair for pair in pairs if pair[1] < 1.3 * middle]
    with_them, without = (sum(times) for times in zip(*good, strict=True))
    cost = rig.recorder.overhead()
    told = told or [cost.share]
    return {
        "step": job,
        "monitors": monitors,
        "budget": budget,
        "bare_ms": without / len(good) * 1e3,
        "true": 1 - without / with_them,
        "told": sum(told) / len(told),
        "every_step": cost.every_step,
        "steps": rig.recorder.clock.step,
        "measured steps": cost.steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--steps", nargs="*", default=list(JOBS))
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for job in chosen.steps:
        for monitors in MONITORS:
            for budget in (None, BUDGET):
                rows.append(row := measured(job, monitors, budget, chosen.seconds))
                print(
                    f"{job:>7} ({row['bare_ms']:8.2f} ms) {monitors:10} budget {budget}: true {100 * row['true']:5.1f} %, "
                    f"told {100 * row['told']:5.1f} %, one in {row['every_step']}, {row['steps']} steps",
                    flush=True,
                )
    if chosen.steps == list(JOBS) and chosen.seconds >= SECONDS:
        write("overhead", rows=rows)


if __name__ == "__main__":
    main()
