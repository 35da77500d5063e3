"""What the three systems compute, beside ours, with their own classes: `pip install '.[parity]'`, or these tests skip."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recorders import ForwardInputMonitor, ForwardMonitor, ParameterGradientMonitor, TargetError
from reducers import Activity, Collect, Last, PerObservation, Reducer, Summary

SEEDS = range(3)
SPREAD = Summary(correction=0)


def activation(pattern: str) -> Reducer:
    """Of one observation the mean activity of its units, and the share of them that are dead."""
    return Activity(pattern, death=True).postmap(lambda a: {"activation": a["rate"].mean(), "death": a["death"]})


def agree(theirs: Any, ours: dict[str, Tensor]) -> None:
    """Their running statistics, kept from float32 rates, and ours."""
    mine = [ours["count"], ours["mean"], ours["var"], ours["min"], ours["max"]]
    assert [float(x) for x in mine] == pytest.approx([theirs.count, theirs.mean, theirs.var, theirs.min_, theirs.max_], abs=1e-6)


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


def test_inferno_callables_of_outputs_take_the_output() -> None:
    observe = pytest.importorskip("inferno.observe")
    layer = nn.Linear(3, 2)
    theirs = observe.OutputMonitor(
        observe.PassthroughReducer(1.0, duration=0.0), layer, map_=lambda y: (y * 2,), filter_=lambda y: bool((y[0] > -100).all())
    )
    ours = ForwardMonitor(Last(), layer, map_=lambda y: (y * 2,), filter_=lambda y: bool((y > -100).all()))
    layer(torch.randn(4, 3))
    torch.testing.assert_close(ours.peek(), theirs.peek().detach(), rtol=0, atol=0)


def test_a_callable_gets_as_many_operands_as_it_takes() -> None:
    layer = nn.Linear(3, 3)
    x = torch.randn(2, 3)
    seen: dict[str, tuple[Any, ...]] = {}

    class Picks:
        def one(self, y: Tensor) -> Tensor:
            seen["one"] = (y,)
            return y

        def both(self, *operands: Any) -> Tensor:
            seen["both"] = operands
            y: Tensor = operands[0]
            return y

    monitors = [
        ForwardMonitor(Last(), layer, op_=lambda y: y),
        ForwardMonitor(Last(), layer, op_=lambda y, inputs: y - inputs),
        ForwardMonitor(Last(), layer, op_=Picks().one),
        ForwardMonitor(Last(), layer, op_=Picks().both),
        ForwardMonitor(Last(), layer, op_=torch.sub),
        ForwardInputMonitor(Last(), layer, map_=lambda inputs: (inputs,)),
    ]
    y = layer(x).detach()
    for monitor, expected in zip(monitors, (y, y - x, y, y, y - x, x), strict=True):
        torch.testing.assert_close(monitor.peek(), expected, rtol=0, atol=0)
    assert (len(seen["one"]), len(seen["both"])) == (1, 2)


def test_a_recipe_puts_a_monitor_without_attribute_on_the_module_named() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.ReLU()))
    make = ForwardMonitor.partialconstructor(Last())
    assert make("0", net).module is net[0]
    assert make("1.0", net).module is net[1][0]
    assert make(None, net[0]).module is net[0]
    with pytest.raises(TargetError, match=r"ForwardMonitor: Sequential has no module '2'; it has \['0', '1', '1\.0'\]"):
        make("2", net)
