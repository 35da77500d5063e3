"""A training over several processes, under DDP and then under FSDP2, which records activations, weights and gradients.

Run: torchrun --nproc-per-node 2 examples/distributed/train.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from recorders import ForwardMonitor, ParameterGradientMonitor, ParameterMonitor, Recorder, Recording
from reducers import Count, Max, Min, Moments, Norm, Product

STEPS = 4


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)).double()


def batches() -> tuple[Tensor, ...]:
    return torch.randn(STEPS, 16, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).unbind()


def train(net: nn.Module, parts: int, mine: int) -> Recorder:
    """Trains on one part of each batch, and records; nothing is communicated for it."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    recorder = Recorder(
        activations=ForwardMonitor(Product(count=Count(), low=Min(), high=Max(), moments=Moments())),
        weights=ParameterMonitor(Norm()),
        rows=ParameterMonitor(Norm("o i -> o"), attr="weight"),
        gradients=ParameterGradientMonitor(Norm()),
    ).modules(net, types=nn.Linear)
    with recorder:
        for batch in batches():
            optimizer.zero_grad()
            net(batch.chunk(parts)[mine]).square().mean().backward()
            optimizer.step()
    return recorder


def under_ddp() -> nn.Module:
    return nn.parallel.DistributedDataParallel(network())


def under_fsdp2() -> nn.Module:
    net = network()
    for layer in (net[0], net[2], net):
        fully_shard(layer)
    return net


def shown(name: str, recording: Recording) -> str:
    weights, activations = recording["weights/0"].peek(), recording["activations/0"].peek()
    return f"{name}: weight norm {weights['weight']:.6f}, highest activation {activations['high']:.6f} of {activations['count']}"


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    alone = train(network(), 1, 0).snapshot()  # the same in one process, to compare with
    if rank == 0:
        print(shown("one process", alone))
    for name, make in (("DDP", under_ddp), ("FSDP2", under_fsdp2)):
        recorder = train(make(), ranks, rank)
        recorder["weights/0"].peek()  # what this rank holds: all of the weight under DDP, its part of it under FSDP2
        together = recorder.sync()
        torch.testing.assert_close(together.compute(), alone.compute(), rtol=1e-10, atol=1e-10)
        if rank == 0:
            print(shown(f"{ranks} processes under {name}", together))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
