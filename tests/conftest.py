"""Fixtures for tests at any depth. The helpers beside this file are imported by name: see `pythonpath` in pyproject.toml."""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis  # before garbage is frozen: its plugins ask who refers to what
import pytest
import torch
from interpreted_hints import check_hints
from no_skips import pytest_make_collect_report, pytest_runtest_makereport  # noqa: F401  which pytest finds here
from world import SIZE, World

from reducers.kernels import dispatch, waiting
from reducers.kernels.cpp import threads

# Tests take loops and kernels away, of which the compiler's key for what it keeps of whole programs knows nothing.
os.environ.setdefault("TORCHINDUCTOR_AUTOGRAD_CACHE", "0")

hypothesis.settings.register_profile("any machine", deadline=None)  # tests assert no times
hypothesis.settings.load_profile("any machine")

if "PYTEST_XDIST_WORKER" in os.environ:  # there is a worker for each core, and processes that tests start inherit this
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)


BEGIN = pytest.StashKey[float]()  # of the first test of this process


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cases-each", type=int, metavar="N", help="run at most N cases of each test, the same ones every time")
    parser.addoption("--seconds", type=float, metavar="N", help="skip tests that would begin N seconds after the first or later")


@pytest.hookimpl(trylast=True)  # after -m and -k
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Hundreds of cases take minutes, and if one fails others do. CI runs some, spread over their order by a hash of the name."""
    most = config.getoption("--cases-each")
    if most is None:
        return
    cases = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item)
    chosen = {id(item) for of in cases.values() for item in sorted(of, key=lambda item: zlib.crc32(item.nodeid.encode()))[:most]}
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in chosen])
    items[:] = [item for item in items if id(item) in chosen]


def pytest_runtest_setup(item: pytest.Item) -> None:
    seconds = item.config.getoption("--seconds")
    if seconds is not None and time.monotonic() > item.config.stash.setdefault(BEGIN, time.monotonic()) + seconds:
        pytest.skip(f"the {seconds:g} seconds that this run may take are over")


def pytest_configure(config: pytest.Config) -> None:
    """Triton's interpreter computes by numpy, which warns of what a GPU does in silence: the sum of inf and -inf, say."""
    if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None:
        check_hints()
        for told in ("All-NaN slice encountered", "invalid value encountered", "overflow encountered"):
            config.addinivalue_line("filterwarnings", f"ignore:{told}:RuntimeWarning")


def pytest_collection_finish() -> None:
    """What was imported and collected is left out of collections of garbage from now on, which many tests ask for."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> Iterator[None]:
    """So is what the tests of a file have imported, compiled and cached: it took a quarter of a second each time in the end."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture
def alone() -> None:
    """Takes off what other tests of the process left on, to count the calls of a step: it is asked at each step of any optimizer.

    A net that was left in a cycle when garbage was frozen stays, with what is on it.
    """
    from recorders.schedule.notices import notices
    from recorders.schedule.steps import _steps

    for monitor in [monitor for monitors in [*_steps.monitors.values()] for monitor in monitors]:
        monitor.deregister()
    _steps.told = ()  # of nets that were freed, while their recorders were not
    notices.clear()


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Nothing is compiled and nothing is counted before the test; what it compiles does not outlive it."""
    import torch._dynamo  # here, as most tests compile nothing and need not wait for it
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def processes(tmp_path_factory: pytest.TempPathFactory, size: int) -> Iterator[World]:
    with pytest.MonkeyPatch.context() as patch:
        if sys.platform == "linux":
            patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        world = World(tmp_path_factory.mktemp("world"), size=size)
        yield world
        world.close()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Two processes."""
    yield from processes(tmp_path_factory, 2)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """`SIZE` processes."""
    yield from processes(tmp_path_factory, SIZE)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Four processes."""
    yield from processes(tmp_path_factory, 4)


def take_no_loop(patch: pytest.MonkeyPatch) -> None:
    """The loops in C++ take no tensor, as without a compiler, or on a device that has none."""
    patch.setattr("reducers.kernels.dispatch.loop_plan", lambda *_: None)
    patch.setattr("reducers.kernels.dispatch.looped_weights", lambda *_: None)
    patch.setattr("reducers.kernels.counting.looped_bits", lambda *_: None)
    patch.setattr("reducers.kernels.counting.looped_edges", lambda *_: None)
    patch.setattr("reducers.kernels.digests.looped_digests", lambda *_: None)
    patch.setattr("reducers.kernels.sketches.looped_sketches", lambda *_: None)
    patch.setattr("recorders.graphs.trace.can_record", lambda: False)
    patch.delitem(dispatch.ROWS, "cpu", raising=False)
    patch.delitem(waiting.SLOTS, "cpu", raising=False)


@pytest.fixture
def without_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """No loop in C++ takes a tensor, as on a GPU."""
    take_no_loop(monkeypatch)


@pytest.fixture(params=["the loop", "plain calls"])
def with_and_without_a_compiler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The loops in C++ reduce CPU tensors if there is a compiler, and PyTorch's calls do if not."""
    if request.param == "plain calls":
        take_no_loop(monkeypatch)
    way: str = request.param
    return way


@pytest.fixture
def at_several_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[], Any]], list[Any]]]:
    """Calls a function with 1, 2 and 3 threads, and returns what it returned; the loops do not resort to one of them."""
    monkeypatch.setattr(threads.pace, "alone_until", 0.0)
    monkeypatch.setattr(threads.pace, "wait", float("inf"))
    before = torch.get_num_threads()

    def results(function: Callable[[], Any]) -> list[Any]:
        found = []
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            found.append(function())
        return found

    yield results
    torch.set_num_threads(before)
