"""Statistics of a data set by map and reduce: Dask maps its shards to workers, which record, and merges the results as a tree.

Nothing in it is special to Dask: a recording is a value that pickles, and merging is associative, so any engine will do. If results
are too big to send, let each task save a folder, and merge the folders.

Run: python examples/map_reduce_with_dask.py [address of a Dask scheduler]
"""

from __future__ import annotations

import sys
import tempfile

import dask
import dask.bag
import torch
from sklearn.datasets import load_digits
from torch import nn

from recorders import ForwardMonitor, Recorder, Recording, merge
from reducers import Max, Min, Moments, Product, Quantile

CHANNELS = Product(moments=Moments("channels"), low=Min("channels"), high=Max("channels"), quantile=Quantile())
SHARDS = 6


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10)).eval()


def record(shards: list[int]) -> Recording:
    """What the layers of the network give for some shards of the data set."""
    torch.set_num_threads(1)
    images = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1) / 16
    net = network()
    with torch.inference_mode(), Recorder(ForwardMonitor(CHANNELS)).modules(net, types=(nn.Conv2d, nn.Linear)) as recorder:
        for shard in shards:
            net(images[shard::SHARDS])
    return recorder.snapshot()


def save(shard: int, folder: str) -> str:
    """Like a task of a job array: leaves a folder, and returns only where."""
    return str(record([shard]).save(f"{folder}/{shard}", layout="packed"))


def main(address: str | None = None) -> None:
    torch.set_num_threads(1)  # as on the workers, so that every shard gives the same activations, bit for bit
    if address is None:
        dask.config.set(scheduler="processes", num_workers=2)
    else:
        from dask.distributed import Client

        Client(address)  # from now on Dask computes there
    shards = dask.bag.from_sequence(range(SHARDS), npartitions=SHARDS)
    recordings = shards.map(lambda shard: record([shard])).fold(Recording.merge, split_every=3)
    with tempfile.TemporaryDirectory() as folder:  # on a cluster, one that all workers share
        returned, paths = dask.compute(recordings, shards.map(save, folder=folder))
        print(f"{SHARDS} recordings, merged as a tree:\n{returned}\n")
        saved = merge(paths)
        print(f"{len(paths)} folders, merged name by name:\n{saved}\n")
        alone = record(list(range(SHARDS))).compute()
        for found in (returned, saved):
            torch.testing.assert_close(found.compute(), alone, rtol=1e-12, atol=1e-12)
    print("Both are what one process records over the whole data set, to 1e-12.")


if __name__ == "__main__":
    main(*sys.argv[1:2])
