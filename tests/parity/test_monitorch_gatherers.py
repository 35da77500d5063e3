"""The gatherers of monitorch beside our monitors: they hand over the same tensors, at the same moments."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recorders import BackwardInputMonitor, BackwardMonitor, ForwardMonitor, ParameterGradientMonitor, ParameterMonitor
from reducers import Collect

gatherer, preprocessor = pytest.importorskip("monitorch.gatherer"), pytest.importorskip("monitorch.preprocessor")

SEEDS = range(3)


class Seen(
    preprocessor.AbstractForwardPreprocessor,
    preprocessor.AbstractBackwardPreprocessor,
    preprocessor.AbstractTensorPreprocessor,
    preprocessor.AbstractModulePreprocessor,
):
    """Keeps the tensors that a gatherer hands over."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    def process_fw(self, name: str, module: nn.Module, layer_input: Tensor, layer_output: Tensor) -> None:
        self.tensors.append(layer_output.detach().clone())

    def process_bw(self, name: str, module: nn.Module, grad_input: Any, grad_output: Any) -> None:
        self.tensors.append(grad_output[0].clone())

    def process_tensor(self, name: str, tensor: Tensor) -> None:
        self.tensors.append(tensor.detach().clone())

    def process_module(self, name: str, module: nn.Module) -> None:
        self.process_tensor(name, module.weight)

    def reset(self) -> None: ...
    def start_sync(self, dst_rank: int = 0) -> None: ...
    def finish_sync(self) -> None: ...

    @property
    def value(self) -> dict[str, Any]:
        return {"tensors": self.tensors}


@pytest.fixture
def state() -> Any:
    return pytest.importorskip("monitorch.inspector.inspector_state").InspectorState()


def same(theirs: Seen, ours: Tensor) -> None:
    assert torch.equal(torch.cat([x.reshape(-1) for x in theirs.tensors]), ours.reshape(-1))


@pytest.mark.row("FeedForwardGatherer, BackwardGatherer")
@pytest.mark.parametrize("seed", SEEDS)
def test_outputs_and_their_gradients(seed: int, state: Any) -> None:
    torch.manual_seed(seed)
    layer, (forward, backward) = nn.Linear(4, 3), (Seen(), Seen())
    handles = gatherer.FeedForwardGatherer(layer, [forward], "l", state), gatherer.BackwardGatherer(layer, [backward], "l", state)
    output, gradient = ForwardMonitor(Collect(), layer), BackwardMonitor(Collect(), layer)
    for size in (5, 5, 2):
        layer(torch.randn(size, 4, requires_grad=True)).square().sum().backward()
    same(forward, output.peek())
    same(backward, gradient.peek())
    for handle in handles:
        handle.detach()
    layer(torch.randn(1, 4))
    assert (len(forward.tensors), output.samples) == (3, 4)


@pytest.mark.row("ParameterGradientGatherer", "OptimizerStepParameterGatherer", "EpochModuleGatherer, CallParameterGatherer")
@pytest.mark.parametrize("seed", SEEDS)
def test_parameters_and_their_gradients(seed: int, state: Any) -> None:
    torch.manual_seed(seed)
    layer = nn.Linear(4, 3)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.1)
    gradients, steps, epochs, calls = (Seen() for _ in range(4))
    gatherer.ParameterGradientGatherer("weight", layer, [gradients], "l", state)
    gatherer.OptimizerStepParameterGatherer(layer, optimizer, "weight", [steps], "l", state)
    epoch = gatherer.EpochModuleGatherer(layer, [epochs], "l", state)
    call = gatherer.CallParameterGatherer(layer, "weight", [calls], "l", state)
    at_backward = ParameterGradientMonitor(Collect(), "weight", layer, when="accumulate")
    final = ParameterGradientMonitor(Collect(), "weight", layer)
    at_step, at_tick = (ParameterMonitor(Collect(), "weight", layer, when=when) for when in ("step", "tick"))
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(2):  # theirs sees the gradients of the first backward and, cumulated, of both
            layer(torch.randn(5, 4)).square().sum().backward()
        optimizer.step()
    for _ in range(2):
        epoch()
        call()
        at_tick.tick()
    same(gradients, at_backward.peek())
    gradients.tensors = gradients.tensors[1::2]
    same(gradients, final.peek())
    same(steps, at_step.peek())
    same(epochs, at_tick.peek())
    same(calls, at_tick.peek())


@pytest.mark.parametrize("seed", SEEDS)
def test_gradients_of_inputs_are_total_and_theirs_are_those_of_the_module(seed: int, state: Any) -> None:
    """Beside a residual path, the gradient of the input comes from both paths; a backward hook of PyTorch sees the module's."""

    class Inputs(Seen):
        def process_bw(self, name: str, module: nn.Module, grad_input: Any, grad_output: Any) -> None:
            self.tensors.append(grad_input[0].clone())

    torch.manual_seed(seed)
    layer, theirs = nn.Linear(4, 4), Inputs()
    gatherer.BackwardGatherer(layer, [theirs], "l", state)
    monitor = BackwardInputMonitor(Collect(), layer)
    x = torch.randn(5, 4, requires_grad=True)
    (layer(x) + x).sum().backward()
    assert torch.equal(monitor.peek(), x.grad)  # type: ignore[arg-type]
    assert torch.allclose(theirs.tensors[0] + 1, x.grad)  # type: ignore[arg-type]


def test_one_that_the_program_forgot_goes_on_recording(state: Any) -> None:
    """The module holds it, there and here, until it is detached or deregistered."""
    layer, seen, mine = nn.Linear(2, 2), Seen(), []
    gatherer.FeedForwardGatherer(layer, [seen], "l", state)
    ForwardMonitor(Collect(), layer, op_=lambda output: mine.append(output) or output)
    gc.collect()
    layer(torch.ones(3, 2))
    assert len(seen.tensors) == len(mine) == 1
