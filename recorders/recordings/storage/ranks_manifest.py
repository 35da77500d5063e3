"""The manifest of a recording that many ranks saved: it names a manifest of each rank, which names the files of that rank.

So it is short, whatever the ranks recorded, and what commits the files of a rank is one checksum. A manifest of a rank is that of a
recording of one process, in the generation folder. `docs/format.md` describes both.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from recorders.errors import CorruptRecordingError, SelectionError
from recorders.recordings.atomic_files import read_regular
from recorders.recordings.storage.entry import is_count, is_text_or_none, mapping, matches
from recorders.recordings.storage.manifest import HEAD, MANIFEST, Manifest, decode, is_generation, is_of_ranks
from recorders.recordings.storage.seals import (
    MAX_BYTES,
    facts_of,
    head_is_sealed,
    parse,
    sealed,
    sealed_line,
    unsealed,
    why_head_is_damaged,
)

__all__ = [
    "RankFile",
    "RanksManifest",
    "decode_any",
    "encode_ranks",
    "generation_folder",
    "in_order",
    "rank_file",
    "read_manifest",
    "read_rank",
    "shown_ranks",
]

_FILE = re.compile(r"[0-9]{1,20}\.json")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class RankFile:
    """The manifest of one rank: its file in the generation folder, `bytes` long, with checksum `sha256`."""

    rank: int
    file: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class RanksManifest:
    """A manifest of many ranks.

    Attributes:
        generation: the folder of all files.
        versions: those of the libraries that wrote it.
        ranks: the manifest of each rank, by its global rank, in the order of the group.
        where: the name of the file, for errors.
        damaged: why a line cannot be believed, by its number, if such lines were to be left out.
    """

    generation: str
    versions: Mapping[str, str | None]
    ranks: Mapping[int, RankFile]
    where: str = ""
    damaged: Mapping[int, str] = field(default_factory=dict)

    def of(self, rank: int) -> RankFile:
        """The manifest of a rank; raises `SelectionError` if it saved nothing here."""
        if rank not in self.ranks:
            raise SelectionError(f"{self.where} names no rank {rank!r}: it was saved by ranks {shown_ranks(self.ranks)}")
        return self.ranks[rank]


def shown_ranks(ranks: Iterable[int]) -> str:
    """Ranks as text, cut after twenty."""
    listed = list(ranks)
    return f"{listed[:20]}{f' and {len(listed) - 20} more' if len(listed) > 20 else ''}"


def in_order(manifest: RanksManifest, ranks: Iterable[int]) -> list[int]:
    """Some of its ranks, in its order; raises `SelectionError` if it does not name one of them, or none is given."""
    chosen = {manifest.of(rank).rank for rank in ranks}
    if not chosen:
        raise SelectionError(f"no rank is chosen of those that saved {manifest.where}: {shown_ranks(manifest.ranks)}")
    return [rank for rank in manifest.ranks if rank in chosen]


def rank_file(rank: int) -> str:
    """The file of the manifest of a rank; names of its other files begin with the same digits."""
    return f"{rank:05}.json"


def encode_ranks(generation: str, versions: Mapping[str, str | None], files: Iterable[RankFile]) -> bytes:
    """The bytes of a manifest of many ranks; raises `StorageError` if they are too many."""
    lines = [sealed_line(json.dumps(vars(file))[1:]) for file in files]
    about = f'"generation": "{generation}", "versions": {json.dumps(versions)}'
    return sealed(f', {about}, "ranks": [\n' + ",\n".join(lines) + "\n]}\n")


def decode_any(raw: bytes, where: str, *, skip: bool = False) -> Manifest | RanksManifest:
    """The manifest in these untrusted bytes, of one process or of many ranks; see `manifest.decode`."""
    sound = unsealed(raw, where)
    if not is_of_ranks(raw):
        return decode(raw, where, skip=skip)
    if not sound and not skip:
        raise CorruptRecordingError(f"{where} is damaged: its checksum does not fit its content")
    try:
        first, *lines = raw.split(b"\n")
        if lines[-2:] != [b"]}", b""]:
            raise ValueError("it has no end")
        about = parse(first + b"]}")
        ranks: dict[int, RankFile] = {}
        files = set[str]()
        damaged: dict[int, str] = {}
        for number, line in enumerate(line.removesuffix(b",") for line in lines[:-2] if line):
            try:
                file = _rank_file(facts_of(line))
                if file.rank in ranks or file.file in files:
                    raise ValueError(f"line {number} names rank {file.rank} or file {file.file!r:.40}, which was named before")
                ranks[file.rank] = file
                files.add(file.file)
            except (TypeError, ValueError, RecursionError) as error:
                if sound:
                    raise
                damaged[number] = str(error)
        if not sound and (not damaged or not head_is_sealed(first)):
            damaged[HEAD] = why_head_is_damaged(first)
        generation, versions = about["generation"], about["versions"]
        if about["ranks"] != [] or not is_generation(generation) or not mapping(is_text_or_none)(versions):
            raise ValueError(f"its generation is {generation!r:.200}, its versions are {versions!r:.200}")
        return RanksManifest(generation, versions, ranks, where, damaged)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise CorruptRecordingError(f"{where} is malformed: {type(error).__name__}: {error}") from error


def _rank_file(facts: Mapping[str, Any]) -> RankFile:
    file = RankFile(**facts)
    if not (is_count(file.rank) and matches(_FILE)(file.file) and is_count(file.bytes) and matches(_SHA256)(file.sha256)):
        raise ValueError(f"no manifest of a rank is {file!r:.300}")
    return file


def generation_folder(root: str, generation: str) -> str:
    """The folder of a generation; raises `CorruptRecordingError` if it is a link."""
    folder = os.path.join(root, generation)
    if os.path.islink(folder):
        raise CorruptRecordingError(f"{folder} is a symbolic link, which recordings do not hold")
    return folder


def read_manifest(root: str, *, skip: bool = False) -> Manifest | RanksManifest:
    """The manifest of the recording in folder `root`; raises a `StorageError` if it cannot be read, see `decode`."""
    where = os.path.join(root, MANIFEST)
    return decode_any(read_regular(where, MAX_BYTES), where, skip=skip)


def read_rank(root: str, manifest: RanksManifest, rank: int) -> Manifest:
    """The manifest of one rank; raises `CorruptRecordingError` if it is damaged, `OSError` if it is not there, else as `of`."""
    file = manifest.of(rank)
    where = os.path.join(generation_folder(root, manifest.generation), file.file)
    raw = read_regular(where, min(file.bytes, MAX_BYTES))
    if len(raw) != file.bytes or hashlib.sha256(raw).hexdigest() != file.sha256:
        raise CorruptRecordingError(f"{where}, the manifest of rank {rank}, is damaged: it is not what was saved")
    found = decode(raw, where)
    if found.generation != manifest.generation:
        raise CorruptRecordingError(f"{where}, the manifest of rank {rank}, is of another save: it names {found.generation}")
    return found
