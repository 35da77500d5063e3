"""A disk that fails under a stream: one warning, the training goes on, what was committed is read, and the stream can go on."""

from __future__ import annotations

import errno
import itertools
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from recorders import RecordingWarning, Stream, StreamDataset

CALLS = ("open", "write", "fsync", "close")
STEPS, ROWS = 6, 4


@contextmanager
def failing(number: int, code: int) -> Iterator[Callable[[], int]]:
    """Raises instead of that call of a stream's thread into the operating system; gives the number of such calls."""
    counter, real = itertools.count(), {name: getattr(os, name) for name in CALLS}
    made = 0

    def wrap(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal made
            if not threading.current_thread().name.startswith("stream to"):
                return real[name](*args, **kwargs)
            made = next(counter)
            if made == number:
                if name == "close":
                    real["close"](*args)
                raise OSError(code, os.strerror(code))
            return real[name](*args, **kwargs)

        return call

    for name in CALLS:
        setattr(os, name, wrap(name))
    try:
        yield lambda: made + 1
    finally:
        for name in CALLS:
            setattr(os, name, real[name])


def train(folder: Path) -> Stream:
    """Six batches of four rows of two places, in shards of two batches; rows say their id."""
    net = nn.Sequential(nn.Identity(), nn.Identity())
    with Stream(folder, shard_bytes=2 * 2 * ROWS * 16) as stream, stream.attach(net, ["0", "1"]):
        for step in range(stream.batches, STEPS):
            ids = torch.arange(ROWS) + ROWS * step
            with stream.given(ids=ids):
                assert torch.equal(net(ids.double()[:, None]), ids.double()[:, None])
            if step == 1:
                stream.flush()
    return stream


def check(folder: Path, shards: int) -> None:
    """Whole batches from the first one on, in both places."""
    data = StreamDataset(folder, ["0", "1"], ids=True) if shards else None
    rows, ids = data[:] if data else ({}, torch.empty(0))
    assert len(ids) % ROWS == 0
    for place in rows:
        assert rows[place].flatten().tolist() == ids.flatten().tolist() == list(range(len(ids)))


@pytest.mark.slow
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fails_at_any_call_costs_rows_and_one_warning(tmp_path: Path, code: int) -> None:
    failed = 0
    for number in itertools.count():
        folder = tmp_path / str(number)
        with failing(number, code) as made, pytest.warns(RecordingWarning) as caught:
            stream = train(folder)
            if not stream.failure:
                warnings.warn("none", RecordingWarning, stacklevel=1)
        assert len(caught) == 1
        if made() <= number:
            break
        failed += 1
        message = str(caught[0].message)
        assert str(folder) in message
        assert os.strerror(code) in message
        assert os.strerror(code) in repr(stream)
        shards = stream._writer._number
        assert f"{shards} shards are complete" in message
        check(folder, len((folder / "index.jsonl").read_text().splitlines()) - 1)
        again = train(folder)
        assert not again.failure
        assert again.rows == {"0": STEPS * ROWS, "1": STEPS * ROWS}
        check(folder, 3)
        committed = {file for line in (folder / "index.jsonl").read_text().split('"file":"')[1:] for file in [line.split('"')[0]]}
        assert {path.name for path in folder.iterdir()} == committed | {"index.jsonl", ".lock"}
    assert failed > 30
