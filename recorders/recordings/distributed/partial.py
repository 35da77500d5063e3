"""Partial merges: what some of the ranks recorded, in as few recordings as can still be merged with those of the other ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice, zip_longest
from typing import Any

import torch
from torch import Tensor

from recorders.errors import MergeError, SyncError
from recorders.recordings.distributed.exchange import MAX_MANIFEST
from recorders.recordings.distributed.fitting import SHOWN
from recorders.recordings.distributed.message import misfits, pack, parse, payload_size, unpack
from recorders.recordings.distributed.placement import equal_states
from recorders.recordings.recording import Missing, Recording, Subrecording
from recorders.recordings.storage.entry import is_text

__all__ = ["PartialMerge", "pack_partial", "parse_partial", "partial_forgeries", "partial_size", "unpack_partial"]

Manifests = Sequence[Mapping[str, Any]]
"""A manifest for each recording of a partial merge; the first names all subrecorders."""


class PartialMerge:
    """As few recordings as stand for those of some ranks, when all ranks are merged.

    `merge_ranks` of the results of several partial merges, in the order of the ranks, is `merge_ranks` of all recordings. What is
    data of each rank is merged. Of what ranks share, copies that are equal to one before are left out. Parts of tensors, and copies
    that differ, stay apart: only all ranks together show what they make, and whether copies of others are equal.

    >>> from recorders import Recording, Subrecording
    >>> from recorders.recordings.distributed.placement import Placement
    >>> from reducers import Norm
    >>> partial, state = PartialMerge(), Norm().update({}, torch.ones(3))
    >>> for rank in range(2):
    ...     shared = Subrecording(Norm(), {"": state}, 1, placement={"": Placement(rank, shared=True)})
    ...     partial.add(Recording({"output": Subrecording(Norm(), {"": state}, 1), "weight": shared}))
    >>> [(list(recording), list(recording.samples.values())) for recording in partial.recordings()]
    [(['output', 'weight'], [2, 1])]
    """

    def __init__(self) -> None:
        self._kept: dict[str, list[Subrecording]] = {}
        self._copies: dict[Any, list[Subrecording]] = {}
        self._aliases: dict[str, str] = {}

    def add(self, recording: Recording) -> None:
        """Adds what the next rank recorded, or one of the recordings that stand for the next ranks.

        Raises:
            MergeError: reducers or states do not fit those before.
        """
        self._aliases = {**recording.aliases, **self._aliases}
        for name, part in recording.items():
            try:
                self._add(name, part)
            except Exception as error:
                raise MergeError(f"subrecorder {name!r}: {error}") from error

    def _add(self, name: str, part: Subrecording) -> None:
        kept = self._kept.setdefault(name, [])
        if kept and not part.placement and not kept[-1].placement:
            kept[-1] = kept[-1].merge(part)
            return
        if part.placement and (place := _place(part)) is not None:
            alike = self._copies.setdefault((name, place), [])
            if any(_equal(before, part) for before in alike):
                return
            alike.append(part)
        kept.append(part)

    def recordings(self) -> list[Recording]:
        """The first has all names and aliases; the others have the names of which more than one must be kept."""
        rows = zip_longest(*self._kept.values())
        found = [Recording({name: part for name, part in zip(self._kept, row, strict=True) if part is not None}) for row in rows]
        first = found[0] if found else Recording({})
        aliases = {alias: name for alias, name in self._aliases.items() if alias not in self._kept}
        return [replace(first, aliases=aliases), *found[1:]]


def _place(part: Subrecording) -> Any:
    """What is equal for subrecordings that may be copies of each other; None if some of it is data of its rank."""
    if part.states.keys() - part.placement.keys() or any(
        place.home is None and not place.shared for place in part.placement.values()
    ):
        return None
    return tuple((leaf, place.shared, place.home, place.axes, place.parts) for leaf, place in sorted(part.placement.items()))


def _equal(a: Subrecording, b: Subrecording) -> bool:
    """Whether two subrecordings of equal places are copies, bit for bit, of different ranks."""
    ranks = [next(iter(part.placement.values())).rank for part in (a, b)]
    return (
        ranks[0] != ranks[1]
        and a.samples == b.samples
        and a.reducer == b.reducer
        and a.states.keys() == b.states.keys()
        and all(equal_states(state, b.states[leaf]) for leaf, state in a.states.items())
    )


def pack_partial(recordings: Sequence[Recording], device: torch.device, missing: Missing, call: str) -> tuple[bytes, Tensor]:
    """The manifest and the payload of a partial merge; equal manifests of recordings are sent once.

    Raises:
        SyncError: see `recorders.recordings.distributed.message.pack`.
    """
    packed = [pack(recording, device, missing, call) for recording in recordings]
    texts = {text: number for number, text in enumerate(dict.fromkeys(text for text, _ in packed))}
    data = {"manifests": [text.decode() for text in texts], "recordings": [texts[text] for text, _ in packed]}
    manifest = json.dumps(data).encode()
    if len(manifest) > MAX_MANIFEST:
        raise SyncError(f"the names and states take {len(manifest)} bytes, and at most {MAX_MANIFEST} are sent: sync fewer at once")
    payloads = [payload for _, payload in packed]
    return manifest, payloads[0] if len(payloads) == 1 else torch.cat(payloads)


def parse_partial(data: Any) -> Manifests:
    """The manifests of the recordings, from JSON that a rank sent; raises `ValueError` if it is malformed."""
    match data:
        case {"manifests": [_, *_] as texts, "recordings": [_, *_] as numbers, **others} if not others:
            if not all(map(is_text, texts)) or not all(type(number) is int and 0 <= number < len(texts) for number in numbers):
                raise ValueError("its recordings are no numbers of manifests")
            parsed = [parse(text.encode()) for text in texts]
            if any("error" in manifest for manifest in parsed):
                raise ValueError("one of its recordings is an error")
            return [parsed[number] for number in numbers]
    raise ValueError(f"it is {data!r:.200}")


def partial_size(manifests: Manifests) -> int:
    """The bytes of the payload."""
    return sum(map(payload_size, manifests))


def partial_forgeries(
    recording: Recording, sent: Sequence[Manifests], sizes: Sequence[int], ranks: Sequence[object]
) -> Iterator[str]:
    """What ranks announce that nobody can have recorded. `recording` is what this rank recorded."""
    for rank, manifests, size in zip(ranks, sent, sizes, strict=True):
        if size != (wanted := partial_size(manifests)):
            yield f"rank {rank} sends {size} bytes of states, and its manifest names {wanted}"
    if all(manifests is sent[0] for manifests in sent):
        return  # they are what this rank made
    unique: dict[int, tuple[object, Mapping[str, Any]]] = {}
    for rank, manifests in zip(ranks, sent, strict=True):
        for manifest in manifests:
            unique.setdefault(id(manifest), (rank, manifest))
    for rank, manifest in unique.values():
        yield from (f"rank {rank}, {reason}" for reason in islice(misfits(recording, manifest), SHOWN))


def unpack_partial(recording: Recording, manifests: Manifests, payload: Tensor) -> list[Recording]:
    """The recordings that one rank sent, with the reducers and functions of this rank; raises `ValueError` if it is malformed."""
    payloads = torch.split(payload, [payload_size(manifest) for manifest in manifests])
    return [unpack(recording, manifest, part) for manifest, part in zip(manifests, payloads, strict=True)]
