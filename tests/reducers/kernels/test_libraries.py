"""The compiled loops: what is kept is verified, what is damaged is compiled again, and what cannot be is said once.

The compiler of most tests copies a library that was compiled before, and notes that it was called.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from recorders import ForwardMonitor, Recorder
from reducers import Mean
from reducers.kernels import dispatch, failing
from reducers.kernels.loop import building, libraries, sweeping
from reducers.kernels.loop.libraries import library, state

pytestmark = pytest.mark.skipif(building.build(1, "Float32") is None, reason="no C++ compiler")

NAMED = ["-DSTATISTICS=1", "-DELEMENTS=Float32"]
NOBODY = 54321


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that works, which every user can read."""
    found, path = library("sweep.cpp", NAMED), tmp_path_factory.mktemp("compiled") / "library.so"
    assert found is not None
    shutil.copy(found._name, path)
    path.chmod(0o644)
    path.parent.chmod(0o755)
    return path


@pytest.fixture
def calls(compiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for libraries beside the file in which a compiler notes its calls; nothing was said yet."""
    folder, fake = tmp_path / "cache", tmp_path / "c++"
    folder.mkdir(mode=0o700)
    fake.write_text(f'#!/bin/sh\necho called >> {tmp_path}/calls\nfor last; do :; done\ncp {compiled} "$last"\n')
    fake.chmod(0o755)
    tmp_path.chmod(0o755)
    fresh(monkeypatch)
    monkeypatch.setattr(libraries, "_compiler", lambda: str(fake))
    monkeypatch.setattr(libraries, "_cache", lambda: folder)
    return tmp_path / "calls"


def fresh(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(libraries, "_said", {})
    patch.setattr(libraries, "_noticed", [])
    patch.setattr(libraries, "NOTICE_S", 60.0)  # the machine may be busy


def number(calls: Path) -> int:
    """How often the compiler was called."""
    return len(calls.read_text().splitlines()) if calls.exists() else 0


def in_child(work: Callable[[], Any]) -> int:
    """The exit status of a forked process that does it, negative if a signal ended it."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def works() -> None:
    found = library("sweep.cpp", NAMED)
    assert found is not None
    assert found.reducers_sweep is not None


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    **{f"cut to {length}": lambda content, length=length: content[:length] for length in (0, 1, 63, 64, 1000, 4096, 8191)},
    "cut in the middle": lambda content: content[: len(content) // 2],
    "cut by one": lambda content: content[:-1],
    **{
        f"flipped at {share}": lambda content, at=share: (
            content[: int(at * len(content))] + bytes([content[int(at * len(content))] ^ 1]) + content[int(at * len(content)) + 1 :]
        )
        for share in (0, 0.001, 0.3, 0.9)
    },
    "zeros at the end": lambda content: content[:-4096] + bytes(4096),
    "longer": lambda content: content + b"\0",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_library_is_compiled_again(damage: str, calls: Path) -> None:
    """One that was cut short would end the process by SIGBUS, now and in every later run."""
    assert in_child(works) == 0
    (path,) = (calls.parent / "cache").iterdir()
    whole = path.read_bytes()
    path.write_bytes(DAMAGES[damage](whole))
    assert in_child(works) == 0
    assert number(calls) == 2
    assert [found.read_bytes() for found in (calls.parent / "cache").iterdir()] == [whole]
    assert in_child(works) == 0
    assert number(calls) == 2


def test_a_name_without_a_library_and_a_folder_by_its_name_do_no_harm(calls: Path) -> None:
    works()
    (path,) = (calls.parent / "cache").iterdir()
    path.unlink()
    path.mkdir()
    works()
    assert number(calls) >= 2


def test_several_processes_may_compile_at_once(calls: Path) -> None:
    children = []
    for _ in range(6):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                works()
                status = 0
            finally:
                os._exit(status)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 6
    assert len([*(calls.parent / "cache").iterdir()]) == 1


def test_a_folder_from_which_nothing_can_be_loaded_is_told_once(
    calls: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    load = libraries.ctypes.CDLL

    def refuses(path: str) -> Any:
        if path.startswith(str(calls.parent / "cache")):
            raise OSError("failed to map segment from shared object")
        return load(path)

    monkeypatch.setattr(libraries.ctypes, "CDLL", refuses)
    for _ in range(2):
        works()
    (told,) = caplog.messages
    assert "compiled again in every process" in told
    assert "failed to map segment" in told
    assert "XDG_CACHE_HOME" in told
    assert state() == told


def test_a_compiler_that_is_killed_is_run_again(calls: Path, caplog: pytest.LogCaptureFixture) -> None:
    fake = calls.parent / "c++"
    fake.write_text(fake.read_text().replace("for last", f"[ $(wc -l < {calls}) = 1 ] && kill -9 $$\nfor last"))
    works()
    assert number(calls) == 2
    assert caplog.messages == []


def test_an_interrupt_while_it_compiles_leaves_nothing_behind(calls: Path) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    fake = calls.parent / "c++"
    quick = fake.read_text()
    fake.write_text(quick.replace("for last", "exec sleep 60\nfor last"))
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(KeyboardInterrupt):
            works()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert [*(calls.parent / "cache").iterdir()] == []
    fake.write_text(quick)
    works()
    assert libraries.in_order()


def test_a_compiler_that_fails_is_told_once_with_its_error(calls: Path, caplog: pytest.LogCaptureFixture) -> None:
    (calls.parent / "c++").write_text("#!/bin/sh\necho one >&2\necho 'x.cpp: error: no such header' >&2\necho three >&2\nexit 1\n")
    for _ in range(2):
        assert library("sweep.cpp", NAMED) is None
    (told,) = caplog.messages
    assert "x.cpp: error: no such header" in told
    assert "PyTorch's own operations" in told
    assert not libraries.in_order()
    assert state() == told


def test_a_full_disk_is_another_folder(calls: Path, caplog: pytest.LogCaptureFixture) -> None:
    fake = calls.parent / "c++"
    full = f'case "$last" in {calls.parent}/cache/*) echo "No space left on device" >&2; exit 1;; esac\ncp '
    fake.write_text(fake.read_text().replace("cp ", full))
    works()
    (told,) = caplog.messages
    assert "No space left on device" in told


def test_a_compiler_that_takes_long_is_told_of_once(
    calls: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake = calls.parent / "c++"
    fake.write_text(fake.read_text().replace("for last", "sleep 0.3\nfor last"))
    monkeypatch.setattr(libraries, "NOTICE_S", 0.01)
    works()
    assert library("sweep.cpp", [*NAMED, "-DOTHER"]) is not None
    assert caplog.messages == [
        f"compiling the loops in C++ for this processor, which takes seconds; they are kept in {calls.parent}/cache"
    ]
    assert libraries.in_order()


def test_without_a_compiler_it_is_told_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    fresh(monkeypatch)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    libraries._compiler.cache_clear()
    try:
        for _ in range(2):
            assert library("sweep.cpp", NAMED) is None
        (told,) = caplog.messages
        assert "there is no C++ compiler (c++, g++, clang++)" in told
        assert caplog.records[0].levelno == logging.WARNING
        assert caplog.records[0].name == "reducers"
        assert state() == told
    finally:
        libraries._compiler.cache_clear()


def test_the_state_says_which_compiler_and_where(calls: Path) -> None:
    assert state() == f"the loops in C++ are compiled by {calls.parent}/c++ and kept in {calls.parent}/cache"
    assert libraries.in_order()


def test_report_and_overhead_say_where_loops_are_and_what_is_wrong(calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reducers.kernels.failing._failed", [])
    recorder = Recorder(ForwardMonitor(Mean())).modules(torch.nn.Linear(2, 2))
    for shown in (recorder.report(), recorder.overhead()):
        assert (shown.loops, shown.troubles) == (state(), ())
        assert "compiled by" in shown.loops
        assert "C++" not in str(shown)
    libraries._say("failed", "the loops in C++ cannot be compiled: odd")
    with pytest.warns(RuntimeWarning):
        failing.tried(dispatch.SWEEPS, torch.device("cuda", 1), lambda: 1 / 0)
    for shown in (recorder.report(), recorder.overhead()):
        assert shown.loops == "the loops in C++ cannot be compiled: odd"
        assert len(shown.troubles) == 2
        for text in (str(shown), shown.title_shown()):
            assert "cannot be compiled: odd" in text
            assert "the kernel that computes the statistics of a tensor failed on cuda:1" in text


def readable_by_others(path: Path) -> bool:
    return all(parent.stat().st_mode & 0o005 == 0o005 for parent in (path, *path.parents))


as_root = pytest.mark.skipif(
    sys.platform != "linux" or os.getuid() != 0 or not readable_by_others(Path(torch.__file__).parent),
    reason="needs root, to become another user, and a PyTorch that other users can read",
)


def as_nobody(calls: Path, cache: str | None, work: Callable[[], Any]) -> tuple[int, list[str]]:
    """The exit status of a child that is of a user without an entry in passwd, and without HOME; and what it said."""
    said = calls.parent / "said"
    said.touch()
    said.chmod(0o666)

    def run() -> None:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        for name in ("HOME", "USER", "LOGNAME", "XDG_CACHE_HOME"):
            os.environ.pop(name, None)
        if cache is not None:
            os.environ["XDG_CACHE_HOME"] = cache
        libraries._cache.cache_clear()
        libraries._own_folder.cache_clear()
        building.build.cache_clear()
        sweeping.call_for.cache_clear()
        handler = logging.FileHandler(said)
        logging.getLogger("reducers").addHandler(handler)
        work()

    return in_child(run), said.read_text().splitlines()


def updates() -> None:
    x = torch.arange(100000.0).reshape(1000, 100)
    for pattern in ("a b ->", "a b -> b"):
        found = Mean(pattern).compute(Mean(pattern).update({}, x))
        assert torch.as_tensor(found).mean().item() == 49999.5
    works()


@pytest.fixture
def real_cache(calls: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder is found as it is in production; the compiler notes its calls."""
    monkeypatch.undo()
    fresh(monkeypatch)
    fake = calls.parent / "c++"
    monkeypatch.setattr(libraries, "_compiler", lambda: str(fake))
    for parent in (calls.parent, *calls.parent.parents):
        if parent == Path(tempfile.gettempdir()):
            break
        parent.chmod(0o755)
    calls.touch()
    calls.chmod(0o666)
    return calls


@as_root
def test_a_user_without_passwd_and_home_records_and_is_told_once(real_cache: Path) -> None:
    status, said = as_nobody(real_cache, None, updates)
    assert status == 0
    assert len(said) == 1
    assert "a user who has no home" in said[0]
    assert number(real_cache) > 0


@as_root
def test_a_folder_that_cannot_be_written_is_told_once(real_cache: Path) -> None:
    folder = real_cache.parent / "readonly"
    folder.mkdir(mode=0o555)
    status, said = as_nobody(real_cache, str(folder), updates)
    assert status == 0
    assert len(said) == 1
    assert "PermissionError" in said[0]
    assert [*folder.iterdir()] == []


@as_root
def test_where_no_folder_can_be_written_it_is_recorded_without_the_loops(real_cache: Path) -> None:
    def work() -> None:
        tempfile.tempdir = "/nowhere"
        x = torch.arange(100000.0)
        assert Mean().compute(Mean().update({}, x)).item() == 49999.5

    status, said = as_nobody(real_cache, None, work)
    assert status == 0
    assert len(said) == 2
    assert "no folder can be written" in said[1]


ALONE = """
import os
os.setgid(54321); os.setuid(54321)
import torch, recorders
from reducers import Summary
layer = torch.nn.Identity()
monitor = recorders.ForwardMonitor(Summary("a b -> b"), layer)
layer(torch.ones(1000, 100))
assert monitor.samples == 1, monitor.last_error
print(monitor.peek()["mean"].mean().item())
"""


@as_root
@pytest.mark.slow
def test_a_whole_program_of_a_user_without_home(tmp_path: Path) -> None:
    """From the import on, as in a container that is started with another user."""
    if not all(readable_by_others(path) for path in map(Path, sys.path) if path.is_dir()):
        pytest.skip("other users cannot read this Python")
    environment = {name: value for name, value in os.environ.items() if name not in ("HOME", "USER", "LOGNAME", "XDG_CACHE_HOME")}
    done = subprocess.run([sys.executable, "-c", ALONE], env=environment, cwd="/", capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "1.0\n"), done.stderr
    assert done.stderr.count("a user who has no home") == 1
