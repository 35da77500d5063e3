"""`sync`: merges the recordings of all ranks of a process group."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from recorders.errors import MergeError, SyncError
from recorders.recordings.distributed.exchange import Exchange
from recorders.recordings.distributed.fitting import SHOWN, differences, failures, forgeries, listed
from recorders.recordings.distributed.handle import SyncHandle
from recorders.recordings.distributed.hierarchy import dimensions, sync_mesh
from recorders.recordings.distributed.message import pack, pack_error, parse, unpack
from recorders.recordings.distributed.ranks import merge_ranks
from recorders.recordings.distributed.reduction import Reduction
from recorders.recordings.recording import Missing, Recording

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Group", "sync"]

_Row: TypeAlias = tuple[int, Mapping[str, Any], Tensor, int]
"""What a rank sent: the rank, the manifest, the bytes, and how many of them count."""

Group: TypeAlias = "ProcessGroup | DeviceMesh | None"
"""The ranks that sync; None for all."""


@overload
def sync(
    recording: Recording,
    group: Group = None,
    *,
    to: Literal["all"] = "all",
    missing: Missing = "error",
    async_op: Literal[False] = False,
) -> Recording: ...
@overload
def sync(
    recording: Recording,
    group: Group = None,
    *,
    to: int,
    missing: Missing = "error",
    async_op: Literal[False] = False,
) -> Recording | None: ...
@overload
def sync(
    recording: Recording,
    group: Group = None,
    *,
    to: Literal["all"] = "all",
    missing: Missing = "error",
    async_op: Literal[True],
) -> SyncHandle[Recording]: ...
@overload
def sync(
    recording: Recording, group: Group = None, *, to: int, missing: Missing = "error", async_op: Literal[True]
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
        group: the ranks to merge; None for all. Its CPU backend is used if it has one, else its accelerator. A `DeviceMesh` merges
            the ranks of its last dimension first, then the first rank of each of those along the dimension before, and so on: with
            the same result, in the memory of the sum of its dimensions in place of their product. See `docs/scale.md`.
        to: the global rank that gets what was merged, like `dst` of `torch.distributed.gather`; "all" for every rank. Ranks that
            get it briefly hold the states of all, the others only their own. It must be equal on all ranks.
        missing: "keep" merges a name that only some ranks record from those; "error" refuses it. It must be equal on all ranks.
        async_op: return while the states are on their way, as a collective does. All collectives are issued before, and the first
            ones, which are small, are waited for; so what the ranks do next stays in the order of their calls.

    Returns:
        The merged recording, with states on the CPU; None on ranks that are not `to`; or `recording` itself if there is only one
        rank or `torch.distributed` is not initialised. With `async_op`, a `SyncHandle` whose `wait()` returns that.

    Raises:
        SyncError: nothing was merged, and `recording` is as it was, to be saved. With `async_op`, `wait()` raises what is found
            after the states were sent.

            - Ranks hold different names, monitors or reducers; or a rank cannot send its states, sends what no rank can have
              recorded, or more than there is memory for. Every rank raises and lists this by global rank.
            - The states do not merge. With `to`, only that rank learns it.
            - A rank died, or does not call `sync`. All others raise, within the timeout of the group and a few seconds, and name
              the ranks that did not answer. NCCL ends a process at its timeout instead: give the group a CPU backend too,
              "cpu:gloo,cuda:nccl".
            - This process is not in the group or mesh, or the ranks of the mesh do not ascend.
            - With a mesh every rank of it raises, whatever its row; only what fails on the way back is raised by those who wait for
              it. At worst the timeouts of its groups pass one after another.

    Warns:
        RecordingWarning: copies differ between ranks, on the ranks that get what was merged. Of copies of a DTensor the first
            counts; parameters that differ count as those of different nets.

    >>> from recorders import Recording
    >>> alone = Recording({})
    >>> sync(alone) is alone
    True
    """
    if async_op and isinstance(group, DeviceMesh):
        raise ValueError("sync(mesh, async_op=True): over a mesh ranks wait for each other; leave out async_op, or give a group")
    handle = _started(recording, group, to, missing)
    return handle if async_op else handle.wait()


def _started(
    recording: Recording, group: Group, to: int | Literal["all"], missing: Missing
) -> SyncHandle[Recording] | SyncHandle[Recording | None]:
    if isinstance(group, DeviceMesh):
        several = dimensions(group)
        if len(several) > 1:
            with torch.inference_mode(False):
                merged = sync_mesh(recording, group, to, missing)
            return SyncHandle((), lambda: merged)
        group = group.get_group(several[0] if several else 0)
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size(group) == 1:
        return SyncHandle((), lambda: recording)
    if dist.get_rank(group) < 0:
        raise SyncError(f"rank {dist.get_rank()} is not in the group it was asked to sync with: call sync on its members only")
    exchange = Exchange(group)
    with torch.inference_mode(False):  # inference tensors could not be updated later
        merge = _sent(recording, exchange, to, missing)
    return SyncHandle(exchange.works, merge)


def _sent(recording: Recording, exchange: Exchange, to: int | Literal["all"], missing: Missing) -> Callable[[], Recording | None]:
    """Sends what was recorded, after all ranks agreed; returns the function that waits for what the others send and merges it."""
    ranks, receiver = exchange.ranks, None if to == "all" else to
    failure: Exception | None = None
    try:
        if receiver is not None and receiver not in ranks:
            raise SyncError(f"to={to!r} is neither 'all' nor a rank of the group, which has {listed(ranks)}")
        manifest, payload = pack(recording, exchange.device, missing, f"sync(to={to!r}, missing={missing!r})")
    except Exception as error:  # the other ranks wait, so send them the error
        failure = error
        manifest, payload = pack_error(error, exchange.device)
    raws, sizes = exchange.manifests(manifest, payload)
    parsed = {raw: _parsed(raw) for raw in set(raws)}  # usually they are equal
    manifests = [parsed[raw] for raw in raws]
    # Each looks at what those before it found sound, and finds the same on all ranks: they decide alike whether to go on.
    _refuse(
        (failures(manifests, ranks), differences(manifests, ranks, missing), forgeries(recording, manifests, sizes, ranks)),
        failure,
    )
    plan, me = Reduction(manifests, exchange.reduces), dist.get_rank()
    _refuse([exchange.too_big(plan.sizes, receiver, plan.size)], failure)
    gathered, reduced = plan.split(manifests[ranks.index(me)], payload)
    under_way = [exchange.gather(gathered, max(plan.sizes), receiver)]
    under_way += [exchange.reduce(numbers, "max" if kind == "highest" else "sum", receiver) for kind, numbers in reduced.items()]

    def merge() -> Recording | None:
        rows, *numbers = exchange.arrived(*under_way)
        if receiver not in (None, me):
            return None
        arrived = zip(ranks, plan.rests, rows, plan.sizes, strict=True)
        return plan.join(recording, _gathered(recording, arrived, missing), dict(zip(reduced, numbers, strict=True)))

    return merge


def _refuse(problems: Iterable[Iterator[str]], failure: Exception | None) -> None:
    """Raises `SyncError` if any of these checks finds a problem; the later ones are not asked then."""
    for check in problems:
        if found := list(islice(check, SHOWN + 1)):
            shown = "; ".join([*found[:SHOWN], *["and more"] * (len(found) > SHOWN)])
            raise SyncError(f"nothing was merged, because the ranks do not fit together: {shown}") from failure


def _gathered(recording: Recording, arrived: Iterable[_Row], missing: Missing) -> Recording:
    """The recordings that the ranks sent as bytes, merged in their order."""
    rows = [row for row in arrived if row[1]["subrecorders"]]
    manifests = {id(manifest): manifest for _, manifest, *_ in rows}.values()
    if any("placed" in entry for manifest in manifests for entry in manifest["subrecorders"].values()):
        return _by_placement(recording, rows)
    merged: Recording | None = None
    for rank, there, row, size in rows:
        try:
            part = unpack(recording, there, row[:size])
            merged = part if merged is None else merged.merge(part, missing=missing)
        except Exception as error:
            raise SyncError(f"rank {rank} does not fit the ranks before it: {error}") from error
    return merged or Recording({})


def _by_placement(recording: Recording, arrived: Iterable[_Row]) -> Recording:
    parts = []
    for rank, there, row, size in arrived:
        try:
            parts.append(unpack(recording, there, row[:size]))
        except ValueError as error:
            raise SyncError(f"rank {rank} does not fit the others: {error}") from error
    try:
        return merge_ranks(parts)
    except MergeError as error:
        raise SyncError(f"the ranks do not fit together: {error}") from error


def _parsed(raw: bytes) -> dict[str, Any]:
    try:
        return parse(raw)
    except ValueError as error:
        return {"error": f"its manifest is malformed: {error}"}
