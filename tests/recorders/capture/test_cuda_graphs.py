"""Recording inside CUDA graphs, on a GPU: what is replayed is recorded, and nobody waits for the device."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from recorders import BackwardMonitor, ForwardMonitor, Recorder
from reducers import Mean, Moments, Summary

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton"),
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),  # the compiler's own, as it looks at any tensor
]

STEPS = 6


@pytest.fixture(autouse=True)
def _fresh(fresh_compiler: None) -> Iterator[None]:
    torch.manual_seed(0)
    yield
    torch.cuda.set_sync_debug_mode("default")


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 32)).cuda()


def batches() -> list[Tensor]:
    return [torch.randn(256, 64, device="cuda") for _ in range(STEPS)]


def step(compiled: nn.Module, x: Tensor) -> None:
    torch.compiler.cudagraph_mark_step_begin()
    compiled(x).square().sum().backward()


def test_a_training_in_cuda_graphs_is_recorded_as_in_eager_mode() -> None:
    net, xs = network(), batches()
    recorder = Recorder(
        out=ForwardMonitor(Summary()), each=ForwardMonitor(Moments("b c -> c")), back=BackwardMonitor(Mean("b c -> c"))
    ).modules(net, types=(nn.Linear, nn.GELU))
    compiled = torch.compile(net, mode="reduce-overhead", fullgraph=True)
    for x in xs[:3]:  # run, captured, replayed
        step(compiled, x)
    torch.cuda.set_sync_debug_mode("error")
    for x in xs[3:]:
        step(compiled, x)
    torch.cuda.set_sync_debug_mode("default")
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert set(recorder.samples.values()) == {STEPS}
    results = recorder.compute()
    recorder.reset()
    for x in xs:
        net(x).square().sum().backward()
    torch.testing.assert_close(results, recorder.compute(), rtol=1e-3, atol=1e-4)  # the compiler computes activations otherwise


def test_replays_in_steps_that_are_not_due_record_nothing_in_the_same_graph() -> None:
    net, xs = network(), batches()
    recorder = Recorder(ForwardMonitor(Mean(), every_step=2)).modules(net, types=nn.GELU)
    compiled = torch.compile(net, mode="reduce-overhead", fullgraph=True)
    for x in xs:
        step(compiled, x)
        recorder.step()
    assert counters["stats"]["unique_graphs"] == 1
    assert list(recorder.samples.values()) == [STEPS // 2]
    expected = torch.stack([net[:2](x).double().mean() for x in xs[::2]]).mean()
    torch.testing.assert_close(next(iter(recorder.values())).peek(), expected, rtol=1e-3, atol=1e-5)


def test_a_graph_that_the_user_captures_records_at_each_replay() -> None:
    net, memory = network(), torch.zeros(256, 64, device="cuda")
    recorder = Recorder(ForwardMonitor(Moments())).modules(net, types=nn.GELU)
    (monitor,) = recorder.values()
    compiled, stream = torch.compile(net, fullgraph=True), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(stream):
        compiled(memory)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        compiled(memory)
    monitor.reset()
    for x in batches():
        memory.copy_(x)
        graph.replay()
    assert monitor.samples == STEPS
    assert monitor.peek()["count"].item() == STEPS * 256 * 128
