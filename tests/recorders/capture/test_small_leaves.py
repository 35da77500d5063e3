"""Leaves of a compiled graph are read by one operator for several: no code of their own, and the numbers of eager mode."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

from recorders import BackwardMonitor, ForwardMonitor, Recorder
from recorders.graphs import trace
from recorders.graphs.ring import GraphRing, Share
from reducers import Extremes, Mean, Moments, Norm, Product, Reducer, Summary
from reducers.kernels.cpp import library

pytestmark = pytest.mark.skipif(not library.in_order(), reason="no C++ compiler")

X = torch.linspace(-1, 2, 8 * 16).view(8, 16)
TOGETHER = "torch_recorders.record"


@pytest.fixture(autouse=True)
def _new_graphs() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


class Nodes:
    """A backend that keeps the names of what its graphs call."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.backend = aot_autograd(fw_compiler=self._keep, bw_compiler=self._keep)

    def _keep(self, graph: Any, inputs: Any) -> Any:
        self.names += [f"{node.target} {node.args[:2]}" for node in graph.graph.nodes]  # effects have it as argument
        return make_boxed_func(graph.forward)

    def count(self, part: str) -> int:
        return sum(part in name for name in self.names)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 8), nn.Tanh())


def recorded(reducer: Reducer, layers: nn.Module, **options: Any) -> Recorder:
    monitors = {"out": ForwardMonitor(reducer, **options), "grad": BackwardMonitor(reducer, **options)}
    return Recorder(**monitors).modules(layers, leaves=True)


def train(step: Callable[[Tensor], Tensor], steps: int = 1) -> None:
    for number in range(steps):
        step(X * (number + 1)).square().sum().backward()


def assert_same(first: Recorder, second: Recorder) -> None:
    for name, monitor in first.items():
        assert second[name].samples == monitor.samples, name
        for key, value in monitor.state.items():
            torch.testing.assert_close(second[name].state[key], value, rtol=1e-6, atol=1e-6)


def both(reducer: Reducer, layers: nn.Module, **options: Any) -> tuple[Recorder, nn.Module, Recorder, Any, Nodes]:
    """The net recorded in eager mode, a copy of it recorded in a graph, and the nodes of that."""
    traced, nodes = copy.deepcopy(layers), Nodes()
    first, second = recorded(reducer, layers, **options), recorded(reducer, traced, **options)
    return first, layers, second, torch.compile(traced, backend=nodes.backend, fullgraph=True), nodes


REDUCERS = [Summary(), Summary("b c -> c"), Moments("b c -> b"), Norm(), Product(mean=Mean(), range=Extremes("b c -> c"))]


@pytest.mark.parametrize("reducer", REDUCERS, ids=repr)
def test_the_numbers_of_eager_mode_and_no_code_in_the_graph(reducer: Reducer) -> None:
    first, eager, second, traced, nodes = both(reducer, net())
    train(eager, 5)
    train(traced, 5)
    assert_same(first, second)
    assert nodes.count(TOGETHER) == 2  # one for the outputs, and one for the gradients
    bare = Nodes()
    train(torch.compile(net(), backend=bare.backend, fullgraph=True))
    for name in ("sum", "amin", "amax", "where", "stack", "cat", "reducers.loop"):
        assert nodes.count(name) == bare.count(name), name


def test_the_same_with_and_without_a_compiler(with_and_without_a_compiler: str) -> None:
    first, eager, second, traced, nodes = both(Summary("b c -> c"), net())
    train(eager, 3)
    train(traced, 3)
    assert nodes.count("amin") == 0
    assert nodes.count(TOGETHER) == 2
    assert_same(first, second)


IN_PLACE = {
    "layers": lambda: [nn.Linear(16, 24), nn.ReLU(inplace=True), nn.Linear(24, 8), nn.Hardtanh(inplace=True)],
    "the input": lambda: [nn.Identity(), nn.ReLU(inplace=True)],
}


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("kind", IN_PLACE)
def test_a_leaf_is_read_as_it_was_when_it_was_recorded(kind: str, backend: str) -> None:
    """Layers that follow may write into it before the graph ends."""
    layers = nn.Sequential(*IN_PLACE[kind]())
    traced = copy.deepcopy(layers)
    first, second = (Recorder(ForwardMonitor(Summary())).modules(each, leaves=True) for each in (layers, traced))
    compiled = torch.compile(traced, backend=backend, fullgraph=True)
    with torch.no_grad():
        for _ in range(3):
            x, y = X.clone(), X.clone()
            layers(x)
            compiled(y)
            assert torch.equal(x, y)
    assert_same(first, second)
    assert next(iter(first.values())).compute()["min"] < 0


def test_gradients_and_outputs_of_training_are_the_same_bits() -> None:
    def trained(record: bool) -> list[Tensor]:
        torch.manual_seed(0)
        layers = net()
        recorder = recorded(Summary(), layers) if record else None
        torch._dynamo.reset()
        train(torch.compile(layers, backend="aot_eager", fullgraph=True), 4)
        assert recorder is None or recorder["out/0"].samples == 4
        return [parameter.grad for parameter in layers.parameters() if parameter.grad is not None]

    assert all(map(torch.equal, trained(record=False), trained(record=True)))


def test_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves are read before the end if together they take much memory."""
    monkeypatch.setattr(trace, "MOST_HELD", 8 * 24 * 4)
    first, eager, second, traced, nodes = both(Summary(), net())
    train(eager, 4)
    train(traced, 4)
    assert nodes.count(TOGETHER) == 4  # of outputs: after two layers, and at the end; and so of gradients
    assert_same(first, second)


def test_big_leaves_are_read_at_once_and_not_copied() -> None:
    layers = nn.Sequential(nn.Linear(16, 1 << 18), nn.GELU(), nn.Linear(1 << 18, 8), nn.Tanh())
    first, eager, second, traced, nodes = both(Summary(), layers)
    train(eager, 3)
    train(traced, 3)
    assert nodes.count(TOGETHER) == 5  # of outputs the two big ones, and the rest; of gradients three that wait, and the last
    assert nodes.count("clone") == 4
    assert_same(first, second)


def test_a_reducer_that_fails_reports_it() -> None:
    recorder = Recorder(ForwardMonitor(Summary("b c d -> c"))).modules(layers := net(), leaves=True)
    with pytest.warns(UserWarning, match="b c d"), torch.no_grad():
        torch.compile(layers, backend="aot_eager")(X)
    assert all(monitor.samples == 0 for monitor in recorder.values())


@pytest.mark.parametrize("steps", [0, 4], ids=["at first", "when the monitors are known"])
def test_what_cannot_be_read_is_recorded_as_in_eager_mode(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = net()
    wanted = layers(X)
    recorder = Recorder(ForwardMonitor(Summary())).modules(layers, leaves=True)
    traced = torch.compile(layers, backend="aot_eager", fullgraph=True)
    for _ in range(steps):
        traced(X)

    def fail(*_: Any) -> Any:
        raise RuntimeError("no memory")

    for monitor in recorder.values():
        monitor.gate.turn(on=True)  # so that the operator calls Python
    with monkeypatch.context() as patch:
        patch.setattr(GraphRing, "add", fail)
        assert torch.equal(traced(X), wanted)
    traced(X)
    assert {monitor.samples for monitor in recorder.values()} == {steps + 2}
    assert {monitor.last_error for monitor in recorder.values()} == {None}


def known(recorder: Recorder) -> bool:
    """Whether the next observation is added without a look at the monitors."""
    (row,) = recorder["out/0"].buffer.stored.pending.values()
    assert isinstance(row, Share)
    return row.ring.ready


def test_whatever_happens_to_monitors_that_were_known_to_record() -> None:
    first, eager, second, traced, _ = both(Summary(), net())

    def happen(recorder: Recorder, step: Any) -> None:
        changes: list[Callable[[], Any]] = [
            lambda: None,
            lambda: recorder["out/1"].reset(),
            lambda: recorder["out/0"].deregister(),
            lambda: recorder["out/0"].register(),
            lambda: recorder["grad/2"].compute(),
            lambda: recorder.report(),
            lambda: recorder["out/3"].clear(keepshape=True),
            lambda: recorder.reset(),
            lambda: recorder.deregister(),
            lambda: recorder.register(),
        ]
        for change in changes:
            change()
            train(step, 5)
            _ = [monitor.samples for monitor in recorder.values()]

    happen(first, eager)
    happen(second, traced)
    assert known(second)
    assert_same(first, second)


def test_calls_of_all_kinds_are_counted() -> None:
    layers = net()
    recorder = Recorder(ForwardMonitor(Summary(), eval_update=False)).modules(layers, leaves=True)
    traced = torch.compile(layers, backend="aot_eager", fullgraph=True)
    for _ in range(6):
        traced(X)
    layers.eval()
    for _ in range(4):
        layers(X)
    layers.train()
    for _ in range(3):
        traced(X)
    for row in recorder.report().rows:
        assert row.samples == 9
        assert row.calls == 13
        assert sum(row.skipped.values()) == 4


def test_chosen_steps() -> None:
    layers = net()
    recorder = Recorder(ForwardMonitor(Summary(), every_step=2)).modules(layers, leaves=True)
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.0)
    recorder.attach(optimizer)
    traced = torch.compile(layers, backend="aot_eager")
    for _ in range(8):
        train(traced)
        optimizer.step()
    assert {monitor.samples for monitor in recorder.values()} == {4}
