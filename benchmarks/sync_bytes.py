"""What a `sync` costs a rank by the number of ranks: bytes that it receives, and its processor time to merge; 120 subrecorders.

Bytes are those of the tensors that ranks hand over, times what the rings of gloo and NCCL pass on to each rank: of a gather those
of all others, of an all-reduce 2 (n - 1) / n of its own. Other ranks are played in this process.
Run: python benchmarks/sync_bytes.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from measure import write

from recorders import Recording, Subrecording
from recorders.recordings.distributed.allreduce import Reduction
from recorders.recordings.distributed.collectives import REDUCE_FROM
from recorders.recordings.distributed.merge import Merged
from recorders.recordings.distributed.protocol import Index, Packed, Sent, pack, parse
from reducers import Extremes, Mean, Moments, Product, Quantile, Reducer

SUBRECORDERS = 120
CPU = torch.device("cpu")
RANKS = (2, 4, 16, 256, 4096)
TIMED = (4, 64)
"""The numbers of ranks that fit here."""

REDUCERS: dict[str, Reducer] = {
    "means and extremes": Product(mean=Mean("b c -> c"), ends=Extremes("b c -> c")),
    "quantiles": Quantile("b c -> c", low=1e-6, high=1e6),
    "moments and a quantile": Product(moments=Moments("b c -> c"), quantile=Quantile()),
}


def recording(reducer: Reducer, rank: int) -> Recording:
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(rank))
    part = Subrecording(reducer, {"": reducer.update({}, x)}, 1)
    return Recording({f"layer{number}": part for number in range(SUBRECORDERS)})


def merging(own: Recording, packed: Packed, ranks: int, reduces: bool) -> Callable[[], Recording]:
    """What a rank does before it sends, and after the states of so many have arrived."""
    manifest = parse(packed.manifest)
    plan = Reduction([manifest], reduces)

    def merge() -> Recording:
        index = Index(manifest, plan.paths, plan.counted)
        row, numbers = index.gathered(packed, CPU), plan.numbers(packed, CPU)
        found = {"what was reduced": plan.read(own, numbers)} if numbers else {}
        found |= {f"rank {rank}": Recording(Sent(own, index, row)) for rank in range(ranks)}
        return Recording(Merged(found).all())

    return merge


def seconds(functions: dict[str, Callable[[], Recording]], rounds: int = 3) -> dict[str, float]:
    """Medians of processor time; taken in turn."""
    spent: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            started = time.process_time()
            function()
            spent[name].append(time.process_time() - started)
    return {name: statistics.median(times) for name, times in spent.items()}


def main() -> None:
    torch.set_num_threads(1)
    rows, times = [], []
    for what, reducer in REDUCERS.items():
        own = recording(reducer, 0)
        packed = pack(own, CPU, "error", "sync(to='all', missing='error')")
        manifest = parse(packed.manifest)
        plan = Reduction([manifest], reduces=True)
        whole, rest = Index(manifest).size, Index(manifest, plan.paths, plan.counted).size
        for ranks in RANKS:
            gathered = (ranks - 1) * whole
            reduced = (ranks - 1) * rest + 2 * (ranks - 1) * plan.size // ranks if ranks >= REDUCE_FROM else gathered
            rows.append({"what": what, "ranks": ranks, "state bytes": whole, "gathered": gathered, "reduced": reduced})
        for ranks in TIMED if what != "quantiles" else TIMED[:1]:
            ways = {"gathered": False, "reduced": True}
            took = seconds({name: merging(own, packed, ranks, reduces) for name, reduces in ways.items()})
            times.append({"what": what, "ranks": ranks, **{f"{name} ms": round(1e3 * each, 2) for name, each in took.items()}})
    for row in [*rows, *times]:
        print(", ".join(f"{name} {value}" for name, value in row.items()))
    print(write("sync_bytes", setting={"subrecorders": SUBRECORDERS, "channels": 64}, rows=rows, times=times))


if __name__ == "__main__":
    main()
