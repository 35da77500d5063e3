"""What `sync` costs against the number of subrecorders: two gloo processes on loopback, each subrecorder with 64 channels.

The yardstick, in the same run, is one `all_gather` for every state tensor and the same merging.
Run: python benchmarks/sync.py
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from measure import write

from recorders import Recording, Subrecording
from recorders.recordings.distributed.sync import sync
from reducers import Max, Min, Moments, Product

PROCESSES = 2
ROUNDS = {10: 40, 100: 20, 1000: 7}
"""How often each is timed, by number of subrecorders."""


def recording(subrecorders: int, rank: int) -> Recording:
    reducer = Product(moments=Moments("b c -> c"), low=Min("b c -> c"), high=Max("b c -> c"))
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(rank))
    return Recording({f"layer{n}": Subrecording(reducer, {"": reducer.update({}, x)}, 1) for n in range(subrecorders)})


def one_collective_per_tensor(own: Recording) -> Recording:
    """What a library does that syncs statistic by statistic; it takes on trust that the ranks record the same."""
    gathered: list[dict[str, Subrecording]] = [{} for _ in range(PROCESSES)]
    for name, part in own.items():
        states: list[dict[str, torch.Tensor]] = [{} for _ in range(PROCESSES)]
        for key, value in part.states[""].items():
            arrived = [torch.empty_like(value) for _ in range(PROCESSES)]
            dist.all_gather(arrived, value)
            for state, tensor in zip(states, arrived, strict=True):
                state[key] = tensor
        for parts, state in zip(gathered, states, strict=True):
            parts[name] = Subrecording(part.reducer, {"": state}, part.samples)
    merged = Recording(gathered[0])
    for other in gathered[1:]:
        merged = merged.merge(Recording(other))
    return merged


def merge_alone(own: Recording) -> Recording:
    """The part of the work that is no communication."""
    return own.merge(own)


def medians(own: Recording, rounds: int) -> dict[str, float]:
    """Milliseconds by function; taken in turn, so that a drifting machine slows all of them alike."""
    functions = (sync, merge_alone, one_collective_per_tensor)
    spent: dict[str, list[float]] = {function.__name__: [] for function in functions}
    for turn in range(rounds + 2):
        for function in functions:
            dist.barrier()
            started = time.perf_counter()
            function(own)
            if turn >= 2:
                spent[function.__name__].append((time.perf_counter() - started) * 1e3)
    return {f"{name}_ms": round(statistics.median(times), 3) for name, times in spent.items()}


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=PROCESSES)
    rows = []
    for subrecorders, rounds in ROUNDS.items():
        own = recording(subrecorders, rank)
        tensors = [value for part in own.values() for value in part.states[""].values()]
        rows.append(
            {
                "subrecorders": subrecorders,
                "state_tensors": len(tensors),
                "state_bytes": sum(tensor.nbytes for tensor in tensors),
                "rounds": rounds,
                **medians(own, rounds),
            }
        )
    if rank == 0:
        (Path(folder) / "rows.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


def main() -> None:
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, args=(folder,), nprocs=PROCESSES)
        rows = json.loads((Path(folder) / "rows.json").read_text())
    for row in rows:
        print(", ".join(f"{name} {value}" for name, value in row.items()))
    setting = {"backend": "gloo", "processes": PROCESSES, "threads_per_process": 1, "figures": "medians on rank 0"}
    print(write("sync", setting=setting, load_average=os.getloadavg()[0], rows=rows))


if __name__ == "__main__":
    main()
