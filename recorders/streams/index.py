"""The index of a stream: one line of JSON for each committed shard. A shard exists once its line is complete.

Lines are appended and flushed to the disk, and are never changed. So a reader may read while a stream is written. A line without a
newline at the end was cut short by a crash, or is being written: it does not count, and the next writer removes it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from recorders.errors import CorruptRecordingError, NotARecordingError, RecordingNotFoundError, SchemaError
from recorders.recordings.storage.schema import facts_of_line, sealed_line

__all__ = ["BLOCK", "INDEX", "OURS", "PAYLOAD", "Kind", "Part", "Shard", "append", "as_line", "first_line", "read_index"]

INDEX = "index.jsonl"
OURS = re.compile(r"\d{8}-\d{4}-[\w.-]{0,60}\.safetensors", re.ASCII)
"""The names of the files of shards: the number of the shard, of the place in it, and a name to recognise it by."""

PAYLOAD = 4096
"""Where the tensors begin in each file; before that is the header of safetensors, filled up with spaces."""

BLOCK = 1 << 20
"""Each block of so many bytes of the tensors has a checksum."""

_FORMAT, _VERSION = "torch-recorders stream", 1


@dataclass(frozen=True)
class Kind:
    """What stays the same for all rows of a place.

    Attributes:
        dtype: the dtype of the rows, without "torch."; files may hold the same bits as another dtype.
        shape: the shape of one row.
        columns: how many numbers identify a row.
    """

    dtype: str
    shape: tuple[int, ...]
    columns: int

    @property
    def row_bytes(self) -> int:
        """The bytes of one row."""
        elements = 1
        for size in self.shape:
            elements *= size
        return elements * _itemsize(self.dtype)

    def __str__(self) -> str:
        return f"rows of shape {self.shape} in {self.dtype} with {self.columns} id column{'s' * (self.columns != 1)}"


@dataclass(frozen=True)
class Part:
    """The rows of one place in one shard: one safetensors file with the tensors `rows` and `ids`.

    Attributes:
        header: the CRC-32 of the header.
        blocks: the CRC-32 of each block of the tensors.
        ids_crc: the CRC-32 of the ids: parts of a shard with equal ids need not be aligned.
    """

    file: str
    kind: Kind
    rows: int
    header: int
    blocks: tuple[int, ...]
    ids_crc: int

    @property
    def ids_start(self) -> int:
        """Where the ids begin, counted from the first byte of the tensors: after the rows, at a multiple of 8."""
        return -(-self.rows * self.kind.row_bytes // 8) * 8

    @property
    def size(self) -> int:
        """The bytes of the tensors."""
        return self.ids_start + 8 * self.kind.columns * self.rows


@dataclass(frozen=True)
class Shard:
    """The rows between two commits.

    Attributes:
        parts: by place.
        batches: how many batches were complete at its end, since the stream began; those that were dropped count.
        dropped: how many rows had been dropped by then.
        next_ids: by place, the id of the next sample that comes without one.
    """

    number: int
    parts: Mapping[str, Part]
    batches: int
    dropped: int
    next_ids: Mapping[str, int] = field(default_factory=dict)


def first_line() -> bytes:
    """The line that every index begins with."""
    return (_dump({"format": _FORMAT, "version": _VERSION, "payload": PAYLOAD, "block": BLOCK}) + "\n").encode()


def as_line(shard: Shard) -> bytes:
    """The line of a shard, with its checksum."""
    return (sealed_line(_dump(asdict(shard))[1:]) + "\n").encode()


def read_index(folder: Path, start: int = 0, shards: int = 0) -> tuple[list[Shard], int]:
    """The shards whose lines begin at the byte `start` or after it, and the byte at which the next line will begin.

    Args:
        start: 0, or what an earlier call returned.
        shards: the number of shards that were read before.

    Raises:
        RecordingNotFoundError, NotARecordingError: there is no stream at `folder`.
        SchemaError: a newer version wrote it.
        CorruptRecordingError: a line is damaged; the message names it.
    """
    path = folder / INDEX
    try:
        with open(path, "rb") as file:
            file.seek(start)
            data = file.read()
    except (FileNotFoundError, NotADirectoryError) as error:
        if folder.exists():
            raise NotARecordingError(f"{folder} holds no stream: there is no {INDEX} in it") from error
        raise RecordingNotFoundError(f"there is no stream at {folder}") from error
    found: list[Shard] = []
    lines = data[: data.rfind(b"\n") + 1].splitlines(keepends=True)
    if start == 0:
        _check_first(path, lines.pop(0) if lines else data)
    for line in lines:
        number = shards + len(found)
        try:
            found.append(_parse(line[:-1], number))
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise CorruptRecordingError(
                f"{path}: the line of shard {number} is damaged: {type(error).__name__}: {error}"
            ) from error
    rest = data[data.rfind(b"\n") + 1 :]
    with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError, RecursionError):
        _parse(rest[:-1], shards + len(found))
        raise CorruptRecordingError(f"{path}: the end of the last line is damaged")
    return found, start + len(data) - len(rest)


def _check_first(path: Path, line: bytes) -> None:
    try:
        first = json.loads(line)
        known = first["format"] == _FORMAT
        version = first["version"]
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise CorruptRecordingError(f"{path}: the first line is not that of a stream: {line[:80]!r}") from error
    if not known:
        raise NotARecordingError(f"{path} is no index of a stream, but of {first['format']!r:.80}")
    if version != _VERSION:
        raise SchemaError(f"{path} has version {version!r:.20}; this version of recorders knows {_VERSION}")
    if line != first_line():
        raise CorruptRecordingError(f"{path}: the first line is damaged: {line[:200]!r}")


def _parse(line: bytes, number: int) -> Shard:
    found = facts_of_line(line)
    if found["number"] != number:
        raise ValueError(f"it is that of shard {found['number']!r:.20}")
    parts = {place: _part(values) for place, values in found["parts"].items()}
    return Shard(
        number, parts, _count(found["batches"]), _count(found["dropped"]), {k: _count(v) for k, v in found["next_ids"].items()}
    )


def _part(values: dict[str, Any]) -> Part:
    kind = values["kind"]
    file, dtype, shape = values["file"], kind["dtype"], tuple(map(_count, kind["shape"]))
    if not OURS.fullmatch(file):
        raise ValueError(f"{file!r:.80} is no name of a file of a stream")
    _itemsize(dtype)
    if len(shape) > 64:
        raise ValueError(f"rows of {len(shape)} axes")
    part = Part(
        file,
        Kind(dtype, shape, _count(kind["columns"])),
        _count(values["rows"]),
        _count(values["header"]),
        tuple(map(_count, values["blocks"])),
        _count(values["ids_crc"]),
    )
    if len(part.blocks) != -(-part.size // BLOCK):
        raise ValueError(f"{len(part.blocks)} checksums for {part.size} bytes")
    return part


def _itemsize(dtype: str) -> int:
    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"no dtype {dtype!r:.40}")
    return found.itemsize


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"{value!r:.40} is no count")
    return value


def _dump(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def append(path: Path, line: bytes) -> None:
    """Appends one line, and flushes it to the disk."""
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | getattr(os, "O_BINARY", 0))
    try:
        if os.write(handle, line) != len(line):
            raise OSError(f"only a part of a line of {path} could be written")
        os.fsync(handle)
    finally:
        os.close(handle)
