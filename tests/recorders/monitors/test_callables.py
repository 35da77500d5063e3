"""`filter_`, `map_` and `op_` get the arguments that they take."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from recorders import BackwardMonitor, ForwardMonitor, Recorder
from reducers import Last, Mean


def test_callables_may_ask_for_the_module_and_its_name() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    seen: list[tuple[str, nn.Module]] = []

    def per_feature(y: Tensor, *, module: nn.Module, name: str) -> Tensor:
        seen.append((name, module))
        return y.abs() / module.out_features

    recorder = Recorder(
        out=ForwardMonitor(Mean(), op_=per_feature, filter_=lambda *, name: name != "out/1"),
        grad=BackwardMonitor(Last(), map_=lambda gradient, *, module: (gradient * module.in_features,)),
    ).children(net)
    y = net(torch.ones(2, 3))
    y.sum().backward()
    assert seen == [("out/0", net[0])]
    assert recorder["out/1"].counts["filtered out"] == 1
    assert torch.equal(recorder["grad/1"].peek(), torch.full((2, 2), 4.0))


def test_callables_may_ask_inside_a_compiled_graph(fresh_compiler: None) -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    recorder = Recorder(ForwardMonitor(Last(), op_=lambda y, *, module, name: y * int(name) + module.in_features)).children(net)
    compiled = torch.compile(net, fullgraph=True)
    y = compiled(torch.ones(2, 3))
    torch.testing.assert_close(recorder["1"].peek(), y.detach() + 4)
    torch.testing.assert_close(recorder["0"].peek(), torch.full((2, 4), 3.0))


def test_other_names_defaults_and_partial_functions_are_left_alone() -> None:
    layer = nn.Linear(3, 3)

    def scaled(y: Tensor, module: Any = None, *, by: float = 2.0, **rest: Any) -> Tensor:
        assert isinstance(module, Tensor), "a positional parameter is an operand, whatever its name"
        assert rest == {}
        return y * by

    monitor = ForwardMonitor(Last(), layer, op_=functools.partial(scaled, by=3.0))
    y = layer(torch.ones(1, 3))
    torch.testing.assert_close(monitor.peek(), 3 * y.detach())
