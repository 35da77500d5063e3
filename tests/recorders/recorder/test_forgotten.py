"""A recorder that the program drops while its hooks are on: somebody is told, once, when the network is used again."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

from recorders import (
    BackwardMonitor,
    ForwardMonitor,
    Monitor,
    ParameterGradientMonitor,
    ParameterMonitor,
    Recorder,
    RecordingWarning,
    StateMonitor,
    Stream,
    attached,
    detach_all,
)
from reducers import Mean

GONE = "a recorder no longer exists, and the hooks of its 2 monitors are still on, first .*'0'"


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))


def step(net: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    net(torch.ones(1, 2)).sum().backward()
    if optimizer is not None:
        optimizer.step()


MONITORS: dict[str, Callable[[], Monitor]] = {
    "outputs": lambda: ForwardMonitor(Mean()),
    "gradients": lambda: BackwardMonitor(Mean()),
    "states": lambda: StateMonitor(Mean(), "weight"),
    "values": lambda: ParameterMonitor(Mean()),
    "parameter gradients": lambda: ParameterGradientMonitor(Mean()),
    "parameter gradients, accumulated": lambda: ParameterGradientMonitor(Mean(), when="accumulate"),
}


@pytest.mark.slow
@pytest.mark.parametrize("make", MONITORS.values(), ids=MONITORS)
def test_the_next_step_warns_once(make: Callable[[], Monitor]) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = Recorder(make()).modules(model, types=nn.Linear)
    step(model, optimizer)
    del recorder
    gc.collect()
    with pytest.warns(RecordingWarning, match=GONE) as told:
        step(model, optimizer)
    assert len(told) == 1
    step(model, optimizer)
    assert len(attached(model)) == 2  # the monitors go on
    assert all(found.monitor.samples >= 3 for found in attached(model))
    assert detach_all(model) == 2


def test_the_hooks_are_those_from_before_afterwards() -> None:
    model = net()
    recorder = Recorder(ForwardMonitor(Mean())).modules(model, types=nn.Linear)
    hooks = [hook for layer in model for hook in layer._forward_hooks.values()]
    del recorder
    with pytest.warns(RecordingWarning, match=GONE):
        model(torch.ones(1, 2))
    assert all(hook.run == hook.usual for hook in hooks)
    assert [found.monitor.samples for found in attached(model)] == [1, 1]


@pytest.mark.slow
def test_two_recorders_are_told_of_each() -> None:
    model = net()
    for _ in range(2):
        Recorder(ForwardMonitor(Mean())).modules(model)
        gc.collect()
        with pytest.warns(RecordingWarning, match="a recorder no longer exists"):
            model(torch.ones(1, 2))
        detach_all(model)
    model(torch.ones(1, 2))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["a block", "deregister", "detach_all", "no net", "another net", "a stream"])
def test_nobody_is_told_if_nothing_is_lost(how: str, tmp_path: object) -> None:
    model = net()
    stream = Stream(f"{tmp_path}/stream")
    if how == "a stream":
        stream.attach(model, names="0")
    else:
        recorder = Recorder(ForwardMonitor(Mean())).modules(model, types=nn.Linear)
        if how == "a block":
            with recorder:
                model(torch.ones(1, 2))
        elif how == "deregister":
            recorder.deregister()
        elif how == "no net":
            del model
        del recorder
    gc.collect()
    if how == "detach_all":
        detach_all(model)
    other = net()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    kept = Recorder(ParameterMonitor(Mean())).modules(other)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if how not in ("no net", "another net"):  # whose own step would tell
            step(model)
        step(other, optimizer)
    kept.deregister()
    stream.close()
