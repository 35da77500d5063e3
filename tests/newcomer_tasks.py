"""Fourteen tasks, as written by somebody who has read README.md, docs/ten-lines.md, docs/quickstart.md, and a page that they link.

Each function returns what the script found, and what plain PyTorch computes.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from recorders import ForwardMonitor, ParameterGradientMonitor, Recorder, Stream, StreamDataset, merge, presets
from reducers import Activity, FirstNonfinite, Histogram, Masked, Mean, Moments, Norm, PerObservation, TopK

TASKS: dict[str, Callable[[], tuple[Any, Any]]] = {}
SLOW = {"statistics_of_two_processes"}


def task(function: Callable[[], tuple[Any, Any]]) -> Callable[[], tuple[Any, Any]]:
    TASKS[function.__name__] = function
    return function


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4))


def batches(steps: int = 4) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [*torch.randn(steps * 10, 8).split(10)]


def outputs(layer: nn.Module, seen: list[torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([layer(batch) for batch in seen]).double()


def train(net: nn.Module, optimizer: torch.optim.Optimizer, seen: list[torch.Tensor], after: Callable[[], object] = int) -> None:
    for batch in seen:
        optimizer.zero_grad()
        net(batch).square().mean().backward()
        after()
        optimizer.step()


@task
def mean_and_std_of_a_layer_over_a_data_set() -> tuple[Any, Any]:
    net, loader = network(), batches()
    with torch.no_grad(), Recorder(ForwardMonitor(Moments())).modules(net, names="0") as recorder:
        for batch in loader:
            net(batch)
    found = recorder["0"].peek()
    want = outputs(net[0], loader)
    return (found["mean"], found["std"]), (want.mean(), want.std())


@task
def gradient_norm_of_each_layer_and_step_as_a_table() -> tuple[Any, Any]:
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with Recorder(ParameterGradientMonitor(PerObservation(Norm()), "weight")).modules(net, types=nn.Linear) as recorder:
        train(net, optimizer, batches())
    table = recorder.to_frame().pivot(index="index", columns="name", values="value")

    other, want = network(), []
    train(
        other,
        torch.optim.SGD(other.parameters(), lr=0.1),
        batches(),
        lambda: want.append([other[i].weight.grad.double().norm().item() for i in (0, 2)]),
    )
    return torch.tensor(table[["0", "2"]].to_numpy()), torch.tensor(want, dtype=torch.float64)


@task
def dead_relus() -> tuple[Any, Any]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(108, 2))
    nn.init.constant_(net[0].bias[:1], -9.0)
    images = torch.randn(4, 1, 8, 8)
    with torch.no_grad(), Recorder(ForwardMonitor(Activity("channels"))).modules(net, types=nn.ReLU) as recorder:
        net(images)
    return recorder["1"].peek()["dead"], (net[:2](images) <= 0).transpose(0, 1).flatten(1).all(dim=1)


@task
def first_layer_and_step_with_nan() -> tuple[Any, Any]:
    net = network()
    with Recorder(ForwardMonitor(FirstNonfinite())).modules(net, leaves=True) as recorder:
        for step, batch in enumerate(batches(5)):
            if step == 3:
                nn.init.constant_(net[2].bias, torch.nan)
            net(batch)
    first = {name: int(step) for name, step in recorder.compute().items() if step >= 0}
    return min(first.items(), key=lambda item: item[1]), ("2", 3)


@task
def ratio_of_updates_to_weights() -> tuple[Any, Any]:
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with presets.update_ratio().modules(net) as recorder:
        train(net, optimizer, batches())
    found = [recorder.value(name, stat="ratio") for name in ("0", "2")]

    other, want = network(), []
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    for batch in batches():
        before = [other[i].weight.detach().double() for i in (0, 2)]
        train(other, optimizer, [batch])
        want.append([((other[i].weight.double() - old).norm() / old.norm()).item() for i, old in zip((0, 2), before, strict=True)])
    return torch.stack(found, dim=1), torch.tensor(want)


@task
def ids_of_the_samples_that_excite_a_unit_most() -> tuple[Any, Any]:
    net, loader = network(), batches()
    recorder = Recorder(ForwardMonitor(TopK("b c -> c", k=3), given="ids")).modules(net, names="0")
    with torch.no_grad(), recorder:
        for step, batch in enumerate(loader):
            with recorder.given(ids=torch.arange(10) + 10 * step):
                net(batch)
    best = recorder["0"].peek()
    want = outputs(net[0], loader).float().topk(3, dim=0)
    return (best["id"], best["value"]), (want.indices.T, want.values.T)


@task
def histogram_of_activations() -> tuple[Any, Any]:
    net, loader = network(), batches()
    with torch.no_grad(), Recorder(ForwardMonitor(Histogram(bins=10, low=-3.0, high=3.0))).modules(net, names="0") as recorder:
        for batch in loader:
            net(batch)
    return recorder["0"].peek()["counts"].double(), torch.histc(outputs(net[0], loader), 10, -3, 3)


@task
def attention_map_of_each_head() -> tuple[Any, Any]:
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(4, 5, 8)
    monitor = ForwardMonitor(Mean("b head query key -> head query key"), op_=lambda output: output[1])
    with torch.no_grad(), Recorder(monitor).modules(attention, names="(net)") as recorder:
        attention(x, x, x, average_attn_weights=False)
    with torch.no_grad():
        want = attention(x, x, x, average_attn_weights=False)[1].double().mean(dim=0)
    return recorder[0].peek(), want


@task
def norm_of_activations_by_position_without_padding() -> tuple[Any, Any]:
    torch.manual_seed(0)
    net, x = network(), torch.randn(4, 5, 8)
    mask = torch.tensor([[True] * length + [False] * (5 - length) for length in (5, 3, 2, 1)])
    monitor = ForwardMonitor(Masked(Mean("b t -> t")), op_=lambda output: output.norm(dim=-1), given="mask")
    with torch.no_grad(), Recorder(monitor).modules(net, names="0") as recorder, recorder.given(mask=mask):
        net(x)
    with torch.no_grad():
        norms = net[0](x).norm(dim=-1).double()
    return recorder["0"].peek(), torch.stack([norms[mask[:, t], t].mean() for t in range(5)])


@task
def activations_on_disk_and_back_in_batches() -> tuple[Any, Any]:
    net, loader = network(), batches()
    with torch.no_grad(), Stream("acts") as stream, stream.attach(net, ["0"]):
        for batch in loader:
            net(batch)
    data = StreamDataset("acts", "0")
    read = torch.cat([*torch.utils.data.DataLoader(data, batch_size=16)])
    return read, outputs(net[0], loader).float()


_PROCESS = """
import sys
import torch
from newcomer_tasks import batches, network
from recorders import ForwardMonitor, Recorder
from reducers import Moments

net, rank = network(), int(sys.argv[1])
with torch.no_grad(), Recorder(ForwardMonitor(Moments())).modules(net, names="0") as recorder:
    for batch in batches()[rank::2]:
        net(batch)
recorder.save(f"part-{rank}")
"""


@task
def statistics_of_two_processes() -> tuple[Any, Any]:
    path = f"import sys; sys.path[:0] = {sys.path!r}\n"
    runs = [subprocess.Popen([sys.executable, "-c", path + _PROCESS, rank]) for rank in ("0", "1")]
    assert [run.wait(timeout=300) for run in runs] == [0, 0]
    found = merge(["part-0", "part-1"])["0"].peek()
    want = outputs(network()[0], batches())
    return (found["mean"], found["var"]), (want.mean(), want.var())


@task
def evaluation_only() -> tuple[Any, Any]:
    net = network()
    evaluated = batches(6)[4:]
    with Recorder(ForwardMonitor(Mean(), train_update=False)).modules(net, names="0") as recorder:
        train(net, torch.optim.SGD(net.parameters(), lr=0.1), batches())
        net.eval()
        for batch in evaluated:
            net(batch)
    return (recorder["0"].samples, recorder["0"].peek()), (2, outputs(net[0], evaluated).mean())


@task
def every_hundredth_step() -> tuple[Any, Any]:
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    monitor = ForwardMonitor(PerObservation(Mean()), every_step=100)
    with Recorder(monitor).modules(net, names="0").attach(optimizer) as recorder:
        train(net, optimizer, batches(250))

    other, want = network(), []
    optimizer = torch.optim.SGD(other.parameters(), lr=0.01)
    for step, batch in enumerate(batches(250)):
        want += [outputs(other[0], [batch]).mean()] if step % 100 == 0 else []
        train(other, optimizer, [batch])
    return recorder["0"].peek(), torch.stack(want)


@task
def kurtosis_of_each_channel() -> tuple[Any, Any]:
    net, loader = network(), batches()
    with torch.no_grad(), Recorder(ForwardMonitor(Moments("channels", order=4))).modules(net, names="0") as recorder:
        for batch in loader:
            net(batch)
    centred = outputs(net[0], loader)
    centred = centred - centred.mean(dim=0)
    excess = centred.pow(4).mean(dim=0) / centred.square().mean(dim=0).square() - 3  # as scipy.stats.kurtosis defines it
    return recorder["0"].peek()["kurtosis"], excess
