"""What the compiler guards of a hook: it is looked at in every call of a graph, when the caches hold other data."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recorders import BackwardMonitor, DifferenceMonitor, ForwardMonitor, Recorder
from recorders.capture.hooks import SPECS
from reducers import Last, Summary

MOST_OF_A_LAYER = 40
"""Guards of a layer with two hooks; about half are of PyTorch's own dictionaries."""


def guards_of(layers: int) -> list[Any]:
    """What the compiler guards of a recorded net."""
    torch._dynamo.reset()
    net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
    found: list[Any] = []

    def look(guards: Any) -> list[bool]:
        found.extend(guards)
        return [True] * len(guards)

    recorder = Recorder(out=ForwardMonitor(Summary()), back=BackwardMonitor(Summary())).modules(net, types=nn.Linear)
    # The options are those of inductor; a graph made by another backend is guarded alike.
    compiled = torch.compile(net, backend="inductor", fullgraph=True, options={"guard_filter_fn": look})
    compiled(torch.ones(2, 4)).sum().backward()
    assert all(monitor.samples == 1 for monitor in recorder.values())
    return found


@pytest.mark.slow
def test_no_guard_compares_what_two_hooks_hold() -> None:
    """The compiler writes such guards in Python, and each of them walks from the net to both hooks."""
    kinds = [guard.guard_type for guard in guards_of(3) if "hooks" in guard.name]
    assert "TENSOR_MATCH" in kinds  # of the receivers, so these are the guards of hooks
    assert "DUPLICATE_INPUT" not in kinds


@pytest.mark.slow
def test_a_layer_more_is_a_few_guards_more() -> None:
    two, three = (sum("hooks" in guard.name for guard in guards_of(layers)) for layers in (2, 3))
    assert 0 < three - two <= MOST_OF_A_LAYER


@pytest.mark.slow
def test_what_hooks_are_traced_by_ends_with_the_last_monitor_of_the_kind() -> None:
    def own(output: Tensor, inputs: Tensor) -> Tensor:  # no other test makes monitors like these
        return output

    gc.collect()
    before = set(vars(SPECS))
    first, second = (ForwardMonitor(Summary(), nn.ReLU(), op_=own) for _ in range(2))
    assert len(vars(SPECS).keys() - before) == 1  # one spec for both
    first.deregister()
    del first
    gc.collect()
    assert len(vars(SPECS).keys() - before) == 1
    second.deregister()
    del second
    gc.collect()
    assert vars(SPECS).keys() == before


class Unhashable(list[int]):
    """A callable that has no hash, so that no two monitors with it are known to be made alike."""

    def __call__(self, after: Tensor, before: Tensor) -> Tensor:
        return after - before


class Adds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        self.total = self.total + x
        return x


def test_both_hooks_of_a_monitor_with_an_argument_that_has_no_hash_are_traced() -> None:
    torch._dynamo.reset()
    net = nn.Sequential(Adds())
    monitor = DifferenceMonitor(Last(), "total", net[0], op_=Unhashable())
    assert len(monitor.hooks.handles) == 2
    torch.compile(net, backend="aot_eager", fullgraph=True)(torch.ones(3))
    assert monitor.samples == 1
    assert monitor.last_error is None
    assert torch.equal(monitor.peek(), torch.ones(3))
