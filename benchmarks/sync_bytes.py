"""What a `sync` costs a rank by the number of ranks: bytes that it receives, and its processor time to merge; 120 subrecorders.

Bytes are those of the tensors that ranks hand over, times what the rings of gloo and NCCL pass on to each rank: of a gather those
of all others, of an all-reduce 2 (n - 1) / n of its own. Other ranks are played in this process.
Run: python benchmarks/sync_bytes.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from measure import write
from torch import Tensor

from recorders import Recording, Subrecording
from recorders.recordings.distributed.exchange import REDUCE_FROM
from recorders.recordings.distributed.message import pack, parse
from recorders.recordings.distributed.reduction import Reduction
from recorders.recordings.distributed.sync import _gathered
from reducers import Extremes, Mean, Moments, Product, Quantile, Reducer

SUBRECORDERS = 120
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


def merging(own: Recording, manifest: dict[str, Any], payload: Tensor, ranks: int, reduces: bool) -> Callable[[], Recording]:
    """What a rank does before it sends, and after the states of so many have arrived."""
    plan = Reduction([manifest] * ranks, reduces)

    def merge() -> Recording:
        rest, reduced = plan.split(manifest, payload)
        rows = [(rank, plan.rests[0], rest, len(rest)) for rank in range(ranks)]
        return plan.join(own, _gathered(own, rows, "error"), reduced)

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
        raw, payload = pack(own, torch.device("cpu"), "error", "sync(to='all', missing='error')")
        manifest = parse(raw)
        plan = Reduction([manifest], reduces=True)
        for ranks in RANKS:
            gathered = (ranks - 1) * len(payload)
            reduced = (ranks - 1) * plan.sizes[0] + 2 * (ranks - 1) * plan.size // ranks if ranks >= REDUCE_FROM else gathered
            rows.append({"what": what, "ranks": ranks, "state bytes": len(payload), "gathered": gathered, "reduced": reduced})
        for ranks in TIMED if what != "quantiles" else TIMED[:1]:
            ways = {"gathered": False, "reduced": True}
            took = seconds({name: merging(own, manifest, payload, ranks, reduces) for name, reduces in ways.items()})
            times.append({"what": what, "ranks": ranks, **{f"{name} ms": round(1e3 * each, 2) for name, each in took.items()}})
    for row in [*rows, *times]:
        print(", ".join(f"{name} {value}" for name, value in row.items()))
    print(write("sync_bytes", setting={"subrecorders": SUBRECORDERS, "channels": 64}, rows=rows, times=times))


if __name__ == "__main__":
    main()
