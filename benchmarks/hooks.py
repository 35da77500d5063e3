"""What a monitor costs a call on a small layer: an empty hook, a monitor that is not due, and one that records.

Run: python benchmarks/hooks.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from measure import write
from torch import nn

from recorders import ForwardMonitor, Monitor, Recorder
from reducers import Mean, Moments, Norm, Summary

CALLS = 2_000
ROUNDS = 15

MONITORS: dict[str, Callable[[], Monitor]] = {
    "monitor not due (every=1000000)": lambda: ForwardMonitor(Summary(), every=1_000_000),
    "monitor of the other mode": lambda: ForwardMonitor(Summary(), train_update=False),
    "Mean": lambda: ForwardMonitor(Mean()),
    "Norm": lambda: ForwardMonitor(Norm()),
    "Moments": lambda: ForwardMonitor(Moments()),
    "Summary": lambda: ForwardMonitor(Summary()),
}


def per_call(layer: nn.Module, x: torch.Tensor) -> float:
    """Microseconds a call."""
    started = time.perf_counter()
    for _ in range(CALLS):
        layer(x)
    return (time.perf_counter() - started) / CALLS * 1e6


def main() -> None:
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    x = torch.randn(8, 64)
    layers: dict[str, nn.Module] = {"bare Linear(64, 64)": nn.Linear(64, 64), "empty hook": nn.Linear(64, 64)}
    layers["empty hook"].register_forward_hook(lambda module, inputs, output: None)
    recorders = []
    for name, make in MONITORS.items():
        layers[name] = nn.Linear(64, 64)
        recorders.append(Recorder(make()).modules(layers[name]))
        layers[name](x)
    spent: dict[str, list[float]] = {name: [] for name in layers}
    for _ in range(ROUNDS):
        for name, layer in layers.items():
            spent[name].append(per_call(layer, x))
    medians = {name: statistics.median(times) for name, times in spent.items()}
    bare, empty = medians["bare Linear(64, 64)"], medians["empty hook"]
    rows = []
    for name, median in medians.items():
        beyond = median - empty
        rows.append({"what": name, "us a call": median, "us beyond an empty hook": beyond, "x the bare call": beyond / bare})
        print(f"{name:34} {median:7.2f} us a call, {beyond:7.2f} beyond an empty hook, {beyond / bare:6.2f} x the bare call")
    many = nn.Sequential(*[nn.Identity() for _ in range(10_000)])
    started = time.perf_counter()
    recorder = Recorder(ForwardMonitor(Mean())).children(many)
    attach = time.perf_counter() - started
    started = time.perf_counter()
    recorder.deregister()
    detach = time.perf_counter() - started
    print(f"10,000 monitors attached in {attach:.2f} s, taken off in {detach:.2f} s")
    write(
        "hooks",
        rows=rows,
        attach_10000_s=attach,
        detach_10000_s=detach,
        what="8x64 float32 through Linear(64, 64), one thread, no grad",
    )


if __name__ == "__main__":
    main()
