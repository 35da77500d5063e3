"""Graphs that are compiled for many sizes: one for all of them, the numbers of eager mode, and no reducing code in it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

from recorders import BackwardMonitor, ForwardInputMonitor, ForwardMonitor, Recorder, RecordingWarning
from recorders.capture import entering
from recorders.graphs import trace
from reducers import Collect, First, Histogram, Mean, Moments, Norm, Product, Quantile, Reducer, State, Summary
from reducers.kernels.cpp import library

pytestmark = pytest.mark.skipif(not library.in_order(), reason="no C++ compiler")

SIZES = [(4, 6), (9, 6), (3, 17), (60, 64), (2, 5)]
PER_ELEMENT = ("amin", "amax", "where", "isfinite", "square")


@pytest.fixture(autouse=True)
def _new_graphs() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8), nn.Sigmoid())


def recorded(reducer: Reducer, layers: nn.Module) -> Recorder:
    return Recorder(out=ForwardMonitor(reducer), grad=BackwardMonitor(reducer)).modules(layers, leaves=True)


def train(step: Any) -> list[Tensor]:
    found = []
    for batch, length in SIZES:
        x = torch.linspace(-2, 3, batch * length * 8).view(batch, length, 8).requires_grad_()
        step(x).sum().backward()
        found.append(x.grad)
    return found


def traced(layers: nn.Module, graphs: list[Any], backend: str = "") -> Any:
    def keep(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    return torch.compile(layers, backend=backend or aot_autograd(fw_compiler=keep, bw_compiler=keep), dynamic=True, fullgraph=True)


REDUCERS = [Summary(), Moments("b t c -> c"), Norm(), Product(mean=Mean("b t c -> c"), range=Summary())]


@pytest.mark.slow
@pytest.mark.parametrize("reducer", REDUCERS, ids=repr)
def test_one_graph_for_all_sizes_with_the_numbers_of_eager_mode(reducer: Reducer) -> None:
    layers, graphs = net(), list[Any]()
    eager, compiled, bare = copy.deepcopy(layers), copy.deepcopy(layers), copy.deepcopy(layers)
    first, second = recorded(reducer, eager), recorded(reducer, compiled)
    train(eager)
    gradients = train(traced(compiled, graphs))
    assert len(graphs) == 2  # the forward, and the backward
    names = [str(node.target) for graph in graphs for node in graph.graph.nodes]
    targets = [f"{node.target} {node.args}" for graph in graphs for node in graph.graph.nodes]
    assert sum("torch_recorders.record" in target for target in targets) == 8  # of each leaf by itself
    assert not [name for name in names if any(part in name for part in PER_ELEMENT)]
    for one, other in zip(gradients, train(traced(bare, [])), strict=True):
        assert torch.equal(one, other)
    for name, monitor in first.items():
        assert second[name].samples == monitor.samples == len(SIZES)
        for key, value in monitor.state.items():
            torch.testing.assert_close(second[name].state[key], value, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_inductor_compiles_one_graph_too() -> None:
    layers = net()
    eager, compiled = copy.deepcopy(layers), copy.deepcopy(layers)
    first, second = recorded(Summary(), eager), recorded(Summary(), compiled)
    train(eager)
    with torch._dynamo.config.patch(error_on_recompile=True):
        train(traced(compiled, [], "inductor"))
    for name, monitor in first.items():
        for key, value in monitor.state.items():
            torch.testing.assert_close(second[name].state[key], value, rtol=1e-6, atol=1e-6)


def test_a_kept_axis_whose_size_is_a_symbol() -> None:
    """No memory can be kept for it before the graph runs."""
    layers, graphs = nn.Sequential(nn.Tanh()), list[Any]()
    recorder = Recorder(ForwardMonitor(Mean("b t c -> t"))).modules(layers, leaves=True)
    run = traced(layers, graphs)
    with torch.no_grad():
        for batch in (4, 5, 9):
            x = torch.linspace(-2, 3, batch * 7 * 8).view(batch, 7, 8)
            run(x)
    (monitor,) = recorder.values()
    assert monitor.samples == 3
    assert len(graphs) == 1
    everything = torch.cat([torch.linspace(-2, 3, batch * 7 * 8).view(batch, 7, 8).tanh() for batch in (4, 5, 9)])
    torch.testing.assert_close(monitor.compute().float(), everything.mean((0, 2)), rtol=1e-6, atol=1e-6)


def test_strides_that_change_while_sizes_stay() -> None:
    """Then strides alone are symbols: asked for its bytes, such a tensor raises an error, which ended the user's compilation."""
    layers = nn.Sequential(nn.Tanh(), nn.Sigmoid())
    recorder = Recorder(ForwardInputMonitor(Mean("b c -> c"))).modules(layers, leaves=True)
    run, xs = torch.compile(layers, backend="aot_eager", fullgraph=True), torch.randn(3, 5, 12)
    for step in (1, 2, 3):
        assert torch.equal(run(xs[step - 1, :, : 3 * step : step]), layers(xs[step - 1, :, : 3 * step : step]))
    layout = torch.cat([xs[step - 1, :, : 3 * step : step] for step in (1, 2, 3)])
    assert recorder["0"].samples == 6  # compiled, and by themselves
    torch.testing.assert_close(recorder["0"].compute(), layout.double().mean(0), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["_gather", "_emit"])
def test_what_fails_while_a_graph_is_traced_ends_no_compilation(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("a mistake of ours")

    layers = nn.Sequential(nn.Tanh(), nn.Sigmoid())
    recorder = Recorder(ForwardMonitor(Mean())).modules(layers)
    monkeypatch.setattr(trace, name, fails)
    monkeypatch.setattr(entering, "_told", set())
    x = torch.randn(4, 3)
    with pytest.warns(RecordingWarning, match=r"trace of a graph .* failed: RuntimeError: a mistake of ours; the training goes on"):
        found = torch.compile(layers, backend="aot_eager", fullgraph=True)(x)
    assert torch.equal(found, x.tanh().sigmoid())
    recorder.deregister()


class AsksForSizes(Mean):
    """A reducer of the user that decides by sizes."""

    def update(self, state: State, *xs: Tensor) -> State:
        (x,) = xs
        return super().update(state, x if len(x) > 5 and int(x.shape[1]) > 5 else x[:1])


HANDED_OVER = [AsksForSizes(), Collect().premap(torch.ravel), First(), Histogram(edges=(-3.0, 0.0, 3.0)), Quantile()]


@pytest.mark.parametrize("reducer", HANDED_OVER, ids=lambda reducer: type(reducer).__name__)
def test_a_reducer_that_asks_for_sizes_does_not_compile_the_program_again(
    reducer: Reducer, caplog: pytest.LogCaptureFixture
) -> None:
    layers, graphs = nn.Sequential(nn.Tanh()), list[Any]()
    recorder = Recorder(out=ForwardMonitor(reducer), grad=BackwardMonitor(reducer)).modules(layers, leaves=True)
    train(traced(layers, graphs))
    assert len(graphs) == 2
    eager = copy.deepcopy(layers)
    wanted = recorded(reducer, eager)
    train(eager)
    for name, monitor in wanted.items():
        assert recorder[name].samples == monitor.samples == len(SIZES)
        torch.testing.assert_close(recorder[name].compute(), monitor.compute())
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
