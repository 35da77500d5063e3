"""Plain tensors between tensor-parallel layers: which part a rank holds is declared by name."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from world import Place, World, alike, returned

from recorders import (
    BackwardInputMonitor,
    BackwardMonitor,
    ForwardInputMonitor,
    ForwardMonitor,
    ParameterMonitor,
    Recorder,
    Recording,
    RecordingWarning,
    TargetError,
    register_layouts,
)
from recorders.capture.layouts import as_text, from_text
from recorders.recordings.distributed.merge import Merged
from reducers import Count, Mean, Moments, Norm, Product, Sketch

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch.distributed is not built")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2), nn.Tanh()).double()


def recorder_of(model: nn.Module) -> Recorder:
    what = Product(count=Count(), norm=Norm(), channels=Moments("b c -> c"), sketch=Sketch(64))
    recorder = Recorder(
        out=ForwardMonitor(what),
        input=ForwardInputMonitor(what),
        gradient=BackwardMonitor(what),
        before=BackwardInputMonitor(what),
    ).modules(model, groups=("out", "input", "gradient"), leaves=True)
    # Of the gradient at the input of the first layer each rank holds a summand.
    return recorder.modules(model, groups="before", names=("1", "2", "3"))


def train(model: nn.Module) -> None:
    for step in range(3):
        rows = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step)).requires_grad_()
        model(rows).square().mean().backward()


def tensor_parallel(model: nn.Module, mesh: Any) -> nn.Module:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def mesh_of_all() -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (dist.get_world_size(),))


def declared(place: Place, first: bool) -> Any:
    from torch.distributed.tensor import Replicate, Shard

    model, mesh = net(), mesh_of_all()
    early = recorder_of(model) if first else None
    tensor_parallel(model, mesh)
    outputs = {"0": Shard(-1), "1": Shard(-1), "2": Replicate(), "3": Replicate()}
    register_layouts(model, mesh, outputs=outputs, inputs={"0": Replicate(), "1": Shard(-1), "2": Shard(-1), "3": Replicate()})
    with early or recorder_of(model) as recorder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "ForwardMonitor 'out/2' .*each rank holds a summand")
        train(model)
        merged = recorder.sync()
    return merged.compute(), dict(merged.samples)


@pytest.mark.slow
@pytest.mark.parametrize("first", [False, True])
def test_local_outputs_of_tensor_parallel_layers_merge_to_the_whole(pair: World, first: bool) -> None:
    model = net()
    with recorder_of(model) as alone:
        train(model)
    expected, samples = alone.compute(), dict(alone.samples)
    for results, counted in returned(pair.run(declared, first)):
        if first:  # before the hook that reduces the output, each rank holds a summand of it
            assert {name for name in samples if not counted[name]} == {"out/2"}
            expected = {name: result for name, result in expected.items() if name != "out/2"}
            counted["out/2"] = samples["out/2"]
        torch.testing.assert_close(results, expected, rtol=1e-12, atol=1e-12)
        assert counted == samples


def warned_at_sync(place: Place) -> Any:
    """What the first and the second sync warn of, and how many observations are merged; then the same if the line is written."""
    from torch.distributed.tensor import Replicate, Shard

    model, mesh = net(), mesh_of_all()
    tensor_parallel(model, mesh)
    texts, samples = [], []
    for _ in range(2):
        recorder = Recorder(out=ForwardMonitor(Norm()), input=ForwardInputMonitor(Norm())).modules(model, leaves=True)
        train(model)  # which warns of nothing
        for _ in range(2):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                merged = recorder.sync()
            texts.append([str(warning.message) for warning in caught])
        samples.append([*merged.samples.values()])
        recorder.deregister()
        if texts[0] and len(samples) == 1:
            line = texts[0][0].partition("guesses: ")[2].partition(". None")[0]
            names = {"net": model, "mesh": mesh, "register_layouts": register_layouts, "Shard": Shard, "Replicate": Replicate}
            exec(line, names)
            samples.append(line)
    return texts, samples


@pytest.mark.slow
def test_the_first_sync_warns_of_what_counts_twice_and_tells_the_line_to_write(pair: World) -> None:
    (first, second, *declared), (before, line, after) = alike(pair.run(warned_at_sync))
    (text,) = first
    assert "sync counts them once for each rank" in text
    outputs = "{'0': Shard(-1), '1': Shard(-1), '2': Replicate(), '3': Replicate()}"
    inputs = "{'1': Shard(-1), '3': Replicate()}"  # those of the parallel layers are DTensors
    assert line == f"register_layouts(net, mesh, outputs={outputs}, inputs={inputs})"
    assert second == []
    assert declared == [[], []]
    assert sorted(before) == [3] * 2 + [6] * 6  # three steps, each counted on two ranks, but of DTensors
    assert after == [3] * 8


def data_parallel(place: Place) -> list[str]:
    import torch.distributed.tensor.parallel  # noqa: F401  # as libraries do that do not use it
    from torch.distributed.fsdp import fully_shard

    model = net()
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh_of_all())
    with warnings.catch_warnings(record=True) as caught, recorder_of(model):
        warnings.simplefilter("always")
        train(model)
    return [str(warning.message) for warning in caught]


def test_data_of_each_rank_needs_no_layout(pair: World) -> None:
    assert alike(pair.run(data_parallel)) == []


def mistaken(place: Place) -> list[str]:
    from torch.distributed.tensor import Replicate

    texts = []
    for names, kinds in (("4", Replicate()), ("1", (Replicate(), Replicate())), ("1", 3)):
        with pytest.raises((TargetError, ValueError)) as caught:
            register_layouts(net(), mesh_of_all(), outputs={names: kinds})  # type: ignore[dict-item]
        texts.append(str(caught.value))
    return texts


def test_mistaken_layouts_are_named(pair: World) -> None:
    unknown, many, number = alike(pair.run(mistaken))
    assert "register_layouts(outputs={'4': ...}): Sequential has no module of that name" in unknown
    assert "for each dimension of the mesh, which has 1; got (Replicate(), Replicate())" in many
    assert "got (3,)" in number


def copied(place: Place) -> Any:
    from torch.distributed.fsdp import fully_shard

    copies, parts = nn.Linear(4, 2, bias=False), nn.Linear(4, 2, bias=False)
    for layer in (copies, parts):
        nn.init.ones_(layer.weight)
    fully_shard(parts, mesh=mesh_of_all())
    recorders = [Recorder(ParameterMonitor(Norm(), when="tick")).modules(model) for model in (copies, parts)]
    for recorder in recorders:
        recorder.tick()
    again = [copy.deepcopy(recorder) for recorder in recorders]
    together = [recorder.sync().compute()[""] for recorder in again]
    return together, pickle.dumps(recorders), pickle.dumps([recorder.snapshot() for recorder in again])


def test_copies_and_pickles_keep_which_part_or_copy_was_recorded(pair: World) -> None:
    answers = returned(pair.run(copied))
    for index in (1, 2):
        unpickled = [pickle.loads(answer[index]) for answer in answers]  # in a process without a rank
        for kind in (0, 1):
            recordings: list[Recording] = [held[kind] if index == 2 else held[kind].snapshot() for held in unpickled]
            merged = Merged({f"rank {rank}": recording for rank, recording in enumerate(recordings)})[""]
            assert merged.samples == 1
            assert abs(float(merged.peek()["weight"]) - 8**0.5) < 1e-12  # type: ignore[index, call-overload, arg-type]
            assert all(abs(float(answer[0][kind]["weight"]) - 8**0.5) < 1e-12 for answer in answers)


def test_what_graphs_tell_of_plain_tensors() -> None:
    info = from_text(as_text({"a.b": torch.ones(2, 3), "": Tensor()}))
    assert info == {"a.b": (2, None, "", None), "": (1, None, "", None)}
    assert from_text("") == {}


@pytest.mark.slow
def test_a_module_on_no_mesh_needs_no_process_group() -> None:
    with pytest.warns(RecordingWarning) as caught:
        warnings.warn(RecordingWarning("none other"), stacklevel=1)
        with recorder_of(model := net()):
            train(model)
    assert [str(warning.message) for warning in caught] == ["none other"]


class Places(nn.Module):
    """One ReLU in places of 2 and of 3 channels."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Any:
        return self.act(x), self.act(x[:, :2])


def places_of(place: Place, parts: bool) -> Any:
    """The means of a rank and of all, and how often it was warned; `parts` says that each rank holds a part of what it sees."""
    from torch.distributed.tensor import Shard

    model = Places()
    if parts:
        register_layouts(model, mesh_of_all(), outputs={"act": Shard(-1)})
    recorder = Recorder(ForwardMonitor(Mean("channels"))).modules(model, types=nn.ReLU)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RecordingWarning)
        for _ in range(4):
            model(torch.full((5, 3), 1.0 + dist.get_rank()))
    return recorder["act"].compute(), recorder.sync()["act"].compute(), [str(warning.message) for warning in caught]


def test_numbers_of_channels_are_merged_by_leaf(pair: World) -> None:
    for rank, (own, merged, warned) in enumerate(returned(pair.run(places_of, False))):
        assert {leaf: mean.tolist() for leaf, mean in own.items()} == {"": [1.0 + rank] * 3, "2 channels": [1.0 + rank] * 2}
        assert {leaf: mean.tolist() for leaf, mean in merged.items()} == {"": [1.5] * 3, "2 channels": [1.5] * 2}
        assert warned == []


def test_a_part_of_a_tensor_has_one_leaf_by_which_its_place_is_known(pair: World) -> None:
    for rank, (own, merged, (warned,)) in enumerate(returned(pair.run(places_of, True))):
        assert own.tolist() == [1.0 + rank] * 3
        assert merged.tolist() == [1.0, 1.0, 1.0, 2.0, 2.0, 2.0]
        assert "keeps shape (3,)" in warned
