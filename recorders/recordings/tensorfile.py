"""Tensors as the bytes of one safetensors file, and back, bit for bit in every dtype.

`safetensors.torch.save` is not used because it needs NumPy, corrupts conjugate views, refuses shared and strided memory, and in
older versions supports few dtypes. Files are read with safetensors, which validates each header.
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
"""Every safetensors reader refuses longer headers."""

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
"""The dtypes that every safetensors from 0.5 on can read."""

_STAND_INS = {
    "uint16": torch.int16,
    "uint32": torch.int32,
    "uint64": torch.int64,
    "float8_e4m3fnuz": torch.uint8,
    "float8_e5m2fnuz": torch.uint8,
    "float8_e8m0fnu": torch.uint8,
}
"""Other dtypes are stored as integers with the same bits; complex numbers as pairs of reals along a last axis."""

_COMPLEX = {"complex32": torch.float16, "complex64": torch.float32, "complex128": torch.float64}


def pack(tensors: Mapping[str, Tensor]) -> tuple[bytearray, dict[str, str]]:
    """The bytes of a safetensors file, and the true dtypes of tensors that are stored as another dtype.

    Args:
        tensors: strided tensors on any device, which may share memory.

    Raises:
        StorageError: a value is not a tensor, or is sparse, quantised, nested or meta.

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
    # The largest elements come first, so that each tensor starts at a multiple of its element size.
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
    """The memory of a contiguous tensor, as uint8 along one axis."""
    # A single element is contiguous with any stride, but can be viewed as bytes with stride 1 only.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _plain(tensor: Tensor, name: str) -> Tensor:
    """The tensor detached, on the CPU, contiguous, without lazy conjugation or negation, in a dtype of safetensors."""
    if not isinstance(tensor, Tensor):
        raise StorageError(f"{name!r} is a {type(tensor).__name__}, not a tensor")
    if tensor.layout != torch.strided or tensor.is_nested:
        raise StorageError(f"{name!r} is a tensor of layout {tensor.layout}; make it dense with .to_dense() where it is recorded")
    if tensor.is_meta:
        raise StorageError(f"{name!r} is a meta tensor: it has a shape but no data")
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
    """The tensors in the untrusted bytes of a safetensors file, each in separate memory.

    Raises `CorruptRecordingError` if the bytes are not such a file, or do not fit `dtypes`, which `pack` returned. `where` is the
    name of the file, for errors.
    """
    try:
        tensors: dict[str, Tensor] = safetensors.torch.load(data)
        for name, dtype in dtypes.items():
            if dtype in _COMPLEX:
                tensors[name] = torch.view_as_complex(_expect(tensors[name], _COMPLEX[dtype]))
            else:
                tensors[name] = _expect(tensors[name], _STAND_INS[dtype]).view(getattr(torch, dtype))
    # On invalid bytes safetensors raises its own error, AssertionError, KeyError, OverflowError or RuntimeError.
    except Exception as error:
        raise CorruptRecordingError(f"{where}: no readable safetensors file: {type(error).__name__}: {error}") from error
    return tensors


def _expect(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if tensor.dtype != dtype:
        raise TypeError(f"found {tensor.dtype} instead of {dtype}")
    return tensor
