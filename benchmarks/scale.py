"""What `sync` costs against the number of ranks: bytes, messages, collectives, memory and processor time, flat and hierarchical.

Processes with gloo on loopback are measured, and compared with `scale_model.py`, which says what more of them would cost. Bytes are
those that a process writes, as Linux counts them. Run, with `pip install '.[plot]'`: python benchmarks/scale.py
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import scale_model as model
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from measure import RESULTS, write
from torch.distributed.device_mesh import init_device_mesh

from recorders import Recording, Subrecording, merge
from recorders.recordings.distributed import hierarchy
from recorders.recordings.distributed.message import pack
from recorders.recordings.distributed.sync import sync
from reducers import Moments

REDUCER = Moments("b c -> c", order=4)
"""None of its tensors merges element by element, so all of them are gathered; `sync_bytes.py` counts what is all-reduced."""
CHANNELS = 64
MONITORS = (10, 100, 1000)
SHAPES: dict[int, list[tuple[int, ...]]] = {1: [(1,)], 2: [(2,)], 4: [(4,), (2, 2)], 8: [(8,), (2, 4), (2, 2, 2)]}


def recording(monitors: int, rank: int) -> Recording:
    x = torch.randn(32, CHANNELS, generator=torch.Generator().manual_seed(rank))
    return Recording({f"layer{n}": Subrecording(REDUCER, {"": REDUCER.update({}, x)}, 1) for n in range(monitors)})


def sizes(own: Recording) -> model.Sizes:
    """The bytes of one rank, without a group: what it packs, and what the first rank sends back."""
    cpu = torch.device("cpu")
    _, payload = pack(own, cpu, "error", "sync(to='all', missing='error')")
    text, merged = hierarchy._outcome(hierarchy._Held([own]), hierarchy._SyncCall(own, "all", "error"), cpu)
    return model.Sizes(payload.numel(), len(text) + merged.numel())


def written() -> tuple[int, int]:
    """The bytes that this process wrote so far, and in how many calls."""
    told = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(told["wchar"]), int(told["syscw"])


def resident(key: str) -> int:
    """Bytes of memory of this process: `VmRSS`, or `VmHWM` for the most since it was asked to begin anew."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def counting(calls: list[str]) -> None:
    """Counts the collectives of `sync` from now on."""

    def wrapped(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: (calls.append(name), function(*args, **kwargs))[1]

    for name in ("all_gather", "gather", "broadcast"):
        setattr(dist, name, wrapped(name, getattr(dist, name)))


def measured(run: Callable[[], Any], calls: list[str]) -> dict[str, float]:
    """What one sync costs this process."""
    run()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before does not hide what is needed now
    calls.clear()
    Path("/proc/self/clear_refs").write_text("5")
    before, (sent, messages), started = resident("VmRSS"), written(), time.process_time()
    run()
    spent, (sent_after, messages_after) = time.process_time() - started, written()
    return {
        "bytes": sent_after - sent,
        "messages": messages_after - messages,
        "collectives": len(calls),
        "peak_bytes": max(0, resident("VmHWM") - before),
        "processor_s": round(spent, 5),
    }


def work(rank: int, folder: str, ranks: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    calls: list[str] = []
    counting(calls)
    rows = []
    for shape in SHAPES[ranks]:
        group = init_device_mesh("cpu", shape) if len(shape) > 1 else None
        for monitors in MONITORS:
            own = recording(monitors, rank)
            rows.append({"shape": shape, "monitors": monitors, **measured(partial(sync, own, group), calls)})
    Path(folder, f"{rank}.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


def offline(folder: Path, ranks: int, monitors: int) -> dict[str, Any]:
    """What `merge(paths)` costs in place of a sync: one process reads what each rank saved."""
    paths = [folder / str(rank) for rank in range(ranks)]
    for rank, path in enumerate(paths):
        recording(monitors, rank).save(path, layout="packed")
    size = sum(file.stat().st_size for path in paths for file in path.rglob("*") if file.is_file())
    started = time.process_time()
    merged = merge(paths)
    for name in merged:
        merged[name]
    return {"paths": ranks, "monitors": monitors, "bytes": size, "processor_s": round(time.process_time() - started, 4)}


def rows_of(ranks: int) -> list[dict[str, Any]]:
    """Measured and modelled, of the first rank, which has most to do; and whether the model is right for all ranks."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, args=(folder, ranks), nprocs=ranks)
        by_rank = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]
    rows = []
    for found in zip(*by_rank, strict=True):
        shape, monitors = found[0]["shape"], found[0]["monitors"]
        told = [predicted(shape, monitors, rank) for rank in range(ranks)]
        exact = [(row["bytes"], row["messages"]) == tuple(sent) for row, sent in zip(found, told, strict=True)]
        rows.append({**found[0], "modelled_bytes": told[0].bytes, "exact_on_all_ranks": all(exact)})
    return rows


def predicted(shape: tuple[int, ...], monitors: int, rank: int) -> model.Sent:
    own = sizes(recording(monitors, 0))
    return model.flat(shape[0], own) if len(shape) == 1 else model.hierarchical(shape, own, rank)


def figure() -> Any:
    """Memory and time against the number of ranks, by 1,000 monitors, on logarithmic scales, from what was measured."""
    from matplotlib.figure import Figure

    results = json.loads((RESULTS / "scale.json").read_text())

    drawn = Figure(figsize=(9.6, 4.2), dpi=140, layout="constrained")
    panels = drawn.subplots(1, 2)
    own = model.Sizes(**results["sizes"]["1000"])
    styles = {
        "sync()": ("#D55E00", "o"),
        "sync(mesh), machines of 8": ("#0072B2", "s"),
        "sync(mesh), and groups": ("#009E73", "^"),
    }
    for (label, (color, marker)), shape_of in zip(styles.items(), model.SHAPES, strict=True):
        ranks = [2**power for power in range(1 if shape_of is model.SHAPES[0] else 3, 14)]
        shapes = [shape_of(count) for count in ranks]
        panels[0].loglog(ranks, [model.memory(shape, own) for shape in shapes], color=color, label=label)
        times = [model.seconds(shape, own, 1000, results["merge_s"]) for shape in shapes]
        panels[1].loglog(ranks, times, color=color, label=label)
        for row in results["rows"]:
            if row["monitors"] == 1000 and len(row["shape"]) == model.SHAPES.index(shape_of) + 1 and max(row["shape"]) > 1:
                count = torch.Size(row["shape"]).numel()
                panels[0].plot(count, row["peak_bytes"], marker, color=color, markersize=6)
                panels[1].plot(count, row["processor_s"], marker, color=color, markersize=6)
    for axes, title in zip(panels, ("Memory on the rank that needs most, bytes", "Time until all have it, seconds"), strict=True):
        axes.set_title(title, loc="left", fontsize=11)
        axes.set_xlabel("ranks, each with 1,000 monitors of 64 channels")
        axes.grid(True, which="major", color="#E3E6E8", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].axhline(16e9, color="#5B6770", linewidth=1, linestyle="--")
    panels[0].annotate("16 GB", (2, 16e9), (0, 4), textcoords="offset points", color="#5B6770", fontsize=9)
    panels[0].legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(0.0, 0.88))
    return drawn


def main() -> None:
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    rows = []
    for ranks in SHAPES:
        for row in rows_of(ranks):
            print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
            rows.append(row)
    cost = {row["shape"][0]: row["processor_s"] for row in rows if len(row["shape"]) == 1 and row["monitors"] == MONITORS[-1]}
    with tempfile.TemporaryDirectory() as folder:
        apart = offline(Path(folder), 8, MONITORS[-1])
    results = {
        "setting": {"backend": "gloo", "threads_per_process": 1, "channels": CHANNELS, "figures": "of rank 0"},
        "sizes": {str(monitors): sizes(recording(monitors, 0))._asdict() for monitors in (*MONITORS, 10_000)},
        "merge_s": (cost[8] - cost[2]) / 6 / MONITORS[-1],
        "offline": apart,
        "rows": rows,
    }
    print(write("scale", **results))


if __name__ == "__main__":
    main()
