"""Raw capture: gigabytes through a `Stream` beside plain safetensors files of the same shards, flushed to the same disk.

Both write rows of 768 float32 values in turns of about 1 GB; a turn of either ends when everything is on the disk. The figure is
the ratio of their speeds within one turn. The largest memory of the process is measured while the stream writes.
Run: python benchmarks/stream.py --gb 20 [--folder FOLDER], with twice as much room on the disk.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from pathlib import Path

import torch
from measure import spread, write
from safetensors.torch import save_file

from recorders import Stream, StreamDataset

ROWS, WIDTH = 4096, 768
SHARD = QUEUE = 1 << 28
PUT = ROWS * WIDTH * 4
TURN = 84  # puts: about 1 GB


def flush(path: Path) -> None:
    handle = os.open(path, os.O_RDWR)
    os.fsync(handle)
    os.close(handle)


def plain(folder: Path, rows: torch.Tensor) -> float:
    """Bytes a second of files written one after the other, from rows that are in memory already."""
    folder.mkdir()
    shard = rows.repeat(SHARD // PUT, 1)
    started, written = time.perf_counter(), 0
    while written < TURN * PUT:
        path = folder / f"{written}.safetensors"
        save_file({"rows": shard}, path)
        flush(path)
        written += shard.nbytes
    seconds = time.perf_counter() - started
    shutil.rmtree(folder)
    return written / seconds


def streamed(stream: Stream, rows: torch.Tensor, first: int) -> float:
    started = time.perf_counter()
    for step in range(first, first + TURN):
        with stream.given(ids=torch.arange(ROWS) + step * ROWS):
            stream.put("rows", rows)
    stream.flush()
    return TURN * PUT / (time.perf_counter() - started)


def resident(which: str) -> int:
    """Bytes: `VmRSS`, the memory now, or `VmHWM`, the most since `forget_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(which))


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def read(folder: Path, shuffle: int | None) -> float:
    """Bytes a second of batches of 4,096 rows, checksums compared."""
    data = StreamDataset(folder, shuffle=shuffle).batches(ROWS)
    started = time.perf_counter()
    count = min(len(data), 4 * TURN)
    for index in range(count):
        data[index]
    return count * PUT / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gb", type=float, default=2.0)
    parser.add_argument("--folder", default=None)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = torch.randn(ROWS, WIDTH)
    plains, streams, memory = [], [], []
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        folder = Path(name)
        with Stream(folder / "stream", shard_bytes=SHARD, queue_bytes=QUEUE) as stream:
            for turn in range(max(1, round(given.gb * 1e9 / (TURN * PUT)))):
                plains.append(plain(folder / "plain", rows))
                forget_peak()
                before = resident("VmRSS")
                streams.append(streamed(stream, rows, turn * TURN))
                memory.append(resident("VmHWM") - before)
        row = {
            "gb": len(streams) * TURN * PUT / 1e9,
            "plain GB/s": spread(plains)["median"] / 1e9,
            "stream GB/s": spread(streams)["median"] / 1e9,
            "stream / plain": spread([s / p for s, p in zip(streams, plains, strict=True)]),
            "stream / plain in total": sum(1 / p for p in plains) / sum(1 / s for s in streams),
            "added memory MB": max(memory) / 1e6,
            "shard MB": SHARD / 1e6,
            "queue MB": QUEUE / 1e6,
            "read in order GB/s": read(folder / "stream", None) / 1e9,
            "read shuffled GB/s": read(folder / "stream", 0) / 1e9,
        }
    print(row)
    write("stream", rows=[row])


if __name__ == "__main__":
    main()
