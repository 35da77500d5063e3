"""What monitors of all parameters cost a step, against `torch.nn.utils.clip_grad_norm_` over the same parameters.

On a transformer of six layers, and on many small parameters, where the cost of a call is everything. A step of the optimizer does
nothing here, so that only what is recorded in it is measured, with all that recorders do around a step.
Run: python benchmarks/parameters.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from measure import spread, write
from torch import nn

from recorders import Monitor, OptimizerStateMonitor, ParameterGradientMonitor, ParameterMonitor, ParameterUpdateMonitor, Recorder
from reducers import Norm, Product, Summary

MONITORS: dict[str, Callable[[], Monitor]] = {
    "norms of all gradients": lambda: ParameterGradientMonitor(Norm()),
    "Summary of all gradients": lambda: ParameterGradientMonitor(Summary()),
    "norms of all updates, with their snapshot": lambda: ParameterUpdateMonitor(Norm()),
    "Summary of all updates, with their snapshot": lambda: ParameterUpdateMonitor(Summary()),
    "norms of all values": lambda: ParameterMonitor(Norm()),
    "norms of all exp_avg": lambda: OptimizerStateMonitor(Norm(), "exp_avg"),
    "norm and Summary of all gradients": lambda: ParameterGradientMonitor(Product(norm=Norm(), summary=Summary())),
    "norms of all gradients, not due": lambda: ParameterGradientMonitor(Norm(), every=1_000_000),
}
ROUNDS = 12
WARM, TIMED = 2, 5  # steps of a turn
READINGS = 7


class Still(torch.optim.Optimizer):
    """Changes nothing."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["exp_avg"] = torch.randn_like(parameter)

    def step(self, closure: Any = None) -> None:
        """Changes nothing."""


def transformer() -> nn.Module:
    """Six layers, 29.5 million parameters in 72 tensors."""
    layer = nn.TransformerEncoderLayer(640, 10, 2560, batch_first=True)
    return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)


class Scale(nn.Module):
    """Two small parameters."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(size)), nn.Parameter(torch.randn(size))


def small() -> nn.Module:
    """2,000 tensors of 64 to 1,024 elements, two a module, of 16 sizes."""
    sizes = torch.randint(1, 17, (1_000,), generator=torch.Generator().manual_seed(0)) * 64
    return nn.ModuleList([Scale(int(size)) for size in sizes])


def odd() -> nn.Module:
    """The same with sizes of which hardly any is met twice."""
    sizes = torch.randint(64, 1_025, (2_000,), generator=torch.Generator().manual_seed(0))
    return nn.ModuleList([nn.ParameterList([torch.randn(int(size))]) for size in sizes])


def timed(function: Callable[[], Any], times: list[float]) -> None:
    for turn in range(WARM + TIMED):
        started = time.perf_counter()
        function()
        if turn >= WARM:
            times.append((time.perf_counter() - started) * 1e3)


def rows(what: str, net: nn.Module) -> list[dict[str, Any]]:
    parameters = list(net.parameters())
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter) * 1e-3
    optimizer, clip = Still(parameters), "clip_grad_norm_"
    recorders = {name: Recorder(make()).modules(net).deregister() for name, make in MONITORS.items()}
    times: dict[str, list[float]] = {clip: [], "a step without monitors": [], **{name: [] for name in recorders}}
    for _ in range(ROUNDS):  # in turn, so that a drifting machine slows all of them alike; a recorder is on only while it is timed
        timed(lambda: nn.utils.clip_grad_norm_(parameters, 1e9, foreach=True), times[clip])
        timed(optimizer.step, times["a step without monitors"])
        for name, recorder in recorders.items():
            recorder.register()
            timed(optimizer.step, times[name])
            recorder.deregister()
    figures = {name: spread(spent) for name, spent in times.items()}
    elements = sum(parameter.numel() for parameter in parameters)
    print(f"{what}: {len(parameters)} tensors, {elements / 1e6:.1f} million elements")
    found = []
    for name, figure in figures.items():
        ratio = figure["median"] / figures[clip]["median"]
        found.append(
            {"parameters": what, "tensors": len(parameters), "elements": elements, "what": name, **figure, "x clip": ratio}
        )
        print(f"  {name:44} {figure['median']:9.3f} ms a step, {ratio:6.2f} x {clip}")
    return found + [reading(what, name, recorders[name], optimizer, figures[clip]["median"]) for name in list(recorders)[:2]]


def reading(what: str, name: str, recorder: Recorder, optimizer: Still, clip: float) -> dict[str, Any]:
    """What it costs to look at everything after a step: the states of all, once. The median of some, as a collection of garbage
    falls into one of them."""
    times = []
    for _ in range(READINGS):
        with recorder.register():
            optimizer.step()
        started = time.perf_counter()
        for monitor in recorder.values():
            assert monitor.states
        times.append((time.perf_counter() - started) * 1e3)
    spent = statistics.median(times)
    print(f"  {name + ', reading all states':44} {spent:9.3f} ms, {spent / clip:6.2f} x clip_grad_norm_")
    return {"parameters": what, "what": f"{name}, reading all states once", "ms": spent, "x clip": spent / clip}


def main() -> None:
    nets = {"a transformer of six layers": transformer, "many small parameters": small, "many small parameters of odd sizes": odd}
    found = [row for what, make in nets.items() for row in rows(what, make())]
    write("parameters", rows=found, what="float32; one step of an optimizer that changes nothing")


if __name__ == "__main__":
    main()
