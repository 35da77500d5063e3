"""Saves to one place land in the order in which they were asked for; a save that was cancelled does not happen."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from recorders import ForwardMonitor, Recorder, Recording, Subrecording, load, save
from recorders.errors import StorageError
from recorders.recordings.storage import save as save_module
from recorders.recordings.storage.commit import Commit
from recorders.recordings.storage.save import Turn, save_in_background
from reducers import Mean, Sum


def recording(value: float) -> Recording:
    return Recording({"loss": Subrecording(Mean(), {"": Mean().update({}, torch.tensor(value))}, samples=1)})


class Held:
    """The first save after this waits in its commit until `go`; others that overtake it are seen in `entered`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.inside, self.entered = threading.Event(), threading.Event(), list[str]()
        enter = Commit.__enter__

        def entering(commit: Commit) -> Commit:
            self.entered.append(threading.current_thread().name)
            if len(self.entered) == 1:
                self.inside.set()
                assert self.go.wait(60)
            return enter(commit)

        monkeypatch.setattr(Commit, "__enter__", entering)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    return Held(monkeypatch)


def test_background_saves_land_in_the_order_of_their_calls(tmp_path: Path, held: Held) -> None:
    net, path = nn.Linear(2, 1), tmp_path / "run"
    recorder = Recorder(ForwardMonitor(Sum())).modules(net)
    saves: list[Future[Any]] = []
    for _ in range(12):
        net(torch.ones(1, 2))
        saves.append(recorder.save_in_background(path))
    assert held.inside.wait(60)
    time.sleep(0.2)
    assert len(held.entered) == 1  # none overtakes
    held.go.set()
    for saving in saves:
        assert saving.result(60) == path
    assert load(path).samples[0] == 12


def test_a_save_waits_for_those_in_the_background_before_it(tmp_path: Path, held: Held) -> None:
    before = save_in_background(recording(1.0), tmp_path / "run")
    assert held.inside.wait(60)
    threading.Timer(0.3, held.go.set).start()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    save(recording(2.0), os.path.join(tmp_path, "x", "..", "run"))
    assert before.done()
    assert load(tmp_path / "run").compute() == {"loss": 2.0}


def test_threads_that_save_to_one_place_do_so_in_turn(tmp_path: Path, held: Held) -> None:
    calls, landed = threading.Lock(), list[float]()
    publish = Commit.publish

    def asked(value: float) -> None:
        with calls:
            saves.append((value, save_in_background(recording(value), tmp_path / "run")))

    saves: list[tuple[float, Future[Any]]] = []
    threads = [threading.Thread(target=asked, args=(float(value),)) for value in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    held.go.set()
    for value, saving in saves:
        saving.add_done_callback(lambda _, value=value: landed.append(value))  # type: ignore[misc]
    for _, saving in saves:
        saving.result(60)
    assert landed == [value for value, _ in saves]
    assert load(tmp_path / "run").compute() == {"loss": saves[-1][0]}
    assert Commit.publish is publish


def test_other_places_do_not_wait(tmp_path: Path, held: Held) -> None:
    first = save_in_background(recording(1.0), tmp_path / "a")
    assert held.inside.wait(60)
    save(recording(2.0), tmp_path / "b")
    assert not first.done()
    held.go.set()
    first.result(60)


def test_a_cancelled_save_does_not_happen_and_one_that_began_is_not_cancelled(tmp_path: Path, held: Held) -> None:
    first, second, third = (save_in_background(recording(value), tmp_path / "run") for value in (1.0, 2.0, 3.0))
    assert held.inside.wait(60)
    assert first.running()
    assert not first.cancel()
    assert third.cancel()
    held.go.set()
    assert second.result(60) == tmp_path / "run"
    with pytest.raises(CancelledError):
        third.result(60)
    for thread in threading.enumerate():
        if thread.name.startswith("save "):
            thread.join(60)
    assert len(held.entered) == 2
    assert load(tmp_path / "run").compute() == {"loss": 2.0}
    assert not save_module._asked


def test_a_save_that_fails_lets_the_next_one_begin(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("x")
    with pytest.raises(Exception, match="is a file"):
        save(recording(1.0), tmp_path / "run")
    with pytest.raises(ValueError, match="layout"):
        save(recording(1.0), tmp_path / "run", layout="none")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="layout"):
        save_in_background(recording(1.0), tmp_path / "run", layout="none").result(60)  # type: ignore[arg-type]
    (tmp_path / "run").unlink()
    save(recording(2.0), tmp_path / "run")
    assert not save_module._asked


def test_a_turn_that_was_lost_holds_nobody_up(tmp_path: Path) -> None:
    Turn(tmp_path / "run").hand_over()  # the thread never came to be
    save(recording(2.0), tmp_path / "run")


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals and forks")
@pytest.mark.parametrize("inside", ["signal", "fork"])
def test_a_save_within_a_save_and_after_a_fork_does_not_wait_for_ever(
    inside: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other: list[Callable[[], Any]] = [lambda: save(recording(5.0), tmp_path / "run")]
    prepare, statuses = Commit.__enter__, list[int]()

    def entering(commit: Commit) -> Commit:
        if other:
            call = other.pop()
            if inside == "signal":
                signal.signal(signal.SIGUSR1, lambda *_: call())
                os.kill(os.getpid(), signal.SIGUSR1)
            elif (child := os.fork()) == 0:
                signal.alarm(60)
                call()
                os._exit(0)
            else:
                statuses.append(os.waitpid(child, 0)[1])
        return prepare(commit)

    monkeypatch.setattr(Commit, "__enter__", entering)
    before = signal.getsignal(signal.SIGUSR1)
    try:
        save(recording(1.0), tmp_path / "run")
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert statuses == [0] * (inside == "fork")
    assert load(tmp_path / "run").compute() == {"loss": 1.0}


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
def test_a_save_in_a_handler_that_came_within_a_save_there_says_so_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enter, told = Commit.__enter__, list[str]()

    def entered(commit: Commit) -> Commit:
        found = enter(commit)
        if not told:
            os.kill(os.getpid(), signal.SIGUSR1)
        return found

    def handler(*_: object) -> None:
        told.append("called")
        save(recording(4.0), tmp_path / "other")
        with pytest.raises(StorageError, match=r"a handler of a signal came while this thread was saving there"):
            save(recording(5.0), tmp_path / "run")
        told.append("told")

    monkeypatch.setattr(Commit, "__enter__", entered)
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        save(recording(1.0), tmp_path / "run")
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert told[-1] == "told"
    assert load(tmp_path / "run").compute() == {"loss": 1.0}
    save(recording(2.0), tmp_path / "run")


def test_a_save_in_the_background_goes_where_the_program_was(tmp_path: Path, held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    future = save_in_background(recording(1.0), "run")
    monkeypatch.chdir(tmp_path / "elsewhere")
    held.go.set()
    future.result(60)
    assert load(tmp_path / "run").compute() == {"loss": 1.0}
