"""Stream: writes unreduced rows of tensors to disk while a network runs."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from recorders.capture.context import as_monitor
from recorders.capture.operands import shapes
from recorders.errors import OperandError, RecordingWarning
from recorders.monitors.base import Monitor
from recorders.monitors.forward import ForwardMonitor
from recorders.monitors.options import MonitorOptions
from recorders.recorder.recorder import Recorder
from recorders.recorder.selection import Excluded, Names
from recorders.recordings import display
from recorders.recordings.atomic_files import as_path
from recorders.recordings.storage.tensors import CODES
from recorders.streams.buffers import Buffers
from recorders.streams.index import Kind
from recorders.streams.queue import Queue, QueuedRows, moment
from recorders.streams.sink import RowCount, RowSink, rows_of
from recorders.streams.writer import Writer
from reducers.errors import warn_user
from reducers.kernels.locks import new_lock

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

MIB = 1 << 20


class Stream(display.ShownAsTable):
    """Writes rows of tensors to the folder `path`, from a thread of its own, as safetensors files; `StreamDataset` reads them.

    Rows go through a queue to the thread, so the network waits for no disk and no device, unless the queue is full. Every so many
    bytes a shard is committed: its files are flushed to the disk, then named in the index. If the process is killed at any moment,
    all committed shards are there. A stream that is opened again goes on after the last committed batch: `stream.batches` says how
    many batches to skip. If the disk fails, the stream stops with one warning, and the training goes on.

    A batch is what is put within one `given` block. Shards end where batches end, so the places of a batch are in the same shard.
    Without `given` a batch ends when a place comes a second time.

    Args:
        path: a new folder, or that of a stream, which goes on.
        dtype: rows of floating-point numbers are converted to this dtype; None keeps theirs. All others keep theirs, exactly.
        shard_bytes: a shard ends with the batch in which it reaches this size.
        queue_bytes: the most bytes that wait to be written, on the device that they come from. A larger tensor passes alone.
        when_full: "wait", until there is room in the queue; or "drop" whole batches, which are counted.

    Attributes:
        path: the folder.

    Raises:
        StorageError: another `Stream` is writing to the folder, or nobody can.
        NotARecordingError: the folder holds something else.
        CorruptRecordingError, SchemaError: its index is damaged, or of a newer version.

    >>> import tempfile
    >>> from recorders import StreamDataset
    >>> net = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with Stream(folder + "/acts") as stream, stream.attach(net, "1"):
    ...         with stream.given(ids=torch.tensor([10, 11, 12, 13])):
    ...             _ = net(torch.randn(4, 3))
    ...     data = StreamDataset(folder + "/acts")
    ...     data, data[1:3].shape
    (StreamDataset(.../acts', '1'): 4 rows of shape (2,) in float32, torch.Size([2, 2]))
    """

    def __init__(
        self,
        path: str | Path,
        *,
        dtype: torch.dtype | None = None,
        shard_bytes: int = 256 * MIB,
        queue_bytes: int = 256 * MIB,
        when_full: Literal["wait", "drop"] = "wait",
    ) -> None:
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(f"Stream(dtype={dtype!r}): give a floating-point dtype, such as torch.bfloat16")
        if when_full not in ("wait", "drop"):
            raise ValueError(f"Stream(when_full={when_full!r}): choose 'wait' or 'drop'")
        for name, value in {"shard_bytes": shard_bytes, "queue_bytes": queue_bytes}.items():
            if type(value) is not int or value < 1:
                raise ValueError(f"Stream({name}={value!r}): {name} is a number of bytes")
        self.path = Path(as_path(path)).absolute()
        self._dtype = dtype
        self._writer = Writer(self.path, shard_bytes, Queue(queue_bytes, when_full == "wait"))
        self._buffers = Buffers(queue_bytes)
        self._next_ids = dict(self._writer.next_ids)
        self._kinds = dict(self._writer.kinds)
        self._ids: tuple[Tensor, torch.cuda.Event | None] | None = None
        self._given = False
        self._warned: set[str] = set()
        self._dropped_before = self._writer.dropped
        self._seen: set[str] = set()  # places of the present batch, if no `given` says where it ends
        self._lock = new_lock()
        self._closing = weakref.finalize(self, _close, self._writer, self._seen, self._next_ids)  # also at exit

    def attach(
        self,
        net: nn.Module,
        names: Names | None = None,
        *,
        kind: Callable[..., Monitor] = ForwardMonitor,
        axes: int = 1,
        types: type | Iterable[type] | None = None,
        exclude: Excluded | None = None,
        where: Callable[[str, nn.Module], bool] | None = None,
        group: str = "",
        **options: Unpack[MonitorOptions],
    ) -> Recorder:
        """Puts a monitor on each selected module that writes what it records to this stream; returns the recorder of them.

        The hooks are on until the end of a `with` block of the recorder, or its `deregister()`. Places have the names of the
        modules. If an output holds several tensors, each is a place of its own: "layer/0", "layer/hidden"; `op_` picks one.

        Args:
            net: the network; `names`, `types`, `exclude` and `where` select from it as in `Recorder.modules`.
            kind: a kind of monitor, such as `BackwardMonitor`, or a function that makes a monitor of a reducer and the options.
            axes: how many leading axes are rows: with 2, an output of shape (batch, token, d) gives batch * token rows of d.
            group: is put before the names of the places: "group/layer", to tell several kinds on one module apart.
            **options: see `MonitorOptions`: in which steps to record, what to make of the output (`op_`), and so on.

        Raises:
            SelectionError: nothing matches.
            ValueError: `axes` is less than 1.
        """
        _check_axes("attach", axes)
        groups: dict[str, Any] = {group: kind(RowCount(axes), **options)}
        recorder = Recorder(**groups) if group else Recorder(groups[group])
        recorder.modules(net, types, names=names, exclude=exclude, where=where)
        for name, placed in recorder.items():
            placed.buffer = RowSink(placed.reducer, self.put, name, axes)
        return recorder

    @contextlib.contextmanager
    def given(self, ids: Tensor | Sequence[Any] | None = None) -> Iterator[Self]:
        """One batch: what is put within the block belongs together, and samples have these ids.

        Args:
            ids: whole numbers of shape (samples,) or (samples, columns), on any device; None numbers the samples of each place.

        Raises:
            OperandError: the ids are no whole numbers, or beyond int64.
            RuntimeError: the block is within another.
        """
        if self._given:
            raise RuntimeError("stream.given(...) within another: a stream records one batch at a time")
        found = None if ids is None else as_monitor(_as_ids, ids)
        with self._lock:
            if self._seen:
                self._end_batch()
            self._given, self._ids = True, None if found is None else (found[:, None] if found.ndim == 1 else found, moment(found))
        try:
            yield self
        finally:
            with self._lock:
                self._given, self._ids = False, None
                self._end_batch()

    def put(self, place: str, value: Tensor, axes: int = 1) -> int:
        """Writes the rows of a tensor by hand; returns how many were accepted: none if they were dropped, or the stream stopped.

        Args:
            place: what the rows are of; the rows of one place have one shape and dtype.
            value: a tensor whose first `axes` axes are rows, the first of them that of samples. It is copied.

        Raises:
            OperandError: the tensor cannot be written: its rows differ from earlier ones, it has not as many samples as there
                are ids, or holds no plain values (sparse, meta). A quantised tensor is dequantised, and of a nested one the
                rows of all its parts are samples.
            ValueError: `axes` is less than 1.
        """
        _check_axes("put", axes)
        x = rows_of(place, value, axes)
        dtype = self._dtype if self._dtype is not None and x.is_floating_point() else x.dtype
        with self._lock:
            kind = self._check(place, x, dtype, axes)
            self._start(place)
            lead, size = tuple(x.shape[:axes]), x.numel() * dtype.itemsize
            rows = math.prod(lead)
            start = self._next_ids.get(place, 0)
            if self._ids is None:
                self._next_ids[place] = start + lead[0]
            if not rows:
                return 0
            queue = self._writer.queue
            with queue.changed:
                if queue.admits(size):
                    copy = as_monitor(_copy, x, dtype, self._buffers)
                    ids, ids_ready = (start, None) if self._ids is None else self._ids
                    queue.add(QueuedRows(place, kind, copy, lead, ids, moment(copy), ids_ready, size))
                    return rows
                self._writer.dropped += rows
        self._warn()
        return 0

    def flush(self) -> None:
        """Commits what was put so far, and waits until that is done; it then survives a crash, and can be read.

        Raises:
            RuntimeError: called within a `given` block, in the middle of a batch.
        """
        if self._given:
            raise RuntimeError("flush after the block of stream.given(...): a shard holds whole batches")
        self._flush()
        self._warn()

    def close(self) -> None:
        """Commits what was put, and ends the stream. Called by the end of a `with` block, and at exit.

        Raises:
            RuntimeError: called within a `given` block, in the middle of a batch.
        """
        if self._given:
            raise RuntimeError("close after the block of stream.given(...): a shard holds whole batches")
        self._flush()
        self._warn()
        self._closing()

    def _flush(self) -> None:
        with self._lock:
            if self._seen:
                self._end_batch()
        self._writer.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def title_shown(self) -> str:
        """Where it writes, and how much is committed."""
        dropped = f", {self.dropped} rows dropped" if self.dropped else ""
        failed = f"; stopped: {self.failure}" if self.failure else ""
        return f"Stream({str(self.path)!r}): {self._writer.complete}{dropped}{failed}"

    def rows_shown(self) -> display.Rows:
        """One row for each place."""
        return ("place", "rows committed"), ([(place, f"{rows:,}")] for place, rows in self.rows.items()), len(self.rows)

    @property
    def rows(self) -> Mapping[str, int]:
        """How many rows of each place are committed."""
        return MappingProxyType(self._writer.rows)

    @property
    def batches(self) -> int:
        """How many batches are committed, since the stream began; those that were dropped count."""
        return self._writer.committed.batches if self._writer.committed else 0

    @property
    def dropped(self) -> int:
        """How many rows were dropped: because the queue was full, or after the stream had stopped."""
        return self._writer.dropped

    @property
    def failure(self) -> str:
        """Why the stream has stopped; "" if it has not."""
        return self._writer.failure

    def _start(self, place: str) -> None:
        """Ends the batch before this one, if no `given` block does and the place is in it already."""
        if not self._given:
            if place in self._seen:
                self._end_batch()
            self._seen.add(place)

    def _end_batch(self) -> None:
        self._seen.clear()
        self._writer.end_batch(self._next_ids)

    def _check(self, place: str, x: Tensor, dtype: torch.dtype, axes: int) -> Kind:
        """The kind of the rows; raises `OperandError` if it is not that of the place."""
        if x.layout != torch.strided:
            raise OperandError(f"{place!r}: a tensor of layout {x.layout} has no rows; make it dense with op_=Tensor.to_dense")
        if str(dtype).removeprefix("torch.") not in CODES:
            raise OperandError(f"{place!r}: rows of {dtype} cannot be stored; convert them with op_")
        if x.ndim < axes:
            raise OperandError(f"{place!r}: a tensor of shape {tuple(x.shape)} has no {axes} leading axes to make rows of")
        columns = axes if self._ids is None else axes - 1 + self._ids[0].shape[1]
        if self._ids is not None and len(self._ids[0]) != len(x):
            raise OperandError(
                f"{place!r}: {len(x)} samples along the first axis, but ids of {len(self._ids[0])} samples are given"
            )
        kind = Kind(str(dtype).removeprefix("torch."), tuple(x.shape[axes:]), columns)
        if self._kinds.setdefault(place, kind) != kind:
            raise OperandError(f"{place!r} has {self._kinds[place]}, and got {kind}: give them places of their own")
        return kind

    def _warn(self) -> None:
        """Says once for each reason why rows are missing."""
        if self._writer.failure:
            reason = f"stopped: {self.failure}. {self._writer.complete} and can be read; no more is written, and training goes on"
        elif self.dropped == self._dropped_before:
            return
        elif not self._closing.alive:
            reason = "is closed, and what is recorded now is not written: take the monitors off first"
        else:
            reason = "drops batches, because the disk is slower than the network; see stream.dropped, or choose when_full='wait'"
        if reason not in self._warned:
            self._warned.add(reason)
            warn_user(f"the stream to {self.path} {reason}", RecordingWarning)


def _check_axes(method: str, axes: int) -> None:
    if type(axes) is not int or axes < 1:
        raise ValueError(f"{method}(axes={axes!r}): give the number of leading axes that are rows, at least 1")


def _as_ids(ids: Tensor | Sequence[Any]) -> Tensor:
    """A copy of the ids as a tensor of whole numbers on the CPU."""
    what = "ids are whole numbers of shape (samples,) or (samples, columns)"
    try:
        found = torch.as_tensor(ids, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise OperandError(f"{what}; got {ids!r:.100}: {error!s:.200}") from error
    if not isinstance(ids, Tensor) and not found.numel():
        found = found.to(torch.int64)  # of an empty list PyTorch makes floats
    if found.is_floating_point() or found.is_complex() or found.dtype is torch.bool or not 1 <= found.ndim <= 2:
        raise OperandError(f"{what}; got {shapes(found)}")
    if found.dtype is torch.uint64 and (found.view(torch.int64) < 0).any():
        raise OperandError("files hold ids of at most 2**63 - 1, and a larger one was given")
    return found.detach().clone()


def _close(writer: Writer, seen: set[str], next_ids: Mapping[str, int]) -> None:
    """Ends the batch that is open, if its places were seen, and the writer. It does not refer to the stream, which may be gone."""
    if seen:
        seen.clear()
        writer.end_batch(next_ids)
    writer.close()


def _copy(x: Tensor, dtype: torch.dtype, buffers: Buffers) -> Tensor:
    x = x.resolve_conj().resolve_neg()
    if x.is_cpu:
        return buffers.take(x.numel() * dtype.itemsize).view(dtype).view(x.shape).copy_(x)
    return x.to(dtype, copy=True, memory_format=torch.contiguous_format)
