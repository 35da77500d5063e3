"""Exchange: the collectives of `sync`, with one kind of error on all living ranks, which says who did not answer."""

from __future__ import annotations

import hashlib
import os
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from recorders._torch import group_timeout
from recorders.errors import SyncError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

__all__ = ["MAX_MANIFEST", "REDUCE_FROM", "Exchange"]

T = TypeVar("T")

MAX_MANIFEST = 32 * 2**20
"""The longest manifest that is sent or read: Python's objects take up to 30 times the bytes of their JSON."""

REDUCE_FROM = 4
"""The fewest ranks for which states are all-reduced: two ranks gather no more bytes, and three hardly more."""

_SAME_BITS = ("gloo", "nccl")
"""The backends that add each number in one order for all ranks, so that all get the same bits of a sum of floats."""

_HEADER = struct.Struct("<qqq32s")
"""Length of the manifest, length of the payload, bytes of memory that are free, SHA-256 of the manifest."""

_ROLL_CALL = 5.0
"""Seconds in which a living rank says that its collective failed too."""


class Exchange:
    """The collectives of one `sync`, or of one save by all ranks.

    Args:
        group: the ranks; its CPU backend is used if it has one, because every rank has a CPU.
        failed: what an error says that did not happen.

    Attributes:
        reduces: whether states that merge element by element are all-reduced, which is alike on all ranks.
        works: the collectives under way.
    """

    def __init__(self, group: ProcessGroup | None, failed: str = "nothing was merged") -> None:
        self._failed = failed
        self.group: Any = group or dist.group.WORLD
        self.ranks: list[int] = dist.get_process_group_ranks(self.group)
        backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
        self.device = torch.device("cpu" if "cpu" in backends else next(iter(backends)))
        self.reduces: bool = len(self.ranks) >= REDUCE_FROM and backends[self.device.type] in _SAME_BITS
        self.works: list[Work] = []

    def manifests(self, manifest: bytes, payload: Tensor) -> tuple[list[bytes], tuple[int, ...]]:
        """The manifests of all ranks, and the sizes of their payloads; raises `SyncError` also if a header is malformed."""
        header = _HEADER.pack(len(manifest), payload.numel(), _free(), hashlib.sha256(manifest).digest())
        rows = self._at_once("lengths", header, _HEADER.size)
        lengths, sizes, self._memory, digests = zip(*(_HEADER.unpack(_bytes(row)) for row in rows), strict=True)
        for rank, length, size, free in zip(self.ranks, lengths, sizes, self._memory, strict=True):
            if not 0 < length <= MAX_MANIFEST or size < 0 or free < 0:
                raise SyncError(
                    f"nothing was merged, because rank {rank} sends a malformed header: a manifest of {length} bytes, of at most "
                    f"{MAX_MANIFEST}, and states of {size}, with {free} free"
                )
        if len(set(zip(lengths, digests, strict=True))) == 1:
            return [manifest] * len(sizes), sizes
        width = max(lengths)
        rows = self._at_once("manifests", manifest, width)
        return [_bytes(row[:length]) for row, length in zip(rows, lengths, strict=True)], sizes

    def _at_once(self, what: str, mine: bytes, width: int) -> Tensor:
        """The bytes of each rank as a row, when they have arrived."""

        def gather() -> Tensor:
            rows = self._gather(_tensor(mine, self.device), width, None)
            self.works.pop().wait()
            return rows.cpu()

        return self._try(what, gather)

    def too_big(self, sizes: Sequence[int], to: int | None, reduced: int = 0) -> Iterator[str]:
        """The ranks that have no memory for the payloads: rows have one width, and each rank makes its own as wide.

        Args:
            sizes: the bytes that each rank gathers.
            to: the only rank that gets them, if there is one.
            reduced: the bytes of the all-reduces.
        """
        longest = max(sizes)
        for rank, free in zip(self.ranks, self._memory, strict=True):
            needed = longest * (len(sizes) + 1 if to in (None, rank) else 1) + 2 * reduced
            if needed > free:
                sent = f"{longest} bytes of states{f', beside {reduced} that all reduce' if reduced else ''}"
                culprit = self.ranks[sizes.index(longest)]
                yield f"rank {culprit} sends {sent}: rank {rank} needs {needed} for it, and {free} are free"

    def payloads(self, payload: Tensor, width: int, to: int | None) -> Tensor:
        """The bytes of each rank as a row, padded with zeros to `width`; no rows on ranks that are not `to`."""
        return self.arrived(self.gather(payload, width, to))[0]

    def gather(self, payload: Tensor, width: int, to: int | None) -> Tensor:
        """The payloads of all ranks, which arrive while the caller goes on: `arrived` waits for them."""
        return self._try("states", lambda: self._gather(payload, width, to))

    def rows(self, what: str, mine: bytes) -> list[bytes]:
        """The bytes of each rank, of which all have equally many; `what` says in an error what they are."""
        return [_bytes(row) for row in self._at_once(what, mine, len(mine))]

    def reduce(self, mine: Tensor, op: Literal["sum", "max"], to: int | None) -> Tensor:
        """The sums or maxima of the numbers of all ranks, which arrive likewise; nothing of use on ranks that are not `to`."""
        reduction = dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX

        def start() -> Tensor:
            if to is None:
                self.works.append(dist.all_reduce(mine, reduction, group=self.group, async_op=True))
            else:
                self.works.append(dist.reduce(mine, to, reduction, group=self.group, async_op=True))
            return mine

        return self._try("states", start)

    def arrived(self, *tensors: Tensor) -> list[Tensor]:
        """What has arrived in these tensors, on the CPU; waits for all collectives under way."""

        def wait() -> list[Tensor]:
            for work in self.works:
                work.wait()
            return [tensor.cpu() for tensor in tensors]

        return self._try("states", wait)

    def _gather(self, mine: Tensor, width: int, to: int | None) -> Tensor:
        receives = to is None or to == dist.get_rank()
        rows = torch.empty(len(self.ranks) if receives else 0, width, dtype=torch.uint8, device=mine.device)
        if width:
            padding = width - mine.numel()
            padded = nn.functional.pad(mine, (0, padding)) if padding else mine
            places = list(rows.unbind())
            if to is None:
                work = dist.all_gather(places, padded, group=self.group, async_op=True)
            else:
                work = dist.gather(padded, places if receives else None, dst=to, group=self.group, async_op=True)
            self.works.append(work)
        return rows

    def _try(self, what: str, collective: Callable[[], T]) -> T:
        try:
            return collective()
        except Exception as error:
            timeout = group_timeout(self.group, self.device)
            raise SyncError(
                f"{self._failed}: the exchange of {what} among {len(self.ranks)} ranks failed on rank {dist.get_rank()}"
                f"{f', with a timeout of {timeout:g} s' if timeout else ''}. {self._roll_call(timeout or _ROLL_CALL)} What this "
                "process recorded is as it was: save it, recorder.save(path), and merge the folders of all ranks later, "
                f"recorders.merge(paths). Make a new group before you sync again. The backend says {type(error).__name__}: "
                f"{error!s:.300}"
            ) from error

    def _roll_call(self, timeout: float) -> str:
        """Which ranks are not here, asked of the store by which the ranks found each other: the group itself may be broken."""
        seconds = min(timeout, _ROLL_CALL)
        absent: list[list[int] | None] = []
        store = self.group.get_group_store()
        # In a thread, because a store whose host is gone may keep a caller waiting for minutes.
        asking = threading.Thread(target=lambda: absent.append(_absent(store, self.ranks, seconds)), daemon=True)
        asking.start()
        asking.join(2 * seconds + 1)
        if not absent or absent[0] is None:
            return (
                "Who did not answer is unknown, because the store of the group does not answer: the rank that hosts it may be gone."
            )
        if not absent[0]:
            return "All ranks are alive and failed alike."
        why = "they died, never made this call, or still wait for others"
        return f"Ranks {absent[0]} did not answer within {seconds:g} s: {why}."


def _absent(store: Any, ranks: list[int], seconds: float) -> list[int] | None:
    """The ranks that do not say in time that their collective failed too; None if the store does not answer."""
    with suppress(Exception):
        mine = f"recorders.sync/{dist.get_rank()}"
        time = store.add(mine, 1)  # how often it failed, which is the same on all ranks
        store.set(f"{mine}/{time}", "failed")
        keys = {rank: f"recorders.sync/{rank}/{time}" for rank in ranks}
        with suppress(RuntimeError):
            store.wait(list(keys.values()), timedelta(seconds=seconds))
        return [rank for rank, key in keys.items() if not store.check([key])]
    return None


def _free() -> int:
    """The bytes of memory that are free on this machine, if that is known."""
    with suppress(OSError, ValueError, IndexError), open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    with suppress(OSError, ValueError, AttributeError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 2**62


def _tensor(raw: bytes, device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).to(device)


def _bytes(row: Tensor) -> bytes:
    data = bytearray(row.numel())
    if data:
        torch.frombuffer(data, dtype=torch.uint8).copy_(row)
    return bytes(data)
