"""Tensors as the bytes of a safetensors file, and back, bit for bit in every dtype.

`safetensors.torch.save` is not used because it needs NumPy, corrupts conjugate views, refuses shared and strided memory, and takes
twice the memory of the tensors. A file is written tensor by tensor. Only headers in the form that `describe` writes are read, so
nothing that a forged header says takes more memory than its file has bytes.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import json
import math
import mmap
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from json.encoder import encode_basestring_ascii as in_quotes
from operator import attrgetter
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor

from recorders._torch import is_fake
from recorders.errors import CorruptRecordingError, StorageError
from recorders.recordings.atomic_files import open_regular

CODES = {
    # The dtypes that every safetensors from 0.5 on can read.
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    # Others are stored as integers with the same bits.
    "uint16": "I16",
    "uint32": "I32",
    "uint64": "I64",
    "float8_e4m3fnuz": "U8",
    "float8_e5m2fnuz": "U8",
    "float8_e8m0fnu": "U8",
    # Complex numbers are stored as pairs of reals along a last axis.
    "complex32": "F16",
    "complex64": "F32",
    "complex128": "F64",
}
"""The code of safetensors in which each dtype is stored; of those that share one, it is that of the first."""
PAIRS = ("complex32", "complex64", "complex128")

_DTYPES: dict[bytes, torch.dtype] = {}
for _name, _code in CODES.items():
    if _code.encode() not in _DTYPES:
        _DTYPES[_code.encode()] = getattr(torch, _name)
_CODE_OF = {dtype: code.decode() for code, dtype in _DTYPES.items()}
_RANKS = {dtype: (-dtype.itemsize, code) for dtype, code in _CODE_OF.items()}

MAX_HEADER = 100_000_000
"""Every safetensors reader refuses longer headers."""
MAX_RANK = 64
"""PyTorch prints and merges tensors of more axes no longer."""
SMALL = 1 << 16
"""The bytes of a header up to which what was found in it is kept: thousands of files have the same few headers."""
CHUNK = 1 << 22
"""How many bytes are hashed and written at once."""

_SHAPE = rb"\[((?:[0-9]{1,18}(?:,[0-9]{1,18}){0,%d})?)\]" % (MAX_RANK - 1)
_ONE = re.compile(
    rb'"([^"\\]*(?:\\.[^"\\]*)*)":\{"dtype":"([A-Z0-9_]{2,8})","shape":'
    + _SHAPE
    + rb',"data_offsets":\[([0-9]{1,18}),([0-9]{1,18})\]\}'
)
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
        if not (count := tensor.numel()):
            return ""
        storage = tensor.untyped_storage()
        there, start = storage.nbytes(), storage.data_ptr()
        if not tensor.is_contiguous():
            count = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        needed = (tensor.storage_offset() + count) * tensor.itemsize
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
    if (
        type(tensor) is Tensor
        and tensor.is_cpu
        and not tensor.is_nested
        and tensor.layout == torch.strided
        and not why_no_memory(tensor)
    ):
        stored, dtype = _stored_dtype(tensor.dtype)
        if stored is not None:
            return stored, dtype
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
    return _DTYPES[CODES[name].encode()] if name in CODES else None, name


def _as_stored(tensor: Tensor) -> Tensor:
    """The tensor detached, on the CPU, contiguous, without lazy conjugation or negation, in a dtype of safetensors."""
    stored, dtype = _stored_dtype(tensor.dtype)
    if type(tensor) is Tensor and stored is tensor.dtype and tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg():
        return tensor.detach() if tensor.requires_grad else tensor
    try:
        tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        if dtype in PAIRS:
            return torch.view_as_real(tensor)
        return tensor if stored is tensor.dtype or stored is None else tensor.view(stored)
    except (RuntimeError, TypeError) as error:
        raise StorageError(f"a tensor of type {type(tensor).__name__} cannot be read: {error}") from error


def _true_dtype(tensor: Tensor, dtype: str | None, where: str) -> Tensor:
    """The tensor in its true dtype, of which `None` says that it is the one it is stored in."""
    if dtype is None:
        return tensor
    stored = _DTYPES.get(CODES.get(dtype, "").encode())
    native = dtype not in PAIRS and getattr(torch, dtype, None) == stored
    if stored != tensor.dtype or native or (dtype in PAIRS and tensor.shape[-1:] != (2,)):
        raise CorruptRecordingError(f"{where}: a tensor of {tensor.dtype} and shape {list(tensor.shape)} is no {dtype:.50}")
    if dtype in PAIRS:
        # PyTorch reads complex numbers as aligned pairs, and crashes if they are not; nor does it view those at odd offsets.
        aligned = address(tensor) % 16 == 0 and tensor.storage_offset() % 2 == 0
        return torch.view_as_complex(tensor if aligned else tensor.clone())
    return tensor.view(getattr(torch, dtype))


def describe(
    tensors: Mapping[str, Tensor], kinds: Mapping[str, tuple[torch.dtype, str]] | None = None
) -> tuple[bytes, list[Tensor], dict[str, str]]:
    """The header of a safetensors file, the tensors in its order, and the true dtypes of those that are stored as another dtype.

    Args:
        tensors: strided tensors on any device, which may share memory.
        kinds: what `stored_as` returned for each, if it was asked.

    Raises:
        StorageError: a value is not a tensor, or is sparse, quantised, nested or meta.

    >>> header, ordered, dtypes = describe({"z": torch.tensor([1 + 2j])})
    >>> header[8:].strip(), dtypes
    (b'{"z":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]}}', {'z': 'complex64'})
    """
    if kinds is None:
        kinds = {name: stored_as(tensor, name) for name, tensor in tensors.items()}
    alike: dict[tuple[torch.dtype, str, torch.Size], list[str]] = {}
    for name, kind in kinds.items():
        alike.setdefault((*kind, tensors[name].shape), []).append(name)
    order, parts, dtypes, end = [], [], dict[str, str](), 0
    # The largest elements come first, so that each tensor starts at a multiple of its element size; then like to like.
    for (stored, true, sizes), names in sorted(alike.items(), key=lambda item: _RANKS[item[0][0]]):
        shape = [*sizes, 2] if true in PAIRS else [*sizes]
        if len(shape) > MAX_RANK:
            raise StorageError(f"{names[0]!r} has {len(shape)} axes, and {MAX_RANK} can be stored")
        if getattr(torch, true) != stored:
            dtypes.update(dict.fromkeys(names, true))
        nbytes = stored.itemsize * math.prod(shape)
        facts = f'"dtype":"{_CODE_OF[stored]}","shape":[{",".join(map(str, shape))}]'
        for name in names:
            begin, end = end, end + nbytes
            parts.append(f'{in_quotes(name)}:{{{facts},"data_offsets":[{begin},{end}]}}')
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
    """The tensors as they are stored, along one axis; plain ones that are alike and follow each other are joined."""
    for (kind, dtype, _, _), group in itertools.groupby(tensors, attrgetter("__class__", "dtype", "shape", "device")):
        alike = list(group)
        count = max(1, CHUNK // max(1, alike[0].nbytes)) if kind is Tensor and dtype in _CODE_OF else 1
        for start in range(0, len(alike), count):
            some = alike[start : start + count]
            try:
                whole = some[0] if len(some) == 1 else torch.stack(some)
            except RuntimeError as error:  # the memory of one was freed meanwhile
                raise StorageError(f"tensors of shape {list(some[0].shape)} cannot be read: {error}") from error
            yield _as_stored(whole).reshape(-1)


def _pieces(tensors: list[Tensor]) -> Iterator[memoryview]:
    tensors = [tensor for tensor in tensors if tensor.numel()]
    if tensors:
        whole = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
        memory = as_memory(whole)
        for start in range(0, len(memory), CHUNK):
            yield memory[start : start + CHUNK]
        del memory, whole


class _Place(NamedTuple):
    """Where a tensor is in the data of a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def _places(header: bytes, data: int, where: str) -> dict[str, _Place]:
    """Where each tensor is, in the order of the file, which has `data` bytes after its header."""
    found, whole = (_equal_headers if len(header) < SMALL else _parsed)(header, data)
    if not whole:
        raise CorruptRecordingError(f"{where}: no readable safetensors file: the header is malformed after {len(found)} tensors")
    return found


def _parsed(header: bytes, data: int) -> tuple[dict[str, _Place], bool]:
    """The tensors of a header up to where it is malformed, and whether it is not."""
    found: dict[str, _Place] = {}
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
            found[name] = _Place(dtype, shape, first, last)
        except ValueError:
            break
        if at == len(text) and text.endswith(b"}") and last == data:
            return found, True
        if text[at - 1 : at] != b",":
            break
    return found, False


_equal_headers = functools.lru_cache(maxsize=256)(_parsed)


def _tensor(memory: bytearray | mmap.mmap, place: _Place, start: int = 0) -> Tensor:
    """The tensor at a place of some memory, whose data begin at `start`."""
    begin = start + place.begin
    if place.begin == place.end:
        return torch.empty(place.shape, dtype=place.dtype, device="cpu")
    if begin % place.dtype.itemsize:  # a forged file may put tensors at odd addresses
        memory, begin = bytearray(memory[begin : start + place.end]), 0
    return torch.frombuffer(memory, dtype=place.dtype, count=math.prod(place.shape), offset=begin).view(place.shape)


def read_tensors(file: BinaryIO, size: int, dtypes: Mapping[str, str], where: str, most: int) -> tuple[dict[str, Tensor], str]:
    """The tensors of an untrusted file, which share memory, and the SHA-256 of all its bytes.

    Args:
        file: unbuffered, at its start.
        size: its bytes.
        dtypes: the true dtypes, which `describe` returned.
        where: the name of the file, for errors.
        most: the most bytes that the header may have.

    Raises:
        CorruptRecordingError: it is no such file, or does not fit `dtypes`.
    """
    header, digest = _read_header(file, size, where, most)
    data = bytearray(size - 8 - len(header))
    _fill(file, memoryview(data), digest, where)
    found = {name: _tensor(data, place) for name, place in _places(header, len(data), where).items()}
    for name in dtypes.keys() & found.keys():
        found[name] = _true_dtype(found[name], dtypes[name], where)
    return found, digest.hexdigest()


def shared_tensors(
    where: str, size: int, sha256: str, most: int, *, mapped: bool, kept: bool
) -> Callable[[str, str | None], Tensor]:
    """What returns the tensors of an untrusted file, by their name and true dtype.

    Args:
        size, sha256: what was saved.
        most: the most bytes that the header may have.
        mapped: map the file into memory rather than read it. The checksum is still checked, once.
        kept: if False, no tensor is kept: each is read from the file when it is asked for.

    Raises:
        CorruptRecordingError: the file is not what was saved; also later, if there is no tensor of a name.
    """
    with open_regular(where, size) as (file, there):
        if there != size:
            raise CorruptRecordingError(f"{where} is damaged: {there} bytes are there and {size} were saved")
        header, digest = _read_header(file, size, where, most)
        start = 8 + len(header)
        memory: bytearray | mmap.mmap | None = None
        if mapped:
            memory = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
            with memoryview(memory) as view:
                for at in range(start, size, CHUNK):
                    digest.update(view[at : at + CHUNK])
        elif kept:
            memory = bytearray(size)
            _fill(file, memoryview(memory)[start:], digest, where)
        else:
            piece = memoryview(bytearray(min(size - start, CHUNK)))
            for at in range(start, size, CHUNK):
                _fill(file, piece[: size - at], digest, where)
    if digest.hexdigest() != sha256:
        raise CorruptRecordingError(f"{where} is damaged: its checksum differs from what was saved")
    places = _places(header, size - start, where)

    def tensor(name: str, dtype: str | None) -> Tensor:
        if (place := places.get(name)) is None:
            raise CorruptRecordingError(f"{where} holds no tensor {name!r:.200}")
        if memory is not None:
            return _true_dtype(_tensor(memory, place, start), dtype, where)
        one = bytearray(place.end - place.begin)
        with open_regular(where, size) as (file, _):
            file.seek(start + place.begin)
            _fill(file, memoryview(one), None, where)
        return _true_dtype(_tensor(one, place._replace(begin=0, end=len(one))), dtype, where)

    return tensor


def _read_header(file: BinaryIO, size: int, where: str, most: int) -> tuple[bytes, hashlib._Hash]:
    """The header of a file without its length, and the digest of both."""
    length = file.read(8)
    count = int.from_bytes(length, "little")
    if len(length) < 8 or count > min(size - 8, most, MAX_HEADER):
        raise CorruptRecordingError(f"{where}: no readable safetensors file: it has {size} bytes, with a header of {count}")
    header = file.read(count)
    return header, hashlib.sha256(length + header)


def _fill(file: BinaryIO, memory: memoryview, digest: hashlib._Hash | None, where: str) -> None:
    """Reads as many bytes from a file as fit into `memory`."""
    while memory:
        count = file.readinto(memory[:CHUNK])  # type: ignore[attr-defined]
        if not count:
            raise CorruptRecordingError(f"{where} ends too early")
        if digest is not None:
            digest.update(memory[:count])
        memory = memory[count:]
