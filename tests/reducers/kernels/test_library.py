"""The loops in C++ are built with the package: which are used, what is said if there are none; no compiler runs later."""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from recorders import ForwardMonitor, Recorder
from reducers import Mean, Summary
from reducers.kernels import dispatch, failing
from reducers.kernels.columns import COLUMNS
from reducers.kernels.cpp import build, library, sweeping

pytestmark = pytest.mark.skipif(not library.in_order(), reason="the loops are not built")


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of a copy of what was built and of its sources, in which the library is looked for."""
    for folder in (build.LOOPS, build.GRAPHS):
        shutil.copytree(build.ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    monkeypatch.setattr(library, "ROOT", tmp_path)
    monkeypatch.setattr(build, "ROOT", tmp_path)
    return tmp_path


def loaded() -> tuple[ctypes.CDLL | None, str]:
    found: tuple[ctypes.CDLL | None, str] = library._loaded.__wrapped__()
    return found


def test_the_library_for_this_processor_is_loaded(own: Path) -> None:
    found, why = loaded()
    assert found is not None
    assert why == ""
    assert Path(found._name) == own / build.loops_for(torch.backends.cpu.get_cpu_capability())
    assert library.state() == f"the loops in C++ are those of {Path(found._name).name}"


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="this processor has no other instructions")
def test_a_processor_that_can_do_less_gets_another_library(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    found, _ = loaded()
    assert found is not None
    assert Path(found._name).name == "libloops_avx2.so"
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "NO AVX")
    found, why = loaded()
    assert found is None
    assert "are not built for this processor (NO AVX)" in why
    assert "`pip install` builds them" in why


PROGRAM = """
import sys, torch
from reducers import Moments, Summary
x = torch.randn(37, 1000, generator=torch.Generator().manual_seed(0)).mul_(3).add_(5)
print([value.tolist() for reducer in (Summary(), Moments("a b -> b", order=4)) for value in reducer.update({}, x).values()])
"""


@pytest.mark.slow
@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="this processor has no other instructions")
def test_instruction_sets_agree_to_rounding() -> None:
    found = []
    for capability in ("avx512", "avx2"):
        environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability}
        done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
        found.append([torch.tensor(values, dtype=torch.float64) for values in eval(done.stdout)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-9)


def test_every_sum_that_is_asked_for_has_a_loop() -> None:
    sums = {column.needs for column in COLUMNS.values()}
    asked = {0}
    for _ in sums:
        asked |= {one | more for one in asked for more in sums}
    for statistics in asked:
        counts_magnitudes, counts_others = statistics & 16, statistics & (1 | 2 | 32)  # no reducer asks for both
        for elements in library.ELEMENTS.values():
            there = all(library.loop_for(name, elements, statistics) is not None for name in ("sweep", "rows"))
            assert there or (counts_magnitudes and counts_others), statistics


def test_a_library_that_was_built_from_other_sources_is_not_used(own: Path) -> None:
    with (own / build.LOOPS / "accumulate.h").open("a") as file:
        file.write("// another line\n")
    found, why = loaded()
    assert found is None
    assert "was built from other sources than those beside it; run `python reducers/kernels/cpp/build.py`" in why


def test_where_there_are_no_sources_as_of_a_wheel_it_is_used(own: Path) -> None:
    for suffix in ("cpp", "h"):
        for path in own.rglob(f"*.{suffix}"):
            path.unlink()
    assert loaded()[0] is not None


@pytest.mark.parametrize("damage", ["gone", "empty", "text"])
def test_a_library_that_cannot_be_loaded_is_told(damage: str, own: Path) -> None:
    for path in own.glob(f"{build.LOOPS}/*.so"):
        path.unlink()
        if damage != "gone":
            path.write_text("" if damage == "empty" else "no library")
    found, why = loaded()
    assert found is None
    assert ("are not built" if damage == "gone" else "cannot be used") in why


def test_structs_that_differ_from_those_of_the_library_are_told(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Longer(library.Task):
        _fields_ = (("more", ctypes.c_int64),)

    monkeypatch.setattr(library, "Task", Longer)
    found, why = loaded()
    assert found is None
    assert "has other structs than its caller" in why


def test_that_there_are_no_loops_is_said_once_when_a_recorder_is_made(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    why = "the loops in C++ are not built for this processor (odd)"
    monkeypatch.setattr(library, "_loaded", lambda: (None, why))
    library.library.cache_clear()
    try:
        for _ in range(2):
            recorder = Recorder(ForwardMonitor(Mean())).modules(torch.nn.Linear(2, 2))
        assert caplog.messages == [why]
        assert (caplog.records[0].levelno, caplog.records[0].name) == (logging.WARNING, "reducers")
        for shown in (recorder.report(), recorder.overhead()):
            assert shown.loops == library.state() == why
            assert shown.troubles == (why,)
            for text in (str(shown), shown.title_shown()):
                assert why in text
    finally:
        library.library.cache_clear()


def test_report_and_overhead_say_which_loops_are_used_and_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reducers.kernels.failing._failed", [])
    recorder = Recorder(ForwardMonitor(Mean())).modules(torch.nn.Linear(2, 2))
    for shown in (recorder.report(), recorder.overhead()):
        assert (shown.loops, shown.troubles) == (library.state(), ())
        assert "C++" not in str(shown)
    with pytest.warns(RuntimeWarning):
        failing.tried(dispatch.SWEEPS, torch.device("cuda", 1), lambda: 1 / 0)
    for shown in (recorder.report(), recorder.overhead()):
        assert "the kernel that computes the statistics of a tensor failed on cuda:1" in str(shown)


def test_without_the_openmp_of_pytorch_one_thread_gives_the_same_bits(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(200_000, generator=torch.Generator().manual_seed(1))
    expected = Summary().update({}, x)

    def none() -> ctypes.CDLL:
        raise OSError("no such library")

    monkeypatch.setattr(library, "cpu_library", none)
    alone, _ = loaded()
    monkeypatch.setattr(library, "library", lambda: alone)
    swept = library.loop_for.__wrapped__("sweep", "Float32", 15)
    monkeypatch.setattr("reducers.kernels.cpp.sweeping.loop_for", lambda *_: swept)
    sweeping.call_for.cache_clear()
    try:
        found = Summary().update({}, x)
    finally:
        sweeping.call_for.cache_clear()
    for key, value in expected.items():
        assert torch.equal(found[key], value)


TRAINING = """
import sys
started = []
sys.addaudithook(lambda event, _: started.append(event) if event in ("subprocess.Popen", "os.posix_spawn", "os.fork") else None)
import torch
from recorders import BackwardMonitor, ForwardMonitor, ParameterGradientMonitor, Recorder
from reducers import Histogram, Moments, Quantile, Summary, WeightedMean
net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
recorder = Recorder(
    a=ForwardMonitor(Summary()), b=ForwardMonitor(Quantile()), c=ForwardMonitor(Histogram(low=-1.0, high=1.0, bins=10)),
    d=BackwardMonitor(Moments("b d -> d", order=4)), e=ParameterGradientMonitor(Summary()),
).modules(net, leaves=True)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
with recorder:
    for dtype in (torch.float32, torch.bfloat16):
        with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
            net(torch.randn(512, 64)).sum().backward()
        optimizer.step()
WeightedMean().update({}, torch.randn(10000), torch.rand(10000))
from reducers.kernels.cpp import library
assert library.in_order()
assert all(monitor.samples for monitor in recorder.values())
print(started)
"""


@pytest.mark.slow
def test_no_compiler_runs_in_a_training(tmp_path: Path) -> None:
    """Not at the first update of any family and dtype, whether there is a compiler or not; no home and no cache is needed."""
    environment = {name: value for name, value in os.environ.items() if name not in ("HOME", "XDG_CACHE_HOME", "CXX")}
    command = [sys.executable, "-W", "error", "-c", TRAINING]
    done = subprocess.run(command, env={**environment, "PATH": str(tmp_path)}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


def test_a_build_without_a_compiler_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert build.build(tmp_path) == "there is no C++ compiler (c++, g++, clang++)"
    assert [*tmp_path.iterdir()] == []


def test_a_compiler_that_fails_is_told_with_its_error_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "odd"
    compiler.write_text("#!/bin/sh\necho 'odd.h:1: error: no such thing' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert build.build(tmp_path / "into") == f"{compiler} failed: odd.h:1: error: no such thing"
    assert not (tmp_path / "into").exists()


def test_what_is_there_is_not_built_again(tmp_path: Path, own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To install a clone with further extras built everything anew."""
    compiler = tmp_path / "odd"
    compiler.write_text("#!/bin/sh\necho 'error: called' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert build.build(own) == ""
    with (own / build.LOOPS / "accumulate.h").open("a") as file:
        file.write("// changed")
    assert build.build(own) == f"{compiler} failed: error: called"


@pytest.mark.long
@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_what_is_built_is_loaded(tmp_path: Path, own: Path) -> None:
    for path in own.rglob("*.so"):
        path.unlink()
    assert build.build(own) == ""
    assert sorted(path.relative_to(own) for path in own.rglob("*.so")) == sorted(one.path for one in build.libraries())
    assert loaded()[0] is not None
    assert library.opened(build.READING, build.LOOPS, build.GRAPHS)[0] is not None
