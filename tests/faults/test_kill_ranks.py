"""`kill -9` of one of the ranks that save into one folder: it holds one save, whole, and all others are told who is gone."""

from __future__ import annotations

import datetime
import itertools
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attacks import Tally, at_call, fork, goes_on, recording, steps_of
from power_loss import losses_of

from recorders import load
from recorders.recordings.distributed.collectives import Exchange
from recorders.recordings.distributed.sharded import save_sharded
from recorders.recordings.storage.commit import Commit, Generation
from recorders.recordings.storage.save import Layout, versions, write_rank
from recorders.recordings.storage.schema import encode_ranks

pytestmark = pytest.mark.skipif(not hasattr(os, "fork") or not dist.is_available(), reason="needs fork and torch.distributed")

SECONDS = 5
"""The timeout of the group, and how long a rank that is gone is waited for."""


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed(*_: Any, **__: Any) -> Any:
    kill()


def at_exchange(number: int) -> Callable[[], None]:
    """Dies instead of the exchange of that number, counted from 0."""

    def patch() -> None:
        real, counter = Exchange.rows, itertools.count()
        Exchange.rows = lambda *args: killed() if next(counter) == number else real(*args)  # type: ignore[method-assign]

    return patch


def at_method(owner: Any, name: str, *, after: bool = False) -> Callable[[], None]:
    """Dies before or after the work of a method."""

    def patch() -> None:
        real = getattr(owner, name)
        setattr(owner, name, lambda *args: (after and real(*args), kill()))

    return patch


def at_system_call(number: int) -> Callable[[], None]:
    """Dies instead of that call into the system, of those that saving makes."""

    def patch() -> None:
        strikes.append(at_call(number, kill))
        strikes[-1].__enter__()

    strikes: list[Any] = []  # keeps them on
    return patch


MOMENTS: dict[str, tuple[int, Callable[[], None], str]] = {
    "rank 1 before all": (1, at_exchange(0), "old"),
    "rank 1 while it writes": (1, at_method(Generation, "flush"), "old"),
    "rank 1 before it says that it has written": (1, at_exchange(1), "old"),
    "rank 1 after it has said so": (1, at_exchange(2), "new"),
    "rank 0 before all": (0, at_method(Commit, "__enter__"), "old"),
    "rank 0 with the folder made": (0, at_exchange(0), "old"),
    "rank 0 before it commits": (0, at_method(Commit, "publish"), "old"),
    "rank 0 after it committed": (0, at_method(Commit, "publish", after=True), "new"),
}


def act(rank: int, size: int, folder: Path, work: Callable[[], None]) -> None:
    """What a rank does; it writes down what became of it."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    limit = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=limit)
    group: Any = dist.group.WORLD
    dist.barrier()
    group.set_timeout(datetime.timedelta(seconds=SECONDS))
    try:
        work()
        said = "saved"
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    (folder / f"said-{rank}").write_text(said)


def save_together(folder: Path, size: int, step: int, layout: Layout, victim: int = -1, patch: Any = None) -> list[str]:
    """What became of each rank; "" if it was killed."""
    folder.mkdir(exist_ok=True)
    for left in folder.glob("s*"):
        left.unlink()

    def work(rank: int) -> None:
        if rank == victim:
            patch()
        save_sharded(recording(step), folder / "run", layout=layout)

    children = [fork(lambda rank=rank: act(rank, size, folder, lambda: work(rank))) for rank in range(size)]  # type: ignore[misc]
    for child in children:
        os.waitpid(child, 0)
    paths = [folder / f"said-{rank}" for rank in range(size)]
    return [path.read_text() if path.exists() else "" for path in paths]


def found(root: Path, size: int) -> str:
    """ "old" or "new", if that is what all ranks saved."""
    steps = {step for rank in range(size) for step in steps_of(load(root, ranks=rank)).values()}
    assert steps in ({1}, {2})
    assert load(root).compute()["layer.0"].sum().item() == 50 * size * sum(steps)  # type: ignore[union-attr]
    return "old" if steps == {1} else "new"


class Ranks:
    """What two ranks do one after another in one process, for attacks on what they ask of the system."""

    def __init__(self, flushes: bool) -> None:
        self.flushes = flushes

    def prepare(self, root: Path) -> None:
        self.save(root, 1)

    def save(self, root: Path, step: int = 2) -> None:
        with Commit(root) as commit:
            written = []
            for rank in range(2):
                files = Generation(root, commit.generation, commit.live) if rank else commit
                written.append(write_rank(recording(step), files, rank, "packed", []))
                if self.flushes:
                    files.flush()
            commit.publish(encode_ranks(commit.generation, versions(), written))

    def found(self, root: Path) -> str:
        try:
            return found(root, 2)
        except Exception as error:
            return f"{type(error).__name__}: {error}"


@pytest.mark.slow
@pytest.mark.parametrize("flushes", [True, False])
def test_the_power_fails_after_each_operation(tmp_path: Path, flushes: bool) -> None:
    """If ranks did not flush their files before they are committed, that would be found."""
    tally = Tally("power losses")
    losses_of("ranks", Ranks(flushes), tmp_path / "ranks", 6, tally, random.Random(0))  # type: ignore[arg-type]
    assert tally.tries > 100
    assert (tally.broke == []) == flushes
    assert not flushes or tally.outcomes.keys() == {"old", "new"}


def check(folder: Path, size: int, moment: str, layout: Layout) -> None:
    victim, patch, expected = MOMENTS[moment]
    assert save_together(folder, size, 1, layout) == ["saved"] * size
    told = save_together(folder, size, 2, layout, victim, patch)
    assert told[victim] == ""
    for rank in set(range(size)) - {victim}:
        assert told[rank].startswith(f"SyncError: not all ranks could save to {folder / 'run'}: the exchange of "), told[rank]
        assert f"Ranks [{victim}] did not answer within {SECONDS} s" in told[rank]
        assert ("holds this save of all ranks, whole" in told[rank]) == (expected == "new")
    assert found(folder / "run", size) == expected
    assert goes_on(folder / "run") == ""


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["rank 1 while it writes", "rank 0 before it commits", "rank 0 after it committed"])
def test_a_rank_is_killed(tmp_path: Path, moment: str) -> None:
    check(tmp_path, 2, moment, "packed")


@pytest.mark.long
@pytest.mark.parametrize("layout", ["folder", "packed"])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_rank_is_killed_at_any_step(tmp_path: Path, moment: str, size: int, layout: Layout) -> None:
    check(tmp_path, size, moment, layout)


def sleeps() -> None:
    """Comes to the first exchange long after all others have given up."""
    real = Exchange.rows

    def late(*args: Any) -> Any:
        time.sleep(3 * SECONDS)
        return real(*args)

    Exchange.rows = late  # type: ignore[method-assign]


@pytest.mark.long
def test_a_rank_that_is_silent_is_named_and_the_former_recording_stays(tmp_path: Path) -> None:
    assert save_together(tmp_path, 2, 1, "folder") == ["saved"] * 2
    told, late = save_together(tmp_path, 2, 2, "folder", 1, sleeps)
    assert "Ranks [1] did not answer within 5 s: they died, never made this call, or still wait for others" in told
    assert told.endswith(f"{tmp_path / 'run'} holds the last complete save, if any.")
    assert late.startswith("SyncError: ")
    assert found(tmp_path / "run", 2) == "old"
    assert goes_on(tmp_path / "run") == ""


@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_is_killed_at_each_call_into_the_system(tmp_path: Path, victim: int) -> None:
    """All others are told, except if the rank was killed while it cleaned up after all was done."""
    assert save_together(tmp_path, 2, 1, "packed") == ["saved"] * 2
    outcomes = []
    for number in itertools.count():
        told = save_together(tmp_path, 2, 2, "packed", victim, at_system_call(number))
        if told[victim]:
            break
        outcome = found(tmp_path / "run", 2)
        assert told[1 - victim].startswith("SyncError: ")
        assert f"Ranks [{victim}] did not answer" in told[1 - victim]
        assert "this save of all ranks, whole" in told[1 - victim] or outcome == "old"
        outcomes.append(outcome)
        if outcome == "new":
            assert save_together(tmp_path, 2, 1, "packed") == ["saved"] * 2
    assert told == ["saved"] * 2
    assert len(outcomes) > 8
    assert outcomes == sorted(outcomes, reverse=True)  # "old", up to the rename
    assert ("new" in outcomes) == (victim == 0)
