"""Optimizer steps in compiled trainings: as many graphs as without a recorder, and the numbers of eager mode."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from recorders import (
    ForwardMonitor,
    OptimizerStateMonitor,
    ParameterGradientMonitor,
    ParameterMonitor,
    ParameterUpdateMonitor,
    Recorder,
)
from recorders.schedule import steps
from recorders.schedule.notices import notices
from recorders.schedule.steps import IN_ONE_GRAPH, _steps, _under_way
from reducers import Mean, Norm


class Plain(torch.optim.Optimizer):
    """Breaks no graph, as those of PyTorch do, and mentions no function of PyTorch in its step."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["exp_avg"] = parameter.grad * 0.5 + (state["exp_avg"] if state else 0)
                parameter.sub_(state["exp_avg"], alpha=group["lr"])


MAKE: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "rmsprop": lambda parameters, lr: torch.optim.RMSprop(parameters, lr=lr, foreach=True),
    "plain": Plain,
}
WAYS = ["step", "function", "training"]


@pytest.fixture(autouse=True)
def _leave_nothing() -> Iterator[None]:
    yield
    torch._dynamo.reset()
    gc.collect()
    _steps._deactivate_unused()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def recorder_of(net: nn.Module, states: bool) -> Recorder:
    monitors = {
        "value": ParameterMonitor(Norm()),
        "gradient": ParameterGradientMonitor(Norm()),
        "update": ParameterUpdateMonitor(Norm()),
        "alone": ParameterUpdateMonitor(Norm(), op_=lambda after, before: after - before),
    }
    if states:
        monitors["state"] = OptimizerStateMonitor(Norm(), "exp_avg")
    return Recorder(**monitors).modules(net, types=nn.Linear)


class Training:
    """Steps of a small network, of which a part is compiled: the step itself, a function that calls it, or the whole."""

    def __init__(self, kind: str, way: str | None, backend: str = "eager", **options: Any) -> None:
        torch._dynamo.reset()
        counters.clear()
        self.net, self.counter = network(), CompileCounterWithBackend(backend)
        self.optimizer = MAKE[kind](self.net.parameters(), lr=0.1)
        self.generator = torch.Generator().manual_seed(1)

        def compiled(function: Any) -> Any:
            return torch.compile(function, backend=self.counter, **options)

        def whole(x: Tensor) -> None:
            self.optimizer.zero_grad()
            self.net(x).square().mean().backward()
            step()

        step: Any = self.optimizer.step
        if way == "step":
            step = compiled(self.optimizer.step)
        elif way == "function":
            step = compiled(lambda: self.optimizer.step())
        self.step = compiled(whole) if way == "training" else whole

    def run(self, steps: int = 6) -> Training:
        for _ in range(steps):
            self.step(torch.randn(3, 4, generator=self.generator))
        return self

    @property
    def found(self) -> tuple[int, int, int]:
        """Graphs, breaks and recompiles."""
        return self.counter.frame_count, sum(counters["graph_break"].values()), sum(counters["recompiles"].values())

    @property
    def parameters(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.net.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", MAKE)
def test_a_compiled_step_has_no_graph_more_and_records_what_eager_mode_does(kind: str, way: str) -> None:
    bare = Training(kind, way).run()
    graphs, breaks, recompiles = bare.found

    eager = Training(kind, None)
    wanted = recorder_of(eager.net, kind != "rmsprop").attach(eager.optimizer)
    eager.run()

    training = Training(kind, way)
    recorder = recorder_of(training.net, kind != "rmsprop").attach(training.optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        training.run()
    found = training.found
    # a function whose graph held the whole step of an optimizer that breaks no graph has to break before the step
    assert found[0] == graphs
    assert found[1] <= breaks + (kind == "plain" and way == "function")
    assert found[2] == recompiles
    assert all(map(torch.equal, training.parameters, bare.parameters))
    assert recorder.clock.step == wanted.clock.step == 6
    for name, monitor in recorder.items():
        assert monitor.samples == wanted[name].samples == 6
        torch.testing.assert_close(monitor.peek(), wanted[name].peek(), rtol=1e-4, atol=1e-9)  # Adam itself differs, compiled


@pytest.mark.slow
@pytest.mark.parametrize("kind", MAKE)
def test_attaching_alone_costs_no_graph(kind: str) -> None:
    wanted = Training(kind, "step").run().found
    training = Training(kind, "step")
    recorder = Recorder(ForwardMonitor(Mean())).modules(training.net, types=nn.Linear).attach(training.optimizer)
    training.run()
    assert (training.found[0], training.found[2]) == (wanted[0], wanted[2])
    assert training.found[1] <= wanted[1]
    assert recorder.clock.step == 6


@pytest.mark.slow
def test_fused_by_inductor_the_parameters_are_the_same_to_the_bit() -> None:
    bare = Training("adam", "step", "inductor").run(3)
    training = Training("adam", "step", "inductor")
    recorder = recorder_of(training.net, True)
    training.run(3)
    assert training.counter.frame_count == bare.counter.frame_count
    assert all(map(torch.equal, training.parameters, bare.parameters))
    assert set(recorder.samples.values()) == {3}


def test_a_clock_that_waits_for_steps_of_another_net_compiles_no_step_again() -> None:
    steps.notice_steps()
    training = Training("plain", "step").run(3)
    compiled, other = training.counter.frame_count, network()
    recorder = Recorder(ForwardMonitor(Mean(), every_step=2)).modules(other, types=nn.Linear)
    assert notices
    training.run(3)
    assert training.counter.frame_count == compiled
    recorder.deregister()
    training.run(1)
    assert training.counter.frame_count == compiled


@pytest.mark.slow
def test_a_recorder_that_comes_and_goes_between_compiled_steps_records_meanwhile() -> None:
    steps.notice_steps()  # the hooks stay for good: the first recorder of a process has each compiled step compiled once more
    bare = Training("plain", "step").run(6)
    training = Training("plain", "step").run(2)
    recorder = recorder_of(training.net, True)
    training.run(2)
    recorder.deregister()
    training.run(2)
    assert set(recorder.samples.values()) == {2}
    assert training.counter.frame_count <= bare.counter.frame_count + 1  # the step by itself, while there were hooks
    assert all(map(torch.equal, training.parameters, bare.parameters))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["step", "function"])
def test_an_optimizer_whose_step_is_one_graph_keeps_it_with_a_recorder(way: str) -> None:
    bare = Training("plain", way, fullgraph=True).run()
    training = Training("plain", way, fullgraph=True)
    recorder = recorder_of(training.net, True).attach(training.optimizer)
    training.run()
    assert training.found == bare.found
    assert all(map(torch.equal, training.parameters, bare.parameters))
    if way == "step":
        assert (recorder.clock.step, set(recorder.samples.values())) == (6, {6})
    else:
        assert (recorder.clock.step, set(recorder.samples.values())) == (0, {0})
        assert all(monitor.counts[IN_ONE_GRAPH] > 0 for monitor in recorder.values())


class Interrupt(BaseException):
    """What a user does."""


@pytest.mark.slow
def test_entries_of_interrupted_steps_keep_nothing_alive_and_end_with_the_next_step() -> None:
    training = Training("adam", None)
    net, optimizer = training.net, training.optimizer
    recorder = recorder_of(net, False).attach(optimizer)

    def closure() -> Any:
        raise Interrupt

    for _ in range(3):
        with pytest.raises(Interrupt):
            optimizer.step(closure)
        assert len(_under_way.steps) == 1
    training.run(1)
    assert (_under_way.steps, recorder.clock.step, set(recorder.samples.values())) == ([], 1, {1})
    with pytest.raises(Interrupt):
        optimizer.step(closure)
    ref = weakref.ref(net)
    del training, net, optimizer, recorder, closure
    gc.collect()
    assert ref() is None
    _under_way.steps.clear()


def test_a_step_that_begins_while_the_error_of_another_is_handled_counts_for_itself() -> None:
    training = Training("adam", None)
    recorder = recorder_of(training.net, False).attach(training.optimizer)

    def closure() -> Any:
        raise Interrupt

    def fall_back() -> Any:
        try:
            training.optimizer.step(closure)
        except Interrupt:  # whose traceback keeps the frame of that step
            training.run(1)
        return torch.zeros(())

    fall_back()
    assert (recorder.clock.step, set(recorder.samples.values())) == (1, {1})
    training.optimizer.step(fall_back)  # both steps within this one are part of it
    assert (recorder.clock.step, set(recorder.samples.values()), _under_way.steps) == (2, {2}, [])


def test_hooks_that_are_put_on_in_the_middle_of_a_step_take_its_end() -> None:
    training = Training("adam", None).run(1)
    there: list[Recorder] = []

    def closure() -> Any:
        there.append(recorder_of(training.net, False).attach(training.optimizer))
        return torch.zeros(())

    training.optimizer.step(closure)
    assert (there[0].clock.step, there[0].samples["value/0"], there[0].samples["update/0"], _under_way.steps) == (1, 1, 0, [])
