"""Nets under DDP, FSDP2 and tensor parallelism, over 2 and 4 processes: what they record together is what one process records."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forged import facts
from torch import Tensor, nn
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
    load,
    merge,
)
from recorders.recordings.storage.save import Layout
from reducers import EMA, Count, Digest, Fingerprints, Last, Max, Mean, Min, Moments, Norm, Product, Quantile, Sketch

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch.distributed is not built")


LAYOUTS: tuple[Layout, ...] = ("folder", "packed")
RANKS = {2: (0, 1), 4: (0, 1, 2, 3)}
EXACT = Product(count=Count(), low=Min(), high=Max(), half=Quantile())
BITS = Product(digest=Digest(), sketch=Sketch(64), each=Fingerprints())  # of whole numbers sketches are exact, too
KINDS = ["ddp", "fsdp2", "fsdp2, recorder first", "tensor parallel"]


def net() -> nn.Sequential:
    """A net of small whole numbers, trained on whole numbers with steps that are powers of two: all arithmetic is exact."""
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-3, 4, parameter.shape, generator=generator))
    return model


def batch(index: int) -> Tensor:
    return torch.randint(-3, 4, (8, 4), generator=torch.Generator().manual_seed(index)).double()


def mesh_of(place: Place, size: int) -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh.from_group(place[1] or dist.group.WORLD, "cpu") if size > 1 else None


def spread(model: nn.Sequential, kind: str, mesh: Any) -> nn.Module:
    """The net as `kind` has it over the ranks of the mesh."""
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model, process_group=mesh.get_group())
    if kind.startswith("fsdp2"):
        from torch.distributed.fsdp import fully_shard

        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)
    if kind == "tensor parallel":
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        plan = {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel(use_local_output=False)}
        parallelize_module(model, mesh, plan)  # type: ignore[arg-type]
    return model


def recorder_of(model: nn.Module) -> Recorder:
    everything = Product(exact=EXACT, norm=Norm(), moments=Moments())
    return Recorder(
        out=ForwardMonitor(everything),
        channels=ForwardMonitor(Moments("b c -> c")),
        input=ForwardInputMonitor(EXACT),
        gradient=BackwardMonitor(Product(high=Max(), norm=Norm())),
        value=ParameterMonitor(everything),
        called=ParameterMonitor(Norm(), when="call"),
        whole=ParameterMonitor(Last()),
        smooth=ParameterMonitor(EMA("o i -> o i", alpha=0.5), attr="weight"),
        rows=ParameterMonitor(Norm("o i -> o"), attr="weight"),
        columns=ParameterMonitor(Product(norm=Norm("o i -> i"), rows=Norm("o i -> o"), all=Last()), attr="weight"),
        final=ParameterGradientMonitor(everything),
        update=ParameterUpdateMonitor(everything),
        momentum=OptimizerStateMonitor(everything, "momentum_buffer"),
        bits=ParameterMonitor(Product(exact=BITS)),
        passed_on=ParameterGradientMonitor(Product(exact=BITS), op_=lambda gradient, value: {"gradient": gradient, "value": value}),
        update_bits=ParameterUpdateMonitor(Product(exact=BITS), attr="weight"),
        momentum_bits=OptimizerStateMonitor(Product(exact=BITS), "momentum_buffer"),
    ).modules(model, types=nn.Linear)


def train(model: nn.Module, recorder: Recorder | None, parts: int, mine: int) -> list[Tensor]:
    """Three steps, on one part of each batch; the parameters that this process holds then."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)
    for step in range(3):
        optimizer.zero_grad()
        output = model(batch(step).chunk(parts)[mine])
        output = output.full_tensor() if hasattr(output, "full_tensor") else output
        (output - 1).abs().mean().backward()
        optimizer.step()
    return [getattr(parameter, "_local_tensor", parameter).detach().clone() for parameter in model.parameters()]


def trained(kind: str, place: Place, size: int) -> tuple[Recorder, list[Tensor]]:
    model = net()
    first = recorder_of(model) if kind.endswith("first") else None
    model = spread(model, kind, mesh_of(place, size)) if size > 1 else model  # type: ignore[assignment]
    recorder = first or recorder_of(model)
    split = size > 1 and kind != "tensor parallel"
    with recorder:
        left = train(model, recorder, size if split else 1, place[0] if split else 0)
    return recorder, left


def together(place: Place, kind: str, size: int, folder: str) -> Any:
    recorder, left = trained(kind, place, size)
    plain = spread(net(), kind, mesh_of(place, size))
    split = kind != "tensor parallel"
    without = train(plain, None, size if split else 1, place[0] if split else 0)
    assert all(torch.equal(a, b) for a, b in zip(left, without, strict=True))
    assert all(type(value) is Tensor for m in recorder.values() for state in m.states.values() for value in state.values())
    recorder.save(f"{folder}/{place[0]}")
    assert load(f"{folder}/{place[0]}")["value/0"].placement == recorder["value/0"].snapshot().placement
    merged = recorder.sync(place[1])
    if place[0] == 0:
        merged.save(f"{folder}/all")
    for layout in LAYOUTS:
        root = recorder.save_sharded(f"{folder}/{layout}", place[1], layout=layout)
        assert facts(load(root)) == facts(merged)
        assert facts(load(root, ranks=place[0])) == facts(recorder.snapshot())
    return dict(merged.samples), merged.compute()


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_record_together_what_one_process_records(four: World, kind: str, size: int, tmp_path: Path) -> None:
    alone, _ = trained("one", (0, None), 1)
    answers = returned(four.run(together, kind, size, str(tmp_path), ranks=RANKS[size]))
    samples, results = answers[0]
    data = kind != "tensor parallel"
    expected = alone.compute()
    for layer in ("0", "2") if data else ():  # the loss is the mean over the part of a rank
        expected[f"gradient/{layer}"] = {key: value * size for key, value in expected[f"gradient/{layer}"].items()}  # type: ignore[union-attr]
    torch.testing.assert_close(results, expected, rtol=1e-12, atol=1e-12)
    for name, result in results.items():
        if isinstance(result, dict) and "exact" in result:
            torch.testing.assert_close(result["exact"], expected[name]["exact"], rtol=0, atol=0)  # type: ignore[index, call-overload]
    own = {"out", "channels", "input", "gradient"} if data else set()
    assert samples == {name: monitor.samples * (size if name.split("/")[0] in own else 1) for name, monitor in alone.items()}
    offline = merge(f"{tmp_path}/{rank}" for rank in range(size))
    torch.testing.assert_close(offline.compute(), load(tmp_path / "all").compute(), rtol=0, atol=0)
    assert dict(offline.samples) == samples


def on_first(place: Place, kind: str, folder: str) -> Any:
    rank = place[0]
    model = spread(net(), kind, mesh_of(place, 4))
    monitors = {
        "out": ForwardMonitor(Moments(), filter_=lambda output, inputs: bool(output.norm() >= 0)),
        "norm": ForwardMonitor(Mean(), op_=lambda output, inputs: output.norm()),
        "value": ParameterMonitor(Norm()),
        "update": ParameterUpdateMonitor(Norm(), op_=lambda after, before: (after - before).norm()),
    }
    if rank > 0:
        train(model, None, 1, 0)
        return None
    with Recorder(**monitors).modules(model, types=nn.Linear) as recorder:
        train(model, recorder, 1, 0)
        seen = recorder.compute()
        recorder.save(folder)
    return len(seen), len(load(folder))


@pytest.mark.parametrize("kind", KINDS[1::2])
def test_one_rank_alone_records_reads_and_saves(four: World, kind: str, tmp_path: Path) -> None:
    """It would hang if a hook, a callable, `peek` or `save` communicated."""
    answers = returned(four.run(on_first, kind, str(tmp_path / "run")))
    assert answers == [(8, 8), None, None, None]


def on_two_axes(place: Place) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    copies = net()
    for layer in (copies[0], copies[2], copies):
        fully_shard(layer, mesh=mesh)  # copies along the first axis, parts along the second
    recorder = recorder_of(copies)
    with recorder:
        train(copies, recorder, 4, place[0])
    hybrid = recorder.sync().compute()
    model = net()
    spread(model, "tensor parallel", mesh["tensor"])
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh["data"])
    recorder = Recorder(
        out=ForwardMonitor(EXACT),
        value=ParameterMonitor(Norm()),
        final=ParameterGradientMonitor(Norm()),
        whole=ParameterMonitor(Last()),
        bits=ParameterMonitor(Product(exact=BITS)),
    ).modules(model, types=nn.Linear)
    with recorder:
        train(model, recorder, 2, place[0] // 2)
    merged = recorder.sync()
    return (
        hybrid,
        {name: result for name, result in merged.compute().items() if "whole" not in name},
        list(merged["whole/0"].states),
    )


@pytest.mark.slow
def test_meshes_of_two_axes(four: World) -> None:
    alone, _ = trained("one", (0, None), 1)
    expected = alone.compute()
    for hybrid, both, parts in returned(four.run(on_two_axes)):
        for name in ("value/0", "rows/2", "final/0", "out/2", "whole/2"):
            torch.testing.assert_close(hybrid[name], expected[name], rtol=1e-12, atol=1e-12)
        for name in ("bits/0", "bits/2"):  # parts of parts, of which the last is cut once more along the same axis
            torch.testing.assert_close(hybrid[name], expected[name], rtol=0, atol=0)
            torch.testing.assert_close(both[name], expected[name], rtol=0, atol=0)
        for name in ("value/0", "value/2", "final/0", "final/2"):
            wanted = {leaf: result["norm"] for leaf, result in expected[name].items()}  # type: ignore[union-attr, index, call-overload]
            torch.testing.assert_close(both[name], wanted, rtol=1e-12, atol=1e-12)
        for name in ("out/0", "out/2"):
            torch.testing.assert_close(both[name], expected[name]["exact"], rtol=0, atol=0)  # type: ignore[index, call-overload]
        assert parts == [
            f"{leaf}.part {row} of 2, part {column} of 2" for leaf in ("weight",) for row in (0, 1) for column in (0, 1)
        ] + [f"bias.part {row} of 2, part {column} of 2" for row in (0, 1) for column in (0, 1)]


def accumulated(place: Place, size: int) -> Any:
    model = spread(net(), "ddp", mesh_of(place, size)) if size > 1 else net()
    recorder = Recorder(
        mine=ParameterGradientMonitor(Norm(), when="accumulate"), all=ParameterGradientMonitor(Norm(), when="step")
    ).modules(model, types=nn.Linear)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    with recorder:
        for part, step in enumerate((0, 1)):
            from contextlib import nullcontext

            with model.no_sync() if size > 1 and not part else nullcontext():  # type: ignore[operator]
                (model(batch(step).chunk(size)[place[0]]) - 1).abs().mean().backward()
        optimizer.step()
    return recorder.compute(), recorder.sync(place[1]).compute(), recorder.sync(place[1]).samples["mine/0"]


def test_gradients_of_a_rank_and_of_all_under_no_sync(four: World) -> None:
    _, alone, _ = accumulated((0, None), 1)
    answers = returned(four.run(accumulated, 2, ranks=(0, 1)))
    for own, merged, samples in answers:
        for layer in ("0", "2"):
            torch.testing.assert_close(merged[f"all/{layer}"], alone[f"all/{layer}"], rtol=1e-12, atol=1e-12)
            for leaf in ("weight", "bias"):
                norms = torch.stack([answer[0][f"mine/{layer}"][leaf] for answer in answers])
                torch.testing.assert_close(merged[f"mine/{layer}"][leaf], norms.norm(), rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(own[f"all/{layer}"], alone[f"all/{layer}"], rtol=1e-12, atol=1e-12)
        assert samples == 4  # two backwards of each rank


def diverged(place: Place) -> Any:
    from torch.distributed.tensor import DTensor, Replicate

    rank = place[0]
    model = nn.Linear(2, 1, bias=False)
    nn.init.constant_(model.weight, float(rank // 2))
    own = Recorder(value=ParameterMonitor(Norm(), when="tick")).modules(model)
    identity = nn.Sequential(nn.Identity())
    copied = Recorder(out=ForwardMonitor(Norm())).modules(identity, names="0")
    with own, copied:
        own.tick()
        identity(DTensor.from_local(torch.full((2,), float(rank)), mesh_of(place, 4), [Replicate()], run_check=False))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        merged = own.sync(), copied.sync()
    return [part.compute() for part in merged], list(merged[0].samples.values()), [str(warning.message) for warning in caught]


def test_copies_that_differ_are_named(four: World) -> None:
    for (value, out), samples, (first, second) in returned(four.run(diverged)):
        assert "'value', leaf 'weight' (ParameterMonitor) on ranks 0, 1, 2 and 3. Each that differs counts as of a net" in first
        assert "'out/0' (ForwardMonitor) on ranks 0, 1, 2 and 3. The first of them counts." in second
        assert samples == [2]
        assert abs(value["value"]["weight"].item() - 2**0.5) < 1e-12
        assert out["out/0"] == 0


def summands(place: Place) -> Any:
    model = net()
    recorder = Recorder(ForwardMonitor(Norm())).modules(model, names="2")  # before the hook that reduces the output
    spread(model, "tensor parallel", mesh_of(place, 4))
    with recorder, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(model, recorder, 1, 0)
    return recorder[0].samples, [str(warning.message) for warning in caught]


def test_summands_of_an_output_are_left_out_with_one_warning(four: World) -> None:
    for samples, (message,) in returned(four.run(summands)):
        assert samples == 0
        assert "each rank holds a summand, not the values" in message
        assert "record it where it is reduced" in message


def spread_late(place: Place) -> Any:
    model = net()
    recorder = Recorder(ParameterMonitor(Norm(), when="tick")).modules(model, types=nn.Linear)
    with recorder, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        recorder.tick()
        spread(model, "fsdp2", mesh_of(place, 4))
        recorder.tick()
        before = list(recorder.samples.values())
        recorder.reset()
        recorder.tick()
    return before, list(recorder.samples.values()), str(caught[0].message)


def test_a_net_that_is_spread_after_observations(four: World) -> None:
    for before, after, message in returned(four.run(spread_late)):
        assert before == after == [1, 1]
        assert "and was a plain tensor in earlier observations" in message
        assert "reset() the recorder after the net is spread over ranks" in message


def collectives(place: Place, many: int) -> list[str]:
    from test_distributed import COLLECTIVES, noting

    model = spread(net(), "fsdp2", mesh_of(place, 4))
    monitors = {f"m{number}": ParameterMonitor(Norm(), when="tick") for number in range(many)}
    recorder = Recorder(**monitors).modules(model, types=nn.Linear)
    calls: list[str] = []
    with recorder, pytest.MonkeyPatch.context() as patch:
        recorder.tick()
        for name in COLLECTIVES:
            patch.setattr(dist, name, noting(calls, name, getattr(dist, name)))
        recorder.sync()
    return calls


def test_parts_and_copies_cost_no_further_collective(four: World) -> None:
    assert (
        alike(four.run(collectives, 1)) == alike(four.run(collectives, 60)) == ["all_gather"] * 3
    )  # some ranks have no rows of the last weight


def resumed(place: Place, folder: str) -> Any:
    recorder, _ = trained("fsdp2", place, 4)
    recorder.save(f"{folder}/{place[0]}")
    fresh = recorder_of(spread(net(), "fsdp2", mesh_of(place, 4))).resume(f"{folder}/{place[0]}")
    assert fresh["value/0"].snapshot().placement == recorder["value/0"].snapshot().placement
    again = fresh.compute()
    torch.testing.assert_close(fresh.resume(f"{folder}/{place[0]}").compute(), again)  # in place of what is there
    assert recorder.merge(fresh)["value/0"].samples == 2 * fresh["value/0"].samples  # each rank what it has of it
    recorder.resume(f"{folder}/{place[0]}")
    return [type(part).__name__ for part in (recorder.sync(), fresh.sync())], places(fresh.sync()) == places(recorder.sync())


def places(recording: Recording) -> Any:
    return {name: (part.samples, {leaf: list(state) for leaf, state in part.states.items()}) for name, part in recording.items()}


@pytest.mark.slow
def test_placements_are_saved_and_resumed(four: World, tmp_path: Path) -> None:
    assert alike(four.run(resumed, str(tmp_path))) == (["Recording", "Recording"], True)
