"""What `presets.fingerprints` records: of which steps, and that the training stays as it is, with whole graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_runs import WORDS, build
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from recorders import ParameterMonitor, Recorder, divergence, presets
from reducers import Collect, Digest, PerObservation


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=False)


def train(
    recorder: Recorder | None,
    wrap: Callable[[nn.Module], Any] = lambda net: net,
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW,
    steps: int = 4,
) -> list[Tensor]:
    """Losses and parameters."""
    net = build()
    stepper = optimizer(net.parameters(), lr=1e-2)  # type: ignore[call-arg]
    losses = []
    if recorder is not None:
        recorder.modules(net)
    call = wrap(net)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        x = torch.randint(WORDS, (4, 7), generator=generator)
        loss = nn.functional.cross_entropy(call(x).flatten(0, 1), x.flatten())
        torch.autograd.backward(loss)
        stepper.step()
        stepper.zero_grad()
        losses.append(loss.detach())
    if recorder is not None:
        recorder.deregister()
    return [*losses, *(parameter.detach() for parameter in net.parameters())]


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_the_training_stays_as_it_is(every: int, optimizer: type[torch.optim.Optimizer]) -> None:
    bare, recorded = train(None, optimizer=optimizer), train(presets.fingerprints(every), optimizer=optimizer)
    assert all(torch.equal(one, other) for one, other in zip(bare, recorded, strict=True))


@pytest.mark.slow
def test_compiled_it_stays_as_it_is_and_the_graph_is_whole() -> None:
    bare = train(None, lambda net: torch.compile(net, fullgraph=True, backend="aot_eager"))
    counters.clear()
    recorder = presets.fingerprints()
    recorded = train(recorder, lambda net: torch.compile(net, fullgraph=True, backend="aot_eager"))
    assert all(torch.equal(one, other) for one, other in zip(bare, recorded, strict=True))
    assert not counters["graph_break"]
    assert recorder["output/1.qkv"].samples == recorder["gradient/1.qkv"].samples == 4
    eager = presets.fingerprints()
    train(eager)
    assert not divergence(eager, recorder)


def test_a_forward_that_is_computed_again_counts_once() -> None:
    plain, again = presets.fingerprints(), presets.fingerprints()
    train(plain)
    train(again, Checkpointed)
    found = divergence(plain, again)
    assert found.distance == 0, found
    assert again["output/1.qkv"].samples == 4


def test_the_steps_that_are_recorded() -> None:
    recorder = presets.fingerprints(every=3)
    train(recorder, steps=8)
    assert recorder["steps"].peek()[:, 0].tolist() == [0, 3, 6]
    assert {recorder[name].samples for name in ("output", "gradient/1.qkv", "weights/1.qkv", "after/1.qkv", "states")} == {3}
    assert recorder["before/1.qkv"].samples == 1
    each = presets.fingerprints()
    train(each, steps=8)
    assert (each["output"].samples, each["after/1.qkv"].samples, each["before/1.qkv"].samples) == (8, 1, 1)


def test_a_digest_is_that_of_digest() -> None:
    recorder, digests = presets.fingerprints(), Recorder(ParameterMonitor(PerObservation(Digest(), Collect())))
    net = build()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with recorder.modules(net), digests.modules(net):
        net(torch.arange(7)[None]).sum().backward()
        optimizer.step()
    after = recorder["after/1.qkv"].peek()["weight"]["digest"]
    assert torch.equal(after, digests["1.qkv"].peek()["weight"]["digest"])


def test_evaluation_is_left_out() -> None:
    recorder = presets.fingerprints()
    net = build()
    with recorder.modules(net):
        with torch.no_grad():
            net(torch.arange(7)[None])
        net.eval()
        with torch.no_grad():
            net(torch.arange(7)[None])
    assert recorder["output"].samples == 0


def normed(momentum: float = 0.1, start: float = 0.0, table: float = 1.0, training: bool = True) -> Recorder:
    """Three steps of a net with running statistics, and with a buffer that stays as it is."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, momentum=momentum), Tabled(table), nn.Linear(8, 1))
    net[1].running_mean += start  # type: ignore[union-attr, operator]
    net.train(training)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with presets.fingerprints().modules(net) as recorder:
        for x in torch.randn(3, 16, 6, generator=torch.Generator().manual_seed(1)):
            net(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return recorder


class Tabled(nn.Module):
    def __init__(self, table: float) -> None:
        super().__init__()
        self.register_buffer("table", torch.full((8,), table))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.get_buffer("table")


def test_a_buffer_that_a_forward_fills_otherwise_is_where_runs_part() -> None:
    found = divergence(normed(), normed(momentum=0.2))
    assert (found.phase, found.step, found.name) == ("forward", 0, "1")
    assert "its buffer running_mean is 2 times that of the first run" in found.differs
    assert "its input, bit for bit" in found.equal


def test_a_buffer_that_differs_from_the_beginning_is_told() -> None:
    found = divergence(normed(), normed(table=2.0))
    assert (found.phase, found.step, found.name) == ("forward", 0, "2")
    assert any("its buffer table is 2 times that of the first run" in note for note in found.notes), found
    found = divergence(normed(training=False), normed(training=False, start=1.0))
    assert (found.phase, found.step, found.name) == ("forward", 0, "1")
    assert any("its buffer running_mean" in note for note in found.notes), found


def test_equal_buffers_are_no_difference_and_a_net_without_any_is_fine() -> None:
    found = divergence(normed(), normed())
    assert (bool(found), found.distance) == (False, 0)
    recorder = presets.fingerprints()
    train(recorder)
    assert recorder["buffers"].samples == 0
    normal = normed()
    assert sorted(normal["buffers"].peek()) == ["1\\.running_mean", "1\\.running_var", "2\\.table"]
