"""Sync over a device mesh of two by two processes, with gloo on loopback."""

from __future__ import annotations

import datetime
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from paths import ROOT
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from world import Place, Raised, World, alike, returned

from recorders import ForwardMonitor, Recorder, Recording, RecordingWarning, Subrecording, SyncError
from recorders.recordings.distributed.level import Level, _Roll
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
    assert merged["output0"].leaves()[""]["all"].equal(flat["output0"].leaves()[""]["all"])
    torch.testing.assert_close(merged.compute(), flat.compute(), rtol=1e-12, atol=1e-12)
    assert list(merged.samples.values()) == list(flat.samples.values()) == [3, 1, 1]
    assert bits(sync(own, mesh_of(*shape))) == bits(merged)
    return bits(merged)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 2), (4,), (1, 4), (2, 1, 2), (2, 2, 1)])
def test_a_mesh_gives_what_the_group_gives_on_every_rank_bit_for_bit(four: World, shape: tuple[int, ...]) -> None:
    assert alike(four.run(compared, shape))["weight"][0] == 1


def one_receives(place: Place, to: int) -> Any:
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
    few, many = (returned(four.run(counted, names, to)) for names in (1, 200))
    assert few == many
    up, down = ["all_gather", "all_gather", "gather"], ["broadcast", "broadcast"]  # collections of unequal length differ in shape
    assert few == [[*up, *up, *down, *down], [*up, *down], [*up, *up, *down, *down], [*up, *down]]


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
    sizes = scale.sizes(alike_on_ranks(monitors, 0))
    expected = [model.flat(4, sizes) if len(shape) == 1 else model.hierarchical(shape, sizes, rank) for rank in range(4)]
    assert returned(four.run(sent, shape, monitors)) == [tuple(each) for each in expected]


def refused(answers: list[Any]) -> str:
    """The text of the SyncError that all ranks raised."""
    assert [answer.kind for answer in answers] == ["SyncError"] * 4, answers
    assert len({answer.text for answer in answers}) == 1, [answer.text for answer in answers]
    return str(answers[0].text)


def of(names: str, reducer: Any = None, state: Any = None) -> Recording:
    reducer = reducer or Mean()
    state = state or reducer.update({}, torch.ones(2, 2))
    return Recording({name: Subrecording(reducer, {"": state}, 1, monitor="ForwardMonitor") for name in names})


def sync_recordings(place: Place, by_rank: list[Recording], missing: Any = "error", to: Any = None) -> Any:
    rank = place[0]
    return bits(sync(by_rank[rank], mesh_of(2, 2), missing=missing, to=to[rank] if to else "all"))


def test_ranks_of_one_row_that_differ_are_told_to_all(four: World) -> None:
    text = refused(four.run(sync_recordings, [of("ab"), of("ab"), of("ab"), of("bc")]))
    assert text == "nothing was merged on the mesh: beside what both record, rank 2 records ['a'] and rank 3 records ['c']"
    text = refused(four.run(sync_recordings, [of("ab"), of("b"), of("ab"), of("bc")]))
    assert "rank 0 records ['a'] and rank 1 records nothing; beside what both record, rank 2 records ['a'] and rank 3" in text


def test_rows_that_differ_name_the_ranks_of_both(four: World) -> None:
    text = refused(four.run(sync_recordings, [of("a"), of("a"), of("a", Sum()), of("a", Sum())]))
    assert "Mean(pattern='... ->')) on rank 0 (with ranks [0, 1]) and ForwardMonitor(Sum" in text
    assert text.endswith("on rank 2 (with ranks [2, 3])")
    wide = Mean("b c -> c")
    narrow, wider = (of("a", wide, wide.update({}, torch.ones(2, width))) for width in (3, 5))
    text = refused(four.run(sync_recordings, [narrow, narrow, wider, wider]))
    assert "rank 2 (with ranks [2, 3]) does not fit the ranks before it: subrecorder 'a': " in text
    text = refused(four.run(sync_recordings, [narrow, narrow, narrow, wider]))
    assert "rank 3 does not fit the ranks before it: subrecorder 'a': " in text


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
    assert "rank 3 cannot sync: to=9 is neither 'all' nor a rank of the mesh, which has [0, 1, 2, 3]" in refused(
        four.run(sync_recordings, [of("a")] * 4, "error", ["all", "all", "all", 9])
    )


def test_names_that_only_some_ranks_record_are_merged_if_asked_for(four: World) -> None:
    merged = alike(four.run(sync_recordings, [of("ab"), of("bc"), of("cd"), of("e")], "keep"))
    assert {name: samples for name, (samples, *_) in merged.items()} == {"a": 1, "b": 2, "c": 2, "d": 1, "e": 1}
    text = refused(four.run(sync_recordings, [of("a"), of("b"), of("c"), of("a", Sum())], "keep"))
    assert "'a' is ForwardMonitor(Mean(pattern='... ->')) on rank 0 (with ranks [0, 1])" in text
    assert "Sum(pattern='... ->')) on rank 2 (with ranks [2, 3])" in text
    function = of("a", Mean().premap(torch.abs))
    text = refused(four.run(sync_recordings, [of("b"), of("b"), function, function], "keep"))
    assert "which do not record it, do not have its function" in text


def differing(place: Place) -> list[str]:
    with pytest.warns(RecordingWarning) as caught:
        sync(recorded(place[0], norm_of=int(place[0] == 3)), mesh_of(2, 2))
    return [str(warning.message) for warning in caught]


def test_copies_that_differ_are_reported_on_all_ranks(four: World) -> None:
    (text,) = alike(four.run(differing))
    assert "'weight' () on ranks [0, 3]" in text


def too_much(place: Place) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        if place[0] == 2:
            patch.setattr("recorders.recordings.distributed.exchange._free", lambda: 10)
        return bits(sync(of("a"), mesh_of(2, 2)))


def test_more_than_a_rank_has_memory_for_is_an_error_on_every_rank(four: World) -> None:
    assert "rank 2 needs" in refused(four.run(too_much))


def forged(place: Place, text: bytes) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        if place[0] == 3:
            empty = torch.empty(0, dtype=torch.uint8)
            patch.setattr("recorders.recordings.distributed.hierarchy._packed", lambda *_: (text, empty, None))
        return bits(sync(of("a"), mesh_of(2, 2)))


@pytest.mark.parametrize("text", [b"{", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"wrong": [3], "warnings": [], "result": null}'])
def test_a_forged_message_is_an_error_on_every_rank(four: World, text: bytes) -> None:
    assert "rank 3 sends a malformed manifest: " in refused(four.run(forged, text))


def without_states(place: Place) -> Any:
    return bits(sync(Recording({}), mesh_of(2, 2)))


def test_recordings_without_subrecorders(four: World) -> None:
    assert alike(four.run(without_states)) == {}


def partly_meshed(place: Place, ranks: Any) -> Any:
    return len(sync(of("a"), DeviceMesh("cpu", ranks)))


def test_a_mesh_without_this_rank_or_not_in_the_order_of_ranks_is_refused(four: World) -> None:
    answers = four.run(partly_meshed, [0, 1, 2])
    assert answers[:3] == [1, 1, 1]
    assert "rank 3 is not in the mesh it was asked to sync with, which has ranks [0, 1, 2]" in answers[3].text
    assert "the ranks of the mesh are [[0, 2], [1, 3]]" in refused(four.run(partly_meshed, [[0, 2], [1, 3]]))


def from_a_recorder(place: Place) -> Any:
    net = nn.Sequential(nn.Linear(3, 2))
    with torch.inference_mode(), Recorder(ForwardMonitor(Count())).modules(net) as recorder:
        net(torch.ones(place[0], 3))
        merged = recorder.sync(mesh_of(2, 2))
    return int(merged[0].peek()), any(value.is_inference() for part in merged.values() for value in part.states[""].values())


def refuse_async(place: Place) -> str:
    with pytest.raises(ValueError, match="leave out async_op, or give a group") as raised:
        sync(Recording({}), mesh_of(2, 2), async_op=True)
    return str(raised.value)


def test_a_mesh_has_no_asynchronous_form(four: World) -> None:
    assert len({*four.run(refuse_async)}) == 1


def test_a_recorder_takes_a_mesh(four: World) -> None:
    assert alike(four.run(from_a_recorder)) == (12, False)


def prepare(place: Place, seconds: float) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    for dimension in range(2):
        group: Any = mesh.get_group(dimension)
        dist.barrier(group)  # all are there and connected, however slow the machine is
        group.set_timeout(datetime.timedelta(seconds=seconds))
    MESHES[0,] = mesh
    dist.barrier()


def interrupted(place: Place, dies: bool) -> Any:
    now, behind = time.time, 3600.0 * place[0]  # the clocks of hosts differ
    time.time = lambda: now() - behind  # type: ignore[assignment]
    try:
        return interrupted_sync(place, dies)
    finally:
        time.time = now


def interrupted_sync(place: Place, dies: bool) -> Any:
    if dies and place[0] == 3:  # after the ranks of its row agreed to send their states
        Level.payloads = lambda *_: os._exit(1)  # type: ignore[method-assign]
    own = recorded(place[0])
    try:
        sync(own, MESHES[0,])
    except SyncError as error:
        return str(error), own.samples["weight"]
    return "merged"


def check_named(answers: list[Any]) -> None:
    for answer in answers:
        assert not isinstance(answer, (Raised, str)), answer
        assert "Ranks [3] did not answer within" in answer[0]
        assert answer[1] == 1


@pytest.mark.slow
def test_a_silent_rank_is_named_on_all_ranks_of_the_mesh(four: World) -> None:
    returned(four.run(prepare, 3.0))
    check_named(four.run(interrupted, False, ranks=(0, 1, 2)))


@pytest.mark.long
def test_a_rank_that_dies_is_named_on_all_ranks_of_the_mesh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if sys.platform == "linux":
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    world = World(tmp_path, size=4)
    try:
        returned(world.run(prepare, 30.0))
        *others, dead = world.run(interrupted, True)
        check_named(others)
        assert dead is None
    finally:
        world.kill()


def called(store: Any, ranks: list[int], monkeypatch: pytest.MonkeyPatch) -> dict[int, list[int]]:
    """Whom each of these ranks finds silent among ranks 0 to 2, each on a host whose clock is another."""
    found: dict[int, list[int]] = {}
    mine, now = threading.local(), time.time
    rolls = {rank: _Roll(store) for rank in ranks}  # all began before one failed
    monkeypatch.setattr(dist, "get_rank", lambda: mine.rank)
    monkeypatch.setattr(time, "time", lambda: now() - 2.0 * getattr(mine, "rank", 0))

    def call(rank: int) -> None:
        mine.rank = rank
        found[rank] = rolls[rank].silent([0, 1, 2], 1.0)

    threads = [threading.Thread(target=call, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


@pytest.mark.slow
def test_a_roll_call_compares_no_clocks_of_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    assert called(store, [0, 2], monkeypatch) == {0: [1], 2: [1]}  # rank 1 never came
    assert called(store, [0, 1, 2], monkeypatch) == {0: [], 1: [], 2: []}  # and does in the next sync
    assert called(store, [1, 2], monkeypatch) == {1: [0], 2: [0]}  # what rank 0 said before does not count
