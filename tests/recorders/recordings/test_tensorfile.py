"""Tensors as the bytes of a file: joined if they are alike, and the same bits as one by one."""

from __future__ import annotations

import io

import pytest
import torch
from torch import Tensor, nn

from recorders.recordings.storage.tensors import CHUNK, CODES, as_bytes, chunks, describe, read_tensors


def through_file(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    header, ordered, dtypes = describe(tensors)
    raw = bytearray()
    for piece in chunks(header, ordered):
        raw += piece  # at once: a piece is gone when the next one is made
    return read_tensors(io.BytesIO(raw), len(raw), dtypes, "a file", len(raw))[0]


def bits(tensor: Tensor) -> Tensor:
    return as_bytes(tensor.detach().resolve_conj().resolve_neg().contiguous())


def alike(dtype: torch.dtype) -> dict[str, Tensor]:
    """Tensors of one shape and dtype, each held in another way."""
    numbers = torch.arange(256, dtype=torch.uint8)[: 24 * dtype.itemsize]
    plain = (numbers % 2 if dtype is torch.bool else numbers).view(dtype)
    plain = plain.view(4, 6).clone()
    held = {
        "plain": plain,
        "again": plain,
        "transposed": plain.t().contiguous().t(),
        "strided": plain.repeat(1, 2)[:, ::2],
        "expanded": plain[:1].expand(4, 6),
    }
    if dtype.is_floating_point and dtype.itemsize > 1:
        held["trained"] = nn.Parameter(plain) * 1
        held["parameter"] = nn.Parameter(plain)
    if dtype in (torch.float32, torch.float64):
        held["negated"] = torch.complex(plain, plain).conj().imag
    return held


@pytest.mark.parametrize("dtype", [getattr(torch, name) for name in [*CODES][: len(set(CODES.values()))]], ids=str)
def test_tensors_that_are_alike_are_joined_bit_for_bit(dtype: torch.dtype) -> None:
    tensors = {f"{turn}/{name}": tensor for turn in range(3) for name, tensor in alike(dtype).items()}
    found = through_file(tensors)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (found[name].shape, found[name].dtype) == (tensor.shape, tensor.dtype)
        assert torch.equal(bits(found[name]), bits(tensor)), name


def test_what_is_joined_is_no_longer_than_a_chunk() -> None:
    tensors = {str(number): torch.full((CHUNK // 4 // 3,), number, dtype=torch.float32) for number in range(10)}
    header, ordered, _ = describe(tensors)
    pieces = [len(piece) for piece in chunks(header, ordered)][1:]
    assert max(pieces) <= CHUNK
    assert len(pieces) == 4
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in through_file(tensors).items())


def test_tensors_without_elements_and_without_axes_are_joined_too() -> None:
    tensors = {
        **{f"empty {number}": torch.empty(0, 3) for number in range(3)},
        **{f"{number}": torch.tensor(float(number)) for number in range(3)},
    }
    found = through_file(tensors)
    assert all(torch.equal(found[name], tensor) and found[name].shape == tensor.shape for name, tensor in tensors.items())
