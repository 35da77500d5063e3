"""Blocks of one class that are compiled each by itself share their graph, recorded or not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from recorders import (
    BackwardInputMonitor,
    BackwardMonitor,
    DifferenceMonitor,
    ForwardInputMonitor,
    ForwardMonitor,
    Monitor,
    ParameterGradientMonitor,
    ParameterMonitor,
    ParameterUpdateMonitor,
    Recorder,
    StateMonitor,
)
from reducers import Collect, Last, Product, Quantile, Summary

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # the compiler's own, as it looks at any tensor

STATISTICS = Product(summary=Summary(), last=Last())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.act, self.second = nn.LayerNorm(4), nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.second(self.act(self.first(self.norm(x))))
        return out


class Net(nn.Module):
    def __init__(self, blocks: int, checkpointed: bool) -> None:
        super().__init__()
        self.blocks, self.checkpointed = nn.ModuleList(Block() for _ in range(blocks)), checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x


def forwards() -> dict[str, Monitor]:
    return {"out": ForwardMonitor(STATISTICS), "inp": ForwardInputMonitor(Quantile()), "more": ForwardMonitor(Collect())}


def gradients() -> dict[str, Monitor]:
    return {"back": BackwardMonitor(STATISTICS), "into": BackwardInputMonitor(Quantile())}


def callables() -> dict[str, Monitor]:
    return {
        "op": ForwardMonitor(STATISTICS, op_=lambda output, inputs: output * 2),
        "filter": ForwardInputMonitor(STATISTICS, filter_=lambda inputs: bool(inputs.sum() < 1e9)),
        "condition": ForwardMonitor(Summary(), condition=lambda: True),
        "back": BackwardMonitor(STATISTICS, op_=lambda gradient, output: gradient * output),
    }


def callables_of_inputs() -> dict[str, Monitor]:
    return {"into": BackwardInputMonitor(Summary(), map_=lambda gradient, seen: (gradient * seen,))}


def attributes() -> dict[str, Monitor]:
    return {
        "state": StateMonitor(STATISTICS, "weight"),
        "difference": DifferenceMonitor(STATISTICS, "weight"),
        "value": ParameterMonitor(STATISTICS, when="call"),
    }


def parameters() -> dict[str, Monitor]:
    return {
        "gradient": ParameterGradientMonitor(STATISTICS, when="accumulate"),
        "final": ParameterGradientMonitor(Summary()),
        "update": ParameterUpdateMonitor(Summary()),
    }


def cadences() -> dict[str, Monitor]:
    return {
        "third": ForwardMonitor(Summary(), every=3),
        "training": BackwardMonitor(Summary(), eval_update=False),
        "grad": ForwardMonitor(Summary(), phase="grad"),
    }


class Run:
    """Three steps of training, each block compiled by itself."""

    def __init__(
        self, blocks: int, checkpointed: bool, monitors: Callable[[], dict[str, Monitor]] | None = None, compiled: bool = True
    ) -> None:
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(0)
        net = Net(blocks, checkpointed)
        self.recorder = Recorder(**monitors()).modules(net, exclude=nn.ModuleList) if monitors else None
        counter = CompileCounterWithBackend("aot_eager")
        for block in net.blocks if compiled else []:
            block.compile(fullgraph=True, backend=counter)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        self.losses = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = net(torch.randn(3, 4)).square().mean()
            loss.backward()
            optimizer.step()
            self.losses.append(loss.detach())
        self.graphs = counter.frame_count
        self.parameters = [parameter.detach() for parameter in net.parameters()]

    def same_training(self, other: Run) -> bool:
        pairs = zip([*self.losses, *self.parameters], [*other.losses, *other.parameters], strict=True)
        return all(torch.equal(mine, theirs) for mine, theirs in pairs)


@pytest.fixture(scope="module")
def bare() -> dict[tuple[int, bool], Run]:
    return {(blocks, checkpointed): Run(blocks, checkpointed) for blocks in (3, 12) for checkpointed in (False, True)}


MATRIX = [
    *((kinds, blocks, checkpointed) for kinds in (forwards, gradients) for blocks in (3, 12) for checkpointed in (False, True)),
    *((kinds, 12, False) for kinds in (callables, attributes)),
    *((kinds, 3, True) for kinds in (callables, callables_of_inputs, attributes, parameters, cadences)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("monitors", "blocks", "checkpointed"), MATRIX)
def test_equal_blocks_make_as_many_graphs_as_without_a_recorder(
    monitors: Callable[[], dict[str, Monitor]], blocks: int, checkpointed: bool, bare: dict[tuple[int, bool], Run]
) -> None:
    wanted, run = bare[blocks, checkpointed], Run(blocks, checkpointed, monitors)
    assert run.graphs == wanted.graphs == 2  # the first block is given a batch that asks for no gradient
    assert run.same_training(wanted)
    eager = Run(blocks, checkpointed, monitors, compiled=False)
    assert run.recorder is not None
    assert eager.recorder is not None
    assert list(run.recorder.samples.values()) == list(eager.recorder.samples.values())
    for name, monitor in run.recorder.items():
        torch.testing.assert_close(monitor.snapshot().leaves(), eager.recorder[name].snapshot().leaves(), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_hundred_blocks_share_their_graphs_whatever_the_number_of_monitors() -> None:
    def many() -> dict[str, Monitor]:
        """The kinds of the matrix, with reducers that are compiled in a moment: the matrix has the others, for 12 blocks."""
        return {
            "out": ForwardMonitor(Last()),
            "inp": ForwardInputMonitor(Quantile()),
            "more": ForwardMonitor(Collect()),
            "back": BackwardMonitor(Last()),
            "into": BackwardInputMonitor(Quantile()),
            "third": ForwardMonitor(Last(), every=3),
            "training": BackwardMonitor(Last(), eval_update=False),
            "grad": ForwardMonitor(Last(), phase="grad"),
        }

    run = Run(100, False, many)
    assert run.graphs == 2
    assert run.recorder is not None
    assert len(run.recorder) == 8 * 501
    assert run.same_training(Run(100, False))


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
def test_steps_that_are_chosen_cost_one_graph_more_for_all_blocks() -> None:
    net = Net(12, False)
    recorder = Recorder(out=ForwardMonitor(Summary(), every_step=2), back=BackwardMonitor(Summary(), every_step=2))
    recorder.modules(net, exclude=nn.ModuleList)
    counter = CompileCounterWithBackend("aot_eager")
    for block in net.blocks:
        block.compile(fullgraph=True, backend=counter)
    for _ in range(6):
        net(torch.randn(3, 4)).sum().backward()
        recorder.step()
    assert counter.frame_count == 4  # first block or not, busy step or not
    assert set(recorder.samples.values()) == {3}


@pytest.mark.usefixtures("fresh_compiler")
def test_blocks_with_other_reducers_do_not_share_a_graph() -> None:
    net = Net(4, False)
    recorder = Recorder(even=ForwardMonitor(Summary()), odd=ForwardMonitor(Quantile()))
    for index in range(4):
        recorder.modules(net.blocks[index], groups="odd" if index % 2 else "even", prefix=str(index))
    counter = CompileCounterWithBackend("aot_eager")
    for block in net.blocks:
        block.compile(fullgraph=True, backend=counter)
    for _ in range(2):
        net(torch.randn(3, 4, requires_grad=True)).sum().backward()
    assert counter.frame_count == 2
    assert set(recorder.samples.values()) == {2}
    for name, monitor in recorder.items():
        assert isinstance(monitor.peek(), dict) == name.startswith("even")
