"""What the three systems compute, beside ours, with their own classes: `pip install '.[parity]'`, or these tests skip."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recorders import (
    BackwardMonitor,
    DifferenceMonitor,
    ForwardInputMonitor,
    ForwardMonitor,
    ParameterGradientMonitor,
    ParameterMonitor,
    Recorder,
    StateMonitor,
    TargetError,
)
from reducers import (
    EMA,
    Activity,
    Cell,
    Collect,
    ConditionalCumulativeTrace,
    ConditionalNearestTrace,
    CumulativeTrace,
    Fold,
    Geometry,
    Last,
    Mean,
    NearestTrace,
    PerObservation,
    Reducer,
    ScaledCumulativeTrace,
    ScaledNearestTrace,
    Summary,
    TimeSince,
    Whole,
)

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


def spikes(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 3, (2, 4), generator=generator).double() for _ in range(20)]


@pytest.fixture
def float64() -> Iterator[None]:
    """The other library keeps what it computes in the default dtype."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(usual)


def positive(x: Tensor) -> Tensor:
    return x > 0


TRACES: dict[str, tuple[Any, Any, bool]] = {  # theirs, ours, and whether a condition is given beside the observation
    "EMAReducer": (lambda r: r.EMAReducer(1.0, 0.3), EMA(alpha=0.3), False),
    "CAReducer": (lambda r: r.CAReducer(1.0), Mean("... -> ..."), False),
    "PassthroughReducer": (lambda r: r.PassthroughReducer(1.0), Last(), False),
    "EventReducer": (lambda r: r.EventReducer(0.5, positive), TimeSince(positive, 0.5), False),
    "NearestTraceReducer": (
        lambda r: r.NearestTraceReducer(0.5, 3.0, 1.5, 1.0, 0.1),
        NearestTrace(time_constant=3.0, step_time=0.5, amplitude=1.5, target=1.0, tolerance=0.1),
        False,
    ),
    "CumulativeTraceReducer": (
        lambda r: r.CumulativeTraceReducer(0.5, 3.0, 1.5, 1.0, 0.1),
        CumulativeTrace(time_constant=3.0, step_time=0.5, amplitude=1.5, target=1.0, tolerance=0.1),
        False,
    ),
    "ScaledNearestTraceReducer": (
        lambda r: r.ScaledNearestTraceReducer(0.5, 3.0, 0.25, 2.0, positive),
        ScaledNearestTrace(time_constant=3.0, step_time=0.5, amplitude=0.25, scale=2.0, criterion=positive),
        False,
    ),
    "ScaledCumulativeTraceReducer": (
        lambda r: r.ScaledCumulativeTraceReducer(0.5, 3.0, 0.25, 2.0, positive),
        ScaledCumulativeTrace(time_constant=3.0, step_time=0.5, amplitude=0.25, scale=2.0, criterion=positive),
        False,
    ),
    "ConditionalNearestTraceReducer": (
        lambda r: r.ConditionalNearestTraceReducer(0.5, 3.0, 0.25, 2.0),
        ConditionalNearestTrace(time_constant=3.0, step_time=0.5, amplitude=0.25, scale=2.0),
        True,
    ),
    "ConditionalCumulativeTraceReducer": (
        lambda r: r.ConditionalCumulativeTraceReducer(0.5, 3.0, 0.25, 2.0),
        ConditionalCumulativeTrace(time_constant=3.0, step_time=0.5, amplitude=0.25, scale=2.0),
        True,
    ),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", TRACES)
def test_inferno_reducers(name: str, seed: int, float64: None) -> None:
    observe = pytest.importorskip("inferno.observe")
    make, reducer, conditional = TRACES[name]
    theirs, ours = make(observe), Cell(reducer)
    for x in spikes(seed):
        xs = (x, x > 1) if conditional else (x,)
        theirs(*xs)
        ours.push(*xs)
        torch.testing.assert_close(ours.peek(), theirs.peek().double(), rtol=1e-9, atol=1e-9)


class Leaky(nn.Module):
    """Replaces its state at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("voltage", torch.zeros(2, 4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.voltage = 0.5 * self.voltage + x
        return self.voltage


@pytest.mark.parametrize("seed", SEEDS)
def test_inferno_monitors(seed: int, float64: None) -> None:
    observe = pytest.importorskip("inferno.observe")
    layer = Leaky()

    def last() -> Any:
        return observe.PassthroughReducer(1.0)

    pairs = [
        (observe.InputMonitor(last(), layer), ForwardInputMonitor(Last(), layer)),
        (observe.OutputMonitor(last(), layer, map_=lambda y: (2 * y,)), ForwardMonitor(Last(), layer, map_=lambda y: (2 * y,))),
        (observe.StateMonitor(last(), "voltage", layer), StateMonitor(Last(), "voltage", layer)),
        (observe.StateMonitor(last(), "voltage", layer, as_prehook=True), StateMonitor(Last(), "voltage", layer, as_prehook=True)),
        (observe.DifferenceMonitor(last(), "voltage", layer), DifferenceMonitor(Last(), "voltage", layer)),
    ]
    for number, x in enumerate(spikes(seed)):
        layer.train(number % 2 == 0)
        layer(x)
        for theirs, ours in pairs:
            torch.testing.assert_close(ours.peek(), theirs.peek(), rtol=1e-9, atol=1e-9)


class Tupled(nn.Linear):
    """torchfunc iterates over what a module returns: over a tuple, as here, or over the rows of a lone tensor."""

    def forward(self, x: Tensor) -> tuple[Tensor]:  # type: ignore[override]
        return (super().forward(x),)


# Its recorders of gradients use hooks that PyTorch has replaced, and number the layers in the order in which gradients come.
RECORDERS = {"ForwardInput": ForwardInputMonitor, "ForwardPre": ForwardInputMonitor, "ForwardOutput": ForwardMonitor}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", RECORDERS)
@pytest.mark.parametrize("summed", [False, True], ids=["list", "reduction"])
def test_torchfunc_recorders(kind: str, seed: int, summed: bool) -> None:
    recorders = pytest.importorskip("torchfunc.hooks.recorders")
    torch.manual_seed(seed)
    net = nn.Sequential(Tupled(3, 4)).double()
    seen: list[Tensor] = []

    def condition() -> bool:
        return len(seen) != 1

    theirs = getattr(recorders, kind)(condition=condition, reduction=torch.add if summed else None)
    theirs.children(net, types=nn.Linear)
    ours = Recorder(RECORDERS[kind](Fold(torch.add) if summed else Whole(), condition=condition)).children(net, types=nn.Linear)
    for _ in range(4):
        x = torch.randn(5, 3, dtype=torch.float64)
        net(x)
        seen.append(x)
    found = ours[0].peek()
    found = found["0"] if kind == "ForwardOutput" else found  # the path of the leaf
    mine = [found] if summed else list(found.values())
    expected = [theirs[0]] if summed else theirs[0]
    assert len(mine) == len(expected) == (1 if summed else 3)
    for one, other in zip(mine, expected, strict=True):
        torch.testing.assert_close(one, other.detach(), rtol=1e-9, atol=1e-9)


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
