"""Steps by table: nobody is notified, and the numbers are those of monitors that are notified one by one, whatever changes."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from profiled import profiled
from torch import Tensor, nn

from recorders import Monitor, OptimizerStateMonitor, ParameterGradientMonitor, ParameterMonitor, ParameterUpdateMonitor, Recorder
from recorders.capture.switching import SWITCHING
from recorders.schedule import table
from recorders.schedule.steps import _steps
from reducers import Collect, Mean, Moments, Norm, Quantile, Summary

KINDS: dict[str, Callable[..., Monitor]] = {
    "gradient": ParameterGradientMonitor,
    "value": ParameterMonitor,
    "state": lambda reducer, **options: OptimizerStateMonitor(reducer, "exp_avg", **options),
    "update": ParameterUpdateMonitor,
}


@pytest.fixture
def notified(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often monitors were notified or asked of a parameter, by what they read, and how many tables were made."""
    count: Counter[str] = Counter()
    for kind in (ParameterGradientMonitor, ParameterMonitor, OptimizerStateMonitor, ParameterUpdateMonitor):
        for method in ("notified", "changed", "operands_of", "record_leaf"):
            if hasattr(kind, method):
                monkeypatch.setattr(kind, method, counted(kind, method, count))
    made = table.Table.__init__

    def make(self: Any, *args: Any) -> None:
        count["tables"] += 1
        made(self, *args)

    monkeypatch.setattr(table.Table, "__init__", make)
    return count


def counted(kind: type, method: str, count: Counter[str]) -> Callable[..., Any]:
    usual = getattr(kind, method)

    def enter(self: Any, *args: Any) -> Any:
        count[method if method != "notified" else self.reading.when] += 1
        return usual(self, *args)

    return enter


class Net:
    """Layers of odd sizes with gradients, their optimizer, and a monitor of one kind on each."""

    def __init__(self, kind: str = "gradient", reducer: Any = None, layers: int = 6, **options: Any) -> None:
        self.net = nn.ModuleList([nn.Linear(3 + index, 2) for index in range(layers)])
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.1)
        self.recorder = Recorder(KINDS[kind](reducer or Norm(), **options)).modules(self.net, types=nn.Linear)

    def step(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        for parameter in self.net.parameters():
            if parameter.grad is not None or parameter.requires_grad:
                parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()


@pytest.mark.parametrize("kind", KINDS)
def test_nobody_is_notified_once_there_is_a_table(kind: str, notified: Counter[str]) -> None:
    net = Net(kind)
    for _ in range(2):
        net.step()
    notified.clear()
    for _ in range(10):
        net.step()
        net.recorder.compute()  # looking changes nothing
    assert notified == Counter()
    assert set(net.recorder.samples.values()) == {12}
    assert {monitor.counts["calls"] for monitor in net.recorder.values()} == {12}


def test_those_that_ask_more_than_steps_are_notified_beside_the_table(notified: Counter[str]) -> None:
    net = Net()
    asked = ParameterGradientMonitor(Norm(), "weight", net.net[1], condition=lambda: True)
    deep = ParameterGradientMonitor(Norm(), "0.weight", net.net)
    whole = ParameterGradientMonitor(Quantile(), None, net.net[0])
    change = ParameterUpdateMonitor(Norm(), None, net.net[2], op_=lambda after, before: after.detach() - before)
    for _ in range(4):
        net.step()
    notified.clear()
    for _ in range(6):
        net.step()
    assert notified == {"gradients": 2 * 6, "operands_of": (1 + 2) * 6, "change": 6, "changed": 6}  # not the nested one
    assert [monitor.samples for monitor in (asked, deep, whole, change)] == [10, 10, 10, 10]
    assert set(net.recorder.samples.values()) == {10}


def test_steps_in_which_they_are_not_due_keep_the_table(notified: Counter[str]) -> None:
    net = Net(every_step=3)
    net.recorder.attach(net.optimizer)
    always = ParameterGradientMonitor(Norm(), None, net.net[0])
    for _ in range(12):
        net.step()
    notified.clear()
    for _ in range(12):
        net.step()
    assert notified == Counter()
    assert (always.samples, set(net.recorder.samples.values())) == (24, {8})


def test_monitors_that_are_due_in_some_calls_are_in_one_table(notified: Counter[str]) -> None:
    net = Net(every=3)
    always = ParameterGradientMonitor(Norm(), None, net.net[0])
    for _ in range(4):
        net.step()
    late = ParameterGradientMonitor(Norm(), None, net.net[1], every=3)  # it was called less often than the others
    for _ in range(4):
        net.step()
    notified.clear()
    for _ in range(12):
        net.step()
    assert notified == Counter()
    assert (always.samples, late.samples, set(net.recorder.samples.values())) == (20, 6, {7})
    assert late.counts == {"calls": 16, table.NOT_DUE: 10}


@pytest.mark.parametrize("kind", KINDS)
def test_every_is_counted_for_each_optimizer_by_itself(kind: str) -> None:
    net = Net(kind, every=2)
    other = torch.optim.Adam(net.net.parameters(), lr=0.1)
    for _ in range(5):
        net.step()
    mine, net.optimizer = net.optimizer, other
    for _ in range(3):
        net.step()
    net.optimizer = mine
    net.step()
    assert set(net.recorder.samples.values()) == {3 + 2}
    assert {monitor.counts["calls"] for monitor in net.recorder.values()} == {9}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_does_not_go_on_with_the_count_of_one_that_was_freed(kind: str) -> None:
    net = Net(kind, every=3)
    net.step()
    for _ in range(6):  # in most cases it gets the address of the one before
        del net.optimizer
        gc.collect()
        net.optimizer = torch.optim.Adam(net.net.parameters(), lr=0.1)
        net.step()
    assert set(net.recorder.samples.values()) == {7}
    assert [len(monitor.gate.eligible) for monitor in net.recorder.values()] == [1] * 6


def test_one_table_serves_though_each_step_has_other_gradients(notified: Counter[str]) -> None:
    net = Net()
    for step in range(80):
        for layer in net.net:
            layer.requires_grad_(True)
        net.net[step % 6].requires_grad_(False)
        net.net.zero_grad()
        net.step()
    assert notified == {"tables": 1}
    assert sum(net.recorder.samples.values()) == sum(monitor.counts["calls"] for monitor in net.recorder.values()) == 80 * 5


def test_a_table_keeps_no_model_and_no_state_alive() -> None:
    net = Net()
    for _ in range(3):
        net.step()
    rows = _steps.tables._tables[net.optimizer]._rows
    assert rows() is not None
    monitors = [*net.recorder.values()]
    layers, stacks = [weakref.ref(layer) for layer in net.net], [rows]
    held = [weakref.ref(monitor) for monitor in monitors]
    gc.disable()
    try:
        del net.net, net.recorder, monitors
        assert [ref() for ref in (*layers, *stacks, *held)] == [None] * len([*layers, *stacks, *held])
    finally:
        gc.enable()


def change_nothing(net: Net) -> None: ...


def replace(net: Net) -> None:
    net.net[1].weight = nn.Parameter(torch.ones(2, 7))
    net.optimizer.add_param_group({"params": [net.net[1].weight]})


def swap_names(net: Net) -> None:
    layer = nn.Linear(2, 2, bias=False)
    net.net[5] = layer
    net.optimizer.add_param_group({"params": [layer.weight]})


def rename(net: Net) -> None:
    own = net.net[3]._parameters
    own["renamed"], own["bias2"] = own.pop(next(iter(own))), own.pop(next(iter(own)))


def sparse(net: Net) -> None:
    net.net[2].weight.grad = torch.ones_like(net.net[2].weight).to_sparse()
    torch.optim.SparseAdam([net.net[2].weight], lr=0.1).step()


CHANGES: dict[str, Callable[[Net], Any]] = {
    "nothing": change_nothing,
    "clear": lambda net: net.recorder["0"].clear(),
    "merge": lambda net: net.recorder["0"].merge(net.recorder["0"].snapshot()),
    "off": lambda net: net.recorder["1"].deregister(),
    "on": lambda net: net.recorder["1"].register(),
    "frozen": lambda net: (net.net[2].requires_grad_(False), net.net.zero_grad()),
    "thawed": lambda net: net.net[2].requires_grad_(True),
    "double": lambda net: (net.net[3].double(), net.net.zero_grad(), net.optimizer.state.clear()),
    "replaced": replace,
    "swapped": swap_names,
    "renamed": rename,
    "sparse": sparse,
    "not finite": lambda net: net.net[4].bias.data.fill_(torch.nan),
    "another optimizer": lambda net: vars(net).update(optimizer=torch.optim.Adam(net.net.parameters(), lr=0.01)),
    "part of them": lambda net: vars(net).update(optimizer=torch.optim.Adam(net.net[:3].parameters(), lr=0.01)),
}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=8)
@given(changes=st.lists(st.sampled_from([*CHANGES]), min_size=1, max_size=6), every=st.sampled_from([1, 3]))
def test_the_same_as_one_by_one_whatever_changes_between_steps(kind: str, changes: list[str], every: int) -> None:
    def alone(x: Tensor, value: Tensor | None = None) -> Tensor:
        return x.detach() - value if kind == "update" and value is not None else x

    found = []
    for options in ({}, {"op_": alone}):
        torch.manual_seed(0)
        net = Net(kind, Summary(), every=every, **options)
        for step, change in enumerate(changes):
            for _ in range(2):
                net.step(step)
            CHANGES[change](net)
        net.step(9)
        found.append({name: (monitor.samples, monitor.counts, monitor.flush().counts) for name, monitor in net.recorder.items()})
        found.append({name: monitor.states for name, monitor in net.recorder.items()})
    assert found[0] == found[2]
    for name, states in found[3].items():
        assert found[1][name].keys() == states.keys()
        for path, state in states.items():
            for key, value in state.items():
                torch.testing.assert_close(found[1][name][path][key], value, rtol=1e-9, atol=1e-12, equal_nan=True)


def test_a_reducer_that_fails_in_a_step_by_table_is_recorded_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net(reducer=Moments(), on_error="raise")
    for _ in range(3):
        net.step()
    usual = Moments.lift

    def lift(self: Moments, x: Tensor, axes: tuple[int, ...]) -> dict[str, Tensor]:
        if axes == (1,):  # rows of a matrix
            raise ValueError("no rows")
        return usual(self, x, axes)

    monkeypatch.setattr(Moments, "lift", lift)
    for _ in range(3):
        net.step()
    assert set(net.recorder.samples.values()) == {6}
    assert {monitor.last_error for monitor in net.recorder.values()} == {None}


class Shift(torch.optim.Optimizer):
    """Adds a number to each parameter; may raise then, or do something else with them."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.by, self.fails = 1.0, False
        self.then: Callable[[nn.Parameter], Any] = lambda parameter: None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter += self.by
            self.then(parameter)
        if self.fails:
            raise RuntimeError("the step fails")


def shifted(**options: Any) -> tuple[Net, Shift]:
    """A net whose updates are recorded by table, after three steps."""
    net = Net("update", Mean(), **options)
    net.optimizer = optimizer = Shift(net.net.parameters())
    for _ in range(3):
        net.step()
    return net, optimizer


def means(net: Net) -> set[float]:
    """The mean updates of all parameters."""
    return {round(float(x), 5) for monitor in net.recorder.values() for x in monitor.compute().values()}


def test_updates_are_of_one_step_though_the_one_before_failed(notified: Counter[str]) -> None:
    net, optimizer = shifted()
    notified.clear()
    optimizer.fails, optimizer.by = True, 100.0
    with pytest.raises(RuntimeError, match="the step fails"):
        net.step()
    optimizer.fails, optimizer.by = False, 5.0
    net.step()
    assert means(net) == {(3 + 5) / 4}
    assert set(net.recorder.samples.values()) == {4}
    assert notified == Counter()


def test_a_step_that_changes_the_shape_of_a_parameter_does_not_end_the_training() -> None:
    net, optimizer = shifted()

    def shrink(parameter: nn.Parameter) -> None:
        parameter.data = parameter.data[:1].clone()

    optimizer.then = shrink
    net.net.zero_grad()
    net.step()
    assert {monitor.counts["calls"] for monitor in net.recorder.values()} == {4}
    optimizer.then = lambda parameter: None
    net.net.zero_grad()
    net.step()
    assert {monitor.counts["calls"] for monitor in net.recorder.values()} == {5}


def test_memory_for_copies_is_freed_in_steps_that_are_not_due(notified: Counter[str]) -> None:
    net, _ = shifted(every=2)
    notified.clear()
    assert [len(monitor.before) for monitor in net.recorder.values()] == [2] * 6
    net.step()
    assert not any(monitor.before for monitor in net.recorder.values())
    net.step()
    assert means(net) == {1.0}
    assert set(net.recorder.samples.values()) == {3}
    assert notified == Counter()


# What a step costs, in calls of Python

BACKEND = {("reducers.execution.rows", "update"), ("reducers.execution.stacked", "lift_stacked")}


def python_calls(run: Callable[[], Any]) -> int:
    """The calls of functions written in Python. Of those by which the rows of a block are computed, one counts."""
    count, inside = 0, 0

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count, inside
        if event == "call":
            count += not inside
            if inside or (frame.f_globals.get("__name__"), frame.f_code.co_name) in BACKEND:
                inside += 1
        elif event == "return" and inside:
            inside -= 1

    with profiled(profile):
        run()
    return count


class Still(torch.optim.Optimizer):
    """Changes nothing."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["exp_avg"] = torch.ones_like(parameter)

    def step(self, closure: Any = None) -> None:
        """Changes nothing."""


def still(kind: str, layers: int, **options: Any) -> Net:
    net = Net(kind, layers=layers, **options)
    net.optimizer = Still(net.net.parameters())
    for parameter in net.net.parameters():
        parameter.grad = torch.ones_like(parameter)
    for _ in range(4):
        net.optimizer.step()
    return net


def due_calls(net: Net) -> int:
    """The calls of a step beyond those without a recorder; the least of some, because a step may free what other tests left."""
    due = min(python_calls(net.optimizer.step) for _ in range(4))
    net.recorder.deregister()
    return due - min(python_calls(net.optimizer.step) for _ in range(4))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("kind", "most"), [("gradient", 50), ("value", 50), ("state", 50), ("update", 70)])
def test_a_due_step_is_fifty_calls_beside_its_backend_whatever_the_parameters(kind: str, most: int) -> None:
    """What changes is read at two moments: the copies, and the changes. Each backend call of the rows counts as one."""
    found = {due_calls(still(kind, layers)) for layers in (8, 80)}
    assert len(found) == 1
    assert found.pop() <= most


def test_a_recorder_that_is_reset_each_step_does_not_slow_another() -> None:
    mine, other = still("gradient", 30), still("update", 30)
    optimizer, counted = mine.optimizer, list[int]()
    optimizer.step()  # finds that others came
    for _ in range(3):
        other.recorder.reset()
        other.optimizer.step()
        counted.append(python_calls(optimizer.step))
    other.recorder.deregister()
    optimizer.step()
    assert set(counted) == {python_calls(optimizer.step)}
    assert set(mine.recorder.samples.values()) == {4 + 1 + 3 + 1 + 1}


class Inside:
    """One optimizer for each parameter, which steps in the backward as soon as the gradient is there."""

    def __init__(self, parameters: int, **monitors: Monitor) -> None:
        self.net = nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(parameters)])
        self.optimizers = {parameter: torch.optim.SGD([parameter], lr=0.5) for parameter in self.net.parameters()}
        for parameter in self.net.parameters():
            parameter.register_post_accumulate_grad_hook(self.step)
        self.recorder = Recorder(**monitors).modules(self.net, types=nn.Linear)

    def step(self, parameter: Tensor) -> None:
        self.optimizers[parameter].step()  # type: ignore[index]
        self.optimizers[parameter].zero_grad()  # type: ignore[index]

    def backward(self) -> None:
        torch.stack([layer(torch.ones(2, 4)).sum() for layer in self.net]).sum().backward()


def test_optimizers_that_step_inside_backward_cost_the_same_however_many_there_are() -> None:
    found = []
    for parameters in (10, 110):
        rig = Inside(parameters, gradient=ParameterGradientMonitor(Norm()), value=ParameterMonitor(Norm()))
        for _ in range(4):
            rig.backward()
        assert set(rig.recorder.samples.values()) == {4}
        found.append(python_calls(rig.backward))
        rig.recorder.deregister()
        found[-1] -= python_calls(rig.backward)
    each = (found[1] - found[0]) / 100
    assert each <= 72
    assert found[0] <= 10 * each + 40  # what is compared once in a backward


def test_inside_a_backward_parameters_that_were_replaced_or_shared_are_found() -> None:
    rig = Inside(4, gradient=ParameterGradientMonitor(Norm()))
    for _ in range(2):
        rig.backward()
    shared = rig.net[0].weight
    rig.net[1].weight = shared
    rig.net[2].weight = new = nn.Parameter(torch.ones(4, 4))
    rig.optimizers[new] = torch.optim.SGD([new], lr=0.5)
    new.register_post_accumulate_grad_hook(rig.step)
    for _ in range(3):
        rig.backward()
    assert [rig.recorder.samples[f"gradient/{layer}"] for layer in range(4)] == [5, 5, 5, 5]


def test_a_module_that_gets_a_parameter_of_another_optimizer_is_recorded_with_it() -> None:
    first, second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (first, second)]
    recorder = Recorder(ParameterMonitor(Norm())).modules(nn.ModuleList([first, second]), types=nn.Linear)

    def step() -> None:
        for optimizer in optimizers:
            optimizer.step()

    for _ in range(2):
        step()
    second.weight = first.weight
    step()
    assert [recorder.samples["0"], recorder.samples["1"]] == [3, 3]
    second.weight = nn.Parameter(torch.ones(3, 3))
    step()
    assert [recorder.samples["0"], recorder.samples["1"]] == [4, 3]


@pytest.mark.parametrize("kind", KINDS)
def test_one_step_by_table_has_the_bits_of_updates_one_by_one(kind: str) -> None:
    """Also the first step, after which an optimizer keeps its state."""

    def alone(x: Tensor, before: Tensor | None = None) -> Tensor:
        return (x.detach() - before if kind == "update" and before is not None else x.detach()).unsqueeze(0)

    net = Net(kind, Moments())
    each = Recorder(KINDS[kind](Collect(), op_=alone)).modules(net.net, types=nn.Linear)
    for seed in range(4):
        net.step(seed)
    for name, monitor in net.recorder.items():
        for path, xs in each[name].leaves().items():
            state: dict[str, Tensor] = {}
            for x in xs:
                state = Moments().update(state, x)
            if xs[0].numel() >= 8:  # shorter ones are summed in another order
                assert all(monitor.states[path][key].equal(value) for key, value in state.items())


def test_a_monitor_that_is_freed_while_it_is_out_comes_not_back() -> None:
    """Its hook is out in a step that is not due; others that are put back do not bring it along."""
    net = Net(every_step=2)
    net.recorder.attach(net.optimizer)
    for _ in range(4):
        net.step()
    key = next(key for key in _steps.tables.registered if _steps.tables.registered[key][1]() is net.recorder[0])
    while key in _steps.listeners:
        net.step()
    with SWITCHING:
        _steps.tables.remove(key)
    for _ in range(4):
        net.step()
        assert key not in _steps.listeners


def rows_of(net: Net) -> list[Any]:
    return [pending.rows for monitor in net.recorder.values() for pending in monitor.buffer.stored.pending.values()]


@pytest.mark.parametrize("kind", KINDS)
def test_monitors_that_come_back_go_on_in_their_rows_whoever_was_there_in_between(kind: str) -> None:
    """A new row is merged with the state from before, one by one, whenever somebody looks."""
    net, other = still(kind, 6), Recorder(ParameterMonitor(Mean()))
    before, reading = rows_of(net), python_calls(net.recorder.compute)
    for _ in range(2):
        net.recorder.deregister()
        with other.modules(net.net, types=nn.Linear):
            net.optimizer.step()
        net.recorder.register()
        net.optimizer.step()
    assert all(map(lambda a, b: a is b, rows_of(net), before))
    assert python_calls(net.recorder.compute) == reading
    assert {*net.recorder.samples.values()} == {4 + 2}


def test_two_optimizers_that_step_the_same_parameters_in_turn_share_the_rows() -> None:
    net = Net("value", Mean())
    second, rows, seen = torch.optim.SGD(net.net.parameters(), lr=0.5), set[int](), list[Tensor]()
    for turn in range(6):
        (second.step if turn % 2 else net.step)()
        seen.append(net.net[0].bias.detach().double().mean())
        rows |= {*map(id, rows_of(net))}
    assert len(rows) == 1
    assert {*net.recorder.samples.values()} == {6}
    torch.testing.assert_close(net.recorder.compute()["0"]["bias"], torch.stack(seen).mean())
