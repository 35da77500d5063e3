"""What the callables of a monitor get, and where its recipe puts it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recorders import ForwardInputMonitor, ForwardMonitor, TargetError
from reducers import Last


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
