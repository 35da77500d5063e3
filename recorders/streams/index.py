"""The index of a stream: one line of JSON for each committed shard. A shard exists once its line is complete.

Lines are appended and flushed to the disk, and are never changed. So a reader may read while a stream is written. A line without a
newline at the end was cut short by a crash, or is being written: it does not count, and the next writer removes it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from recorders.errors import CorruptRecordingError, NotARecordingError, RecordingNotFoundError, SchemaError, StorageError
from recorders.recordings.storage.schema import MAX_LINE, facts_of_line, sealed_line
from recorders.recordings.storage.tensors import CODES, MAX_RANK

INDEX = "index.jsonl"
OURS = re.compile(r"\d{8}-\d{4}-[\w.-]{0,60}\.safetensors", re.ASCII)
"""The names of the files of shards: the number of the shard, of the place in it, and a name to recognise it by."""

VERSION = 2
"""In version 1 blocks had 1 MiB, so a shuffled reader of short runs read twice as much as it was asked for."""

PAYLOAD = 4096
"""Where the tensors begin in each file; before that is the header of safetensors, filled up with spaces."""

BLOCK = 1 << 17
"""Each block of so many bytes of the tensors has a checksum."""


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
        dtype: torch.dtype = getattr(torch, self.dtype)
        return math.prod(self.shape) * dtype.itemsize

    def __str__(self) -> str:
        return f"rows of shape {self.shape} in {self.dtype} with {self.columns} id column{'s' * (self.columns != 1)}"


@dataclass(frozen=True)
class Part:
    """The rows of one place in one shard: one safetensors file with the tensors `rows` and `ids`.

    Attributes:
        blocks: the CRC-32 of each block of the tensors.
        ids_crc: the CRC-32 of the ids: parts of a shard with equal ids need not be aligned.
    """

    file: str
    kind: Kind
    rows: int
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


FIRST = (json.dumps({"format": "torch-recorders stream", "version": VERSION, "payload": PAYLOAD, "block": BLOCK}) + "\n").encode()
"""The line that every index begins with."""


def as_line(shard: Shard) -> bytes:
    """The line of a shard, with its checksum; raises `StorageError` if it could not be read back."""
    line = f"{sealed_line(json.dumps(asdict(shard), separators=(',', ':'))[1:])}\n".encode()
    if len(line) > MAX_LINE:
        raise StorageError(f"a line of {len(line)} bytes cannot be read back: record fewer places, or choose smaller shard_bytes")
    return line


def read_index(folder: Path, start: int = 0, shards: int = 0, name: str = "") -> tuple[list[Shard], int]:
    """The shards whose lines begin at the byte `start` or after it, and the byte at which the next line will begin.

    Args:
        start: 0, or what an earlier call returned.
        shards: the number of shards that were read before.
        name: what messages call the folder, if not by its path.

    Raises:
        RecordingNotFoundError, NotARecordingError: there is no stream at `folder`.
        SchemaError: a newer version wrote it.
        CorruptRecordingError: a line is damaged; the message names it.
    """
    name = name or str(folder)
    try:
        with open(folder / INDEX, "rb") as file:
            file.seek(start)
            data = file.read()
    except (FileNotFoundError, NotADirectoryError) as error:
        if folder.exists():
            raise NotARecordingError(f"{name} holds no stream: there is no {INDEX} in it") from error
        raise RecordingNotFoundError(f"there is no stream at {name}") from error
    found: list[Shard] = []
    *lines, rest = data.split(b"\n")
    if start == 0:
        _check_first(f"{name}/{INDEX}", lines.pop(0) + b"\n" if lines else data)
    for line in lines:
        number = shards + len(found)
        try:
            found.append(_parse(line, number))
        except _UNREADABLE as error:
            raise CorruptRecordingError(
                f"{name}/{INDEX}: the line of shard {number} is damaged: {type(error).__name__}: {error}"
            ) from error
    with contextlib.suppress(*_UNREADABLE):
        _parse(rest[:-1], shards + len(found))
        raise CorruptRecordingError(f"{name}/{INDEX}: the end of the last line is damaged")
    return found, start + len(data) - len(rest)


_UNREADABLE = (KeyError, TypeError, ValueError, AttributeError, RecursionError)
"""What a line raises that is damaged or forged."""


def _check_first(name: str, line: bytes) -> None:
    if line == FIRST:
        return
    found = re.match(rb'\{"format": "torch-recorders stream", "version": (\d{1,9}), ', line)
    if found and int(found[1]) != VERSION:
        raise SchemaError(f"{name} has version {int(found[1])}; this version of recorders knows {VERSION}")
    raise CorruptRecordingError(f"{name}: the first line is not that of a stream: {line[:80]!r}")


def _parse(line: bytes, number: int) -> Shard:
    found = facts_of_line(line)
    if found["number"] != number:
        raise ValueError(f"it is that of shard {found['number']!r:.20}")
    parts = {place: _part(values) for place, values in found["parts"].items()}
    next_ids = {place: _count(value) for place, value in found["next_ids"].items()}
    return Shard(number, parts, _count(found["batches"]), _count(found["dropped"]), next_ids)


def _part(values: dict[str, Any]) -> Part:
    file, kind = values["file"], values["kind"]
    shape, blocks = tuple(map(_count, kind["shape"])), tuple(map(_count, values["blocks"]))
    if not OURS.fullmatch(file):
        raise ValueError(f"{file!r:.80} is no name of a file of a stream")
    if len(shape) > MAX_RANK or kind["dtype"] not in CODES:
        raise ValueError(f"rows of {len(shape)} axes in {kind['dtype']!r:.40}")
    part = Part(
        file, Kind(kind["dtype"], shape, _count(kind["columns"])), _count(values["rows"]), blocks, _count(values["ids_crc"])
    )
    if len(blocks) != -(-part.size // BLOCK):
        raise ValueError(f"{len(blocks)} checksums for {part.size} bytes")
    return part


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"{value!r:.40} is no count")
    return value


def append(path: Path, line: bytes) -> None:
    """Appends one line, and flushes it to the disk."""
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | getattr(os, "O_BINARY", 0))
    try:
        if os.write(handle, line) != len(line):
            raise OSError(f"only a part of a line of {path} could be written")
        os.fsync(handle)
    finally:
        os.close(handle)
