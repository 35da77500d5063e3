"""What `Summary` on every leaf module costs a whole network: forwards and training steps, eager and inside `torch.compile`.

Graphs, graph breaks and recompiles are those of the compiler's own counters over 20 steps.
Run: python benchmarks/compiled.py [name of a network]
"""

from __future__ import annotations

import copy
import sys
import time
import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from measure import alternate, write
from torch import Tensor, nn
from torch._dynamo.utils import counters

from recorders import BackwardMonitor, ForwardMonitor, Recorder
from reducers import Quantile, Summary

STEPS = 20
"""Steps over which graphs are counted."""

BARE = "bare"
Row = dict[str, Any]


def forwards(net: nn.Module) -> Recorder:
    return Recorder(out=ForwardMonitor(Summary())).modules(net, leaves=True)


def quantiles(net: nn.Module) -> Recorder:
    return Recorder(out=ForwardMonitor(Quantile())).modules(net, leaves=True)


def both_ways(net: nn.Module) -> Recorder:
    return Recorder(out=ForwardMonitor(Summary()), grad=BackwardMonitor(Summary())).modules(net, leaves=True)


MODES: dict[str, dict[str, Callable[[nn.Module], Recorder | None]]] = {
    "forward": {BARE: lambda net: None, "Summary of outputs": forwards, "Quantile of outputs": quantiles},
    "training step": {BARE: lambda net: None, "Summary of outputs": forwards, "Summary of outputs and gradients": both_ways},
}
"""By what is timed, and by name: what puts monitors on a network. The first is what the others are compared with."""


class Block(nn.Module):
    """Seven leaf modules: attention and a feed-forward part, each with its norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2, self.up, self.act, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(self.act(self.up(self.norm2(x))))


def cnn() -> tuple[nn.Module, Tensor]:
    """NCHW: six blocks of convolution, batch norm and ReLU, and a head: 21 leaf modules."""
    channels, layers = (3, 32, 32, 64, 64, 128, 128), []
    for index, (before, after) in enumerate(pairwise(channels)):
        layers += [nn.Conv2d(before, after, 3, stride=1 + index % 2, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)), torch.randn(16, 3, 64, 64)


def sized(width: int, batch: int, length: int) -> Callable[[], tuple[nn.Module, Tensor]]:
    """A transformer of six layers, 44 leaf modules, and a batch of sequences."""

    def make() -> tuple[nn.Module, Tensor]:
        blocks = (Block(width, width // 64) for _ in range(6))
        return nn.Sequential(nn.Linear(64, width), *blocks, nn.LayerNorm(width)), torch.randn(batch, length, 64)

    return make


MANY_SIZES = "transformer of width 256, 4 x 64 tokens, compiled for all sizes"

NETWORKS = {
    "transformer": sized(768, 4, 64),
    "transformer of width 768, 8 x 128 tokens": sized(768, 8, 128),
    "transformer of width 256, 16 x 128 tokens": sized(256, 16, 128),
    "transformer of width 256, 1 x 16 tokens": sized(256, 1, 16),
    MANY_SIZES: sized(256, 4, 64),
    "cnn": cnn,
}


def separate(net: nn.Module) -> Callable[[Tensor], Tensor]:
    """A function with code of its own: the compiler keeps graphs by code object, and several nets of a class would share them."""

    def call(x: Tensor) -> Tensor:
        result: Tensor = net(x)
        return result

    call.__code__ = call.__code__.replace()
    return call


def stepping(call: Callable[[Tensor], Tensor], net: nn.Module, x: Tensor, what: str) -> Callable[[], None]:
    if what == "forward":

        def forward() -> None:
            with torch.no_grad():
                call(x)

        return forward
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)

    def train() -> None:
        optimizer.zero_grad()
        torch.autograd.backward(call(x).square().mean())
        optimizer.step()

    return train


def counted(step: Callable[[], None]) -> Row:
    """The first steps of a compiled function."""
    counters.clear()
    started = time.perf_counter()
    step()
    first = time.perf_counter() - started
    for _ in range(STEPS - 1):
        step()
    graphs, breaks, anew = counters["stats"]["unique_graphs"], counters["graph_break"], counters["recompiles"]
    return {"first call s": first, "graphs": graphs, "graph breaks": sum(breaks.values()), "recompiles": sum(anew.values())}


def rows(network: str) -> list[Row]:
    found = []
    torch.manual_seed(0)
    net, x = NETWORKS[network]()
    leaves = sum(1 for module in net.modules() if not list(module.children()))
    for what, modes in MODES.items():
        functions: dict[str, Callable[[], None]] = {}
        told: dict[str, Row] = {}
        held: dict[str, Recorder | None] = {}
        for execution in ("compiled",) if network == MANY_SIZES else ("eager", "compiled"):
            for mode, put in modes.items():
                own, name = copy.deepcopy(net), f"{execution}, {mode}"
                held[name] = put(own)
                call = separate(own)
                # The compiler remembers the sizes of earlier networks, and would make those of the next one dynamic.
                run = torch.compile(call, dynamic=network == MANY_SIZES) if execution == "compiled" else call
                step = stepping(run, own, x, what)
                told[name] = {"network": network, "leaf modules": leaves, "what": what, "execution": execution, "mode": mode}
                if execution == "compiled":
                    told[name].update(counted(step))
                functions[name] = step
        times = alternate(functions, seconds=2.0, rounds=100, least=12, burst=0.05)
        for name, row in told.items():
            ratio = times[name]["median"] / times[f"{row['execution']}, {BARE}"]["median"]
            silent = [] if held[name] is None else held[name].report().silent
            if silent:
                raise RuntimeError(f"{network}, {what}, {name}: nothing was recorded by {[row.name for row in silent]}")
            found.append({**row, "ms": times[name], "x bare": ratio})
            graphs = (
                f", {row['graphs']} graphs, {row['graph breaks']} breaks, {row['recompiles']} recompiles" if "graphs" in row else ""
            )
            first = f", first call {row['first call s']:.1f} s" if "graphs" in row else ""
            print(
                f"{network:12} {what:14} {name:44} {times[name]['median']:8.2f} ms  {ratio:5.2f} x bare{graphs}{first}", flush=True
            )
    return found


def main() -> None:
    warnings.filterwarnings("ignore", module="torch")  # the compiler's own, about the machine
    names = sys.argv[1:] or list(NETWORKS)
    found = [row for name in names for row in rows(name)]
    if names == list(NETWORKS):
        write("compiled", rows=found, steps_counted=STEPS, what="float32; 4 x 64 tokens of width 768, 16 images of 64 x 64; SGD")


if __name__ == "__main__":
    main()
