"""What the callables of a monitor get, and where its recipe puts it."""

from __future__ import annotations

import functools
import operator
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from recorders import (
    BackwardMonitor,
    ForwardInputMonitor,
    ForwardMonitor,
    Monitor,
    ParameterMonitor,
    Recorder,
    RecordingWarning,
    TargetError,
)
from recorders.monitors.callables import call
from reducers import Last, Mean, Sum


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


BUILTINS: dict[str, tuple[Any, int]] = {
    "torch.abs": (torch.abs, 1),
    "torch.relu": (torch.relu, 1),
    "torch.exp": (torch.exp, 1),
    "torch.sum": (torch.sum, 1),
    "torch.max": (torch.max, 1),
    "torch.sub": (torch.sub, 2),
    "torch.maximum": (torch.maximum, 2),
    "Tensor.abs": (Tensor.abs, 1),
    "Tensor.sub": (Tensor.sub, 2),
    "F.relu": (nn.functional.relu, 1),
    "F.softplus": (nn.functional.softplus, 1),
    "torch.norm": (torch.norm, 1),
    "ReLU": (nn.ReLU(), 1),
    "Sequential": (nn.Sequential(nn.Tanh()), 1),
    "abs": (abs, 1),
    "partial": (functools.partial(torch.mul, 2), 1),
    "operator.sub": (operator.sub, 2),
    "numpy": (np.abs, 1),
    "float": (float, 1),
}


@pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning")  # NumPy's own, of tensors
@pytest.mark.parametrize("name", BUILTINS)
@pytest.mark.parametrize("option", ["op_", "map_", "filter_"])
def test_functions_of_others_get_the_operands_that_they_take(name: str, option: str) -> None:
    function, count = BUILTINS[name]
    layer, x = nn.ReLU(), torch.tensor([3.0])
    monitor = Caught()
    found = call(function, (torch.tensor([-3.0]), x), monitor)
    expected = function(*(torch.tensor([-3.0]), x)[:count])
    assert found == expected
    if option == "filter_":
        recorded = ForwardMonitor(Last(), layer, filter_=function)
    elif option == "op_":
        recorded = ForwardMonitor(Last(), layer, op_=function)
    elif name in ("float", "numpy"):
        return  # which return no tensors
    else:
        recorded = ForwardMonitor(Last(), layer, map_=functools.partial(lambda f, y, inputs: (f(*(y, inputs)[:count]),), function))
    layer(x)
    assert recorded.last_error is None
    assert recorded.samples == (0 if option == "filter_" and not function(*(x, x)[:count]) else 1)


def test_conditions_and_maps_of_reducers_may_be_builtins() -> None:
    layer, due = nn.Identity(), [True]
    monitor = ForwardMonitor(Sum().premap(torch.abs).postmap(torch.sqrt), layer, condition=due.__len__)
    layer(torch.tensor([-4.0, 5.0]))
    assert (monitor.samples, monitor.peek()) == (1, 3.0)
    due.clear()
    layer(torch.tensor([-4.0, 5.0]))
    assert monitor.samples == 1


class Caught:
    name = ""
    module = None


# One mistake


def thirteen() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(13)))


MISTAKES: dict[str, Callable[[], Monitor]] = {
    "op": lambda: ForwardMonitor(Mean(), op_=lambda output: output.nothing),
    "arity": lambda: ForwardMonitor(Mean(), op_=lambda output, inputs, third: output),
    "map": lambda: ForwardMonitor(Mean(), map_=lambda output: [output]),  # type: ignore[arg-type,return-value]
    "filter": lambda: ForwardMonitor(Mean(), filter_=lambda output: output.nothing),
    "condition": lambda: ForwardMonitor(Mean(), condition=lambda: {}["x"]),
    "pattern": lambda: ForwardMonitor(Mean("b c h w -> c")),
    "op of a gradient": lambda: BackwardMonitor(Mean(), op_=lambda gradient: gradient.nothing),
    "pattern of a parameter": lambda: ParameterMonitor(Mean("a b c d -> a"), "weight"),
    "disable": lambda: ForwardMonitor(Mean(), op_=lambda output: output.nothing, on_error="disable"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_one_mistake_over_many_modules_is_one_warning(mistake: str) -> None:
    net = thirteen()
    recorder = Recorder(MISTAKES[mistake]()).modules(net, types=nn.Linear)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step() -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            net(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        return [str(item.message) for item in caught]

    (told,) = step()
    assert "12 more monitors of this recorder may meet the same" in told
    assert len([row for row in recorder.report().rows if row.error]) == 13
    assert step() == []
    recorder.reset().register()
    assert len(step()) == 1  # what was reset tells again
    recorder.deregister()


def test_two_mistakes_are_two_warnings_and_each_recorder_tells_by_itself() -> None:
    net = thirteen()
    bad: dict[str, Monitor] = {"first": MISTAKES["op"](), "second": MISTAKES["pattern"]()}
    recorders = [Recorder(**bad).modules(net, types=nn.Linear), Recorder(one=MISTAKES["op"]()).modules(net, types=nn.Linear)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        net(torch.ones(1, 2))
    assert len(caught) == 3
    for recorder in recorders:
        recorder.deregister()


def test_of_a_long_message_of_pytorch_the_beginning_is_told() -> None:
    def failing(output: Tensor) -> Tensor:
        raise NotImplementedError(
            f"Could not run 'aten::some' with arguments from the 'Some' backend. {'CPU: registered ' * 99}\nMeta"
        )

    net = nn.Linear(2, 2)
    recorder = Recorder(ForwardMonitor(Mean(), op_=failing)).modules(nn.Sequential(net))
    with pytest.warns(RecordingWarning, match="Could not run 'aten::some' with arguments from") as told:
        net(torch.ones(1, 2))
    (message,) = {str(one.message) for one in told}
    assert len(message) < 700
    assert "Meta" not in message
    assert "...; operands: output (1, 2) float32" in message
    recorder.deregister()
