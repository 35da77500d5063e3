"""Big leaves of a compiled graph on a CPU: what the loop does not read is updated outside of the graph, as in eager mode."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from recorders import BackwardMonitor, ForwardMonitor, Recorder
from recorders.monitors.graphs import GraphSink
from recorders.ring.ring import Ring
from reducers import Covariance, Histogram, Quantile, Reducer, TopK

X = torch.randn(1 << 10, 32, generator=torch.Generator().manual_seed(0))
REDUCERS: list[Reducer] = [Quantile(), Histogram(bins=16, low=-2.0, high=2.0), TopK("... ->", k=4), Covariance("... d -> d")]


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The elements of each observation that a graph handed over to Python."""
    found: list[int] = []
    record = GraphSink.record_batch

    def note(numbers: Any, tensors: Any, *args: Any) -> None:
        found.extend(x.numel() for x in tensors)
        record(numbers, tensors, *args)

    monkeypatch.setattr(GraphSink, "record_batch", staticmethod(note))
    return found


def trained(net: nn.Module, x: torch.Tensor, reducer: Reducer, *, compiled: bool) -> Recorder:
    torch._dynamo.reset()
    recorder = Recorder(out=ForwardMonitor(reducer), grad=BackwardMonitor(reducer)).modules(net, leaves=True)
    run = torch.compile(net, fullgraph=True, backend="aot_eager") if compiled else net
    for number in range(3):
        run(x * (number + 1)).square().mean().backward()
    return recorder


@pytest.mark.parametrize("reducer", REDUCERS, ids=repr)
def test_big_leaves_are_updated_outside_of_the_graph_with_the_numbers_of_eager_mode(reducer: Reducer, handed: list[int]) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 32), nn.Tanh())
    wanted = trained(copy.deepcopy(net), X, reducer, compiled=False)
    assert not handed
    found = trained(net, X, reducer, compiled=True)
    assert handed == [1 << 15] * 12
    for name, monitor in found.items():
        assert monitor.samples == wanted[name].samples == 3
        torch.testing.assert_close(monitor.states, wanted[name].states)


def test_small_leaves_wait_in_the_rings_of_eager_mode(handed: list[int]) -> None:
    recorder = trained(nn.Sequential(nn.Linear(32, 32), nn.Tanh()), X[:4], Quantile(), compiled=True)
    assert set(recorder.samples.values()) == {3}
    assert handed == [128] * 12
    for monitor in recorder.values():
        (ring,) = monitor.buffer.stored.pending.values()
        assert isinstance(ring, Ring)
        assert ring.count == 2
