"""Ranks that should hold equal parameters: DDP, FSDP2 and tensor parallelism against one process, and faults of one rank."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from world import Place, World, alike

from benchmarks.diagnosis.planted import Setup
from recorders import (
    ForwardMonitor,
    ParameterGradientMonitor,
    ParameterMonitor,
    Recorder,
    RecordingWarning,
    findings,
    load,
    presets,
)
from recorders.recordings.distributed.differing import Differing
from recorders.watch.diagnosis.finding import Finding
from reducers import Collect, Fingerprints, sketch_distance

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch.distributed is not built")

LISTED = Fingerprints(k=256)
STEPS, SAMPLES = 5, 12
EPS = torch.finfo(torch.float32).eps


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def batch(step: int, parts: int = 1, mine: int = 0) -> tuple[Tensor, Tensor]:
    """The inputs and the target of a step, of which this is one part."""
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(SAMPLES, 8, generator=generator), torch.randn(SAMPLES, 4, generator=generator)
    return x.chunk(parts)[mine], y.chunk(parts)[mine]


def noise(steps: int, changes: float) -> float:
    """How far rounding alone takes parameters from one process, relative to them.

    A gradient is a mean over samples, whose terms ranks add in another order: its rounding errors, of eps each, add up like
    sqrt(samples). Each step adds those of its update, and another eps as it is added to the parameters.

    Args:
        changes: the largest norm of an update relative to the parameters.
    """
    return steps * EPS * (1 + changes * math.sqrt(SAMPLES))


def recorder_of(model: nn.Module) -> Recorder:
    value, gradient = ParameterMonitor(LISTED), ParameterGradientMonitor(LISTED)
    return Recorder(value=value, gradient=gradient).modules(model, types=nn.Linear)


def train(
    model: nn.Module,
    recorder: Recorder,
    parts: int = 1,
    mine: int = 0,
    reduced: Callable[[int], object] = lambda step: None,
    after: Callable[[int], object] = lambda step: None,
) -> None:
    """Trains; `reduced` is called with the step when gradients are there, `after` when it is made."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with recorder:
        for step in range(STEPS):
            x, y = batch(step, parts, mine)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            reduced(step)
            optimizer.step()
            after(step)


def results(recorded: Any) -> dict[str, dict[str, Any]]:
    """By subrecorder and parameter what `LISTED` returns."""
    return {f"{name}.{leaf}": result for name, part in recorded.items() for leaf, result in part.leaves().items()}


def digests(found: dict[str, dict[str, Any]]) -> dict[str, list[int]]:
    return {name: result["digest"].tolist() for name, result in found.items()}


def furthest(a: dict[str, dict[str, Any]], b: dict[str, dict[str, Any]], of: str) -> float:
    """The largest relative distance of an observation of two recordings."""
    assert a.keys() == b.keys()
    return max(sketch_distance(a[name], b[name])["relative"].max().item() for name in a if name.startswith(of))


def largest_change(model: nn.Module) -> float:
    """By how much a step changes a parameter at most, relative to it, when one process trains."""
    changes = [0.0]
    before = [parameter.detach().clone() for parameter in model.parameters()]

    def compare(step: int) -> None:
        for old, new in zip(before, model.parameters(), strict=True):
            changes.append(((new - old).norm() / new.norm()).item())
            old.copy_(new.detach())

    train(model, Recorder(ParameterMonitor(Collect())).modules(model, types=nn.Linear), after=compare)
    return max(changes)


# DDP


def under_ddp(place: Place, cut: bool) -> Any:
    """What all ranks recorded, and how it compares with one process: whether the digests are equal, and the distances."""
    rank, size = place[0], dist.get_world_size()
    one, model = net(), net()
    alone = recorder_of(one)
    train(one, alone)
    recorder = recorder_of(model)
    train(nn.parallel.DistributedDataParallel(model), recorder, size if cut else 1, rank if cut else 0)
    merged = recorder.sync()
    assert merged.differing == ()
    assert {part.copies for part in merged.values()} == {2}  # a weight and a bias
    assert digests(results(merged)) == digests(results(recorder))
    own, whole = results(merged), results(alone)
    return digests(own), digests(own) == digests(whole), furthest(own, whole, "value"), furthest(own, whole, "gradient")


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_under_ddp_all_ranks_have_the_digests_of_one_process_if_all_have_its_batch(size: int, request: Any) -> None:
    world: World = request.getfixturevalue("pair" if size == 2 else "world")
    _, equal, values, _ = alike(world.run(under_ddp, False))
    assert equal == (size == 2)  # (g + g) / 2 is g, bit for bit; (g / 3 + g / 3 + g / 3) is not
    assert values <= noise(STEPS, largest_change(net()))


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_under_ddp_with_a_part_of_the_batch_on_each_rank_the_distance_is_rounding(size: int, request: Any) -> None:
    world: World = request.getfixturevalue("pair" if size == 2 else "world")
    _, equal, values, gradients = alike(world.run(under_ddp, True))
    assert not equal
    allowed = noise(STEPS, largest_change(net()))  # 1.5e-6
    assert 0 < values <= allowed  # 0.8e-7 on two ranks, 1.6e-7 on three
    assert 0 < gradients <= allowed  # 3.7e-7 and 1.6e-7


def healthy(place: Place) -> Any:
    rank, size = place[0], dist.get_world_size()
    setup = Setup()
    whole = setup.batch
    setup.batch = lambda step: tuple(part.chunk(size)[rank] for part in whole(step))  # type: ignore[method-assign, return-value]
    setup.net = nn.parallel.DistributedDataParallel(setup.net)
    setup.train()
    found = findings(setup.recorder.sync())
    return [str(one) for one in found], [one for one in found.examined if one.startswith("copies of ranks")]


def test_a_healthy_training_of_several_ranks_has_no_finding(world: World) -> None:
    assert alike(world.run(healthy)) == ([], ["copies of ranks: 13 of 32"])


# Faults of one rank


def reduce_all(model: nn.Module, skips: bool) -> None:
    """Averages gradients over ranks. A rank that skips takes part, or the others would wait, but goes on with its own."""
    for parameter in model.parameters():
        assert parameter.grad is not None
        gradient = parameter.grad.clone() if skips else parameter.grad
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()


def flip(parameter: Any, bit: int) -> None:
    parameter.data.view(torch.int32)[0, 0] ^= 1 << bit


def faulty(place: Place, fault: str, odd: int, kind: str, folder: str) -> Any:
    """What is found in the recording of all ranks; and in what they saved together."""
    rank, size = place[0], dist.get_world_size()
    model = net()
    recorder = recorder_of(model) if kind == "digests" else getattr(presets, kind)().modules(model)

    def reduced(step: int) -> None:
        reduce_all(model, skips=fault == "skips" and rank == odd and step == 3)
        if fault == "flips" and rank == odd and step == 2:
            flip(model[2].weight, 21 if kind == "health" else 0)  # norms do not tell the last bit

    if fault == "seed" and rank == odd:
        for parameter in model.parameters():
            nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))
    train(model, recorder, size, rank, reduced)
    recorder.save_sharded(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecordingWarning)
        merged = recorder.sync()
        assert load(folder).differing == merged.differing
        found = [one for one in findings(merged) if one.kind == "replicas-differ"]
        assert [str(one) for one in findings(load(folder)) if one.kind == "replicas-differ"] == [str(one) for one in found]
    return found, merged.differing


def only(answers: list[Any]) -> tuple[Finding, tuple[Differing, ...]]:
    (found,), differing = alike(answers)
    assert found.severity == "error"
    return found, differing


KINDS = ["digests", "health", "fingerprints"]
"""What is recorded: the presets also record which step it is."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_skips_an_all_reduce_is_named_with_the_step_and_the_parameters(world: World, kind: str, tmp_path: Path) -> None:
    found, differing = only(world.run(faulty, "skips", 1, kind, str(tmp_path / "run")))
    since = ", from observation 3 on" if kind == "digests" else ""
    what = f"the gradient of weight differs on rank 1, unlike ranks 0 and 2{since}, and 3 more parameters in 2 layers"
    assert (found.layer, found.what, found.since) == ("0", what, None if kind == "digests" else 3)
    assert found.cause == "not-reduced"
    assert {one.ranks for one in differing} == {(1,)}
    if kind != "fingerprints":  # which lists parameters as they are before each step
        assert {one.observation for one in differing if not one.name.startswith("before")} == {3}
        before = {4} if kind == "health" else set()  # what that step made of them
        assert {one.observation for one in differing if one.name.startswith("before")} == before
        assert {(one.name[-1], one.leaf) for one in differing} == {(a, b) for a in "02" for b in ("weight", "bias")}


@pytest.mark.parametrize("kind", KINDS)
def test_a_bit_that_flips_on_one_rank_is_named_with_the_step_and_the_parameter(world: World, kind: str, tmp_path: Path) -> None:
    found, differing = only(world.run(faulty, "flips", 2, kind, str(tmp_path / "run")))
    when, since = " before the step" if kind == "health" else "", ", from observation 2 on" if kind == "digests" else ""
    assert found.what == f"weight{when} differs on rank 2, unlike ranks 0 and 1{since}"
    assert (found.layer, found.since, found.cause) == ("2", None if kind == "digests" else 2, "silent-corruption")
    assert {(one.name[-1], one.ranks) for one in differing} == {("2", (2,))}


def test_of_two_ranks_both_are_named(pair: World, tmp_path: Path) -> None:
    found, differing = only(pair.run(faulty, "skips", 1, "digests", str(tmp_path / "run")))
    assert "differs on ranks 0 and 1, from observation 3 on" in found.what
    assert {one.ranks for one in differing} == {(0, 1)}


def test_ranks_that_start_from_other_weights_are_told_from_those_that_do_not_reduce(world: World, tmp_path: Path) -> None:
    found, differing = only(world.run(faulty, "seed", 0, "digests", str(tmp_path / "run")))
    assert (found.cause, {one.ranks for one in differing}) == ("ranks-start-apart", {(0,)})
    assert {one.observation for one in differing} == {0}


# FSDP2 and tensor parallelism


def spread(model: nn.Sequential, kind: str) -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = DeviceMesh("cpu", list(range(dist.get_world_size())))
    if kind == "fsdp2":
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)
    else:
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def in_parts(place: Place, kind: str) -> Any:
    """As `under_ddp`, of parameters at the start and after each step, and of the outputs of the net."""
    found = []
    for spreads in (True, False):
        model = net()
        if spreads:
            spread(model, kind)
        values = Recorder(value=ParameterMonitor(LISTED, when="tick")).modules(model, types=nn.Linear)
        out = Recorder(out=ForwardMonitor(LISTED)).modules(model, names="")
        with values:
            values.tick()
            train(model, out, after=lambda step, values=values: values.tick())  # type: ignore[misc]
        merged = values.sync() if spreads else values
        found.append({**results(merged), **results(out)})
    own, alone = found
    equal = {name: [a == b for a, b in zip(seen, digests(alone)[name], strict=True)] for name, seen in digests(own).items()}
    return digests(own), equal, furthest(own, alone, "value"), furthest(own, alone, "out")


def test_under_fsdp2_parameters_in_parts_have_the_digests_of_one_process(pair: World) -> None:
    _, equal, values, _ = alike(pair.run(in_parts, "fsdp2"))
    assert equal == {name: [True] * len(seen) for name, seen in equal.items()}
    assert {len(seen) for name, seen in equal.items() if name.startswith("value")} == {STEPS + 1}
    assert values == 0


def test_under_tensor_parallelism_parameters_start_equal_and_stay_within_rounding(pair: World) -> None:
    _, equal, values, outputs = alike(pair.run(in_parts, "tensor parallel"))
    assert all(seen[0] for name, seen in equal.items() if name.startswith("value"))
    allowed = noise(STEPS, largest_change(net()))  # 1.5e-6
    assert 0 < values <= allowed  # 0.8e-7
    assert 0 < outputs <= allowed  # 1.4e-7
