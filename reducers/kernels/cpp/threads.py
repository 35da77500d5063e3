"""How many threads the loops use: one, for a while, if others had to be waited for."""

from __future__ import annotations

import ctypes
import time
from typing import Any

ALONE_S = 1.0  # for which one thread does all, after others had to be waited for
SLOWEST = 3e9  # bytes a second that one thread reads at least
WAIT_S = 1e-3  # a processor that another process holds is free after some milliseconds


class _Pace(ctypes.Structure):
    """What this file and `reading.cpp` share, which follow the same rule."""

    _fields_ = (
        ("alone_until", ctypes.c_double),  # seconds of the monotonic clock, which `perf_counter` is where there is a compiler
        ("alone", ctypes.c_double),
        ("slowest", ctypes.c_double),
        ("wait", ctypes.c_double),
    )


pace = _Pace(0.0, ALONE_S, SLOWEST, WAIT_S)


def in_threads(function: Any, tasks: Any, number: int, threads: int, size: int) -> int:
    """Call a loop in so many threads, or in one; return what it returns. Its results do not depend on the threads.

    All threads of OpenMP must have run before a call ends. If other processes, such as workers of a data loader, hold the
    processors, the call waits for them longer than it would take in one thread. That is noticed when it ends.

    Args:
        size: the bytes that are read.
    """
    started = time.perf_counter()
    if threads == 1 or started < pace.alone_until:
        return int(function(tasks, number, 1))
    failed = int(function(tasks, number, threads))
    ended = time.perf_counter()
    if ended - started > pace.wait + size / pace.slowest:
        pace.alone_until = ended + pace.alone
    return failed
