"""How the GPU benchmark measures: functions timed in turn by CUDA events, kernels counted by the profiler, memory, and waits.

On a CPU the host's clock takes the place of the events, so that everything but the GPU's own figures can be tried without one.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from measure import spread
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

__all__ = [
    "QUICK",
    "Effort",
    "Findings",
    "graphed",
    "host_time",
    "in_turn",
    "kernels_of",
    "peak_of",
    "ratios",
    "summary",
    "without_waits",
]

Function = Callable[[], Any]
Row = dict[str, Any]


@dataclass(frozen=True)
class Effort:
    """How long functions are measured.

    Attributes:
        calls: timed calls of a function in one turn.
        seconds: how long the timed calls of the slowest function take together, or longer for the sake of `least`.
        least: the least number of turns.
    """

    calls: int
    seconds: float
    least: int = 5


QUICK = Effort(calls=2, seconds=0.0, least=2)


def in_turn(functions: dict[str, Function], device: torch.device, effort: Effort) -> dict[str, list[float]]:
    """Times the functions in turn, so that a drifting machine slows all of them alike.

    A turn of a function is one call that is not timed, and several that are: the device is busy when the time begins, so what the
    host does meanwhile costs only what it costs in a training. Each function takes two calls before, to compile and to allocate.

    Returns:
        by name the milliseconds of one call, turn by turn.
    """
    for function in functions.values():
        function()
        function()
    spent: dict[str, list[float]] = {name: [] for name in functions}
    while len(spent[next(iter(functions))]) < effort.least or _longest(spent, effort) < effort.seconds:
        for name, function in functions.items():
            function()
            started = _mark(device)
            for _ in range(effort.calls):
                function()
            spent[name].append(_between(started, _mark(device)) / effort.calls)
    return spent


def _longest(spent: dict[str, list[float]], effort: Effort) -> float:
    """The seconds that the slowest function took so far."""
    return max(map(sum, spent.values())) * effort.calls / 1e3


def ratios(times: list[float], others: list[float]) -> dict[str, float]:
    """The median and the spread of the times as multiples of others, turn by turn; and the mean as a multiple of the mean."""
    found = spread([time / other for time, other in zip(times, others, strict=True)])
    return {**found, "mean": statistics.fmean(times) / statistics.fmean(others)}


def summary(times: list[float]) -> dict[str, float]:
    """The mean beside the median and the spread: what happens seldom, such as a join of many observations, is in the mean."""
    return {**spread(times), "mean": statistics.fmean(times)}


def graphed(function: Function, device: torch.device, calls: int) -> Function:
    """So many calls of a function as a CUDA graph, whose replay takes what the device takes, whatever the host does meanwhile.

    The function has been called before, so that nothing is compiled. On a CPU the calls are made one after another.
    """

    def several() -> None:
        for _ in range(calls):
            function()

    if device.type != "cuda":
        return several
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        several()
    return graph.replay


def host_time(function: Function, calls: int = 20) -> float:
    """The microseconds that the host takes for one call, while the device is still busy with others."""
    function()
    started = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - started) / calls * 1e6


def _mark(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(first: Any, last: Any) -> float:
    """The milliseconds between two marks; waits for the device."""
    if isinstance(first, float):
        return float(last - first) * 1e3
    last.synchronize()
    return float(first.elapsed_time(last))


def kernels_of(function: Function) -> list[str]:
    """The names of the kernels that a function starts on a CUDA device, copies and fills included.

    Raises:
        RuntimeError: the profiler does not see kernels on this machine.
    """
    control = torch.zeros((), device="cuda")
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the profiler's own
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            function()
            control.add_(1)
            torch.cuda.synchronize()
    events = [event for event in profiler.events() or [] if event.device_type is DeviceType.CUDA and not event.is_user_annotation]
    if not events:
        raise RuntimeError("the profiler sees no kernels on this machine, not even one that ran: launches cannot be counted")
    return [event.name for event in sorted(events, key=lambda event: event.time_range.start)[:-1]]


def peak_of(function: Function) -> int:
    """The bytes that a function takes on a CUDA device at its peak, beyond what was taken before."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@contextmanager
def without_waits() -> Iterator[None]:
    """A block in which it raises RuntimeError if the host waits for a CUDA device."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own: that the mode does not find all waits
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


class Findings:
    """Rows of what was measured, and of what was not with the reason; `keep` is called after each of them."""

    def __init__(self, keep: Callable[[Findings], None]) -> None:
        self.rows: list[Row] = []
        self.left_out: list[Row] = []
        self._keep = keep

    def add(self, row: Row, shown: str) -> None:
        """Keeps a row, and prints it: what it is of, and the figures as they should be read."""
        self.rows.append(row)
        self._keep(self)
        what = " | ".join(str(value) for value in row.values() if isinstance(value, str))
        print(f"{what}: {shown}", flush=True)

    def leave_out(self, reason: str, **of: str) -> None:
        """Keeps why something was not measured, and prints it."""
        self.left_out.append({**of, "not run": reason})
        self._keep(self)
        print(f"{' | '.join(of.values())}: not run, {reason}", flush=True)

    def tried(self, make: Callable[[], Any], **of: str) -> Any:
        """What `make` returns; None if it raises, which is kept as the reason why something was not measured."""
        try:
            return make()
        except Exception as problem:  # of one row, or of one peer: the others are measured all the same
            text = str(problem).strip().splitlines() or [""]
            self.leave_out(f"{type(problem).__name__}: {text[0][:200]}", **of)
            return None

    def working(self, functions: dict[str, Function], **of: str) -> dict[str, Function]:
        """Those of the functions that can be called."""
        before = len(self.left_out)
        for name, call in functions.items():
            self.tried(call, **of, who=name)
        failed = {row["who"] for row in self.left_out[before:]}
        return {name: call for name, call in functions.items() if name not in failed}
