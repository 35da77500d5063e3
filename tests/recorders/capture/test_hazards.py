"""What real networks do to hooks: the minimal cases that no other file has, and the counts that must be zero."""

from __future__ import annotations

import ctypes
import gc
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from recorders import (
    BackwardInputMonitor,
    BackwardMonitor,
    DifferenceMonitor,
    ForwardInputMonitor,
    ForwardMonitor,
    Monitor,
    OptimizerStateMonitor,
    ParameterGradientMonitor,
    ParameterMonitor,
    ParameterUpdateMonitor,
    Recorder,
    StateMonitor,
)
from recorders.capture.context import capturing
from recorders.capture.operands import recomputing
from reducers import Collect, Count, Last, Max, Mean, Moments, Product, Sum


def test_a_module_with_two_names_called_three_times_is_recorded_three_times() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(2, 2)
            self.second = self.first

        def forward(self, x: Tensor) -> Tensor:
            return self.first(self.second(self.first(x)))

    net = Twice()
    recorder = Recorder(out=ForwardMonitor(Count()), back=BackwardMonitor(Count())).modules(net, types=nn.Linear)
    net(torch.ones(1, 2)).sum().backward()
    assert {name: recorder.samples[name] for name in recorder} == {"out/first": 3, "back/first": 3}
    assert recorder["out/second"] is recorder["out/first"]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_attributes_and_inputs_of_checkpointed_modules_are_recorded_once(use_reentrant: bool) -> None:
    """The recomputation is stopped before the last module returns; hooks that are always called get None there."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x.tanh()

    net = nn.Sequential(nn.Linear(2, 2), Counting(), nn.Linear(2, 2), Counting())
    attributes = Recorder(
        state=StateMonitor(Collect(), "calls"), difference=DifferenceMonitor(Collect(), "calls"), inp=ForwardInputMonitor(Count())
    ).modules(net, types=Counting)
    for _ in range(2):
        checkpoint(net, torch.ones(1, 2, requires_grad=True), use_reentrant=use_reentrant).sum().backward()
    assert list(attributes.samples.values()) == [2] * 6
    assert attributes["difference/1"].peek().tolist() == attributes["difference/3"].peek().tolist() == [1, 1]
    assert attributes["state/3"].peek()[0] == 1
    assert all(monitor.last_error is None for monitor in attributes.values())


def test_transforms_of_functions_pass_by_gradient_monitors() -> None:
    net = nn.Sequential(nn.Linear(3, 2), nn.Tanh())
    parameters, x = dict(net.named_parameters()), torch.randn(4, 3)

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(net, parameters, (x,)).square().sum()

    alone = torch.func.grad(loss)(parameters, x), torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
    recorder = Recorder(back=BackwardMonitor(Count()), inp=BackwardInputMonitor(Count()), out=ForwardMonitor(Count())).modules(net)
    watched = torch.func.grad(loss)(parameters, x), torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
    for before, after in zip(alone, watched, strict=True):
        assert all(before[name].equal(after[name]) for name in parameters)
    assert set(recorder.samples.values()) == {0}
    assert all(monitor.last_error is None for monitor in recorder.values())
    loss(parameters, x).backward()  # functional_call alone is an ordinary call, of other parameters
    assert recorder.samples["out/0"] == recorder.samples["back/0"] == 1


def test_a_view_of_the_output_that_is_changed_in_place_leaves_its_gradient_right() -> None:
    layer = nn.Linear(2, 4)
    monitor = BackwardMonitor(Last(), layer)
    out = layer(torch.ones(3, 2))
    out[:, 2:].mul_(5)
    out.sum().backward()
    assert monitor.peek().tolist() == [[1, 1, 5, 5]] * 3


def test_no_storage_is_retained() -> None:
    """Activations, inputs, gradients and loss are gone after each step, without the cycle collector."""
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Linear(4, 2))
    kept: list[StorageWeakRef] = []

    def look(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        kept.extend(StorageWeakRef(tensor.untyped_storage()) for tensor in (*args, output))
        output.register_hook(lambda gradient: kept.append(StorageWeakRef(gradient.untyped_storage())))

    for module in net:
        module.register_forward_hook(look)
    numbers = Product(mean=Mean(), moments=Moments("b c -> c"), last=Last())
    recorders = [
        Recorder(
            out=ForwardMonitor(numbers),
            inp=ForwardInputMonitor(numbers),
            back=BackwardMonitor(numbers, op_=lambda gradient, output: gradient * output),
            back_inp=BackwardInputMonitor(numbers),
        ).modules(net),
        Recorder(
            grad=ParameterGradientMonitor(Last()),
            each=ParameterGradientMonitor(Last(), when="accumulate"),
            value=ParameterMonitor(Last()),
            update=ParameterUpdateMonitor(Last()),
            state=OptimizerStateMonitor(Last(), "exp_avg"),
        ).modules(net),
    ]
    optimizer = torch.optim.Adam(net.parameters())
    gc.collect()
    gc.disable()
    try:
        for _ in range(20):
            net(torch.randn(5, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        retained = sum(not storage.expired() for storage in kept)
    finally:
        gc.enable()
    assert len(kept) == 20 * (8 + 4)
    assert retained == 0
    assert {samples for recorder in recorders for samples in recorder.samples.values()} == {0, 20}
    assert {row.name for recorder in recorders for row in recorder.report().silent} == {"back_inp/0", "back_inp"}


def test_four_threads_of_5000_calls_lose_no_updates() -> None:
    layer = nn.Identity()
    recorder = Recorder(out=ForwardMonitor(Product(n=Count(), total=Sum())), inp=ForwardInputMonitor(Max())).modules(layer)
    x = torch.ones(1)

    def work() -> None:
        with torch.no_grad():
            for _ in range(5000):
                layer(x)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(recorder.samples.values()) == [4 * 5000] * 2
    assert {name: int(value) for name, value in recorder["out"].peek().items()} == {"n": 4 * 5000, "total": 4 * 5000}


class Interrupt(BaseException):
    """Thrown into a thread from outside, between any two instructions."""


def interrupt(call: Callable[[], None], monitors: list[Monitor], times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Throws into `call`, at work in another thread. The state is of before or of after the observation that was interrupted, and
    neither a lock nor a flag is left behind. An observation is of three ones."""
    inside: queue.SimpleQueue[None] = queue.SimpleQueue()
    landed: queue.SimpleQueue[str] = queue.SimpleQueue()
    finished = False
    torn: list[object] = []
    calls = 0
    last: list[int] = []
    flags: list[bool] = []

    def whole() -> bool:
        found = [(monitor.peek(), 3 * monitor.samples) for monitor in monitors]
        return all(int(result["n"]) == int(result["total"]) == numbers for result, numbers in found if result is not None)

    def interrupted() -> None:
        nonlocal calls
        try:
            inside.put(None)
            while not finished:
                call()
                calls += 1
        except Interrupt:
            flags.append(capturing() or recomputing() or not torch.is_grad_enabled())
            if not whole():
                torn.append([monitor.snapshot() for monitor in monitors])
            landed.put("caught")

    def work() -> None:
        while not finished:
            try:
                interrupted()
            except Interrupt:  # outside of a call
                landed.put("lost")
        before = [monitor.samples for monitor in monitors]
        call()
        last.extend(monitor.samples - samples for monitor, samples in zip(monitors, before, strict=True))

    def dropped(unraisable: Any) -> None:
        """Python drops what is raised in the callback of a weak reference."""
        if issubclass(unraisable.exc_type, Interrupt):
            landed.put("lost")

    monkeypatch.setattr(sys, "unraisablehook", dropped)
    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    for delay in (torch.rand(times, generator=torch.Generator().manual_seed(0)) * 2e-3).tolist():
        inside.get(timeout=20)
        outcome = "lost"
        while outcome == "lost":
            time.sleep(delay)  # lands anywhere in the work of a call
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(worker.ident or 0), ctypes.py_object(Interrupt))
            outcome = landed.get(timeout=20)
    finished = True
    worker.join(timeout=20)
    assert torn == []
    assert flags == [False] * times
    assert all(calls <= monitor.samples <= calls + times + 1 for monitor in monitors)
    assert last == [1] * len(monitors)
    samples = [monitor.samples for monitor in monitors]
    call()  # from another thread: no lock was left behind
    assert [monitor.samples for monitor in monitors] == [number + 1 for number in samples]
    assert whole()


def test_400_asynchronous_exceptions_tear_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(2, 2)
    monitors: list[Monitor] = [
        ForwardMonitor(Product(n=Count(), total=Sum(), moments=Moments()), layer, op_=lambda output, inputs: torch.ones(3)),
        ForwardInputMonitor(Product(n=Count(), total=Sum()), layer, map_=lambda inputs: (torch.ones(3),)),
    ]

    def call() -> None:
        layer(torch.ones(1, 2))

    interrupt(call, monitors, 400, monkeypatch)


def test_400_asynchronous_exceptions_through_backward_tear_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU a backward runs in the thread that calls it, and so do the hooks on tensors and parameters."""

    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.by = nn.Parameter(torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.by

    net = nn.Sequential(Shift(), Shift(), Shift())
    numbers = Product(n=Count(), total=Sum(), moments=Moments())
    monitors: list[Monitor] = [
        BackwardMonitor(numbers, net[0]),
        BackwardInputMonitor(numbers, net[1]),
        ParameterGradientMonitor(numbers, "by", net[0], when="accumulate"),
        ParameterGradientMonitor(numbers, "by", net[2], when="accumulate"),
    ]

    def call() -> None:
        net.zero_grad()
        net(torch.ones(3)).sum().backward()

    interrupt(call, monitors, 400, monkeypatch)
