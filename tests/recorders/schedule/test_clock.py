"""The clock: step, micro-batch, phase, recomputation; monitors that record in some steps only, in compiled graphs too."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from names import name_of
from profiled import profiled
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from recorders import (
    BackwardInputMonitor,
    BackwardMonitor,
    CallMonitor,
    Clock,
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
from recorders.schedule.chosen_steps import StepGroup, Steps
from reducers import CKA, Collect, Count, Last, Max, Mean, Moments, Product, Sum


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x).relu_())
        return y


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int, call: Callable[[Tensor], Tensor] | None = None) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        (net if call is None else call)(torch.randn(5, 3)).square().mean().backward()
        optimizer.step()


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)


def third(step: int) -> bool:
    return step % 3 == 0


# Steps


@pytest.mark.parametrize(
    ("gates", "expected"),
    [
        ({}, list(range(12))),
        ({"steps": range(3, 6)}, [3, 4, 5]),
        ({"steps": range(1, 12, 5)}, [1, 6, 11]),
        ({"steps": slice(9, None)}, [9, 10, 11]),
        ({"steps": slice(2)}, [0, 1]),
        ({"steps": {11, 4}}, [4, 11]),
        ({"steps": torch.arange(2, 4).numpy()}, [2, 3]),
        ({"steps": third}, [0, 3, 6, 9]),
        ({"every_step": 5}, [0, 5, 10]),
        ({"steps": range(4, 11), "every_step": 5}, [5, 10]),
        ({"every_step": 4, "every": 2}, [0, 8]),
    ],
    ids=name_of,
)
def test_steps_choose_what_is_recorded(gates: dict[str, Any], expected: list[int]) -> None:
    layer = nn.Identity()
    monitor = ForwardMonitor(Collect(), layer, **gates)
    for step in range(12):
        layer(torch.tensor([float(step)]))
        monitor.clock.advance()
    assert monitor.peek().tolist() == expected


@given(
    start=st.integers(0, 20),
    length=st.integers(1, 20),
    apart=st.integers(1, 5),
    every_step=st.integers(1, 7),
    calls=st.integers(1, 3),
)
@settings(max_examples=30)
def test_gates_multiply(start: int, length: int, apart: int, every_step: int, calls: int) -> None:
    steps = range(start, start + length, apart)
    monitor = CallMonitor(Count(), steps=steps, every_step=every_step)
    for _ in range(45):
        for _ in range(calls):
            monitor.push(1.0)
        monitor.clock.advance()
    assert monitor.samples == calls * sum(step in steps and step % every_step == 0 for step in range(45))


@given(
    first=st.integers(0, 30),
    every_step=st.integers(1, 9),
    cadences=st.lists(st.integers(1, 7), min_size=1, max_size=4),
    jumps=st.dictionaries(st.integers(0, 300), st.integers(0, 400), max_size=2),
)
@settings(max_examples=30)
def test_steps_that_nobody_is_asked_about_change_nothing(
    first: int, every_step: int, cadences: list[int], jumps: dict[int, int]
) -> None:
    """A clock that knows that no step before the next one is due asks for none of them; the monitor is added at step `first`."""

    def recorded() -> tuple[list[int], int]:
        monitor, steps = CallMonitor(Collect(), every_step=every_step), []
        clock = Clock()
        clock.step = first
        monitor.clock = clock
        decide = StepGroup.decide
        count = [0]

        def counted(group: StepGroup, step: int, cadence: int) -> None:
            count[0] += 1
            decide(group, step, cadence)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(StepGroup, "decide", counted)
            for step in range(300):
                if step % 80 == 0:
                    clock.cadence = cadences[step // 80 % len(cadences)]
                    clock.step = clock.step  # asks again, with this cadence
                if step in jumps:
                    clock.step = jumps[step]
                if monitor.gate.active:
                    steps.append(clock.step)
                clock.advance()
        return steps, count[0]

    fast, few = recorded()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepGroup, "undue_steps", lambda *_: 0)
        slow, many = recorded()
    assert fast == slow
    if set(cadences) == {1} and not jumps:
        assert fast == [step for step in range(first, first + 300) if step % every_step == 0]
    assert few <= many
    if every_step > 2:
        assert few < many


@pytest.mark.parametrize("first", [1, 3, 5])
def test_a_monitor_that_comes_between_its_steps_misses_none(first: int) -> None:
    clock = Clock()
    clock.step = first
    monitor = CallMonitor(Collect(), every_step=5)
    monitor.clock = clock
    for _ in range(20):
        monitor.push(float(clock.step))
        clock.advance()
    assert monitor.peek().tolist() == [5, 10, 15, 20]


@pytest.mark.parametrize(
    ("steps", "error"),
    [
        (range(0), ValueError),
        (range(-3, 5), ValueError),
        (slice(-3, None), ValueError),
        (slice(5, 2), ValueError),
        ([], ValueError),
        ({-1, 1}, ValueError),
        (100, TypeError),
        ("100", TypeError),
        ([True, False], TypeError),
        ([0.5], TypeError),
    ],
)
def test_steps_that_cannot_come_are_refused(steps: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="steps="):
        ForwardMonitor(Count(), steps=steps)


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="every_step is a whole number of steps, at least 1"):
        ForwardMonitor(Count(), every_step=0)
    with pytest.raises(ValueError, match="choose 'module' or 'grad'"):
        ForwardMonitor(Count(), phase="eval")  # type: ignore[arg-type]
    for wrong in (-1, 1.5, True):
        with pytest.raises(ValueError, match="whole number"):
            Clock().step = wrong  # type: ignore[assignment]
    with pytest.raises(TypeError, match=r"torch\.optim\.Optimizer, or advanced by hand; got Linear"):
        Recorder(CallMonitor(Count())).attach(nn.Linear(1, 1))  # type: ignore[arg-type]


def test_gates_are_part_of_the_recipe() -> None:
    make = ForwardMonitor.partialconstructor(Mean(), steps=range(2, 9), every_step=3, phase="grad")
    assert pickle.loads(pickle.dumps(make)) == make
    monitor = make()
    assert monitor.constructor == make
    assert repr(monitor) == "ForwardMonitor(Mean(pattern='... ->'), every_step=3, phase='grad', steps=range(2, 9))"
    assert ForwardMonitor(Mean(), steps=slice(5, 8)).constructor == ForwardMonitor(Mean(), steps=range(5, 8)).constructor
    assert hash(ForwardMonitor(Mean(), steps=slice(5, None)).constructor)
    assert pickle.loads(pickle.dumps(ForwardMonitor(Mean(), steps=third))).constructor.options == (("steps", third),)


@pytest.mark.parametrize(
    "make",
    [
        lambda net, **gates: ForwardMonitor(Count(), net.first, **gates),
        lambda net, **gates: ForwardInputMonitor(Count(), net.first, **gates),
        lambda net, **gates: BackwardMonitor(Count(), net.first, **gates),
        lambda net, **gates: BackwardInputMonitor(Count(), net.second, **gates),
        lambda net, **gates: StateMonitor(Count(), "weight", net.first, **gates),
        lambda net, **gates: DifferenceMonitor(Count(), "weight", net.first, **gates),
        lambda net, **gates: PairMonitor(CKA(), net.first, net.second, **gates),
        lambda net, **gates: ParameterMonitor(Count(), "weight", net.first, **gates),
        lambda net, **gates: ParameterMonitor(Count(), "weight", net.first, when="call", **gates),
        lambda net, **gates: ParameterGradientMonitor(Count(), "weight", net.first, **gates),
        lambda net, **gates: ParameterGradientMonitor(Count(), "weight", net.first, when="accumulate", **gates),
        lambda net, **gates: ParameterUpdateMonitor(Count(), "weight", net.first, **gates),
        lambda net, **gates: OptimizerStateMonitor(Count(), "momentum_buffer", "weight", net.first, **gates),
    ],
    ids=lambda make: make.__code__.co_names[0],
)
def test_every_kind_of_monitor_heeds_steps_and_an_optimizer(make: Callable[..., Monitor]) -> None:
    net = Net()
    optimizer = sgd(net)
    monitor = make(net, steps=range(2, 5), phase="grad", eval_update=False)
    monitor.clock.attach(optimizer)
    by_step = []
    for _ in range(8):
        before = monitor.samples
        train(net, optimizer, 1)
        by_step.append(monitor.samples - before)
    assert by_step == [0, 0, 1, 1, 1, 0, 0, 0]


# What advances the clock


def test_a_step_ends_after_the_monitors_were_told_of_it() -> None:
    """The values after the third optimizer step belong to step 2, as the gradients and the forwards that led to them do."""
    net = Net()
    optimizer = sgd(net)
    recorder = Recorder(out=ForwardMonitor(Count(), steps=[2]), value=ParameterMonitor(Last(), "weight", steps=[2])).modules(
        net, names="first"
    )
    recorder.attach(optimizer)
    train(net, optimizer, 3)
    after = net.first.weight.detach().clone()
    train(net, optimizer, 3)
    assert recorder.clock.step == 6
    torch.testing.assert_close(recorder["value/first"].peek(), after, rtol=0, atol=0)
    assert recorder["out/first"].samples == 1


@pytest.mark.parametrize("fused", [False, True])
def test_steps_that_a_scaler_skips_do_not_count(fused: bool) -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, fused=fused)
    recorder = Recorder(ForwardMonitor(Count())).modules(net).attach(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for value in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale(net(torch.full((2, 3), value)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert recorder.clock.step == 2


def test_a_closure_is_one_step_and_other_optimizers_do_not_count() -> None:
    net = Net()
    optimizer, other = torch.optim.LBFGS(net.parameters(), max_iter=3), sgd(net)
    recorder = Recorder(ForwardMonitor(Count())).modules(net).attach(optimizer).attach(optimizer)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = net(torch.ones(2, 3)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]
    other.step()
    assert recorder.clock.step == 1
    assert recorder[0].samples > 1


@pytest.mark.usefixtures("alone")
def test_a_step_that_only_the_clock_needs_takes_two_hooks_and_no_more() -> None:
    """In a step of a quarter of a millisecond each further object that is looked at costs: the caches hold other things."""
    net = Net()
    optimizer = sgd(net)
    recorder = Recorder(out=ForwardMonitor(Count(), every_step=100)).modules(net).attach(optimizer)
    train(net, optimizer, 3)
    called: list[str] = []

    def see(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_globals.get("__name__", "").startswith(("recorders", "reducers")):
            called.append(frame.f_code.co_name)

    with profiled(see):
        for _ in range(10):
            optimizer.step()
    assert called == ["before", "after"] * 10
    assert recorder.clock.step == 13
    train(net, optimizer, 88)
    assert set(recorder.samples.values()) == {2}


class Calling(torch.optim.SGD):
    """Steps only sometimes: itself, or another optimizer that it wraps."""

    def __init__(self, net: nn.Module, wrapped: torch.optim.Optimizer | None = None) -> None:
        super().__init__(net.parameters(), lr=0.1)
        self.wrapped, self.calls, self.fails = wrapped, 0, False
        if wrapped is not None:
            self.param_groups = wrapped.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls += 1
        if self.fails:
            raise RuntimeError("on purpose")
        if self.calls % 4 == 0:
            super().step()
        elif self.calls % 4 == 2 and self.wrapped is not None:
            self.wrapped.step()
            self.wrapped.step()


@pytest.mark.parametrize("which", ["outer", "inner"])
@pytest.mark.parametrize("wraps", [False, True])
def test_steps_within_steps_count_once_whenever_they_come(wraps: bool, which: str) -> None:
    net = Net()
    wrapped = sgd(net) if wraps else None
    optimizer = Calling(net, wrapped)
    clock = Clock().attach(wrapped if which == "inner" and wrapped is not None else optimizer)
    for step in range(40):
        assert clock.step == step
        optimizer.step()
    optimizer.fails = True
    for _ in range(3):
        with pytest.raises(RuntimeError, match="on purpose"):
            optimizer.step()
    optimizer.fails = False
    for step in range(40, 60):
        assert clock.step == step
        optimizer.step()


def test_what_comes_between_quiet_steps_is_told_of_them() -> None:
    net, other = Net(), Net()
    optimizer, others = sgd(net), sgd(other)
    clock, second = Clock().attach(optimizer), Clock()
    train(net, optimizer, 5)
    second.attach(optimizer)
    train(net, optimizer, 5)
    assert (clock.step, second.step) == (10, 5)
    second.detach()
    train(net, optimizer, 5)
    train(other, others, 2)
    monitor = ParameterMonitor(Count(), "weight", net.first)
    train(net, optimizer, 5)
    monitor.deregister()
    train(net, optimizer, 5)
    assert (clock.step, second.step, monitor.samples) == (25, 5, 5)
    clock.step = 100
    train(net, optimizer, 5)
    assert clock.step == 105
    clock.micro_batch = 3
    assert clock.micro_batch == 3
    optimizer.step()
    assert (clock.step, clock.micro_batch) == (106, 0)


def test_by_hand() -> None:
    net = Net()
    recorder = Recorder(ForwardMonitor(Count(), steps=range(1, 3))).modules(net)
    for _ in range(4):
        net(torch.ones(1, 3))
        assert recorder.step() is recorder
    assert list(recorder.samples.values()) == [2, 2, 2]
    recorder.clock.step = 1  # as after resuming
    net(torch.ones(1, 3))
    assert list(recorder.samples.values()) == [3, 3, 3]


def test_all_monitors_of_a_recorder_share_its_clock_and_keep_it_through_copies() -> None:
    net = Net()
    recorder = Recorder(out=ForwardMonitor(Count(), every_step=2), loss=CallMonitor(Count(), every_step=2)).modules(net)
    recorder.step()
    recorder.push("loss", 1.0)
    assert {monitor.clock for monitor in recorder.values()} == {recorder.clock}
    assert recorder["loss"].samples == 0
    for twin in (copy.deepcopy(recorder), pickle.loads(pickle.dumps(recorder))):
        assert twin.clock is not recorder.clock
        assert twin.clock.step == 1
        twin.push("loss", 1.0)
        assert twin["loss"].samples == 0
        twin.step().push("loss", 1.0)
        assert twin["loss"].samples == 1
    assert recorder.clock.step == 1
    removed = recorder.remove("loss")
    assert removed.clock is not recorder.clock  # which no longer rules it


def test_threads_lose_no_steps() -> None:
    clock = Clock()
    threads = [threading.Thread(target=lambda: [clock.advance() for _ in range(5000)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert clock.step == 20000


def test_a_clock_may_be_shared_by_hand() -> None:
    clock, pushed = Clock(), [CallMonitor(Sum(), every_step=2), CallMonitor(Sum(), steps=[1])]
    old = pushed[0].clock
    for monitor in pushed:
        monitor.clock = clock
    for _ in range(4):
        for monitor in pushed:
            monitor.push(1.0)
        clock.advance()
        old.step += 2
    assert [monitor.samples for monitor in pushed] == [2, 1]


def test_nobody_is_kept_alive_and_hooks_go() -> None:
    import gc
    import weakref

    from recorders.schedule.steps import _steps

    net = Net()
    optimizer = sgd(net)
    gc.collect()
    optimizer.step()  # hooks of monitors that are gone go at the next step
    recorder = Recorder(ForwardMonitor(Count(), every_step=2)).modules(net)
    assert not _steps.active
    recorder.attach(optimizer)
    assert _steps.active
    recorder.deregister()
    assert not net._forward_pre_hooks
    train(net, optimizer, 3)
    assert recorder.clock.step == 3  # steps go on being counted
    recorder.register()
    assert len(net._forward_pre_hooks) == 1
    clock = weakref.ref(recorder.clock)
    gc.disable()
    try:
        recorder.deregister()
        del recorder
        assert clock() is None
        train(net, optimizer, 1)
        assert not _steps.active  # the hook stays, and does nothing: another thread may walk through the hooks
        again = Recorder(ForwardMonitor(Count(), every_step=2)).modules(net).attach(optimizer)
        dead = weakref.ref(net)
        del net, optimizer
        assert dead() is None
    finally:
        gc.enable()
    assert again.clock.phase == "train"


def test_a_model_and_an_optimizer_with_a_clock_are_copied_without_it() -> None:
    net = Net()
    optimizer = sgd(net)
    recorder = Recorder(ForwardMonitor(Count())).modules(net).attach(optimizer)
    twin, twin_optimizer = copy.deepcopy((net, optimizer))
    pickle.loads(pickle.dumps(optimizer))
    train(twin, twin_optimizer, 2)
    assert (recorder.clock.step, recorder.clock.micro_batch, list(recorder.samples.values())) == (0, 0, [0, 0, 0])


# Micro-batches, phase, recomputation


def test_micro_batches_are_the_forwards_of_a_step() -> None:
    net = Net()
    optimizer = sgd(net)
    recorder = Recorder(ForwardMonitor(Collect(), condition=lambda: clock.micro_batch == 0)).modules(net)
    clock = recorder.attach(optimizer).clock
    seen = []
    for step in range(3):
        with torch.no_grad():
            net(torch.ones(1, 3))  # validation is no micro-batch
        for _ in range(step + 1):
            loss = net(torch.ones(1, 3)).sum()
            seen.append((clock.step, clock.micro_batch))
            loss.backward()
            assert clock.micro_batch == seen[-1][1]
        optimizer.step()
    assert seen == [(0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2)]
    assert recorder[0].samples == 6  # each step: the validation, and the first micro-batch


def test_a_micro_batch_that_is_set_by_hand_has_the_next_forward() -> None:
    net = Net()
    clock = Recorder(ForwardMonitor(Count())).modules(net).attach(sgd(net)).clock
    net(torch.ones(1, 3))
    clock.micro_batch = 3
    seen = []
    for _ in range(2):
        net(torch.ones(1, 3))
        seen.append(clock.micro_batch)
    assert seen == [3, 4]


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("gates", [{}, {"steps": [100]}], ids=["recording", "at rest"])
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "part of more"])
def test_micro_batches_are_counted_in_compiled_graphs_without_breaks_or_recompiles(gates: dict[str, Any], whole: bool) -> None:
    from torch._dynamo.utils import counters

    net = Net()
    optimizer = sgd(net)
    recorder = Recorder(ForwardMonitor(Count(), **gates)).modules(net, leaves=True).attach(optimizer)
    call = torch.compile(net if whole else lambda x: net(x) * 2, backend="aot_eager", fullgraph=True)
    seen = []
    for step in range(4):
        with torch.no_grad():
            call(torch.ones(1, 3))  # validation is no micro-batch
        for _ in range(step + 1):
            loss = call(torch.ones(1, 3)).sum()
            seen.append((recorder.clock.step, recorder.clock.micro_batch))
            loss.backward()
        optimizer.step()
    assert seen == [(step, batch) for step in range(4) for batch in range(step + 1)]
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 2  # with gradients, and without
    assert set(recorder.samples.values()) == ({0} if gates else {14})


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("inside", [True, False])
def test_a_condition_is_asked_when_the_graph_runs_and_finds_its_micro_batch(inside: bool) -> None:
    net = Net()
    optimizer = sgd(net)
    recorder = Recorder(ForwardMonitor(Count(), condition=lambda: clock.micro_batch == 0)).modules(net, names="first")
    clock = recorder.attach(optimizer).clock
    call = torch.compile((lambda x: net(x) * 2) if inside else net, backend="aot_eager", fullgraph=True)
    for _ in range(4):
        for _ in range(3):
            call(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    assert recorder[0].samples == 4


@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_forward_that_checkpointing_recomputes_is_one_micro_batch() -> None:
    net = Net()
    clock = Recorder(ForwardMonitor(Count())).modules(net, names="first").attach(sgd(net)).clock
    call = torch.compile(net, backend="aot_eager")
    for _ in range(3):
        checkpoint(call, torch.ones(1, 3), use_reentrant=False).sum().backward()
    assert clock.micro_batch == 2


def test_attaching_before_or_after_selecting_is_the_same() -> None:
    net = Net()
    recorder = Recorder(ForwardMonitor(Count())).attach(sgd(net)).modules(net, names="first")
    net(torch.ones(1, 3))
    net(torch.ones(1, 3))
    assert recorder.clock.micro_batch == 1


def test_phase_of_this_moment() -> None:
    net = Net()
    clock = Recorder(ForwardMonitor(Count())).modules(net).clock
    assert clock.phase == Clock().phase == "train"
    with torch.no_grad():
        assert clock.phase == "no_grad"
        net.eval()
        assert clock.phase == "eval"
    assert repr(clock) == "Clock(step=0, micro_batch=0, phase='eval')"


@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:DeprecationWarning")
def test_a_network_that_takes_no_hooks_has_steps_but_no_micro_batches() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(1, 1)))
    recorder = Recorder(ParameterMonitor(Count())).modules(scripted).attach(sgd(scripted))
    for _ in range(2):
        scripted(torch.ones(1, 1)).sum().backward()
    assert recorder.clock.micro_batch == 0
    assert recorder.clock.phase == "train"


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_is_told_and_no_micro_batch(reentrant: bool) -> None:
    seen = []

    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(clock.recompute)
            return x.sin()

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = checkpoint(self.inner, x, use_reentrant=reentrant)
            return y

    net = Outer()
    clock = Recorder(ForwardMonitor(Count())).modules(net).attach(sgd(nn.Linear(1, 1))).clock
    for _ in range(2):
        net(torch.ones(3, requires_grad=True)).sum().backward()
    assert seen == [False, True, False, True]
    assert clock.micro_batch == 1


def test_phase_grad_takes_gradients_for_training() -> None:
    net = Net()
    optimizer = sgd(net)
    recorder = Recorder(
        out=ForwardMonitor(Count(), phase="grad", eval_update=False),
        validation=ForwardMonitor(Count(), phase="grad", train_update=False),
        by_mode=ForwardMonitor(Count(), eval_update=False),
        grad=BackwardMonitor(Count(), phase="grad", eval_update=False),
        parameter=ParameterGradientMonitor(Count(), phase="grad", eval_update=False),
        accumulated=ParameterGradientMonitor(Count(), phase="grad", eval_update=False, when="accumulate"),
    ).modules(net, names="first")
    pushed = CallMonitor(Count(), phase="grad", eval_update=False)
    net.eval()  # fine-tuning with frozen normalisation is training all the same
    train(net, optimizer, 2)
    pushed.push(1.0)
    net.train()
    with torch.no_grad():
        net(torch.ones(1, 3))
        pushed.push(1.0)
    assert {name: monitor.samples for name, monitor in recorder.items()} == {
        "out/first": 2,
        "validation/first": 1,
        "by_mode/first": 1,
        "grad/first": 2,
        "parameter/first": 2,
        "accumulated/first": 2,
    }
    assert pushed.samples == 1
    assert recorder["out/first"].counts["not recorded with gradients off"] == 1


# Failures


def picky(step: int) -> bool:
    if step == 2:
        raise ArithmeticError("bad step")
    return True


def test_steps_that_fail_follow_on_error() -> None:
    layer = nn.Identity()
    warned = ForwardMonitor(Count(), layer, steps=picky)
    disabled = ForwardMonitor(Count(), layer, steps=picky, on_error="disable")
    raising = ForwardMonitor(Count(), layer, steps=picky, on_error="raise")
    for monitor in (disabled, raising):
        monitor.clock = warned.clock
    for step in range(5):
        layer(torch.ones(1))
        if step == 1:
            with (
                pytest.warns(RecordingWarning, match="ArithmeticError: bad step"),
                pytest.raises(MonitorError, match="ForwardMonitor on Identity: ArithmeticError: bad step"),
            ):
                warned.clock.advance()
        else:
            warned.clock.advance()
    assert warned.clock.step == 5
    assert [monitor.samples for monitor in (warned, disabled, raising)] == [4, 2, 4]


# Compiled graphs


def compiled_run(gates: dict[str, Any], net: nn.Module, steps: int = 40) -> tuple[Recorder, int]:
    from torch._dynamo.utils import counters

    optimizer = sgd(net)
    recorder = Recorder(
        out=ForwardMonitor(Product(moments=Moments("b c -> c"), top=Max()), **gates), inp=ForwardInputMonitor(Mean(), **gates)
    ).modules(net, leaves=True)
    recorder.attach(optimizer)
    torch._dynamo.reset()
    counters.clear()
    train(net, optimizer, steps, torch.compile(net, backend="aot_eager", fullgraph=True))
    assert not counters["graph_break"]
    return recorder, counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(
    ("make", "gates", "samples"),
    [
        (Net, {"every_step": 10}, 4),
        (Net, {"steps": range(20, 30)}, 10),
        (Net, {"steps": third, "phase": "grad", "eval_update": False}, 14),
        (lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2)), {"every_step": 10}, 4),
    ],
)
def test_cadence_costs_a_compiled_graph_more_and_no_recompiles(
    make: Callable[[], nn.Module], gates: dict[str, Any], samples: int
) -> None:
    _, without = compiled_run({}, make())
    recorder, graphs = compiled_run(gates, make())
    assert graphs == without + 1
    assert set(recorder.samples.values()) == {samples}


def test_compiled_cadence_records_the_same_as_eager() -> None:
    results = []
    for compiled in (True, False):
        torch.manual_seed(0)
        net = Net()
        if compiled:
            recorder, _ = compiled_run({"every_step": 3}, net, 10)
        else:
            optimizer = sgd(net)
            recorder = Recorder(
                out=ForwardMonitor(Product(moments=Moments("b c -> c"), top=Max()), every_step=3),
                inp=ForwardInputMonitor(Mean(), every_step=3),
            ).modules(net, leaves=True)
            recorder.attach(optimizer)
            train(net, optimizer, 10)
        results.append(recorder)
    for name, monitor in results[0].items():
        assert monitor.samples == results[1][name].samples == 4
        for key, value in monitor.state.items():
            torch.testing.assert_close(value, results[1][name].state[key])


def test_all_monitors_of_a_choice_that_fails_are_told_though_warnings_are_errors() -> None:
    def choose(step: int) -> bool:
        if step:
            raise KeyError(step)
        return True

    net = Net()
    recorder = Recorder(a=ForwardMonitor(Mean(), steps=choose), b=ForwardMonitor(Max(), steps=choose)).modules(net, names="first")
    with pytest.raises(RecordingWarning, match="KeyError"):  # pytest makes errors of them
        recorder.step()
    assert all("KeyError" in (monitor.last_error or "") for monitor in recorder.values())


def test_an_optimizer_that_trains_no_recorded_net_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    net, other, looked = Net(), Net(), Counter[nn.Module]()
    parameters = nn.Module.parameters

    def counted(module: nn.Module, recurse: bool = True) -> Any:
        looked[module] += 1
        return parameters(module, recurse)

    recorder = Recorder(ForwardMonitor(Mean(), every_step=2)).modules(net)
    optimizers = sgd(other), sgd(net)
    monkeypatch.setattr(nn.Module, "parameters", counted)
    with recorder:
        train(other, optimizers[0], 5)
        assert looked[net] == 1
        with pytest.warns(RecordingWarning, match="stands at step 0 still"):
            train(net, optimizers[1], 2)


@pytest.mark.usefixtures("fresh_compiler")
def test_gradients_that_are_not_due_break_no_graph() -> None:
    from torch._dynamo.utils import counters

    net = Net()
    recorder = Recorder(BackwardMonitor(Count(), steps=[5])).modules(net, leaves=True)
    with pytest.warns(RecordingWarning, match="stands at step 0 still"):
        train(net, sgd(net), 3, torch.compile(net, backend="aot_eager", fullgraph=True))
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    assert list(recorder.samples.values()) == [0, 0]


def test_any_number_of_cadences_costs_one_graph_more() -> None:
    from torch._dynamo.utils import counters

    def run(**monitors: Monitor) -> tuple[list[int], int]:
        net = Net()
        optimizer = sgd(net)
        recorder = Recorder(**monitors).modules(net, names="first").attach(optimizer)
        torch._dynamo.reset()
        counters.clear()
        train(net, optimizer, 60, torch.compile(net, backend="aot_eager", fullgraph=True))
        return list(recorder.samples.values()), counters["stats"]["unique_graphs"]

    choices: list[dict[str, Any]] = [
        *({"every_step": n} for n in (4, 6, 10, 15)),
        *({"steps": range(start, start + 3)} for start in (1, 25, 49)),
    ]
    _, without = run(all=ForwardMonitor(Mean()))
    samples, graphs = run(
        all=ForwardMonitor(Mean()),
        **{f"out{i}": ForwardMonitor(Mean(), **gates) for i, gates in enumerate(choices)},
        **{f"difference{i}": DifferenceMonitor(Mean(), "weight", **gates) for i, gates in enumerate(choices)},
    )
    assert samples == [60, *[15, 10, 6, 4, 3, 3, 3] * 2]
    assert graphs == without + 1


# What is said about it


def test_report_and_plan_show_steps() -> None:
    net = Net()
    texts: list[tuple[Steps | None, int, str]] = [
        (range(3, 6), 1, "steps 3 to 5"),
        (range(0, 90, 30), 1, "steps 0 to 60, 30 apart"),
        (slice(7, None), 10, "steps from 7 on, every 10 steps"),
        (list(range(0, 18, 2)), 1, "steps 0, 2, 4, 6, 8, 10, 12, 14 and more"),
        (third, 1, "steps chosen by third"),
        (None, 100, "every 100 steps"),
    ]
    for steps, every_step, text in texts:
        recorder = Recorder(ForwardMonitor(Count(), steps=steps, every_step=every_step)).modules(net, names="first")
        assert recorder.report().rows[0].steps == text
        row = recorder.plan(torch.ones(2, 3)).rows[0]
        assert (row.steps, row.state_bytes) == (text, 16)
        assert str(row).endswith(f"16 bytes of state, {text}")
        assert f"0 recorded of 0 calls ({text}; in others its hooks are off)" in str(recorder.report())
        recorder.deregister()


def test_report_says_that_no_step_came_and_how_the_clock_is_advanced() -> None:
    net = Net()
    early = Recorder(ForwardMonitor(Count(), every_step=10)).modules(net, names="first")
    late = Recorder(ForwardMonitor(Count(), steps=range(50, 60))).modules(net, names="first")
    net(torch.ones(1, 3))
    advice = "recorder.attach(optimizer), or recorder.step() after every step"
    assert advice in early.report().rows[0].reason
    assert "none of its steps has come: the clock stands at step 0 still" in late.report().rows[0].reason
    late.step()
    early.step()
    assert late.report().silent[0].reason == "none of its steps has come: the clock stands at step 1"
    assert late.report().rows[0].skipped == {"not in its steps": 1}
    assert early.report().rows[0].reason == ""


def test_a_module_that_was_not_called_in_its_steps_was_never_called_after_them() -> None:
    net = Net()
    kinds = {"out": ForwardMonitor(Count(), steps=range(2, 4)), "weight": ParameterGradientMonitor(Count(), steps=range(2, 4))}
    recorder = Recorder(**kinds).modules(net, names="first")
    for _ in range(6):
        recorder.step()
    assert [row.reason.partition(",")[0] for row in recorder.report().rows] == [
        "its module was never called",
        "no optimizer step changed its parameters",
    ]


def test_micro_batches_are_counted_in_programs_that_were_compiled_before() -> None:
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    @torch.compile(backend="eager")
    def loss(x: Tensor) -> Tensor:
        out: Tensor = net(x)
        return out.sum()

    recorder = Recorder(ForwardMonitor(Collect())).modules(net)
    loss(torch.ones(1, 2))
    recorder.attach(optimizer)
    seen = []
    for _ in range(2):
        for _ in range(3):
            loss(torch.ones(1, 2)).backward()
            seen.append(recorder.clock.micro_batch)
        optimizer.step()
    assert seen == [0, 1, 2, 0, 1, 2]


def test_the_clock_follows_the_first_net_that_exists() -> None:
    gone, net = nn.Linear(2, 1), nn.Linear(2, 1)
    recorder = Recorder(ForwardMonitor(Collect())).modules(gone)
    recorder.remove("")
    del gone
    gc.collect()
    recorder.modules(net).attach(torch.optim.SGD(net.parameters(), 0.1))
    net.eval()
    seen = []
    for _ in range(3):
        net(torch.ones(1, 2))
        seen.append(recorder.clock.micro_batch)
    assert (seen, recorder.clock.phase) == ([0, 1, 2], "eval")
