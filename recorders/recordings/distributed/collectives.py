"""Exchange: the collectives of ranks that make one call together, with one kind of error, which says who did not answer."""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from recorders._torch import group_timeout
from recorders.errors import SyncError
from recorders.recordings.display import listed

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

T = TypeVar("T")

Group: TypeAlias = "ProcessGroup | DeviceMesh | None"
"""The ranks that make a call together; None for all."""

REDUCE_FROM = 4
"""The fewest ranks for which states are all-reduced: two ranks gather no more bytes, and three hardly more."""

_SAME_BITS = ("gloo", "nccl")
"""The backends that add each number in one order for all ranks, so that all get the same bits of a sum of floats."""

_ROLL_CALL = 5.0
"""Seconds in which a living rank says that its collective failed too."""

_ROW = struct.Struct("<16sBqq32s400s")
"""The call that a rank makes, and its `Message`."""


class Message(NamedTuple):
    """How a step went on one rank: if `kind` is not 0, `text` is its error.

    Attributes:
        size: how many bytes this rank has made, or sends next.
        free: the bytes of memory that are free, if that matters.
        sha256: the checksum of what is `size` long.
    """

    kind: int = 0
    size: int = 0
    free: int = 0
    sha256: bytes = b""
    text: str = ""


def is_alone(ranks: Group) -> bool:
    """Whether there are no other ranks to make a call with.

    Raises:
        SyncError: this process is not among the ranks, or there is no process group of them.
    """
    return not dist.is_available() or not dist.is_initialized() or dist.get_world_size(_group_of(ranks)) == 1


def _group_of(ranks: Group) -> ProcessGroup | None:
    """The process group of these ranks; raises what `is_alone` does."""
    if not isinstance(ranks, DeviceMesh):
        if dist.get_rank(ranks) < 0:
            raise SyncError(f"rank {dist.get_rank()} is not in the group that was given: call this on its members only")
        return ranks
    members = _members(ranks)
    if ranks.get_coordinate() is None:
        raise SyncError(f"rank {dist.get_rank()} is not in the mesh of ranks {listed(members)}: call this on its members only")
    if len(members) == dist.get_world_size():
        return None
    several = [dimension for dimension, size in enumerate(ranks.mesh.shape) if size > 1]
    if len(several) > 1:  # only all ranks of a job together can make a group, and some of them are not here
        raise SyncError(
            f"there is no process group of ranks {listed(members)}, which are {len(several)} dimensions of a mesh: make one on all "
            f"ranks of the job, once, and give it: group = torch.distributed.new_group({members!s:.200})"
        )
    return ranks.get_group(several[0] if several else 0)


def _members(mesh: DeviceMesh) -> list[int]:
    ranks: list[int] = mesh.mesh.flatten().tolist()
    return ranks


class Exchange:
    """The collectives of one call that several ranks make together, such as `sync`.

    Args:
        ranks: in the order of the group, or of the mesh. A backend for CPUs is used if there is one, because every rank has a CPU.
        call: the name of the function that they call, which is compared.
        failed: what an error says that did not happen.

    Attributes:
        reduces: whether states that merge element by element are all-reduced, which is alike on all ranks.
        works: the collectives under way.
    """

    def __init__(self, ranks: Group, call: str, failed: str = "nothing was merged") -> None:
        self._call, self._failed = call.encode(), failed
        self.works: list[Work] = []
        self.group: Any = _group_of(ranks) or dist.group.WORLD
        members = dist.get_process_group_ranks(self.group)
        self.ranks: list[int] = _members(ranks) if isinstance(ranks, DeviceMesh) else members
        places = {rank: place for place, rank in enumerate(self.ranks)}
        self._places = [places[rank] for rank in members]
        backends = dict(pair.split(":") for pair in dist.get_backend_config(self.group).split(","))
        self.device = torch.device("cpu" if "cpu" in backends else next(iter(backends)))
        self.reduces: bool = len(self.ranks) >= REDUCE_FROM and backends[self.device.type] in _SAME_BITS

    def agree(
        self, what: str, step: Callable[[], Message], kinds: Sequence[type[Exception]] = ()
    ) -> tuple[list[Message], Exception | None]:
        """Does a step, and tells all ranks how it went, so that none waits for one that failed.

        Args:
            what: what the ranks tell each other, for errors.
            step: returns what to tell; of an error that it raises, the text is told.
            kinds: errors that are told by their number in these, from 1; all others are 1.

        Returns:
            the messages of all ranks, and the error of this one.

        Raises:
            SyncError: a rank makes another call, or does not answer.
        """
        failure: Exception | None = None
        try:
            mine = step()
        except Exception as error:
            failure = error
            known = [number for number, kind in enumerate(kinds, 1) if isinstance(error, kind)]
            mine = Message(max(known, default=1), text=str(error) if known else f"{type(error).__name__}: {error}")
        text = mine.text.encode(errors="backslashreplace")
        row = _ROW.pack(self._call, mine.kind, mine.size, mine.free, mine.sha256, text)
        messages = []
        for rank, there in zip(self.ranks, self.rows(what, row), strict=True):
            call, kind, size, free, sha256, text = _ROW.unpack(there)
            if call.rstrip(b"\0") != self._call:
                raise SyncError(
                    f"{self._failed}, because rank {rank} answers something else: did it call {self._call.decode()}, in the same "
                    "version of the library?"
                ) from failure
            messages.append(Message(kind, size, free, sha256, text.rstrip(b"\0").decode(errors="ignore")))
        return messages, failure

    def rows(self, what: str, mine: bytes, width: int | None = None) -> list[bytes]:
        """The bytes of each rank, padded with zeros to `width` if they differ in length; `what` says in an error what they are."""

        def gather() -> Tensor:
            rows = self._gather(torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(self.device), width or len(mine), None)
            self.works.pop().wait()
            return rows.cpu()

        return [_bytes(row) for row in self._try(what, gather)]

    def too_big(self, sizes: Sequence[int], free: Sequence[int], to: int | None, reduced: int) -> Iterator[str]:
        """The ranks that have no memory for the states: rows have one width, and each rank makes its own as wide.

        Args:
            sizes: the bytes that each rank gathers.
            free: the bytes that are free on each rank.
            to: the only rank that gets them, if there is one.
            reduced: the bytes of the all-reduces.
        """
        longest = max(sizes)
        for rank, available in zip(self.ranks, free, strict=True):
            needed = longest * (len(sizes) + 1 if to in (None, rank) else 1) + 2 * reduced
            if needed > available:
                sent = f"{longest} bytes of states{f', beside {reduced} that all reduce' if reduced else ''}"
                culprit = self.ranks[sizes.index(longest)]
                yield f"rank {culprit} sends {sent}: rank {rank} needs {needed} for it, and {available} are free"

    def gather(self, payload: Tensor, width: int, to: int | None) -> Tensor:
        """The bytes of each rank as a row, padded to `width`, none on ranks that are not `to`; `arrived` waits for them."""
        return self._try("states", lambda: self._gather(payload, width, to))

    def reduce(self, mine: Tensor, op: Literal["sum", "max"], to: int | None) -> Tensor:
        """The sums or maxima of the numbers of all ranks, which arrive likewise; nothing of use on ranks that are not `to`."""
        how = dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX
        all_or_one = dist.all_reduce if to is None else partial(dist.reduce, dst=to)
        self.works.append(self._try("states", lambda: all_or_one(mine, op=how, group=self.group, async_op=True)))
        return mine

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
            if to is None:
                work = dist.all_gather([rows[place] for place in self._places], padded, group=self.group, async_op=True)
            else:
                places = [rows[place] for place in self._places] if receives else None
                work = dist.gather(padded, places, dst=to, group=self.group, async_op=True)
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


def free_memory() -> int:
    """The bytes of memory that are free on this machine; more than any machine has if that is not known."""
    with suppress(OSError, ValueError, IndexError), open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    with suppress(OSError, ValueError, AttributeError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 2**62


def _bytes(row: Tensor) -> bytes:
    data = bytearray(row.numel())
    if data:
        torch.frombuffer(data, dtype=torch.uint8).copy_(row)
    return bytes(data)
