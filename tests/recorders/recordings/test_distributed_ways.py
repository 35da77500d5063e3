"""Further ways to train over two processes: what ranks record together is what one process records, and trainings do not change."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from world import Place, World, alike, returned

from recorders import (
    BackwardMonitor,
    ForwardInputMonitor,
    ForwardMonitor,
    OptimizerStateMonitor,
    ParameterGradientMonitor,
    ParameterMonitor,
    ParameterUpdateMonitor,
    Recorder,
    Recording,
    global_gradient,
    merge,
)
from reducers import Count, Last, Max, Min, Moments, Norm, Product

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch.distributed is not built")


class Block(nn.Module):
    def __init__(self, recomputed: bool) -> None:
        super().__init__()
        self.up, self.down, self.recomputed = nn.Linear(4, 6), nn.Linear(6, 1), recomputed

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._body, x, use_reentrant=False) if self.recomputed else self._body(x)  # type: ignore[no-any-return]

    def _body(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x))) + x  # type: ignore[no-any-return]


def net(recomputed: bool = False) -> nn.Sequential:
    """Of small whole numbers: all arithmetic is exact. Its last layers have fewer rows than there are ranks."""
    model = nn.Sequential(Block(recomputed), Block(recomputed)).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-1, 2, parameter.shape, generator=generator))
    return model


def recorder_of(model: nn.Module) -> Recorder:
    everything = Product(count=Count(), low=Min(), high=Max(), norm=Norm(), moments=Moments())
    return Recorder(
        out=ForwardMonitor(everything),
        channels=ForwardMonitor(Moments("b c -> c")),
        input=ForwardInputMonitor(everything),
        gradient=BackwardMonitor(everything, op_=global_gradient),
        value=ParameterMonitor(everything),
        whole=ParameterMonitor(Last()),
        final=ParameterGradientMonitor(everything),
        update=ParameterUpdateMonitor(everything),
        momentum=OptimizerStateMonitor(Norm(), "momentum_buffer"),
    ).modules(model, types=nn.Linear)


def rows_of(step: int, parts: int, mine: int) -> Tensor:
    return torch.randint(-2, 3, (8, 4), generator=torch.Generator().manual_seed(step)).double().chunk(parts)[mine]


def train(model: nn.Module, parts: int, mine: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)
    for step in range(3):
        optimizer.zero_grad()
        model(rows_of(step, parts, mine).to(dtype)).mean().backward()
        optimizer.step()
    return [getattr(parameter, "_local_tensor", parameter).detach().clone() for parameter in model.parameters()]


def fully(model: nn.Sequential, **options: Any) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    for part in (*model, model):
        fully_shard(part, mesh=mesh, **options)
    return model


def offloaded(model: nn.Sequential) -> nn.Module:
    from torch.distributed.fsdp import CPUOffloadPolicy

    return fully(model, offload_policy=CPUOffloadPolicy(pin_memory=False))


WAYS: dict[str, Callable[[], nn.Module]] = {
    "ddp, static graph": lambda: nn.parallel.DistributedDataParallel(net(), static_graph=True),
    "ddp, recomputed": lambda: nn.parallel.DistributedDataParallel(net(recomputed=True), static_graph=True),
    "fsdp2": lambda: fully(net()),
    "fsdp2, parameters stay whole": lambda: fully(net(), reshard_after_forward=False),
    "fsdp2, recomputed": lambda: fully(net(recomputed=True)),
    "fsdp2, on the CPU between steps": lambda: offloaded(net()),
}


def went(place: Place, way: str) -> Any:
    model = WAYS[way]()
    with recorder_of(model) as recorder:
        left = train(model, 2, place[0])
    without = train(WAYS[way](), 2, place[0])
    assert all(torch.equal(a, b) for a, b in zip(left, without, strict=True))
    merged = recorder.sync()
    return merged.compute(), dict(merged.samples)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_ranks_record_what_one_process_records(pair: World, way: str) -> None:
    model = net()
    with recorder_of(model) as alone:
        train(model, 1, 0)
    results, samples = alike_results(returned(pair.run(went, way)))
    torch.testing.assert_close(results, alone.compute(), rtol=1e-12, atol=1e-12)
    own = {"out", "channels", "input", "gradient"}  # each is the data of a rank
    assert samples == {name: m.samples * (2 if name.split("/")[0] in own else 1) for name, m in alone.items()}


def alike_results(answers: list[Any]) -> Any:
    torch.testing.assert_close(answers[0], answers[1], rtol=0, atol=0)
    return answers[0]


def in_half_precision(place: Place) -> Any:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    def make() -> nn.Module:
        return fully(net(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))

    model = make()
    seen: list[Tensor] = []
    model[0].up.register_forward_hook(lambda module, args, output: seen.append(output.detach().clone()))  # type: ignore[index, union-attr]
    with recorder_of(model) as recorder:
        left = train(model, 2, place[0], torch.bfloat16)
    without = train(make(), 2, place[0], torch.bfloat16)
    assert all(torch.equal(a, b) for a, b in zip(left, without, strict=True))
    whole = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}  # type: ignore[operator]
    return recorder.sync().compute(), torch.cat(seen), whole


@pytest.mark.slow
def test_mixed_precision_under_fsdp2(pair: World) -> None:
    answers = returned(pair.run(in_half_precision))
    results, _, whole = answers[0]
    seen = torch.cat([answer[1] for answer in answers]).double()
    out = results["out/0.up"]
    assert (out["count"].item(), out["low"].item(), out["high"].item()) == (seen.numel(), seen.min().item(), seen.max().item())
    torch.testing.assert_close(out["norm"], seen.norm(), rtol=1e-12, atol=0)
    for name, parameter in whole.items():
        layer, _, leaf = name.rpartition(".")
        assert torch.equal(results[f"whole/{layer}"][leaf], parameter)
        assert parameter.dtype is torch.float64


def accumulated(place: Place, sharded: bool) -> Any:
    model = fully(net()) if sharded else nn.parallel.DistributedDataParallel(net())
    with recorder_of(model) as recorder:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)
        recorder.attach(optimizer)
        for part in range(2):
            if sharded:
                model.set_requires_gradient_sync(part == 1)  # type: ignore[operator]
            with model.no_sync() if not sharded and part == 0 else nullcontext():  # type: ignore[operator]
                model(rows_of(0, 4, 2 * place[0] + part)).mean().backward()
        optimizer.step()
    merged = recorder.sync()
    return {name: merged[name].peek() for name in ("final/0.up", "update/1.down")}, merged.samples["out/0.up"]


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
def test_accumulation_without_a_reduction(pair: World, sharded: bool) -> None:
    model = net()
    with recorder_of(model) as alone:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)
        (2 * model(rows_of(0, 1, 0)).mean()).backward()  # two means of a half of what a rank has, and the mean of the ranks
        optimizer.step()
    expected = {name: alone[name].peek() for name in ("final/0.up", "update/1.down")}
    for results, samples in returned(pair.run(accumulated, sharded)):
        torch.testing.assert_close(results, expected, rtol=1e-12, atol=1e-12, equal_nan=True)  # of one number
        assert samples == 4


def counted(place: Place) -> Any:
    """How many collectives two steps take, without a recorder and with one that is read; and how much that recorded."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    def parallel() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4)).double()
        plan = {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel(use_local_output=False)}
        return parallelize_module(model, init_device_mesh("cpu", (2,)), plan)  # type: ignore[arg-type]

    found = []
    for make in (lambda: nn.parallel.DistributedDataParallel(net()), lambda: fully(net()), parallel):
        for records in (False, True):
            model = make()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)
            recorder = recorder_of(model) if records else None
            with torch.autograd.profiler.profile() as profile:  # monitors run outside of modes, which would miss theirs
                for _ in range(2):
                    output = model(rows_of(0, 1, 0))
                    (output.full_tensor() if hasattr(output, "full_tensor") else output).mean().backward()
                    optimizer.step()
                if recorder is not None:
                    recorder.compute()
                    recorder.snapshot()
                    recorder.report()
            collectives = [event.name for event in profile.function_events if event.name.startswith(("c10d::", "gloo:"))]
            found.append((sorted(collectives), sum(recorder.samples.values()) if recorder else 0))
    return found


@pytest.mark.slow
def test_no_monitor_communicates_and_reading_is_local(pair: World) -> None:
    found = returned(pair.run(counted))
    for answer in found:
        for (plain, _), (recorded, samples) in zip(answer[::2], answer[1::2], strict=True):
            assert recorded == plain != []
            assert samples > 30


def checkpointed(place: Place, folder: str) -> Any:
    import torch.distributed.checkpoint as dcp

    model = fully(net())
    with recorder_of(model) as recorder:
        train(model, 2, place[0])
    dcp.save({f"recorder-{place[0]}": recorder.state_dict()}, checkpoint_id=folder)
    fresh = recorder_of(fully(net()))
    state = {f"recorder-{place[0]}": fresh.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    fresh.load_state_dict(state[f"recorder-{place[0]}"])
    return same(fresh.snapshot(), recorder.snapshot()) and same(fresh.sync(), recorder.sync())


def same(a: Recording, b: Recording) -> bool:
    assert list(a) == list(b)
    assert [part.placement for part in a.values()] == [part.placement for part in b.values()]
    torch.testing.assert_close(a.compute(), b.compute(), rtol=0, atol=0)
    return list(a.samples.values()) == list(b.samples.values())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_distributed_checkpoint_holds_what_each_rank_recorded(pair: World, tmp_path: Path) -> None:
    assert alike(pair.run(checkpointed, str(tmp_path / "checkpoint"))) is True


STAGES = (("0", "1"), ("2", "3"))


def whole_pipeline() -> nn.Sequential:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4), nn.Linear(4, 2)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-1, 2, parameter.shape, generator=generator))
    return model


def stage_of(rank: int) -> nn.Sequential:
    """The layers of a rank, by their names in the whole net."""
    from collections import OrderedDict

    model = whole_pipeline()
    return nn.Sequential(OrderedDict((name, model.get_submodule(name)) for name in STAGES[rank]))


def in_stages(place: Place, schedule: str, folder: str) -> Any:
    import torch.distributed.pipelining as pipelining

    warnings.filterwarnings("ignore", category=UserWarning)  # of PyTorch itself
    warnings.filterwarnings("ignore", category=FutureWarning)
    rank, left, numbers = place[0], [], list[int]()
    for records in (False, True):
        model = stage_of(rank)
        rows, middle, last = (torch.zeros(2, size, dtype=torch.float64, requires_grad=size != 4) for size in (4, 6, 2))
        # Without examples PyTorch finds out the shapes by one more forward, which would be recorded.
        shapes = {"input_args": (middle,), "output_args": (last,)} if rank else {"input_args": (rows,), "output_args": (middle,)}
        stage = pipelining.PipelineStage(model, rank, 2, torch.device("cpu"), **shapes)  # type: ignore[arg-type]
        run = getattr(pipelining, schedule)(stage, n_microbatches=4, loss_fn=lambda output, target: (output - target).mean())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)
        recorder = recorder_of(model).attach(optimizer) if records else None
        if recorder is not None:
            model[0].register_forward_hook(lambda *_, clock=recorder.clock: numbers.append(clock.micro_batch))
        for step in range(3):
            optimizer.zero_grad()
            if rank == 0:
                run.step(rows_of(step, 1, 0))
            else:
                run.step(target=torch.zeros(8, 2, dtype=torch.float64))
            optimizer.step()
        left.append([parameter.detach().clone() for parameter in model.parameters()])
    assert recorder is not None
    assert all(torch.equal(a, b) for a, b in zip(*left, strict=True))
    recorder.save(f"{folder}/{rank}")
    merged = recorder.sync(missing="keep")
    return merged.compute(), dict(merged.samples), recorder.clock.step, numbers


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("schedule", ["Schedule1F1B", pytest.param("ScheduleGPipe", marks=pytest.mark.slow)])
def test_the_stages_of_a_pipeline_make_one_recording(pair: World, schedule: str, tmp_path: Path) -> None:
    model = whole_pipeline()
    with recorder_of(model) as alone:
        train(model, 1, 0)
    expected = alone.compute()
    answers = returned(pair.run(in_stages, schedule, str(tmp_path)))
    results, samples = alike_results([answer[:2] for answer in answers])
    for name in [name for name in expected if name.startswith("gradient")]:
        # The loss of a micro-batch is a mean of its rows, and the gradient was divided by the two ranks.
        of_all, of_parts = expected.pop(name), results.pop(name)
        torch.testing.assert_close(of_parts["norm"] * 2 / 4, of_all["norm"], rtol=1e-12, atol=0)  # type: ignore[index, call-overload]
    torch.testing.assert_close(results, expected, rtol=1e-12, atol=1e-12)
    own = {"out", "channels", "input", "gradient"}
    assert samples == {name: m.samples * (4 if name.split("/")[0] in own else 1) for name, m in alone.items()}
    assert [answer[2] for answer in answers] == [3, 3]
    assert [answer[3] for answer in answers] == [[0, 1, 2, 3] * 3] * 2
    offline = merge([f"{tmp_path}/{rank}" for rank in (0, 1)], missing="keep")
    assert list(offline.samples.values()) == list(samples.values())


def with_experts(place: Place) -> Any:
    """Each rank has the shared layer, on its part of the batch, and an expert, on those tokens of all that are routed to it."""
    rank = place[0]
    shared, expert = whole_pipeline()[0], nn.Linear(6, 2).double()
    nn.init.constant_(expert.weight, rank + 1)
    layers = nn.ModuleDict({"shared": shared, f"expert-{rank}": expert})
    optimizer = torch.optim.SGD(expert.parameters(), lr=0.125)
    recorder = Recorder(out=ForwardMonitor(Product(count=Count(), norm=Norm())), value=ParameterMonitor(Norm())).modules(
        layers, types=nn.Linear
    )
    with recorder:
        mine = shared(rows_of(0, 2, rank)).detach()
        parts = [torch.empty_like(mine) for _ in range(2)]
        dist.all_gather(parts, mine)
        tokens = torch.cat(parts)
        expert(tokens[(tokens.sum(1) > 0).long() == rank]).mean().backward()
        optimizer.step()
    merged = recorder.sync(missing="keep")
    return sorted(merged), {name: merged[name].peek() for name in ("out/shared", f"out/expert-{rank}")}, expert.weight.detach()


def test_experts_are_kept_apart_and_shared_layers_merge(pair: World) -> None:
    answers = returned(pair.run(with_experts))
    hidden = whole_pipeline()[0](rows_of(0, 1, 0)).detach()
    for rank, (names, found, _) in enumerate(answers):
        assert names == ["out/expert-0", "out/expert-1", "out/shared", "value/expert-0", "value/expert-1", "value/shared"]
        torch.testing.assert_close(found["out/shared"]["norm"], hidden.norm(), rtol=1e-12, atol=0)
        assert found[f"out/expert-{rank}"]["count"] == 2 * ((hidden.sum(1) > 0).long() == rank).sum()


def scaled(place: Place) -> Any:
    model = nn.parallel.DistributedDataParallel(net())
    part = dist.new_subgroups(1)[0]
    monitors = {
        "mine": BackwardMonitor(Norm()),
        "all": BackwardMonitor(Norm(), op_=global_gradient),
        "group": BackwardMonitor(Norm(), op_=functools.partial(global_gradient, group=part)),
    }
    with Recorder(**monitors).modules(model, names="0.up") as recorder:
        train(model, 2, place[0])
    return recorder.sync().compute()


@pytest.mark.slow
def test_gradients_of_outputs_are_scaled_by_name(pair: World) -> None:
    model = net()
    with Recorder(BackwardMonitor(Norm())).modules(model, names="0.up") as alone:
        train(model, 1, 0)
    for found in returned(pair.run(scaled)):
        torch.testing.assert_close(found["all/0.up"], alone[0].peek(), rtol=1e-12, atol=0)
        torch.testing.assert_close(found["mine/0.up"], found["all/0.up"] * 2, rtol=1e-12, atol=0)
        torch.testing.assert_close(found["group/0.up"], found["mine/0.up"], rtol=1e-12, atol=0)
    assert global_gradient(torch.ones(2)).tolist() == [1, 1]  # in one process
