"""Copies of nets: what their functions refer to is the copy, and what they write is not the user's."""

from __future__ import annotations

import functools
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recorders import ForwardMonitor, Recorder, findings, presets
from recorders.capture.copying import copied
from reducers import Mean


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.activation = nn.Linear(4, 4), nn.BatchNorm1d(4), F.relu

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.norm(self.linear(x)))


def closure(block: Block, store: list[Any]) -> None:
    forward = block.forward
    block.forward = lambda x: 2 * forward(x)  # type: ignore[method-assign]


def wrapped(block: Block, store: list[Any]) -> None:
    @functools.wraps(block.forward)
    def forward(*args: Any, before: Callable[..., Tensor] = block.forward) -> Tensor:
        return before(*args)

    block.forward = forward  # type: ignore[method-assign]


def partial(block: Block, store: list[Any]) -> None:
    block.forward = functools.partial(lambda forward, x: forward(x), block.forward)  # type: ignore[method-assign]


def compiled(block: Block, store: list[Any]) -> None:
    block.forward = torch.compile(block.forward, backend="eager")  # type: ignore[method-assign]


def another_module(block: Block, store: list[Any]) -> None:
    block.linear.register_forward_hook(lambda module, args, output: block.norm(output))


def a_list(block: Block, store: list[Any]) -> None:
    block.linear.register_forward_hook(lambda module, args, output: store.append(output.detach()))


def nested_lists(block: Block, store: list[Any]) -> None:
    """What hooks keep by name, and have kept for long."""
    kept: dict[str, Any] = defaultdict(list, long=[0] * 2000, last=deque([1], maxlen=2), calls=Counter())
    store.append(kept)

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        for name in ("new", "long", "last"):
            kept[name].append(output.detach().sum())
        kept["calls"]["hook"] += 1

    block.linear.register_forward_hook(hook)


def an_object(block: Block, store: list[Any]) -> None:
    trainer = SimpleNamespace(net=block, store=store)

    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        trainer.store.append(output.detach())
        return trainer.net.norm(output)  # type: ignore[no-any-return]

    block.linear.register_forward_hook(hook)


def recursion(block: Block, store: list[Any]) -> None:
    def hook(module: nn.Module, args: Any, output: Tensor, times: int = 2) -> Tensor:
        return block.norm(output) if times == 0 else hook(module, args, output, times - 1)  # type: ignore[no-any-return]

    block.linear.register_forward_hook(hook)


SCRIPT = """
before = block.forward
seen = {}
def scaled(x):
    seen["calls"] = seen.get("calls", 0) + 1
    return 2 * before(x)
block.forward = lambda x: scaled(x)
"""


def script(block: Block, store: list[Any]) -> None:
    """At the top level of a program all is global."""
    values: dict[str, Any] = {"__name__": "__main__", "block": block}
    exec(SCRIPT, values)
    store.append(values["seen"])


WAYS = (closure, wrapped, partial, compiled, another_module, a_list, nested_lists, an_object, recursion, script)


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_runs_apart_from_the_net(way: Callable[[Block, list[Any]], None]) -> None:
    torch.manual_seed(0)
    block, store = Block(), list[Any]()
    way(block, store)
    with Recorder(ForwardMonitor(Mean())).modules(block) as recorder:
        kept = repr(store), {name: value.clone() for name, value in block.state_dict().items()}
        other = copied(block, {}).train()
        x = torch.randn(8, 4)
        before = other(x)
        assert (repr(store), next(iter(recorder.values())).samples) == (kept[0], 0)
        assert all(torch.equal(value, kept[1][name]) for name, value in block.state_dict().items())
        assert int(other.norm.num_batches_tracked) > 0  # type: ignore[arg-type]
        assert torch.equal(before, block(x))
        with torch.no_grad():
            other.linear.weight.zero_()  # type: ignore[operator]
        assert not torch.equal(other(x), before)


@pytest.mark.parametrize("way", WAYS)
def test_findings_change_nothing_of_a_net_with_functions_of_its_own(way: Callable[[Block, list[Any]], None]) -> None:
    torch.manual_seed(0)
    block, store = Block(), list[Any]()
    way(block, store)
    net = nn.Sequential(block, nn.Linear(4, 2))
    x, target = torch.randn(16, 4), torch.randint(2, (16,))
    with presets.health().modules(net) as recorder:
        for _ in range(3):
            loss = F.cross_entropy(net(x), target)
            loss.backward()
            recorder.push("loss", loss)
        kept = repr(store), {name: value.clone() for name, value in net.state_dict().items()}
        samples = {name: one.samples for name, one in recorder.items()}
        found = findings(recorder, example=x, target=target)
        assert "samples-mix" not in {one.kind for one in found}, found
        assert (repr(store), {name: one.samples for name, one in recorder.items()}) == (kept[0], samples)
        assert all(torch.equal(value, kept[1][name]) for name, value in net.state_dict().items())
        assert "incomplete" not in str(recorder.plan(x))
        assert repr(store) == kept[0]


def test_a_net_whose_copy_leads_back_to_it_is_not_run() -> None:
    block = Block()
    far = SimpleNamespace(trainer=SimpleNamespace(norm=block.norm))
    block.linear.register_forward_hook(lambda module, args, output: far.trainer.norm(output))
    net = nn.Sequential(block, nn.Linear(4, 2))
    with presets.health().modules(net) as recorder:
        net(torch.randn(16, 4)).sum().backward()
        found = findings(recorder, example=torch.randn(16, 4))
    assert int(block.norm.num_batches_tracked) == 2  # type: ignore[arg-type]  # as the hook calls it, too
    assert "calls the module '0.norm' of the net itself" in str(recorder.plan(torch.randn(16, 4)))
    assert int(block.norm.num_batches_tracked) == 2  # type: ignore[arg-type]
    assert "calls the module '0.norm' of the net itself" in " ".join(found.unexamined)


def test_functions_that_refer_to_nothing_of_the_net_stay_what_they_are() -> None:
    block, store = Block(), [1]
    function = lambda x: x  # noqa: E731
    block.function, block.kept, block.also = function, store, store  # type: ignore[assignment]
    other = copied(block, {})
    assert other.activation is F.relu
    assert other.function is function
    assert other.kept is not store
    assert other.kept is other.also
