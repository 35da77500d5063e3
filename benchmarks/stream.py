"""Raw capture: gigabytes through a `Stream`, and back through a `StreamDataset`, beside plain files on the same disk.

Rows have 768 float32 values, puts and batches 4,096 rows. Streamed and plain take turns of about 1 GB, in a random order. Plain
writing is `os.write` of the same rows into files as large as a shard, one after the other; both end when everything is flushed
to the disk. Plain reading is `readinto` of the same files, into one buffer that is used again and again. Before each turn of
reading, the files are dropped from the memory of the system. A dataset reads rows first with a comparison of checksums, and
then again without. The figures are ratios within one turn, because a disk, and who else uses it, change from minute to minute.
Run: python benchmarks/stream.py --gb 20 [--folder FOLDER], with 1 GB more room on the disk.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from measure import spread, write

from recorders import Stream, StreamDataset

ROWS, WIDTH = 4096, 768
SHARD = QUEUE = 1 << 28
PUT = ROWS * WIDTH * 4
TURN = 84  # puts, or batches: about 1 GB
WINDOW = 1 << 16  # rows; a turn has five of them
ORDERS = {"in order": None, "shuffled": 0}
TIMES = {"first": False, "again": True}


def write_plain(folder: Path, rows: torch.Tensor) -> float:
    """Seconds for files written one after the other."""
    folder.mkdir()
    data = memoryview(rows.numpy()).cast("B")
    started, written = time.perf_counter(), 0
    while written < TURN * PUT:
        handle = os.open(folder / str(written), os.O_WRONLY | os.O_CREAT)
        size = 0
        while size < SHARD and written < TURN * PUT:
            left = data
            while left:
                left = left[os.write(handle, left) :]
            size, written = size + PUT, written + PUT
        os.fsync(handle)
        os.close(handle)
    seconds = time.perf_counter() - started
    shutil.rmtree(folder)
    return seconds


def write_stream(stream: Stream, rows: torch.Tensor, first: int) -> float:
    started = time.perf_counter()
    for step in range(first, first + TURN):
        with stream.given(ids=torch.arange(ROWS) + step * ROWS):
            stream.put("rows", rows)
    stream.flush()
    return time.perf_counter() - started


def forget(folder: Path) -> None:
    """Drops the files from the memory of the system, unless they are mapped."""
    for path in folder.iterdir():
        handle = os.open(path, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def read_plain(files: list[Path]) -> float:
    """Seconds for the bytes of `TURN` batches."""
    buffer, size = bytearray(PUT), 0
    started = time.perf_counter()
    for path in files:
        with open(path, "rb", buffering=0) as file:
            while size < TURN * PUT and (count := file.readinto(buffer)):
                size += count
    return (time.perf_counter() - started) * TURN * PUT / size


def opened(folder: Path, seed: int | None, checked: bool) -> StreamDataset:
    """The stream; `checked` as it is after an epoch, in which all checksums were compared, but with nothing in memory."""
    data = StreamDataset(folder, shuffle=seed, window=WINDOW)
    if checked:
        (files,) = data._files
        for shard in files.shards:
            files.reader(shard.number, "rows")._unread[:] = False
    return data


def read_batches(data: Any, first: int) -> float:
    """Seconds for `TURN` batches of a dataset."""
    started = time.perf_counter()
    for index in range(first, first + TURN):
        batch = data[index % len(data)]
    assert len(batch)
    return time.perf_counter() - started


def resident(which: str) -> int:
    """Bytes: `VmRSS`, the memory now, or `VmHWM`, the most since `forget_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(which))


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def writing(folder: Path, turns: int) -> dict[str, Any]:
    rows = torch.randn(ROWS, WIDTH)
    plains, streams, memory = [], [], []
    with Stream(folder / "stream", shard_bytes=SHARD, queue_bytes=QUEUE) as stream:
        for turn in range(turns):
            for what in random.sample(("plain", "stream"), 2):
                if what == "plain":
                    plains.append(write_plain(folder / "plain", rows))
                    continue
                forget_peak()
                before = resident("VmRSS")
                streams.append(write_stream(stream, rows, turn * TURN))
                memory.append(resident("VmHWM") - before)
    return {**compared("write", plains, streams), "added memory MB": max(memory) / 1e6}


def reading(folder: Path, turns: int) -> dict[str, Any]:
    files = sorted(folder.glob("*.safetensors"))
    seconds: dict[str, list[float]] = {"plain": [], **{f"read {order}, {when}": [] for order in ORDERS for when in TIMES}}
    for turn in range(turns):
        first = turn * TURN % (len(files) * SHARD // PUT - TURN)
        part = files[first * PUT // SHARD :]
        for name in random.sample([*seconds], len(seconds)):
            forget(folder)
            if "shuffled" not in name:
                read_plain(
                    part
                )  # so that what is below the system, such as the host of a virtual machine, has all of it or nothing
                forget(folder)
            if name == "plain":
                seconds[name].append(read_plain(part))
                continue
            order, when = name.removeprefix("read ").split(", ")
            data = opened(folder, ORDERS[order], TIMES[when])
            seconds[name].append(read_batches(data.batches(ROWS), first))
            del data  # and its maps
    plains = seconds.pop("plain")
    return {key: value for name, taken in seconds.items() for key, value in compared(name, plains, taken).items()}


def compared(what: str, plains: list[float], streams: list[float]) -> dict[str, Any]:
    """Bandwidths, and that of the stream as a part of that of plain files, turn by turn."""
    size = TURN * PUT / 1e9
    return {
        f"{what}: plain GB/s": size / statistics.median(plains),
        f"{what}: stream GB/s": size / statistics.median(streams),
        f"{what}: of plain": spread([plain / stream for plain, stream in zip(plains, streams, strict=True)]),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gb", type=float, default=2.0)
    parser.add_argument("--turns", type=int, default=None, help="of reading; as many as of writing if this is not given")
    parser.add_argument("--folder", default=None)
    given = parser.parse_args()
    torch.set_num_threads(1)
    random.seed(0)
    turns = max(2, round(given.gb * 1e9 / (TURN * PUT)))
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        row = {"gb": turns * TURN * PUT / 1e9, "shard MB": SHARD / 1e6, "queue MB": QUEUE / 1e6}
        row |= writing(Path(name), turns)
        print(row)
        row |= reading(Path(name) / "stream", given.turns or turns)
    print(row)
    write("stream", rows=[row])


if __name__ == "__main__":
    main()
