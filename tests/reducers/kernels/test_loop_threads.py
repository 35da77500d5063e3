"""The loops run in one thread for a while after a call that waited for processors that other processes hold."""

from __future__ import annotations

from typing import Any

import pytest

from reducers.kernels.cpp import threads
from reducers.kernels.cpp.threads import ALONE_S, in_threads

MEGABYTE = 1 << 20


class Clock:
    """A loop, and the time that passes while it runs."""

    def __init__(self) -> None:
        self.now, self.takes = 100.0, 0.0
        self.used: list[int] = []

    def perf_counter(self) -> float:
        return self.now

    def loop(self, tasks: Any, number: int, count: int) -> int:
        self.used.append(count)
        self.now += self.takes
        return number


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(threads, "time", made)
    monkeypatch.setattr(threads.pace, "alone_until", 0.0)
    return made


def call(clock: Clock, takes: float, size: int = 25 * MEGABYTE, count: int = 8) -> int:
    clock.takes = takes
    assert in_threads(clock.loop, None, 3, count, size) == 3
    return clock.used[-1]


def test_all_threads_run_as_long_as_nobody_is_waited_for(clock: Clock) -> None:
    assert [call(clock, 0.002) for _ in range(5)] == [8] * 5
    assert call(clock, 0.3, size=2000 * MEGABYTE) == 8  # much to read
    assert call(clock, 0.0) == 8


def test_one_thread_runs_for_a_while_after_a_wait(clock: Clock) -> None:
    assert call(clock, 0.016) == 8
    assert call(clock, 0.002) == 1
    assert call(clock, 0.016) == 1  # which may have waited as well, and is no reason to go on so
    clock.now += ALONE_S
    assert call(clock, 0.002) == 8
    assert call(clock, 0.002) == 8
    assert call(clock, 0.003, size=1) == 8  # small, so this took too long
    assert call(clock, 0.0) == 1


def test_one_thread_that_is_slow_waited_for_nobody(clock: Clock) -> None:
    assert call(clock, 0.5, count=1) == 1
    assert call(clock, 0.0) == 8
