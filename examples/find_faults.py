"""A healthy training and five sick ones: `findings` names the planted fault, of a recording and of a timeline.

Run: python examples/find_faults.py [fault]
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from recorders import (
    BackwardMonitor,
    CallMonitor,
    ForwardMonitor,
    Inspector,
    ParameterGradientMonitor,
    ParameterUpdateMonitor,
    Recorder,
    lenses,
)
from recorders.watch.diagnosis.findings import Findings, findings
from reducers import Activity, Collect, FirstNonfinite, Idle, Product, Summary

EPOCHS, STEPS, BATCH, RATE = 3, 20, 100, 5e-4


def network(activation: type[nn.Module] = nn.ReLU, depth: int = 3, width: int = 64) -> nn.Sequential:
    """From images (n, 64) to logits (n, 10), initialised for its activation function."""
    layers: list[nn.Module] = []
    for number in range(depth):
        layer = nn.Linear(64 if number == 0 else width, width)
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu" if activation is nn.ReLU else "linear")
        nn.init.zeros_(layer.bias)
        layers += [layer, activation()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def healthy() -> tuple[nn.Sequential, float]:
    return network(), RATE


def dead_relus() -> tuple[nn.Sequential, float]:
    """The biases of one layer are so low that most of its units never fire."""
    net = network()
    with torch.no_grad():
        net[2].bias[:48] = -50.0
    return net, RATE


def exploding_gradients() -> tuple[nn.Sequential, float]:
    """The weights of a deep net are three times too large, so gradients grow from layer to layer on their way back."""
    net = network(depth=12)
    with torch.no_grad():
        for layer in net[:-1:2]:
            layer.weight *= 3
    return net, RATE


def rate_too_small() -> tuple[nn.Sequential, float]:
    return network(), 1e-7


def nan_in_the_middle() -> tuple[nn.Sequential, float]:
    """A layer divides by zero in step 40."""
    net = network()
    calls = 0

    def divide(module: nn.Module, args: object, output: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return output / 0 if calls == 40 else output

    net[2].register_forward_hook(divide)
    return net, RATE


def saturated() -> tuple[nn.Sequential, float]:
    """The biases before a sigmoid are so large that it is nearly always 0 or 1."""
    net = network(nn.Sigmoid, depth=2)
    nn.init.constant_(net[0].bias, 6.0)
    return net, RATE


Case = Callable[[], tuple[nn.Sequential, float]]
CASES: tuple[Case, ...] = (healthy, dead_relus, exploding_gradients, rate_too_small, nan_in_the_middle, saturated)
FAULTS: dict[str, Case] = {case.__name__: case for case in CASES}


def relative_change(after: Tensor, before: Tensor) -> Tensor:
    change: Tensor = (after - before).norm() / before.norm()
    return change


def examine(fault: str) -> tuple[Findings, Findings]:
    """Trains the net with this fault on scikit-learn's digits; returns what is wrong with it by a recording, and by a timeline."""
    torch.manual_seed(0)
    net, rate = FAULTS[fault]()
    bunch = load_digits()
    images, labels = torch.as_tensor(bunch.data, dtype=torch.float32) / 16, torch.as_tensor(bunch.target)
    recorder = Recorder(
        output=ForwardMonitor(
            Product(stats=Summary("b c -> c"), activity=Activity("b c -> c"), idle=Idle("b c -> c"), first=FirstNonfinite())
        ),
        gradient=BackwardMonitor(Summary()),
        weights=ParameterGradientMonitor(Summary(), "weight"),
        update=ParameterUpdateMonitor(Product(ratio=Collect()), "weight", op_=relative_change),
        loss=CallMonitor(Summary()),
    ).modules(net, leaves=True)
    chosen = [lenses.NonFinite(), lenses.Outliers(), lenses.DeadUnits(), lenses.UpdateRatio()]
    chosen.append(lenses.OutputGradientGeometry(skip_activation=False))
    if fault == "saturated":
        chosen.append(lenses.Saturation())  # which watches nothing in the nets with ReLU
    optimizer = torch.optim.Adam(net.parameters(), lr=rate)
    with recorder, Inspector(net, chosen, optimizer=optimizer) as inspector:
        for _ in inspector.range(EPOCHS):
            for _ in range(STEPS):
                batch = torch.randint(len(labels), (BATCH,))
                loss = nn.functional.cross_entropy(net(images[batch]), labels[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                recorder.push("loss", loss)
    return findings(recorder), findings(inspector.timeline)


def main(*chosen: str) -> None:
    torch.set_num_threads(1)
    for fault in chosen or FAULTS:
        once, over_time = examine(fault)
        print(f"{fault}:\n{once}\nover time:\n{over_time}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
