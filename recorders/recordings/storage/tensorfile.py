"""Tensors as the bytes of a safetensors file, and back, bit for bit in every dtype.

`safetensors.torch.save` is not used because it needs NumPy, corrupts conjugate views, refuses shared and strided memory, and takes
twice the memory of the tensors. A file is written and read tensor by tensor. Only headers in the form that `describe` writes are
read, so nothing that a forged header says takes more memory than its file has bytes.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from json.encoder import encode_basestring_ascii as in_quotes
from operator import attrgetter
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor

from recorders.errors import CorruptRecordingError, StorageError
from recorders.recordings.storage.stored import CODES, COMPLEX, STAND_INS, as_memory, as_stored, stored_as, true_dtype

__all__ = ["TensorPlace", "chunks", "describe", "fill", "places", "read_header", "read_tensors"]

MAX_HEADER = 100_000_000
"""Every safetensors reader refuses longer headers."""
MAX_RANK = 64
"""PyTorch prints and merges tensors of more axes no longer."""
SMALL = 1 << 16
"""The bytes up to which the tensors of a file share memory: it is read at once, which is faster."""
CHUNK = 1 << 22
"""How many bytes are hashed and written at once."""

_RANKS = {dtype: (-dtype.itemsize, code) for dtype, code in CODES.items()}
_DTYPES = {code.encode(): dtype for dtype, code in CODES.items()}

_SHAPE = rb"\[((?:[0-9]{1,18}(?:,[0-9]{1,18}){0,%d})?)\]" % (MAX_RANK - 1)
_ONE = re.compile(
    rb'"([^"\\]*(?:\\.[^"\\]*)*)":\{"dtype":"([A-Z0-9_]{2,8})","shape":'
    + _SHAPE
    + rb',"data_offsets":\[([0-9]{1,18}),([0-9]{1,18})\]\}'
)


class TensorPlace(NamedTuple):
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
    dtypes = {name: true for name, (stored, true) in kinds.items() if true in STAND_INS or true in COMPLEX}
    alike: dict[tuple[torch.dtype, str, torch.Size], list[str]] = {}
    for name, kind in kinds.items():
        alike.setdefault((*kind, tensors[name].shape), []).append(name)
    order, parts, end = [], [], 0
    # The largest elements come first, so that each tensor starts at a multiple of its element size; then like to like.
    for (stored, true, sizes), names in sorted(alike.items(), key=lambda item: _RANKS[item[0][0]]):
        shape = [*sizes, 2] if true in COMPLEX else [*sizes]
        if len(shape) > MAX_RANK:
            raise StorageError(f"{names[0]!r} has {len(shape)} axes, and {MAX_RANK} can be stored")
        nbytes = stored.itemsize * math.prod(shape)
        layout = f'"dtype":"{CODES[stored]}","shape":[{",".join(map(str, shape))}]'
        for name in names:
            begin, end = end, end + nbytes
            parts.append(f'{in_quotes(name)}:{{{layout},"data_offsets":[{begin},{end}]}}')
        order += names
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
    for stored in _flat(tensors):
        if waiting and (size + stored.nbytes > CHUNK or stored.dtype != waiting[0].dtype):
            yield from _pieces(waiting)
            waiting, size = [], 0
        waiting.append(stored)
        size += stored.nbytes
    yield from _pieces(waiting)


def _flat(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """The tensors as they are stored, along one axis; plain ones of one layout that follow each other are joined."""
    layout = attrgetter("__class__", "dtype", "shape", "device")
    for (kind, dtype, _, _), group in itertools.groupby(tensors, layout):
        alike = list(group)
        count = max(1, CHUNK // max(1, alike[0].nbytes)) if kind is Tensor and dtype in CODES else 1
        for start in range(0, len(alike), count):
            some = alike[start : start + count]
            try:
                whole = some[0] if len(some) == 1 else torch.stack(some)
            except RuntimeError as error:  # the memory of one was freed meanwhile
                raise StorageError(f"tensors of shape {list(some[0].shape)} cannot be read: {error}") from error
            yield as_stored(whole).reshape(-1)


def _pieces(tensors: list[Tensor]) -> Iterator[memoryview]:
    tensors = [tensor for tensor in tensors if tensor.numel()]
    if tensors:
        whole = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
        memory = as_memory(whole)
        for start in range(0, len(memory), CHUNK):
            yield memory[start : start + CHUNK]
        del memory, whole


def places(header: bytes, data: int, where: str) -> dict[str, TensorPlace]:
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


def _places(header: bytes, data: int) -> tuple[dict[str, TensorPlace], bool]:
    """The tensors of a header up to where it is malformed, and whether it is not."""
    found: dict[str, TensorPlace] = {}
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
            found[name] = TensorPlace(dtype, shape, first, last)
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
            tensor = torch.empty(place.shape, dtype=place.dtype, device="cpu")
        elif small and not place.begin % place.dtype.itemsize:
            count = (place.end - place.begin) // place.dtype.itemsize
            tensor = torch.frombuffer(small, dtype=place.dtype, count=count, offset=place.begin).view(place.shape)
        else:
            tensor = torch.empty(place.shape, dtype=place.dtype, device="cpu")
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


def fill(file: BinaryIO, memory: memoryview, digest: hashlib._Hash, where: str) -> None:
    """Reads as many bytes from a file as fit into `memory`."""
    while memory:
        count = file.readinto(memory[:CHUNK])  # type: ignore[attr-defined]
        if not count:
            raise CorruptRecordingError(f"{where} ends too early")
        digest.update(memory[:count])
        memory = memory[count:]
