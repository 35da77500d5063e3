"""The monitors of inferno beside ours, with their own classes: `pip install '.[parity]'`, or these tests skip."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recorders import DifferenceMonitor, ForwardInputMonitor, ForwardMonitor, Recorder, RecordingWarning, StateMonitor, TargetError
from reducers import EMA, ConditionalNearestTrace, History, Last

pytestmark = [pytest.mark.parametrize("seed", range(3)), pytest.mark.usefixtures("float64")]


def stream(seed: int, steps: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 4, generator=generator) for _ in range(steps)]


class Leaky(nn.Module):
    """Replaces its state at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("voltage", torch.zeros(2, 4))
        self.register_buffer("spike", torch.zeros(2, 4, dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        self.voltage = 0.5 * self.voltage + x
        self.spike = self.voltage > 0
        return self.voltage


class Neuron(nn.Module):
    """A leaky cell within, and several inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = Leaky()

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        return torch.as_tensor(self.cell(x if y is None else x + y))

    def realign(self, attr: str) -> str:
        """The name of an attribute, as a pool of inferno asks for it."""
        return f"cell.{attr}"


def last(observe: Any) -> Any:
    return observe.PassthroughReducer(1.0)


def same(ours: Any, theirs: Any) -> None:
    assert (ours.peek() is None) == (theirs.peek() is None)
    if ours.peek() is not None:
        torch.testing.assert_close(ours.peek(), theirs.peek(), rtol=1e-9, atol=1e-9)


MONITORS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {  # theirs and ours, of a module and options
    "input": (lambda o, m, **k: o.InputMonitor(last(o), m, **k), lambda m, **k: ForwardInputMonitor(Last(), m, **k)),
    "output": (lambda o, m, **k: o.OutputMonitor(last(o), m, **k), lambda m, **k: ForwardMonitor(Last(), m, **k)),
    "state": (lambda o, m, **k: o.StateMonitor(last(o), "voltage", m, **k), lambda m, **k: StateMonitor(Last(), "voltage", m, **k)),
    "state before": (
        lambda o, m, **k: o.StateMonitor(last(o), "voltage", m, as_prehook=True, **k),
        lambda m, **k: StateMonitor(Last(), "voltage", m, as_prehook=True, **k),
    ),
    "difference": (
        lambda o, m, **k: o.DifferenceMonitor(last(o), "voltage", m, **k),
        lambda m, **k: DifferenceMonitor(Last(), "voltage", m, **k),
    ),
}


@pytest.mark.row(
    "InputMonitor",
    "OutputMonitor",
    "StateMonitor(reducer, attr, module, as_prehook)",
    "DifferenceMonitor(reducer, attr, module, ...)",
    "train_update, eval_update, prepend",
    "monitor.peek(), clear()",
)
@pytest.mark.parametrize("train_update", [False, True])
@pytest.mark.parametrize("eval_update", [False, True])
@pytest.mark.parametrize("prepend", [False, True])
@pytest.mark.parametrize("kind", MONITORS)
def test_monitors(observe: Any, kind: str, train_update: bool, eval_update: bool, prepend: bool, seed: int) -> None:
    layer = Leaky()
    layer.register_forward_pre_hook(lambda module, inputs: (2 * inputs[0],))
    layer.register_forward_hook(lambda module, inputs, output: module.voltage.mul_(3))  # seen only by what comes after it
    options = {"train_update": train_update, "eval_update": eval_update, "prepend": prepend}
    theirs, ours = MONITORS[kind][0](observe, layer, **options), MONITORS[kind][1](layer, **options)
    for number, x in enumerate(stream(seed)):
        layer.train(number % 2 == 0)
        same(ours, theirs)
        if number == 5:
            theirs.clear()
            ours.clear()
            same(ours, theirs)
        layer(x)
    same(ours, theirs)


CALLABLES = {"filter_": lambda y: bool((y > 0).any()), "map_": lambda y: (2 * y,)}
OF_PAIRS = {"filter_": lambda after, before: bool((after > before).any()), "map_": lambda after, before: (after * before,)}


@pytest.mark.row(
    "filter_, map_ of OutputMonitor and StateMonitor, called with the output or the attribute",
    "filter_, map_, op_ of DifferenceMonitor, called with the value after and the one before",
)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("output", CALLABLES),
        ("state", CALLABLES),
        ("difference", OF_PAIRS),
        ("difference", {"op_": lambda after, before: after / (before.abs() + 1)}),
    ],
)
def test_callables(observe: Any, kind: str, options: dict[str, Any], seed: int) -> None:
    layer = Leaky()
    theirs, ours = MONITORS[kind][0](observe, layer, **options), MONITORS[kind][1](layer, **options)
    for x in stream(seed):
        layer(x - 1)
        same(ours, theirs)


@pytest.mark.row("filter_, map_ of InputMonitor, called with the tuple of inputs")
def test_callables_of_inputs(observe: Any, seed: int) -> None:
    one, two = Neuron(), Neuron()
    alone: dict[str, Any] = {"map_": lambda xs: tuple(2 * x for x in xs), "filter_": lambda xs: bool(xs[0].sum() > 0)}
    ours: dict[str, Any] = {"map_": lambda x: (2 * x,), "filter_": lambda x: bool(x.sum() > 0)}  # a lone input comes by itself
    several: dict[str, Any] = {"map_": lambda xs: (xs[0] * xs[1],)}
    pairs = [
        (observe.InputMonitor(last(observe), one, **alone), ForwardInputMonitor(Last(), one, **ours)),
        (observe.InputMonitor(last(observe), two, **several), ForwardInputMonitor(Last(), two, **several)),
    ]
    for x, y in zip(stream(seed), stream(seed + 10), strict=True):
        one(x)
        two(x, y)
        for first, second in pairs:
            same(second, first)


@pytest.mark.row(
    "MultiStateMonitor(reducer, attr, subattrs)", "filter_, map_ of MultiStateMonitor, called with the tuple of attributes"
)
@pytest.mark.parametrize("as_prehook", [False, True])
def test_several_attributes(observe: Any, as_prehook: bool, seed: int) -> None:
    names, net, when = ("cell.voltage", "cell.spike"), Neuron(), {"as_prehook": as_prehook}
    multi: Any = observe.MultiStateMonitor
    trace = ConditionalNearestTrace(time_constant=3.0, amplitude=0.5, scale=2.0)
    pairs = [
        (
            multi(last(observe), "cell", ("voltage", "spike"), net, map_=lambda values: (values[0] * values[1],), **when),
            StateMonitor(Last(), names, net, map_=lambda voltage, spike: (voltage * spike,), **when),
        ),
        (  # all of them are inputs of their reducer; ours has a state for each, unless a callable brings them together
            multi(observe.ConditionalNearestTraceReducer(1.0, 3.0, 0.5, 2.0), "", names, net, **when),
            StateMonitor(trace, names, net, map_=lambda *values: values, **when),
        ),
    ]
    apart = StateMonitor(Last(), names, net, **when)
    for x in stream(seed):
        before = [net.cell.voltage, net.cell.spike]
        net(x)
        for theirs, ours in pairs:
            same(ours, theirs)
        assert [*map(torch.Tensor.tolist, apart.peek().values())] == [
            value.tolist() for value in (before if as_prehook else [net.cell.voltage, net.cell.spike])
        ]


@pytest.mark.row("partialconstructor(...)(attr, module), MonitorConstructor", "reducer objects that hold data")
@pytest.mark.parametrize("kind", ["InputMonitor", "OutputMonitor", "StateMonitor", "DifferenceMonitor"])
def test_recipes(observe: Any, kind: str, seed: int) -> None:
    net = nn.ModuleDict({"a": Leaky(), "b": Leaky()})
    peers = {"InputMonitor": ForwardInputMonitor, "OutputMonitor": ForwardMonitor, "StateMonitor": StateMonitor}
    ours: Any = peers.get(kind, DifferenceMonitor)
    options: Any = {"train_update": True, "eval_update": False, "prepend": True}
    attr = kind in ("StateMonitor", "DifferenceMonitor")
    places = [("voltage", net["a"]), ("voltage", net["b"])] if attr else [("a", net), ("b", net)]
    make, recipe = getattr(observe, kind).partialconstructor(last(observe), **options), ours.partialconstructor(Last(), **options)
    theirs, mine = [make(*place) for place in places], [recipe(*place) for place in places]
    for number, x in enumerate(stream(seed)):
        net.train(number % 3 != 0)
        for place, sign in enumerate((1, -1)):
            net["ab"[place]](sign * x)
            if net.training:
                same(mine[place], theirs[place])
    assert theirs[0].reducer is theirs[1].reducer  # so the first shows what the second saw
    assert mine[0].peek().tolist() != mine[1].peek().tolist()
    assert (theirs[0].peek() == theirs[1].peek()).all()
    if not attr:
        with pytest.raises(AttributeError):
            make("c", net)
        with pytest.raises(TargetError, match="has no module 'c'"):
            recipe("c", net)


@pytest.mark.row("MonitorPool, Observable", "add_monitor, get_monitor, del_monitor")
def test_pools(observe: Any, seed: int) -> None:
    class Cells(observe.Observable):  # type: ignore[misc]
        def local_remap(self, attr: str) -> tuple[tuple[str], dict[str, Any]]:
            return (attr,), {}

    basis, pool = Neuron(), observe.MonitorPool()
    observables = [Cells(basis, "realign", None, None) for _ in range(2)]
    make = observe.StateMonitor.partialconstructor(last(observe))
    for name, observable in zip("ab", observables, strict=True):
        pool.add_observed(name, observable)
        pool.add_monitor(name, "spikes", "voltage", make)
    recorder = Recorder(a=StateMonitor(Last(), "cell.voltage"), b=StateMonitor(Last(), "cell.voltage")).modules(basis, names="")
    assert pool.get_monitor("a", "spikes") is pool.get_monitor("b", "spikes")  # the pool makes an equal monitor once
    assert recorder["a"] is recorder["b"]
    assert recorder.find(basis) == {"a": recorder["a"]}
    assert recorder.add("again", StateMonitor(Last(), "cell.voltage"), basis)["again"] is recorder["a"]
    for x in stream(seed):
        basis(x)
        same(recorder["b"], pool.get_monitor("b", "spikes"))
    recorder["apart"] = StateMonitor(Last(), "cell.voltage", basis)  # this one by itself
    pool.add_monitor("a", "apart", "voltage", make, True)
    kept, mine = pool.get_monitor("b", "spikes"), recorder["b"]
    pool.del_monitor("a", "spikes")
    assert recorder.remove("a") is mine
    assert not kept.registered
    assert not mine.registered  # what both names share ends with one of them, here and there
    basis(torch.ones(2, 4))
    same(recorder["apart"], pool.get_monitor("a", "apart"))


@pytest.mark.row("reducer.latest, view(time, tolerance), dump(), clear(keepshape)")
def test_monitors_look_back(observe: Any, seed: int) -> None:
    layer = Leaky()
    theirs = observe.OutputMonitor(observe.EMAReducer(1.0, 0.3, duration=3.0), layer)
    ours = ForwardMonitor(History(EMA(alpha=0.3), 1.0, 3.0), layer)
    assert theirs.latest is theirs.view(0.0) is theirs.dump() is ours.latest() is ours.view(0.0) is ours.dump() is None
    for _ in range(2):
        for x in stream(seed):
            layer(x)
        for mine, their in ((ours.latest(), theirs.latest), (ours.view(1.7), theirs.view(1.7)), (ours.dump(), theirs.dump())):
            torch.testing.assert_close(mine, their, rtol=1e-9, atol=1e-9)
        theirs.clear(keepshape=True)
        ours.clear(keepshape=True)
    with pytest.raises(ValueError, match="shape"):  # in the user's forward
        layer(torch.ones(3, 2, 4))
    theirs.deregister()
    with pytest.warns(RecordingWarning, match="keeps shape"):
        layer(torch.ones(3, 2, 4))


@pytest.mark.row("register() of a monitor that is registered, which raises")
def test_registering_again(observe: Any, seed: int) -> None:
    first, second = Leaky(), Leaky()
    theirs, ours = observe.OutputMonitor(last(observe), first), ForwardMonitor(Last(), first)
    x, y = stream(seed, 2)
    for module in (first, second):
        with pytest.raises(RuntimeError, match="already registered"):
            theirs.register(module)
        ours.register(module)  # a monitor that sits there already stays; another place is a move
    first(x)
    assert theirs.peek() is not None
    assert ours.peek() is None
    theirs.deregister()
    theirs.register(second)
    second(y)
    same(ours, theirs)
    for monitor in (theirs, ours):
        monitor.deregister()
        monitor.register()  # where it was before
    second(x)
    same(ours, theirs)


def test_a_monitor_that_was_deleted_goes_on_recording(observe: Any, seed: int) -> None:
    layer, seen = Leaky(), []
    theirs = observe.OutputMonitor(last(observe), layer, map_=lambda y: (seen.append("theirs") or y,))
    ours = ForwardMonitor(Last(), layer, map_=lambda y: (seen.append("ours") or y,))
    del theirs, ours
    gc.collect()
    layer(stream(seed)[0])
    assert seen == ["ours"]  # a recorder that the program forgets goes on; `deregister()` ends it


class Sums(nn.Module):
    """Changes its sum in place; its last input is None at first."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sum", torch.zeros(2, 4))
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.sum += x
        self.last = x
        return x


def test_differences_in_place_from_nothing_and_by_recipe(observe: Any, seed: int) -> None:
    x, net = stream(seed)[0], Sums()
    pairs = []
    options: list[Any] = [{}, {"op_": lambda after, before: after - before + 1}]
    for make in options:
        theirs: Any = observe.DifferenceMonitor.partialconstructor(last(observe), **make)
        pairs.append((theirs("sum", net), DifferenceMonitor.partialconstructor(Last(), **make)("sum", net)))
    nothing = DifferenceMonitor(Last(), "last", net)
    net(x)
    for (theirs, ours), expected in zip(pairs, (x, x + 1), strict=True):
        assert not theirs.peek().any()  # they keep the tensor itself, which changes, and their recipes drop `op_`
        torch.testing.assert_close(ours.peek(), expected, rtol=0, atol=0)
    torch.testing.assert_close(nothing.peek(), x, rtol=0, atol=0)
    kept = observe.DifferenceMonitor(last(observe), "last", other := Sums())
    with pytest.raises(TypeError, match="NoneType"):
        other(x)
    assert kept.peek() is None
