"""How a tensor is stored: as contiguous memory on the CPU, in a dtype of safetensors, bit for bit."""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from recorders._torch import is_fake
from recorders.errors import CorruptRecordingError, StorageError

__all__ = ["CODES", "COMPLEX", "STAND_INS", "as_bytes", "as_memory", "as_stored", "stored_as", "true_dtype"]

CODES = {
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

STAND_INS = {
    "uint16": torch.int16,
    "uint32": torch.int32,
    "uint64": torch.int64,
    "float8_e4m3fnuz": torch.uint8,
    "float8_e5m2fnuz": torch.uint8,
    "float8_e8m0fnu": torch.uint8,
}
"""Other dtypes are stored as integers with the same bits; complex numbers as pairs of reals along a last axis."""

COMPLEX = {"complex32": torch.float16, "complex64": torch.float32, "complex128": torch.float64}


def as_memory(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU, which must live as long as this is used."""
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, as uint8 along one axis."""
    # A single element is contiguous with any stride, but can be viewed as bytes with stride 1 only.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def stored_as(tensor: Tensor, name: str) -> tuple[torch.dtype, str]:
    """The dtype in which a tensor is stored, and the name of its own; raises `StorageError` if it cannot be stored."""
    plain = type(tensor) is Tensor and tensor.is_cpu and tensor.layout is torch.strided and not tensor.is_nested
    if plain and tensor.dtype in CODES:  # nearly all tensors of a recording
        return _stored_dtype(tensor.dtype)  # type: ignore[return-value]
    if not isinstance(tensor, Tensor):
        raise StorageError(f"{name!r} is a {type(tensor).__name__}, not a tensor")
    if tensor.layout != torch.strided or tensor.is_nested:
        raise StorageError(f"{name!r} is a tensor of layout {tensor.layout}; make it dense with .to_dense() where it is recorded")
    if is_fake(tensor):
        raise StorageError(f"{name!r} is a fake tensor: it has a shape but no data")
    if tensor.is_meta:
        raise StorageError(f"{name!r} is a meta tensor: it has a shape but no data")
    stored, dtype = _stored_dtype(tensor.dtype)
    if stored is None:
        raise StorageError(f"{name!r} has dtype {dtype}, which cannot be stored; convert it where it is recorded")
    return stored, dtype


@functools.cache
def _stored_dtype(dtype: torch.dtype) -> tuple[torch.dtype | None, str]:
    name = str(dtype).removeprefix("torch.")
    return (dtype if dtype in CODES else STAND_INS.get(name, COMPLEX.get(name))), name


def as_stored(tensor: Tensor) -> Tensor:
    """The tensor detached, on the CPU, contiguous, without lazy conjugation or negation, in a dtype of safetensors."""
    stored, dtype = _stored_dtype(tensor.dtype)
    if type(tensor) is Tensor and stored is tensor.dtype and tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg():
        return tensor.detach() if tensor.requires_grad else tensor
    try:
        tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        if dtype in COMPLEX:
            return torch.view_as_real(tensor)
        return tensor.view(STAND_INS[dtype]) if dtype in STAND_INS else tensor
    except (RuntimeError, TypeError) as error:
        raise StorageError(f"a tensor of type {type(tensor).__name__} cannot be read: {error}") from error


def true_dtype(tensor: Tensor, dtype: str | None, where: str) -> Tensor:
    """The tensor in its true dtype, of which `None` says that it is the one it is stored in."""
    if dtype is None:
        return tensor
    stored = COMPLEX.get(dtype) or STAND_INS.get(dtype)
    if stored != tensor.dtype or (dtype in COMPLEX and tensor.shape[-1:] != (2,)):
        raise CorruptRecordingError(f"{where}: a tensor of {tensor.dtype} and shape {list(tensor.shape)} is no {dtype:.50}")
    if dtype in COMPLEX:
        # PyTorch reads complex numbers as aligned pairs, and crashes if they are not.
        return torch.view_as_complex(tensor.clone() if tensor.data_ptr() % 16 else tensor)
    return tensor.view(getattr(torch, dtype))
