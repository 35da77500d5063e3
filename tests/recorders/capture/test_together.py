"""A compiled graph hands over what all its layers return by one call, and monitors record the same as without that."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recorders import BackwardMonitor, ForwardMonitor, Recorder
from recorders.graphs.ring import MOST
from recorders.monitors.graphs import GraphSink
from reducers import EMA, Mean, Moments, Summary

pytestmark = pytest.mark.usefixtures("without_loops")  # which read what they can without any Python

LAYERS = 6
X = torch.linspace(-1, 2, 8 * 16).view(8, 16)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(LAYERS // 2) for layer in (nn.Linear(16, 16), nn.GELU())))


def monitors(**options: Any) -> Recorder:
    return Recorder(
        out=ForwardMonitor(Summary("... d -> d"), **options),
        grad=BackwardMonitor(Moments(), **options),
        mean=ForwardMonitor(EMA(alpha=0.5), **options),
    )


@pytest.fixture(autouse=True)
def _new_graphs() -> None:
    torch._dynamo.reset()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often compiled graphs called, and for how many monitors."""
    found: Counter[str] = Counter()
    record = GraphSink.record_batch

    def count(numbers: Any, *args: Any) -> None:
        found[f"for {len(numbers)}"] += 1
        record(numbers, *args)

    monkeypatch.setattr(GraphSink, "record_batch", staticmethod(count))
    return found


def train(step: Any, steps: int = 1, x: Tensor = X) -> None:
    for number in range(steps):
        step(x * (number + 1)).square().sum().backward()


def pair(**options: Any) -> tuple[Recorder, Any, Recorder, Any]:
    """A net recorded in eager mode, and a copy of it recorded in a graph."""
    eager = net()
    traced = copy.deepcopy(eager)
    first = monitors(**options).modules(eager, leaves=True)
    second = monitors(**options).modules(traced, leaves=True)
    return first, eager, second, torch.compile(traced, backend="aot_eager", fullgraph=True)


def assert_same(first: Recorder, second: Recorder) -> None:
    for name, monitor in first.items():
        assert monitor.samples == second[name].samples, name
        for key, value in monitor.state.items():
            torch.testing.assert_close(second[name].state[key], value, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_one_call_for_all_monitors_made_alike(calls: Counter[str]) -> None:
    first, eager, second, traced = pair()
    train(eager, 5)
    train(traced, 5)
    assert calls == {f"for {LAYERS}": 3 * 5}  # outputs, gradients and means, at each of five steps
    assert_same(first, second)


@pytest.mark.slow
def test_the_same_as_one_call_a_layer(monkeypatch: pytest.MonkeyPatch, calls: Counter[str]) -> None:
    _, _, together, traced = pair()
    train(traced, MOST + 5)  # more than a ring holds
    torch._dynamo.reset()
    monkeypatch.setattr("recorders.graphs.trace._found", lambda: None)
    _, _, alone, traced = pair()
    train(traced, MOST + 5)
    assert calls == {f"for {LAYERS}": 3 * (MOST + 5), "for 1": 3 * (MOST + 5) * LAYERS}
    for name, monitor in together.items():
        for key, value in monitor.state.items():
            torch.testing.assert_close(alone[name].state[key], value, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_reading_resetting_and_removing_in_between(calls: Counter[str]) -> None:
    first, eager, second, traced = pair()
    for recorder, step in ((first, eager), (second, traced)):
        train(step, 2)
        for monitor in recorder.values():
            monitor.leaves()
        train(step)
        recorder["out/0"].reset()
        train(step)
        recorder["out/1"].deregister()
        train(step, 2)
        recorder["out/1"].register()
        train(step)
    assert_same(first, second)
    assert second["out/0"].samples == 4
    assert second["out/1"].samples == 5
    assert set(calls) == {f"for {LAYERS}"}  # also while one was off: each decides for itself


@pytest.mark.slow
def test_a_recorder_that_is_gone() -> None:
    _, _, recorder, traced = pair()
    other = Recorder(ForwardMonitor(Mean())).modules(traced, leaves=True)
    train(traced)
    other.deregister()
    del other
    train(traced)
    assert recorder["out/0"].samples == 2


@pytest.mark.slow
def test_what_asks_more_than_the_step_is_asked_of_each(calls: Counter[str]) -> None:
    first, eager, second, traced = pair(every=2)
    train(eager, 4)
    train(traced, 4)
    assert set(calls) == {f"for {LAYERS}"}
    assert_same(first, second)


@pytest.mark.slow
def test_steps(calls: Counter[str]) -> None:
    first, eager, second, traced = pair(every_step=2)
    for recorder, step in ((first, eager), (second, traced)):
        for _ in range(5):
            train(step)
            recorder.step()
    assert_same(first, second)
    assert set(calls) == {f"for {LAYERS}"}


@pytest.mark.slow
def test_an_interrupted_run_goes_on() -> None:
    _, _, whole, traced = pair()
    train(traced, 7)
    torch._dynamo.reset()
    _, _, begun, traced = pair()
    train(traced, 4)
    saved = begun.state_dict()
    torch._dynamo.reset()
    _, _, resumed, traced = pair()
    resumed.load_state_dict(saved)
    for number in range(4, 7):
        train(traced, 1, X * (number + 1))
    for name, monitor in whole.items():
        assert monitor.samples == resumed[name].samples == 7
        for key, value in monitor.state.items():
            torch.testing.assert_close(resumed[name].state[key], value, rtol=1e-12, atol=1e-15)
