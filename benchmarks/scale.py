"""What `sync` costs against the number of ranks: bytes, messages, collectives, memory and processor time.

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

from recorders import Recording, Subrecording, merge
from recorders.recordings.distributed.protocol import Index, pack, parse
from recorders.recordings.distributed.sync import sync
from reducers import Moments

REDUCER = Moments("b c -> c", order=4)
"""None of its tensors merges element by element, so all of them are gathered; `sync_bytes.py` counts what is all-reduced."""
CHANNELS = 64
MONITORS = (10, 100, 1000)
RANKS = (1, 2, 4, 8, 16)
RECEIVERS = ("all", 0)


def recording(monitors: int, rank: int) -> Recording:
    x = torch.randn(32, CHANNELS, generator=torch.Generator().manual_seed(rank))
    return Recording({f"layer{n}": Subrecording(REDUCER, {"": REDUCER.update({}, x)}, 1) for n in range(monitors)})


def size(own: Recording) -> int:
    """The bytes that one rank gathers, without a group."""
    cpu = torch.device("cpu")
    packed = pack(own, cpu, "error", "sync(to='all', missing='error')")
    return Index(parse(packed.manifest)).gathered(packed, cpu).numel()


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

    for name in ("all_gather", "gather"):
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
    for to in RECEIVERS:
        for monitors in MONITORS:
            found = measured(partial(sync, recording(monitors, rank), to=to), calls)  # type: ignore[call-overload]
            rows.append({"ranks": ranks, "to": to, "monitors": monitors, **found})
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
        own, to = size(recording(found[0]["monitors"], 0)), None if found[0]["to"] == "all" else found[0]["to"]
        told = [model.sent(ranks, own, to, rank) for rank in range(ranks)]
        exact = [(row["bytes"], row["messages"]) == tuple(sent) for row, sent in zip(found, told, strict=True)]
        others = {"peak_bytes_of_others": max((row["peak_bytes"] for row in found[1:]), default=0)}
        rows.append({**found[0], **others, "modelled_bytes": told[0].bytes, "exact_on_all_ranks": all(exact)})
    return rows


def figure() -> Any:
    """Memory and time against the number of ranks, by 1,000 monitors, on logarithmic scales, from what was measured."""
    from matplotlib.figure import Figure

    results = json.loads((RESULTS / "scale.json").read_text())
    drawn = Figure(figsize=(9.6, 4.2), dpi=140, layout="constrained")
    panels = drawn.subplots(1, 2)
    own, ranks = results["sizes"]["1000"], [2**power for power in range(1, 14)]
    panels[0].loglog(
        ranks, [model.memory(count, own) for count in ranks], color="#D55E00", label="a rank that gets what was merged"
    )
    panels[0].loglog(ranks, [2 * own for _ in ranks], color="#0072B2", label="the others, with to=rank")
    panels[1].loglog(ranks, [model.seconds(count, own, 1000, results["merge_s"]) for count in ranks], color="#D55E00")
    for row in (row for row in results["rows"] if row["monitors"] == 1000 and row["ranks"] > 1):
        marker = "o" if row["to"] == "all" else "s"
        panels[0].plot(row["ranks"], row["peak_bytes"], marker, color="#D55E00", markersize=6)
        panels[1].plot(row["ranks"], row["processor_s"], marker, color="#D55E00", markersize=6)
        if row["to"] == 0:
            panels[0].plot(row["ranks"], row["peak_bytes_of_others"], marker, color="#0072B2", markersize=6)
    for axes, title in zip(panels, ("Memory of one rank, bytes", "Time until those have it that get it, seconds"), strict=True):
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
    for ranks in RANKS:
        for row in rows_of(ranks):
            print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
            rows.append(row)
    cost = {row["ranks"]: row["processor_s"] for row in rows if row["to"] == "all" and row["monitors"] == MONITORS[-1]}
    with tempfile.TemporaryDirectory() as folder:
        apart = offline(Path(folder), 8, MONITORS[-1])
    results = {
        "setting": {"backend": "gloo", "threads_per_process": 1, "channels": CHANNELS, "figures": "of rank 0"},
        "sizes": {str(monitors): size(recording(monitors, 0)) for monitors in (*MONITORS, 10_000)},
        "merge_s": (cost[RANKS[-1]] - cost[2]) / (RANKS[-1] - 2) / MONITORS[-1],
        "offline": apart,
        "rows": rows,
    }
    print(write("scale", **results))


if __name__ == "__main__":
    main()
