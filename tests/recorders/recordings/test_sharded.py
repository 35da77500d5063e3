"""One folder from many ranks: real processes with gloo on loopback, each of which writes its own files."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from forged import facts, files
from torch import Tensor, nn
from world import Place, Raised, World, alike, returned

from recorders import (
    CallMonitor,
    ForwardMonitor,
    ParameterMonitor,
    Recorder,
    Recording,
    Subrecording,
    load,
    merge,
    repair,
    verify,
)
from recorders.errors import CorruptRecordingError, MergeError, RecordingExistsError, RecordingWarning, SelectionError, StorageError
from recorders.recordings.atomic_files import open_regular
from recorders.recordings.distributed import sharded
from recorders.recordings.distributed.sharded import load_own, save_sharded
from recorders.recordings.distributed.sync import sync
from recorders.recordings.storage import load as load_module
from recorders.recordings.storage.commit import Commit, Generation
from recorders.recordings.storage.save import Layout
from recorders.recordings.storage.schema import Manifest, RankFile, decode, encode_ranks
from reducers import Collect, Mean, Moments, Norm, Product, Sum

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch.distributed is not built")

TWO = (0, 1)
LAYOUTS: tuple[Layout, ...] = ("folder", "packed")


def batch(index: int) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(index), dtype=torch.float64)


def recorded_net() -> tuple[nn.Module, Recorder]:
    """A net that is the same on all ranks: data of its own, parameters that all ranks share, observations that wait."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    recorder = Recorder(
        out=ForwardMonitor(Product(moments=Moments("b c -> c"), all=Collect())),
        value=ParameterMonitor(Norm(), when="call"),
        second=ForwardMonitor(Mean(), every=2),
    ).modules(net, types=nn.Linear)
    return net, recorder


def recorder_of(rank: int, batches: int = 3) -> Recorder:
    net, recorder = recorded_net()
    with recorder:
        for index in range(batches):
            net(batch(10 * rank + index))
    return recorder


def with_own(recorder: Recorder, rank: int) -> Recording:
    own = Subrecording(Mean(), {"": Mean().update({}, torch.tensor(float(rank)))}, 1, monitor="CallMonitor")
    snapshot = recorder.snapshot()
    return Recording({**snapshot.subrecordings, f"only {rank}": own}, {"tied": "out/0"}, snapshot.step)


def same(step: float, names: tuple[str, ...] = ("a", "b")) -> Recording:
    state = Sum().update({}, torch.tensor(step))
    return Recording({name: Subrecording(Sum(), {"": state}, int(step), monitor="ForwardMonitor") for name in names})


def saved_as_synced(place: Place, folder: str, layout: Layout) -> Any:
    rank, group = place
    recording = with_own(recorder_of(rank, batches=3 * (rank != 1)), rank)
    root = save_sharded(recording, f"{folder}/run", group, layout=layout)
    loaded, synced = load(root), sync(recording, group, missing="keep")
    assert facts(loaded) == facts(synced)
    assert loaded.step == synced.step
    mine = load(root, ranks=rank)
    assert facts(mine) == facts(recording)
    assert mine.step == recording.step
    assert [part.progress is None for part in mine.values()] == [part.progress is None for part in recording.values()]
    return facts(loaded)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [TWO, (0, 1, 2)], ids=len)
def test_what_is_loaded_is_what_sync_gives_bit_for_bit(
    world: World, tmp_path: Path, layout: Layout, ranks: tuple[int, ...]
) -> None:
    """Rank 1 has no data, and each rank has a name of its own. It is loaded in a process without a group, too."""
    answers = world.run(saved_as_synced, str(tmp_path), layout, ranks=ranks, group=ranks if ranks == TWO else None)
    assert facts(load(tmp_path / "run")) == alike(answers)
    assert facts(merge([tmp_path / "run"])) == answers[0]
    assert [*load(tmp_path / "run")][-1] == f"only {ranks[-1]}"


def count_collectives(place: Place, folder: str, names: int, layout: Layout) -> Any:
    calls, real = [], dist.all_gather

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args[1].numel())
        return real(*args, **kwargs)

    dist.all_gather = counted
    try:
        save_sharded(same(1.0, tuple(f"layer.{i}" for i in range(names))), folder, layout=layout)
    finally:
        dist.all_gather = real
    return calls


@pytest.mark.slow
def test_three_collectives_of_few_bytes_whatever_the_number_of_monitors(world: World, tmp_path: Path) -> None:
    few = alike(world.run(count_collectives, str(tmp_path / "few"), 1, "packed"))
    many = alike(world.run(count_collectives, str(tmp_path / "many"), 300, "packed"))
    assert few == many
    assert len(few) == 3
    assert max(few) < 500
    assert len(load(tmp_path / "many")) == 300
    assert len(files(tmp_path / "many")) == 6  # two files a rank
    alike(world.run(count_collectives, str(tmp_path / "few"), 7, "folder"))
    assert len(files(tmp_path / "few")) == 24


def save_again(place: Place, folder: str, steps: list[float], layout: Layout, names: tuple[str, ...] = ("a", "b")) -> Any:
    """Saves once for each step, of which only the last name knows."""
    kept = same(steps[0], names)
    for step in steps:
        save_sharded(Recording({**kept.subrecordings, names[-1]: same(step)["a"]}), folder, place[1], layout=layout)
    return "saved"


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_save_replaces_the_one_before(world: World, tmp_path: Path, layout: Layout) -> None:
    assert alike(world.run(save_again, str(tmp_path / "run"), [1.0, 2.0, 5.0], layout, ranks=TWO)) == "saved"
    assert load(tmp_path / "run").compute() == {"a": 2.0, "b": 10.0}
    assert sorted(path.name.partition("-")[0] for path in (tmp_path / "run").iterdir()) == [".lock", "generation", "manifest.json"]
    assert verify(tmp_path / "run") == {}


def test_saves_of_one_process_and_of_many_replace_each_other(world: World, tmp_path: Path) -> None:
    root = same(1.0).save(tmp_path / "run")
    returned(world.run(save_again, str(root), [2.0], "folder"))
    assert load(root).compute() == {"a": 6.0, "b": 6.0}
    returned(world.run(save_again, str(root), [3.0], "packed", ranks=TWO))
    assert load(root).compute() == {"a": 6.0, "b": 6.0}
    same(1.0).save(root)
    assert load(root).compute() == {"a": 1.0, "b": 1.0}
    assert len(list(Path(root).glob("generation-*"))) == 1


def save_other_net(place: Place, folder: str, overwrite: bool, moved: bool = False) -> Any:
    names = ("a", "b") if (place[0] == 0) != moved else ("c", "d")
    save_sharded(same(4.0, names), folder, overwrite=overwrite)
    return "saved"


def test_the_recording_of_another_net_is_refused_on_all_ranks(world: World, tmp_path: Path) -> None:
    root = same(1.0, ("a", "b", "x")).save(tmp_path / "run")
    for answer in world.run(save_other_net, str(root), False):
        assert answer.kind == "RecordingExistsError"
        assert "rank 1: " in answer.text
        assert "rank 0: " not in answer.text
        assert "only 0 of the 2 to be saved" in answer.text
    assert list(load(root)) == ["a", "b", "x"]
    assert alike(world.run(save_other_net, str(root), True)) == "saved"
    assert list(load(root)) == ["a", "b", "c", "d"]
    assert alike(world.run(save_other_net, str(root), False, True)) == "saved"  # layers move between ranks
    with pytest.raises(RecordingExistsError, match="another net, of 4 subrecorders"):
        same(1.0, ("e", "f")).save(root)
    same(1.0, ("c", "d")).save(root)


def resumed(place: Place, folder: str) -> Any:
    rank, group = place
    first, (whole_net, whole) = recorder_of(rank, batches=3), recorded_net()
    with whole:
        for index in range(7):
            if index == 3:  # it saves, too, and goes on
                whole.state_dict()
            whole_net(batch(10 * rank + index))
    first.save_sharded(f"{folder}/run", group)
    net, second = recorded_net()
    second.resume(f"{folder}/nothing", group, missing="start").resume(f"{folder}/run", group)
    with second:
        for index in range(3, 7):
            net(batch(10 * rank + index))
    assert facts(second.snapshot()) == facts(whole.snapshot())
    try:
        second.resume(f"{folder}/run")  # without the group
    except MergeError as error:
        return str(error)
    return facts(second.snapshot()) == facts(first.snapshot())


def test_each_rank_goes_on_with_its_own_part(world: World, tmp_path: Path) -> None:
    texts = returned(world.run(resumed, str(tmp_path), ranks=TWO))
    assert all("was saved by ranks [0, 1], and the group has ranks [0, 1, 2]: go on with the ranks that" in text for text in texts)
    with pytest.raises(MergeError, match=r"was saved by ranks \[0, 1\], and this process is in no process group"):
        recorder_of(0).resume(tmp_path / "run")
    together = recorder_of(0).resume(load(tmp_path / "run"))
    assert together.samples["out/0"] == 6


def strike(place: Place, folder: str, step: str) -> Any:
    """Rank 1 fails at one step of a save."""

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    rank, group = place
    where = {"begin": (sharded, "as_path"), "write": (Generation, "write"), "flush": (Generation, "flush")}
    owner, name = where.get(step, (Commit, "publish"))
    real = getattr(owner, name)
    if rank == (0 if step == "publish" else 1):
        setattr(owner, name, fail)
    try:
        save_sharded(same(7.0), folder, group)
    except StorageError as error:
        return str(error), type(error.__cause__).__name__
    finally:
        setattr(owner, name, real)
    return "saved"


@pytest.mark.parametrize("step", ["begin", "write", "flush", "publish"])
def test_a_rank_that_fails_is_named_on_all_and_the_former_recording_stays(world: World, tmp_path: Path, step: str) -> None:
    root = same(1.0).save(tmp_path / "run")
    before = (tmp_path / "run" / "manifest.json").read_bytes()
    answers = returned(world.run(strike, str(root), step))
    failed = 0 if step == "publish" else 1
    for rank, (text, cause) in enumerate(answers):
        assert f"not all ranks could save to {root}: rank {failed}: OSError: [Errno 28] No space left" in text
        assert cause == ("OSError" if rank == failed else "NoneType")
    assert (tmp_path / "run" / "manifest.json").read_bytes() == before
    assert len(list(Path(root).glob("generation-*"))) == 1
    returned(world.run(save_again, str(root), [2.0], "folder"))
    assert load(root).compute() == {"a": 6.0, "b": 6.0}


def save_apart(place: Place, folder: str, hidden: bool) -> Any:
    """Each rank has a folder of its own at the path; or the files of rank 1 are hidden from rank 0."""
    rank, group = place
    sharded.VISIBLE_SECONDS, before = 0.05, sharded.VISIBLE_SECONDS
    length = sharded._length
    if hidden:
        sharded._length = lambda where: None if "00001.json" in where else length(where)
    try:
        save_sharded(same(1.0), f"{folder}/shared" if hidden else f"{folder}/machine-{rank}/run", group)
    finally:
        sharded.VISIBLE_SECONDS, sharded._length = before, length
    return "saved"


def test_ranks_that_do_not_share_a_file_system_are_told_so(world: World, tmp_path: Path) -> None:
    for answer in world.run(save_apart, str(tmp_path), False, ranks=TWO):
        assert isinstance(answer, Raised)
        assert answer.kind == "StorageError"
        assert "rank 1: it does not see the folder generation-" in answer.text
        assert "that rank 0 made in" in answer.text
        assert "not a shared file system?" in answer.text
    for answer in world.run(save_apart, str(tmp_path), True, ranks=TWO):
        assert isinstance(answer, Raised)
        assert "rank 0: it does not see " in answer.text
        assert "00001.json, which rank 1 wrote: is that not a shared file system?" in answer.text
    assert [path.name for path in (tmp_path / "machine-0" / "run").iterdir()] == [".lock"]


def call_wrongly(place: Place, folder: str) -> Any:
    texts = []
    for path, layout in (("s3://bucket/run", "folder"), (folder, "zip"), (__file__, "folder")):
        try:
            save_sharded(same(1.0), path if place[0] == 0 else folder, place[1], layout=layout)  # type: ignore[arg-type]
        except Exception as error:
            texts.append((type(error).__name__, "rank 0: " in str(error)))
    return texts


def test_mistakes_of_one_rank_are_told_on_all(world: World, tmp_path: Path) -> None:
    told = alike(world.run(call_wrongly, str(tmp_path / "run"), ranks=TWO))
    assert told == [("StorageError", True), ("StorageError", True), ("NotARecordingError", True)]


def apart(place: Place, folder: str) -> Any:
    save_sharded(same(1.0), folder, place[1])
    return None


def test_a_process_that_is_not_in_the_group_is_told_so(world: World, tmp_path: Path) -> None:
    (answer,) = world.run(apart, str(tmp_path), ranks=(2,), group=TWO)
    assert answer.kind == "SyncError"
    assert "rank 2 is not in the group" in answer.text


def test_without_a_group_it_is_a_plain_save(tmp_path: Path) -> None:
    root = recorder_of(0).save_sharded(tmp_path / "run", layout="packed")
    assert facts(load(root)) == facts(recorder_of(0).snapshot())
    assert b'"subrecorders": [' in (root / "manifest.json").read_bytes()
    assert facts(load_own(root)) == facts(load(root))
    with pytest.raises(SelectionError, match="was saved by one process"):
        load(root, ranks=0)


def copies_that_differ(place: Place, folder: str) -> Any:
    rank, group = place
    recorder = recorder_of(0)
    if rank == 1:
        for name in ("value/0", "value/2"):
            recorder[name].reset()
    other = Recorder(rate=CallMonitor(Mean()))
    other.push("rate", float(rank))
    recording = Recording({**recorder.snapshot().subrecordings, **other.snapshot().subrecordings})
    save_sharded(recording, folder, group)
    return facts(sync(recording, group))


def test_a_rank_without_data_first_or_last_hides_no_copies(world: World, tmp_path: Path) -> None:
    answers = returned(world.run(copies_that_differ, str(tmp_path / "run"), ranks=(1, 2)))
    assert facts(load(tmp_path / "run")) == alike(answers)
    assert facts(merge([tmp_path / "run"])) == answers[0]


@pytest.fixture
def root(world: World, tmp_path: Path) -> Path:
    returned(world.run(save_again, str(tmp_path / "run"), [3.0], "folder"))
    return tmp_path / "run"


@pytest.mark.parametrize("read", [load, lambda path: dict(merge([path]).items())], ids=["load", "merge"])
def test_each_file_is_read_once_and_one_subrecorder_after_another(root: Path, monkeypatch: pytest.MonkeyPatch, read: Any) -> None:
    opened: list[str] = []

    def noted(where: str, limit: int) -> Any:
        opened.append(os.path.basename(where))
        return open_regular(where, limit)

    monkeypatch.setattr(load_module, "open_regular", noted)
    read(root)
    assert opened == [f"0000{rank}-0000{index}-{name}.safetensors" for index, name in enumerate("ab") for rank in range(3)]


def test_some_ranks_are_loaded(root: Path) -> None:
    assert load(root, ranks=[2, 0]).compute() == {"a": 6.0, "b": 6.0}
    assert load(root, ranks=1).samples["a"] == 3
    for wrong in (3, [0, 3], "0", []):
        with pytest.raises(SelectionError, match=r"ranks \[0, 1, 2\]|: \[0, 1, 2\]"):
            load(root, ranks=wrong)  # type: ignore[arg-type]


def test_damage_to_one_file_costs_one_subrecorder_of_one_rank(root: Path, tmp_path: Path) -> None:
    (broken,) = root.glob("generation-*/00001-00000-a.safetensors")
    broken.write_bytes(broken.read_bytes()[:-1] + b"?")
    with pytest.raises(StorageError, match="00001-00000-a"):
        load(root)
    with pytest.warns(RecordingWarning, match="1 parts of it are left out: 'a of rank 1'"):
        assert load(root, damaged="skip").compute() == {"a": 6.0, "b": 9.0}
    assert list(verify(root)) == ["a of rank 1"]
    assert list(repair(root, tmp_path / "repaired")) == ["a of rank 1"]
    assert load(tmp_path / "repaired").compute() == {"a": 6.0, "b": 9.0}
    assert load(tmp_path / "repaired", ranks=2).samples["a"] == 3


def test_damage_to_a_packed_file_costs_its_rank(world: World, tmp_path: Path) -> None:
    root = tmp_path / "run"
    returned(world.run(save_again, str(root), [3.0], "packed"))
    (broken,) = root.glob("generation-*/00001-0-packed.safetensors")
    broken.write_bytes(broken.read_bytes()[:-1] + b"?")
    with pytest.raises(StorageError, match="00001-0-packed"):
        load(root)
    with pytest.warns(RecordingWarning, match="'rank 1'"):
        assert load(root, damaged="skip").compute() == {"a": 6.0, "b": 6.0}
    assert list(repair(root, tmp_path / "repaired")) == ["rank 1"]
    assert load(tmp_path / "repaired").compute() == {"a": 6.0, "b": 6.0}


@pytest.mark.parametrize("what", ["gone", "damaged", "of another save"])
def test_the_manifest_of_a_rank_that_is_damaged_costs_that_rank(root: Path, tmp_path: Path, what: str) -> None:
    (broken,) = root.glob("generation-*/00001.json")
    raw = broken.read_bytes()
    if what == "gone":
        broken.unlink()
    else:
        generation = raw.partition(b'"generation": "')[2][:43]
        broken.write_bytes(raw.replace(generation, b"generation-" + b"0" * 32) if what == "of another save" else raw[:50])
    with pytest.raises(StorageError, match=r"00001\.json"):
        load(root)
    with pytest.warns(RecordingWarning, match="'rank 1'"):
        assert load(root, damaged="skip").compute() == {"a": 6.0, "b": 6.0}
    assert list(verify(root)) == ["rank 1"]
    with pytest.raises(StorageError):
        load(root, ranks=1)


@pytest.mark.slow
def test_every_bit_of_the_manifests_is_covered(root: Path) -> None:
    (inner,) = root.glob("generation-*/00002.json")
    for path in (root / "manifest.json", inner):
        raw = path.read_bytes()
        for bit in range(0, 8 * len(raw), 37):
            other = bytearray(raw)
            other[bit // 8] ^= 1 << bit % 8
            path.write_bytes(other)
            with pytest.raises(StorageError):
                load(root)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RecordingWarning)
                try:
                    found = load(root, damaged="skip").compute().values()
                except StorageError:
                    assert path != inner
                    assert not raw.index(b"\n") < bit // 8 < raw.rindex(b"\n]}")  # what all ranks need
                else:
                    assert {value.item() for value in found} <= {3.0, 6.0, 9.0}
        path.write_bytes(raw)
    assert load(root).compute() == {"a": 9.0, "b": 9.0}


def unlike(place: Place, folder: str) -> Any:
    reducer = Sum() if place[0] else Mean()
    part = Subrecording(reducer, {"": reducer.update({}, torch.tensor(2.0))}, 1)
    save_sharded(Recording({"x": part}), folder, place[1])
    return None


def test_ranks_that_do_not_fit_together_are_saved_and_read_one_by_one(world: World, tmp_path: Path) -> None:
    returned(world.run(unlike, str(tmp_path / "run"), ranks=TWO))
    with pytest.raises(MergeError, match=r"rank 1 does not fit those before it: subrecorder 'x': the reducers differ"):
        load(tmp_path / "run")
    assert [load(tmp_path / "run", ranks=rank).value("x").item() for rank in TWO] == [2.0, 2.0]
    assert verify(tmp_path / "run") == {}


def double(x: Tensor) -> Tensor:
    return 2 * x


def with_function(place: Place, folder: str) -> Any:
    reducer = Mean().premap(double)
    part = Subrecording(reducer, {"": reducer.update({}, torch.tensor(float(place[0])))}, 1)
    save_sharded(Recording({"x": part}), folder, place[1])
    return None


def test_results_of_a_reducer_that_holds_a_function_stand_side_by_side(world: World, tmp_path: Path) -> None:
    returned(world.run(with_function, str(tmp_path / "run"), ranks=TWO))
    assert load(tmp_path / "run").compute() == {"x": {"rank 0": 0.0, "rank 1": 2.0}}
    assert load(tmp_path / "run", reducers=Mean().premap(double)).compute() == {"x": 1.0}
    assert facts(load(load(tmp_path / "run").save(tmp_path / "again")))[1] == {}
    assert load(tmp_path / "again").compute() == {"x": {"rank 0": 0.0, "rank 1": 2.0}}


def test_it_is_read_from_a_url_and_its_net_is_known_there(root: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    store = fsspec.filesystem("memory")
    try:
        store.put(str(root), "/ranks/run", recursive=True)
        assert load("memory://ranks/run").compute() == load(root).compute()
        assert facts(load("memory://ranks/run", ranks=2)) == facts(load(root, ranks=2))
        assert facts(merge(["memory://ranks/run"])) == facts(load(root))
        assert verify("memory://ranks/run") == {}
        with pytest.raises(RecordingExistsError):
            same(1.0, ("c", "d")).save("memory://ranks/run")
        same(1.0).save("memory://ranks/run")
        assert load("memory://ranks/run").compute() == {"a": 1.0, "b": 1.0}
    finally:
        store.rm("/ranks", recursive=True)


def test_parts_of_it_are_no_recordings(root: Path) -> None:
    (generation,) = root.glob("generation-*")
    for part in (generation, generation / "00001.json"):
        with pytest.raises(StorageError, match=r"is part of the recording .*run: load that"):
            load(part)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_reader_that_knows_only_the_format_reads_it(world: World, tmp_path: Path, layout: Layout) -> None:
    returned(world.run(save_again, str(tmp_path / "run"), [3.0], layout))
    raw = (tmp_path / "run" / "manifest.json").read_bytes()
    head = b'{"format": "torch-recorders", "schema": 1, "crc32": "'
    rest = raw.split(b"\n")[0][len(head) + len('01234567", ') :]
    assert raw.startswith(b'%s%08x", "generation": "generation-' % (head, zlib.crc32(rest)))
    manifest = json.loads(raw)
    folder = tmp_path / "run" / manifest["generation"]
    read = {}
    for line in manifest["ranks"]:
        content = (folder / line["file"]).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (line["bytes"], line["sha256"])
        one = json.loads(content)
        assert (one["schema"], one["generation"]) == (1, manifest["generation"])
        for part in one["subrecorders"]:
            file = one["packed"] or part
            assert file["file"].startswith(Path(line["file"]).stem + "-")
            tensors = safetensors.torch.load_file(folder / file["file"])
            tree = part["values"][""]
            read[line["rank"], part["name"]] = tensors[tree].item()
    assert read == {(rank, name): 3.0 for rank in range(3) for name in "ab"}


def test_the_lines_of_a_manifest_of_ranks_are_checked() -> None:
    good = RankFile(3, "00003.json", 10, "0" * 64)
    generation = "generation-" + "0" * 32
    assert decode(encode_ranks(generation, {}, [good]), "here") == Manifest(generation, {}, ranks={3: good}, where="here")
    for wrong in (
        [good, good],
        [good, replace(good, rank=4)],
        [replace(good, rank=-1)],
        [replace(good, rank=True)],
        [replace(good, file="../3.json")],
        [replace(good, bytes=None)],  # type: ignore[arg-type]
        [replace(good, sha256="0")],
    ):
        with pytest.raises(CorruptRecordingError, match="here is malformed"):
            decode(encode_ranks(generation, {}, wrong), "here")
    for place, versions in (("../elsewhere", {}), (generation, {"torch": 3})):
        with pytest.raises(CorruptRecordingError, match="here is malformed"):
            decode(encode_ranks(place, versions, [good]), "here")  # type: ignore[arg-type]


def test_links_are_not_followed(root: Path, tmp_path: Path) -> None:
    (generation,) = root.glob("generation-*")
    shutil.move(generation, tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", generation)
    with pytest.raises(StorageError, match="symbolic link"):
        load(root)
