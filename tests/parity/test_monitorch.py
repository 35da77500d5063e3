"""The preprocessors of monitorch beside ours, with their own classes: `pip install '.[parity]'`, or these tests skip."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recorders import (
    BackwardMonitor,
    CallMonitor,
    ForwardMonitor,
    Inspector,
    ParameterGradientMonitor,
    ParameterMonitor,
    ParameterUpdateMonitor,
)
from recorders.watch.lenses import LossMetrics
from reducers import Activity, Collect, Geometry, Mean, PerObservation, Reducer, Summary

gatherer, preprocessor = pytest.importorskip("monitorch.gatherer"), pytest.importorskip("monitorch.preprocessor")

SEEDS = range(3)
SPREAD = Summary(correction=0)


@pytest.fixture
def state() -> Any:
    return pytest.importorskip("monitorch.inspector.inspector_state").InspectorState()


def activation(pattern: str) -> Reducer:
    """Of one observation the mean activity of its units, and the share of them that are dead."""
    return Activity(pattern, death=True).postmap(lambda a: {"activation": a["rate"].mean(), "death": a["death"]})


def agree(theirs: Any, ours: dict[str, Tensor], within: float = 1e-6) -> None:
    """Their running statistics, by default of float32 rates, and ours."""
    mine = [ours["count"], ours["mean"], ours["var"], ours["min"], ours["max"]]
    assert [float(x) for x in mine] == pytest.approx([theirs.count, theirs.mean, theirs.var, theirs.min_, theirs.max_], abs=within)


@pytest.mark.row("OutputActivation", "inplace=True, inplace=False")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("shape", [(5, 7), (5, 7, 3, 2)], ids=["2d", "4d"])
def test_output_activation(seed: int, shape: tuple[int, ...]) -> None:
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


@pytest.mark.row("GradientActivation")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["weight", "bias"])
def test_gradient_activation(seed: int, name: str) -> None:
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


@pytest.mark.row("OutputNorm(normalize)")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("normalize", [False, True])
def test_output_norm(seed: int, normalize: bool) -> None:
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


@pytest.mark.row("ParameterNorm(attrs, normalize)", "OutputGradientGeometry, GradientGeometry")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("normalize", [False, True])
def test_norms_of_parameters_and_geometry_of_gradients(seed: int, normalize: bool) -> None:
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


@pytest.mark.row("record_eval", "evaluation_from_grad")
@pytest.mark.parametrize("record_eval", [False, True])
@pytest.mark.parametrize("from_grad", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_evaluation_and_whether_it_is_recorded(seed: int, record_eval: bool, from_grad: bool) -> None:
    torch.manual_seed(seed)
    layer = nn.Linear(4, 3).double()
    theirs = preprocessor.OutputNorm(False, True, record_eval=record_eval, evaluation_from_grad=from_grad)
    reducer = PerObservation(Mean().premap(lambda y: y.norm(dim=1)), SPREAD)
    monitor = ForwardMonitor(reducer, layer, eval_update=record_eval, phase="grad" if from_grad else "module")
    for training, gradients in ((True, True), (True, False), (False, True), (False, False), (True, True)):
        layer.train(training)
        with torch.set_grad_enabled(gradients):
            x = torch.randn(5, 4, dtype=torch.float64)
            theirs.process_fw("layer", layer, x, layer(x))
    assert monitor.samples == (5 if record_eval else 3)
    agree(theirs.value["layer"], monitor.peek(), 1e-9)


@pytest.mark.row("ParameterDifferenceGeometry")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("normalize", [False, True])
def test_changes_of_parameters(seed: int, normalize: bool, state: Any) -> None:
    """We have one more: theirs knows the parameter only after the first step."""
    torch.manual_seed(seed)
    layer = nn.Linear(4, 6).double()
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    theirs = preprocessor.ParameterDifferenceGeometry(correlation=True, normalize=normalize, inplace=False)
    gatherer.OptimizerStepParameterGatherer(layer, optimizer, "weight", [theirs], "layer", state)
    monitor = ParameterUpdateMonitor(Geometry(Collect(), normalize=normalize), "weight", layer)
    for _ in range(5):
        optimizer.zero_grad()
        layer(torch.randn(3, 4, dtype=torch.float64)).mean().backward()
        optimizer.step()
    norms, products = theirs.value["layer"]
    assert monitor.peek()["norm"].tolist()[1:] == pytest.approx(norms, abs=1e-9)
    assert products[0] == 0.0
    assert monitor.peek()["correlation"].tolist()[1:] == pytest.approx(products[1:], abs=1e-6)  # their eps


@pytest.mark.parametrize("seed", SEEDS)
def test_eps_is_the_smallest_norm_and_theirs_is_added(seed: int) -> None:
    torch.manual_seed(seed)
    xs, eps = [scale * torch.randn(7, dtype=torch.float64) for scale in (1.0, 1e-4, 1e-5, 1e-30)], 1e-8
    theirs = preprocessor.GradientGeometry(correlation=True, normalize=False, inplace=False, eps=eps)
    reducer, found = Geometry(Collect(), eps=eps), {}
    for x in xs:
        theirs.process_tensor("x", x)
        found = reducer.update(found, x)
    pairs = list(itertools.pairwise(xs))
    added = [float(a @ b / (a.norm() * b.norm() + eps)) for a, b in pairs]
    floored = [float(a @ b / (a.norm().clamp(min=eps) * b.norm().clamp(min=eps))) for a, b in pairs]
    assert theirs.value["x"][1][1:] == pytest.approx(added, abs=1e-12)
    assert reducer.compute(found)["correlation"].tolist() == pytest.approx(floored, abs=1e-12)  # type: ignore[index, union-attr]
    true = float(torch.cosine_similarity(xs[1], xs[2], dim=0))
    assert floored[1] == pytest.approx(true, rel=1e-9)
    assert abs(added[1]) < 0.8 * abs(true)


@pytest.mark.row("LossModule", "ExplicitCall")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("from_grad", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
def test_losses_of_a_module_and_pushed_ones(seed: int, from_grad: bool, inplace: bool, state: Any) -> None:
    torch.manual_seed(seed)
    loss_fn, pushed = nn.MSELoss(), preprocessor.ExplicitCall("train_loss", "val_loss")
    module = preprocessor.LossModule(inplace, from_grad)
    module.set_loss_strs("train_loss", "val_loss")
    gatherer.FeedForwardGatherer(loss_fn, [module], "loss", state)
    lens = LossMetrics(loss_fn, evaluation_from_grad=from_grad, loss_fn_inplace=inplace)
    inspector = Inspector(nn.Linear(1, 1), lens, train_loss_str="train_loss", non_train_loss_str="val_loss")
    call = CallMonitor(SPREAD if inplace else Collect())
    for training, gradients in ((True, True), (True, False), (False, True), (False, False), (True, True)):
        loss_fn.train(training)
        with torch.set_grad_enabled(gradients):
            loss = loss_fn(*torch.randn(2, 9, dtype=torch.float64))
        (pushed.push_running if inplace else pushed.push_memory)("loss", loss.item())
        call.push(loss)
    inspector.tick_epoch()
    if inplace:
        agree(pushed.value["loss"], call.peek(), 1e-9)
    else:
        assert call.peek().tolist() == pytest.approx(pushed.value["loss"], abs=1e-9)
    assert sum(len(values) for values in module.value.values()) == 5
    for name, values in module.value.items():
        row = inspector.timeline.at(0)[f"Loss/{name}"]
        mean = values.mean if inplace else math.fsum(values) / len(values)
        assert (row["count"], row["mean"]) == (len(values), pytest.approx(mean, abs=1e-9))
        assert ("median" in row) == (not inplace)
