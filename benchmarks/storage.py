"""Saving and loading 10,000 subrecorders, beside what creating, writing and reading as many files of that size costs at all.

Run: python benchmarks/storage.py [folder on the disk to measure]
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
from measure import write

from recorders import Recording, Subrecording, load
from reducers import Mean, Summary

SUBRECORDERS = 10_000
ROUNDS = 3


def recording() -> Recording:
    summary = Summary("b c -> c")
    generator = torch.Generator().manual_seed(0)
    states = [summary.update({}, torch.randn(32, 64, generator=generator)) for _ in range(SUBRECORDERS)]
    parts = {
        f"out/encoder.layers.{i}": Subrecording(summary, {"": state}, samples=1, monitor="ForwardMonitor")
        for i, state in enumerate(states)
    }
    return Recording(parts)


def means() -> Recording:
    """The smallest state that is of use: 0.56 MB of states in all."""
    mean = Mean()
    generator = torch.Generator().manual_seed(0)
    states = [mean.update({}, torch.randn(32, generator=generator)) for _ in range(SUBRECORDERS)]
    return Recording({f"out/encoder.layers.{i}": Subrecording(mean, {"": state}, samples=1) for i, state in enumerate(states)})


def look(path: Path) -> None:
    for _ in load(path).values():
        pass


def write_files(folder: Path, sizes: list[int]) -> None:
    """The floor of saving: the same files, neither described nor flushed."""
    folder.mkdir()
    for index, size in enumerate(sizes):
        handle = os.open(folder / f"{index}", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        os.write(handle, bytes(size))
        os.close(handle)


def read_files(folder: Path) -> None:
    for entry in os.scandir(folder):
        Path(entry.path).read_bytes()


class Clock:
    """Seconds by name: on the wall, and of this process's processor time, which other work on the machine does not lengthen."""

    def __init__(self) -> None:
        self.spent: dict[str, dict[str, list[float]]] = {}

    def __call__(self, name: str, function: Callable[..., object], *args: object) -> None:
        wall, processor = time.perf_counter(), time.process_time()
        function(*args)
        lists = self.spent.setdefault(name, {"s": [], "processor s": []})
        lists["s"].append(time.perf_counter() - wall)
        lists["processor s"].append(time.process_time() - processor)


def main() -> None:
    torch.set_num_threads(1)
    whole, small, clock = recording(), means(), Clock()
    for turn in range(ROUNDS):
        with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as where:
            # For half a minute after many files were removed, ext4 is slow to create files: it passes over the freed inodes.
            os.sync()
            time.sleep(40)
            root, plain = Path(where) / "run", Path(where) / "plain"
            clock("save", whole.save, root)
            sizes = [path.stat().st_size for path in root.glob("generation-*/*")]
            clock("load", load, root)
            clock("floor: create and write such files", write_files, plain, sizes)
            clock("floor: read such files", read_files, plain)
            clock("save over it, remove the old", whole.save, root)
            for name, kept in {"": whole, " one mean each": small}.items():
                packed = Path(where) / f"packed{name}"
                clock(f"packed{name}: save", partial(kept.save, layout="packed"), packed)
                clock(f"packed{name}: load", load, packed)
                clock(f"packed{name}: load, mapped", partial(load, mmap=True), packed)
                clock(f"packed{name}: load, and look at every subrecorder", look, packed)
            clock("floor: create and write such files at once after removing", write_files, Path(where) / "after", sizes)
        print(f"round {turn + 1} of {ROUNDS}")
    rows = []
    for name, lists in clock.spent.items():
        figures = {unit: {"median": statistics.median(t), "min": min(t), "max": max(t)} for unit, t in lists.items()}
        rows.append({"what": name, **figures})
        wall, processor = figures["s"], figures["processor s"]["median"]
        print(f"{name:60} {wall['median']:6.2f} s  ({wall['min']:.2f} to {wall['max']:.2f}; processor {processor:.2f})")
    write(
        "storage",
        what=f"{SUBRECORDERS} subrecorders, Summary of 64 channels each, {statistics.mean(sizes):.0f} bytes each, flushed to disk",
        safetensors=version("safetensors"),
        rows=rows,
    )


if __name__ == "__main__":
    main()
