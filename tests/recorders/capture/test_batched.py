"""Monitors of parameters are reduced together: the same numbers as one by one, by a number of calls that stays."""

from __future__ import annotations

import gc
import pickle
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from recorders import (
    Monitor,
    MonitorError,
    OptimizerStateMonitor,
    ParameterGradientMonitor,
    ParameterMonitor,
    ParameterUpdateMonitor,
    Recorder,
    RecordingWarning,
)
from recorders.ring.rows import LeafRow
from reducers import Collect, Count, Last, Max, Mean, Moments, Norm, Product, Quantile, Reducer, State, Statistic, Sum, Summary
from reducers.core.fields import Add, Field, Joined


@pytest.fixture(autouse=True)
def _both_ways(with_and_without_a_compiler: str) -> None:
    """The loop in C++ writes the rows, and if there is no compiler they are lifted."""


BOTH = Product(norm=Norm(), summary=Summary())


class Zoo(nn.Module):
    """Tied, frozen, sparse, empty and big parameters, and one that is seldom used."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(6, 4, sparse=True)
        self.first, self.tied, self.frozen, self.seldom = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.tied.weight = self.first.weight
        self.frozen.requires_grad_(False)
        self.wide = nn.Linear(4, 3000)
        self.empty = nn.ParameterList([torch.zeros(0)])

    def forward(self, words: Tensor, seldom: bool) -> Tensor:
        x = self.tied(self.first(self.words(words)).tanh())
        x = self.seldom(x) if seldom else x
        return self.wide(self.frozen(x)).square().mean() + self.empty[0].sum()


def optimizers(net: Zoo) -> list[torch.optim.Optimizer]:
    linears = [*net.first.parameters(), net.tied.bias, *net.seldom.parameters(), *net.empty.parameters()]
    return [
        torch.optim.SparseAdam(net.words.parameters()),
        torch.optim.AdamW([{"params": linears}, {"params": [*net.frozen.parameters(), net.wide.bias], "lr": 0.1}]),
        torch.optim.SGD([net.wide.weight], lr=0.5, momentum=0.9),
    ]


def train(net: Zoo, steps: int = 6, between: Callable[[int], Any] = lambda step: None) -> None:
    torch.manual_seed(1)
    stepping = optimizers(net)
    for step in range(steps):
        for optimizer in stepping:
            optimizer.zero_grad()
        net(torch.randint(0, 6, (5,)), seldom=step % 3 == 1).backward()
        for optimizer in stepping:
            optimizer.step()
        between(step)


def alone(kind: type[Monitor]) -> Callable[..., Any]:
    """What the same monitor takes where it has a callable, so that it is not observed together with others."""
    return (lambda after, before: after - before) if kind is ParameterUpdateMonitor else (lambda x, value=None: x)


def monitors(kind: type[Monitor], reducer: Reducer, **options: Any) -> Monitor:
    if kind is OptimizerStateMonitor:
        return OptimizerStateMonitor(reducer, "exp_avg", condition=None, **options)
    return kind(reducer, **options)


def agree(found: Any, wanted: Any, tolerance: float) -> None:
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            agree(found[key], value, tolerance)
    elif wanted is None:
        assert found is None
    else:
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=1e-12, equal_nan=True)


def rows(monitor: Monitor) -> int:
    return sum(isinstance(pending, LeafRow) for pending in monitor.buffer.stored.pending.values())


KINDS = [ParameterMonitor, ParameterGradientMonitor, ParameterUpdateMonitor, OptimizerStateMonitor]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"every": 2}, {"every_step": 2}, {"train_update": False}], ids=str)
@pytest.mark.parametrize("reducer", [Norm(), Moments(order=4), BOTH, Quantile()], ids=["norm", "moments", "product", "quantile"])
@pytest.mark.filterwarnings("ignore:.*keeps no 'exp_avg'")
def test_the_same_as_one_by_one(kind: type[Monitor], options: dict[str, Any], reducer: Reducer) -> None:
    torch.manual_seed(0)
    net = Zoo()
    together = Recorder(monitors(kind, reducer, **options)).modules(net)
    apart = Recorder(monitors(kind, reducer, op_=alone(kind), **options)).modules(net)

    def between(step: int) -> None:
        together.step()
        apart.step()

    train(net, between=between)
    assert [*together] == [*apart]
    batched = sum(map(rows, together.values()))
    assert batched == 0 if options == {"train_update": False} or isinstance(reducer, Quantile) else batched > 4
    assert not any(map(rows, apart.values()))
    for name, monitor in together.items():
        other = apart[name]
        assert (monitor.samples, monitor.flush().counts, monitor.counts) == (other.samples, other.flush().counts, other.counts)
        agree(monitor.peek(), other.peek(), 0 if isinstance(reducer, Quantile) else 1e-6)  # big ones are summed in float32


def test_the_states_of_small_parameters_are_exact() -> None:
    net = nn.Sequential(*[nn.Linear(5, 7) for _ in range(9)])
    recorder = Recorder(ParameterGradientMonitor(BOTH)).modules(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    wanted: dict[tuple[str, str], State] = {}
    for _ in range(5):
        optimizer.zero_grad()
        sum(layer(torch.randn(3, 5)).square().sum() for layer in net).backward()
        for name, layer in net.named_children():
            for path, parameter in layer.named_parameters():
                assert parameter.grad is not None
                wanted[name, path] = BOTH.update(wanted.get((name, path), {}), parameter.grad)
        optimizer.step()
    for (name, path), state in wanted.items():
        agree(recorder[name].states[path], state, 1e-12)


def test_looking_clearing_merging_copying_and_taking_off_in_between() -> None:
    torch.manual_seed(0)
    net = Zoo()
    together = Recorder(ParameterGradientMonitor(Summary())).modules(net)
    apart = Recorder(ParameterGradientMonitor(Summary(), op_=lambda gradient, value: gradient)).modules(net)
    seen: list[Any] = []

    def between(step: int) -> None:
        for recorder in (together, apart):
            if step == 1:
                recorder["first"].clear()
            if step == 2:
                recorder["wide"].merge(recorder["tied"].snapshot())
                recorder["tied"].deregister()
            if step == 3:
                recorder["tied"].register()
                seen.append(pickle.loads(pickle.dumps(recorder["first"].snapshot())).peek())
            recorder["seldom"].peek()
        together.report()

    train(net, between=between)
    agree(seen[0], seen[1], 1e-9)
    for name, monitor in together.items():
        assert monitor.samples == apart[name].samples
        agree(monitor.peek(), apart[name].peek(), 1e-6)
        agree(monitor.peek(), apart[name].peek(), 1e-6)  # having looked


def test_a_copy_of_a_monitor_holds_what_waits_in_a_batch() -> None:
    layer, monitor = pair(ParameterMonitor(Norm()))
    step(layer)
    assert rows(monitor) == 2
    copy = pickle.loads(pickle.dumps(monitor))
    step(layer)
    assert (copy.samples, monitor.samples) == (1, 2)
    agree(copy.peek()["weight"] ** 2 * 2, monitor.peek()["weight"] ** 2, 1e-9)


def pair(monitor: Monitor) -> tuple[nn.Module, Any]:
    layer = nn.Linear(3, 2)
    return layer, monitor.register(layer)


def step(module: nn.Module, lr: float = 0.0, gradient: float = 1.0) -> None:
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, gradient)
    torch.optim.SGD(module.parameters(), lr=lr).step()


def test_replaced_frozen_and_converted_parameters_go_on() -> None:
    layer, monitor = pair(ParameterGradientMonitor(Summary()))
    step(layer)
    layer.weight = nn.Parameter(torch.ones(4, 5))
    step(layer)
    layer.double()
    step(layer)
    layer.bias.grad = None
    torch.optim.SGD([layer.weight], lr=0.1).step()
    counts = {path: int(result["count"]) for path, result in monitor.peek().items()}
    assert counts == {"weight": 6 + 20 + 20 + 20, "bias": 2 * 3}
    assert monitor.samples == 4


def test_what_is_not_finite_in_one_parameter_is_kept_out_of_it_alone() -> None:
    net = nn.Sequential(*[nn.Linear(2, 2) for _ in range(4)])
    recorder = Recorder(ParameterGradientMonitor(Summary())).modules(net)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    net[1].weight.grad[0, 0], net[2].bias.grad[1] = torch.nan, torch.inf  # type: ignore[index, union-attr, operator]
    torch.optim.SGD(net.parameters(), lr=0.0).step()
    found = {(name, path): result for name in recorder for path, result in recorder[name].peek().items()}
    counts = {key: tuple(int(result[name]) for name in ("count", "nan", "inf")) for key, result in found.items()}
    odd = {("1", "weight"): (3, 1, 0), ("2", "bias"): (1, 0, 1)}
    assert counts == {key: odd.get(key, (4 if key[1] == "weight" else 2, 0, 0)) for key in counts}
    assert {float(result["mean"]) for result in found.values()} == {1.0}


@dataclass(frozen=True)
class Picky(Statistic):
    """Fails where it meets 13, and counts its calls."""

    fields: ClassVar[Mapping[str, Field]] = {"sum": Joined()}
    calls: ClassVar[Counter[str]] = Counter()
    interrupt: ClassVar[str] = ""

    def lift(self, x: Tensor, axes: tuple[int, ...]) -> State:
        self._called("lift")
        if (x == 13).any():
            raise ValueError("13")
        return {"sum": x.sum(dim=axes, dtype=torch.float64)}

    def join(self, a: State, b: State) -> State:
        self._called("join")
        return {"sum": a["sum"] + b["sum"]}

    def read(self, state: State) -> Tensor:
        return state["sum"]

    def _called(self, what: str) -> None:
        self.calls[what] += 1
        if what == self.interrupt:
            raise KeyboardInterrupt


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    Picky.calls.clear()
    yield
    Picky.interrupt = ""


@pytest.mark.parametrize("on_error", ["warn", "disable", "raise"])
def test_one_that_fails_is_told_of_alone_and_the_others_are_recorded(on_error: Any) -> None:
    net = nn.Sequential(*[nn.Linear(2, 2) for _ in range(5)])
    recorder = Recorder(ParameterGradientMonitor(Picky(), on_error=on_error)).modules(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    for bad in (False, True, False):
        for parameter in net.parameters():
            parameter.grad = torch.ones_like(parameter)
        if bad:
            net[4].weight.grad.fill_(13)  # type: ignore[union-attr, operator]
            told: Any = (
                pytest.raises(MonitorError, match="13") if on_error == "raise" else pytest.warns(RecordingWarning, match="13")
            )
            with told as seen:
                optimizer.step()
            assert "ParameterGradientMonitor '4' on Linear: ValueError" in str(
                seen.value if on_error == "raise" else seen[0].message
            )
        else:
            optimizer.step()
    found = {name: (recorder.samples[name], float(recorder[name].peek()["weight"])) for name in recorder}
    fifth = {"warn": (3, 8.0), "disable": (2, 4.0), "raise": (3, 8.0)}[on_error]
    assert found == {**{str(i): (3, 12.0) for i in range(4)}, "4": fifth}


@pytest.mark.parametrize("where", ["lift", "join"])
def test_an_interrupted_step_is_recorded_by_none(where: str) -> None:
    net = nn.Sequential(*[nn.Linear(2, 2) for _ in range(5)])
    recorder = Recorder(ParameterGradientMonitor(Picky())).modules(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    for interrupted in (False, True, False, True, True, False):
        Picky.interrupt = where if interrupted else ""
        if interrupted:
            with pytest.raises(KeyboardInterrupt):
                optimizer.step()
        else:
            optimizer.step()
    Picky.interrupt = ""
    assert set(recorder.samples.values()) == {3}
    assert {float(monitor.peek()["weight"]) for monitor in recorder.values()} == {12.0}


def test_states_share_nothing_with_the_users_tensors_nor_with_each_other() -> None:
    net = nn.Sequential(*[nn.Linear(2, 2) for _ in range(5)], nn.Linear(100, 100))
    recorder = Recorder(grad=ParameterGradientMonitor(Max()), value=ParameterMonitor(Max()), update=ParameterUpdateMonitor(Max()))
    recorder.modules(net)
    step(net)
    before = {name: {path: float(value) for path, value in recorder[name].peek().items()} for name in recorder}
    with torch.no_grad():
        for parameter in net.parameters():
            assert parameter.grad is not None
            parameter.grad.fill_(9)
            parameter.fill_(9)
    assert before == {name: {path: float(value) for path, value in recorder[name].peek().items()} for name in recorder}
    places = [value.untyped_storage().data_ptr() for monitor in recorder.values() for value in monitor.state.values()]
    assert len(set(places)) == len(places) == 3 * 12 * 3  # count, nonfinite and max of each
    assert all(
        value.untyped_storage().nbytes() == value.nbytes for monitor in recorder.values() for value in monitor.state.values()
    )


class Called(TorchDispatchMode):
    """Counts the operators that compute: views cost nothing beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view and func is not torch.ops.aten._unsafe_view.default
        return func(*args, **(kwargs or {}))


class Still(torch.optim.Optimizer):
    """Changes nothing."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["exp_avg"] = torch.ones_like(parameter)

    def step(self, closure: Any = None) -> None:
        """Changes nothing."""


def still(modules: int) -> tuple[nn.Module, Still]:
    net = nn.ModuleList([nn.Linear(8, 8) for _ in range(modules)])
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    return net, Still(net.parameters())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reducer", [Norm(), BOTH], ids=["norm", "product"])
def test_operators_of_a_step_do_not_grow_with_the_parameters(kind: type[Monitor], reducer: Reducer) -> None:
    counts = []
    for modules in (10, 100, 1_000):
        net, optimizer = still(modules)
        recorder = Recorder(monitors(kind, reducer)).modules(net)
        for _ in range(3):
            optimizer.step()
            with Called() as called:
                optimizer.step()
        assert set(recorder.samples.values()) == {6}
        counts.append(called.count)
        recorder.deregister()
    assert counts[0] == counts[1] <= 110
    assert counts[2] <= 2 * counts[0]  # of 1,000 weights there are two matrices


def test_two_thousand_parameters_are_joined_by_one_call() -> None:
    net, optimizer = still(1_000)
    recorder = Recorder(ParameterGradientMonitor(Picky())).modules(net)
    optimizer.step()
    Picky.calls.clear()
    for _ in range(10):
        optimizer.step()
    assert Picky.calls["join"] == 10
    assert Picky.calls["lift"] == 10 * 2
    recorder["0"].peek()
    optimizer.step()
    assert Picky.calls["join"] == 11
    assert {float(monitor.peek()["bias"]) for monitor in recorder.values()} == {12 * 8.0}


def test_monitors_that_come_and_go_join_a_few_batches() -> None:
    net, optimizer = still(50)
    recorder = Recorder(ParameterGradientMonitor(Picky())).modules(net)
    for turn in range(40):
        optimizer.step()
        recorder[str(turn)].clear()
        batches = {pending.rows for monitor in recorder.values() for pending in monitor.buffer.stored.pending.values()}  # type: ignore[attr-defined]
        assert len(batches) <= 5
    assert recorder.samples["49"] == 40
    assert recorder.samples["0"] == 39
    assert float(recorder["49"].peek()["bias"]) == 40 * 8


def test_batches_die_with_their_monitors() -> None:
    net, optimizer = still(4)
    recorder = Recorder(ParameterGradientMonitor(Norm())).modules(net)
    optimizer.step()
    before = sum(type(thing).__name__ == "ParameterRows" for thing in gc.get_objects())
    for monitor in recorder.values():
        monitor.clear()
    assert sum(type(thing).__name__ == "ParameterRows" for thing in gc.get_objects()) == before - 1


def test_copies_of_parameters_are_written_into_the_same_memory_and_given_back() -> None:
    due = True
    layer, monitor = pair(ParameterUpdateMonitor(Mean(), condition=lambda: due))
    step(layer, lr=0.5)
    places = {path: buffer.data_ptr() for path, buffer in monitor.before.items()}
    assert set(places) == {"weight", "bias"}
    step(layer, lr=0.5)
    assert {path: buffer.data_ptr() for path, buffer in monitor.before.items()} == places
    due = False
    step(layer)
    assert monitor.before == {}
    due = True
    step(layer, lr=0.5)
    monitor.deregister()
    assert monitor.before == {}
    assert float(monitor.peek()["weight"]) == pytest.approx(-0.5)
    other, looking = pair(ParameterUpdateMonitor(Collect(), op_=lambda after, before: before))
    for _ in range(2):
        step(other, lr=0.5)
    torch.testing.assert_close(
        looking.peek()["bias"][:2] - looking.peek()["bias"][2:], torch.full((2,), 0.5)
    )  # a callable may keep what it is given


def test_threads_may_look_while_others_step() -> None:
    net, optimizer = still(20)
    recorder = Recorder(ParameterGradientMonitor(Sum())).modules(net)
    wrong: list[Any] = []
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            for monitor in recorder.values():
                found = monitor.snapshot()
                if found.samples * 64 != (float(found.states["weight"]["sum"]) if found.states else 0):
                    wrong.append((found.samples, found.states))

    readers = [threading.Thread(target=look) for _ in range(2)]
    for reader in readers:
        reader.start()
    for _ in range(100):
        optimizer.step()
    done.set()
    for reader in readers:
        reader.join()
    assert wrong == []
    assert set(recorder.samples.values()) == {100}
    assert {float(monitor.peek()["bias"]) for monitor in recorder.values()} == {800.0}


def test_what_cannot_be_together_is_recorded_beside_it() -> None:
    layer = nn.Linear(3, 2)
    last, norm, count = (
        ParameterMonitor(Last(), None, layer),
        ParameterMonitor(Norm(), None, layer),
        ParameterMonitor(Count(), None, layer),
    )
    tick = ParameterMonitor(Norm(), None, layer, when="tick")
    with torch.autocast("cpu"), torch.inference_mode():
        tick.tick()
    step(layer)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        step(layer)
    assert [rows(monitor) for monitor in (last, norm, count, tick)] == [0, 2, 2, 0]
    assert last.peek()["weight"].equal(layer.weight)
    agree(norm.peek()["weight"], (2 * layer.weight.double().square().sum()).sqrt().detach(), 1e-9)
    assert int(count.peek()["bias"]) == 4


def test_monitors_made_one_by_one_with_equal_reducers_share_a_batch() -> None:
    net, optimizer = still(6)
    each = [ParameterGradientMonitor(Moments(), None, layer) for layer in net]
    optimizer.step()
    assert len({pending.rows for monitor in each for pending in monitor.buffer.stored.pending.values()}) == 1  # type: ignore[attr-defined]
    assert {monitor.samples for monitor in each} == {1}


@dataclass(frozen=True)
class Bins(Statistic):
    """Says that it joins element by element, and lifts no rows: all of a matrix into the same two bins, whatever the axes."""

    fields: ClassVar[Mapping[str, Field]] = {"bins": Add()}

    def lift(self, x: Tensor, axes: tuple[int, ...]) -> State:
        return {"bins": torch.stack([(x < 2).sum(), (x >= 2).sum()])}

    def read(self, state: State) -> Tensor:
        return state["bins"]


@pytest.mark.parametrize("modules", [1, 2, 4, 8])
def test_a_reducer_that_lifts_no_rows_is_recorded_all_the_same(modules: int) -> None:
    net, optimizer = still(modules)
    recorder = Recorder(ParameterGradientMonitor(Bins())).modules(net)
    for _ in range(3):
        optimizer.step()
    assert {tuple(monitor.peek()["weight"].tolist()) for monitor in recorder.values()} == {(3 * 64, 0)}
    assert all(monitor.last_error is None for monitor in recorder.values())


def test_a_monitor_that_leaves_its_batch_within_a_step_is_observed_in_its_next_row() -> None:
    net, optimizer = still(3)
    recorder = Recorder(ParameterGradientMonitor(Count())).modules(net)
    optimizer.step()
    theirs = recorder["0"].snapshot()
    seen: list[int] = []

    def in_between() -> bool:
        seen.append(recorder.samples["0"])
        if len(seen) == 1:
            recorder["0"].merge(theirs)
            recorder["1"].clear()
        return True

    last = ParameterGradientMonitor(Count(), "bias", net[2], condition=in_between)  # told after the others were
    optimizer.step()
    optimizer.step()
    assert seen == [1, 3]
    assert (recorder["0"].samples, recorder["1"].samples, recorder["2"].samples, last.samples) == (4, 2, 3, 2)
    assert [int(recorder[name].peek()["weight"]) for name in recorder] == [4 * 64, 2 * 64, 3 * 64]
