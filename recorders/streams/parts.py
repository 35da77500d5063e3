"""Parts: the files of a stream. Each has the rows of one place in one shard, is written in pieces, and read through a map."""

from __future__ import annotations

import contextlib
import json
import os
import re
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from recorders.errors import CorruptRecordingError
from recorders.recordings.storage.tensors import CODES, PAIRS, as_bytes, as_memory
from recorders.streams.index import BLOCK, PAYLOAD, Kind, Part
from reducers.kernels.locks import new_lock

try:
    from isal.isal_zlib import crc32  # the same checksum, much faster
except ImportError:
    from zlib import crc32


def header(kind: Kind, rows: int) -> bytes:
    """The first `PAYLOAD` bytes of a file. Complex rows are pairs of reals; dtypes unknown to safetensors are integers."""
    end, part = rows * kind.row_bytes, Part("", kind, rows, (), 0)
    shape = [rows, *kind.shape, *[2] * (kind.dtype in PAIRS)]
    tensors: dict[str, object] = {"rows": {"dtype": CODES[kind.dtype], "shape": shape, "data_offsets": [0, end]}}
    if end < part.ids_start:  # safetensors allows no gap, and the ids are aligned to 8 bytes
        tensors["padding"] = {"dtype": "U8", "shape": [part.ids_start - end], "data_offsets": [end, part.ids_start]}
    tensors["ids"] = {"dtype": "I64", "shape": [rows, kind.columns], "data_offsets": [part.ids_start, part.size]}
    text = json.dumps(tensors, separators=(",", ":")).encode()
    return (PAYLOAD - 8).to_bytes(8, "little") + text.ljust(PAYLOAD - 8)


class PartWriter:
    """A file to which the rows of one place are appended. No more than the ids of its rows is kept in memory."""

    def __init__(self, folder: Path, number: int, position: int, place: str, kind: Kind) -> None:
        slug = re.sub(r"[^A-Za-z0-9_.-]", "_", place)[-60:]
        self._file = f"{number:08d}-{position:04d}-{slug}.safetensors"
        self.path, self.kind, self.rows = folder / self._file, kind, 0
        self._ids: list[Tensor] = []
        self._blocks: list[int] = []
        self._crc = self._filled = 0
        with _opened(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as handle:
            _write(handle, memoryview(bytes(PAYLOAD)))

    @property
    def size(self) -> int:
        """The bytes of its tensors."""
        return self.rows * (self.kind.row_bytes + 8 * self.kind.columns)

    def append(self, rows: Tensor, ids: Tensor) -> None:
        """Appends rows, contiguous and on the CPU, and keeps their ids, which are int64 of shape (rows, columns)."""
        self._append(as_bytes(rows))
        self._ids.append(ids)
        self.rows += len(ids)

    def finish(self) -> Part:
        """Writes the ids and the header, and flushes the file to the disk."""
        part = Part(self._file, self.kind, self.rows, (), 0)
        ids = torch.cat(self._ids)
        self._append(torch.zeros(part.ids_start - self.rows * self.kind.row_bytes, dtype=torch.uint8, device="cpu"))
        self._append(as_bytes(ids))
        if self._filled:
            self._blocks.append(self._crc)
        with _opened(self.path, os.O_WRONLY) as handle:
            _write(handle, memoryview(header(self.kind, self.rows)))
            os.fsync(handle)
        return Part(self._file, self.kind, self.rows, tuple(self._blocks), crc32(as_memory(ids)))

    def _append(self, data: Tensor) -> None:
        view = as_memory(data)
        with _opened(self.path, os.O_WRONLY | os.O_APPEND) as handle:
            _write(handle, view)
        while view:
            piece = view[: BLOCK - self._filled]
            self._crc, self._filled, view = crc32(piece, self._crc), self._filled + len(piece), view[len(piece) :]
            if self._filled == BLOCK:
                self._blocks.append(self._crc)
                self._crc = self._filled = 0


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    handle = os.open(path, flags | getattr(os, "O_BINARY", 0), 0o666)
    try:
        yield handle
    finally:
        os.close(handle)


def _beginning(path: Path) -> bytes:
    """The bytes before the tensors, read through a handle of its own: a short read slows down those that follow it on the same."""
    with _opened(path, os.O_RDONLY) as handle:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_RANDOM)  # so that the system reads no more
        return os.read(handle, PAYLOAD)


def _write(handle: int, data: memoryview) -> None:
    while data:
        data = data[os.write(handle, data) :]


PIECE = 1 << 24
"""How many bytes are read before their checksums are computed: each pause costs the disk time. A multiple of `BLOCK`."""

READ_THROUGH = 1 << 16
"""So many bytes of neighbouring rows, or more, are read from the file: the pages of a map would be mapped first, piece by piece."""


class OpenFile:
    """A file that is open until nobody refers to it. While it is, the system sees that it is read in order, and reads ahead."""

    def __init__(self, path: Path) -> None:
        self.handle = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        self._lock = new_lock()
        weakref.finalize(self, os.close, self.handle).atexit = False  # a thread may read until the end, when the system closes it

    def read(self, start: int, data: memoryview) -> int:
        """Reads into `data` from the byte `start` on; returns how many bytes there were."""
        if hasattr(os, "preadv"):  # which needs no position: forked processes share that
            return os.preadv(self.handle, [data], start)
        with self._lock:
            os.lseek(self.handle, start, os.SEEK_SET)
            found = os.read(self.handle, len(data))
            data[: len(found)] = found
            return len(found)


class PartReader:
    """The rows and ids of a part, mapped into memory. Blocks are compared with their checksums when they are read first.

    Args:
        path: the file.
        name: what messages call it.
        opened: opens the file, or returns one that is open.

    Raises:
        CorruptRecordingError: the file is missing, or has another size or header than the index says.
    """

    def __init__(self, path: Path, name: str, place: str, part: Part, opened: Callable[[Path], OpenFile] = OpenFile) -> None:
        self._open = opened
        self.part, self._name, self._place = part, name, place
        try:
            size = os.stat(path).st_size
            if size != PAYLOAD + part.size:
                raise ValueError(f"it has {size} bytes instead of {PAYLOAD + part.size}")
            if _beginning(path) != header(part.kind, part.rows):
                raise ValueError("its header is not what was written")
            whole = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
        except (OSError, ValueError, RuntimeError) as error:
            raise self._damaged(0, part.rows, str(error)) from error
        self._bytes, row_bytes = whole[PAYLOAD:], part.kind.row_bytes
        self._rows = self._bytes[: part.rows * row_bytes].view(part.rows, row_bytes)
        self._ids = self._bytes[part.ids_start :].view(torch.int64).view(part.rows, part.kind.columns)
        self._path, self._memory = path, as_memory(self._bytes)
        self._unread = torch.ones(len(part.blocks), dtype=torch.bool, device="cpu")

    def rows(self, indices: Tensor, out: Tensor) -> None:
        """Copies the bytes of the rows at these indices to `out`, which is uint8 of shape (rows, bytes of a row).

        Raises:
            CorruptRecordingError: a block that holds one of them is damaged; the message names the rows in it.
        """
        starts, size = indices * self.part.kind.row_bytes, self.part.kind.row_bytes
        if out.nbytes >= READ_THROUGH and bool((indices.diff() == 1).all()):
            self._read(int(starts[0]), as_memory(out))
            return
        self._check(starts, starts + size)
        torch.index_select(self._rows, 0, indices, out=out)

    def ids(self, indices: Tensor) -> Tensor:
        """The ids of the rows at these indices; raises what `rows` raises."""
        starts, size = self.part.ids_start + indices * 8 * self.part.kind.columns, 8 * self.part.kind.columns
        self._check(starts, starts + size)
        return self._ids.index_select(0, indices)

    def expect(self, spans: Iterable[tuple[int, int]]) -> None:
        """Lets the system read rows soon, those from the first to before the second of each span.

        Unless there are blocks to compare: these are read one after the other anyhow, which is faster alone.
        """
        if self._unread.any():
            return
        size = self.part.kind.row_bytes
        read_soon(self._opened(0, self.part.size), ((start * size, end * size) for start, end in spans))

    def check(self) -> None:
        """Compares each block with its checksum; raises what `rows` raises."""
        self._check(torch.zeros(1, dtype=torch.int64, device="cpu"), torch.tensor([self.part.size], device="cpu"))

    def _read(self, start: int, out: memoryview) -> None:
        """Fills `out` with the bytes from `start` on; compares the blocks with their checksums that were not compared before."""
        end = start + len(out)
        unread = bool(self._unread[start // BLOCK : -(-end // BLOCK)].any())
        file = self._opened(start, end)
        for begin, stop in pieces(start, end) if unread else [(start, end)]:
            piece = out[begin - start : stop - start]
            self._fill(file, begin, piece)
            if unread:
                self._compare(begin, piece)

    def _check(self, starts: Tensor, ends: Tensor) -> None:
        """Compares with their checksums the blocks of bytes from `starts` to `ends` that were not compared before."""
        if not len(starts) or not self._unread.any():
            return
        edges = torch.zeros(len(self._unread) + 1, dtype=torch.int64, device="cpu")
        edges.index_add_(0, starts // BLOCK, torch.ones_like(starts))
        edges.index_add_(0, (ends + BLOCK - 1) // BLOCK, -torch.ones_like(ends))
        blocks = ((edges.cumsum(0)[:-1] > 0) & self._unread).nonzero().flatten()
        if not len(blocks):
            return
        spans = [(first * BLOCK, min(last * BLOCK, len(self._memory))) for first, last in spans_of(blocks).tolist()]
        scratch = memoryview(bytearray(min(PIECE, max(end - start for start, end in spans))))
        file = self._opened(*spans[0])
        if len(spans) > 1:  # so that the disk need not wait for the checksums
            read_soon(file, spans)
        for start, end in spans:
            for begin, stop in pieces(start, end):
                self._fill(file, begin, scratch[: stop - begin])
                self._compare(begin, scratch[: stop - begin])

    def _opened(self, start: int, end: int) -> OpenFile:
        try:
            return self._open(self._path)
        except OSError as error:
            raise self._damaged(*self._rows_in(start, end), str(error)) from error

    def _fill(self, file: OpenFile, start: int, data: memoryview) -> None:
        """Fills `data` with the bytes from `start` on."""
        filled, reason = 0, "the file is shorter than it was"
        try:
            while filled < len(data) and (count := file.read(PAYLOAD + start + filled, data[filled:])):
                filled += count
        except OSError as error:
            reason = str(error)
        if filled < len(data):
            raise self._damaged(*self._rows_in(start, start + len(data)), reason)

    def _compare(self, start: int, data: memoryview) -> None:
        """Compares the blocks with their checksums that have a part in `data`, the bytes from `start` on."""
        end = start + len(data)
        first, last = start // BLOCK, -(-end // BLOCK)
        unread = (self._unread[first:last].nonzero().flatten() + first).tolist()
        inner = range(-(-start // BLOCK), end // BLOCK)
        for block in unread:
            begin = block * BLOCK - start
            # The rest of an outer block is in another piece, or is not asked for.
            crc = crc32(data[begin : begin + BLOCK]) if block in inner else self._checksum(block, start, data)
            if crc != self.part.blocks[block]:
                raise self._damaged(*self._rows_in(*self._ends(block)), "the checksum differs")
        self._unread[first:last] = False

    def _checksum(self, block: int, start: int, data: memoryview) -> int:
        """The checksum of a block of which `data`, the bytes from `start` on, has a part."""
        begin, stop = self._ends(block)
        crc = crc32(self._memory[begin : max(begin, start)])
        crc = crc32(data[max(begin - start, 0) : stop - start], crc)
        return crc32(self._memory[max(begin, start + len(data)) : stop], crc)

    def _ends(self, block: int) -> tuple[int, int]:
        """Where a block begins, and the next one."""
        return block * BLOCK, min((block + 1) * BLOCK, len(self._memory))

    def _rows_in(self, start: int, end: int) -> tuple[int, int]:
        """The rows whose values or ids lie between two bytes."""
        part, size = self.part, self.part.kind.row_bytes
        if start < part.rows * size:  # a block with values and ids: the values say more
            return start // size, min(-(-end // size), part.rows)
        size = 8 * part.kind.columns
        return max(0, start - part.ids_start) // size, -(-(end - part.ids_start) // size)

    def _damaged(self, start: int, end: int, reason: str) -> CorruptRecordingError:
        return CorruptRecordingError(
            f"{self._name}: rows {start} to {end - 1} of {self._place!r} in this shard are damaged or missing: {reason}; "
            "other rows and shards can be read"
        )


def read_soon(file: OpenFile, spans: Iterable[tuple[int, int]]) -> None:
    """Lets the system read these bytes of the tensors, without waiting for them; some systems have no such call."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            for start, end in spans:
                os.posix_fadvise(file.handle, PAYLOAD + start, end - start, os.POSIX_FADV_WILLNEED)


def pieces(start: int, end: int) -> Iterator[tuple[int, int]]:
    """What is read at once of the bytes from `start` to `end`: up to the multiples of `PIECE` between them."""
    while start < end:
        stop = min(end, (start // PIECE + 1) * PIECE)
        yield start, stop
        start = stop


def spans_of(numbers: Tensor) -> Tensor:
    """The first of each run of neighbours, and the number after its last one: int64 of shape (runs, 2).

    >>> spans_of(torch.tensor([4, 5, 6, 1, 2])).tolist()
    [[4, 7], [1, 3]]
    """
    cuts = (numbers.diff() != 1).nonzero().flatten()
    return torch.stack([torch.cat([numbers[:1], numbers[cuts + 1]]), torch.cat([numbers[cuts], numbers[-1:]]) + 1], 1)
