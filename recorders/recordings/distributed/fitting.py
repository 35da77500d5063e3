"""Fitting: whether what the ranks of a `sync` announce fits together, and can have been recorded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from recorders.recordings.distributed.message import misfits, payload_size
from recorders.recordings.recording import Missing, Recording

__all__ = ["SHOWN", "differences", "failures", "forgeries", "listed"]

SHOWN = 20
"""The largest number of names, or of differences, that an error lists."""


def failures(manifests: Sequence[Mapping[str, Any]], ranks: Sequence[int]) -> Iterator[str]:
    """The errors of ranks that cannot send their recording, and of those whose manifest is malformed."""
    for rank, manifest in zip(ranks, manifests, strict=True):
        if "error" in manifest:
            yield f"rank {rank} cannot send what it recorded: {manifest['error']}"


def differences(manifests: Sequence[Mapping[str, Any]], ranks: Sequence[object], missing: Missing) -> Iterator[str]:
    """The differences between each rank and the first that has the same names, with both sides listed."""
    calls = {manifest["call"]: rank for rank, manifest in zip(ranks, manifests, strict=True)}
    if len(calls) > 1:
        yield "; ".join(f"rank {rank} calls {call:.200}" for call, rank in islice(calls.items(), SHOWN))
        return
    known: dict[str, tuple[object, Mapping[str, Any]]] = {}
    first = manifests[0]["subrecorders"]
    for rank, manifest in zip(ranks, manifests, strict=True):
        other = manifest["subrecorders"]
        mine, theirs = ([name for name in a if name not in b] for a, b in ((first, other), (other, first)))
        if missing == "error" and (mine or theirs):
            yield f"beside what both record, rank {ranks[0]} records {listed(mine)} and rank {rank} records {listed(theirs)}"
        for name, entry in other.items():
            before, expected = known.setdefault(name, (rank, entry))
            if entry["is"] != expected["is"]:
                yield f"{name!r} is {expected['is']} on rank {before} and {entry['is']} on rank {rank}"
    for name, (rank, entry) in known.items() if missing == "keep" else ():
        without = [other for other, manifest in zip(ranks, manifests, strict=True) if name not in manifest["subrecorders"]]
        if without and entry["part"][0] is None:
            yield f"{name!r} is {entry['is']} on rank {rank}, and ranks {without}, which do not record it, do not have its function"


def forgeries(
    recording: Recording, manifests: Sequence[Mapping[str, Any]], sizes: Sequence[int], ranks: Sequence[int]
) -> Iterator[str]:
    """What ranks announce that nobody can have recorded."""
    seen: dict[int, tuple[int, list[str]]] = {}
    alike = all(manifest is manifests[0] for manifest in manifests)
    for rank, manifest, size in zip(ranks, manifests, sizes, strict=True):
        if id(manifest) not in seen:  # if all are alike, they are what this rank made
            seen[id(manifest)] = payload_size(manifest), [] if alike else list(islice(misfits(recording, manifest), SHOWN))
        wanted, found = seen[id(manifest)]
        if size != wanted:
            yield f"rank {rank} sends {size} bytes of states, and its manifest names {wanted}"
        yield from (f"rank {rank}, {reason}" for reason in found)


def listed(names: Sequence[object]) -> str:
    """The first names as a list, for errors; "nothing" if there are none."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{list(names[:SHOWN])}{more}" if names else "nothing"
