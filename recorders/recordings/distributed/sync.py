"""`sync`: merges the recordings of all ranks of a process group or device mesh."""

from __future__ import annotations

import atexit
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Generic, Literal, TypeVar, overload

import torch
import torch.distributed as dist

from recorders.errors import SyncError
from recorders.recordings.display import listed
from recorders.recordings.distributed.allreduce import Reduction
from recorders.recordings.distributed.collectives import Exchange, Group, Message, free_memory, is_alone
from recorders.recordings.distributed.merge import Merged, merged_aliases
from recorders.recordings.distributed.protocol import SHOWN, Index, Packed, Sent, differences, pack, parse
from recorders.recordings.recording import Missing, Recording
from reducers.kernels.locks import new_lock

if TYPE_CHECKING:
    from torch.distributed import Work

T = TypeVar("T")

LONGEST_AT_EXIT_S = 5.0

_under_way: set[Work] = set()
"""Collectives that nobody has waited for, up to the next sync after they ended. Copied to go through it: threads may sync."""


class SyncHandle(Generic[T]):
    """The recordings of all ranks on their way: what `recorder.sync(async_op=True)` returns, as a collective returns a `Work`.

    All collectives were issued, in the thread that called `sync`, so collectives that are called later stay in the order in which
    they are called. What is merged was fixed then, too. A handle that is never waited for costs its memory only.

    Args:
        works: the collectives under way.
        finish: waits for them, and returns what was merged.

    >>> from recorders import Recording
    >>> from recorders.recordings.distributed.sync import sync
    >>> handle = sync(Recording({}), async_op=True)
    >>> handle.is_completed(), len(handle.wait())
    (True, 0)
    """

    def __init__(self, works: Sequence[Work], finish: Callable[[], T]) -> None:
        self._works = works
        self._finish: Callable[[], T] | None = finish
        self._result: T
        self._error: Exception | None = None
        self._lock = new_lock()
        _under_way.difference_update([work for work in tuple(_under_way) if work.is_completed()])
        _under_way.update(works)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}, {'completed' if self.is_completed() else 'under way'}>"

    def is_completed(self) -> bool:
        """Whether no other rank is waited for any more: all has arrived, or has failed. It never waits."""
        return all(work.is_completed() for work in self._works)

    def wait(self) -> T:
        """Waits until the recordings of all ranks have arrived, merges them here, and returns what `sync` returns.

        The first call merges; later ones return the same object, or raise the same error.

        Raises:
            SyncError: a rank died meanwhile, or the states do not merge; see `sync`. What this rank recorded is as it was.
        """
        with self._lock:
            if self._finish is not None:
                try:
                    with torch.inference_mode(False):  # inference tensors could not be updated later
                        self._result = self._finish()
                except Exception as error:
                    self._error = error
                _under_way.difference_update(self._works)
                self._finish, self._works = None, ()
        if self._error is not None:
            raise self._error
        return self._result


@atexit.register
def wait_at_exit() -> None:
    """Waits for collectives under way, but not for long: one that ends while Python is taken down ends the process abnormally."""
    limit = time.monotonic() + LONGEST_AT_EXIT_S
    while time.monotonic() < limit and not all(work.is_completed() for work in tuple(_under_way)):
        time.sleep(0.01)


@overload
def sync(
    recording: Recording, group: Group = ..., *, to: Literal["all"] = ..., missing: Missing = ..., async_op: Literal[False] = ...
) -> Recording: ...
@overload
def sync(
    recording: Recording, group: Group = ..., *, to: int, missing: Missing = ..., async_op: Literal[False] = ...
) -> Recording | None: ...
@overload
def sync(
    recording: Recording, group: Group = ..., *, to: Literal["all"] = ..., missing: Missing = ..., async_op: Literal[True]
) -> SyncHandle[Recording]: ...
@overload
def sync(
    recording: Recording, group: Group = ..., *, to: int, missing: Missing = ..., async_op: Literal[True]
) -> SyncHandle[Recording | None]: ...
def sync(
    recording: Recording,
    group: Group = None,
    *,
    to: int | Literal["all"] = "all",
    missing: Missing = "error",
    async_op: bool = False,
) -> Recording | SyncHandle[Recording] | SyncHandle[Recording | None] | None:
    """The recordings of all ranks merged as in rank order, the same on every rank, bit for bit.

    `recording` is not changed, so repeated calls count nothing twice. A tensor that ranks share counts once: parameters, their
    gradients, updates and optimizer states if they are equal, bit for bit; and the parts and copies of a DTensor. See
    `docs/distributed.md`.

    There are at most six collectives: lengths and checksums; if checksums differ, the manifests (names, monitors, reducers, keys,
    shapes, dtypes); and the states. From four ranks on, tensors of states that merge element by element are all-reduced: sums of
    integers, sums of float64, and minima and maxima. All others, and all of fewer ranks, are gathered as the bytes of one tensor,
    which works for every dtype, and merged in rank order. No rank sends states before all know that the manifests fit, and nothing
    is pickled.

    Args:
        recording: what this rank recorded. Every rank of the group must call `sync`.
        group: the ranks to merge; None for all. Its CPU backend is used if it has one, else its accelerator. A `DeviceMesh` stands
            for its ranks, which are merged in its order.
        to: the global rank that gets what was merged, like `dst` of `torch.distributed.gather`; "all" for every rank. Ranks that
            get it briefly hold the states of all, the others only their own. It must be equal on all ranks.
        missing: "keep" merges a name that only some ranks record from those; "error" refuses it. It must be equal on all ranks.
        async_op: return while the states are on their way, as a collective does. All collectives are issued before, and the first
            ones, which are small, are waited for; so what the ranks do next stays in the order of their calls.

    Returns:
        The merged recording, with states on the CPU; None on ranks that are not `to`; or `recording` itself if there is only one
        rank or `torch.distributed` is not initialised. With `async_op`, a `SyncHandle` whose `wait()` returns that.

    Raises:
        ValueError: `missing` is neither, and there is only one rank; of several ranks all raise a `SyncError` that says so.
        SyncError: nothing was merged, and `recording` is as it was, to be saved. With `async_op`, `wait()` raises what is found
            after the states were sent.

            - Ranks hold different names, monitors or reducers, or run other versions; or a rank cannot send its states, or more
              than there is memory for. Every rank raises and lists this by global rank.
            - The states do not merge. With `to`, only that rank learns it.
            - A rank died, or does not call `sync`. All others raise, within the timeout of the group and a few seconds, and name
              the ranks that did not answer. NCCL ends a process at its timeout instead: give the group a CPU backend too,
              "cpu:gloo,cuda:nccl".
            - This process is not in the group or mesh; or the ranks of the mesh are a part of all, in several dimensions, of which
              PyTorch has no process group: make one, and give that.

    Warns:
        RecordingWarning: copies differ between ranks, on the ranks that get what was merged. Of copies of a DTensor the first
            counts; parameters that differ count as those of different nets.

    >>> from recorders import Recording
    >>> alone = Recording({})
    >>> sync(alone) is alone
    True
    """
    if is_alone(group):
        _check_missing(missing)
        alone = SyncHandle((), lambda: recording)
        return alone if async_op else alone.wait()
    exchange = Exchange(group, "sync")
    with torch.inference_mode(False):  # inference tensors could not be updated later
        handle = SyncHandle(exchange.works, _sent(recording, exchange, to, missing))
    return handle if async_op else handle.wait()


def _sent(recording: Recording, exchange: Exchange, to: int | Literal["all"], missing: Missing) -> Callable[[], Recording | None]:
    """Sends what was recorded, after all ranks agreed; returns the function that waits for what the others send and merges it."""
    ranks, receiver, me = exchange.ranks, None if to == "all" else to, dist.get_rank()
    packed = Packed(b"", {}, {})

    def announce() -> Message:
        nonlocal packed
        _check_missing(missing)
        if to != "all" and (type(to) is not int or to not in ranks):
            raise SyncError(f"to={to!r} is neither 'all' nor a rank of the group, which has {listed(ranks)}")
        packed = pack(recording, exchange.device, missing, f"sync(to={to!r}, missing={missing!r})")
        return Message(0, len(packed.manifest), free_memory(), hashlib.sha256(packed.manifest).digest())

    messages, failure = exchange.agree("lengths", announce)
    _refuse(
        (f"rank {rank} cannot send what it recorded: {m.text}" for rank, m in zip(ranks, messages, strict=True) if m.kind), failure
    )
    raws = [packed.manifest] * len(ranks)
    if len({message.sha256 for message in messages}) > 1:
        sizes = [message.size for message in messages]
        rows = exchange.rows("manifests", packed.manifest, max(sizes))
        raws = [row[:size] for row, size in zip(rows, sizes, strict=True)]
    parsed = {raw: parse(raw) for raw in dict.fromkeys(raws)}  # usually they are equal
    # What each finds from here to the collectives is alike on all ranks: they decide alike whether to go on.
    _refuse(differences([parsed[raw] for raw in raws], ranks, missing))
    plan = Reduction([*parsed.values()], exchange.reduces)
    indices = {raw: Index(manifest, plan.paths, plan.counted) for raw, manifest in parsed.items()}
    sizes = [indices[raw].size for raw in raws]
    _refuse(exchange.too_big(sizes, [message.free for message in messages], receiver, plan.size))
    gathered, reduced = indices[packed.manifest].gathered(packed, exchange.device), plan.numbers(packed, exchange.device)
    under_way = [exchange.gather(gathered, max(sizes), receiver)]
    under_way += [exchange.reduce(numbers, "max" if kind == "highest" else "sum", receiver) for kind, numbers in reduced.items()]

    def merge() -> Recording | None:
        rows, *numbers = exchange.arrived(*under_way)
        if receiver not in (None, me):
            return None
        try:
            found = {"what was reduced": plan.read(recording, dict(zip(reduced, numbers, strict=True)))} if reduced else {}
            for rank, raw, row in zip(ranks, raws, rows, strict=True):
                found[f"rank {rank}"] = Recording(Sent(recording, indices[raw], row), parsed[raw]["aliases"])
            parts = Merged(found).all()
            names = dict.fromkeys(name for manifest in parsed.values() for name in manifest["subrecorders"])
            return Recording({name: parts[name] for name in names}, merged_aliases(found, names))
        except Exception as error:
            raise SyncError(f"the ranks do not fit together: {error}") from error

    return merge


def _check_missing(missing: Missing) -> None:
    if missing not in ("error", "keep"):
        raise ValueError(f"sync(missing={missing!r}): choose 'error' or 'keep'")


def _refuse(problems: Iterator[str], failure: Exception | None = None) -> None:
    """Raises `SyncError` if there is a problem."""
    if found := list(islice(problems, SHOWN + 1)):
        shown = "; ".join([*found[:SHOWN], *["and more"] * (len(found) > SHOWN)])
        raise SyncError(f"nothing was merged, because the ranks do not fit together: {shown}") from failure
