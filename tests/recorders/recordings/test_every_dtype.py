"""Every dtype at every offset: saved, loaded, mapped, put into streams, timelines, checkpoints and messages, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from recorders import Recording, Stream, StreamDataset, Subrecording, Timeline, load, merge
from recorders.recordings.distributed.protocol import Index, Sent, pack, parse
from recorders.recordings.storage.commit import Commit
from recorders.recordings.storage.save import versions, write_rank
from recorders.recordings.storage.schema import encode_ranks
from recorders.recordings.storage.tensors import CODES, as_bytes
from recorders.recordings.storage.tools import from_state_dict, to_state_dict
from reducers import Last

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

DTYPES = [getattr(torch, name) for name in CODES if hasattr(torch, name)]
NATIVE = DTYPES[: len(set(CODES.values()))]
OFFSETS = range(5)


def bits(tensor: Tensor) -> tuple[Any, ...]:
    whole = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return tensor.dtype, tensor.shape, bytes(as_bytes(whole).tolist())


def values(dtype: torch.dtype, count: int, offset: int = 0) -> Tensor:
    """Numbers of which the first is `offset` elements into its memory; of any bits, but for bools."""
    raw = torch.randint(
        0, 256, ((count + offset) * dtype.itemsize,), dtype=torch.uint8, generator=torch.Generator().manual_seed(count)
    )
    return (raw % 2 if dtype is torch.bool else raw).view(dtype)[offset:]


def states(dtype: torch.dtype, offset: int) -> dict[str, Tensor]:
    """Tensors of a dtype after so many elements of the others that are stored as the same one, and of bytes."""
    before = {
        str(other): values(other, offset) for other in (torch.float64, torch.float32, torch.float16, torch.int64, torch.uint8)
    }
    own = {
        "many": values(dtype, 3, offset),
        "one": values(dtype, 1, offset)[0],
        "none": values(dtype, 0, offset),
        "matrix": values(dtype, 6, offset).view(2, 3).t(),
        "last": values(dtype, 5),
    }
    return {**before, **own, **({"conj": values(dtype, 3, offset).conj()} if dtype in (torch.complex64, torch.complex128) else {})}


def recording(dtype: torch.dtype, offset: int) -> Recording:
    found = states(dtype, offset)
    return Recording({name: Subrecording(None, {"": found}, 1, saved_results={"": found}) for name in ("x", "y")})


def check(found: Recording, dtype: torch.dtype, offset: int, names: tuple[str, ...] = ("x", "y")) -> None:
    wanted = {key: bits(tensor) for key, tensor in states(dtype, offset).items()}
    for name in names:
        part = found[name]
        assert {key: bits(tensor) for key, tensor in part.states[""].items()} == wanted
        assert part.saved_results is not None
        for tensor in part.states[""].values():
            tensor.clone() + 0 if dtype in NATIVE and dtype.itemsize > 1 else tensor.clone()  # is where PyTorch may read it


Layout = Literal["folder", "packed"]
LAYOUTS: tuple[Layout, ...] = ("folder", "packed")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_saved_and_loaded(dtype: torch.dtype, layout: Layout, tmp_path: Path) -> None:
    for offset in OFFSETS:
        path = recording(dtype, offset).save(tmp_path / str(offset), layout=layout)
        check(load(path), dtype, offset)
        check(load(path, mmap=True), dtype, offset)
        lazily = merge([path])
        assert bits(lazily["x"].states[""]["many"]) == bits(values(dtype, 3, offset))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_saved_by_ranks_and_in_checkpoints(dtype: torch.dtype, tmp_path: Path) -> None:
    for offset in OFFSETS:
        with Commit(tmp_path / str(offset)) as commit:
            files = [write_rank(recording(dtype, offset), commit, rank, layout, []) for rank, layout in enumerate(LAYOUTS)]
            commit.publish(encode_ranks(commit.generation, versions(), files))
        for rank in range(2):
            check(load(tmp_path / str(offset), ranks=rank), dtype, offset)
    check(from_state_dict(to_state_dict(recording(dtype, 1))), dtype, 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_put_into_streams_and_timelines(dtype: torch.dtype, tmp_path: Path) -> None:
    for offset in OFFSETS:
        with Stream(tmp_path / str(offset)) as stream:
            stream.put("before", values(torch.uint8, offset + 1))
            stream.put("x", values(dtype, 12, offset).view(4, 3))
            stream.put("x", values(dtype, 3, offset).view(1, 3))
        data = StreamDataset(tmp_path / str(offset), "x")
        whole = values(dtype, 12, offset).view(4, 3)
        assert bits(data[:4]) == bits(whole)
        assert bits(data[[3, 1]]) == bits(torch.stack([whole.view(torch.uint8)[3], whole.view(torch.uint8)[1]]).view(dtype))
        with Timeline() as timeline:
            timeline.append(0, {}, tensors=states(dtype, offset))
            for name, tensor in states(dtype, offset).items():
                assert bits(timeline.tensor(name, 0)) == bits(tensor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sent_in_messages(dtype: torch.dtype) -> None:
    for offset in OFFSETS:
        found = states(dtype, offset)
        sent = Recording({name: Subrecording(Last(), {"": found}, 1) for name in ("x", "y")})
        packed = pack(sent, torch.device("cpu"), "error", "sync(missing='error')")
        index = Index(parse(packed.manifest))
        row = index.gathered(packed, torch.device("cpu"))
        assert index.size == row.numel()
        received = Sent(sent, index, row)
        assert {key: bits(tensor) for key, tensor in received["y"].states[""].items()} == {
            key: bits(tensor) for key, tensor in found.items()
        }
