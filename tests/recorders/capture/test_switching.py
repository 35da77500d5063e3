"""Hooks that are not due are physically out, and come back as they were."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from recorders import (
    BackwardMonitor,
    DifferenceMonitor,
    ForwardInputMonitor,
    ForwardMonitor,
    ParameterGradientMonitor,
    ParameterMonitor,
    ParameterUpdateMonitor,
    Recorder,
    RecordingWarning,
    StateMonitor,
)
from recorders.capture import switching
from recorders.schedule import steps
from reducers import Count, Mean


def listening_monitors() -> int:
    """How many monitors that are still there are told of optimizer steps."""
    gc.collect()
    return sum(steps._steps.tables.registered[number][1]() is not None for number in steps._steps.listeners)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def kinds(**gates: Any) -> dict[str, Any]:
    return {
        "out": ForwardMonitor(Count(), **gates),
        "inp": ForwardInputMonitor(Count(), **gates),
        "back": BackwardMonitor(Count(), **gates),
        "state": StateMonitor(Count(), "training", **gates),
        "change": DifferenceMonitor(Count(), "training", **gates),
        "value": ParameterMonitor(Count(), **gates),
        "grad": ParameterGradientMonitor(Count(), **gates),
        "sum": ParameterGradientMonitor(Count(), when="accumulate", **gates),
        "update": ParameterUpdateMonitor(Count(), **gates),
    }


def hooks(model: nn.Module) -> int:
    """How many there are, of modules and of parameters."""
    of_parameters = [parameter._post_accumulate_grad_hooks or {} for parameter in model.parameters()]
    of_modules = [each for module in model.modules() for each in (module._forward_hooks, module._forward_pre_hooks)]
    return sum(map(len, [*of_modules, *of_parameters]))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> float:
    optimizer.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


@pytest.mark.slow
def test_in_steps_that_are_not_due_no_hook_is_there_and_counts_are_as_they_were() -> None:
    torch.manual_seed(0)
    models = [net() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    recorder = Recorder(**kinds(every_step=3)).modules(models[0]).attach(optimizers[0])
    told = listening_monitors()
    found, ids = [], {key for module in models[0].modules() for key in module._forward_hooks}
    for step in range(10):
        found.append((hooks(models[0]), listening_monitors()))
        if step % 3 == 0:
            assert {key for module in models[0].modules() for key in module._forward_hooks} == ids
        batch = torch.randn(5, 3)
        losses = [train(model, optimizer, batch) for model, optimizer in zip(models, optimizers, strict=True)]
        assert losses[0] == losses[1]
    on = found[0]
    assert on[1] == told
    assert found == [on, (1, told - 3 * 2), (1, told - 3 * 2)] * 3 + [on]  # the one is that of the clock, which counts forwards
    assert set(recorder.samples.values()) == {4}
    for mine, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(mine, other)


def test_hooks_of_the_user_keep_their_place() -> None:
    layer, order = nn.Identity(), []

    def hook(name: str) -> Any:
        return lambda *_: order.append(name)

    def seen(name: str) -> Any:
        return lambda *_: bool(order.append(name)) or True

    layer.register_forward_hook(hook("first"))
    recorder = Recorder(a=ForwardMonitor(Count(), every_step=4, filter_=seen("a"))).modules(layer)
    layer.register_forward_hook(hook("second"), with_kwargs=True)
    other = Recorder(b=ForwardMonitor(Count(), every_step=4, filter_=seen("b"))).modules(layer)
    gone = layer.register_forward_hook(hook("gone"))
    layer.register_forward_hook(hook("third"))
    for step in range(5):
        order.clear()
        layer(torch.ones(1))
        if step == 2:
            assert order == ["first", "second", "gone", "third"]
            gone.remove()
            layer.register_forward_hook(hook("later"))
            layer.register_forward_hook(hook("before all"), prepend=True)
        recorder.step()
        other.step()
    assert order == ["before all", "first", "a", "second", "b", "third", "later"]
    assert [recorder.samples[0], other.samples[0]] == [2, 2]


class Counting(OrderedDict[int, Any]):
    """Counts what is written."""

    def __init__(self, given: Any) -> None:
        self.writes = 0
        super().__init__(given)

    def __setitem__(self, key: int, value: Any) -> None:
        self.writes += 1
        super().__setitem__(key, value)

    def __delitem__(self, key: int) -> None:
        self.writes += 1
        super().__delitem__(key)


def test_a_hook_is_switched_only_where_that_changes() -> None:
    layer = nn.Identity()
    layer._forward_hooks = Counting(layer._forward_hooks)
    recorder = Recorder(ForwardMonitor(Count(), every_step=10)).modules(layer)
    layer._forward_hooks.writes = 0
    for _ in range(101):
        layer(torch.ones(1))
        recorder.step()
    assert layer._forward_hooks.writes == 2 * 10 + 1
    assert recorder.samples[0] == 11


def test_what_was_never_called_stays_until_it_is() -> None:
    model = net()
    recorder = Recorder(ForwardMonitor(Count(), steps=[40])).modules(model, leaves=True)
    for step in range(41):
        if step == 5:
            assert hooks(model) == 3
        if step >= 5:
            model(torch.ones(1, 3))
        recorder.step()
        if 16 <= step < 39:
            assert hooks(model) == 0
    assert list(recorder.samples.values()) == [1, 1, 1]


def out(**options: Any) -> tuple[nn.Sequential, Recorder]:
    """A net with monitors that are out."""
    model = net()
    recorder = Recorder(**kinds(every_step=4, **options)).modules(model, leaves=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, torch.ones(1, 3))
    recorder.step()
    assert hooks(model) == 0
    return model, recorder


def test_hooks_that_are_out_can_be_taken_off_and_put_on() -> None:
    model, recorder = out()
    recorder.deregister()
    for _ in range(3):
        recorder.step()
    model(torch.ones(1, 3)).sum().backward()
    assert hooks(model) == 0
    assert all(not vars(module._forward_hooks).get("hooks taken out") for module in model.modules())
    recorder.register()
    model(torch.ones(1, 3)).sum().backward()
    assert recorder.samples["out/0"] == 2
    recorder.step()
    assert hooks(model) == 0
    removed = recorder.remove("out/0")
    for _ in range(3):
        recorder.step()
    model(torch.ones(1, 3))
    assert removed.samples == 2
    assert recorder.samples["out/1"] == 3


def test_a_copy_of_a_net_whose_hooks_are_out_records_nothing() -> None:
    model, recorder = out()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin(torch.ones(1, 3)).sum().backward()
        assert hooks(twin) == 0
    assert b"recorders." not in pickle.dumps(model)
    assert recorder.samples["out/0"] == 1


def test_a_net_whose_hooks_are_out_is_freed_without_the_collector() -> None:
    gc.collect()
    gc.disable()
    try:
        model, recorder = out()
        dead = [weakref.ref(thing) for thing in (model, recorder["out/0"], recorder["grad/0"], recorder["update/0"])]
        del recorder
        model(torch.ones(1, 3))
        assert all(ref() is not None for ref in dead)  # the net keeps its monitors, which go on
        del model
        assert all(ref() is None for ref in dead)
    finally:
        gc.enable()


def test_a_forgotten_recorder_whose_hooks_are_out_goes_on() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = Recorder(ForwardMonitor(Count(), every_step=3)).modules(model, names="0").attach(optimizer)
    monitor = weakref.ref(recorder[0])
    train(model, optimizer, torch.ones(1, 3))
    del recorder
    gc.collect()
    with pytest.warns(RecordingWarning, match="a recorder no longer exists"):
        train(model, optimizer, torch.ones(1, 3))
    for _ in range(5):
        train(model, optimizer, torch.ones(1, 3))
    assert monitor().samples == 3  # type: ignore[union-attr]


@pytest.mark.parametrize("way", ["take_out", "put_back"])
def test_an_interruption_while_hooks_are_switched_loses_none(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    recorder = Recorder(ForwardMonitor(Count(), every_step=2)).modules(model, leaves=True)
    switch = getattr(switching, way)

    def interrupted(groups: Any) -> None:
        switch(groups[:1])
        raise KeyboardInterrupt

    seen = []
    for step in range(12):
        seen.append(hooks(model))
        model(torch.ones(1, 3))
        if step == (4 if way == "take_out" else 5):
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(switching, way, interrupted)
                recorder.step()
        else:
            recorder.step()
    assert seen[8:] == [3, 0, 3, 0]
    assert set(recorder.samples.values()) == {6 if way == "take_out" else 5}  # all but the step that was interrupted


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("reset", [False, True])
def test_what_is_compiled_while_hooks_are_out_has_them_all_the_same(reset: bool) -> None:
    model = net()
    recorder = Recorder(ForwardMonitor(Mean(), every_step=4)).modules(model, leaves=True)
    model(torch.ones(1, 3))
    recorder.step()
    assert hooks(model) == 0
    if reset:
        torch._dynamo.reset()
    counters.clear()
    call = torch.compile(model, backend="aot_eager", fullgraph=True)
    for _ in range(12):
        call(torch.ones(1, 3))
        recorder.step()
        assert hooks(model) == 3
    assert counters["stats"]["unique_graphs"] == 2
    assert list(recorder.samples.values()) == [4, 4, 4]


@pytest.mark.usefixtures("fresh_compiler")
def test_where_something_is_compiled_again_and_again_hooks_stay() -> None:
    model = net()
    recorder = Recorder(ForwardMonitor(Mean(), every_step=2)).modules(model, leaves=True)
    for _ in range(2 * switching.PATIENCE + 2):
        torch._dynamo.reset()
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
        model(torch.ones(1, 3))
        recorder.step()
    recorder.step()
    assert hooks(model) == 3
