"""Buffers: memory is used again once the last view of it is gone, and never before; batches stay what they were."""

from __future__ import annotations

import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader

from recorders import Stream, StreamDataset
from recorders.streams.buffers import LEAST, Buffers

numpy = pytest.importorskip("numpy")

HOLDERS = {
    "itself": lambda taken: taken,
    "a part": lambda taken: taken[3:9],
    "another dtype": lambda taken: taken.view(torch.float32)[1],
    "an array": lambda taken: taken.numpy(),
    "DLPack": lambda taken: numpy.from_dlpack(taken),
    "a storage": lambda taken: taken.untyped_storage(),
}


MOST = 16 * LEAST


@pytest.mark.parametrize("holder", HOLDERS)
def test_memory_is_used_again_once_its_last_holder_is_gone(holder: str) -> None:
    buffers = Buffers(MOST)
    taken = buffers.take(2 * LEAST)
    address, held = taken.data_ptr(), HOLDERS[holder](taken.view(-1, 64))
    del taken
    other = buffers.take(2 * LEAST)
    assert other.data_ptr() != address
    del held
    assert buffers.take(LEAST + 8).data_ptr() == address
    again = pickle.loads(pickle.dumps(buffers))
    assert (again.most, again.take(2 * LEAST).data_ptr() == address) == (MOST, False)


@settings(max_examples=20)
@given(st.lists(st.tuples(st.sampled_from([LEAST, LEAST + 4, 3 * LEAST, 20 * LEAST]), st.integers(0, 16)), max_size=30))
def test_nothing_that_is_held_is_ever_written_to(steps: list[tuple[int, int]]) -> None:
    buffers = Buffers(MOST)
    held: list[tuple[int, Tensor]] = []
    for step, (size, dropped) in enumerate(steps):
        taken = buffers.take(size).view(torch.int32)
        taken[:: LEAST // 16] = step
        held.append((step, taken[:: LEAST // 16]))
        if dropped < len(held):
            del held[dropped]
        del taken
        assert all((part == number).all() for number, part in held)
        assert sum(map(len, buffers._kept)) <= MOST


def test_threads_get_memory_of_their_own() -> None:
    buffers, wrong, go = Buffers(MOST), [], threading.Barrier(4)

    def use(number: int) -> None:
        go.wait()
        for _ in range(200):
            taken = buffers.take(LEAST)
            taken[::4096] = number
            wrong.extend(taken[::4096][taken[::4096] != number].tolist())

    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """12 batches of 4.8 MB: row i is 300 times i."""
    folder = tmp_path_factory.mktemp("stream")
    with Stream(folder, shard_bytes=1 << 24) as stream:
        for start in range(0, 48_000, 4000):
            stream.put("x", torch.arange(start, start + 4000.0)[:, None].expand(-1, 300))
    return folder


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("seed", [None, 0])
def test_batches_that_are_kept_stay_what_they_were(big: Path, workers: int, seed: int | None) -> None:
    data: Any = StreamDataset(big, shuffle=seed, window=10_000)
    kept = [*DataLoader(data.batches(4000), batch_size=None, num_workers=workers)]
    assert all((batch == batch[:, :1]).all() for batch in kept)
    assert torch.equal(torch.cat([batch[:, 0] for batch in kept]).sort().values, torch.arange(48_000.0))
    if seed is None and not workers:
        assert len({batch.data_ptr() for batch in kept}) == len(kept)
        del kept
        assert len({batch.data_ptr() for batch in data.batches(4000)}) < 12


def test_what_waits_to_be_written_is_not_written_over(tmp_path: Path) -> None:
    with Stream(tmp_path, queue_bytes=1 << 24) as stream:
        for number in range(40):
            stream.put("x", torch.full((1000, 500), number))
        kept = sum(map(len, stream._buffers._kept))
    assert 0 < kept <= 1 << 24
    assert torch.equal(StreamDataset(tmp_path)[:], torch.arange(40).repeat_interleave(1000)[:, None].expand(-1, 500))
