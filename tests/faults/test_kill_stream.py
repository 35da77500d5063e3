"""Streams that are killed: every shard that was committed is there, whole, and the stream goes on after it, with nothing twice.

Run as a script, this file is the process that is killed.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from recorders import Stream, StreamDataset

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs kill -9")

ROWS = 64


def rows_of(ids: torch.Tensor) -> torch.Tensor:
    return torch.stack([ids, ids * 7 % 1013], 1).double()


def write_for_ever(folder: Path) -> None:
    with Stream(folder, shard_bytes=20_000) as stream:
        step = stream.batches
        while True:
            ids = torch.arange(ROWS) + ROWS * step
            with stream.given(ids=ids):
                stream.put("a", rows_of(ids))
                stream.put("b", -rows_of(ids))
            step += 1


def shards(folder: Path) -> int:
    index = folder / "index.jsonl"
    return index.read_bytes().count(b"\n") - 1 if index.exists() else 0


def kill_and_check(tmp_path: Path, kills: int) -> None:
    folder, draw = tmp_path / "acts", random.Random(kills)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    before = 0
    for _ in range(kills):
        process = subprocess.Popen([sys.executable, __file__, str(folder)], env=environment, stderr=subprocess.PIPE)
        deadline = time.monotonic() + 300
        while shards(folder) <= before and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(draw.random() * 0.1)
        process.send_signal(signal.SIGKILL)
        _, said = process.communicate()
        assert process.returncode == -signal.SIGKILL, said.decode()
        committed = shards(folder)
        assert committed > before
        before = committed
        data = StreamDataset(folder, ["a", "b"], ids=True)
        rows, ids = data[:]
        assert torch.equal(ids[:, 0], torch.arange(len(data)))
        assert torch.equal(rows["a"], rows_of(ids[:, 0]))
        assert torch.equal(rows["b"], -rows_of(ids[:, 0]))
    with Stream(folder) as stream:
        assert stream.rows == {"a": len(data), "b": len(data)}
        assert stream.batches * ROWS == len(data)
    assert len(list(folder.glob("*.safetensors"))) == 2 * before


@pytest.mark.parametrize("kills", [pytest.param(5, marks=pytest.mark.slow), pytest.param(50, marks=pytest.mark.long)])
def test_streams_that_are_killed_lose_nothing_that_was_committed(tmp_path: Path, kills: int) -> None:
    kill_and_check(tmp_path, kills)


if __name__ == "__main__":
    write_for_ever(Path(sys.argv[1]))
