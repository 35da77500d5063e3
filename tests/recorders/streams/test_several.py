"""Several streams as one dataset: the rows of the first, then those of the second; and batches without end."""

from __future__ import annotations

import pickle
from itertools import islice
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset

from recorders import MergeError, SelectionError, Stream, StreamDataset


def write(folder: Path, first: int, rows: int) -> Path:
    """Rows first, first + 1, ... of "x" and their negatives as "y", with the ids 1000 + row; three rows a batch."""
    with Stream(folder, shard_bytes=100) as stream:
        for start in range(first, first + rows, 3):
            ids = torch.arange(start, min(start + 3, first + rows))
            with stream.given(ids=1000 + ids):
                stream.put("x", ids.float())
                stream.put("y", -ids.float())
    return folder


COUNTS = (17, 0, 30, 1)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Streams of so many rows, those of one after those of the other."""
    folder = tmp_path_factory.mktemp("ranks")
    return [write(folder / str(rank), sum(COUNTS[:rank]), count) for rank, count in enumerate(COUNTS)]


@settings(max_examples=30)
@given(
    chosen=st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True).filter(lambda chosen: chosen != [1]),
    seed=st.none() | st.integers(0, 5),
    window=st.none() | st.integers(1, 100),
    size=st.integers(1, 40),
)
def test_rows_of_all_streams_come_once_in_order_or_shuffled(
    ranks: list[Path], chosen: list[int], seed: int | None, window: int | None, size: int
) -> None:
    folders = [ranks[rank] for rank in chosen]
    expected = [row + sum(COUNTS[:rank]) for rank in chosen for row in range(COUNTS[rank])]
    data = StreamDataset(folders, "x", ids=True)
    rows, ids = data[:]
    assert rows.tolist() == expected
    assert torch.equal(ids[:, 0], 1000 + rows.long())
    plain = ConcatDataset([StreamDataset(ranks[rank], "x") for rank in chosen if COUNTS[rank]])
    assert [row.item() for row in plain] == expected
    batches = [*StreamDataset(folders, ["x", "y"], ids=True).shuffled(seed, window).batches(size)]
    read = torch.cat([rows["x"] for rows, _ in batches])
    assert torch.equal(read, torch.cat([-rows["y"] for rows, _ in batches]))
    assert torch.equal(1000 + read.long(), torch.cat([ids[:, 0] for _, ids in batches]))
    assert sorted(read.tolist()) == sorted(expected)
    again = pickle.loads(pickle.dumps(data.shuffled(seed, window)))
    assert torch.equal(again[:][0], read)


def test_one_in_a_list_is_one_and_its_path_is_a_tuple(tmp_path: Path) -> None:
    one, other = write(tmp_path / "0", 0, 6), write(tmp_path / "1", 6, 6)
    assert StreamDataset(one, "x").path == one
    assert StreamDataset([one], "x").path == (one,)
    assert len(StreamDataset([one], "x")) == 6
    assert repr(StreamDataset([one, other], "x")) == f"StreamDataset('{one}, {other}', 'x'): 12 rows of shape () in float32"


def test_the_same_rows_are_read_after_a_refresh_as_by_a_new_dataset(tmp_path: Path) -> None:
    one, other = write(tmp_path / "0", 0, 6), tmp_path / "1"
    with Stream(other) as stream:  # a rank that has committed nothing yet
        data = StreamDataset([one, other], ["x", "y"])
        begun = data.shuffled(0)
        assert len(data) == 6
        stream.put("x", torch.arange(3.0) + 100)
        stream.put("y", torch.arange(3.0))
    write(one, 6, 6)
    assert data.refresh() == 15
    assert data[:]["x"].tolist() == StreamDataset([one, other], "x")[:].tolist() == [*range(12), 100, 101, 102]
    assert sorted(begun[:]["x"].tolist()) == list(range(6))
    with Stream(other) as stream:
        stream.put("z", torch.arange(3))
    assert data.refresh() == 15


def test_streams_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    one, other = write(tmp_path / "0", 0, 6), tmp_path / "1"
    with pytest.raises(SelectionError, match="give the folder"):
        StreamDataset([])
    with pytest.raises(SelectionError, match=rf"{one}, {one} has 2 places"):
        StreamDataset([one, one])
    with Stream(other):
        late = StreamDataset([one, other], "x")
    with Stream(other) as stream:
        stream.put("x", torch.ones(2, 5))
    with pytest.raises(MergeError, match=rf"'x' has rows of shape \(5,\) in float32 with 1 id column in {other}, and rows of sh"):
        StreamDataset([one, other], "x")
    with pytest.raises(MergeError, match=str(other)):
        late.refresh()
    assert late[:].tolist() == list(range(6))
    with pytest.raises(SelectionError, match=rf"{other} has no place \['y'\]; it has \['x'\]"):
        StreamDataset([one, other], "y")


@settings(max_examples=25)
@given(size=st.integers(1, 17), seed=st.integers(0, 3), start=st.integers(0, 30))
def test_batches_without_end_are_whole_epochs_and_go_on_anywhere(ranks: list[Path], size: int, seed: int, start: int) -> None:
    data = StreamDataset(ranks[0], "x", window=7)
    many = [*islice(data.endless(size, seed=seed), 45)]
    assert {len(batch) for batch in many} == {size}
    epoch = 17 // size
    for number in range(45 // epoch):
        read = torch.cat(many[number * epoch : (number + 1) * epoch])
        assert torch.equal(read, data.shuffled(seed + number, 7)[: len(read)])
    rest = data.endless(size, seed=seed, start=start)
    assert all(torch.equal(batch, next(rest)) for batch in many[start:])


def test_batches_without_end_need_a_full_batch(tmp_path: Path) -> None:
    data = StreamDataset(write(tmp_path, 0, 6), "x")
    for wrong in ({"size": 7}, {"size": 2, "start": -1}, {"size": 0}):
        with pytest.raises(ValueError, match=r"endless|batches\(0\)"):
            data.endless(**wrong)
    for odd in ({"start": "x"}, {"start": None}, {"start": 1.5}, {"start": True}):
        with pytest.raises(ValueError, match=r"endless\(start=.*\): give the number of batches to skip"):
            data.endless(2, **odd)  # type: ignore[arg-type]
    for odd in ({"seed": "x"}, {"seed": None}, {"seed": True}):
        with pytest.raises(TypeError, match=r"seed.* give a whole number"):
            data.endless(2, **odd)  # type: ignore[arg-type]
