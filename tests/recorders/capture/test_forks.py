"""Forks while another thread records, as data-loader workers are: the child reads and saves what is recorded, and does not hang."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import ROOT
from torch import nn

from recorders import ForwardMonitor, ParameterMonitor, ParameterUpdateMonitor, Recorder, load
from recorders._torch import CAPTURES_IN_GRAPHS
from recorders.ring.rows import LOCK
from reducers import Mean, Moments, Quantile, Summary
from reducers.kernels.locks import _locks, new_lock

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
]

SECONDS = 60


def in_child(act: Callable[[], Any]) -> int | None:
    """What the child of a fork exits with: 0 if `act` ended well; None if it hangs."""
    child = os.fork()
    if not child:
        status = 1
        try:
            torch.set_num_threads(1)  # as workers do
            act()
            status = 0
        finally:
            os._exit(status)
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def while_held(locks: list[Any], act: Callable[[], Any]) -> int | None:
    """Forks while another thread holds these locks."""
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        for lock in locks:
            lock.acquire()
        held.set()
        done.wait(2 * SECONDS)
        for lock in locks:
            lock.release()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    try:
        return in_child(act)
    finally:
        done.set()
        thread.join()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.second = nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.second(self.act(self.first(x)))
        return found


class Training:
    """A net that is recorded in every way, and one step."""

    def __init__(self, compiled: bool) -> None:
        self.net = Net()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01)
        self.recorder = Recorder(
            out=ForwardMonitor(Summary("b c -> c")),
            bins=ForwardMonitor(Quantile()),
            value=ParameterMonitor(Moments()),
            update=ParameterUpdateMonitor(Mean(), every_step=2),
        ).modules(self.net, leaves=True)
        self.recorder.attach(self.optimizer)
        self.run: Any = torch.compile(self.net, backend="aot_eager") if compiled else self.net

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.run(torch.ones(4, 8)).square().sum().backward()
        self.optimizer.step()

    def look(self, folder: Path) -> None:
        assert self.recorder.compute()
        assert self.recorder.snapshot().compute()
        self.recorder.save(folder)
        assert load(folder).compute()
        self.recorder.reset()


ENGINE = [
    pytest.param(False, id="eager"),
    pytest.param(True, id="compiled", marks=pytest.mark.skipif(not CAPTURES_IN_GRAPHS, reason="needs a later torch")),
]


@pytest.mark.slow
@pytest.mark.parametrize("compiled", ENGINE)
def test_a_child_reads_resets_and_saves_whatever_locks_other_threads_held(compiled: bool, tmp_path: Path) -> None:
    training = Training(compiled)
    for _ in range(4):
        training.step()
    locks = [*_locks]
    assert LOCK in locks
    assert all(monitor.buffer.lock in locks for monitor in training.recorder.values())
    assert while_held(locks, lambda: training.look(tmp_path / "run")) == 0
    training.step()  # the locks of this process are as they were
    training.look(tmp_path / "here")


@pytest.mark.slow
@pytest.mark.parametrize("compiled", ENGINE)
def test_forks_at_any_moment_while_another_thread_records(compiled: bool, tmp_path: Path) -> None:
    training = Training(compiled)
    for _ in range(4):
        training.step()
    done = threading.Event()

    def record() -> None:
        while not done.is_set():
            training.step()

    thread = threading.Thread(target=record)
    thread.start()
    try:
        ended = [in_child(lambda index=index: training.look(tmp_path / str(index))) for index in range(25)]
    finally:
        done.set()
        thread.join()
    assert ended == [0] * 25


def test_a_thread_that_forks_while_it_holds_a_lock_holds_it_in_the_child() -> None:
    lock = new_lock()
    with lock:
        assert in_child(lambda: lock.release()) == 0


def test_no_other_locks_are_made() -> None:
    """In a child of a fork a lock that another thread held is never free, unless `new_lock` made it, or its file sees to it."""
    found = []
    for package in ("recorders", "reducers"):
        for path in (ROOT / package).rglob("*.py"):
            text = path.read_text()
            if re.search(r"\b(R?Lock|Condition|Semaphore)\(", text) and "register_at_fork" not in text:
                found.append(path.name)
    assert sorted(found) == ["queue.py", "screen.py"]  # `writer.py` makes the one anew, the other looks at the process
