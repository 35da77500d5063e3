"""`to_iterable_dataset`: each row once, with its ids, for any number of shards, nodes and workers; resumed, shuffled and mixed."""

from __future__ import annotations

import pickle
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paths import ROOT
from torch import Tensor
from torch.utils.data import DataLoader

from recorders import Stream, StreamDataset
from recorders.errors import MissingExtraError
from recorders.recordings.storage.tensors import CODES

ROWS = 203


@pytest.fixture(scope="module")
def acts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Row i of "x" is [i, -i], that of "y" is 2i; ids are those of 29 texts, from 1000 on, of 7 tokens; in 8 shards."""
    folder = tmp_path_factory.mktemp("stream")
    with Stream(folder, shard_bytes=1300) as stream:
        for text in range(29):
            rows = torch.arange(7.0) + 7 * text
            with stream.given(ids=[1000 + text]):
                stream.put("x", torch.stack([rows, -rows], 1)[None], axes=2)
                stream.put("y", 2 * rows[None].double(), axes=2)
    assert len(StreamDataset(folder, "x")) == ROWS
    return folder


def values(rows: Any) -> list[int]:
    """What was read of "x", after it was compared with its ids."""
    found = []
    for row in rows:
        first = int(row["x"][0])
        assert (int(row["x"][1]), int(row["sample"]), int(row["token"])) == (-first, 1000 + first // 7, first % 7)
        found.append(first)
    return found


def test_without_the_library_the_error_names_the_command(acts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtraError, match=r"pip install torch-recorders\[datasets\]"):
        StreamDataset(acts, "x").to_iterable_dataset()


@pytest.fixture(scope="module")
def datasets() -> Any:
    pytest.importorskip("datasets.distributed")
    return pytest.importorskip("datasets")


def test_columns_are_places_and_ids_with_their_types(datasets: Any, acts: Path) -> None:
    rows = StreamDataset(acts, ["x", "y"]).to_iterable_dataset()
    value, of = datasets.Value, datasets.List
    types = {"x": of(value("float32"), length=2), "y": value("float64"), "sample": value("int64"), "token": value("int64")}
    assert dict(rows.features) == types
    assert rows.num_shards == len(StreamDataset(acts, "x")._shards) == 8
    assert values(rows) == list(range(ROWS))
    assert [row["y"] for row in rows] == [2.0 * row for row in range(ROWS)]
    batch = next(iter(rows.with_format("torch").iter(batch_size=64)))
    assert {name: (column.shape, column.dtype) for name, column in batch.items()} == {
        "x": ((64, 2), torch.float32),
        "y": ((64,), torch.float32),  # what datasets makes of float64
        "sample": ((64,), torch.int64),
        "token": ((64,), torch.int64),
    }
    assert values(rows.with_format("torch")) == list(range(ROWS))


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("shape", [(), (3,), (1,), (2, 3), (2, 1, 3, 2, 2)], ids=str)
def test_every_dtype_and_shape_comes_back_exactly(datasets: Any, tmp_path: Path, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    names = [name for name in CODES if len(shape) < 5 or not name.startswith("complex")]
    written = {name: (8 * torch.rand(9, *shape)).to(getattr(torch, name)) for name in names}
    with Stream(tmp_path) as stream:
        for name, rows in written.items():
            stream.put(name, rows)
    (table,) = StreamDataset(tmp_path, names).to_iterable_dataset().with_format("arrow").iter(batch_size=100)
    for name, rows in written.items():
        wanted = torch.view_as_real(rows) if rows.is_complex() else rows
        assert torch.equal(torch.tensor(table[name].to_pylist(), dtype=torch.float64), wanted.double()), name


def test_tables_have_the_rows_without_a_further_copy(datasets: Any, acts: Path) -> None:
    data, addresses = StreamDataset(acts, "x"), []
    rows = data.to_iterable_dataset(1)
    reader = rows._ex_iterable.generate_tables_fn

    def gather(chosen: Tensor, ids: bool) -> Any:
        found, columns = data._gather(chosen, ids)
        addresses.append(found["x"].data_ptr())
        return found, columns

    object.__setattr__(reader, "gather", gather)
    (_, table), *_ = reader([(0, 50)])
    assert [table["x"].chunk(0).values.buffers()[1].address] == addresses


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_each_row_comes_once_to_one_node_and_one_worker(datasets: Any, acts: Path, data: st.DataObject) -> None:
    split = datasets.distributed.split_dataset_by_node
    shards = data.draw(st.none() | st.integers(1, ROWS))
    seed = data.draw(st.none() | st.integers(0, 9))
    rows = StreamDataset(acts, "x", shuffle=seed, window=50).to_iterable_dataset(shards)
    if data.draw(st.booleans()):
        rows = rows.shuffle(seed=1, buffer_size=data.draw(st.integers(1, 100)))
    nodes, workers = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    read: list[int] = []
    for node in range(nodes):
        its = split(rows, rank=node, world_size=nodes)
        for worker in range(workers):  # what each worker of a `DataLoader` sees, without its process
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch.utils.data, "get_worker_info", partial(SimpleNamespace, id=worker, num_workers=workers))
                read += values(its)
    assert sorted(read) == list(range(ROWS))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize(("shards", "nodes"), [(None, 1), (6, 2), (5, 2)])
def test_workers_of_a_data_loader_deal_out_the_shards(datasets: Any, acts: Path, shards: int | None, nodes: int) -> None:
    rows = StreamDataset(acts, "x").to_iterable_dataset(shards).shuffle(seed=0, buffer_size=20).with_format("torch")
    read = []
    for node in range(nodes):
        its = datasets.distributed.split_dataset_by_node(rows, rank=node, world_size=nodes)
        for batch in DataLoader(its, batch_size=32, num_workers=2):
            read += values({name: column[row] for name, column in batch.items()} for row in range(len(batch["sample"])))
    assert sorted(read) == list(range(ROWS))
    assert read != sorted(read)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, ROWS), shards=st.none() | st.integers(1, 20), seed=st.none() | st.integers(0, 5))
def test_a_state_gives_the_rest_of_the_rows(datasets: Any, acts: Path, cut: int, shards: int | None, seed: int | None) -> None:
    rows = StreamDataset(acts, "x", shuffle=seed).to_iterable_dataset(shards)
    whole, begun = values(rows), []
    for row in rows:
        if len(begun) == cut:
            break
        begun += values([row])
        state = rows.state_dict()
    again = StreamDataset(acts, "x", shuffle=seed).to_iterable_dataset(shards)
    if cut:
        again.load_state_dict(pickle.loads(pickle.dumps(state)))
    assert begun + values(again) == whole


def test_shards_are_neighbours_in_the_order_of_the_dataset(datasets: Any, acts: Path) -> None:
    for data in (StreamDataset(acts, "x"), StreamDataset(acts, "x", shuffle=3)):
        rows = data.to_iterable_dataset(num_shards=4)
        parts = [values(rows.shard(num_shards=4, index=index)) for index in range(4)]
        assert sum(parts, []) == data[:][:, 0].int().tolist()  # noqa: RUF017
        assert [len(part) for part in parts] == [50, 51, 51, 51]


def test_what_was_committed_since_is_not_in_it(datasets: Any, tmp_path: Path) -> None:
    with Stream(tmp_path) as stream:
        stream.put("x", torch.arange(6.0))
        stream.flush()
        data = StreamDataset(tmp_path, shuffle=0)
        rows = data.to_iterable_dataset()
        stream.put("x", torch.arange(6.0) + 6)
        stream.flush()
        assert data.refresh() == 12
    assert sorted(row["x"] for row in rows) == list(range(6))


def test_sources_are_mixed_with_weights(datasets: Any, tmp_path: Path) -> None:
    for source, count in enumerate((900, 300)):
        with Stream(tmp_path / str(source)) as stream:
            stream.put("x", torch.arange(float(count)) + 1000 * source)
    both = [StreamDataset(tmp_path / str(source)).to_iterable_dataset() for source in range(2)]
    joined = [row["x"] for row in datasets.concatenate_datasets(both)]
    assert joined == StreamDataset([tmp_path / "0", tmp_path / "1"])[:].tolist()
    mix = datasets.interleave_datasets
    for strategy in ("all_exhausted", "all_exhausted_without_replacement"):
        rows = [row["x"] for row in mix(both, probabilities=[0.75, 0.25], seed=0, stopping_strategy=strategy)]
        assert set(rows) == set(joined)
        assert (len(rows) == len(joined)) == (strategy == "all_exhausted_without_replacement")
        second = sum(x >= 1000 for x in rows[:1000])
        assert abs(second - 250) < 5 * (1000 * 0.75 * 0.25) ** 0.5


def test_at_a_url_and_in_workers_files_are_fetched(datasets: Any, acts: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    fsspec.filesystem("memory").put(f"{acts}/", f"/{acts.name}/", recursive=True)
    data = StreamDataset(f"memory://{acts.name}", "x")
    rows = data.to_iterable_dataset()
    assert values(rows) == values(pickle.loads(pickle.dumps(rows))) == list(range(ROWS))


def test_what_has_no_column_is_refused_by_name(datasets: Any, acts: Path, tmp_path: Path) -> None:
    for shards in (0, ROWS + 1, True, 2.5):
        with pytest.raises(ValueError, match="num_shards="):
            StreamDataset(acts, "x").to_iterable_dataset(shards)  # type: ignore[arg-type]
    with Stream(tmp_path) as stream:
        stream.put("sample", torch.ones(2))
        stream.put("deep", torch.ones(2, 1, 1, 1, 1, 1, 1))
    for place, message in (("sample", "'sample' has the name of a column"), ("deep", "'deep' has rows of shape")):
        with pytest.raises(ValueError, match=message):
            StreamDataset(tmp_path, place).to_iterable_dataset()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
def test_what_the_page_shows_runs(datasets: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in ("acts", "acts-0", "acts-1"):
        with Stream(path) as stream:
            for place in ("1", "3"):
                stream.put(place, torch.randn(4, 10, 6), axes=2)
    page = (ROOT / "docs" / "streams.md").read_text().partition("## In Hugging Face datasets")[2]
    found: dict[str, Any] = {}
    exec(page.partition("```py\n")[2].partition("```")[0], found)
    assert found["rows"].column_names == ["1", "3", "sample", "token"]
    assert found["batch"]["1"].shape[1:] == (6,)
