"""Indices of a `StreamDataset`: any that NumPy takes for a first axis gives the rows that NumPy gives; any other is an error."""

from __future__ import annotations

import gc
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recorders import Stream, StreamDataset

numpy = pytest.importorskip("numpy")

ROWS = 37
WHOLE = numpy.stack([numpy.arange(ROWS), -numpy.arange(ROWS)], 1).astype("float32")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> StreamDataset:
    folder = tmp_path_factory.mktemp("stream")
    with Stream(folder, shard_bytes=100) as stream:
        for start in range(0, ROWS, 5):
            stream.put("x", torch.from_numpy(WHOLE[start : start + 5]))
    return StreamDataset(folder)


edges = st.none() | st.integers(-2 * ROWS, 2 * ROWS)
slices = st.builds(slice, edges, edges, st.none() | st.integers(-9, 9).filter(bool))
rows = st.integers(-ROWS, ROWS - 1)
many = st.lists(rows, max_size=12)
masks = st.lists(st.booleans(), min_size=ROWS, max_size=ROWS)
NARROW = ["int8", "int16", "int32", "int64", ">i4", "<i8"]


def backwards(values: list[Any]) -> Any:
    return numpy.array(values[::-1], dtype="int64")[::-1]


indices = st.one_of(
    slices,
    rows,
    rows.map(numpy.int16),
    rows.map(torch.tensor),
    rows.map(numpy.array),
    many,
    many.filter(bool).map(lambda found: [numpy.int64(row) for row in found]),
    many.map(lambda found: torch.tensor(found, dtype=torch.int32)),
    many.map(backwards),
    st.tuples(many, st.sampled_from(NARROW)).map(lambda given: numpy.array(given[0], dtype=given[1])),
    st.lists(st.integers(0, ROWS - 1), max_size=9).map(lambda found: numpy.array(found, dtype="uint64")),
    st.lists(st.integers(0, ROWS - 1), max_size=9).map(lambda found: torch.tensor(found, dtype=torch.uint8)),
    st.lists(st.tuples(rows, rows), min_size=1, max_size=5).map(lambda found: numpy.array(found)),
    st.lists(st.tuples(rows, rows), min_size=1, max_size=5).map(lambda found: torch.tensor(found)),
    masks,
    masks.map(torch.tensor),
    masks.map(numpy.array),
    masks.map(lambda found: [numpy.bool_(each) for each in found]),
    st.tuples(st.integers(-ROWS, ROWS), st.integers(-ROWS, ROWS)).map(lambda ends: range(max(0, ends[0]), max(0, ends[1]))),
)


def as_numpy(index: Any) -> Any:
    """The index as NumPy takes it: of an empty list it knows that it holds whole numbers."""
    return index.numpy() if isinstance(index, torch.Tensor) else list(index) if isinstance(index, range) else index


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(index=indices)
def test_rows_are_those_that_numpy_gives(data: StreamDataset, index: Any) -> None:
    wanted = WHOLE[as_numpy(index)]
    found = data[index]
    assert found.shape == wanted.shape
    assert numpy.array_equal(found.numpy(), wanted)


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(found=many)
def test_rows_of_a_batch_are_those_that_numpy_gives(data: StreamDataset, found: list[int]) -> None:
    for index in (found, torch.tensor(found, dtype=torch.int64), numpy.array(found, dtype="int64")):
        batch = data.__getitems__(index)
        assert [row.tolist() for row in batch] == WHOLE[numpy.array(found, dtype="int64")].tolist()


@pytest.mark.parametrize(
    "index",
    [
        ROWS,
        -ROWS - 1,
        [0, ROWS],
        numpy.array([-ROWS - 1]),
        torch.tensor([3, ROWS]),
        2**70,
        [2**70],
        numpy.array([2**64 - 1], dtype="uint64"),
        torch.tensor([2**64 - 1], dtype=torch.uint64),
        [True, False],
        torch.tensor([True] * (ROWS + 1)),
        numpy.ones((ROWS, 2), dtype=bool),
        torch.ones(0, dtype=torch.bool),
        True,
        numpy.bool_(True),
        torch.tensor(True),
        [True, 2],
        1.0,
        [1.0],
        [0, 1.5],
        torch.tensor([1.0]),
        torch.tensor(2.0),
        numpy.array([0.0]),
        numpy.float32(1),
        torch.tensor([1j]),
        numpy.array(["0"]),
        numpy.array([0, None], dtype=object),
        "0",
        b"0",
        None,
        ...,
        (0, 1),
        (),
        {0: 1},
        [[0], [1, 2]],
        ["a"],
    ],
    ids=repr,
)
def test_what_is_no_index_of_a_row_is_an_error(data: StreamDataset, index: Any) -> None:
    with pytest.raises(IndexError):
        data[index]


def test_items_of_several_places_with_ids_take_the_same_indices(tmp_path: Path) -> None:
    with Stream(tmp_path) as stream, stream.given(ids=torch.arange(10, 16)):
        stream.put("a", torch.arange(6.0))
        stream.put("b", torch.arange(6.0) * 2)
    item, ids = StreamDataset(tmp_path, ["a", "b"], ids=True)[numpy.array([[5, 0], [1, 1]])]
    assert item["b"].tolist() == [[10.0, 0.0], [2.0, 2.0]]
    assert ids.tolist() == [[[15], [10]], [[11], [11]]]


def permutations() -> list[torch.Tensor]:
    gc.collect()
    found = [one for one in gc.get_objects() if type(one) is torch.Tensor and one.dtype is torch.int64 and one.ndim == 1]
    return [one for one in found if len(one) > 1000 and not torch.equal(one, one.sort().values)]


@pytest.mark.slow
@pytest.mark.parametrize(("window", "most"), [(None, 1), (1 << 20, 2)])
def test_shuffles_of_many_epochs_keep_no_permutation_of_earlier_ones(window: int | None, most: int, tmp_path: Path) -> None:
    size = 600_011
    with Stream(tmp_path) as stream:
        stream.put("x", torch.zeros(size, dtype=torch.bool))
    data = StreamDataset(tmp_path)
    before = {id(one) for one in permutations()}
    for epoch in range(6):
        data = data.shuffled(epoch, window)
        data[0], data[-1]
    held = [one for one in permutations() if id(one) not in before]
    assert len([one for one in held if one.numel() == size]) == 1
    assert len(held) <= most
    assert len(pickle.dumps(data)) < 10_000


def test_a_shuffle_of_small_windows_reads_back_what_it_read(tmp_path: Path) -> None:
    with Stream(tmp_path) as stream:
        stream.put("x", torch.arange(5000))
    data = StreamDataset(tmp_path, shuffle=3, window=300)
    order = data[:]
    assert torch.equal(order.sort().values, torch.arange(5000))
    for _ in range(2):
        assert [int(data[place]) for place in range(0, 5000, 271)] == order[::271].tolist()
