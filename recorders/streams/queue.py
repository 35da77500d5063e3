"""Queue: the rows that wait for the thread that writes them, no more bytes of them than a bound."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from recorders.streams.index import Kind


class QueuedRows(NamedTuple):
    """Rows on their way to the disk.

    Attributes:
        values: a copy that nobody else writes to, on any device; its first axes are those of `lead`.
        lead: the sizes of the axes that become rows; the first one is that of samples.
        ids: of the samples, whole numbers of shape (samples, columns); or the id of the first sample, if they are numbered.
        ready: is recorded on the device when the copy is made; `ids_ready` the same for the ids.
        size: the bytes of `values`.
    """

    place: str
    kind: Kind
    values: Tensor
    lead: tuple[int, ...]
    ids: Tensor | int
    ready: torch.cuda.Event | None
    ids_ready: torch.cuda.Event | None
    size: int


class Queue:
    """A bounded queue between the threads that record and the one that writes.

    A tensor that is larger than the bound passes alone. If batches are refused, room is made for the largest one so far; a larger
    one than that passes as a whole.

    Args:
        most: the bytes that wait at most.
        wait: wait for room; otherwise a batch for which there is no room is refused as a whole.

    Attributes:
        changed: is held while any of this changes, and notified afterwards.
        held: the bytes that wait or are being written.
        peak: the largest number of them so far.
        stopped: nothing is accepted any more.
    """

    def __init__(self, most: int, wait: bool) -> None:
        self.most, self.wait = most, wait
        self.changed = threading.Condition()
        self.held = self.peak = 0
        self.stopped = False
        self._entries: deque[QueuedRows | Callable[[], None]] = deque()
        self._refusing = False
        self._batch = self._largest = 0  # the bytes of the present batch, and of the largest so far

    def admits(self, size: int) -> bool:
        """Whether rows of so many bytes are accepted; waits for room if it should. `changed` must be held."""
        if self.wait:
            self.changed.wait_for(lambda: self.stopped or self.held == 0 or self.held + size <= self.most)
        elif self._batch == 0 and not self._refusing:
            self._refusing = self.held > 0 and self.held + max(size, self._largest) > self.most
        return not (self.stopped or self._refusing)

    def add(self, rows: QueuedRows) -> None:
        """Adds rows that were admitted. `changed` must be held."""
        self._entries.append(rows)
        self._batch += rows.size
        self.held += rows.size
        self.peak = max(self.peak, self.held)
        self.changed.notify_all()

    def end_batch(self, done: Callable[[], None]) -> None:
        """Marks the end of a batch; the writer calls `done` when it comes to it."""
        with self.changed:
            self._largest = max(self._largest, self._batch)
            self._batch, self._refusing = 0, False
            self.call(done)

    def call(self, function: Callable[[], None]) -> None:
        """Lets the writer call a function when everything before it is written."""
        with self.changed:
            if not self.stopped:
                self._entries.append(function)
                self.changed.notify_all()

    def take(self) -> QueuedRows | Callable[[], None] | None:
        """Waits for the next entry and returns it; None once the queue has stopped. Rows count until `written` is called."""
        with self.changed:
            self.changed.wait_for(lambda: self._entries or self.stopped)
            return self._entries.popleft() if self._entries else None

    def written(self, size: int) -> None:
        """Says that an entry is dealt with, which was of so many bytes."""
        with self.changed:
            self.held = max(0, self.held - size)  # 0 already if the queue has stopped
            self.changed.notify_all()

    def stop(self) -> list[QueuedRows]:
        """Accepts nothing any more, and wakes all who wait; returns the rows that are lost."""
        with self.changed:
            lost = [entry for entry in self._entries if isinstance(entry, QueuedRows)]
            self.stopped, self.held = True, 0
            self._entries.clear()
            self.changed.notify_all()
            return lost


def moment(tensor: Tensor) -> torch.cuda.Event | None:
    """An event that a CUDA device reaches once it has computed `tensor`; None for other devices."""
    if not tensor.is_cuda:
        return None
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(tensor.device))
    return event


def on_host(tensor: Tensor, ready: torch.cuda.Event | None, streams: dict[torch.device, torch.cuda.Stream]) -> Tensor:
    """The tensor on the CPU. The calling thread waits for the device; the kernels of other threads do not wait for the copy."""
    if ready is None or not tensor.is_cuda:
        return tensor.cpu()
    if tensor.device not in streams:
        streams[tensor.device] = torch.cuda.Stream(tensor.device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(streams[tensor.device]):
        streams[tensor.device].wait_event(ready)
        host = tensor.to("cpu", non_blocking=True)
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        done.record(streams[tensor.device])
    done.synchronize()
    return host


def as_row_ids(ids: Tensor | int, lead: tuple[int, ...]) -> Tensor:
    """The ids of rows: those of their samples, and their indices along the other axes of `lead`.

    >>> as_row_ids(7, (2, 3)).tolist()
    [[7, 0], [7, 1], [7, 2], [8, 0], [8, 1], [8, 2]]
    """
    samples, inner = lead[0], lead[1:]
    base = (
        torch.arange(ids, ids + samples, device="cpu")[:, None]
        if isinstance(ids, int)
        else ids.to(torch.int64).reshape(samples, -1)
    )
    if not inner:
        return base.contiguous()
    indices = torch.ones(inner, dtype=torch.bool, device="cpu").nonzero()
    return torch.cat([base.repeat_interleave(len(indices), 0), indices.repeat(samples, 1)], 1)
