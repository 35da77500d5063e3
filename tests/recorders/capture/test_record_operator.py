"""The operator that reads leaves of compiled graphs: in C++ while all monitors go on recording, in Python when one changes."""

from __future__ import annotations

import copy
import gc
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from recorders import BackwardMonitor, ForwardMonitor, MonitorError, Recorder
from recorders.graphs.ring import MOST, GraphRing, Share
from recorders.monitors.graphs import GraphSink
from recorders.ring.ring import Ring
from reducers import (
    Activity,
    Extremes,
    Histogram,
    Mean,
    Moments,
    Norm,
    PerObservation,
    Product,
    Quantile,
    Reducer,
    Sparsity,
    Summary,
)
from reducers.kernels.cpp import library

pytestmark = pytest.mark.skipif(not library.in_order(), reason="no C++ compiler")

X = torch.linspace(-1, 2, 8 * 16).view(8, 16)


@pytest.fixture(autouse=True)
def _new_graphs() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of monitors of each call that Python saw."""
    found: list[int] = []
    record = GraphSink.record_batch

    def note(numbers: Any, *args: Any) -> None:
        found.append(len(numbers))
        record(numbers, *args)

    monkeypatch.setattr(GraphSink, "record_batch", staticmethod(note))
    return found


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 8), nn.Tanh())


def recorded(layers: nn.Module, **options: Any) -> Recorder:
    monitors = {"out": ForwardMonitor(Summary("b c -> c"), **options), "grad": BackwardMonitor(Moments(), **options)}
    return Recorder(**monitors).modules(layers, leaves=True)


def pair(**options: Any) -> tuple[Recorder, nn.Module, Recorder, Any]:
    """A net recorded in eager mode, and a copy of it recorded in a graph."""
    eager = net()
    traced = copy.deepcopy(eager)
    first, second = recorded(eager, **options), recorded(traced, **options)
    return first, eager, second, torch.compile(traced, backend="aot_eager", fullgraph=True)


def train(step: Any, steps: int = 1) -> None:
    for number in range(steps):
        step(X * (number + 1)).square().sum().backward()


def assert_same(first: Recorder, second: Recorder) -> None:
    for name, monitor in first.items():
        assert monitor.samples == second[name].samples, name
        for key, value in monitor.state.items():
            torch.testing.assert_close(second[name].state[key], value, rtol=1e-6, atol=1e-6)


def rows_of(monitor: Any) -> GraphRing:
    (row,) = monitor.buffer.stored.pending.values()
    assert isinstance(row, Share)
    return row.ring


def test_python_sees_the_first_call_and_those_that_fill_a_buffer(seen: list[int]) -> None:
    first, eager, second, traced = pair()
    steps = MOST + 5
    capacity = None
    for _ in range(steps):
        train(eager)
        train(traced)
        capacity = capacity or rows_of(second["out/0"]).capacity
    assert_same(first, second)
    assert capacity is not None
    full = {"out": capacity, "grad": rows_of(second["grad/0"]).capacity}
    assert len(seen) == sum(1 + steps // size for size in full.values())
    assert {row.calls for row in second.report().rows} == {steps}


CHANGES: dict[str, Callable[[Recorder], Any]] = {
    "read": lambda recorder: [monitor.peek() for monitor in recorder.values()],
    "reset one": lambda recorder: recorder["out/0"].reset(),
    "reset all": lambda recorder: recorder.reset(),
    "off and on": lambda recorder: (recorder["out/1"].deregister(), recorder["out/1"].register()),
    "shapes kept": lambda recorder: recorder["out/2"].clear(keepshape=True),
    "merged": lambda recorder: recorder["out/0"].merge(recorder["out/0"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_a_monitor_that_changes_is_looked_at_and_others_are_not(change: str, seen: list[int]) -> None:
    first, eager, second, traced = pair()
    other, _, third, again = pair()
    for recorder, step in ((first, eager), (second, traced), (third, again)):
        train(step, 3)
        if recorder is second:
            seen.clear()
        if recorder is not third:
            CHANGES[change](recorder)
        else:
            assert not other["out/0"].samples
        train(step, 3)
    assert_same(first, second)
    # Of the third net the first call of its outputs, and of its gradients; of the second what changed.
    assert len(seen) - 2 == (0 if change == "read" else 2 if change == "reset all" else 3 if change == "shapes kept" else 1)


def test_a_monitor_that_is_off_records_nothing_and_the_others_go_on() -> None:
    first, eager, second, traced = pair()
    for recorder, step in ((first, eager), (second, traced)):
        train(step, 2)
        recorder["out/1"].deregister()
        train(step, 3)
        recorder["out/1"].register()
        train(step, 2)
    assert_same(first, second)
    assert second["out/1"].samples == 4


def test_layers_of_unlike_shapes_and_a_shape_that_changes() -> None:
    eager = nn.Sequential(nn.Linear(16, 4), nn.ReLU(), nn.Linear(4, 9), nn.ReLU())
    traced = copy.deepcopy(eager)
    first, second = (Recorder(ForwardMonitor(Summary("... d -> d"))).modules(each, leaves=True) for each in (eager, traced))
    compiled = torch.compile(traced, backend="aot_eager")
    for batch in (8, 8, 5, 3, 8):
        eager(X[:batch])
        compiled(X[:batch])
    assert_same(first, second)


SEVERAL: dict[str, Reducer] = {
    "moments": Moments(),
    "a norm": Norm("b c -> c"),
    "a mean": Mean(),
    "extremes": Extremes(),
    "zeros": Sparsity(),
    "active units": Activity(),
    "a product that is copied": Product(quantiles=Quantile(), summary=Summary("b c -> c")),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", SEVERAL)
def test_one_net_in_several_dtypes(kind: str) -> None:
    """Graphs for several dtypes observe the same monitors, with tensors of the same shapes: each tensor is read as what it is."""
    eager = nn.Sequential(nn.ReLU(), nn.Tanh())
    traced = copy.deepcopy(eager)
    monitors = {"out": ForwardMonitor(SEVERAL[kind]), "grad": BackwardMonitor(SEVERAL[kind])}
    first, second = (Recorder(**monitors).modules(layers, leaves=True) for layers in (eager, traced))
    for run in (eager, torch.compile(traced, backend="aot_eager", fullgraph=True)):
        for number in range(12):
            for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
                run((X * number).to(dtype).requires_grad_()).square().sum().backward()
    assert_same(first, second)


def test_buffers_that_are_full_are_freed_at_once() -> None:
    """Not when Python looks for circles, which may be thousands of steps later."""
    _, _, recorder, traced = pair()
    gc.disable()
    try:
        with torch.no_grad():
            traced(X)
            first = weakref.ref(rows_of(recorder["out/0"]))
            for _ in range(rows_of(recorder["out/0"]).capacity):
                traced(X)
    finally:
        gc.enable()
    assert first() is None


def test_a_table_is_freed_with_its_monitors() -> None:
    layers = net()
    recorder = recorded(layers)
    traced = torch.compile(layers, backend="aot_eager", fullgraph=True)
    train(traced, 3)
    rows = weakref.ref(rows_of(recorder["out/0"]))
    del recorder, layers, traced
    torch._dynamo.reset()
    gc.collect()
    assert rows() is None


def test_several_threads_lose_nothing() -> None:
    layers = net().eval()
    recorder = Recorder(out=ForwardMonitor(Summary())).modules(layers, leaves=True)
    with torch.no_grad():
        torch.compile(layers, backend="aot_eager", fullgraph=True)(X)
    # With fullgraph=True PyTorch 2.13 counts what ran of all threads together, and may raise if one runs Python in between.
    traced = torch.compile(layers, backend="aot_eager")

    def run() -> None:
        with torch.no_grad():
            for _ in range(300):
                traced(X)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        _ = [monitor.peek() for monitor in recorder.values()]
    for thread in threads:
        thread.join()
    for monitor in recorder.values():
        assert monitor.samples == 1 + 4 * 300
        assert monitor.peek()["count"] % (1 + 4 * 300) == 0


def test_a_thread_that_comes_between_the_last_row_and_its_flush_records_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = nn.Sequential(nn.Tanh())
    recorder = Recorder(ForwardMonitor(Moments())).modules(layers, leaves=True)
    run = torch.no_grad()(torch.compile(layers, backend="aot_eager", fullgraph=True))
    record, monitor = GraphSink.record_batch, recorder["0"]

    def between(*args: Any) -> None:
        monkeypatch.setattr(GraphSink, "record_batch", staticmethod(record))
        thread = threading.Thread(target=run, args=(X * 2,))
        thread.start()
        thread.join()
        record(*args)

    factors = [1.0, 1.0]
    for factor in factors:
        run(X * factor)
    for _ in range(rows_of(monitor).capacity - 3):
        run(X)
        factors.append(1.0)
    monkeypatch.setattr(GraphSink, "record_batch", staticmethod(between))
    run(X * 3)
    assert GraphSink.record_batch is record
    state: dict[str, Tensor] = {}
    for factor in (*factors, 3.0, 2.0):
        state = Moments().update(state, (X * factor).tanh())
    for key, value in state.items():
        torch.testing.assert_close(monitor.state[key], value, rtol=1e-9, atol=0)


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_a_checkpoint_runs_again_is_recorded_once(reentrant: bool) -> None:
    first, eager, second, traced = pair()
    for step in (eager, traced):
        train(step, 2)  # outside of a checkpoint, so that the tables are ready
        for _ in range(3):
            x = X.clone().requires_grad_()
            checkpoint(step, x, use_reentrant=reentrant).square().sum().backward()
    for name, monitor in first.items():
        assert monitor.samples == second[name].samples == 5, name


def test_an_error_that_is_asked_for_reaches_the_user() -> None:
    layers = net()
    recorder = Recorder(out=ForwardMonitor(Mean("b c d -> c"), on_error="raise")).modules(layers, leaves=True)
    with pytest.raises(MonitorError, match="b c d"):
        torch.compile(layers, backend="aot_eager", fullgraph=True)(X)
    assert recorder["out/0"].samples == 0


class Interruption(BaseException):
    """What a signal handler of the user raises."""


@contextmanager
def handling(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("changed", [False, True], ids=["in C++", "in Python"])
def test_what_a_signal_handler_raises_reaches_the_user_as_it_is(changed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, recorder, traced = pair()
    raised = Interruption("now", 7)

    def handle(*_: Any) -> None:
        raise raised

    with torch.no_grad():
        for _ in range(3):
            traced(X)
        add = GraphRing.add

        def interrupted(self: GraphRing, tensors: Any) -> bool:
            os.kill(os.getpid(), signal.SIGUSR1)
            return add(self, tensors)

        monkeypatch.setattr(GraphRing, "add", interrupted)
        if changed:
            recorder["out/0"].gate.turn(on=True)
        with handling(handle):
            if changed:
                with pytest.raises(Interruption) as caught:
                    traced(X)
                assert caught.value is raised
            else:
                traced(X)  # Python adds nothing
        monkeypatch.undo()
        traced(X)
    assert {recorder[f"out/{index}"].samples for index in range(4)} <= {4, 5}
    assert len({recorder[f"out/{index}"].samples for index in range(4)}) == 1


def test_seconds_of_calls_that_no_python_sees_are_part_of_the_overhead(seen: list[int]) -> None:
    layers = net()
    recorder = recorded(layers)
    traced = torch.compile(layers, backend="aot_eager", fullgraph=True)
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.0)
    recorder.attach(optimizer)
    for _ in range(3):
        train(traced)
        optimizer.step()
    table = rows_of(recorder[0])
    assert table.ready
    assert table.seconds == 0
    recorder.overhead()
    for _ in range(30):
        train(traced)
        optimizer.step()
    cost = recorder.overhead()
    assert len(seen) == 2
    assert all(cost.by_name[name] > 0 for name in recorder)


COPIED: dict[str, Reducer] = {
    "quantiles": Quantile(),
    "quantiles of each feature": Quantile("b c -> c", low=1e-3, high=1e3),
    "a histogram": Histogram(bins=8, low=-2.0, high=2.0),
    "a product": Product(quantiles=Quantile(), summary=Summary("b c -> c")),
    "of each observation": PerObservation(Norm(), over=Moments()),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", COPIED)
def test_what_the_loops_do_not_read_waits_as_in_eager_mode(kind: str, seen: list[int]) -> None:
    eager = net()
    traced = copy.deepcopy(eager)
    first, second = (
        Recorder(out=ForwardMonitor(COPIED[kind]), grad=BackwardMonitor(COPIED[kind])).modules(layers, leaves=True)
        for layers in (eager, traced)
    )
    run = torch.compile(traced, backend="aot_eager", fullgraph=True)
    train(eager)
    train(run)
    (ring,) = second["out/0"].buffer.stored.pending.values()
    assert isinstance(ring, Ring)
    capacity = ring.capacity
    for steps in (3, capacity, 2 * capacity + 1):
        train(eager, steps)
        train(run, steps)
        for name, monitor in first.items():
            assert second[name].samples == monitor.samples
            torch.testing.assert_close(second[name].peek(), monitor.peek(), rtol=1e-6, atol=1e-6)
            assert {*map(type, second[name].buffer.stored.pending.values())} == {Ring}
    assert seen == [4] * 2 * (1 + 3 + capacity + 2 * capacity + 1)


def test_a_pattern_that_does_not_fit_is_told_at_each_call_as_in_eager_mode() -> None:
    layers = net()
    recorder = Recorder(ForwardMonitor(Quantile("b c d -> c"))).modules(layers, leaves=True)
    traced = torch.compile(layers, backend="aot_eager", fullgraph=True)
    with pytest.warns(UserWarning, match="b c d -> c"):
        for _ in range(3):
            traced(X)
    assert {(row.samples, sum(row.skipped.values()) or row.calls) for row in recorder.report().rows} == {(0, 3)}


def test_a_run_that_was_interrupted_while_copies_wait_goes_on() -> None:
    def run(layers: nn.Module, first: int, last: int, saved: Any = None) -> Recorder:
        torch._dynamo.reset()
        recorder = Recorder(ForwardMonitor(Product(q=Quantile(), s=Summary()))).modules(layers, leaves=True)
        if saved is not None:
            recorder.load_state_dict(saved)
        traced = torch.compile(layers, backend="aot_eager", fullgraph=True)
        with torch.no_grad():
            for number in range(first, last):
                traced(X * (number + 1))
        return recorder

    layers = net()
    whole, begun = run(layers, 0, 7), run(copy.deepcopy(layers), 0, 4)
    assert begun["0"].buffer.stored.has_pending
    resumed = run(copy.deepcopy(layers), 4, 7, begun.state_dict())
    for name, monitor in whole.items():
        assert monitor.samples == resumed[name].samples == 7
        for key, value in monitor.state.items():
            torch.testing.assert_close(resumed[name].state[key], value, rtol=1e-12, atol=1e-15)
