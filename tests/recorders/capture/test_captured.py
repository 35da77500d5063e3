"""Eager hooks while the user captures a CUDA graph: left out, counted, and told; emulated, as capturing is asked at one place."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from names import name_of
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

from recorders import (
    BackwardInputMonitor,
    BackwardMonitor,
    CallMonitor,
    DifferenceMonitor,
    ForwardInputMonitor,
    ForwardMonitor,
    ModuleMonitor,
    Monitor,
    OptimizerStateMonitor,
    PairMonitor,
    ParameterGradientMonitor,
    ParameterMonitor,
    ParameterUpdateMonitor,
    Recorder,
    StateMonitor,
)
from recorders.capture.cuda_graphs import CAPTURES, IN_CUDA_GRAPH
from reducers import Last, Mean, Summary


class Stream:
    """The stream, of which a test says whether it is captured."""

    captured = False


@pytest.fixture(autouse=True)
def stream(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stream]:
    found = Stream()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: found.captured)
    before = CAPTURES[:]
    CAPTURES[:] = [lambda: torch.cuda.is_current_stream_capturing()]  # as if CUDA were in use
    yield found
    CAPTURES[:] = before


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + 1
        y: Tensor = self.second(self.first(x))
        return y


MONITORS: dict[str, Callable[[], Monitor]] = {
    "forward": lambda: ForwardMonitor(Mean()),
    "forward, mapped": lambda: ForwardMonitor(Mean(), op_=lambda y, x: y + 1),
    "forward, some calls": lambda: ForwardMonitor(Mean(), every=2),
    "forward input": lambda: ForwardInputMonitor(Mean()),
    "backward": lambda: BackwardMonitor(Mean()),
    "backward, mapped": lambda: BackwardMonitor(Mean(), op_=lambda gradient, y: gradient * y),
    "backward input": lambda: BackwardInputMonitor(Mean()),
    "parameter": lambda: ParameterMonitor(Mean(), when="step"),
    "parameter at calls": lambda: ParameterMonitor(Mean(), when="call"),
    "parameter, mapped": lambda: ParameterMonitor(Mean(), op_=lambda value: value + 1),
    "gradient": lambda: ParameterGradientMonitor(Mean()),
    "gradient, accumulated": lambda: ParameterGradientMonitor(Mean(), when="accumulate"),
    "update": lambda: ParameterUpdateMonitor(Mean()),
    "optimizer state": lambda: OptimizerStateMonitor(Mean(), "exp_avg"),
}


def trained(recorder: Recorder, net: nn.Module, stream: Stream, captured: list[bool], size: int = 3) -> list[Tensor]:
    """Trains for as many steps, of which some are captured; returns the parameters at the end."""
    torch.manual_seed(0)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    recorder.attach(optimizer)
    for stream.captured in captured:
        optimizer.zero_grad()
        net(torch.randn(size, 4, requires_grad=True)).square().sum().backward()
        optimizer.step()
    stream.captured = False
    return [parameter.detach() for parameter in net.parameters()]


@pytest.mark.parametrize("size", [3, 1 << 14])
@pytest.mark.parametrize("name", MONITORS)
def test_what_is_captured_is_left_out_counted_and_told(name: str, size: int, stream: Stream) -> None:
    torch.manual_seed(1)
    net = Net()
    recorder = Recorder(MONITORS[name]()).modules(net, types=nn.Linear)
    trained(recorder, net, stream, [False, False, True, True, True, False, False], size)
    recorded = 2 if "some" in name else 4
    (row,) = recorder.report().rows
    assert set(recorder.samples.values()) == {recorded}, row
    assert row.error is None
    assert row.skipped[IN_CUDA_GRAPH] >= 3
    assert f"{row.skipped[IN_CUDA_GRAPH]} {IN_CUDA_GRAPH}" in str(row)
    assert "torch.compile(net, mode='reduce-overhead')" in row.reason
    assert "outside of the capture" in row.reason


def test_what_is_recorded_around_a_capture_is_as_without_it(stream: Stream) -> None:
    layer = nn.Identity()
    for size in (4, 1 << 16):
        monitor, xs = ForwardMonitor(Summary(), layer), [torch.randn(size) for _ in range(7)]
        state = {}
        for number, x in enumerate(xs):
            stream.captured = number in (2, 3, 5)
            layer(x)
            if not stream.captured:
                state = Summary().update(state, x)
        stream.captured = False
        torch.testing.assert_close(monitor.peek(), Summary().compute(state))
        assert monitor.counts == {"calls": 7, IN_CUDA_GRAPH: 3}
        monitor.deregister()


def test_monitors_of_attributes_pairs_and_pushed_values_leave_it_out_too(stream: Stream) -> None:
    net = Net()
    monitors: list[Monitor] = [
        StateMonitor(Last(), "seen", net),
        DifferenceMonitor(Last(), "seen", net),
        CallMonitor(Mean()),
        ModuleMonitor(Last(), net, op_=lambda net: net.first.weight.norm()),
        PairMonitor(Last(), net.second, net.first, op_=lambda first, second: first - second),
    ]
    for stream.captured in (False, True, True, False):
        net(torch.randn(3, 4))
        monitors[2].push(torch.ones(3))  # type: ignore[attr-defined]
        monitors[3].tick()  # type: ignore[attr-defined]
    stream.captured = False
    for monitor in monitors:
        assert (monitor.samples, monitor.last_error) == (2, None), monitor
        assert monitor.counts[IN_CUDA_GRAPH] == 2, monitor


def test_the_training_is_that_of_one_that_is_not_recorded(stream: Stream) -> None:
    captured = [False, True, True, False]
    torch.manual_seed(1)
    bare, net = Net(), Net()
    net.load_state_dict(bare.state_dict())
    wanted = trained(Recorder(CallMonitor(Mean())), bare, stream, captured)
    recorder = Recorder(**{f"m{number}": make() for number, make in enumerate(MONITORS.values())}).modules(net, types=nn.Linear)
    assert all(map(torch.equal, trained(recorder, net, stream, captured), wanted))


@pytest.mark.parametrize("reducer", [Mean(), Mean().premap(torch.abs), Last()], ids=name_of)
def test_what_compiled_graphs_hand_over_by_python_is_left_out(
    reducer: Mean, stream: Stream, fresh_compiler: None, without_loops: None
) -> None:
    """On a CPU the operator in C++ would record it."""
    net = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4), nn.GELU())
    recorder = Recorder(ForwardMonitor(reducer)).modules(net, types=nn.GELU)
    compiled = torch.compile(net, backend=aot_autograd(fw_compiler=lambda graph, _: graph), fullgraph=True)
    for stream.captured in (False, False, True, True, True, False):
        with torch.no_grad():
            compiled(torch.randn(3, 4))
    stream.captured = False
    assert list(recorder.samples.values()) == [3, 3]
    assert [row.skipped.get(IN_CUDA_GRAPH) for row in recorder.report().rows] == [3, 3]
