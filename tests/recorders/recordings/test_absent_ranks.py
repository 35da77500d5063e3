"""Ranks that die or never call `sync`: all others get a SyncError that names them, and can save what they recorded."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from world import Place, Raised, World

import recorders.recordings.distributed.collectives as collectives
from recorders import Recording, Subrecording, SyncError, load
from recorders.recordings.distributed.collectives import Exchange
from recorders.recordings.distributed.sync import sync
from reducers import Mean


@pytest.fixture
def fragile(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.kill()


GROUPS: list[Any] = []
"""Groups of all ranks with a short timeout, in each process of the world."""


def prepare(place: Place) -> None:
    for _ in range(3):
        group: Any = dist.new_group([0, 1, 2], timeout=datetime.timedelta(seconds=60))
        dist.barrier(group)  # all are there and connected, however slow the machine is
        group.set_timeout(datetime.timedelta(seconds=5))
        GROUPS.append(group)


def synced(place: Place, group: int, folder: str, dies: str = "") -> Any:
    """Where `sync` fails, what it says, and what was saved after it; rank 0 calls it asynchronously."""
    if dies and place[0] == 1:  # after the ranks agreed to send their states
        setattr(Exchange, dies, lambda *_: os._exit(1))
    if dies == "reduce":
        collectives.REDUCE_FROM = 2
    mean = Mean()
    recording = Recording({"x": Subrecording(mean, {"": mean.update({}, torch.tensor(float(place[0])))}, 1)})
    handle = None
    try:
        if place[0] > 0:
            return sync(recording, GROUPS[group]) and "merged"
        handle = sync(recording, GROUPS[group], async_op=True)
        return handle.wait() and "merged"
    except SyncError as error:
        found = error
    if handle is not None:
        with pytest.raises(SyncError) as again:
            handle.wait()
        assert again.value is found
        assert handle.is_completed()
    path = recording.save(f"{folder}/{place[0]}")
    return "call" if handle is None else "wait", str(found), load(path).compute()["x"].item()


def check(answers: list[Any], what: str) -> None:
    for rank, answer in zip((0, 2), answers, strict=True):
        assert not isinstance(answer, (Raised, str)), answer
        where, text, saved = answer
        assert where == ("wait" if (rank, what) == (0, "states") else "call")
        assert f"the exchange of {what} among 3 ranks failed on rank {rank}, with a timeout of 5 s" in text
        assert "Ranks [1] did not answer within 5 s" in text
        assert "recorders.merge(paths)" in text
        assert saved == rank


@pytest.mark.parametrize("dies", [pytest.param("gather", marks=pytest.mark.slow), pytest.param("reduce", marks=pytest.mark.long)])
def test_a_rank_that_is_silent_then_dies_then_is_dead_is_named(fragile: World, tmp_path: Path, dies: str) -> None:
    fragile.run(prepare)
    check(fragile.run(synced, 0, str(tmp_path), ranks=(0, 2)), "lengths")
    first, died, third = fragile.run(synced, 1, str(tmp_path), dies)
    assert died is None
    check([first, third], "states")
    check(fragile.run(synced, 2, str(tmp_path), ranks=(0, 2)), "lengths")
