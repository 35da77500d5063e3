"""Tensors as the bytes of one safetensors file, and back, bit for bit in every dtype.

Written here rather than by `safetensors.torch.save` because that needs NumPy, which torch does not bring along; corrupts
conjugate views; refuses shared and strided memory; and knows fewer dtypes the older it is. Reading is left to safetensors, which
checks each header before it believes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import safetensors.torch
import torch
from torch import Tensor

from recorders.errors import CorruptRecordingError, StorageError

__all__ = ["as_bytes", "pack", "unpack"]

MAX_HEADER = 100_000_000
"""Longer headers are refused by every safetensors reader."""

_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
"""What every safetensors from 0.5 on can read."""

_STAND_INS = {
    "uint16": torch.int16,
    "uint32": torch.int32,
    "uint64": torch.int64,
    "float8_e4m3fnuz": torch.uint8,
    "float8_e5m2fnuz": torch.uint8,
    "float8_e8m0fnu": torch.uint8,
}
"""The rest is stored as integers with the same bits; complex numbers as pairs of reals along a last axis."""

_COMPLEX = {"complex32": torch.float16, "complex64": torch.float32, "complex128": torch.float64}


def pack(tensors: Mapping[str, Tensor]) -> tuple[bytearray, dict[str, str]]:
    """The bytes of a safetensors file, and the true dtype of those tensors that stand in it under another.

    Args:
        tensors: any strided tensors, on any device, in whatever memory they share; none is changed.

    Raises:
        StorageError: something is no tensor, or is one without data of its own: sparse, quantised, nested, meta.

    >>> data, dtypes = pack({"z": torch.tensor([1 + 2j])})
    >>> safetensors.torch.load(bytes(data)), dtypes
    ({'z': tensor([[1., 2.]])}, {'z': 'complex64'})
    """
    plain: dict[str, Tensor] = {}
    dtypes: dict[str, str] = {}
    for name, tensor in tensors.items():
        plain[name] = _plain(tensor, name)
        if plain[name].dtype != tensor.dtype:
            dtypes[name] = str(tensor.dtype).removeprefix("torch.")
    # Widest elements first, so that each tensor starts at a multiple of its element size.
    order = sorted(plain, key=lambda name: -plain[name].element_size())
    header: dict[str, object] = {}
    end = 0
    for name in order:
        tensor = plain[name]
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": _CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER:
        raise StorageError(f"{len(tensors)} tensors need a header of {len(text)} bytes; safetensors reads {MAX_HEADER} at most")
    data = bytearray(8 + len(text) + end)
    data[: 8 + len(text)] = len(text).to_bytes(8, "little") + text
    offset = 8 + len(text)
    for name in order:
        size = plain[name].nbytes
        if size:
            torch.frombuffer(data, dtype=torch.uint8, count=size, offset=offset).copy_(as_bytes(plain[name]))
        offset += size
    return data, dtypes


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, as uint8 along one axis.

    A single element counts as contiguous whatever its stride, and only stride 1 views as bytes.
    """
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _plain(tensor: Tensor, name: str) -> Tensor:
    """The tensor detached, on the CPU, contiguous, lazy conjugation and negation done, in a dtype that safetensors has."""
    if not isinstance(tensor, Tensor):
        raise StorageError(f"{name!r} is a {type(tensor).__name__} and no tensor")
    if tensor.layout != torch.strided or tensor.is_nested:
        raise StorageError(f"{name!r} is a tensor of layout {tensor.layout}; make it dense with .to_dense() where it is recorded")
    if tensor.is_meta:
        raise StorageError(f"{name!r} is a meta tensor: it has a shape and no data")
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.dtype not in _CODES and dtype not in _STAND_INS and dtype not in _COMPLEX:
        raise StorageError(f"{name!r} has dtype {dtype}, which cannot be stored; convert it where it is recorded")
    try:
        tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        if dtype in _COMPLEX:
            return torch.view_as_real(tensor)
        return tensor.view(_STAND_INS[dtype]) if dtype in _STAND_INS else tensor
    except (RuntimeError, TypeError) as error:
        raise StorageError(f"{name!r} of type {type(tensor).__name__} cannot be read: {error}") from error


def unpack(data: bytes, dtypes: Mapping[str, str], where: str) -> dict[str, Tensor]:
    """The tensors of a safetensors file, each in memory of its own.

    Args:
        data: the file's bytes, from anywhere.
        dtypes: the true dtypes, as `pack` returned them.
        where: the file's name, for errors.

    Raises:
        CorruptRecordingError: the bytes are no such file, or do not fit `dtypes`.
    """
    try:
        tensors: dict[str, Tensor] = safetensors.torch.load(data)
        for name, dtype in dtypes.items():
            if dtype in _COMPLEX:
                tensors[name] = torch.view_as_complex(_expect(tensors[name], _COMPLEX[dtype]))
            else:
                tensors[name] = _expect(tensors[name], _STAND_INS[dtype]).view(getattr(torch, dtype))
    # safetensors answers bad bytes with its own error, AssertionError, KeyError, OverflowError or RuntimeError, by what is bad.
    except Exception as error:
        raise CorruptRecordingError(f"{where}: no readable safetensors file: {type(error).__name__}: {error}") from error
    return tensors


def _expect(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if tensor.dtype != dtype:
        raise TypeError(f"found {tensor.dtype} where {dtype} belongs")
    return tensor
