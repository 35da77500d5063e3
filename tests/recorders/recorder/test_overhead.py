"""What recording costs, measured in some steps, and the cadence of a budget. Time is faked: the tests say what costs how much."""

from __future__ import annotations

import gc
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paths import ROOT
from profiled import profiled
from torch import Tensor, nn
from torch._dynamo.utils import counters

from recorders import (
    BackwardMonitor,
    CallMonitor,
    DifferenceMonitor,
    ForwardInputMonitor,
    ForwardMonitor,
    OptimizerStateMonitor,
    ParameterGradientMonitor,
    ParameterMonitor,
    ParameterUpdateMonitor,
    Recorder,
    RecordingWarning,
    StateMonitor,
)
from recorders.capture import entering
from recorders.monitors.buffer import Buffer
from recorders.monitors.record import Observer
from recorders.recorder import overhead
from recorders.schedule import meter, stopwatch
from recorders.schedule.steps import _Steps
from reducers import Count, Last, Mean, Norm, Reducer, Sum


class Time:
    """Stands still, but where a test spends some of it."""

    def __init__(self) -> None:
        self.now, self.reads = 0.0, 0

    def __call__(self) -> float:
        self.reads += 1
        return self.now

    def spend(self, seconds: float) -> None:
        self.now += seconds

    def costing(self, seconds: float) -> Callable[..., Any]:
        """For `op_`: takes what it is given, and so long for it."""

        def take(value: Any, *_: Any) -> Any:
            self.spend(seconds)
            return value

        return take


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is measured for the recorders of other tests."""
    for name, what in (("_running", "timing"), ("_measuring", "joining")):
        monkeypatch.setattr(stopwatch, name, weakref.WeakSet())
        monkeypatch.setattr(entering, what, None)


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Iterator[Time]:
    fake = Time()
    monkeypatch.setattr(stopwatch, "perf_counter", fake)
    return fake


class Cost:
    """A recorder of pushes that cost what is said at the time, and steps that take a second without them."""

    def __init__(self, time: Time, cost: float, reducer: Reducer | None = None, **options: Any) -> None:
        self.time, self.cost = time, cost
        self.recorder = Recorder(loss=CallMonitor(reducer or Count(), op_=self._take), **options)
        self.cadences: list[int] = []
        self.recorder.overhead()

    def _take(self, value: Tensor) -> Tensor:
        self.time.spend(self.cost)
        return value

    def run(self, steps: int, bare: Callable[[int], float] = lambda step: 1.0) -> int:
        for _ in range(steps):
            self.recorder.push("loss", 1.0)
            self.time.spend(bare(self.recorder.clock.step))
            self.recorder.step()
            self.cadences.append(self.recorder.overhead().every_step)
        return self.cadences[-1]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 3)).square().mean().backward()
        optimizer.step()


# Measuring


def test_the_share_of_a_step_is_what_the_monitors_took_of_it(time: Time) -> None:
    layer = nn.Identity()
    recorder = Recorder(
        out=ForwardMonitor(Mean(), op_=time.costing(0.02)),
        loss=CallMonitor(Mean(), op_=time.costing(0.01)),
    ).modules(layer)
    assert recorder.overhead().steps == 0
    for _ in range(10):
        layer(torch.ones(2))
        layer(torch.ones(2))
        recorder.push("loss", 1.0)
        time.spend(0.95)
        recorder.step()
    cost = recorder.overhead()
    assert cost.seconds == pytest.approx(0.05)
    assert cost.step_seconds == pytest.approx(1.0)
    assert cost.share == pytest.approx(0.05)
    assert dict(cost.by_name) == pytest.approx({"out": 0.04, "loss": 0.01})
    assert (cost.steps, cost.where, cost.device_seconds, cost.every_step) == (9, "host", None, 1)  # the first is warm-up
    assert str(cost).splitlines()[:2] == [
        "recording takes at least 50 ms of a step of 1 s: 5 %, measured on the host over 9 steps",
        "out: 40 ms",
    ]


CLOCKS = {"perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "time", "time_ns", "process_time"}
FILES = {stopwatch.__file__, meter.__file__, overhead.__file__}


def calls_of_measuring(run: Callable[[], None]) -> tuple[int, list[str]]:
    """How many calls `run` makes, and which of them are functions that measure, or read a clock."""
    calls, found = 0, []

    def see(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")
        if event == "call" and frame.f_code.co_filename in FILES:
            found.append(frame.f_code.co_name)
        # Loops of `reducers` that share threads look how long they take.
        elif (
            event == "c_call" and argument.__name__ in CLOCKS and Path(frame.f_code.co_filename).is_relative_to(ROOT / "recorders")
        ):
            found.append(argument.__name__)

    with profiled(see):
        run()
    return calls, found


def test_a_step_reads_no_clock_and_measures_nothing_unless_somebody_asks() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = Recorder(
        out=ForwardMonitor(Mean()),
        back=BackwardMonitor(Mean()),
        value=ParameterMonitor(Norm()),
        seldom=ForwardInputMonitor(Mean(), every_step=7),
        loss=CallMonitor(Mean()),
    )
    recorder.modules(model).attach(optimizer)

    def run(steps: int = 300) -> None:
        for _ in range(steps):
            train(model, optimizer, 1)
            recorder.push("loss", 1.0)

    run(2)
    calls, found = calls_of_measuring(run)
    assert calls > 10_000
    assert found == []
    recorder.overhead()
    run(2)
    _, found = calls_of_measuring(lambda: run(2))
    assert {"start", "_time", "perf_counter"} <= set(found)
    run(meter.WINDOW)
    assert calls_of_measuring(lambda: run(50))[1] == []
    cost = recorder.overhead()
    assert (cost.steps, cost.lower_bound) == (meter.WINDOW, True)
    assert recorder.samples["out/0"] == recorder.samples["loss"] == recorder.clock.step  # nothing was left out for it


def test_asking_again_measures_the_next_steps_and_shows_the_last_meanwhile(time: Time) -> None:
    cost = Cost(time, 0.1)
    cost.run(meter.WINDOW + 1)
    assert cost.recorder.overhead().seconds == pytest.approx(0.1)
    cost.cost = 0.3
    cost.run(meter.FIRST)
    assert cost.recorder.overhead().seconds == pytest.approx(0.1)
    cost.run(1)
    assert cost.recorder.overhead().seconds == pytest.approx(0.3)
    assert cost.recorder.samples["loss"] == cost.recorder.clock.step


def test_after_a_measured_step_and_if_its_recorder_is_freed_nothing_is_timed() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(out=ForwardMonitor(Mean()), update=ParameterUpdateMonitor(Mean())).modules(model).attach(optimizer) as recorder:
        recorder.overhead()
        train(model, optimizer, 2)
        assert entering.timing is not None
        assert entering.joining is not None
        train(model, optimizer, meter.WINDOW)
        assert entering.timing is None
        assert entering.joining is None
        recorder.overhead()
        train(model, optimizer, 2)
        assert entering.timing is not None
    del recorder
    gc.collect()
    with Recorder(ForwardMonitor(Mean())).modules(model):
        train(model, optimizer, 120)
    assert entering.timing is None
    assert entering.joining is None


def test_every_kind_of_monitor_is_timed(time: Time) -> None:
    kinds: dict[str, Any] = {
        "out": ForwardMonitor(Mean(), op_=time.costing(1)),
        "inp": ForwardInputMonitor(Mean(), op_=time.costing(2)),
        "back": BackwardMonitor(Mean(), op_=time.costing(4)),
        "state": StateMonitor(Mean(), "weight", op_=time.costing(8)),
        "change": DifferenceMonitor(Mean(), "weight", op_=time.costing(16)),
        "value": ParameterMonitor(Mean(), "weight", op_=time.costing(32)),
        "tick": ParameterMonitor(Mean(), "weight", when="tick", op_=time.costing(64)),
        "grad": ParameterGradientMonitor(Mean(), "weight", op_=time.costing(128)),
        "sum": ParameterGradientMonitor(Mean(), "weight", when="accumulate", op_=time.costing(256)),
        "update": ParameterUpdateMonitor(Mean(), "weight", op_=time.costing(512)),
        "momentum": OptimizerStateMonitor(Mean(), "exp_avg", "weight", op_=time.costing(1024)),
        "loss": CallMonitor(Mean(), op_=time.costing(2048)),
    }
    layer = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(layer.parameters())
    recorder = Recorder(**kinds).modules(layer).attach(optimizer)
    recorder.overhead()
    for _ in range(4):
        optimizer.zero_grad()
        loss = layer(torch.randn(5, 3)).square().mean()
        loss.backward()
        recorder.push("loss", loss)
        recorder.tick()
        optimizer.step()
    cost = recorder.overhead()
    assert dict(cost.by_name) == pytest.approx({name: float(1 << power) for power, name in enumerate(kinds)})
    assert cost.seconds == pytest.approx(4095)
    assert cost.steps == 3


def test_parameters_reduced_together_share_the_time_by_their_elements(time: Time, monkeypatch: pytest.MonkeyPatch) -> None:
    from recorders.ring.rows import ParameterRows

    write = ParameterRows.write

    def slow(self: ParameterRows, *args: Any) -> Any:
        time.spend(10.0)
        return write(self, *args)

    monkeypatch.setattr(ParameterRows, "write", slow)
    model = nn.ParameterDict(
        {"a": nn.Parameter(torch.ones(2)), "b": nn.Parameter(torch.ones(8)), "c": nn.Parameter(torch.ones(10))}
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mine = Recorder(ParameterMonitor(Norm())).parameters(model, names=["a", "b"]).attach(optimizer)
    other = Recorder(ParameterMonitor(Norm())).parameters(model, names=["c"]).attach(optimizer)
    of_another_training = Recorder(ParameterMonitor(Norm())).modules(layer := nn.Linear(100, 100))
    for recorder in (mine, other):
        recorder.overhead()
    for _ in range(4):
        for parameter in model.values():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert dict(mine.overhead().by_name) == pytest.approx({"a": 1.0, "b": 4.0})
    assert dict(other.overhead().by_name) == pytest.approx({"c": 5.0})
    assert mine["a"].samples == other["c"].samples == 4
    assert of_another_training[0].module is layer  # its optimizer never steps, so it has no share


def test_steps_that_record_are_compared_with_those_that_do_not(time: Time) -> None:
    """What a hook does not see of its own cost: what comes after is slower, for the caches hold other things."""
    layer = nn.Identity()
    recorder = Recorder(ForwardMonitor(Count(), op_=time.costing(0.1), every_step=5)).modules(layer)
    recorder.overhead()
    for step in range(200):
        layer(torch.ones(1))
        time.spend(0.8 if step % 5 else 1.2)
        recorder.step()
    cost = recorder.overhead()
    assert cost.seconds == pytest.approx((0.1 + 0.4) / 5, rel=0.01)
    assert dict(cost.by_name) == pytest.approx({"": 0.1 / 5}, rel=0.01)
    assert not cost.lower_bound
    assert cost.error == pytest.approx(0.0, abs=1e-9)
    assert "takes 100 ms (+- 500 us) of a step" in str(replace(cost, error=0.0005))
    assert recorder.samples[0] == 40


@pytest.mark.parametrize("options", [{"every_step": 4}, {"budget": 0.03}])
def test_what_a_training_does_in_every_other_step_is_no_cost_of_recording(time: Time, options: dict[str, Any]) -> None:
    layer = nn.Identity()
    every = {"every_step": options.pop("every_step", 1)}
    recorder = Recorder(ForwardMonitor(Count(), op_=time.costing(0.1), **every), **options).modules(layer)
    recorder.overhead()
    for step in range(1500):
        layer(torch.ones(1))
        time.spend(0.9 if step % 2 else 3.9)
        recorder.step()
    assert not recorder.overhead().lower_bound
    assert recorder._meter.measured().cost().recording == pytest.approx(0.1)


@given(
    every_step=st.sampled_from([1, 2, 3, 7, 40, 90]),
    asked=st.lists(st.integers(0, 299), max_size=6),
    jumps=st.dictionaries(st.integers(0, 299), st.integers(0, 500), max_size=2),
    off=st.integers(0, 299),
)
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_asking_at_any_time_changes_nothing_of_what_is_recorded(
    every_step: int, asked: list[int], jumps: dict[int, int], off: int
) -> None:
    layers = [nn.Identity(), nn.Identity()]
    recorders = [Recorder(a=ForwardMonitor(Count(), every_step=every_step), b=CallMonitor(Count())).modules(one) for one in layers]
    for step in range(300):
        for layer, recorder in zip(layers, recorders, strict=True):
            if step in jumps:
                recorder.clock.step = jumps[step]
            if step == off:
                recorder.deregister()
            elif step == off + 20:
                recorder.register()
            layer(torch.ones(1))
            recorder.push("b", 1.0)
            recorder.step()
        if step in asked:
            recorders[0].overhead()
        assert recorders[0].clock.step == recorders[1].clock.step
    found = [dict(recorder.samples) for recorder in recorders]
    assert found[0] == found[1]
    for recorder in recorders:
        recorder.deregister()


def test_a_hook_within_the_work_of_a_hook_counts_once(time: Time) -> None:
    inner = nn.Identity()
    slow = Recorder(ForwardMonitor(Mean(), op_=time.costing(2))).modules(inner)

    def calls_a_module(value: Tensor, *_: Any) -> Tensor:
        time.spend(1)
        inner(value)
        nested.push("loss", value)
        return value

    outer = nn.Identity()
    nested = Recorder(out=ForwardMonitor(Mean(), op_=calls_a_module), loss=CallMonitor(Mean(), op_=time.costing(4))).modules(outer)
    for recorder in (slow, nested):
        recorder.overhead()
    for _ in range(3):
        outer(torch.ones(2))
        time.spend(5)
        nested.step()
        slow.step()
    cost = nested.overhead()
    assert dict(cost.by_name) == {"out": 5.0, "loss": 0.0}
    assert cost.step_seconds == 10.0
    assert slow.overhead().seconds == 0.0


def test_threads_are_added_up_each_with_its_own_nesting(time: Time) -> None:
    recorder = Recorder(loss=CallMonitor(Count(), op_=time.costing(1.0)))
    recorder.overhead()
    recorder.step()
    both, seen, reads = threading.Barrier(2), [], time.reads

    def meet(value: Any) -> Any:
        both.wait(30)  # both threads are within a push at once
        seen.append(stopwatch._here.owner)
        return value

    recorder["loss"].op_ = meet
    threads = [threading.Thread(target=recorder.push, args=("loss", 1.0)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(seen) == 2
    assert seen == [recorder["loss"]] * 2
    assert time.reads - reads == 4  # neither took itself to be within the other
    assert stopwatch._here.owner is None
    assert recorder.samples["loss"] == 2


def test_an_error_in_a_timed_hook_is_the_one_of_that_hook(time: Time) -> None:
    def fails(value: Any) -> Any:
        time.spend(1.0)
        raise RuntimeError("on purpose")

    recorder = Recorder(loss=CallMonitor(Count(), op_=fails, on_error="raise"))
    recorder.overhead()
    for _ in range(3):
        with pytest.raises(Exception, match="on purpose"):
            recorder.push("loss", 1.0)
        recorder.step()
    assert stopwatch._here.owner is None
    assert recorder.overhead().seconds == 1.0


def test_an_interruption_while_a_measured_step_begins_or_ends_leaves_nothing_behind(
    time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    layer = nn.Identity()
    recorder = Recorder(ForwardMonitor(Count(), op_=time.costing(1.0))).modules(layer)
    recorder.overhead()
    watch = stopwatch.Stopwatch
    for owner, attr in ((watch, "__init__"), (watch, "start"), (watch, "stop"), (meter.Meter, "_take")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, attr, interrupted)
            layer(torch.ones(1))
            with pytest.raises(KeyboardInterrupt):
                recorder.step()
        layer(torch.ones(1))
        recorder.step()
    for _ in range(4):
        layer(torch.ones(1))
        recorder.step()
    assert recorder.samples[0] == 12
    assert recorder.overhead().seconds == 1.0
    recorder._meter.drop()
    assert entering.timing is None


def test_without_a_step_nothing_is_measured_and_the_remedy_is_told() -> None:
    recorder = Recorder(loss=CallMonitor(Count()))
    recorder.push("loss", 1.0)
    cost = recorder.overhead()
    assert cost.steps == 0
    assert cost.share != cost.share
    assert str(cost) == (
        "nothing was measured; the clock has not advanced: call recorder.attach(optimizer), or recorder.step() after every step"
    )
    recorder.step()
    assert "call overhead() again after some of them, the first of which is left out" in str(recorder.overhead())


def test_reading_results_is_not_part_of_it(time: Time) -> None:
    recorder = Recorder(loss=CallMonitor(Mean())).apply(time.costing(100.0))
    recorder.overhead()
    for _ in range(4):
        recorder.push("loss", 1.0)
        recorder.compute()
        recorder.step()
    assert recorder.overhead().seconds == 0.0
    assert recorder.overhead().step_seconds == 100.0


def test_only_while_hooks_are_on(time: Time) -> None:
    layer = nn.Identity()
    recorder = Recorder(ForwardMonitor(Mean(), op_=time.costing(1.0))).modules(layer)
    recorder.overhead()
    for _ in range(5):
        layer(torch.ones(1))
        recorder.step()
    before = recorder.overhead()
    assert (before.steps, before.seconds) == (4, 1.0)
    recorder.deregister()
    for _ in range(50):
        layer(torch.ones(1))
        recorder.step()
    assert recorder.overhead() == before
    recorder.register()
    layer(torch.ones(1))
    recorder.step()  # begun with hooks off, and so left out
    layer(torch.ones(1))
    recorder.step()
    after = recorder.overhead()
    assert (after.steps, after.seconds) == (5, 1.0)


def test_what_is_selected_or_removed_in_the_middle_spoils_no_measurement(time: Time) -> None:
    first, second = nn.Identity(), nn.Identity()
    recorder = Recorder(ForwardMonitor(Mean(), op_=time.costing(1.0))).modules(first, prefix="first")
    recorder.overhead()
    for _ in range(3):
        first(torch.ones(1))
        recorder.step()
    first(torch.ones(1))
    recorder.modules(second, prefix="second")
    assert recorder._meter._step is None
    recorder.step()
    for _ in range(2):
        first(torch.ones(1))
        second(torch.ones(1))
        recorder.step()
    assert recorder.overhead().steps == 4
    recorder.remove("first")
    assert set(recorder.overhead().by_name) == {"second"}


def test_reset_forgets_what_was_recorded_and_not_what_it_cost(time: Time) -> None:
    cost = Cost(time, 0.25)
    cost.run(5)
    before = cost.recorder.overhead()
    cost.recorder.reset()
    assert cost.recorder.overhead() == before
    assert cost.recorder.samples["loss"] == 0


def test_setting_the_clock_measures_no_step_across_it(time: Time) -> None:
    cost = Cost(time, 0.5)
    cost.run(3)
    time.spend(1000.0)
    cost.recorder.clock.step = 500
    cost.run(1)
    cost.run(2)
    assert cost.recorder.overhead().step_seconds == 1.5


def test_a_measured_step_keeps_no_monitor_alive() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = Recorder(out=ForwardMonitor(Mean()), back=BackwardMonitor(Mean()), loss=CallMonitor(Mean()))
    recorder.modules(model).attach(optimizer)
    recorder.overhead()
    train(model, optimizer, 3)
    assert recorder._meter._step is not None
    dead = [weakref.ref(thing) for thing in (model, *recorder.values())]
    gc.collect()
    gc.disable()
    try:
        del model, optimizer, recorder
        assert all(ref() is None for ref in dead)
    finally:
        gc.enable()


class Event:
    """An event of a device that works in its own time."""

    clock, ready = 0.0, False

    def __init__(self) -> None:
        self.at = Event.clock

    def query(self) -> bool:
        return Event.ready

    def elapsed_time(self, other: Event) -> float:
        assert Event.ready
        return (other.at - self.at) * 1e3


def test_time_of_the_device_is_read_once_it_is_known(time: Time, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopwatch, "_new_event", Event)
    monkeypatch.setattr(Event, "ready", False)

    def launch(value: Any) -> Any:
        Event.clock += 0.25
        return value

    recorder = Recorder(loss=CallMonitor(Count(), op_=launch))
    recorder.overhead()
    for _ in range(4):
        recorder.push("loss", 1.0)
        time.spend(1.0)
        recorder.step()
    assert recorder.overhead().device_seconds is None
    monkeypatch.setattr(Event, "ready", True)
    recorder.step()
    cost = recorder.overhead()
    assert (cost.device_seconds, cost.where) == (0.25 * 3 / 3, "host and device")
    assert "250 ms on the device" in str(cost)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_cuda_device_nothing_is_waited_for() -> None:
    model = net().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = Recorder(out=ForwardMonitor(Mean()), back=BackwardMonitor(Mean()), grad=ParameterGradientMonitor(Norm()), budget=0.5)
    recorder.modules(model).attach(optimizer)
    batch = torch.randn(5, 3, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(40):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    recorder.step()
    cost = recorder.overhead()
    assert cost.where == "host and device"
    assert cost.device_seconds is not None
    assert cost.device_seconds > 0


# The budget


def test_a_budget_chooses_every_fourth_step_and_comes_back_when_costs_fall(time: Time) -> None:
    cost = Cost(time, 0.1, budget=0.03)
    cost.run(2000, lambda step: 0.9)
    assert cost.cadences[-1500:] == [4] * 1500
    samples = cost.recorder.samples["loss"]
    assert abs(samples - 2000 / 4) < 20
    measured = cost.recorder.overhead()
    assert (measured.every_step, measured.budget) == (4, 0.03)
    assert measured.seconds == pytest.approx(0.025)
    assert measured.share == pytest.approx(0.025 / 0.925)
    assert measured.share < 0.03
    cost.cost = 0.001
    assert cost.run(6000) == 1
    assert sorted(set(cost.cadences)) == [1, 4]
    assert sum(a != b for a, b in pairwise(cost.cadences)) == 2


def test_what_recording_slows_in_the_next_step_is_a_cost_of_recording(time: Time) -> None:
    """Caches hold other things then. What is compared reads no clock but at its ends, which would make it slower, too."""
    cost, samples = Cost(time, 0.4, budget=0.03), [0, 0, 0]

    def step(_: int) -> float:
        samples[:] = [*samples[1:], cost.recorder.samples["loss"]]
        return 1.2 if samples[1] > samples[0] else 1.0

    cost.run(4000, step)
    every = cost.cadences[-1]
    assert every == pytest.approx(0.6 / (0.03 / 0.97), rel=0.2)
    assert cost.recorder.overhead().seconds == pytest.approx(0.6 / every, rel=0.05)


@pytest.mark.slow
def test_nothing_flutters_where_costs_do(time: Time) -> None:
    cost = Cost(time, 0.1, budget=0.03)
    generator = torch.Generator().manual_seed(0)
    noise = (0.9 + 0.2 * torch.rand(20_000, generator=generator)).tolist()
    cost.run(20_000, lambda step: 0.9 * noise[step])
    assert set(cost.cadences[200:]) == {4}


def test_the_cadence_changes_at_most_once_in_a_window(time: Time) -> None:
    cost = Cost(time, 0.1, budget=0.03)
    for step in range(4000):
        cost.cost = 0.3 if step % 7 else 0.0
        cost.run(1)
    changes = [step for step, (a, b) in enumerate(pairwise(cost.cadences)) if a != b]
    assert changes[0] == meter.FIRST - 1
    assert all(b - a >= meter.WINDOW for a, b in pairwise(changes))


def test_what_waits_and_is_reduced_once_in_a_while_is_in_the_average(time: Time) -> None:
    cost = Cost(time, 0.0)
    for step in range(10 * meter.WINDOW):
        cost.cost = 6.4 if step % 64 == 63 else 0.0
        cost.run(1)
    assert cost.recorder.overhead().seconds == pytest.approx(0.1, rel=0.25)


def test_no_cadence_is_two_and_fewer_steps_record_only_if_that_is_clear() -> None:
    for hundredths in range(1, 300):
        cost = meter.Cost(bare=1.0, least=0.0, recording=hundredths / 100, error=0.0, chosen=1.0)
        every = cost.every_within(0.05)
        assert every != 2
        assert not cost.exceeds(0.05, every)
    unclear = meter.Cost(bare=1.0, least=0.0, recording=0.2, error=0.1, chosen=1.0)
    assert [unclear.exceeds(0.05, every) for every in (1, 3)] == [False, False]
    assert unclear._replace(error=0.01).exceeds(0.05, 3)
    assert unclear._replace(recording=0.04, error=None).exceeds(0.05, 1)  # of what is only timed, not all is seen


def test_a_budget_that_is_kept_anyway_changes_nothing(time: Time) -> None:
    cost = Cost(time, 0.02, budget=0.03)
    cost.run(500)
    assert set(cost.cadences) == {1}
    assert cost.recorder.samples["loss"] == 500


def test_what_pushes_cost_that_record_nothing_is_counted_and_told_if_it_is_too_much(time: Time) -> None:
    # With a condition the gate is asked in every step; without one a push that is not due ends at once.
    recorder = Recorder(loss=CallMonitor(Count(), op_=time.costing(0.1), condition=lambda *_: True), budget=0.05)
    due = recorder[0]._due

    def slow(*args: Any) -> bool:
        time.spend(0.055)
        return due(*args)

    recorder[0]._due = slow  # type: ignore[method-assign]
    for _ in range(300):
        recorder.push("loss", 1.0)
        time.spend(0.9)
        recorder.step()
    cost = recorder.overhead()
    assert cost.every_step == 22  # what recording itself adds, 0.1 s, is a tenth of the budget then
    assert "no cadence keeps within the budget" in cost.note
    assert cost.seconds == pytest.approx(0.055 + 0.1 / 22, rel=0.01)


def test_recording_stops_with_a_warning_if_no_cadence_keeps_the_budget(time: Time, monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = Recorder(out=ForwardMonitor(Count()), loss=CallMonitor(Count()), budget=0.03).modules(model).attach(optimizer)
    begin = _Steps._begin
    monkeypatch.setattr(_Steps, "_begin", lambda *args: (time.spend(0.05), begin(*args))[1])
    with pytest.warns(RecordingWarning, match=r"recording has stopped\. .* takes 1e\+03 ms, .* takes 4\.8 %.*0\.06 or") as told:
        for _ in range(2000):
            time.spend(1.0)
            recorder.push("loss", 1.0)
            train(model, optimizer, 1)
    assert len(told) == 1
    recorded = dict(recorder.samples)
    assert all(recorded.values())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    step = recorder.clock.step
    train(model, optimizer, 3)
    assert (recorder.clock.step, recorder.clock.attached) == (step, False)
    recorder.push("loss", 1.0)
    recorder.step()
    assert dict(recorder.samples) == recorded
    assert recorder.overhead().budget == 0.03
    assert all("no cadence keeps the budget" in str(row) for row in recorder.report().rows)
    recorder.register().attach(optimizer)  # another chance
    recorder.push("loss", 1.0)
    train(model, optimizer, 1)
    assert dict(recorder.samples) == {name: count + 1 for name, count in recorded.items()}


def test_an_interruption_now_and_then_does_not_pass_for_what_idle_pushes_cost(time: Time) -> None:
    recorder = Recorder(loss=CallMonitor(Count(), op_=time.costing(0.1)), budget=0.03)
    due = recorder[0]._due

    def interrupted(*args: Any) -> bool:
        time.spend(0.5 if recorder.clock.step % 13 == 5 and not recorder[0].gate.active else 0.0)
        return due(*args)

    recorder[0]._due = interrupted  # type: ignore[method-assign]
    cadences = set()
    for _ in range(6000):
        recorder.push("loss", 1.0)
        time.spend(0.9)
        recorder.step()
        cadences.add(recorder.clock.cadence)
    assert cadences == {1, 4}


def test_steps_of_their_own_are_thinned_out_too() -> None:
    recorder = Recorder(
        all=CallMonitor(Last()), tenth=CallMonitor(Last(), every_step=10), once=CallMonitor(Count(), steps=[7]), budget=0.5
    )
    recorder._meter.every_step = recorder.clock.cadence = 3
    seen: dict[str, list[int]] = {name: [] for name in recorder}
    for step in range(100):
        before = {name: recorder.samples[name] for name in recorder}
        for name in recorder:
            recorder.push(name, float(step))
            if recorder.samples[name] > before[name]:
                seen[name].append(step)
        recorder._meter.drop()
        recorder.step()
    assert seen == {"all": list(range(0, 100, 3)), "tenth": [0, 30, 60, 90], "once": [7]}


def test_every_kind_of_monitor_keeps_to_the_cadence() -> None:
    layer = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(layer.parameters())
    recorder = Recorder(
        out=ForwardMonitor(Count()),
        back=BackwardMonitor(Count()),
        value=ParameterMonitor(Count()),
        grad=ParameterGradientMonitor(Count()),
        update=ParameterUpdateMonitor(Count()),
        loss=CallMonitor(Count()),
        budget=0.9,
    )
    recorder.modules(layer).attach(optimizer)
    recorder._meter.every_step = recorder.clock.cadence = 5
    recorder._meter._choose = lambda *_: None  # type: ignore[method-assign]
    for _ in range(20):
        optimizer.zero_grad()
        loss = layer(torch.randn(5, 3)).square().mean()
        loss.backward()
        recorder.push("loss", loss)
        optimizer.step()
    assert set(recorder.samples.values()) == {4}
    assert {row.steps for row in recorder.report().rows} == {"one in 5 of these for the budget"}
    assert repr(recorder).splitlines()[0].endswith("6 subrecorders, one in 5 of the steps for a budget of 90 %")


@pytest.mark.parametrize("budget", [0, 0.0, -0.1, 1, 1.0, 3, float("nan"), float("inf"), "0.03", True, [0.1], CallMonitor(Count())])
def test_what_is_no_share_is_refused(budget: Any) -> None:
    with pytest.raises(ValueError, match=r"budget is the share of the steps' time that recording may take, above 0 and below 1"):
        Recorder(CallMonitor(Count()), budget=budget)


def test_a_budget_without_steps_is_told_of_once() -> None:
    layer = nn.Linear(3, 2)
    recorder = Recorder(ForwardMonitor(Count()), budget=0.03).modules(layer)
    optimizer = torch.optim.SGD(layer.parameters())
    _train(layer, optimizer)
    with pytest.warns(RecordingWarning, match=r"the clock stands at step 0 still.* budget .*recorder\.attach\(optimizer\)"):
        _train(layer, optimizer)
    _train(layer, optimizer)  # a second warning would be an error
    assert recorder.report().rows[0].reason.startswith("the clock stands at step 0 still")


def _train(layer: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()


def test_a_pickled_recorder_keeps_budget_and_cadence(time: Time) -> None:
    kept = Recorder(loss=CallMonitor(Count()), budget=0.03)
    kept._meter.every_step = 4
    kept.clock.cadence = 4
    kept.step()
    copy = pickle.loads(pickle.dumps(kept))
    assert copy.overhead().budget == 0.03
    assert copy.overhead().every_step == copy.clock.cadence == 4
    assert copy.overhead().steps == 0
    for _ in range(8):
        copy.push("loss", 1.0)
        copy.step()
    assert copy.samples["loss"] == 2


def test_a_forgotten_recorder_goes_on_within_its_budget(time: Time) -> None:
    layer = nn.Identity()
    recorder = Recorder(ForwardMonitor(Count(), op_=time.costing(0.1)), budget=0.03).modules(layer)
    clock, monitor = recorder.clock, recorder[0]
    del recorder
    with pytest.warns(RecordingWarning, match="a recorder no longer exists"):
        layer(torch.ones(1))
    for _ in range(400):
        layer(torch.ones(1))
        time.spend(0.9)
        clock.advance()
    assert clock.cadence == 4
    assert monitor.samples < 150


# Inside torch.compile


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.parametrize("budget", [None, 0.03])
def test_neither_measured_steps_nor_another_cadence_compile_anything_anew(time: Time, budget: float | None) -> None:
    torch.manual_seed(0)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    recorder = Recorder(
        out=ForwardMonitor(Count()),
        inp=ForwardInputMonitor(Sum()),
        back=BackwardMonitor(Sum()),
        state=StateMonitor(Last(), "training"),
        silent=ForwardMonitor(Count(), train_update=False),
        loss=CallMonitor(Count(), op_=time.costing(0.1)),
        budget=budget,
    )
    recorder.modules(model).attach(optimizer)
    recorder.overhead()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    recorded, cadences = 0, set()
    for step in range(100):
        if step in (30, 60):
            recorder._meter._window = meter.MeasuredSteps()
            recorder._meter.every_step = 3 if budget and step == 30 else recorder._meter.every_step
        optimizer.zero_grad()
        loss = compiled(torch.randn(5, 3)).square().mean()
        loss.backward()
        before = recorder.samples["loss"]
        recorder.push("loss", loss.detach())
        recorded += recorder.samples["loss"] - before
        time.spend(0.9)
        optimizer.step()
        cadences.add(recorder.clock.cadence)
    assert counters["stats"]["unique_graphs"] == (1 if budget is None else 2)
    assert not counters["graph_break"]
    assert recorder.samples["out/0"] == recorder.samples["back/0"] == recorded
    assert cadences == ({1} if budget is None else {1, 3, 4})
    assert ("what compiled graphs compute for it in their own kernels" in recorder.overhead().note) is (budget is None)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.usefixtures("without_loops")
def test_what_graphs_hand_over_is_timed_as_it_is_recorded(time: Time, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    recorder = Recorder(ForwardMonitor(Sum())).modules(layers, types=nn.Linear)
    recorder.overhead()
    add = Buffer.add

    def slow(self: Any, *args: Any) -> Any:
        time.spend(1.0)
        return add(self, *args)

    monkeypatch.setattr(Buffer, "add", slow)
    monkeypatch.setattr(Observer, "_waits", lambda *_: False)  # each goes through the buffer
    compiled = torch.compile(layers, backend="aot_eager", fullgraph=True)
    for _ in range(5):
        compiled(torch.ones(1, 3))
        time.spend(2.0)
        recorder.step()
    assert recorder.overhead().share == 0.5
    assert recorder.samples[0] == 5
