"""The monitors and reducers of inferno beside ours, with their own classes: `pip install '.[parity]'`, or these tests skip."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recorders import DifferenceMonitor, ForwardInputMonitor, ForwardMonitor, StateMonitor, TargetError
from reducers import (
    EMA,
    Cell,
    ConditionalCumulativeTrace,
    ConditionalNearestTrace,
    CumulativeTrace,
    Last,
    Mean,
    NearestTrace,
    ScaledCumulativeTrace,
    ScaledNearestTrace,
    TimeSince,
)

SEEDS = range(3)


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
