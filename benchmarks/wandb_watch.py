"""`wandb.watch(log="all")` beside a recorder of the same: what each sees, how often it waits for the device, what it costs.

Run, with `pip install '.[wandb]'`: python benchmarks/wandb_watch.py
"""

from __future__ import annotations

import collections
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import wandb
from measure import alternate, versions, write
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from recorders import ForwardMonitor, ParameterGradientMonitor, ParameterMonitor, Recorder
from reducers import Quantile

STEPS, WIDTH, LAYERS, BATCH = 10, 256, 8, 64


def net() -> nn.Sequential:
    torch.manual_seed(0)
    hidden = (part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU()))
    return nn.Sequential(*hidden, nn.Linear(WIDTH, 1))


def watch(module: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Histograms of all parameters and gradients at every step, in a run that sends nothing."""
    assert wandb.run is not None
    wandb.watch(module, log="all", log_freq=1)
    return optimizer.register_step_post_hook(lambda *_: wandb.run.log({}))


def record(module: nn.Module, optimizer: torch.optim.Optimizer) -> Recorder:
    """Distributions of the same at every step."""
    monitors = {"parameters": ParameterMonitor(Quantile()), "gradients": ParameterGradientMonitor(Quantile())}
    return Recorder(**monitors).modules(module, leaves=True).attach(optimizer)


def record_outputs_too(module: nn.Module, optimizer: torch.optim.Optimizer) -> Recorder:
    monitors = {"parameters": ParameterMonitor(Quantile()), "gradients": ParameterGradientMonitor(Quantile())}
    return Recorder(**monitors, outputs=ForwardMonitor(Quantile())).modules(module, leaves=True).attach(optimizer)


TOOLS: dict[str, Callable[[nn.Module, torch.optim.Optimizer], Any]] = {
    'wandb.watch(log="all")': watch,
    "recorder, the same": record,
    "recorder, outputs too": record_outputs_too,
}


def training(
    put: Callable[[nn.Module, torch.optim.Optimizer], Any] | None, wrapped: Callable[[nn.Module], Any] = lambda net: net
) -> Any:
    """A function that takes steps of a training."""
    module, batch = net(), torch.randn(BATCH, WIDTH)
    called = wrapped(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-4)
    kept = put(module, optimizer) if put is not None else None

    def steps(number: int = STEPS) -> Any:
        for _ in range(number):
            optimizer.zero_grad()
            called(batch).square().mean().backward()
            optimizer.step()
        return kept

    return steps


@contextmanager
def offline() -> Iterator[Any]:
    with tempfile.TemporaryDirectory() as folder:
        run = wandb.init(mode="offline", dir=folder, settings=wandb.Settings(silent=True, console="off", x_disable_stats=True))
        yield run
        run.finish()


class Waits(TorchDispatchMode):
    """Counts calls of `.item()`, each of which waits for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def waits(put: Callable[[nn.Module, torch.optim.Optimizer], Any]) -> int:
    """The number of waits in one step, after some that made it warm."""
    steps = training(put)
    steps(3)
    with Waits() as found:
        steps(1)
    return found.number


def seen(name: str, place: str) -> dict[str, Any]:
    """How many tensors were seen of each kind in three steps, and how often torch.compile broke its graph."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    wrapped: dict[str, Callable[[nn.Module], Any]] = {
        "alone": lambda module: module,
        "compiled": lambda module: torch.compile(module, backend="eager"),
        "FSDP2": sharded,
    }
    with offline() as run:
        kept = training(TOOLS[name], wrapped[place])(3)
        if isinstance(kept, Recorder):
            kinds = collections.Counter(key.split("/")[0] for key, monitor in kept.items() for _ in monitor.states)
        else:
            run.log({})
            kinds = collections.Counter(key.split("/")[0] for key in list(run.summary.keys()) if not key.startswith("_"))
    return {**kinds, "graph breaks": sum(counters["graph_break"].values())}


def sharded(module: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for layer in module:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    return fully_shard(module)


def on_rank(rank: int, store: str, results: str) -> None:
    os.environ["WANDB_SILENT"] = "true"
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for number, name in enumerate(TOOLS):
        try:
            found = seen(name, "FSDP2")
        except Exception as error:  # which ended the training
            found = {"failed": f"{type(error).__name__}: {error}".splitlines()[0]}
        Path(results, f"{rank}-{number}").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def main() -> None:
    os.environ["WANDB_SILENT"] = "true"
    torch.set_num_threads(1)
    found = {name: {place: seen(name, place) for place in ("alone", "compiled")} for name in TOOLS}
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(on_rank, (f"{folder}/store", folder), nprocs=2)
        for number, name in enumerate(TOOLS):
            found[name]["FSDP2, rank 0 of 2"] = json.loads(Path(folder, f"0-{number}").read_text())
    with offline():
        waiting = {name: waits(put) for name, put in TOOLS.items()}
        wandb.unwatch()
        times = alternate({name: training(put) for name, put in {"bare": None, **TOOLS}.items()}, seconds=4.0)
    bare = times["bare"]["median"]
    print(f"{'':24}{'times a bare step':>20}{'waits a step':>16}")
    for name in TOOLS:
        print(f"{name:24}{times[name]['median'] / bare:20.2f}{waiting[name]:16}")
    for name, places in found.items():
        for place, kinds in places.items():
            told = (f"{number} {kind}" for kind, number in kinds.items() if kind != "failed")
            print(f"{name}, {place}: {kinds.get('failed') or ', '.join(told)}")
    write("wandb_watch", times=times, waits=waiting, seen=found, packages=versions("wandb"))


if __name__ == "__main__":
    main()
