"""StreamDataset: rows by index, slice and batch, shuffled, by several workers, of several places, while written, and damaged."""

from __future__ import annotations

import gc
import json
import os
import pickle
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from recorders import CorruptRecordingError, RecordingNotFoundError, SchemaError, SelectionError, Stream, StreamDataset
from recorders.errors import NotARecordingError
from recorders.recordings.storage.schema import sealed_line
from recorders.streams.files import OPEN
from recorders.streams.index import BLOCK, PAYLOAD
from recorders.streams.order import Shuffle
from recorders.streams.parts import OpenFile, PartReader


def write(folder: Path, rows: int = 100, shard_bytes: int = 400) -> Path:
    """Row i of the place x is [i, -i], and has the id 1000 + i; five rows a batch, seventeen batches a shard."""
    with Stream(folder, shard_bytes=shard_bytes) as stream:
        for start in range(0, rows, 5):
            ids = torch.arange(start, min(start + 5, rows))
            with stream.given(ids=1000 + ids):
                stream.put("x", torch.stack([ids, -ids], 1).float())
    return folder


def test_rows_by_index_slice_and_indices(tmp_path: Path) -> None:
    data = StreamDataset(write(tmp_path))
    whole = torch.stack([torch.arange(100), -torch.arange(100)], 1).float()
    assert len(data) == 100
    assert len((tmp_path / "index.jsonl").read_text().splitlines()) > 4
    for index in (0, 5, 99, -1, -100):
        assert torch.equal(data[index], whole[index])
    for chosen in (slice(None), slice(3, 40), slice(50, 200, 7), slice(7, 7)):
        assert torch.equal(data[chosen], whole[chosen])
    for indices in ([3, 99, 0, -1, 3], torch.tensor([[5], [-5]]).flatten(), range(20, 30), []):
        assert torch.equal(data[indices], whole[torch.tensor([int(index) for index in indices], dtype=torch.int64)])
    for wrong in (100, -101, [0, 100]):
        with pytest.raises(IndexError, match="of 100"):
            data[wrong]
    assert torch.equal(torch.stack(list(data)), whole)
    assert torch.equal(torch.cat(list(data.batches(32))), whole)
    assert [len(batch) for batch in data.batches(32, drop_last=True)] == [32, 32, 32]
    first = data[0]
    first.fill_(7)  # the caller's own
    assert torch.equal(data[0], whole[0])


def test_names_and_options_that_do_not_exist_are_errors(tmp_path: Path) -> None:
    with pytest.raises(RecordingNotFoundError, match="no stream at"):
        StreamDataset(tmp_path / "none")
    with pytest.raises(NotARecordingError, match="holds no stream"):
        StreamDataset(tmp_path)
    with Stream(tmp_path) as stream, pytest.raises(SelectionError, match="0 places"):
        StreamDataset(stream.path)
    write(tmp_path)
    for places in ("y", ["x", "y"], []):
        with pytest.raises(SelectionError, match=r"it has \['x'\]"):
            StreamDataset(tmp_path, places)
    with pytest.raises(TypeError, match="the seed"):
        StreamDataset(tmp_path, shuffle=True)
    for window in (0, 2.5):
        with pytest.raises(ValueError, match="window="):
            StreamDataset(tmp_path, shuffle=0, window=window)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rows of a batch"):
        StreamDataset(tmp_path).batches(0)


@settings(max_examples=60)
@given(
    rows=st.integers(1, 2000), seed=st.integers(-(2**70), 2**70), window=st.none() | st.integers(1, 3000), cut=st.integers(0, 2000)
)
def test_an_order_has_each_row_once_wherever_it_is_read(rows: int, seed: int, window: int | None, cut: int) -> None:
    positions = torch.arange(rows)
    order = Shuffle(seed, window)(positions, rows)
    assert torch.equal(order.sort().values, positions)
    pieces = [Shuffle(seed, window)(part, rows) for part in (positions[: cut % rows], positions[cut % rows :]) if len(part)]
    assert torch.equal(torch.cat(pieces), order)


@pytest.mark.parametrize("window", [4096, None])
def test_a_shuffle_mixes_the_whole_stream(window: int | None) -> None:
    rows = 1 << 16
    order = Shuffle(0, window)(torch.arange(rows), rows).double()
    assert not torch.equal(order, Shuffle(1, window)(torch.arange(rows), rows).double())
    beginning = order[:4096]  # rows from everywhere: the mean and spread of a uniform draw, in runs of 256 or row by row
    draws = 4096 if window is None else 4096 // 256
    assert abs(beginning.mean() / rows - 0.5) < 5 / (12 * draws) ** 0.5
    neighbours = torch.corrcoef(torch.stack([beginning[:-1], beginning[1:]]))[0, 1]
    assert abs(neighbours) < 0.1


def test_shuffled_data_are_the_same_for_a_seed_and_another_order_for_another(tmp_path: Path) -> None:
    data = StreamDataset(write(tmp_path), shuffle=1, ids=True)
    again = StreamDataset(tmp_path, shuffle=1, ids=True)
    assert torch.equal(data[:][0], again[:][0])
    assert not torch.equal(data[:][0], data.shuffled(2)[:][0])
    rows, ids = data[:]
    assert torch.equal(rows[:, 0] + 1000, ids[:, 0])
    assert sorted(rows[:, 0].tolist()) == list(range(100))
    assert torch.equal(data.shuffled(None)[:][0][:, 0], torch.arange(100.0))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_workers_of_a_data_loader_read_each_row_once(tmp_path: Path, workers: int) -> None:
    data = StreamDataset(write(tmp_path), shuffle=5, window=None, ids=True)
    with Stream(tmp_path):  # workers are forked while a stream is open
        rows = [ids for _, ids in DataLoader(data, batch_size=7, num_workers=workers)]
        batches = [ids for _, ids in DataLoader(data.batches(7), batch_size=None, num_workers=workers)]
    assert torch.equal(torch.cat(rows), data[:][1])
    assert torch.equal(torch.cat(batches), data[:][1])
    assert sorted(torch.cat(rows).flatten().tolist()) == list(range(1000, 1100))


def test_a_dataset_is_pickled_without_its_maps(tmp_path: Path) -> None:
    data = StreamDataset(write(tmp_path), shuffle=3)
    data[:]
    assert len(pickle.dumps(data)) < 20_000
    assert torch.equal(pickle.loads(pickle.dumps(data))[:], data[:])


def test_places_are_aligned_by_id(tmp_path: Path) -> None:
    with Stream(tmp_path, shard_bytes=300) as stream:
        for step in range(20):
            ids = torch.arange(5) + 5 * step
            with stream.given(ids=ids):
                stream.put("a", ids.float())
                if step % 3:
                    stream.put("b", 2 * ids.float())
            if step == 10:
                stream.flush()  # a shard in which b is missing or not
    whole = StreamDataset(tmp_path, "a")
    both = StreamDataset(tmp_path, ["a", "b"], ids=True, shuffle=1)
    item, ids = both[:]
    assert len(whole) == 100
    assert len(both) == 5 * sum(step % 3 > 0 for step in range(20))
    assert torch.equal(item["a"], ids[:, 0].float())
    assert torch.equal(item["b"], 2 * item["a"])
    assert set(both[0][0]) == {"a", "b"}
    assert [row["b"] for row in StreamDataset(tmp_path, ["b"])] == list(StreamDataset(tmp_path, "b"))


def test_a_module_that_runs_twice_in_a_batch_pairs_its_calls_in_order(tmp_path: Path) -> None:
    with Stream(tmp_path) as stream, stream.given(ids=[1, 2]):
        for call in range(2):
            stream.put("twice", torch.tensor([1.0, 2.0]) + 10 * call)
        stream.put("also", torch.tensor([1.0, 2.0]))
        stream.put("once", torch.tensor([1.0, 2.0]))
        stream.put("also", torch.tensor([11.0, 12.0]))
    item = StreamDataset(tmp_path, ["twice", "also"])[:]
    assert item["twice"].tolist() == item["also"].tolist() == [1.0, 2.0, 11.0, 12.0]
    assert StreamDataset(tmp_path, ["twice", "once"])[:]["twice"].tolist() == [1.0, 2.0]


def test_a_reader_sees_only_what_is_committed_and_takes_in_the_rest(tmp_path: Path) -> None:
    with Stream(tmp_path, shard_bytes=1 << 30) as stream:
        stream.put("x", torch.arange(4.0))
        stream.flush()
        data = StreamDataset(tmp_path)
        stream.put("x", torch.arange(4.0) + 4)
        queue = stream._writer.queue
        with queue.changed:
            assert queue.changed.wait_for(lambda: queue.held == 0, 300)
        assert data.refresh() == len(StreamDataset(tmp_path)) == 4
        stream.flush()
        assert len(data) == 4
        assert data.refresh() == 8
        assert data[:].tolist() == list(range(8))
        with open(tmp_path / "index.jsonl", "ab") as file:
            file.write(b'{"crc32": "12')  # a line that is being written
        assert data.refresh() == len(StreamDataset(tmp_path)) == 8
    (tmp_path / "index.jsonl").write_bytes((tmp_path / "index.jsonl").read_bytes().replace(b'{"crc32": "12', b""))


@pytest.mark.parametrize("harm", ["flip", "cut", "grow", "remove", "header"])
def test_damage_names_the_shard_and_its_rows_and_the_others_are_read(tmp_path: Path, harm: str) -> None:
    write(tmp_path)
    victim = sorted(tmp_path.glob("*.safetensors"))[2]
    data = bytearray(victim.read_bytes())
    if harm == "remove":
        victim.unlink()
    else:
        if harm == "flip":
            data[PAYLOAD + 9] ^= 4
        elif harm == "header":
            data[12] ^= 1
        victim.write_bytes(data[:-1] if harm == "cut" else data + b"\0" if harm == "grow" else data)
    rows = [json.loads(line)["parts"]["x"]["rows"] for line in (tmp_path / "index.jsonl").read_text().splitlines()[1:]]
    found = StreamDataset(tmp_path)
    begin, end = sum(rows[:2]), sum(rows[:3])
    with pytest.raises(CorruptRecordingError, match=f"{victim.name}: rows 0 to {rows[2] - 1} of 'x'"):
        found[begin]
    assert torch.equal(found[:begin][:, 0], torch.arange(float(begin)))
    assert torch.equal(found[end:][:, 0], torch.arange(float(end), 100.0))


def test_damage_of_one_block_leaves_the_other_rows_of_the_shard(tmp_path: Path) -> None:
    width = 64
    with Stream(tmp_path) as stream:
        stream.put("x", torch.arange(3 * BLOCK // 4.0).view(-1, width))
    (file,) = tmp_path.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[PAYLOAD + BLOCK + 100] ^= 1
    file.write_bytes(data)
    rows = BLOCK // (4 * width)
    found = StreamDataset(tmp_path, ids=True)
    assert found[0][0][1] == 1
    assert found[2 * rows][0][0] == 2 * BLOCK // 4
    with pytest.raises(CorruptRecordingError, match=f"rows {rows} to {2 * rows - 1} of 'x'"):
        found[rows + 3]


WIDTH, LONG = 100, 9_000


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """9,000 rows of 400 bytes, so blocks do not end where rows do."""
    folder = tmp_path_factory.mktemp("stream")
    with Stream(folder) as stream:
        stream.put("x", torch.arange(LONG)[:, None] + torch.zeros(WIDTH))
    return folder


@settings(max_examples=40)
@given(place=st.integers(0, 400 * LONG - 1), first=st.integers(0, LONG), count=st.integers(0, LONG), seed=st.none() | st.just(0))
def test_rows_in_a_damaged_block_are_refused_and_no_others(
    long: Path, place: int, first: int, count: int, seed: int | None
) -> None:
    block = place // BLOCK
    damaged = range(block * BLOCK // 400, -(-(block + 1) * BLOCK // 400))
    (file,) = long.glob("*.safetensors")
    data = StreamDataset(long, shuffle=seed, window=300)
    chosen = range(first, min(first + count, LONG))
    asked = chosen if seed is None else Shuffle(0, 300)(torch.tensor(chosen, dtype=torch.int64), LONG).tolist()
    with open(file, "r+b") as opened:
        opened.seek(PAYLOAD + place)
        byte = opened.read(1)[0]
        for value in (byte ^ 8, byte):  # damaged, and whole again
            opened.seek(PAYLOAD + place)
            opened.write(bytes([value]))
            opened.flush()
            if value != byte and any(row in damaged for row in asked):
                with pytest.raises(CorruptRecordingError, match=f"rows {damaged[0]} to .* of 'x'"):
                    data[first : first + count]
            else:
                assert data[first : first + count][:, 7].tolist() == [*asked]


def test_a_file_that_is_cut_or_gone_while_it_is_read_is_an_error(long: Path, tmp_path: Path) -> None:
    for harm in (Path.unlink, lambda path: os.truncate(path, PAYLOAD + 3_000_000)):
        folder = tmp_path / str(harm)
        shutil.copytree(long, folder)
        data = StreamDataset(folder)
        assert len(data[:1000]) == 1000
        data._files[0]._opened.cache_clear()
        harm(next(folder.glob("*.safetensors")))
        with pytest.raises(CorruptRecordingError, match=r"rows 7000 to \d+ of 'x' in this shard are damaged or missing: \S"):
            data[7000:]


def test_few_files_are_open_at_a_time(tmp_path: Path) -> None:
    with Stream(tmp_path, shard_bytes=1) as stream:
        for number in range(2 * OPEN):
            stream.put("x", torch.full((1000, 20), number))
    data = StreamDataset(tmp_path)
    before = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
    for number, batch in enumerate(data.batches(1000)):
        assert (batch == number).all()
    if sys.platform == "linux":
        assert len(os.listdir("/proc/self/fd")) <= before + OPEN


def test_a_stream_of_another_version_is_an_error_that_says_so(tmp_path: Path) -> None:
    index = write(tmp_path) / "index.jsonl"
    index.write_bytes(index.read_bytes().replace(b'"version": 2', b'"version": 1', 1))
    for opens in (StreamDataset, Stream):
        with pytest.raises(SchemaError, match="has version 1; this version of recorders knows 2"):
            opens(tmp_path)


def everything(folder: Path) -> Any:
    data = StreamDataset(folder, ids=True)
    return [part.tolist() for part in data[:]], data[:][0].dtype


@pytest.mark.parametrize("flips", [400, pytest.param(20_000, marks=pytest.mark.long)])
def test_no_flipped_bit_is_read_silently(tmp_path: Path, flips: int) -> None:
    write(tmp_path / "sound", rows=20, shard_bytes=100)
    expected, draw, harmless = everything(tmp_path / "sound"), random.Random(0), 0
    files = [*(tmp_path / "sound").glob("*.safetensors"), *[tmp_path / "sound" / "index.jsonl"] * 8]
    shutil.copytree(tmp_path / "sound", tmp_path / "damaged")
    for _ in range(flips):
        file = draw.choice(files)
        data = bytearray(file.read_bytes())
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        (tmp_path / "damaged" / file.name).write_bytes(data)
        try:
            assert everything(tmp_path / "damaged") == expected
            harmless += 1
        except (CorruptRecordingError, NotARecordingError, SchemaError):
            pass
        shutil.copy(file, tmp_path / "damaged" / file.name)
    assert harmless == 0


@pytest.mark.parametrize("cut", [0, 1, 40])
def test_an_index_that_lost_its_beginning_is_an_error(tmp_path: Path, cut: int) -> None:
    write(tmp_path)
    (tmp_path / "index.jsonl").write_bytes((tmp_path / "index.jsonl").read_bytes()[:cut])
    for opens in (StreamDataset, Stream):
        with pytest.raises(CorruptRecordingError, match="first line"):
            opens(tmp_path)


def test_shards_without_their_index_are_not_removed(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "index.jsonl").unlink()
    files = sorted(tmp_path.glob("*.safetensors"))
    with pytest.raises(NotARecordingError, match="no stream"):
        Stream(tmp_path)
    assert sorted(tmp_path.glob("*.safetensors")) == files != []


def test_forged_lines_with_right_checksums_are_typed_errors(tmp_path: Path) -> None:
    write(tmp_path)
    lines = (tmp_path / "index.jsonl").read_bytes().splitlines(keepends=True)
    shard = json.loads(lines[1])
    del shard["crc32"]
    part = shard["parts"]["x"]
    forged: list[dict[str, Any]] = [{**shard, "number": 3}, {**shard, "batches": -1}, {**shard, "parts": [1]}, {}]
    for change in (
        {"file": "../../etc/passwd"},
        {"rows": 1 << 61},
        {"rows": 10**9},
        {"blocks": []},
        {"kind": {**part["kind"], "dtype": "nn"}},
        {"kind": {**part["kind"], "shape": [2] * 65}},
        {"kind": {**part["kind"], "shape": [1 << 40] * 4}},
        {"kind": {**part["kind"], "columns": 10**12}},
    ):
        forged += [{**shard, "parts": {"x": {**part, **change}}}]
    for found in forged:
        line = sealed_line(json.dumps(found)[1:])
        (tmp_path / "index.jsonl").write_text(f"{lines[0].decode()}{line}\n")
        with pytest.raises(CorruptRecordingError):
            StreamDataset(tmp_path)[0]


def test_at_a_url_only_what_is_read_is_fetched(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    write(tmp_path / "acts")
    url = f"memory://{tmp_path.name}/acts"
    store = fsspec.filesystem("memory")
    store.put(f"{tmp_path}/acts/", f"/{tmp_path.name}/acts/", recursive=True)
    data, here = StreamDataset(url), StreamDataset(tmp_path / "acts")
    folder = data._files[0]._folder
    assert sorted(path.name for path in folder.iterdir()) == ["index.jsonl"]
    assert torch.equal(data[:3], here[:3])
    assert len(list(folder.iterdir())) == 2
    assert torch.equal(data[:], here[:])
    again = pickle.loads(pickle.dumps(data))
    assert again._files[0]._folder != folder
    assert torch.equal(again[5:50:7], here[5:50:7])
    victim = sorted((tmp_path / "acts").glob("*.safetensors"))[1].name
    store.rm(f"/{tmp_path.name}/acts/{victim}")
    with pytest.raises(CorruptRecordingError, match=f"{url}/{victim}: rows 0 to "):
        StreamDataset(url)[:]
    with Stream(tmp_path / "acts") as stream:
        stream.put("x", here[:2] + 100)
    store.put(f"{tmp_path}/acts/", f"/{tmp_path.name}/acts/", recursive=True)
    assert data.refresh() == len(here) + 2
    assert torch.equal(data[-2:], here[:2] + 100)
    del data
    gc.collect()
    assert not folder.exists()
    for nothing, error in ((f"{url}/none", NotARecordingError), (str(tmp_path / "none"), RecordingNotFoundError)):
        with pytest.raises(error, match="stream"):
            StreamDataset(nothing)


def test_the_system_is_told_of_a_window_once_and_of_its_rows_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Stream(tmp_path, shard_bytes=40_000) as stream:
        for start in range(0, 10_000, 500):
            stream.put("x", torch.arange(start, start + 500))
    data = StreamDataset(tmp_path, shuffle=0, window=2048)
    assert torch.equal(data[:].sort().values, torch.arange(10_000))  # so that all blocks are compared
    told: list[int] = []

    def note(self: PartReader, spans: Any) -> None:
        told.extend(int(data._starts[int(self._path.name[:8])]) + row for span in spans for row in range(*span))

    monkeypatch.setattr(PartReader, "expect", note)
    data = data.shuffled(1, 2048)
    for number, batch in enumerate(data.batches(256)):
        window = range(number // 8 * 2048, min((number // 8 + 1) * 2048, 10_000))
        assert len(told) == window.stop
        assert {*batch.tolist()} <= {*told[window.start : window.stop]}
    assert sorted(told) == [*range(10_000)]
    assert len(data[9_990:]) == len(data[torch.arange(0, 10_000, 100)]) // 10
    assert len(told) == 10_000  # not for single rows, and not for rows from anywhere


def test_a_file_still_open_lets_the_interpreter_end_in_silence(tmp_path: Path) -> None:
    """Here it is dropped when its module is empty already."""
    file = next(write(tmp_path).glob("*.safetensors"))
    script = "import sys, recorders.streams.parts as parts; parts.kept = parts.OpenFile(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", script, str(file)], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_handle_that_reads_rows_reads_nothing_else_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a short read on it the system reads what follows in small parts, which is slower."""
    row = 4096
    with Stream(tmp_path) as stream:
        stream.put("x", torch.arange(float(64 * row)).reshape(64, row))
    reads, read = list[tuple[int, int]](), OpenFile.read

    def note(self: OpenFile, start: int, data: memoryview) -> int:
        reads.append((start, len(data)))
        return read(self, start, data)

    monkeypatch.setattr(OpenFile, "read", note)
    assert torch.equal(StreamDataset(tmp_path)[:32], torch.arange(float(32 * row)).reshape(32, row))
    assert reads == [(PAYLOAD, 32 * row * 4)]
