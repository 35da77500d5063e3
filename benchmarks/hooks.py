"""What a monitor costs a call on a small layer: an empty hook, a monitor that is not due, and one that records.

Updates are amortised: what is put off to a later call, or to the reading of the result, is in the figure.
Run: python benchmarks/hooks.py
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from measure import alternate, spread, write
from torch import Tensor, nn

from recorders import BackwardMonitor, ForwardMonitor, Monitor, Recorder
from reducers import Mean, Moments, Norm, Product, Quantile, Summary

CALLS = 2_000
ROUNDS = 15
MONITORS: dict[str, Callable[[], Monitor]] = {
    "monitor not due (every=1000000)": lambda: ForwardMonitor(Summary(), every=1_000_000),
    "monitor of the other mode": lambda: ForwardMonitor(Summary(), train_update=False),
    "monitor not in its steps": lambda: ForwardMonitor(Summary(), steps=[1_000_000]),
    "Mean": lambda: ForwardMonitor(Mean()),
    "Norm": lambda: ForwardMonitor(Norm()),
    "Moments": lambda: ForwardMonitor(Moments()),
    "Quantile": lambda: ForwardMonitor(Quantile()),
    "Summary": lambda: ForwardMonitor(Summary()),
    "Summary, per feature": lambda: ForwardMonitor(Summary("b d -> d")),
    "Product(Norm, Summary)": lambda: ForwardMonitor(Product(norm=Norm(), summary=Summary())),
}
GRADIENTS: dict[str, Callable[[], Monitor]] = {
    "BackwardMonitor(Norm)": lambda: BackwardMonitor(Norm()),
    "BackwardMonitor(Summary)": lambda: BackwardMonitor(Summary()),
}


class Rig:
    """A layer, perhaps with something on it, and how long a call takes."""

    def __init__(self, put: Callable[[nn.Module], Any], backward: bool) -> None:
        self.layer = nn.Linear(64, 64)
        self.held, self.backward = put(self.layer), backward
        self.times: list[float] = []
        self.x = torch.randn(8, 64)
        self.gradient = torch.randn(8, 64)

    def run(self) -> None:
        """Microseconds a call, the reading of the result included."""
        started = time.perf_counter()
        if self.backward:
            for _ in range(CALLS // 4):
                self.layer(self.x).backward(self.gradient)
        else:
            with torch.no_grad():
                for _ in range(CALLS):
                    self.layer(self.x)
        if isinstance(self.held, Recorder) and self.held.samples[0]:
            self.held.compute()
        self.times.append((time.perf_counter() - started) / (CALLS // 4 if self.backward else CALLS) * 1e6)


def nothing(module: nn.Module, inputs: Any, output: Any) -> None:
    """An empty hook."""


def tensor_hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
    """A hook on the gradient, with nothing in it."""
    output.register_hook(lambda gradient: None)


def recording(make: Callable[[], Monitor]) -> Callable[[nn.Module], Recorder]:
    return lambda layer: Recorder(make()).modules(layer)


def rows(empty: str, bare: str, rigs: dict[str, Rig]) -> list[dict[str, Any]]:
    for rig in rigs.values():
        rig.run()
        rig.times.clear()
    for _ in range(ROUNDS):
        for rig in rigs.values():
            rig.run()
    figures = {name: spread(rig.times) for name, rig in rigs.items()}
    found = []
    for name, figure in figures.items():
        beyond = figure["median"] - figures[empty]["median"]
        ratio = beyond / figures[bare]["median"]
        extra = {"p10": figure["p10"], "p90": figure["p90"]}
        found.append(
            {"what": name, "us a call": figure["median"], **extra, "us beyond an empty hook": beyond, "x the bare call": ratio}
        )
        print(f"{name:36} {figure['median']:7.2f} us a call, {beyond:7.2f} beyond an empty hook, {ratio:6.2f} x the bare call")
    return found


def attaching() -> dict[str, float]:
    many = nn.Sequential(*[nn.Identity() for _ in range(10_000)])
    started = time.perf_counter()
    recorder = Recorder(ForwardMonitor(Mean())).children(many)
    attach = time.perf_counter() - started
    started = time.perf_counter()
    recorder.deregister()
    detach = time.perf_counter() - started
    print(f"10,000 monitors attached in {attach:.2f} s, taken off in {detach:.2f} s")
    return {"attach_10000_s": attach, "detach_10000_s": detach}


def parts() -> list[dict[str, Any]]:
    """What an update costs beside the one read of the tensor, in microseconds: it is the same for a tensor of any size."""
    x, mean, layer = torch.randn(16, 1024), Mean(), nn.Identity()
    monitor = ForwardMonitor(mean, layer)
    state = mean.update({}, x)
    works: dict[str, Callable[[], Any]] = {
        "the read itself, `x.sum()` of 64 KB": x.sum,
        "`Mean.update`: layout, lift, check that all is finite, merge": lambda: mean.update(state, x),
        "`ForwardMonitor(Mean())`: gates, modes kept off; the merge waits for 32 rows": lambda: layer(x),
    }
    found, before = [], 0.0
    for what, time_ in alternate(works, seconds=0.5, rounds=20_000).items():
        found.append({"what": what, "us": time_["median"] * 1e3, "us beyond the row before": time_["median"] * 1e3 - before})
        before = time_["median"] * 1e3
        print(f"{what:70} {before:7.2f} us")
    del monitor
    return found


def main() -> None:
    torch.set_num_threads(1)
    bare, empty = "bare Linear(64, 64)", "empty hook"
    puts = {bare: lambda layer: None, empty: lambda layer: layer.register_forward_hook(nothing)}
    puts.update({name: recording(make) for name, make in MONITORS.items()})
    found = rows(empty, bare, {name: Rig(put, backward=False) for name, put in puts.items()})
    bare, empty = "bare Linear(64, 64), forward and backward", "empty hook on the gradient"
    puts = {bare: lambda layer: None, empty: lambda layer: layer.register_forward_hook(tensor_hook)}
    puts.update({name: recording(make) for name, make in GRADIENTS.items()})
    found += rows(empty, bare, {name: Rig(put, backward=True) for name, put in puts.items()})
    what = "8x64 float32 through Linear(64, 64), one thread; forwards without gradients; amortised over a round with its reading"
    with torch.no_grad():
        shares = parts()
    write("hooks", rows=found, parts=shares, **attaching(), calls_a_round=CALLS, what=what)


if __name__ == "__main__":
    main()
