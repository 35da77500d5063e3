"""Calibration ranges, per channel, over several processes: each records its shard, `recorder.sync()` makes one recording of all.

Run: python examples/calibrate_on_many_processes.py [processes]
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from sklearn.datasets import load_digits
from torch import Tensor, nn

from recorders import ForwardMonitor, Recorder
from recorders.recordings.storage.load import load
from reducers import Max, Min, Moments, Product

CHANNELS = Product(
    low=Min("b c ... -> c"),
    high=Max("b c ... -> c"),
    moments=Moments("b c ... -> c"),
)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
    )


def batches() -> tuple[Tensor, ...]:
    """All digits, as images of 8 x 8 in batches of 64; the last batch is smaller."""
    images = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1) / 16
    return images.split(64)


def calibrate(shard: tuple[Tensor, ...]) -> Recorder:
    net = network().eval()
    with torch.inference_mode(), Recorder(ForwardMonitor(CHANNELS)).modules(net, types=(nn.Conv2d, nn.Linear)) as recorder:
        for images in shard:
            net(images)
    return recorder


def work(rank: int, processes: int, folder: str) -> None:
    """What each process does; with `torchrun` in place of this script's own `spawn` it is the same."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=processes)
    recorder = calibrate(batches()[rank::processes])
    everyone = recorder.sync()
    print(f"rank {rank} recorded {recorder.samples[0]} of {everyone.samples[0]} batches", flush=True)
    if rank == 0:
        everyone.save(Path(folder) / "ranges")
    dist.destroy_process_group()


def main(processes: int = 2) -> None:
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)  # as in the processes, so that every batch gives the same activations, bit for bit
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, args=(processes, folder), nprocs=processes)
        ranges = load(Path(folder) / "ranges").compute()
    print(f"\n{'layer':>6} {'channels':>8} {'lowest':>8} {'highest':>8} {'widest channel':>15}")
    for layer, result in ranges.items():
        widths = result["high"] - result["low"]
        print(f"{layer:>6} {len(widths):>8} {result['low'].min():>8.3f} {result['high'].max():>8.3f} {widths.max():>15.3f}")
    torch.testing.assert_close(ranges, calibrate(batches()).compute(), rtol=1e-12, atol=1e-12)
    print(f"\n{processes} processes and one pass over all digits give the same ranges, means and variances, to 1e-12.")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
