"""Sync over a device mesh, which stands for its ranks, in its order: four processes with gloo on loopback."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from paths import ROOT
from test_distributed import refused
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from world import Place, World, alike, returned

from recorders import ForwardMonitor, Recorder, Recording, RecordingWarning, Subrecording, SyncError
from recorders.recordings.distributed.placement import Placement
from recorders.recordings.distributed.sync import sync
from reducers import EMA, Collect, Count, First, Last, Max, Mean, Moments, Norm, Product, Sum

EVERYTHING = Product(
    moments=Moments("b c -> c"), ema=EMA("b c -> c", alpha=0.1), all=Collect(), first=First(), last=Last(), top=Max()
)
MESHES: dict[tuple[int, ...], DeviceMesh] = {}
"""Meshes of all ranks, by shape, in each process of the world."""


def mesh_of(*shape: int) -> DeviceMesh:
    if shape not in MESHES:
        MESHES[shape] = init_device_mesh("cpu", shape)
    return MESHES[shape]


def values(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) + 3


def recorded(rank: int, names: int = 1, norm_of: int = 0) -> Recording:
    """Data of each rank, of another number of rows; copies; copies of halves, of which each row of the mesh has both."""
    state = EVERYTHING.update({}, values(rank, 2 + rank, 3)) if rank != 1 else {}
    weight = Norm().update({}, values(norm_of, 4, 3))
    half = Norm("o i -> o").update({}, values(0, 4, 3).narrow(0, 2 * (rank % 2), 2))
    parts = {f"output{n}": Subrecording(EVERYTHING, {"": state} if state else {}, int(rank != 1)) for n in range(names)}
    parts["weight"] = Subrecording(Norm(), {"": weight}, 1, placement={"": Placement(rank, shared=True)})
    place = Placement(rank, True, 0, 2, ((0, rank % 2, 2),))
    parts["sharded"] = Subrecording(Norm("o i -> o"), {"": half}, 1, placement={"": place})
    return Recording(parts, {"alias": "weight"})


def bits(recording: Recording | None) -> Any:
    """All of a recording, to be compared bit for bit."""
    return (
        recording
        if recording is None
        else {
            name: (
                part.samples,
                dict(part.placement),
                part.progress,
                {leaf: {key: (value.dtype, value.tolist()) for key, value in state.items()} for leaf, state in part.states.items()},
            )
            for name, part in recording.items()
        }
    )


def compared(place: Place, shape: tuple[int, ...]) -> Any:
    rank, group = place
    own = recorded(rank)
    before = bits(own)
    flat, merged = sync(own, group), sync(own, mesh_of(*shape))
    assert list(flat) == list(merged)
    assert merged.aliases == flat.aliases
    assert bits(own) == before
    assert bits(merged) == bits(flat) == bits(sync(own, mesh_of(*shape), async_op=True).wait())
    assert list(merged.samples.values()) == [3, 1, 1]
    return bits(merged)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 2), (4,), (1, 4), (2, 1, 2), (2, 2, 1)])
def test_a_mesh_gives_what_the_group_gives_on_every_rank_bit_for_bit(four: World, shape: tuple[int, ...]) -> None:
    assert alike(four.run(compared, shape))["weight"][0] == 1


def one_receives(place: Place, to: Any) -> Any:
    return bits(sync(recorded(place[0]), mesh_of(2, 2), to=to))


@pytest.mark.slow
@pytest.mark.parametrize("to", range(4))
def test_one_rank_gets_what_was_merged(four: World, to: int) -> None:
    answers = returned(four.run(one_receives, to))
    assert [answer is not None for answer in answers] == [rank == to for rank in range(4)]
    assert answers[to] == four.run(one_receives, "all")[to]


COLLECTIVES = ["all_gather", "all_reduce", "all_to_all", "barrier", "broadcast", "gather", "reduce", "scatter", "send", "recv"]


def counted(place: Place, names: int, to: Any) -> list[str]:
    calls: list[str] = []

    def noting(name: str) -> Any:
        function = getattr(dist, name)
        return lambda *args, **kwargs: (calls.append(name), function(*args, **kwargs))[1]

    with pytest.MonkeyPatch.context() as patch:
        for name in COLLECTIVES:
            patch.setattr(dist, name, noting(name))
        sync(recorded(place[0] + 4, names), mesh_of(2, 2), to=to)
    return calls


@pytest.mark.slow
@pytest.mark.parametrize("to", ["all", 3])
def test_collectives_do_not_grow_with_the_subrecorders(four: World, to: Any) -> None:
    few, many = (alike(four.run(counted, names, to)) for names in (1, 200))
    gathers, reduces = ("all_gather", "all_reduce") if to == "all" else ("gather", "reduce")
    # Collections of unequal length differ in shape, so manifests are exchanged; what is highest, and what is counted, is reduced.
    assert few == many == ["all_gather", "all_gather", gathers, reduces, reduces]


def alike_on_ranks(monitors: int, rank: int) -> Recording:
    moments = Moments("b c -> c")  # which are gathered, for any number of ranks
    state = moments.update({}, torch.full((3, 5), float(rank)))
    return Recording({f"layer{n}": Subrecording(moments, {"": state}, 1) for n in range(monitors)})


def benchmark(name: str) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        return __import__(name)


def sent(place: Place, shape: tuple[int, ...], monitors: int) -> tuple[int, int]:
    written, own = benchmark("scale").written, alike_on_ranks(monitors, place[0])
    group = mesh_of(*shape) if len(shape) > 1 else place[1]
    sync(own, group)  # connections are made
    before = written()
    sync(own, group)
    after = written()
    return after[0] - before[0], after[1] - before[1]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts the bytes that a process writes")
@pytest.mark.parametrize("monitors", [1, 30])
@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_every_rank_sends_what_the_model_of_the_documents_says(four: World, shape: tuple[int, ...], monitors: int) -> None:
    scale, model = benchmark("scale"), benchmark("scale_model")
    size = scale.size(alike_on_ranks(monitors, 0))
    assert alike(four.run(sent, shape, monitors)) == tuple(model.sent(4, size))


def of(names: str, reducer: Any = None, state: Any = None) -> Recording:
    reducer = reducer or Mean()
    state = state or reducer.update({}, torch.ones(2, 2))
    return Recording({name: Subrecording(reducer, {"": state}, 1, monitor="ForwardMonitor") for name in names})


def sync_recordings(place: Place, by_rank: list[Recording], missing: Any = "error", to: Any = None) -> Any:
    rank = place[0]
    return bits(sync(by_rank[rank], mesh_of(2, 2), missing=missing, to=to[rank] if to else "all"))


def test_ranks_that_differ_are_told_to_all(four: World) -> None:
    text = refused(four.run(sync_recordings, [of("ab"), of("ab"), of("ab"), of("bc")]))
    assert text.endswith(": beside what both record, rank 0 records ['a'] and rank 3 records ['c']")
    text = refused(four.run(sync_recordings, [of("ab"), of("b"), of("ab"), of("bc")]))
    assert "rank 0 records ['a'] and rank 1 records nothing; beside what both record, rank 0 records ['a'] and rank 3" in text
    wide = Mean("b c -> c")
    narrow, wider = (of("a", wide, wide.update({}, torch.ones(2, width))) for width in (3, 5))
    text = refused(four.run(sync_recordings, [narrow, narrow, narrow, wider]))
    assert "rank 3 does not fit those before it: subrecorder 'a': " in text


def test_a_rank_that_cannot_send_leaves_no_other_waiting(four: World) -> None:
    for culprit in range(4):
        answers = four.run(sync_recordings, [of("a") if rank != culprit else UNSENDABLE for rank in range(4)])
        assert f"rank {culprit} cannot send what it recorded: SyncError: subrecorder 'a' has no reducer" in refused(answers)
        assert [answer.cause for answer in answers] == ["SyncError" if rank == culprit else "NoneType" for rank in range(4)]
    assert len(alike(four.run(sync_recordings, [of("ab")] * 4))) == 2  # no group is out of step


UNSENDABLE = Recording({"a": Subrecording(None, {"": {"count": torch.ones(1)}})})


def test_ranks_that_ask_for_other_receivers_are_refused(four: World) -> None:
    text = refused(four.run(sync_recordings, [of("a")] * 4, "error", ["all", "all", 2, 2]))
    assert "sync(to='all', missing='error')" in text
    assert "sync(to=2, missing='error')" in text
    text = refused(four.run(sync_recordings, [of("a")] * 4, "error", ["all", "all", "all", 9]))
    assert "rank 3 cannot send what it recorded: SyncError: to=9 is neither 'all' nor a rank of the group" in text


def test_names_that_only_some_ranks_record_are_merged_if_asked_for(four: World) -> None:
    merged = alike(four.run(sync_recordings, [of("ab"), of("bc"), of("cd"), of("e")], "keep"))
    assert {name: samples for name, (samples, *_) in merged.items()} == {"a": 1, "b": 2, "c": 2, "d": 1, "e": 1}
    text = refused(four.run(sync_recordings, [of("a"), of("b"), of("c"), of("a", Sum())], "keep"))
    assert "'a' is ForwardMonitor(Mean(pattern='... ->')) on rank 0 and ForwardMonitor(Sum(pattern='... ->')) on rank 3" in text
    function = of("a", Mean().premap(torch.abs))
    text = refused(four.run(sync_recordings, [of("b"), of("b"), function, function], "keep"))
    assert "ranks [0, 1], which do not record it, do not have its function" in text


def differing(place: Place) -> list[str]:
    with pytest.warns(RecordingWarning) as caught:
        sync(recorded(place[0], norm_of=int(place[0] == 3)), mesh_of(2, 2))
    return [str(warning.message) for warning in caught]


def test_copies_that_differ_are_reported_on_all_ranks(four: World) -> None:
    (text,) = alike(four.run(differing))
    assert "'weight' () on rank 3, unlike ranks 0, 1 and 2." in text


def without_states(place: Place) -> Any:
    return bits(sync(Recording({}), mesh_of(2, 2)))


def test_recordings_without_subrecorders(four: World) -> None:
    assert alike(four.run(without_states)) == {}


def in_order(place: Place, ranks: Any) -> Any:
    collect = Collect()
    own = of("a", collect, collect.update({}, torch.tensor([float(place[0])])))
    mesh = DeviceMesh("cpu", ranks)
    return sync(own, mesh)["a"].peek().tolist(), sync(own, mesh, to=2) is not None


def test_a_mesh_merges_in_its_order(four: World) -> None:
    for ranks in ([[0, 2], [1, 3]], [[3, 2], [1, 0]], [3, 1, 0, 2]):
        answers = returned(four.run(in_order, ranks))
        assert [values for values, _ in answers] == [[float(rank) for rank in torch.tensor(ranks).flatten()]] * 4
        assert [received for _, received in answers] == [False, False, True, False]


def partly_meshed(place: Place, ranks: Any) -> Any:
    return len(sync(of("a"), DeviceMesh("cpu", ranks)))


def test_who_is_not_in_the_mesh_is_told_so(four: World) -> None:
    answers = four.run(partly_meshed, [0, 1, 2])
    assert answers[:3] == [1, 1, 1]
    assert "rank 3 is not in the mesh of ranks [0, 1, 2]: call this on its members only" in answers[3].text


def of_four_among_five(place: Place) -> Any:
    mesh = DeviceMesh("cpu", [[1, 2], [3, 4]])
    group = dist.new_group([1, 2, 3, 4])
    try:
        sync(of("a"), mesh)
    except SyncError as error:
        return str(error), place[0] and len(sync(of("a"), group))
    return "merged"


@pytest.mark.slow
def test_several_dimensions_that_are_not_all_ranks_need_a_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if sys.platform == "linux":
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    world = World(tmp_path, size=5)
    try:
        (zero, _), *others = returned(world.run(of_four_among_five))
    finally:
        world.kill()
    assert "rank 0 is not in the mesh of ranks [1, 2, 3, 4]" in zero
    for text, merged in others:
        assert "there is no process group of ranks [1, 2, 3, 4], which are 2 dimensions of a mesh" in text
        assert "give it: group = torch.distributed.new_group([1, 2, 3, 4])" in text
        assert merged == 1


def from_a_recorder(place: Place) -> Any:
    net = nn.Sequential(nn.Linear(3, 2))
    with torch.inference_mode(), Recorder(ForwardMonitor(Count())).modules(net) as recorder:
        net(torch.ones(place[0], 3))
        merged = recorder.sync(mesh_of(2, 2))
    return int(merged[0].peek()), any(value.is_inference() for part in merged.values() for value in part.states[""].values())


def test_a_recorder_takes_a_mesh(four: World) -> None:
    assert alike(four.run(from_a_recorder)) == (12, False)
