"""Tensors as the bytes of a safetensors file, and back, bit for bit in every dtype.

`safetensors.torch.save` is not used because it needs NumPy, corrupts conjugate views, refuses shared and strided memory, and takes
twice the memory of the tensors. A file is written and read tensor by tensor. Only headers in the form that `describe` writes are
read, so nothing that a forged header says takes more memory than its file has bytes.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from json.encoder import encode_basestring_ascii as in_quotes
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor

from recorders._torch import is_fake
from recorders.errors import CorruptRecordingError, StorageError

__all__ = [
    "Place",
    "as_bytes",
    "as_memory",
    "as_stored",
    "chunks",
    "describe",
    "fill",
    "places",
    "read_header",
    "read_tensors",
    "stored_as",
    "true_dtype",
]

MAX_HEADER = 100_000_000
"""Every safetensors reader refuses longer headers."""
MAX_RANK = 64
"""PyTorch prints and merges tensors of more axes no longer."""
SMALL = 1 << 16
"""The bytes up to which the tensors of a file share memory: it is read at once, which is faster."""
CHUNK = 1 << 22
"""How many bytes are hashed and written at once."""

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
_RANKS = {dtype: (-dtype.itemsize, code) for dtype, code in _CODES.items()}
_DTYPES = {code.encode(): dtype for dtype, code in _CODES.items()}

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

_SHAPE = rb"\[((?:[0-9]{1,18}(?:,[0-9]{1,18}){0,%d})?)\]" % (MAX_RANK - 1)
_ONE = re.compile(
    rb'"([^"\\]*(?:\\.[^"\\]*)*)":\{"dtype":"([A-Z0-9_]{2,8})","shape":'
    + _SHAPE
    + rb',"data_offsets":\[([0-9]{1,18}),([0-9]{1,18})\]\}'
)


class Place(NamedTuple):
    """Where a tensor is in the data of a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def describe(tensors: Mapping[str, Tensor]) -> tuple[bytes, list[Tensor], dict[str, str]]:
    """The header of a safetensors file, the tensors in its order, and the true dtypes of those that are stored as another dtype.

    Args:
        tensors: strided tensors on any device, which may share memory.

    Raises:
        StorageError: a value is not a tensor, or is sparse, quantised, nested or meta.

    >>> header, ordered, dtypes = describe({"z": torch.tensor([1 + 2j])})
    >>> header[8:].strip(), dtypes
    (b'{"z":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]}}', {'z': 'complex64'})
    """
    kinds = {name: stored_as(tensor, name) for name, tensor in tensors.items()}
    dtypes = {name: true for name, (stored, true) in kinds.items() if true in _STAND_INS or true in _COMPLEX}
    # The largest elements come first, so that each tensor starts at a multiple of its element size; then like to like.
    order = sorted(tensors, key=lambda name: _RANKS[kinds[name][0]])
    parts, end = [], 0
    for name in order:
        stored, true = kinds[name]
        shape = [*tensors[name].shape, 2] if true in _COMPLEX else [*tensors[name].shape]
        if len(shape) > MAX_RANK:
            raise StorageError(f"{name!r} has {len(shape)} axes, and {MAX_RANK} can be stored")
        begin, end = end, end + stored.itemsize * math.prod(shape)
        numbers = ",".join(map(str, shape))
        parts.append(f'{in_quotes(name)}:{{"dtype":"{_CODES[stored]}","shape":[{numbers}],"data_offsets":[{begin},{end}]}}')
    text = f"{{{','.join(parts)}}}".encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER:
        raise StorageError(f"{len(tensors)} tensors need a header of {len(text)} bytes; safetensors reads {MAX_HEADER} at most")
    return len(text).to_bytes(8, "little") + text, [tensors[name] for name in order], dtypes


def chunks(header: bytes, tensors: Sequence[Tensor]) -> Iterator[bytes | memoryview]:
    """The bytes of the file that `describe` described, piece by piece; small tensors come together, big ones are not copied."""
    yield header
    waiting: list[Tensor] = []
    size = 0
    for tensor in tensors:
        stored = as_stored(tensor)
        if waiting and (size + stored.nbytes > CHUNK or stored.dtype != waiting[0].dtype):
            yield from _pieces(waiting)
            waiting, size = [], 0
        waiting.append(stored.reshape(-1))
        size += stored.nbytes
    yield from _pieces(waiting)


def _pieces(tensors: list[Tensor]) -> Iterator[memoryview]:
    tensors = [tensor for tensor in tensors if tensor.numel()]
    if tensors:
        whole = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
        memory = as_memory(whole)
        for start in range(0, len(memory), CHUNK):
            yield memory[start : start + CHUNK]
        del memory, whole


def as_memory(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU, which must live as long as this is used."""
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, as uint8 along one axis."""
    # A single element is contiguous with any stride, but can be viewed as bytes with stride 1 only.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def stored_as(tensor: Tensor, name: str) -> tuple[torch.dtype, str]:
    """The dtype in which a tensor is stored, and the name of its own; raises `StorageError` if it cannot be stored."""
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
    return (dtype if dtype in _CODES else _STAND_INS.get(name, _COMPLEX.get(name))), name


def as_stored(tensor: Tensor) -> Tensor:
    """The tensor detached, on the CPU, contiguous, without lazy conjugation or negation, in a dtype of safetensors."""
    stored, dtype = _stored_dtype(tensor.dtype)
    if type(tensor) is Tensor and stored is tensor.dtype and tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg():
        return tensor.detach() if tensor.requires_grad else tensor
    try:
        tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        if dtype in _COMPLEX:
            return torch.view_as_real(tensor)
        return tensor.view(_STAND_INS[dtype]) if dtype in _STAND_INS else tensor
    except (RuntimeError, TypeError) as error:
        raise StorageError(f"a tensor of type {type(tensor).__name__} cannot be read: {error}") from error


def places(header: bytes, data: int, where: str) -> dict[str, Place]:
    """Where each tensor is, in the order of the file.

    Args:
        header: untrusted, without its length.
        data: how many bytes follow it.
        where: the name of the file, for errors.

    Raises:
        CorruptRecordingError: it is not the header of such a file.
    """
    # Thousands of files have the same few headers.
    found, whole = (_equal_places if len(header) < SMALL else _places)(header, data)
    if not whole:
        raise CorruptRecordingError(f"{where}: no readable safetensors file: the header is malformed after {len(found)} tensors")
    return found


def _places(header: bytes, data: int) -> tuple[dict[str, Place], bool]:
    """The tensors of a header up to where it is malformed, and whether it is not."""
    found: dict[str, Place] = {}
    at, last = 1, 0
    text = header.rstrip(b" ")
    if text == b"{}" and data == 0:
        return found, True
    while text[:1] == b"{" and (one := _ONE.match(text, at)):
        code, numbers, begin, end = one.groups()[1:]
        dtype, shape, first = _DTYPES.get(code), tuple(map(int, numbers.split(b","))) if numbers else (), last
        if dtype is None or int(begin) != first or int(end) != first + dtype.itemsize * math.prod(shape):
            break
        last, at = int(end), one.end() + 1
        try:
            name = json.loads(b'"%s"' % one[1]) if b"\\" in one[1] else one[1].decode()
            found[name] = Place(dtype, shape, first, last)
        except ValueError:
            break
        if at == len(text) and text.endswith(b"}") and last == data:
            return found, True
        if text[at - 1 : at] != b",":
            break
    return found, False


_equal_places = functools.lru_cache(maxsize=256)(_places)


def read_tensors(file: BinaryIO, size: int, dtypes: Mapping[str, str], where: str, most: int) -> tuple[dict[str, Tensor], str]:
    """The tensors of an untrusted file, in memory of their own, and the SHA-256 of all its bytes.

    Args:
        file: unbuffered, at its start.
        size: its bytes.
        dtypes: the true dtypes, which `describe` returned.
        where: the name of the file, for errors.
        most: the most bytes that the header may have.

    Raises:
        CorruptRecordingError: it is no such file, or does not fit `dtypes`.
    """
    digest = hashlib.sha256()
    header = read_header(file, size, where, most)
    digest.update(len(header).to_bytes(8, "little") + header)
    found: dict[str, Tensor] = {}
    data = size - 8 - len(header)
    small = bytearray(data if data <= SMALL else 0)
    fill(file, memoryview(small), digest, where)
    for name, place in places(header, data, where).items():
        if place.end == place.begin:
            tensor = torch.empty(place.shape, dtype=place.dtype)
        elif small and not place.begin % place.dtype.itemsize:
            count = (place.end - place.begin) // place.dtype.itemsize
            tensor = torch.frombuffer(small, dtype=place.dtype, count=count, offset=place.begin).view(place.shape)
        else:
            tensor = torch.empty(place.shape, dtype=place.dtype)
            if small:
                as_memory(tensor)[:] = small[place.begin : place.end]
            else:
                fill(file, as_memory(tensor), digest, where)
        found[name] = true_dtype(tensor, dtypes.get(name), where) if name in dtypes else tensor
    return found, digest.hexdigest()


def read_header(file: BinaryIO, size: int, where: str, most: int = MAX_HEADER) -> bytes:
    """The header of a file, without its length."""
    length = file.read(8)
    count = int.from_bytes(length, "little")
    if len(length) < 8 or count > min(size - 8, most):
        raise CorruptRecordingError(f"{where}: no readable safetensors file: it has {size} bytes, with a header of {count}")
    return file.read(count)


def true_dtype(tensor: Tensor, dtype: str | None, where: str) -> Tensor:
    """The tensor in its true dtype, of which `None` says that it is the one it is stored in."""
    if dtype is None:
        return tensor
    stored = _COMPLEX.get(dtype) or _STAND_INS.get(dtype)
    if stored != tensor.dtype or (dtype in _COMPLEX and tensor.shape[-1:] != (2,)):
        raise CorruptRecordingError(f"{where}: a tensor of {tensor.dtype} and shape {list(tensor.shape)} is no {dtype:.50}")
    if dtype in _COMPLEX:
        # PyTorch reads complex numbers as aligned pairs, and crashes if they are not.
        return torch.view_as_complex(tensor.clone() if tensor.data_ptr() % 16 else tensor)
    return tensor.view(getattr(torch, dtype))


def fill(file: BinaryIO, memory: memoryview, digest: hashlib._Hash, where: str) -> None:
    """Reads as many bytes from a file as fit into `memory`."""
    while memory:
        count = file.readinto(memory[:CHUNK])  # type: ignore[attr-defined]
        if not count:
            raise CorruptRecordingError(f"{where} ends too early")
        digest.update(memory[:count])
        memory = memory[count:]
