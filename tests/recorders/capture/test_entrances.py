"""Every entrance from PyTorch goes through one guard: whatever fails in it, the user's program goes on, and the failure is told."""

from __future__ import annotations

import ast
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from paths import ROOT
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from recorders import (
    BackwardInputMonitor,
    BackwardMonitor,
    DifferenceMonitor,
    ForwardInputMonitor,
    ForwardMonitor,
    Monitor,
    MonitorError,
    OptimizerStateMonitor,
    PairMonitor,
    ParameterGradientMonitor,
    ParameterMonitor,
    ParameterUpdateMonitor,
    Recorder,
    RecordingWarning,
    StateMonitor,
)
from recorders.capture import entering
from recorders.capture.switching import hook_of
from recorders.monitors import gradient_hooks, sites
from recorders.monitors.graphs import GraphSink
from recorders.ring.rows import ParameterRows
from recorders.schedule import table
from recorders.schedule.clock import Clock
from recorders.schedule.steps import _Steps
from reducers import CKA, Count, Mean, Norm, Quantile, Sum


@pytest.fixture(autouse=True)
def nothing_told_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entering, "_told", set())


# All of them, read in the source

REGISTER = {
    "register_forward_hook": 0,
    "register_forward_pre_hook": 0,
    "register_full_backward_hook": 0,
    "register_full_backward_pre_hook": 0,
    "register_module_forward_hook": 0,
    "register_module_forward_pre_hook": 0,
    "register_state_dict_pre_hook": 0,
    "register_load_state_dict_pre_hook": 0,
    "register_load_state_dict_post_hook": 0,
    "register_hook": 0,
    "register_post_accumulate_grad_hook": 0,
    "register_step_pre_hook": 0,
    "register_step_post_hook": 0,
    "register_optimizer_step_pre_hook": 0,
    "register_optimizer_step_post_hook": 0,
    "register_multi_grad_hook": 1,
    "queue_callback": 0,
    "impl": 1,
    "_Callbacks": 0,
    "before_compiling": 0,
}
"""What takes a function that PyTorch calls, and the position of it among the arguments."""

GUARDS = {"Hook", "_hook", "guarded", "failure_of"}
UNGUARDED = {
    # a quick look of the user: what fails in it is raised by the call that he made, and hooks are on during that call only
    "recorders.recorder.cache": {"partial(keep, place.name)"},
    # so it is of `bisect`, which puts everything back then
    "recorders.watch.divergence.tracing": {"self._before(watcher)", "self._after(watcher)"},
    "recorders.watch.divergence.gradients": {"keep"},
    # the guard is in the function that calls these two
    "recorders._torch.__init__": {"call"},
    "recorders.monitors.gradient_hooks": {"function"},
    # so is it in what `before_compiling` is given
    "recorders._torch.compiler": {"[*handler.start_callbacks, callback]"},
    # it refuses a call that a copy of the net makes, in the thread that runs the copy; whoever runs it tells that
    "recorders.capture.copying": {"refuse"},
    # these are on a copy of the net, which only the diagnosis runs, and what fails there is told by it
    "recorders.watch.diagnosis.probe.copied": {"self._before(name)", "self._after(name)"},
}


def registrations() -> Iterator[tuple[str, ast.expr, ast.Module]]:
    for path in sorted((ROOT / "recorders").rglob("*.py")):
        tree = ast.parse(path.read_text())
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        if name.startswith("recorders.integrations"):  # hooks of trainers, whose saving may fail
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                position = REGISTER.get(called)
                if position is not None and len(node.args) > position:
                    yield name, node.args[position], tree


def is_guarded(function: ast.AST, tree: ast.Module, depth: int = 5) -> bool:
    """Whether an expression, or what the name in it stands for in this file, calls one of `GUARDS`."""
    called = {getattr(node.func, "attr", getattr(node.func, "id", "")) for node in ast.walk(function) if isinstance(node, ast.Call)}
    if called & GUARDS:
        return True
    if not depth:
        return False
    names = {
        node.id if isinstance(node, ast.Name) else node.attr
        for node in ast.walk(function)
        if isinstance(node, (ast.Name, ast.Attribute))
    }
    defined = [
        node.value if isinstance(node, ast.Assign) else node
        for node in ast.walk(tree)
        if (isinstance(node, ast.FunctionDef) and node.name in names)
        or (isinstance(node, ast.Assign) and any(isinstance(target, ast.Name) and target.id in names for target in node.targets))
    ]
    return any(is_guarded(node, tree, depth - 1) for node in defined if node is not function)


def test_every_registration_with_pytorch_goes_through_the_guard() -> None:
    found = list(registrations())
    assert len(found) > 20
    wrong = [
        f"{name}: {ast.unparse(function)}"
        for name, function, tree in found
        if ast.unparse(function) not in UNGUARDED.get(name, ()) and not is_guarded(function, tree)
    ]
    assert wrong == ["recorders.graphs.operators: run"]  # see below


def test_every_operator_in_graphs_goes_through_the_guard() -> None:
    tree = ast.parse((ROOT / "recorders/graphs/operators.py").read_text())
    defined = [node.args[1] for node in ast.walk(tree) if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "_define"]
    assert len(defined) == 5
    assert [ast.unparse(function) for function in defined if not is_guarded(function, tree)] == []


# What is planted at each entrance of each kind of monitor


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x).relu())
        return out


KINDS: dict[str, tuple[Callable[[Net], Monitor], list[str]]] = {
    "output": (lambda net: ForwardMonitor(Mean()), ["_after", "_passes", "_waits"]),
    "output of a callable": (lambda net: ForwardMonitor(Mean(), op_=lambda x: x), ["_after", "_passes", "_see", "_take"]),
    "input": (lambda net: ForwardInputMonitor(Mean()), ["_before", "_passes", "_waits"]),
    "input of a callable": (lambda net: ForwardInputMonitor(Mean(), op_=lambda x: x), ["_before", "_passes", "_see"]),
    "gradient": (
        lambda net: BackwardMonitor(Mean()),
        ["gradient_hooks.watch", "gradient_hooks.watch_tensor", "gradient_hooks.arrived", "_due", "_see", "_waits"],
    ),
    "gradient of an input": (
        lambda net: BackwardInputMonitor(Mean()),
        ["gradient_hooks.watch", "gradient_hooks.arrived", "gradient_hooks.keep_for_end"],
    ),
    "attribute": (lambda net: StateMonitor(Mean(), "weight"), ["_after", "_passes", "_see", "_read", "operands"]),
    "difference": (
        lambda net: DifferenceMonitor(Mean(), "weight"),
        ["_passes", "_see", "watched", "operands", "sites.keep_for_end", "sites.take_kept"],
    ),
    "pair": (lambda net: PairMonitor(CKA(), net.second), ["_arrive"]),
    "value at a call": (lambda net: ParameterMonitor(Norm(), when="call"), ["_after", "_passes", "_see", "_parts"]),
    "value": (lambda net: ParameterMonitor(Quantile()), ["notified", "parameters_of", "operands_of", "_observe"]),
    "gradient of a parameter": (
        lambda net: ParameterGradientMonitor(Quantile()),
        ["notified", "operands_of", "_observe", "_see"],
    ),
    "accumulated": (
        lambda net: ParameterGradientMonitor(Norm(), when="accumulate"),
        ["_hook_new", "_accumulated", "_parameters"],
    ),
    "update": (lambda net: ParameterUpdateMonitor(Quantile()), ["notified", "changed", "_see"]),
    "state": (lambda net: OptimizerStateMonitor(Quantile(), "exp_avg"), ["operands_of", "_kept", "_observe"]),
}


def planted(*_: Any, **__: Any) -> Any:
    raise RuntimeError("planted")


def train(net: Net, steps: int = 3) -> list[Tensor]:
    torch.manual_seed(1)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.randn(4, 3, requires_grad=True)).square().sum().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in net.parameters()]


def new_net() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.mark.parametrize(("kind", "method"), [(kind, method) for kind, (_, methods) in KINDS.items() for method in methods])
def test_what_fails_in_a_monitor_is_told_and_the_training_goes_on(kind: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net, make = new_net(), KINDS[kind][0]
    prototype = make(net)
    good = ForwardMonitor(Count()) if kind.startswith("input") else ForwardInputMonitor(Count())
    recorder = Recorder(good=good, bad=prototype)
    where, _, name = method.rpartition(".")
    place = {"": type(prototype), "gradient_hooks": gradient_hooks, "sites": sites}[where]
    # Some are needed to put it on, too; others are found when it is put on.
    if method not in ("_parameters", "parameters_of", "_read", "_hook_new"):
        monkeypatch.setattr(place, name, planted)
    recorder.modules(net, names="first")
    if method == "_hook_new":
        monkeypatch.setattr(hook_of(recorder["bad/first"].hooks.handles[0]), "run", planted)
    else:
        monkeypatch.setattr(place, name, planted)
    with pytest.warns(RecordingWarning, match="planted"):
        found = train(net)
    assert all(map(torch.equal, found, train(new_net())))
    assert recorder["good/first"].samples == 3
    recorder.deregister()


SHARED: dict[str, tuple[type, str]] = {
    "clock": (Clock, "advance"),
    "micro-batches": (Clock, "_forward"),
    "tables": (table.Tables, "_find"),
    "rows": (ParameterRows, "write"),
    "end of a step": (_Steps, "_end"),
    "beginning of a step": (_Steps, "_begin"),
}


@pytest.mark.parametrize("which", SHARED)
def test_what_fails_beside_the_monitors_is_told_and_the_training_goes_on(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net = new_net()
    monkeypatch.setattr(*SHARED[which], planted)
    recorder = Recorder(out=ForwardMonitor(Count()), value=ParameterMonitor(Quantile()), norm=ParameterMonitor(Norm()))
    recorder.modules(net, names="first")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    recorder.attach(optimizer)
    with pytest.warns(RecordingWarning, match="of a recorder failed: RuntimeError: planted") as told:
        for _ in range(3):
            net(torch.ones(2, 3)).sum().backward()
            optimizer.step()
    assert len([item for item in told if "planted" in str(item.message)]) == 1
    assert recorder["out/first"].samples == 3
    recorder.deregister()


def test_what_fails_while_it_looks_for_a_clock_that_stands_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    net = new_net()
    recorder = Recorder(ForwardMonitor(Count(), every_step=2)).modules(net, names="first")
    monkeypatch.setattr("recorders.schedule.steps.tell", planted)
    with pytest.warns(RecordingWarning, match="planted"):
        train(net)
    recorder.deregister()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("method", ["record_batch", "receive_call"])
def test_what_fails_in_the_operator_of_a_graph_is_told(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    makers: dict[str, Callable[[], Monitor]] = {
        "record_batch": lambda: ForwardMonitor(Sum()),
        "receive_call": lambda: ForwardMonitor(Sum(), op_=lambda x: x),
    }
    monkeypatch.setattr(GraphSink, method, staticmethod(planted) if method == "record_batch" else planted)
    monkeypatch.setattr("recorders.graphs.trace.can_record", lambda: False)
    net = new_net()
    recorder = Recorder(makers[method]()).modules(net, types=nn.Linear)
    call = torch.compile(net, backend="aot_eager")
    with pytest.warns(RecordingWarning, match="planted"):
        assert torch.equal(call(torch.ones(2, 3)), net(torch.ones(2, 3)))
    recorder.deregister()


def test_errors_that_are_asked_for_come_through_after_all_others_have_recorded() -> None:
    net = new_net()
    asked = ParameterMonitor(Norm(), op_=planted, on_error="raise")
    recorder = Recorder(bad=asked, good=ParameterMonitor(Count()), update=ParameterUpdateMonitor(Norm())).modules(net.first)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    recorder.attach(optimizer)
    net(torch.ones(2, 3)).sum().backward()
    with pytest.raises(MonitorError, match="planted"):
        optimizer.step()
    assert [recorder[name].samples for name in ("bad", "good", "update")] == [0, 1, 1]
    assert recorder.clock.step == 1  # the step has ended
    recorder.deregister()


def test_warnings_that_are_errors_come_through() -> None:
    net = new_net()
    recorder = Recorder(ForwardMonitor(Mean(), op_=planted)).modules(net, names="first")
    with pytest.raises(RecordingWarning, match="planted"):  # as warnings are errors here
        net(torch.ones(2, 3))
    recorder.deregister()


# Whatever an optimizer keeps


class Odd(Optimizer):
    """Keeps what it is told to."""

    def __init__(self, parameters: Any, kept: Callable[[], Any]) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.kept = kept

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for index, parameter in enumerate(group["params"]):
                with torch.no_grad():
                    parameter -= 0.1 * parameter.grad
                self.state[parameter] = {"x": torch.ones(2)} if index else self.kept()


ODD: dict[str, Callable[[], Any]] = {
    "no state": lambda: None,
    "a text": lambda: "x",
    "a list": lambda: ["x"],
    "an object": object,
    "None": lambda: {"x": None},
    "text in it": lambda: {"x": "text"},
    "a ragged list": lambda: {"x": [[1.0], [1.0, 2.0]]},
    "an object in it": lambda: {"x": object()},
    "a dict in it": lambda: {"x": {"y": torch.ones(1)}},
    "a type": lambda: {"x": Tensor},
    "a set": lambda: {"x": {1, 2}},
    "a sparse tensor": lambda: {"x": torch.eye(2).to_sparse()},
    "a meta tensor": lambda: {"x": torch.ones(2, device="meta")},
    "keys of several kinds": lambda: {1: 2, "y": 3},
    "a number": lambda: {"x": 2.0},
    "numbers": lambda: {"x": [1.0, 2.0]},
    "a complex tensor": lambda: {"x": torch.ones(2, dtype=torch.complex64)},
}


@pytest.mark.filterwarnings("ignore::recorders.RecordingWarning")
@pytest.mark.parametrize("kept", ODD.values(), ids=ODD)
@pytest.mark.parametrize("reducer", [Norm(), Quantile()], ids=["planned", "alone"])
def test_whatever_an_optimizer_keeps_its_steps_go_on(kept: Callable[[], Any], reducer: Any) -> None:
    layer = nn.Linear(2, 2)
    monitor = OptimizerStateMonitor(reducer, "x", None, layer)
    optimizer = Odd(layer.parameters(), kept)
    for _ in range(4):
        layer(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert monitor.buffer.stored.samples == 4  # of the bias, whose state is as it should be
    monitor.deregister()


def test_a_state_that_holds_no_numbers_is_told_with_what_it_is() -> None:
    layer = nn.Linear(2, 2)
    monitor = OptimizerStateMonitor(Norm(), "x", None, layer)
    layer(torch.ones(1, 2)).sum().backward()
    with pytest.warns(RecordingWarning, match="Odd keeps no states by name for 'weight', but None"):
        Odd(layer.parameters(), lambda: None).step()
    monitor.deregister()


# Threads


def in_a_thread(function: Callable[[], object]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def test_a_clock_of_another_thread_may_switch_monitors_in_the_middle_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    nets = [new_net(), new_net()]
    recorders = [Recorder(ParameterMonitor(Norm(), every_step=2)).modules(net, types=nn.Linear) for net in nets]
    other, due, switched = recorders[1], table._due, []
    for net, recorder in zip(nets, recorders, strict=True):
        train(net, 1)
        recorder.step().step()

    def read(*args: Any) -> Any:
        if not switched:
            switched.append(True)
            in_a_thread(other.step)
        return due(*args)

    monkeypatch.setattr(table, "_due", read)
    optimizer = torch.optim.SGD(nets[0].parameters(), lr=0.1)
    nets[0](torch.ones(2, 3)).sum().backward()
    optimizer.step()
    assert switched
    assert set(recorders[0].samples.values()) == {2}
    for recorder in recorders:
        recorder.deregister()


@pytest.mark.parametrize("kind", [ParameterGradientMonitor, ParameterMonitor])
def test_another_thread_may_take_the_last_recorder_off_in_the_middle_of_a_step(
    kind: type[Monitor], monkeypatch: pytest.MonkeyPatch
) -> None:
    net = new_net()
    recorder = Recorder(kind(Quantile())).modules(net, types=nn.Linear)
    was, seen = kind.notified, []  # type: ignore[attr-defined]
    users = register_optimizer_step_post_hook(lambda *_: seen.append("user"))

    def notify(self: Any, *args: Any) -> None:
        in_a_thread(recorder.deregister)
        in_a_thread(recorder.register)
        was(self, *args)

    monkeypatch.setattr(kind, "notified", notify)
    train(net, 2)
    users.remove()
    recorder.deregister()
    assert seen == ["user", "user"]


def test_another_thread_may_take_updates_off_between_reading_and_gathering(monkeypatch: pytest.MonkeyPatch) -> None:
    net = new_net()
    recorder = Recorder(ParameterUpdateMonitor(Norm())).modules(net, types=nn.Linear)
    train(net, 2)
    changed = table.Found.change
    once: list[Any] = []

    def take_off(*args: Any) -> Any:
        if not once:
            once.append(args)
            in_a_thread(recorder["first"].deregister)
        return changed(*args)

    monkeypatch.setattr(table.Found, "change", take_off)
    train(net, 2)
    assert once
    assert [recorder[name].samples for name in ("first", "second")] == [2, 4]
    recorder.deregister()


@pytest.mark.slow
@pytest.mark.parametrize("every_step", [pytest.param(1, marks=pytest.mark.long), 3])
def test_threads_that_train_meet_no_error_if_others_take_recorders_off_and_on(every_step: int) -> None:
    import torch._dynamo  # as optimizers do, so that threads need not

    errors: list[str] = []
    ended = threading.Event()
    nets = [new_net() for _ in range(2)]
    optimizers = [torch.optim.Adam(net.parameters(), lr=1e-3) for net in nets]
    recorders = [
        Recorder(
            out=ForwardMonitor(Norm(), every_step=every_step),
            back=BackwardMonitor(Norm(), every_step=every_step),
            value=ParameterMonitor(Norm(), every_step=every_step),
            update=ParameterUpdateMonitor(Norm(), every_step=every_step),
            gradient=ParameterGradientMonitor(Norm(), every_step=every_step),
            accumulated=ParameterGradientMonitor(Norm(), when="accumulate", every_step=every_step),
            state=OptimizerStateMonitor(Quantile(), "exp_avg", every_step=every_step),
        )
        .modules(net, types=nn.Linear)
        .attach(optimizer)
        for net, optimizer in zip(nets, optimizers, strict=True)
    ]

    def running(function: Callable[[], object]) -> None:
        try:
            function()
        except BaseException as error:
            # Python 3.11 has an error of its own if PyTorch, as it is first used, parses code in two threads at once.
            if not (sys.version_info < (3, 12) and "AST constructor recursion depth" in str(error)):
                errors.append("".join(traceback.format_exception(error)))
            ended.set()

    def training(net: Net, optimizer: Optimizer) -> None:
        for _ in range(700):
            if ended.is_set():
                break
            optimizer.zero_grad()
            net(torch.randn(4, 3)).square().sum().backward()
            optimizer.step()

    def toggling(recorder: Recorder) -> None:
        while not ended.is_set():
            recorder.deregister()
            recorder.register()
            recorder.snapshot()

    trainers = [
        threading.Thread(target=running, args=(partial(training, net, optimizer),))
        for net, optimizer in zip(nets, optimizers, strict=True)
    ]
    togglers = [threading.Thread(target=running, args=(partial(toggling, recorder),)) for recorder in recorders]
    for thread in [*trainers, *togglers]:
        thread.start()
    for thread in trainers:
        thread.join()
    ended.set()
    for thread in togglers:
        thread.join()
    assert errors == []
    for recorder, optimizer, net in zip(recorders, optimizers, nets, strict=True):
        recorder.register()
        recorder.reset()
        for _ in range(2 * every_step):
            optimizer.zero_grad()
            net(torch.randn(4, 3)).square().sum().backward()
            optimizer.step()
        assert {name: monitor.samples for name, monitor in recorder.items()} == dict.fromkeys(recorder, 2)
        recorder.deregister()
    assert all(row.last_error is None for recorder in recorders for row in recorder.values())
