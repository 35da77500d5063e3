"""Hierarchy: `sync` over a device mesh, dimension by dimension, so that no rank holds the states of all ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice, takewhile
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from recorders.errors import RecordingWarning, SyncError
from recorders.recordings.distributed.fitting import SHOWN, differences, listed
from recorders.recordings.distributed.level import Level
from recorders.recordings.distributed.message import misfits, pack, parse, unpack
from recorders.recordings.distributed.partial import (
    Manifests,
    PartialMerge,
    pack_partial,
    parse_partial,
    partial_forgeries,
    unpack_partial,
)
from recorders.recordings.distributed.ranks import Differing, all_aliases, by_name, differing_shown, merge_subrecordings
from recorders.recordings.recording import Missing, Recording
from recorders.recordings.storage.entry import is_text
from reducers.errors import warn_user

__all__ = ["dimensions", "sync_mesh"]


class _Held(NamedTuple):
    """What a rank has on the way up: recordings that stand for those of the ranks that it speaks for, or why there are none."""

    recordings: Sequence[Recording] = ()
    wrong: Sequence[str] = ()
    cause: Exception | None = None


class _SyncCall(NamedTuple):
    """How `sync` was called on this rank."""

    recording: Recording
    to: int | Literal["all"]
    missing: Missing

    def __str__(self) -> str:
        return f"sync(to={self.to!r}, missing={self.missing!r})"


def dimensions(mesh: DeviceMesh) -> list[int]:
    """The dimensions of a mesh that have several ranks, the outermost first.

    Raises:
        SyncError: this process is not in the mesh, or its ranks are not in their order.
    """
    ranks = mesh.mesh.flatten().tolist()
    if mesh.get_coordinate() is None:
        raise SyncError(
            f"rank {dist.get_rank()} is not in the mesh it was asked to sync with, which has ranks {listed(ranks)}: call sync on "
            "its members only"
        )
    if ranks != sorted(ranks):
        raise SyncError(
            f"the ranks of the mesh are {mesh.mesh.tolist()!s:.300}, and sync merges in rank order, the last dimension first: "
            "give a mesh in which they ascend, as init_device_mesh makes it"
        )
    return [dimension for dimension, size in enumerate(mesh.mesh.shape) if size > 1]


def sync_mesh(recording: Recording, mesh: DeviceMesh, to: int | Literal["all"], missing: Missing) -> Recording | None:
    """What `sync` returns, and raises, for a mesh with several `dimensions`.

    The ranks of the last dimension send their states to the first of them, which merges them. These first ones do the same along
    the dimension before, and so on. What was merged, or why nothing was, goes back the same way.
    """
    levels = [Level(mesh, dimension) for dimension in reversed(dimensions(mesh))]
    led = list(takewhile(lambda level: level.leads, levels))
    call, ranks = _SyncCall(recording, to, missing), mesh.mesh.flatten().tolist()
    held = _Held([recording])
    if to != "all" and to not in ranks:
        error = SyncError(f"to={to!r} is neither 'all' nor a rank of the mesh, which has {listed(ranks)}")
        held = _failed(error, f"rank {dist.get_rank()} cannot sync: {error}")
    for level in led:
        try:
            held = _up(level, held, call)
        except SyncError as error:  # a rank of this dimension did not answer: those of the others must know, too
            held = _failed(error)
    if len(led) == len(levels):
        text, payload = _outcome(held, call, levels[-1].device)
    else:
        try:
            held = _up(levels[len(led)], held, call)
            text, payload = levels[len(led)].receive()
        except SyncError as error:
            held = _failed(error)
            text, payload = _outcome(held, call, levels[len(led)].device)
    without = _without_result(text)
    for level in reversed(led):
        here = to == "all" or to in level
        try:
            level.send(text if here else without, payload if here else payload[:0])
        except SyncError as error:
            held = held if held.cause else _failed(error)
    return _read(text, payload, call, held)


def _up(level: Level, held: _Held, call: _SyncCall) -> _Held:
    """What the first rank of a level holds after the others sent it what they hold; nothing on the others."""
    manifest, payload, cause = _packed(level, held, call)
    raws, sizes = level.manifests(manifest, payload)
    parsed = {raw: _parsed(raw) for raw in set(raws)}  # usually they are equal
    found: list[str] = []
    sent: list[Manifests] = []
    for label, raw in zip(level.labels, raws, strict=True):
        there = parsed[raw]
        if isinstance(there, ValueError):
            found.append(f"rank {label} sends a malformed manifest: {there!s:.1000}")
        elif isinstance(there, _Held):
            found += there.wrong
        else:
            sent.append(there)
    # Each looks at what those before it found sound, and finds the same on all ranks of the level: they decide alike.
    for problems in (
        iter(found),
        differences([manifests[0] for manifests in sent], level.labels, call.missing),
        partial_forgeries(call.recording, sent, sizes, level.labels),
        level.too_big(sizes, level.leader),
    ):
        if wrong := list(islice(problems, SHOWN + 1)):
            return _Held(wrong=[*wrong[:SHOWN], *["and more"] * (len(wrong) > SHOWN)], cause=cause)
    rows = level.payloads(payload, max(sizes), level.leader)
    merged = PartialMerge()
    for label, manifests, row, size in zip(level.labels, sent, rows, sizes, strict=False):  # only the first rank has rows
        try:
            for arrived in unpack_partial(call.recording, manifests, row[:size]):
                merged.add(arrived)
        except Exception as error:
            return _failed(error, f"rank {label} does not fit the ranks before it: {error}")
    return _Held(merged.recordings())


def _packed(level: Level, held: _Held, call: _SyncCall) -> tuple[bytes, Tensor, Exception | None]:
    """The manifest and the payload that a rank sends up, and the error if there is one: the others wait."""
    wrong, cause = held.wrong, held.cause
    if not wrong:
        try:
            return *pack_partial(held.recordings, level.device, call.missing, str(call)), None
        except Exception as error:
            wrong, cause = [f"rank {dist.get_rank()} cannot send what it recorded: {type(error).__name__}: {error!s:.1000}"], error
    return _written(wrong), torch.empty(0, dtype=torch.uint8, device=level.device), cause


def _failed(error: Exception, reason: str = "") -> _Held:
    """What a rank holds after an error."""
    return _Held(wrong=[reason or str(error).removeprefix("nothing was merged: ")], cause=error)


def _parsed(raw: bytes) -> Manifests | _Held | ValueError:
    """What a rank sends; why it has nothing to send; or why that is malformed."""
    try:
        data = json.loads(raw.decode())
        if not isinstance(data, dict) or "wrong" not in data:
            return parse_partial(data)
        if wrong := _told(raw)[0]:
            return _Held(wrong=wrong)
        return ValueError("it sends no states and no reason")
    except RecursionError:
        return ValueError("it is nested too deeply")
    except ValueError as error:
        return error


def _outcome(held: _Held, call: _SyncCall, device: torch.device) -> tuple[bytes, Tensor]:
    """What goes back from the first of all ranks: the text, and the payload of what was merged."""
    wrong: Sequence[str] = held.wrong
    if not wrong:
        try:
            differing: Differing = {}
            parts = {name: merge_subrecordings(several, name, differing) for name, several in by_name(held.recordings).items()}
            manifest, payload = pack(Recording(parts, all_aliases(held.recordings)), device, call.missing, str(call))
            return _written([], differing_shown(differing), manifest.decode()), payload
        except Exception as error:
            wrong = [f"the ranks do not fit together: {error}"]
    return _written(wrong), torch.empty(0, dtype=torch.uint8, device=device)


def _written(wrong: Sequence[str], warnings: Sequence[str] = (), result: str | None = None) -> bytes:
    return json.dumps({"wrong": list(wrong), "warnings": list(warnings), "result": result}).encode()


def _told(text: bytes) -> tuple[list[str], list[str], str | None]:
    """What `_written` wrote; raises `ValueError` if nobody can have written it."""
    match json.loads(text.decode()):
        case {"wrong": [*wrong], "warnings": [*warnings], "result": None | str() as result, **others} if not others and all(
            map(is_text, [*wrong, *warnings])
        ):
            return wrong, warnings, result
    raise ValueError(f"it is {text!r:.200}")


def _without_result(text: bytes) -> bytes:
    """What is sent to those who get no result; what is malformed goes on as it is, so that they find it, too."""
    try:
        return _written(_told(text)[0])
    except (ValueError, RecursionError):
        return text


def _read(text: bytes, payload: Tensor, call: _SyncCall, held: _Held) -> Recording | None:
    """The merged recording, from what came back."""
    wrong: Sequence[str] = ()
    warnings: Sequence[str] = ()
    merged: Recording | None = None
    try:
        wrong, warnings, result = _told(text)
        if result is not None and not wrong and not held.cause and call.to in ("all", dist.get_rank()):
            manifest = parse(result.encode())
            wrong = list(islice(misfits(call.recording, manifest), 1))
            merged = None if wrong else unpack(call.recording, manifest, payload)
    except (ValueError, KeyError, RuntimeError, RecursionError) as error:  # RuntimeError: a payload of another size
        wrong = [f"what came back is malformed: {error!s:.1000}"]
    if wrong or held.cause:
        raise SyncError(f"nothing was merged on the mesh: {'; '.join(wrong or held.wrong)}") from held.cause
    if merged is None:
        return None
    for warning in warnings:
        warn_user(warning, RecordingWarning)
    return Recording({name: replace(part, progress=None) for name, part in merged.items()}, merged.aliases)
