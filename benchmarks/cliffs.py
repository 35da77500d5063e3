"""Where a small change of the training makes recording several times as dear: each beside the same without the change.

Run: python benchmarks/cliffs.py
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from measure import alternate, write
from torch import Tensor, nn

import recorders
import reducers
from recorders import ForwardMonitor, ParameterGradientMonitor, Recorder
from reducers import Norm, Summary

OURS = tuple(str(Path(package.__file__).parent) for package in (recorders, reducers))
Act = Callable[[], Any]


def python_calls(act: Act) -> int:
    """How many functions of the library one call needs."""
    found = 0

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal found
        found += event == "call" and frame.f_code.co_filename.startswith(OURS)

    for _ in range(5):  # what another recorder did before is over then
        act()
    sys.setprofile(count)
    try:
        act()
    finally:
        sys.setprofile(None)
    return found


def call_in(context: Callable[[], Any], *sizes: int) -> Act:
    """Calls of a layer with its output recorded, in a context, with batches of these sizes in turn."""
    layer, inputs = nn.Linear(64, 64), [torch.randn(size, 64) for size in sizes]
    layer.held = Recorder(ForwardMonitor(Summary())).modules(layer)  # type: ignore[assignment]

    def act() -> None:
        with context():
            for x in inputs:
                layer(x)

    return act


def step_of(resets: bool, in_backward: bool) -> Act:
    """Training steps with norms of all gradients, beside another recorder, and perhaps with an optimizer for each parameter."""
    nets = [nn.Sequential(*[nn.Linear(32, 32) for _ in range(50)]) for _ in range(2)]
    held = [Recorder(ParameterGradientMonitor(Norm())).modules(net, types=nn.Linear) for net in nets]
    parameters = list(nets[0].parameters())
    others = torch.optim.SGD(nets[1].parameters(), lr=0.0)
    for parameter in nets[1].parameters():
        parameter.grad = torch.zeros_like(parameter)
    if in_backward:
        each = {parameter: torch.optim.SGD([parameter], lr=0.0) for parameter in parameters}

        def step(parameter: Tensor) -> None:
            each[parameter].step()  # type: ignore[index]

        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(step)
    else:
        optimizer = torch.optim.SGD(parameters, lr=0.0)
    x = torch.randn(4, 32)

    def act() -> None:
        nets[0](x).square().sum().backward()
        if not in_backward:
            optimizer.step()
        others.step()
        if resets:
            held[1].reset()

    return act


def cases() -> dict[str, Callable[[], tuple[Act, Act]]]:
    """By what is changed: makes both, without it and with it."""
    return {
        "a call within autocast": lambda: (
            call_in(torch.no_grad, 8),
            call_in(lambda: torch.autocast("cpu", torch.bfloat16), 8),
        ),
        "a call within inference_mode": lambda: (call_in(torch.no_grad, 8), call_in(torch.inference_mode, 8)),
        "two calls with shapes that alternate": lambda: (call_in(torch.no_grad, 8, 8), call_in(torch.no_grad, 8, 9)),
        "a step beside a recorder that is reset in each": lambda: (step_of(False, False), step_of(True, False)),
        "a step with 100 optimizers that step in backward": lambda: (step_of(False, False), step_of(False, True)),
    }


def main() -> None:
    torch.set_num_threads(1)
    found = []
    for what, make in cases().items():
        without, changed = make()
        acts = {"without": without, "with": changed}
        for act in acts.values():
            for _ in range(20):
                act()
        calls = {name: python_calls(act) for name, act in acts.items()}
        times = alternate(acts, seconds=2.0, burst=0.05)  # for longer than a neighbour is felt
        figures = {name: spent["median"] for name, spent in times.items()}
        found.append(
            {
                "what": what,
                "us without": figures["without"] * 1e3,
                "us with": figures["with"] * 1e3,
                "x": figures["with"] / figures["without"],
                "python calls without": calls["without"],
                "python calls with": calls["with"],
            }
        )
        print(f"{what:52} {found[-1]['x']:6.2f} x, {calls['without']} to {calls['with']} functions of the library")
    write("cliffs", rows=found, measured=time.strftime("%Y-%m-%d"), what="recorded steps and calls, one thread")


if __name__ == "__main__":
    main()
