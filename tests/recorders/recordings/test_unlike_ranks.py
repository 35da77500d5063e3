"""Ranks that do not fit together by mistake: every rank gets a SyncError that says what is wrong, and none waits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_distributed import refused
from world import Place, World, returned

from recorders import Recording, Subrecording, SyncError
from recorders.recordings.distributed.collectives import Exchange, Message
from recorders.recordings.distributed.protocol import differences, pack, parse
from recorders.recordings.distributed.sharded import save_sharded
from recorders.recordings.distributed.sync import sync
from reducers import Mean, Moments, Product
from reducers.core.fields import Add, Greatest

REDUCER = Product(mean=Mean(), moments=Moments("b c -> c"))


def sound() -> Recording:
    return Recording({"fc": Subrecording(REDUCER, {"": REDUCER.update({}, torch.ones(2, 3))}, 1)}, {"alias": "fc"})


def problems(recordings: Sequence[Recording], missing: Any = "error") -> list[str]:
    raws = [pack(recording, torch.device("cpu"), missing, "sync()").manifest for recording in recordings]
    return list(differences([parse(raw) for raw in raws], range(len(raws)), missing))


def test_ranks_that_record_alike_have_equal_manifests_whatever_they_saw() -> None:
    other = Recording({"fc": Subrecording(REDUCER, {"": REDUCER.update({}, torch.zeros(7, 3))}, 9)}, {"alias": "fc"})
    raws = {pack(recording, torch.device("cpu"), "error", "sync()").manifest for recording in (sound(), other)}
    assert len(raws) == 1
    assert problems([sound(), other, sound()]) == []


def test_tensors_of_one_dtype_that_merge_otherwise_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    here = parse(pack(sound(), cpu, "error", "sync()").manifest)
    monkeypatch.setattr(Mean, "fields", {"count": Greatest("count"), "sum": Add("sum")})
    there = parse(pack(sound(), cpu, "error", "sync()").manifest)
    (text,) = differences([here, here, there], [0, 1, 2], "error")
    assert "'fc' merges as {'mean/count': 'int64 sum'" in text
    assert "on rank 0 and as {'mean/count': 'int64 max'" in text
    assert text.endswith("on rank 2: is that another version?")
    empty = parse(pack(Recording({"fc": Subrecording(REDUCER)}), cpu, "error", "sync()").manifest)
    assert list(differences([here, empty], [0, 1], "error")) == []


def of_version(place: Place, versions: Sequence[str]) -> Any:
    rank, group = place
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("recorders.recordings.distributed.protocol._version", lambda: versions[rank])
        return list(sync(sound(), group))


@pytest.mark.slow
def test_ranks_that_run_other_versions_are_refused(world: World) -> None:
    text = refused(world.run(of_version, ["1.0", "1.0", "2.0"]))
    assert "rank 1 runs version 1.0; rank 2 runs version 2.0" in text


def another_call(place: Place, folder: str) -> Any:
    rank, group = place
    try:
        return save_sharded(sound(), folder, group) if rank == 1 else sync(sound(), group)
    except SyncError as error:
        return str(error), dist.get_rank(group)


@pytest.mark.slow
def test_a_rank_that_saves_while_the_others_sync_is_told_to_all(world: World, tmp_path: Any) -> None:
    texts = [text for text, _ in returned(world.run(another_call, str(tmp_path / "run")))]
    assert texts[0] == texts[2]
    assert "nothing was merged, because rank 1 answers something else: did it call sync, in the same version" in texts[0]
    assert "because rank 0 answers something else: did it call save_sharded, in the same version" in texts[1]
    assert not (tmp_path / "run").exists() or not list((tmp_path / "run").glob("manifest.json"))


def agreeing(place: Place, text: str) -> Any:
    rank, group = place
    exchange = Exchange(group, "a test")

    def step() -> Message:
        if rank == 1:
            raise LookupError(text)
        return Message(size=rank, free=2**61, sha256=bytes([rank] * 32), text="\u00e9" * rank)

    messages, failure = exchange.agree("what a test tells", step, (ValueError, LookupError))
    return messages, repr(failure)


@pytest.mark.slow
@pytest.mark.parametrize("text", ["", "lone \ud800", "\u00e9" * 1000])
def test_what_one_rank_could_not_do_is_told_to_all(world: World, text: str) -> None:
    answers = returned(world.run(agreeing, text))
    assert answers[0][0] == answers[1][0] == answers[2][0]
    first, failed, third = answers[0][0]
    assert first == Message(size=0, free=2**61, sha256=bytes(32))
    assert (third.size, third.sha256, third.text) == (2, bytes([2] * 32), "\u00e9" * 2)
    assert failed.kind == 2
    assert failed.text == text.encode(errors="backslashreplace").decode()[:200]
    assert [failure for _, failure in answers] == ["None", repr(LookupError(text)), "None"]


def unknown_class(place: Place) -> Any:
    """Ranks 1 and 2 record a name that rank 0 does not, and of which rank 0 cannot make the reducer."""
    rank, group = place
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr("recorders.recordings.distributed.protocol.from_recipe", lambda recipe: recipe["not here"])
        recording = sound() if rank else Recording({})
        return {name: part.samples for name, part in sync(recording, group, missing="keep").items()}


@pytest.mark.slow
def test_a_rank_that_cannot_make_a_reducer_leaves_no_other_waiting(world: World) -> None:
    first, *others = world.run(unknown_class)
    assert first.kind == "SyncError"
    assert "not here" in first.text
    assert others == [{"fc": 2}] * 2


def too_much(place: Place) -> Any:
    rank, group = place
    with pytest.MonkeyPatch.context() as patch:
        if rank == 2:
            patch.setattr("recorders.recordings.distributed.sync.free_memory", lambda: 100)
        return list(sync(sound(), group))


@pytest.mark.slow
def test_more_than_a_rank_has_memory_for_is_an_error_on_every_rank(world: World) -> None:
    answers = world.run(too_much)
    assert [answer.kind for answer in answers] == ["SyncError"] * 3
    assert all("rank 2 needs" in answer.text and "100 are free" in answer.text for answer in answers)
