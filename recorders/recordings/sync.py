"""`sync`: merges the recordings of all ranks of a process group."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from recorders.errors import MergeError, SyncError
from recorders.recordings.recording import Missing, Recording, Subrecording
from recorders.recordings.tensorfile import as_bytes
from reducers import RecipeError, Reducer, from_recipe, to_recipe

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["sync"]

_HEADER = struct.Struct("<qq32s")
"""Length of the manifest, length of the payload, SHA-256 of the manifest."""

_SHOWN = 20
"""The largest number of names, or of differences, that an error lists."""


def sync(recording: Recording, group: ProcessGroup | None = None, *, missing: Missing = "error") -> Recording:
    """The recordings of all ranks merged in rank order, the same on every rank, bit for bit.

    `recording` is not changed, so repeated calls count nothing twice. What all ranks record alike, such as parameters under data
    parallelism, counts once for every rank.

    There are at most three collectives: lengths and checksums; if checksums differ, the manifests (names, monitors, reducers, keys,
    shapes, dtypes); and the states. The states of a rank are sent as the bytes of one tensor, which works for every dtype. No rank
    sends states before all know that the manifests fit, and nothing is pickled. Every rank briefly holds the states of all.

    Args:
        recording: what this rank recorded. Every rank of the group must call `sync`.
        group: the ranks to merge; None for all. Its CPU backend is used if it has one, else its accelerator.
        missing: "keep" merges a name that only some ranks record from those; "error" refuses it. It must be equal on all ranks.

    Returns:
        The merged recording, with states on the CPU; or `recording` itself if there is only one rank or `torch.distributed` is not
        initialised.

    Raises:
        SyncError: ranks hold different names, monitors or reducers, or the states of a rank cannot be sent or merged. Every rank
            raises and lists the differences by global rank. Also if this process is not in the group.

    >>> from recorders import Recording
    >>> alone = Recording({})
    >>> sync(alone) is alone
    True
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size(group) == 1:
        return recording
    if dist.get_rank(group) < 0:
        raise SyncError(f"rank {dist.get_rank()} is not in the group it was asked to sync with: call sync on its members only")
    with torch.inference_mode(False):  # inference tensors could not be updated later
        return _sync(recording, group, missing)


def _sync(recording: Recording, group: ProcessGroup | None, missing: Missing) -> Recording:
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    device = _transport(group)
    failure: Exception | None = None
    try:
        manifest, payload = _pack(recording, device, missing)
    except Exception as error:  # the other ranks wait, so send them the error
        failure = error
        manifest = json.dumps({"error": f"{type(error).__name__}: {error}"[:1000]}).encode()
        payload = torch.empty(0, dtype=torch.uint8, device=device)
    manifests, sizes = _exchange(manifest, payload, len(ranks), group)
    for problems in (_failures(manifests, ranks), _differences(manifests, ranks, missing)):
        if found := list(islice(problems, _SHOWN + 1)):
            shown = "; ".join([*found[:_SHOWN], *["and more"] * (len(found) > _SHOWN)])
            raise SyncError(f"nothing was merged, because the ranks do not fit together: {shown}") from failure
    rows = _gather(payload, max(sizes), len(ranks), group).cpu()
    arrived = (_unpack(recording, there, row[:size]) for there, row, size in zip(manifests, rows, sizes, strict=True))
    merged = next(arrived)
    for rank, other in zip(ranks[1:], arrived, strict=True):
        try:
            merged = merged.merge(other, missing=missing)
        except MergeError as error:
            raise SyncError(f"rank {rank} does not fit the ranks before it: {error}") from error
    return merged


def _transport(group: ProcessGroup | None) -> torch.device:
    """The device on which the group communicates; the CPU if there are several, because every rank has it."""
    types = [pair.partition(":")[0] for pair in dist.get_backend_config(group).split(",")]
    return torch.device("cpu" if "cpu" in types else types[0])


def _gather(mine: Tensor, width: int, size: int, group: ProcessGroup | None) -> Tensor:
    """The bytes of each rank as a row, padded with zeros to `width`."""
    rows = torch.empty(size, width, dtype=torch.uint8, device=mine.device)
    if width:
        padding = width - mine.numel()
        dist.all_gather(list(rows.unbind()), nn.functional.pad(mine, (0, padding)) if padding else mine, group=group)
    return rows


def _exchange(
    manifest: bytes, payload: Tensor, size: int, group: ProcessGroup | None
) -> tuple[list[dict[str, Any]], tuple[int, ...]]:
    """The manifests of all ranks, parsed, and the sizes of their payloads."""
    header = _HEADER.pack(len(manifest), payload.numel(), hashlib.sha256(manifest).digest())
    rows = _gather(_tensor(header, payload.device), _HEADER.size, size, group)
    lengths, sizes, digests = zip(*(_HEADER.unpack(_bytes(row)) for row in rows), strict=True)
    raws = [manifest] * size
    if len(set(digests)) > 1:
        rows = _gather(_tensor(manifest, payload.device), max(lengths), size, group)
        raws = [_bytes(row[:length]) for row, length in zip(rows, lengths, strict=True)]
    parsed = {raw: json.loads(raw) for raw in set(raws)}  # usually they are equal
    return [parsed[raw] for raw in raws], sizes


def _tensor(raw: bytes, device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).to(device)


def _bytes(row: Tensor) -> bytes:
    data = bytearray(row.numel())
    if data:
        torch.frombuffer(data, dtype=torch.uint8).copy_(row)
    return bytes(data)


def _pack(recording: Recording, device: torch.device, missing: Missing) -> tuple[bytes, Tensor]:
    """The manifest, and the bytes of the sample counts and of all states, in the order of the manifest."""
    tensors: list[Tensor] = []
    entries: dict[str, Any] = {}
    texts: dict[int, str] = {}
    for name, part in recording.items():
        if part.reducer is None:
            raise SyncError(f"subrecorder {name!r} has no reducer, as it held a function: pass it, recording.with_reducers(...)")
        if id(part.reducer) not in texts:  # thousands of subrecorders may share a few reducers
            texts[id(part.reducer)] = _text(part.reducer)
        states: dict[str, dict[str, str]] = {}
        for leaf, state in part.states.items():
            states[leaf] = {}
            for key, value in state.items():
                tensors.append(_sendable(value, f"state {key!r} of subrecorder {name!r}{f', leaf {leaf!r}' if leaf else ''}"))
                states[leaf][key] = _spec(value.dtype, value.shape)
        entries[name] = {
            "is": f"{part.monitor or 'Monitor'}({texts[id(part.reducer)]}{f', {part.attr!r}' if part.attr else ''})"
            + "".join(f".apply({_text(function)})" for function in part.functions),
            "states": states,
        }
        if missing == "keep":
            entries[name]["part"] = [_recipe(part.reducer), part.monitor, part.attr, part.module]
    manifest = json.dumps({"subrecorders": entries, "aliases": dict(recording.aliases)}).encode()
    devices = {tensor.device for tensor in tensors}
    home = devices.pop() if len(devices) == 1 else device  # then there is one transfer, not one for each tensor
    samples = as_bytes(torch.tensor([part.samples for part in recording.values()], dtype=torch.int64, device=home))
    return manifest, torch.cat([samples, *(tensor.to(home) for tensor in tensors)]).to(device)


def _recipe(reducer: Reducer) -> dict[str, Any] | None:
    try:
        return to_recipe(reducer)
    except RecipeError:  # it holds a function, which only ranks that have it can call
        return None


def _sendable(tensor: Tensor, what: str) -> Tensor:
    """The bytes of a tensor, as uint8."""
    if type(tensor) not in (Tensor, nn.Parameter):
        raise SyncError(f"{what} is a {type(tensor).__name__}; only plain tensors can be sent")
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized or tensor.is_meta:
        kind = "meta" if tensor.is_meta else f"{tensor.layout} {tensor.dtype}"
        raise SyncError(f"{what} is a {kind} tensor; only dense tensors with data can be sent: convert it where it is recorded")
    return as_bytes(tensor.detach().resolve_conj().resolve_neg().contiguous())


def _spec(dtype: torch.dtype, shape: Sequence[int]) -> str:
    """Dtype and shape, such as `float32 64 3`; thousands of lists would start the garbage collector."""
    return " ".join([str(dtype).removeprefix("torch."), *map(str, shape)])


@lru_cache(maxsize=1024)
def _parse(spec: str) -> tuple[torch.dtype, tuple[int, ...], int]:
    """Dtype, shape and size in bytes, from the text of `_spec`."""
    name, *shape = spec.split(" ")
    dtype: torch.dtype = getattr(torch, name)
    return dtype, tuple(map(int, shape)), dtype.itemsize * math.prod(map(int, shape))


def _text(value: Any) -> str:
    """Like repr, but equal in all processes: functions and other objects whose repr has an address are given by name."""
    if is_dataclass(value) and not isinstance(value, type):
        inside = ", ".join(f"{field.name}={_text(getattr(value, field.name))}" for field in fields(value))
        return f"{type(value).__qualname__}({inside})"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_text, value))})"
    if value is None or isinstance(value, (str, int, float, complex, torch.dtype)):
        return repr(value)
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def _failures(manifests: Sequence[Mapping[str, Any]], ranks: Sequence[int]) -> Iterator[str]:
    """The errors of ranks that cannot send their recording."""
    for rank, manifest in zip(ranks, manifests, strict=True):
        if "error" in manifest:
            yield f"rank {rank} cannot send what it recorded: {manifest['error']}"


def _differences(manifests: Sequence[Mapping[str, Any]], ranks: Sequence[int], missing: Missing) -> Iterator[str]:
    """The differences between each rank and the first that has the same names, with both sides listed."""
    known: dict[str, tuple[int, Mapping[str, Any]]] = {}
    first = manifests[0]["subrecorders"]
    for rank, manifest in zip(ranks, manifests, strict=True):
        other = manifest["subrecorders"]
        mine, theirs = ([name for name in a if name not in b] for a, b in ((first, other), (other, first)))
        if missing == "error" and (mine or theirs):
            yield f"beside what both record, rank {ranks[0]} records {_listed(mine)} and rank {rank} records {_listed(theirs)}"
        for name, entry in other.items():
            before, expected = known.setdefault(name, (rank, entry))
            if entry["is"] != expected["is"]:
                yield f"{name!r} is {expected['is']} on rank {before} and {entry['is']} on rank {rank}"
    for name, (rank, entry) in known.items() if missing == "keep" else ():
        without = [other for other, manifest in zip(ranks, manifests, strict=True) if name not in manifest["subrecorders"]]
        if without and entry["part"][0] is None:
            yield f"{name!r} is {entry['is']} on rank {rank}, and ranks {without}, which do not record it, do not have its function"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{list(names[:_SHOWN])}{more}" if names else "nothing"


def _unpack(recording: Recording, manifest: Mapping[str, Any], payload: Tensor) -> Recording:
    """The recording that one rank sent, with the reducers and functions of this rank."""
    entries = manifest["subrecorders"]
    leaves = [(name, leaf, state) for name, entry in entries.items() for leaf, state in entry["states"].items()]
    specs = [_parse(spec) for _, _, state in leaves for spec in state.values()]
    counts, *pieces = torch.split(payload, [8 * len(entries), *(size for _, _, size in specs)])
    # Pieces are copied before they are viewed, because they may not be aligned, and would keep all bytes alive.
    tensors = (piece.clone().view(dtype).view(shape) for piece, (dtype, shape, _) in zip(pieces, specs, strict=True))
    states: dict[str, dict[str, dict[str, Tensor]]] = {name: {} for name in entries}
    for name, leaf, state in leaves:
        states[name][leaf] = {key: next(tensors) for key in state}
    samples = counts.clone().view(torch.int64).tolist()
    parts = {
        name: replace(_part(recording, name, entry), states=states[name], samples=count, values=None)
        for (name, entry), count in zip(entries.items(), samples, strict=True)
    }
    return Recording(parts, manifest["aliases"])


def _part(recording: Recording, name: str, entry: Mapping[str, Any]) -> Subrecording:
    """What this rank has under a name, or if it has nothing the same made from the manifest."""
    if name in recording:
        return recording[name]
    recipe, monitor, attr, module = entry["part"]
    return Subrecording(from_recipe(recipe), monitor=monitor, attr=attr, module=module)
