"""The preprocessors of monitorch beside ours, with their own classes: `pip install '.[parity]'`, or these tests skip."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recorders import BackwardMonitor, ForwardMonitor, ParameterGradientMonitor, ParameterMonitor
from reducers import Activity, Collect, Geometry, Mean, PerObservation, Reducer, Summary

SEEDS = range(3)
SPREAD = Summary(correction=0)


def activation(pattern: str) -> Reducer:
    """Of one observation the mean activity of its units, and the share of them that are dead."""
    return Activity(pattern, death=True).postmap(lambda a: {"activation": a["rate"].mean(), "death": a["death"]})


def agree(theirs: Any, ours: dict[str, Tensor], within: float = 1e-6) -> None:
    """Their running statistics, by default of float32 rates, and ours."""
    mine = [ours["count"], ours["mean"], ours["var"], ours["min"], ours["max"]]
    assert [float(x) for x in mine] == pytest.approx([theirs.count, theirs.mean, theirs.var, theirs.min_, theirs.max_], abs=within)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("shape", [(5, 7), (5, 7, 3, 2)], ids=["2d", "4d"])
def test_monitorch_output_activation(seed: int, shape: tuple[int, ...]) -> None:
    preprocessor = pytest.importorskip("monitorch.preprocessor")
    torch.manual_seed(seed)
    layer = nn.ReLU()
    monitor = ForwardMonitor(PerObservation(activation("b c ... -> c"), SPREAD), layer)
    listed = ForwardMonitor(PerObservation(activation("b c ... -> c"), Collect()), layer)
    running, kept = (
        preprocessor.OutputActivation(True, inplace, record_eval=True, evaluation_from_grad=False) for inplace in (True, False)
    )
    for _ in range(6):
        x = torch.randn(shape) - 1.5
        y = layer(x)
        for theirs in (running, kept):
            theirs.process_fw("layer", layer, x, y)
    for name, theirs in zip(("activation", "death"), running.value["layer"], strict=True):
        agree(theirs, monitor.peek()[name])
    for name, theirs in zip(("activation", "death"), kept.value["layer"], strict=True):
        assert listed.peek()[name].tolist() == pytest.approx([float(x) for x in theirs], abs=1e-6)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["weight", "bias"])
def test_monitorch_gradient_activation(seed: int, name: str) -> None:
    preprocessor = pytest.importorskip("monitorch.preprocessor")
    torch.manual_seed(seed)
    layer = nn.Conv2d(3, 5, 2)
    monitor = ParameterGradientMonitor(PerObservation(activation("c ... -> c"), SPREAD), name, layer, when="accumulate")
    theirs = preprocessor.GradientActivation(death=True, inplace=True)
    for _ in range(6):
        layer.zero_grad()
        y = layer(torch.randn(2, 3, 4, 4))
        (y * (torch.rand(1, 5, 1, 1) > 0.4)).sum().backward()
        theirs.process_tensor("layer", getattr(layer, name).grad)
    for statistic, found in zip(("activation", "death"), theirs.value["layer"], strict=True):
        agree(found, monitor.peek()[statistic])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("normalize", [False, True])
def test_monitorch_output_norm(seed: int, normalize: bool) -> None:
    preprocessor = pytest.importorskip("monitorch.preprocessor")
    torch.manual_seed(seed)
    layer = nn.Linear(4, 6).double()
    theirs = preprocessor.OutputNorm(normalize, True, record_eval=True, evaluation_from_grad=False)

    def norms(y: Tensor) -> Tensor:
        flat = y.flatten(1)
        return flat.norm(dim=1) / (flat.shape[1] ** 0.5 if normalize else 1)

    monitor = ForwardMonitor(PerObservation(Mean().premap(norms), SPREAD), layer)
    for size in (5, 5, 3):
        x = torch.randn(size, 4, dtype=torch.float64)
        theirs.process_fw("layer", layer, x, layer(x))
    agree(theirs.value["layer"], monitor.peek(), 1e-9)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("normalize", [False, True])
def test_monitorch_norms_of_parameters_and_geometry_of_gradients(seed: int, normalize: bool) -> None:
    preprocessor = pytest.importorskip("monitorch.preprocessor")
    torch.manual_seed(seed)
    layer = nn.Linear(4, 6).double()
    norm = preprocessor.ParameterNorm(["weight"], normalize=normalize, inplace=True)
    geometry = preprocessor.GradientGeometry(correlation=True, normalize=normalize, inplace=False)
    outputs = preprocessor.OutputGradientGeometry(correlation=True, normalize=normalize, inplace=False)
    mine = [
        ParameterMonitor(Geometry(SPREAD, normalize=normalize, correlation=False), "weight", layer, when="tick"),
        ParameterGradientMonitor(Geometry(Collect(), normalize=normalize), "weight", layer, when="accumulate"),
        BackwardMonitor(Geometry(Collect(), normalize=normalize), layer),
    ]
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        y = layer(torch.randn(3, 4, dtype=torch.float64))
        y.register_hook(lambda gradient: outputs.process_bw("layer", layer, None, (gradient,)))
        y.square().sum().backward()
        geometry.process_tensor("layer", layer.weight.grad)
        optimizer.step()
        norm.process_module("layer", layer)
        mine[0].tick()
    agree(norm.value["layer"]["weight"], mine[0].peek()["norm"], 1e-9)
    for theirs, monitor in ((geometry, mine[1]), (outputs, mine[2])):
        norms, products = theirs.value["layer"]
        assert monitor.peek()["norm"].tolist() == pytest.approx(norms, abs=1e-9)
        assert products[0] == 0.0  # theirs correlates the first one with zeros; ours has no correlation for it
        assert monitor.peek()["correlation"].tolist() == pytest.approx(products[1:], abs=1e-7)  # their eps is added, not a floor
