"""A monitor that leaves its recorder is free of it; one that is copied goes on; nothing that comes during a merge is lost."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recorders import CallMonitor, ForwardMonitor, Monitor, ParameterMonitor, Recorder, Subrecording
from reducers import Count, Last, Mean, Norm, Quantile, Sum


@pytest.mark.parametrize(
    ("options", "budget"), [({"every_step": 2}, None), ({"steps": range(100, 200)}, None), ({}, 0.5), ({"every_step": 2}, 0.5)]
)
@pytest.mark.parametrize("way", ["remove", "del", "replace"])
def test_a_monitor_that_left_is_ruled_by_its_own_options_alone(options: dict[str, Any], budget: float | None, way: str) -> None:
    layer = nn.Linear(2, 2)
    recorder = Recorder(out=ForwardMonitor(Count(), **options), other=ForwardMonitor(Sum()), budget=budget).modules(layer)
    layer(torch.ones(1, 2))
    recorder.step()  # the monitor is not due from here on
    monitor = recorder["out"]
    monitor.switch(False, None)
    before = monitor.samples
    if way == "remove":
        assert recorder.remove("out") is monitor
    elif way == "del":
        del recorder["out"]
    else:
        recorder["out"] = ForwardMonitor(Last(), nn.Linear(2, 2))
    assert monitor.clock is not recorder.clock
    layer(torch.ones(1, 2))
    assert monitor.samples == before
    monitor.register()
    due = "steps" not in options  # its own clock begins at step 0
    layer(torch.ones(1, 2))
    assert monitor.samples == before + due
    recorder.step()
    layer(torch.ones(1, 2))
    assert monitor.samples == before + 2 * due
    if options:
        monitor.clock.step = 101
        layer(torch.ones(1, 2))
        assert monitor.samples == before + 2 * due + (not due)
    monitor.deregister()
    recorder.deregister()


def test_a_monitor_that_left_a_recorder_which_gave_up_records_again() -> None:
    layer = nn.Linear(2, 2)
    recorder = Recorder(out=ForwardMonitor(Count()), loss=CallMonitor(Count()), budget=0.5).modules(layer)
    recorder._give_up()
    out, loss = recorder.remove("out"), recorder.remove("loss")
    out.register()
    layer(torch.ones(1, 2))
    assert isinstance(loss, CallMonitor)
    loss.push(1.0)
    assert [out.samples, loss.samples] == [1, 1]
    out.deregister()


COPIES: dict[str, Callable[[Any], Any]] = {"deepcopy": copy.deepcopy, "pickle": lambda it: pickle.loads(pickle.dumps(it))}


@pytest.mark.parametrize("way", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("calls", range(1, 6))
def test_a_copy_goes_on_where_every_was(way: Callable[[Any], Any], calls: int) -> None:
    layer = nn.Identity()
    monitor = ForwardMonitor(Last(), layer, every=3)
    for number in range(calls):
        layer(torch.tensor(float(number)))
    copied, other = way(monitor), nn.Identity()
    copied.register(other)
    for number in range(calls, 9):
        for each in (layer, other):
            each(torch.tensor(float(number)))
    assert (copied.samples, copied.peek()) == (monitor.samples, monitor.peek()) == (3, 6.0)
    monitor.deregister(), copied.deregister()


@pytest.mark.parametrize("way", COPIES.values(), ids=COPIES)
def test_a_copy_of_a_monitor_of_steps_goes_on_where_every_and_its_clock_were(way: Callable[[Any], Any]) -> None:
    def step(layer: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        layer(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    layer, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (layer, other)]
    monitor = ParameterMonitor(Norm(), "weight", layer, every=3, every_step=2)
    monitor.clock.attach(optimizers[0])
    for _ in range(5):
        step(layer, optimizers[0])
    copied = way(monitor)
    assert copied.clock.step == 5
    copied.register(other)
    copied.clock.attach(optimizers[1])
    for _ in range(5):
        step(layer, optimizers[0]), step(other, optimizers[1])
    assert copied.samples == monitor.samples == 2
    monitor.deregister(), copied.deregister()


class Between:
    """Calls a function once, when the states of a merge have been read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, function: Callable[[], object]) -> None:
        merge, self.left = Subrecording.merge, 1

        def late(part: Subrecording, *args: Any) -> Subrecording:
            if self.left:
                self.left = 0
                function()
            return merge(part, *args)

        monkeypatch.setattr(Subrecording, "merge", late)


SIZES = {"waits": (3,), "at once": (1 << 16,)}


@pytest.mark.parametrize("reducer", [Sum(), Norm(), Quantile()], ids=str)
@pytest.mark.parametrize("shape", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.usefixtures("fresh_compiler")
def test_what_comes_while_a_monitor_merges_is_not_lost(
    reducer: Any, shape: tuple[int, ...], compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Layers(nn.Sequential):
        pass

    net = Layers(nn.Identity(), nn.ReLU())
    recorder = Recorder(ForwardMonitor(reducer)).modules(net, types=(nn.Identity, nn.ReLU))
    call: Callable[[Tensor], Tensor] = torch.compile(net, backend="aot_eager") if compiled else net
    x = torch.ones(shape)
    for _ in range(3):
        call(x)
    other = Subrecording(reducer, {"": reducer.update({}, x)}, 1)
    between = Between(monkeypatch, lambda: call(x))
    recorder["0"].merge(other)
    assert not between.left
    call(x)
    expected: dict[str, Tensor] = {}
    for _ in range(6):
        expected = reducer.update(expected, x)
    assert recorder["0"].samples == 6
    assert recorder["1"].samples == 5
    torch.testing.assert_close(recorder["0"].peek(), reducer.compute(expected))
    recorder.deregister()


def test_a_step_that_comes_while_a_monitor_of_parameters_merges_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(2, 2)
    monitor: Monitor = ParameterMonitor(Sum(), "weight", layer)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    with torch.no_grad():
        layer.weight.fill_(1)

    def step() -> None:
        layer.weight.grad = torch.zeros(2, 2)
        optimizer.step()

    for _ in range(3):
        step()
    Between(monkeypatch, step)
    monitor.merge(Subrecording(Sum(), {"": Sum().update({}, torch.ones(2, 2))}, 1))
    step()
    assert (monitor.samples, monitor.peek()) == (6, 24.0)
    monitor.deregister()


def test_a_recorder_that_merges_loses_nothing_that_comes_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, other = nn.Identity(), nn.Identity()
    first, second = (Recorder(ForwardMonitor(Mean())).modules(nn.Sequential(each), names="0") for each in (layer, other))
    layer(torch.ones(2)), other(torch.ones(2))
    for calls in range(2):  # the first is the check of all of them
        seen: list[int] = []
        merge = Subrecording.merge

        def late(part: Subrecording, *args: Any, calls: int = calls, seen: list[int] = seen, merge: Any = merge) -> Subrecording:
            seen.append(1)
            if len(seen) == calls + 1:
                layer(torch.ones(2))
            return merge(part, *args)  # type: ignore[no-any-return]

        with monkeypatch.context() as patched:
            patched.setattr(Subrecording, "merge", late)
            first.merge(second)
    count = first["0"].state["count"]
    assert first["0"].samples == 5
    assert count == 10
