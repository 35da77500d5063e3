"""kill -9 in the middle of appends: every tick that `append` returned from is there, each tick is whole, and the file goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from recorders.watch.timeline import Timeline

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

NAMES = 60
ROUND = """
import os, random, signal, sys, time
from recorders.watch.timeline import Timeline
path, acknowledged, rounds, names = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
rng = random.Random(0)
open(acknowledged, "w").close()
for _ in range(rounds):
    size = os.path.getsize(acknowledged)
    child = os.fork()
    if child == 0:
        timeline, log = Timeline(path), os.open(acknowledged, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        tick = len(timeline.ticks())
        while True:
            timeline.append(tick, {f"layer{i}": {"mean": tick + i / 8, "max": float(tick)} for i in range(names)})
            os.write(log, f"{tick} ".encode())
            tick += 1
    # However slow the machine is, one tick is complete before the kill comes: then every round proves something.
    deadline = time.monotonic() + 60
    while os.path.getsize(acknowledged) == size and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(rng.uniform(0.0, 0.25))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    print("killed", flush=True)
"""


def kill_and_check(folder: Path, rounds: int) -> None:
    path, log = folder / "run.db", folder / "acknowledged"
    command = [sys.executable, "-W", "ignore", "-c", ROUND, str(path), str(log), str(rounds), str(NAMES)]
    done = subprocess.run(
        command, check=True, timeout=300 + 2 * rounds, capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert done.stdout.count("killed") == rounds
    acknowledged = [int(tick) for tick in log.read_text().split()]
    with Timeline(path) as timeline:
        ticks = timeline.ticks()
        assert ticks == list(range(len(ticks)))
        assert set(acknowledged) <= set(ticks)
        assert len(ticks) - len(acknowledged) <= rounds  # committed, and killed before it could say so
        assert len(ticks) >= rounds
        for tick in ticks:
            assert timeline.at(tick) == {f"layer{i}": {"mean": tick + i / 8, "max": float(tick)} for i in range(NAMES)}
        timeline.append(len(ticks), {"layer0": {"mean": 0.0}})


@pytest.mark.slow
def test_five_kills(tmp_path: Path) -> None:
    kill_and_check(tmp_path, rounds=5)


@pytest.mark.long
def test_two_hundred_kills(tmp_path: Path) -> None:
    kill_and_check(tmp_path, rounds=200)
