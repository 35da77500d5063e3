"""A process group changes nothing in how compiled graphs hand over observations, unless the tensors are parts: no Python runs."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from profiled import our_calls_of
from torch import Tensor, nn
from world import Place, World, returned

from recorders import BackwardMonitor, ForwardMonitor, Recorder, register_layouts
from recorders._torch import CAPTURES_IN_GRAPHS
from reducers import Moments, Summary
from reducers.kernels.cpp import library

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="torch.distributed is not built"),
    pytest.mark.skipif(not CAPTURES_IN_GRAPHS, reason="recording in graphs needs a later torch"),
    pytest.mark.skipif(not library.in_order(), reason="no C++ compiler"),
]

LAYERS, WARM, STEPS = 12, 4, 5


class Net(nn.Module):  # within DDP the compiler looks into no class of PyTorch, such as Sequential
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(LAYERS)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def recorder_of(model: nn.Module) -> Recorder:
    return Recorder(out=ForwardMonitor(Summary("b c -> c")), gradient=BackwardMonitor(Moments())).modules(model, types=nn.Linear)


def steady(place: Place | None, wrapped: bool, backend: str) -> tuple[int, list[int]]:
    """The Python calls of some steps, after some others; and how many observations there are."""
    import torch._dynamo
    import torch.distributed.tensor.parallel  # as the compiler does in later steps

    for category in (UserWarning, DeprecationWarning, FutureWarning):  # of the compiler itself
        warnings.filterwarnings("ignore", category=category)
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Net()
    called = nn.parallel.DistributedDataParallel(model) if wrapped else model
    with recorder_of(model) as recorder:
        run = torch.compile(called, backend=backend)

        def step() -> None:
            run(torch.ones(4, 8)).square().sum().backward()

        for _ in range(WARM):
            step()
        calls = our_calls_of(lambda: [step() for _ in range(STEPS)])  # the backward runs in this thread, too
    return calls, list(recorder.samples.values())


def test_python_of_ours_runs_in_no_step_without_a_group() -> None:
    with warnings.catch_warnings():
        calls, samples = steady(None, False, "aot_eager")
    assert calls == 0
    assert samples == [WARM + STEPS] * 2 * LAYERS


@pytest.mark.slow
@pytest.mark.parametrize("wrapped", [False, True], ids=["alone", "ddp"])
def test_nor_within_a_group_whether_ranks_train_alone_or_together(pair: World, wrapped: bool) -> None:
    for calls, samples in returned(pair.run(steady, wrapped, "aot_eager")):
        assert calls == 0
        assert samples == [WARM + STEPS] * 2 * LAYERS


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down(self.act(self.up(x)))
        return found


def parts(place: Place, parallel: bool, late: bool) -> Any:
    """What is recorded of a layer between tensor-parallel ones if its layout is told, before or after the graph was made."""
    import torch._dynamo
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for category in (UserWarning, DeprecationWarning, FutureWarning):
        warnings.filterwarnings("ignore", category=category)
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, mesh = Parts().double(), init_device_mesh("cpu", (2,))
    if parallel:
        parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if not late and parallel:
        register_layouts(model, mesh, outputs={"up": Shard(-1), "act": Shard(-1), "down": Replicate()})
    recorder = Recorder(ForwardMonitor(Moments("b c -> c"))).modules(model, names=["up", "act", "down"])
    run = torch.compile(model, backend="aot_eager")
    rows = torch.linspace(-1, 1, 16, dtype=torch.float64).view(4, 4)
    for step in range(6):
        if step == 3 and late:
            recorder.reset()
            if parallel:
                register_layouts(model, mesh, outputs={"up": Shard(-1), "act": Shard(-1), "down": Replicate()})
        run(rows * (step + 1)).sum().backward()
    merged = recorder.sync() if parallel else recorder.snapshot()
    return merged.compute(), dict(merged.samples)


@pytest.mark.slow
@pytest.mark.parametrize("late", [False, True])
def test_parts_of_tensors_are_still_put_together(pair: World, late: bool) -> None:
    whole, samples = returned(pair.run(parts, False, late))[0]
    for results, counted in returned(pair.run(parts, True, late)):
        torch.testing.assert_close(results, whole, rtol=1e-12, atol=1e-12)
        assert counted == samples
