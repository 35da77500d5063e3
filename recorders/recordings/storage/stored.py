"""How a tensor is stored: as contiguous memory on the CPU, in a dtype of safetensors, bit for bit."""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from recorders._torch import is_fake
from recorders.errors import CorruptRecordingError, StorageError

__all__ = [
    "CODES",
    "COMPLEX",
    "STAND_INS",
    "address",
    "as_bytes",
    "as_memory",
    "as_stored",
    "kept_bytes",
    "stored_as",
    "true_dtype",
    "why_no_memory",
]

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


_HAVE_MEMORY = ("cpu", "cuda", "meta")
"""The devices whose tensors say where their memory is; of others the copy on the CPU is looked at."""


def why_no_memory(tensor: Tensor) -> str:
    """Why the elements of a strided tensor are not in memory of its own; "" if they are.

    Whoever reads such memory without asking ends the process. It was freed (`untyped_storage().resize_`), or never was there: for
    meta and fake tensors, those of functorch, and subclasses that keep their values in other tensors.

    >>> freed = torch.ones(3)
    >>> why_no_memory(freed)
    ''
    >>> storage = freed.untyped_storage().resize_(0)
    >>> why_no_memory(freed)
    'whose memory was freed: 0 bytes are left of 12'
    """
    try:
        if not tensor.numel():
            return ""
        storage = tensor.untyped_storage()
        there, start = storage.nbytes(), storage.data_ptr()
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        needed = (tensor.storage_offset() + last + 1) * tensor.itemsize
    except Exception:  # a subclass may raise anything
        return "which has no memory of its own"
    if there < needed:
        return f"whose memory was freed: {there} bytes are left of {needed}"
    return "" if start else "which has no memory of its own"


def address(tensor: Tensor) -> int:
    """The address of the first element of a strided tensor; raises `StorageError` if it has no memory of its own.

    Nothing else in this package takes a pointer of a tensor to read or write there.
    """
    if reason := why_no_memory(tensor):
        raise StorageError(f"a tensor of type {type(tensor).__name__} cannot be read, {reason}")
    return tensor.data_ptr()


def as_memory(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU, which must live as long as this is used.

    Raises `StorageError` if it has none of its own, or is on another device, or not contiguous.
    """
    if not tensor.numel():
        return memoryview(b"")
    start = address(tensor)
    if not tensor.is_cpu or not tensor.is_contiguous():
        raise StorageError(f"a tensor of shape {list(tensor.shape)} on {tensor.device} is not contiguous memory on the CPU")
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(start)).cast("B")


def kept_bytes(tensor: Tensor) -> int:
    """The bytes of the memory that a tensor keeps, also what a view does not show; of a meta tensor those it would keep.

    0 if that is not known, as of sparse tensors.
    """
    try:
        return tensor.untyped_storage().nbytes()
    except Exception:  # a subclass may raise anything
        return 0


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, as uint8 along one axis."""
    # A single element is contiguous with any stride, but can be viewed as bytes with stride 1 only.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def stored_as(tensor: Tensor, name: str) -> tuple[torch.dtype, str]:
    """The dtype in which a tensor is stored, and the name of its own; raises `StorageError` if it cannot be stored."""
    if not isinstance(tensor, Tensor):
        raise StorageError(f"{name!r} is a {type(tensor).__name__}, not a tensor")
    try:
        dense, device = tensor.layout == torch.strided and not tensor.is_nested, tensor.device.type
        stored, dtype = _stored_dtype(tensor.dtype)
    except Exception as error:  # a subclass may raise anything
        raise StorageError(f"{name!r} is a {type(tensor).__name__}, which cannot be read: {error}") from error
    if not dense:
        raise StorageError(f"{name!r} is a tensor of layout {tensor.layout}; make it dense with .to_dense() where it is recorded")
    if is_fake(tensor):
        raise StorageError(f"{name!r} is a fake tensor: it has a shape but no data")
    if device == "meta":
        raise StorageError(f"{name!r} is a meta tensor: it has a shape but no data")
    if device in _HAVE_MEMORY and (reason := why_no_memory(tensor)):
        kind = type(tensor).__name__
        raise StorageError(f"{name!r} is a {kind} {reason}: keep a plain copy, such as tensor.clone(), where it is made")
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
        # PyTorch reads complex numbers as aligned pairs, and crashes if they are not; nor does it view those at odd offsets.
        aligned = address(tensor) % 16 == 0 and tensor.storage_offset() % 2 == 0
        return torch.view_as_complex(tensor if aligned else tensor.clone())
    return tensor.view(getattr(torch, dtype))
