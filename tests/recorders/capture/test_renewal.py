"""Nets that were compiled and run before their recorder: what was made without the hooks is made again, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from recorders import BackwardMonitor, ForwardMonitor, Recorder, RecordingWarning
from recorders._torch import CAPTURES_IN_GRAPHS, compiler
from recorders.capture import renewal
from reducers import Count, Mean

pytestmark = [
    pytest.mark.skipif(not CAPTURES_IN_GRAPHS, reason="recording in graphs needs a later torch"),
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),  # the compiler's own, as it looks at any tensor
]

X = torch.ones(2, 3)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.act = nn.Linear(3, 3), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.act(self.lin(x))
        return found


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Other(nn.Module):
    """Another net, in which a layer of the same class is in another place."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.lin(x) + 1
        return found


@pytest.fixture(autouse=True)
def _new_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def whole(net: Net, backend: Any) -> Callable[[Tensor], Tensor]:
    return torch.compile(net, backend=backend)


def in_place(net: Net, backend: Any) -> Callable[[Tensor], Tensor]:
    net.compile(backend=backend)
    return net


def function(net: Net, backend: Any) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        return net(x) * 2

    return torch.compile(run, backend=backend)


def regional(net: Net, backend: Any) -> Callable[[Tensor], Tensor]:
    for block in net.blocks:
        block.compile(backend=backend)
    return net


WAYS = [whole, in_place, function, regional]


@pytest.mark.parametrize("submodule", [False, True], ids=["net", "submodule"])
@pytest.mark.parametrize("way", WAYS)
def test_a_net_that_was_compiled_and_run_before_is_recorded(way: Any, submodule: bool) -> None:
    net = Net()
    run = way(net, "eager")
    for _ in range(2):
        run(X)
    watched = net.blocks[1] if submodule else net
    with Recorder(out=ForwardMonitor(Mean()), back=BackwardMonitor(Mean())).modules(watched, leaves=True) as recorder:
        for _ in range(4):
            run(X).sum().backward()
    assert {*recorder.samples.values()} == {4}
    with recorder:
        run(X).sum().backward()
    assert {*recorder.samples.values()} == {5}


@pytest.mark.parametrize("way", WAYS)
def test_so_is_a_monitor_that_is_put_on_by_hand(way: Any) -> None:
    net = Net()
    run = way(net, "eager")
    run(X)
    monitor = ForwardMonitor(Count(), net.blocks[2].lin)
    for _ in range(3):
        run(X)
    assert monitor.samples == 3


def test_so_is_a_net_of_which_another_instance_was_compiled_earlier() -> None:
    first, second = Net(), Net()
    torch.compile(first, backend="eager")(X)
    recorder = Recorder(ForwardMonitor(Mean())).modules(second, leaves=True)
    run, bare = torch.compile(second, backend="eager"), torch.compile(first, backend="eager")
    for _ in range(3):
        bare(X), run(X)
    assert {*recorder.samples.values()} == {3}


@pytest.mark.parametrize("watched", [0, 1, 2])
@pytest.mark.parametrize("before", [False, True], ids=["recorder first", "run first"])
def test_one_of_several_blocks_that_share_a_graph_is_recorded_alone(before: bool, watched: int) -> None:
    net = Net()
    run = regional(net, "eager")
    if before:
        run(X)
    recorder = Recorder(ForwardMonitor(Mean())).modules(net.blocks[watched])
    for _ in range(4):
        run(X)
    assert {*recorder.samples.values()} == {4}


def test_both_sides_of_a_pair() -> None:
    first, second = Net(), Net()
    runs = [torch.compile(net, backend="eager") for net in (first, second)]
    for run in runs:
        run(X)
    recorder = Recorder.pairs(first, second, Mean(), nn.Linear, op_=lambda mine, other: mine - other)
    for _ in range(3):
        for run in runs:
            run(X)
    assert {*recorder.samples.values()} == {3}


def test_other_nets_are_not_compiled_again() -> None:
    net, other, counter = Net(), Other(), CompileCounterWithBackend("eager")
    torch.compile(net, backend="eager")(X)
    run = torch.compile(other, backend=counter)
    run(X)
    assert counter.frame_count == 1
    recorder = Recorder(ForwardMonitor(Mean())).modules(net, leaves=True)
    with recorder:
        run(X)
    run(X)
    assert counter.frame_count == 1


def test_a_net_is_compiled_again_once_and_not_at_each_block() -> None:
    net, counter = Net(), CompileCounterWithBackend("eager")
    run = torch.compile(net, backend=counter)
    run(X)
    recorder = Recorder(ForwardMonitor(Mean())).modules(net, leaves=True)
    for _ in range(3):
        with recorder:
            run(X)
    assert counter.frame_count == 2


def test_if_nothing_may_be_compiled_again_recorder_plan_and_report_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renewal, "_hooked", WeakKeyDictionary())  # otherwise graphs are guarded, because of other tests
    net = Net()
    run = torch.compile(net, backend="eager")
    run(X)
    with torch.compiler.set_stance("fail_on_recompile"):
        with pytest.warns(RecordingWarning, match=r"6 hooks.*before the first compiled call, or call torch._dynamo.reset\(\)"):
            recorder = Recorder(ForwardMonitor(Mean())).modules(net, leaves=True)
        run(X)
    assert "before the first compiled call" in str(recorder.plan(X))
    assert "before the first compiled call" in recorder.report().rows[0].reason
    torch._dynamo.reset()
    run(X)
    assert {*recorder.samples.values()} == {1}


def test_without_the_functions_of_the_compiler_the_user_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net()
    run = torch.compile(net, backend="eager")
    run(X)
    monkeypatch.setattr("torch._dynamo.convert_frame.input_codes", None)
    with pytest.warns(RecordingWarning, match=r"call torch._dynamo.reset\(\)"):
        Recorder(ForwardMonitor(Mean())).modules(net, leaves=True)
    assert compiler.drop_graphs(lambda kind, around: True) is False


def test_in_a_process_without_compiled_code_nothing_is_looked_at() -> None:
    assert compiler.drop_graphs(lambda kind, around: pytest.fail("there is none")) is None
