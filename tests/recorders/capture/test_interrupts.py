"""An exception, or somebody who reads, at every line of an observation: nothing is torn, lost or counted twice."""

from __future__ import annotations

import contextlib
import ctypes
import dis
import gc
import linecache
import random
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import recorders
import reducers
from recorders import (
    ForwardMonitor,
    Monitor,
    OptimizerStateMonitor,
    ParameterGradientMonitor,
    ParameterMonitor,
    ParameterUpdateMonitor,
    Recorder,
)
from recorders.ring.ring import COPIES
from recorders.ring.rows import LOCK
from reducers import History, Last, Moments, Norm, Product


@pytest.fixture(autouse=True)
def no_garbage() -> Iterator[None]:
    """No garbage of other tests is collected meanwhile: an exception in one of its finalizers would be told, and go nowhere."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


OURS = tuple(str(Path(package.__file__).parent) for package in (recorders, reducers))


class Interrupt(BaseException):
    """What a signal handler raises."""


def at_line(position: int, act: Callable[[], Any], run: Callable[[], Any]) -> list[tuple[str, int]]:
    """Runs, and at the line of ours that is `position`-th to be executed acts; returns the lines up to there, or all of them."""
    lines: list[tuple[str, int]] = []

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if len(lines) > position or not frame.f_code.co_filename.startswith(OURS):
            return None
        if event == "line" and not leaves_with(frame):
            lines.append((frame.f_code.co_filename, frame.f_lineno))
            if len(lines) > position:
                sys.settrace(None)
                act()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
        assert not LOCK._is_owned(), f"{lines[-1]} leaves the lock of all parameters held"  # type: ignore[attr-defined]
    return lines


def leaves_with(frame: FrameType) -> bool:
    """Whether the line that begins is a `with` that is left.

    Between the block and the call of `__exit__` a trace function can raise, and the lock stays held; a signal handler or another
    thread cannot: Python looks for their exceptions only after calls and backward jumps.
    """
    code = frame.f_code
    line = linecache.getline(code.co_filename, frame.f_lineno)
    return line.lstrip().startswith("with ") and dis.opname[code.co_code[frame.f_lasti]].startswith("LOAD_CONST")


def positions(run: Callable[[], Any], every: bool) -> list[int]:
    """Every moment at which a line of ours begins, or of each line the first."""
    met: dict[tuple[str, int], list[int]] = {}
    for position, line in enumerate(at_line(sys.maxsize, interrupt, run)):
        met.setdefault(line, []).append(position)
    return sorted({position for there in met.values() for position in (there if every else there[:1])})


def interrupt() -> None:
    raise Interrupt


class Down(torch.optim.Optimizer):
    """Takes one off all parameters."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["exp_avg"] = torch.full_like(parameter, 3)

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            torch._foreach_sub_(self.param_groups[0]["params"], 1)


class Steps:
    """Parameters of several shapes and dtypes, all that may be recorded of them, and what that has to be."""

    def __init__(self, **monitors: Monitor) -> None:
        self.net = nn.ModuleList([nn.Linear(3, 2), nn.Linear(2, 5, dtype=torch.float64), nn.Linear(200, 200)])
        for parameter in self.net.parameters():
            parameter.grad = torch.full_like(parameter, 2)
            nn.init.zeros_(parameter)
        self.recorder = Recorder(**monitors).modules(self.net, types=nn.Linear)
        self.optimizer = Down(self.net.parameters())
        self.run = self.optimizer.step
        self.kinds = [*monitors]

    def check(self) -> dict[str, int]:
        """Samples by kind of monitor, on which all parameters agree."""
        found: dict[str, int] = {}
        for kind in self.kinds:
            monitors = [monitor for name, monitor in self.recorder.items() if name.startswith(f"{kind}/")]
            assert len(monitors) == 3
            samples = {monitor.samples for monitor in monitors}
            assert len(samples) == 1, (kind, samples)
            found[kind] = samples.pop()
            for monitor in monitors:
                module = monitor.module
                assert module is not None
                for path, state in monitor.states.items():
                    elements = module.get_parameter(path).numel()
                    assert int(state["count"]) == found[kind] * elements, kind
                    mean = float(state["sum"]) / elements / found[kind] if "sum" in state else float(state["mean"])
                    wanted = {"gradient": 2, "update": -1, "state": 3}.get(kind)
                    assert wanted is None or abs(mean - wanted) < 1e-6, (kind, mean)
        return found


def all_kinds() -> Steps:
    return Steps(
        gradient=ParameterGradientMonitor(Moments()),
        value=ParameterMonitor(Moments()),
        update=ParameterUpdateMonitor(Moments()),
        state=OptimizerStateMonitor(Moments(), "exp_avg"),
    )


def one_kind(kind: str) -> Steps:
    made: dict[str, Callable[[], Monitor]] = {
        "gradient": lambda: ParameterGradientMonitor(Moments()),
        "value": lambda: ParameterMonitor(Moments()),
        "update": lambda: ParameterUpdateMonitor(Moments()),
        "state": lambda: OptimizerStateMonitor(Moments(), "exp_avg"),
    }
    return Steps(**{kind: made[kind]()})


class Calls:
    """A layer, what is recorded of it, and what that has to be."""

    def __init__(self, *shape: int) -> None:
        self.layer, self.x = nn.Identity(), torch.full(shape, 2.0)
        self.monitor = ForwardMonitor(Moments(), self.layer)
        self.run = lambda: self.layer(self.x)

    def check(self) -> dict[str, int]:
        samples, state = self.monitor.samples, self.monitor.state
        assert int(state.get("count", 0)) == samples * self.x.numel()
        assert samples == 0 or float(state["mean"]) == 2
        return {"": samples}


class Slots(Calls):
    """A history whose slots are written in a buffer; each observation holds the number of those before it."""

    def __init__(self) -> None:
        self.layer = nn.Identity()
        self.monitor = ForwardMonitor(History(Last(), duration=3.0), self.layer)
        self.run = lambda: self.layer(torch.full((200, 300), float(self.monitor.samples)))

    def check(self) -> dict[str, int]:
        samples, seen = self.monitor.samples, self.monitor.dump()
        assert seen is None or [*seen[:, 0, 0]] == [samples - 1 - back for back in range(min(samples, 3))]
        return {"": samples}


class Shapes(Calls):
    """Calls whose outputs have one of several shapes in turn."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(sizes[0])
        self.elements, self.xs = 0, [torch.full((size,), 2.0) for size in sizes]
        self.run = self._run

    def _run(self) -> None:
        x = self.xs[self.monitor.samples % len(self.xs)]
        self.layer(x)

    def check(self) -> dict[str, int]:
        samples, state = self.monitor.samples, self.monitor.state
        whole, rest = divmod(samples, len(self.xs))
        elements = whole * sum(map(len, self.xs)) + sum(map(len, self.xs[:rest]))
        assert int(state.get("count", 0)) == elements
        assert samples == 0 or float(state["mean"]) == 2
        return {"": samples}


class Saves(Shapes):
    """Whoever looks saves."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.check_only = super().check

    def check(self) -> dict[str, int]:
        part = self.monitor.saved()
        assert int(part.states.get("", {}).get("count", 0)) == int(self.monitor.state.get("count", 0))
        return self.check_only()


WHAT: dict[str, Callable[[], Steps | Calls]] = {
    "small observation": lambda: Calls(2, 3),
    "big observation": lambda: Calls(200, 300),
    "slots": Slots,
    "shapes in turn": lambda: Shapes(3, 4, 2000),
    **{kind: (lambda kind=kind: one_kind(kind)) for kind in ("gradient", "value", "update", "state")},
}


def sweep(make: Callable[[], Steps | Calls], warm: int, every: bool, reads: bool) -> None:
    """Acts at one line after another. `warm` observations come first; if there are any, the same monitors go on."""
    rig = make()
    for _ in range(warm):
        rig.run()
    chosen = positions(rig.run, every)
    assert len(chosen) > 10
    for position in chosen:
        if warm == 0:
            rig = make()
        before, seen, interrupted = rig.check(), [], False
        try:
            lines = at_line(position, (lambda rig=rig, seen=seen: seen.append(rig.check())) if reads else interrupt, rig.run)
            assert reads or len(lines) <= position, f"the exception at {lines[-1]} did not arrive"  # or it was not reached
        except Interrupt:
            interrupted = True
        after = rig.check()
        assert all(before[kind] + (not interrupted) <= after[kind] <= before[kind] + 1 for kind in before), position
        assert all(before[kind] <= found[kind] <= after[kind] for found in seen for kind in found), position
        rig.run()
        assert rig.check() == {kind: samples + 1 for kind, samples in after.items()}, position


@pytest.mark.parametrize("reads", [False, True], ids=["exception", "reader"])
@pytest.mark.parametrize(
    ("what", "warm"),
    [*[(what, 2) for what in WHAT], ("small observation", 0), pytest.param("update", 0, marks=pytest.mark.slow)],
)
def test_an_exception_or_a_reader_at_every_line_tears_loses_and_doubles_nothing(what: str, warm: int, reads: bool) -> None:
    sweep(WHAT[what], warm, False, reads)


@pytest.mark.long
@pytest.mark.parametrize("reads", [False, True], ids=["exception", "reader"])
@pytest.mark.parametrize("warm", [0, 2], ids=["first", "later"])
@pytest.mark.parametrize("what", WHAT)
def test_the_same_whenever_a_line_is_reached(what: str, warm: int, reads: bool) -> None:
    sweep(WHAT[what], warm, True, reads)


@pytest.mark.parametrize("reads", [False, True], ids=["exception", "reader"])
def test_when_the_buffer_gets_full(reads: bool) -> None:
    def nearly_full() -> Calls:
        rig = Calls(2, 3)
        for _ in range(COPIES.most):  # the first does not wait
            rig.run()
        return rig

    sweep(nearly_full, 0, True, reads)


@pytest.mark.parametrize("reads", [False, True], ids=["exception", "reader"])
@pytest.mark.parametrize("warm", [1, 4, 9])
def test_while_rings_for_several_shapes_are_made(warm: int, reads: bool) -> None:
    sweep(lambda: Shapes(3, 4, 5000), warm, False, reads)


@pytest.mark.parametrize("warm", [1, 5])
def test_a_save_at_every_line_loses_and_doubles_nothing(warm: int) -> None:
    sweep(lambda: Saves(3, 4, 5000), warm, False, True)


def test_all_kinds_of_a_step_are_bound_at_once() -> None:
    """Values, updates and states, by several reducers: all of them are recorded, or none."""
    rig = all_kinds()
    other = Recorder(ParameterMonitor(Product(norm=Norm()))).modules(rig.net, types=nn.Linear)
    rig.run()
    for position in positions(rig.run, False)[::4]:
        before = rig.check()
        with contextlib.suppress(Interrupt):
            at_line(position, interrupt, rig.run)
        after = rig.check()
        assert len({after[kind] - before[kind] for kind in ("value", "update", "state")}) == 1, position
        rig.run()
        assert {*other.samples.values()} == {rig.check()["value"]}, position


def asynchronous(times: int, seed: int) -> None:
    """Exceptions that another thread sends at any moment of steps and of calls."""
    chance = random.Random(seed)
    steps, calls = all_kinds(), Calls(2, 3)
    done, sent, came = threading.Event(), 0, 0
    ident = threading.get_ident()

    def send() -> None:
        nonlocal sent
        for _ in range(times):
            if done.wait(chance.random() * 0.004):
                return
            ready.wait()
            ready.clear()
            sent += 1
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(Interrupt))
        done.set()

    ready = threading.Event()
    sender = threading.Thread(target=send)
    sender.start()
    while sender.is_alive() or came < sent:
        try:
            ready.set()
            while True:
                steps.run()
                calls.run()
        except Interrupt:
            came += 1
            steps.check()
            calls.check()
        if came >= times:
            break
    sender.join()
    before = steps.check(), calls.check()
    steps.run()
    calls.run()
    for found, wanted in zip((steps.check(), calls.check()), before, strict=True):
        assert found == {kind: samples + 1 for kind, samples in wanted.items()}


def test_asynchronous_exceptions_tear_nothing() -> None:
    asynchronous(60, 0)


@pytest.mark.long
def test_a_thousand_asynchronous_exceptions_tear_nothing() -> None:
    asynchronous(1_000, 1)
