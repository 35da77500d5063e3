"""Every kind of monitor, and kinds as a user writes them, in every mode: what is recorded is what is computed by hand."""

from __future__ import annotations

import ast
import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import recorders
from recorders import (
    BackwardInputMonitor,
    BackwardMonitor,
    Call,
    CallMonitor,
    DifferenceMonitor,
    ForwardInputMonitor,
    ForwardMonitor,
    ModuleMonitor,
    Monitor,
    OptimizerMonitor,
    OptimizerStateMonitor,
    PairMonitor,
    ParameterGradientMonitor,
    ParameterMonitor,
    ParameterUpdateMonitor,
    Recorder,
    StateMonitor,
    TargetError,
    load,
)
from recorders.watch.diagnosis.health import NetInputMonitor, NetOutputMonitor, PreStepParameterMonitor
from recorders.watch.diagnosis.steps import StepMonitor
from reducers import Count, Masked, Mean, Product, Reducer

STEPS = 4
BOTH = Product(mean=Mean(), n=Count())


# As a user writes them: where it looks, and what it makes of what it sees there


class Gain(Monitor):
    """By how much a module changes the norm of its input. Operands: gain, output, input."""

    sites = ("forward",)

    def operands(self, call: Call) -> tuple[Any, ...]:
        return call.output.norm() / call.inputs.norm(), call.output, call.inputs


class Power(Monitor):
    """The mean square of the input. Operands: power."""

    sites = ("forward_pre",)

    def operands(self, call: Call) -> tuple[Any, ...]:
        return (call.inputs.square().mean(),)


class Attribution(Monitor):
    """Gradient times output. Operands: attribution."""

    sites = ("output_gradient",)

    def operands(self, call: Call) -> tuple[Any, ...]:
        return (call.gradient * call.tensor,)


class Sensitivity(Monitor):
    """The norm of the gradient of the input. Operands: norm."""

    sites = ("input_gradient",)

    def operands(self, call: Call) -> tuple[Any, ...]:
        return (call.gradient.norm(),)


class Drift(Monitor):
    """How far a forward moves the running total. Operands: distance."""

    sites = ("around_forward",)

    def watched(self, call: Call) -> Any:
        return call.module.total

    def operands(self, call: Call) -> tuple[Any, ...]:
        return ((call.module.total - call.before).abs(),)


class Above(Monitor):
    """The share of the outputs above a threshold, an argument of its own. Operands: one for each that is above it, else zero."""

    sites = ("forward",)

    def __init__(self, reducer: Reducer, module: nn.Module | None = None, *, threshold: float = 0.0, **options: Any) -> None:
        self.threshold = threshold
        super().__init__(reducer, module, **options)

    def operands(self, call: Call) -> tuple[Any, ...]:
        return ((call.output > self.threshold).float(),)


class Relative(ParameterGradientMonitor):
    """The gradient of a parameter, relative to its norm. Operands: relative gradient."""

    def operands(self, call: Call) -> tuple[Any, ...]:
        gradient, value = call.values
        return (gradient / value.norm(),)


class Cell(nn.Module):
    """A layer that keeps a running total."""

    moves = True

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        if self.moves:
            self.total.add_(x.detach().float().mean(0))
        return (x @ self.weight).tanh()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.cell, self.last = nn.Linear(3, 3), Cell(), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.cell(self.first(x)))
        return out


def first(*operands: Any) -> Any:
    return operands[0]


def minus(one: Any, other: Any) -> Any:
    return one - other


def rank(module: Any) -> Any:
    return module.weight.sum()


def momentum_of(optimizer: Any, module: Any) -> Any:
    return optimizer.state[getattr(module, "cell", module).weight]["momentum_buffer"]


def held_by(facts: Any) -> Any:
    return torch.tensor(facts["held"])


class Kind(NamedTuple):
    """A row: the class, what is given to it, which of the numbers by hand it records, and how these follow from its operands."""

    kind: type[Monitor]
    options: dict[str, Any]
    by_hand: str
    default: Callable[..., Any] = first

    def recipe(self, net: Net, **options: Any) -> Monitor:
        given = {**self.options, **options}
        attr = given.pop("attr", None)
        if self.kind is PairMonitor:
            given["other"] = net.first
        return self.kind.partialconstructor(given.pop("reducer", BOTH), **given)(attr)

    def put(self, net: Net, **options: Any) -> Monitor:
        return self.recipe(net, **options).register(net.cell)


KINDS = {
    "ForwardMonitor": Kind(ForwardMonitor, {}, "output"),
    "ForwardInputMonitor": Kind(ForwardInputMonitor, {}, "input"),
    "BackwardMonitor": Kind(BackwardMonitor, {}, "gradient"),
    "BackwardInputMonitor": Kind(BackwardInputMonitor, {}, "gradient of the input"),
    "StateMonitor": Kind(StateMonitor, {"attr": "total"}, "after"),
    "StateMonitor before": Kind(StateMonitor, {"attr": "total", "as_prehook": True}, "before"),
    "DifferenceMonitor": Kind(DifferenceMonitor, {"attr": "total"}, "change", minus),
    "PairMonitor": Kind(PairMonitor, {"op_": minus}, "residual", minus),
    "ParameterMonitor": Kind(ParameterMonitor, {"attr": "weight"}, "value after the step"),
    "ParameterMonitor at calls": Kind(ParameterMonitor, {"attr": "weight", "when": "call"}, "value"),
    "ParameterMonitor at ticks": Kind(ParameterMonitor, {"attr": "weight", "when": "tick"}, "value after the step"),
    "ParameterGradientMonitor": Kind(ParameterGradientMonitor, {"attr": "weight"}, "gradient of the weight"),
    "ParameterGradientMonitor, accumulated": Kind(
        ParameterGradientMonitor, {"attr": "weight", "when": "accumulate"}, "gradient of the weight"
    ),
    "ParameterUpdateMonitor": Kind(ParameterUpdateMonitor, {"attr": "weight"}, "update", minus),
    "OptimizerStateMonitor": Kind(OptimizerStateMonitor, {"attr": "weight", "key": "momentum_buffer"}, "momentum"),
    "OptimizerMonitor": Kind(OptimizerMonitor, {"op_": momentum_of}, "momentum", momentum_of),
    "CallMonitor": Kind(CallMonitor, {}, "loss"),
    "ModuleMonitor": Kind(ModuleMonitor, {"op_": rank}, "sum", rank),
    "NetInputMonitor": Kind(NetInputMonitor, {}, "input"),
    "NetOutputMonitor": Kind(NetOutputMonitor, {}, "output"),
    "PreStepParameterMonitor": Kind(PreStepParameterMonitor, {"attr": "weight"}, "value"),
    "StepMonitor": Kind(StepMonitor, {"op_": held_by}, "held", held_by),
    "Gain": Kind(Gain, {}, "gain"),
    "Power": Kind(Power, {}, "power"),
    "Attribution": Kind(Attribution, {}, "attribution"),
    "Sensitivity": Kind(Sensitivity, {}, "sensitivity"),
    "Drift": Kind(Drift, {}, "drift"),
    "Relative": Kind(Relative, {"attr": "weight"}, "relative gradient"),
    "Above": Kind(Above, {"threshold": 0.125}, "above"),
}
CALLED = [name for name, row in KINDS.items() if row.kind.sites and "step" not in row.kind.sites]


def test_the_table_has_every_kind_and_every_site() -> None:
    bases, written = {"Monitor", "ModuleParameterMonitor"}, set[str]()
    for path in Path(recorders.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and any(getattr(base, "id", "").endswith("Monitor") for base in node.bases):
                written |= {node.name} if not node.name.startswith("_") else set()
    assert written - bases <= {row.kind.__name__ for row in KINDS.values()}
    own = {site for row in KINDS.values() for site in row.kind.sites if row.kind.__module__ == __name__}
    assert own == {"forward", "forward_pre", "output_gradient", "input_gradient", "around_forward", "step"}


# A training in each mode


def data() -> list[Tensor]:
    return [*torch.randn(STEPS, 5, 3, generator=torch.Generator().manual_seed(1))]


def optimizer_of(net: Net) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


@cache
def by_hand(mode: str) -> dict[str, list[Tensor]]:
    """The numbers of each step, taken without any hook."""
    net, found = Net(), dict[str, list[Tensor]]()
    optimizer = optimizer_of(net)
    for x in data():
        optimizer.zero_grad()
        step: dict[str, Tensor] = {"before": net.cell.total.clone(), "value": net.cell.weight.detach().clone()}
        with MODES[mode].context():
            h = net.first(x.clone().requires_grad_())
            h.retain_grad()
            y = net.cell(h)
            y.retain_grad()
            loss = net.last(y).float().square().sum()
        loss.backward()
        after = net.cell.total.clone()
        if mode.startswith("checkpointed"):  # the forward runs twice, and so the total moves twice
            net.cell(h)
        step |= {"output": y, "input": h, "after": after, "change": after - step["before"], "loss": loss}
        step |= {"gradient": y.grad, "gradient of the input": h.grad, "gradient of the weight": net.cell.weight.grad.clone()}
        step |= {"residual": y - h, "gain": y.float().norm() / h.float().norm(), "power": h.square().mean()}
        step |= {
            "attribution": y * y.grad,
            "sensitivity": h.grad.float().norm(),
            "drift": step["change"].abs(),
            "above": (y > 0.125).float(),
            "relative gradient": net.cell.weight.grad / step["value"].norm(),
        }
        optimizer.step()
        value = net.cell.weight.detach().clone()
        step |= {"value after the step": value, "update": value - step["value"], "sum": value.sum()}
        step |= {"held": torch.tensor(1.0)}
        step |= {"momentum": optimizer.state[net.cell.weight]["momentum_buffer"].clone()}
        for name, number in step.items():
            found.setdefault(name, []).append(number.detach().double())
    return found


class Mode(NamedTuple):
    """How a net is called, and in which context."""

    wrap: Callable[[Net], Callable[[Tensor], Tensor]]
    context: Callable[[], Any] = nullcontext


def compiled(net: Net, backend: str = "aot_eager") -> Callable[[Tensor], Tensor]:
    torch._dynamo.reset()
    call: Callable[[Tensor], Tensor] = torch.compile(net, backend=backend, fullgraph=True)
    return call


def compiled_in_checkpoint(net: Net) -> Callable[[Tensor], Tensor]:
    torch._dynamo.reset()

    def call(x: Tensor) -> Tensor:
        out: Tensor = checkpoint(net, x, use_reentrant=False)
        return out

    found: Callable[[Tensor], Tensor] = torch.compile(call, backend="aot_eager", fullgraph=True)
    return found


def autocast() -> Any:
    return torch.autocast("cpu", dtype=torch.bfloat16)


MODES = {
    "eager": Mode(lambda net: net),
    "checkpointed": Mode(lambda net: lambda x: checkpoint(net, x, use_reentrant=False)),
    "checkpointed, reentrant": Mode(lambda net: lambda x: checkpoint(net, x, use_reentrant=True)),
    "autocast": Mode(lambda net: net, autocast),
    "compiled": Mode(compiled),
    "compiled, checkpointed": Mode(compiled_in_checkpoint),
    "compiled, autocast": Mode(compiled, autocast),
    "inductor": Mode(lambda net: compiled(net, "inductor")),
}
SLOW = ("inductor",)


def train(net: Net, mode: str, monitors: dict[str, Monitor], steps: slice = slice(None)) -> list[Tensor]:
    """Trains; returns losses and parameters."""
    optimizer, call, losses = optimizer_of(net), MODES[mode].wrap(net), list[Tensor]()
    for x in data()[steps]:
        optimizer.zero_grad()
        with MODES[mode].context():
            loss = call(x.clone().requires_grad_()).float().square().sum()
        for monitor in monitors.values():
            if monitor.subject == "values":
                monitor.push(loss)
        loss.backward()
        optimizer.step()
        for monitor in monitors.values():
            monitor.tick()
        losses.append(loss.detach())
    return [*losses, *(value.detach().clone() for value in net.state_dict().values())]


@cache
def trained(mode: str) -> dict[str, Monitor]:
    """All kinds at once, in one training, which is the same to the bit without them."""
    net, alone = Net(), Net()
    monitors = {name: row.put(net) for name, row in KINDS.items()}
    for one, other in zip(train(net, mode, monitors), train(alone, mode, {}), strict=True):
        assert torch.equal(one, other)
    return monitors


def check(name: str, monitor: Monitor, mode: str = "eager", steps: slice = slice(None), factor: float = 1.0) -> None:
    """What the monitor has recorded is what is computed by hand in these steps."""
    assert monitor.last_error is None
    expected = by_hand(mode)[KINDS[name].by_hand][steps]
    assert monitor.samples == len(expected)
    values, result = torch.cat([x.flatten() for x in expected]), monitor.peek()
    assert int(result["n"]) == values.numel()
    torch.testing.assert_close(
        result["mean"].double(), factor * values.mean(), rtol=2e-2 if "autocast" in mode else 1e-5, atol=1e-6
    )


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("mode", [pytest.param(mode, marks=[pytest.mark.slow] * (mode in SLOW)) for mode in MODES])
def test_a_training_is_recorded_as_by_hand(name: str, mode: str) -> None:
    check(name, trained(mode)[name], mode)
    assert not any("error" in reason for reason in trained(mode)[name].counts)


def recorder_of(name: str, net: Net, **options: Any) -> Recorder:
    """A recorder with one monitor of this kind on the cell of the net."""
    recorder = Recorder(KINDS[name].recipe(net, **options))
    kind = KINDS[name].kind
    if kind is CallMonitor:
        return recorder
    return recorder.modules(net.cell) if kind.of_net else recorder.modules(net, names="cell")


# Options, eager and compiled

CHOICES: dict[str, tuple[dict[str, Any], slice, float]] = {
    "every": ({"every": 2}, slice(None, None, 2), 1.0),
    "map_": ({"map_": lambda default: lambda *operands: (2 * default(*operands),)}, slice(None), 2.0),
    "op_": ({"op_": lambda default: lambda *operands: 3 * default(*operands)}, slice(None), 3.0),
    "filter_": ({"filter_": lambda default: Alternately()}, slice(None, None, 2), 1.0),
    "condition": ({"condition": lambda default: lambda: True}, slice(None), 1.0),
    "eval_update": ({"eval_update": False}, slice(None), 1.0),
}


class Alternately:
    """Lets every other observation pass."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *operands: Any) -> bool:
        self.calls += 1
        return self.calls % 2 == 1


@cache
def chosen(option: str, mode: str) -> dict[str, Monitor]:
    options, net = CHOICES[option][0], Net()
    made = {
        name: row.put(net, **{key: value(row.default) if callable(value) else value for key, value in options.items()})
        for name, row in KINDS.items()
    }
    train(net, mode, made)
    return made


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("option", CHOICES)
@pytest.mark.parametrize("mode", ["eager", pytest.param("compiled", marks=pytest.mark.slow)])
def test_options_hold_for_every_kind(name: str, option: str, mode: str) -> None:
    _, steps, factor = CHOICES[option]
    check(name, chosen(option, mode)[name], mode, steps, factor)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("mode", ["eager", pytest.param("compiled", marks=pytest.mark.slow)])
def test_steps_of_the_clock_hold_for_every_kind(name: str, mode: str) -> None:
    net = Net()
    recorder = recorder_of(name, net, steps=[1, 2])
    optimizer, call = optimizer_of(net), MODES[mode].wrap(net)
    recorder.attach(optimizer)
    (monitor,) = recorder.values()
    for x in data():
        optimizer.zero_grad()
        loss = call(x.clone().requires_grad_()).square().sum()
        if monitor.subject == "values":
            monitor.push(loss)
        loss.backward()
        if monitor.subject in ("values", "module") or name == "ParameterMonitor at ticks":
            monitor.tick()  # before the clock advances
        optimizer.step()
    if monitor.subject != "module" and name != "ParameterMonitor at ticks":  # whose values are of before the step
        check(name, monitor, mode, slice(1, 3))
    assert monitor.samples == 2
    recorder.deregister()


@pytest.mark.parametrize("name", [name for name in CALLED if name != "PairMonitor"])
@pytest.mark.parametrize("mode", ["eager", "checkpointed", pytest.param("compiled", marks=pytest.mark.slow)])
def test_what_is_given_with_a_batch_reaches_every_kind(name: str, mode: str) -> None:
    net = Net()
    recorder = recorder_of(name, net, reducer=Masked(BOTH), given="mask")
    optimizer, call = optimizer_of(net), MODES[mode].wrap(net)
    for x in data():
        optimizer.zero_grad()
        with recorder.given(mask=torch.tensor(True)):
            call(x.clone().requires_grad_()).square().sum().backward()
        optimizer.step()
    (monitor,) = recorder.values()
    check(name, monitor, mode)
    recorder.deregister()


# Copies


def copied(monitor: Monitor) -> Monitor:
    return copy.deepcopy(monitor)


def pickled(monitor: Monitor) -> Monitor:
    found: Monitor = pickle.loads(pickle.dumps(monitor))
    return found


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("how", [copied, pickled])
def test_a_copy_has_what_was_recorded_and_goes_on_elsewhere(name: str, how: Callable[[Monitor], Monitor]) -> None:
    net = Net()
    monitor = KINDS[name].put(net)
    train(net, "eager", {name: monitor}, slice(1))
    other = how(monitor)
    assert other.samples == monitor.samples == 1
    assert torch.equal(other.peek()["mean"], monitor.peek()["mean"])
    assert repr(other) == (repr(monitor) if name != "PairMonitor" else repr(other))
    if name == "PairMonitor":  # a copy does not hold the other module
        with pytest.raises(TargetError, match="no other module"):
            other.register(net.cell)
        return
    fresh = Net()
    train(fresh, "eager", {name: other.register(fresh.cell)}, slice(3))
    assert (other.samples, monitor.samples) == (4, 1)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("how", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))], ids=["copied", "pickled"])
def test_a_copy_of_the_net_records_nothing(name: str, how: Callable[[Net], Net]) -> None:
    net = Net()
    monitor = KINDS[name].put(net)
    other = how(net)
    losses, alone = train(other, "eager", {}), train(Net(), "eager", {})
    assert all(map(torch.equal, losses, alone))
    assert monitor.samples == 0


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("mode", ["eager", pytest.param("compiled", marks=pytest.mark.slow)])
def test_nothing_is_left_if_net_and_recorder_are_dropped(name: str, mode: str) -> None:
    net = Net()
    recorder = recorder_of(name, net)
    (monitor,) = recorder.values()
    train(net, mode, {name: monitor})
    assert monitor.samples == STEPS
    left = [weakref.ref(monitor), weakref.ref(recorder), weakref.ref(net)]
    del net, recorder, monitor
    torch._dynamo.reset()
    gc.collect()
    assert [one() for one in left] == [None, None, None]


@pytest.mark.parametrize("name", KINDS)
def test_a_recorder_selects_saves_and_reports_every_kind(name: str, tmp_path: Path) -> None:
    net = Net()
    recorder = recorder_of(name, net)
    (monitor,) = recorder.values()
    train(net, "eager", {name: monitor})
    check(name, monitor)
    (row,) = recorder.report().rows
    assert (row.samples, row.reason, row.error) == (STEPS, "", None)
    recorder.save(tmp_path / "run")
    (part,) = load(tmp_path / "run").values()
    assert part.samples == STEPS
    assert torch.equal(part.peek()["mean"], monitor.peek()["mean"])
    recorder.deregister()
    train(net, "eager", {})
    assert monitor.samples == STEPS


# Calls that are none of the user's own, or have no numbers


@pytest.mark.parametrize("name", CALLED)
def test_transforms_of_functions_run_as_without_monitors(name: str) -> None:
    net, alone = Net(), Net()
    net.cell.moves = alone.cell.moves = False  # in place in a transform
    monitor, x = KINDS[name].put(net), torch.stack(data())
    for call in (torch.func.vmap, lambda f: torch.func.vmap(torch.func.grad(lambda x: f(x).sum()))):
        assert torch.equal(call(net)(x), call(alone)(x))
    net.cell.moves = True
    assert monitor.samples == 0
    assert monitor.last_error is None
    train(net, "eager", {name: monitor})
    check(name, monitor)


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLED)
def test_transforms_inside_a_graph_record_nothing(name: str) -> None:
    net, alone = Net(), Net()
    net.cell.moves = alone.cell.moves = False
    monitor, x = KINDS[name].put(net), torch.stack(data())

    def call(net: Net) -> Tensor:
        torch._dynamo.reset()
        found: Tensor = torch.compile(
            lambda x: torch.func.vmap(lambda one: net.last(net.cell(net.first(one))))(x), backend="eager"
        )(x)
        return found

    assert torch.equal(call(net), call(alone))
    assert monitor.samples == 0
    assert monitor.last_error is None


@pytest.mark.parametrize("name", [name for name in CALLED if KINDS[name].kind not in (BackwardMonitor, BackwardInputMonitor)])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_forwards_are_recorded(name: str, mode: Callable[[], Any]) -> None:
    net = Net()
    monitor = KINDS[name].put(net)
    with mode():
        for x in data():
            net(x)
    backward = monitor.watch is not None
    assert monitor.samples == (0 if backward else STEPS)
    assert monitor.last_error is None
    assert not any(value.is_inference() for value in monitor.state.values())


@pytest.mark.parametrize("name", CALLED)
def test_what_a_monitor_calls_is_not_recorded(name: str) -> None:
    net, x = Net(), torch.ones(5, 3)
    monitor = KINDS[name].put(net)
    caller = ForwardMonitor(Mean(), net.last, op_=lambda out: net(x).mean())
    with torch.no_grad():
        net.last(x)
    assert (caller.samples, monitor.samples) == (1, 0)


# What a kind may declare


@pytest.mark.parametrize(
    ("sites", "says"),
    [
        (("foward",), "did you mean 'forward'"),
        (("forward", "forward_pre"), "one site"),
        ("forward", "a tuple"),
        (("",), "there are"),
        (("step",), "derive from a kind that reads parameters"),
    ],
)
def test_a_site_that_does_not_exist_is_refused(sites: Any, says: str) -> None:
    with pytest.raises(TypeError, match=says):
        type("Own", (Monitor,), {"sites": sites})


def test_hooks_of_its_own_are_refused() -> None:
    with pytest.raises(TypeError, match="declare sites"):
        type("Own", (Monitor,), {"_attach": lambda self, module: []})


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_operands_that_cannot_be_computed_are_left_out_and_told(backend: str | None) -> None:
    class Missing(Monitor):
        sites = ("forward",)

        def operands(self, call: Call) -> tuple[Any, ...]:
            return (call.module.no_such_thing,)

    torch._dynamo.reset()
    net = Net()
    monitor, good = Missing(Mean(), net.cell), ForwardMonitor(Count(), net.cell)
    call = net if backend is None else torch.compile(net, backend=backend, fullgraph=True)
    with pytest.warns(recorders.RecordingWarning, match="no_such_thing" if backend is None else "operands could not be read"):
        out = call(data()[0])
    assert torch.equal(out, Net()(data()[0]))
    assert (monitor.samples, good.samples) == (0, 1)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("wrong", [lambda x: x, lambda x: x.norm(), lambda x: ()], ids=["rows", "0-d", "empty"])
def test_operands_that_are_no_tuple_are_told(wrong: Callable[[Tensor], Any], backend: str | None) -> None:
    """The rows of a lone tensor would be taken for operands, and the first of them recorded."""

    class Lone(Monitor):
        sites = ("forward",)

        def operands(self, call: Call) -> tuple[Any, ...]:
            found: tuple[Any, ...] = wrong(call.output)
            return found

    torch._dynamo.reset()
    net = Net()
    monitor = Lone(Mean(), net.cell)
    call = net if backend is None else torch.compile(net, backend=backend, fullgraph=True)
    with pytest.warns(
        recorders.RecordingWarning, match=r"must return a tuple" if backend is None else "operands could not be read"
    ):
        call(data()[0])
    assert (monitor.samples, monitor.counts["errors"]) == (0, 1)
