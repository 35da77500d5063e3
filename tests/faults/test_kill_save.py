"""Saves that are killed, run out of disk or race: the folder holds the old recording or the new one, whole, never a mixture.

Run as a script, this file is the driver: it forks the processes that save, kills them, and prints what it then finds.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from recorders import Recording, Subrecording
from recorders.errors import NotARecordingError, StorageError
from recorders.recordings.loading import load
from recorders.recordings.storage import save
from reducers import Sum

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

SYSCALLS = ("open", "write", "fsync", "replace", "mkdir", "unlink", "rmdir", "listdir", "close")


def recording(step: int, parts: int = 3) -> Recording:
    """A recording in which everything says `step`."""
    part = Subrecording(Sum(), {"": {"sum": torch.full((50,), float(step), dtype=torch.float64)}}, samples=step)
    return Recording({f"layer.{i}": part for i in range(parts)})


def step_of(found: Recording, parts: int = 3) -> int:
    """The step that everything in the recording says."""
    assert len(found) == parts
    steps = {part.samples for part in found.values()}
    for part in found.values():
        assert part.values is not None
        steps |= {int(x) for tensor in (part.states[""]["sum"], part.values[""]) for x in tensor.unique()}
    (step,) = steps
    return step


def left(root: Path) -> list[str]:
    """The kinds of things in the folder."""
    return sorted(path.name.partition("-")[0] for path in root.iterdir())


@contextmanager
def at_call(number: int, strike: Callable[[], None]) -> Iterator[Callable[[], int]]:
    """Does `strike` instead of the call of that number, counted from 0, into the operating system."""
    counter, real = itertools.count(), {name: getattr(os, name) for name in SYSCALLS}
    made = 0

    def wrap(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal made
            made = next(counter)
            if made == number:
                if name == "close":
                    real["close"](*args)
                strike()
            return real[name](*args, **kwargs)

        return call

    for name in SYSCALLS:
        setattr(os, name, wrap(name))
    try:
        yield lambda: made + 1
    finally:
        for name in SYSCALLS:
            setattr(os, name, real[name])


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_failing_at_every_call(tmp_path: Path, code: int) -> None:
    def fail() -> None:
        raise OSError(code, os.strerror(code))

    outcomes = []
    for number in itertools.count():
        root = tmp_path / str(number)
        save(recording(1), root)
        reason = ""
        try:
            with at_call(number, fail) as made:
                save(recording(2), root)
        except StorageError as error:
            reason = str(error)
        found = step_of(load(root))
        if reason:
            assert os.strerror(code) in reason
            outcomes.append({1: "old", 2: "new"}[found])
        else:
            assert found == 2
            outcomes.append("saved")
        save(recording(3), root)
        assert step_of(load(root)) == 3
        assert left(root) == [".lock", "generation", "manifest.json"]
        if made() <= number:
            break
    assert len(outcomes) > 25
    # Failures before the rename keep the old recording; none after it brings the old one back, and cleaning up may fail unseen.
    committed = outcomes.index("new")
    assert outcomes[:committed].count("old") > 20
    assert set(outcomes[committed:]) == {"new", "saved"}


def test_disk_full_during_a_first_save_leaves_room(tmp_path: Path) -> None:
    def fail() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with at_call(12, fail), pytest.raises(StorageError, match="No space left"):
        save(recording(1), tmp_path / "run")
    assert left(tmp_path / "run") == [".lock"]


def drive(mode: str, root: Path, rounds: int) -> list[dict[str, Any]]:
    command = [sys.executable, str(Path(__file__)), mode, str(root), str(rounds)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120 + 2 * rounds, env=environment)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_killed_at_every_call(tmp_path: Path) -> None:
    rounds = drive("calls", tmp_path / "run", 0)
    steps = [row["step"] for row in rounds]
    assert rounds[-1]["killed"] is False
    assert all(row["killed"] for row in rounds[:-1])
    assert steps == sorted(steps)
    assert set(steps) == {1, 2}
    assert len(steps) > 25


def test_first_save_killed_at_every_call(tmp_path: Path) -> None:
    rounds = drive("first", tmp_path / "run", 0)
    steps = [row["step"] for row in rounds]
    assert steps == sorted(steps)
    assert set(steps) == {0, 2}


def kill_at_random(root: Path, rounds: int) -> None:
    found = drive("random", root, rounds)
    assert len(found) == rounds
    for row in found:
        # What save returned from is there; one more save may have been complete, and killed before it could say so.
        assert row["step"] in (row["said"], row["said"] + 1)
    steps = [0, *(row["step"] for row in found)]
    assert all(before < after for before, after in itertools.pairwise(steps))
    save(recording(0, 30), root)
    assert left(root) == [".lock", "generation", "manifest.json"]


def test_six_kills_at_random_moments(tmp_path: Path) -> None:
    kill_at_random(tmp_path / "run", 6)


@pytest.mark.long
def test_fifty_kills_at_random_moments(tmp_path: Path) -> None:
    kill_at_random(tmp_path / "run", 50)


def test_two_processes_saving_into_one_folder(tmp_path: Path) -> None:
    (row,) = drive("two", tmp_path / "run", 25)
    assert row["exits"] == [0, 0]
    assert row["reads"] > 5
    assert row["last"] in (124, 224)
    assert left(tmp_path / "run") == [".lock", "generation", "manifest.json"]


def fork(work: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return child


def tell(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def kill_at_calls(root: Path, first: bool) -> None:
    for number in itertools.count():
        place = root / str(number)
        if not first:
            save(recording(1), place)

        def work(place: Path = place, number: int = number) -> None:
            with at_call(number, lambda: os.kill(os.getpid(), signal.SIGKILL)):
                save(recording(2), place)

        _, status = os.waitpid(fork(work), 0)
        try:
            step = step_of(load(place))
        except (NotARecordingError, FileNotFoundError):
            step = 0
        tell(step=step, killed=os.WIFSIGNALED(status))
        save(recording(3), place)
        assert step_of(load(place)) == 3
        assert left(place) == [".lock", "generation", "manifest.json"]
        if not os.WIFSIGNALED(status):
            return


def kill_at_moments(root: Path, rounds: int) -> None:
    rng, said = random.Random(0), root.with_name("said")
    save(recording(0, 30), root)
    said.write_text("0")
    for _ in range(rounds):
        begin = int(said.read_text())

        def work(begin: int = begin) -> None:
            log = os.open(said, os.O_WRONLY)
            for step in itertools.count(begin + 1):
                save(recording(step, 30), root)
                os.pwrite(log, b"%d" % step, 0)

        child = fork(work)
        # However slow the machine is, one save is complete before the kill comes: then every round proves something.
        deadline = time.monotonic() + 60
        while int(said.read_text()) == begin and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(rng.uniform(0.0, 0.25))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        step = step_of(load(root), 30)
        tell(step=step, said=int(said.read_text()))
        said.write_text(str(step))


def two_savers(root: Path, rounds: int) -> None:
    def work(start: int) -> None:
        for step in range(start, start + rounds):
            save(recording(step), root)

    save(recording(0), root)
    children = [fork(lambda start=start: work(start)) for start in (100, 200)]  # type: ignore[misc]
    exits, reads = list[int](), 0
    while len(exits) < 2:
        assert step_of(load(root)) in (0, *range(100, 100 + rounds), *range(200, 200 + rounds))
        reads += 1
        child, status = os.waitpid(-1, os.WNOHANG)
        if child in children:
            exits.append(status)
    tell(exits=exits, reads=reads, last=step_of(load(root)))


if __name__ == "__main__":
    mode, folder, count = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    {
        "calls": lambda: kill_at_calls(folder, first=False),
        "first": lambda: kill_at_calls(folder, first=True),
        "random": lambda: kill_at_moments(folder, count),
        "two": lambda: two_savers(folder, count),
    }[mode]()
