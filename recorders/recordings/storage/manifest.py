"""The manifest of a recording: the content of `manifest.json`, and safe reading of it from untrusted bytes.

It is JSON. The first line identifies the format, each further line is one subrecorder, with a checksum of its own. So a manifest is
read line by line, and a damaged line does not take the others with it. Names of tensors are never parsed: `states` and `values` say
what each tensor is. `docs/format.md` describes the format byte by byte.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from recorders.errors import CorruptRecordingError, StorageError
from recorders.recordings.storage.entry import Entry, check_entry, is_count, is_text, is_text_or_none, mapping, matches
from recorders.recordings.storage.seals import (
    MAX_LINE,
    facts_of,
    head_is_sealed,
    parse,
    sealed,
    sealed_line,
    unsealed,
    why_head_is_damaged,
)

__all__ = ["HEAD", "MANIFEST", "Head", "Manifest", "decode", "encode", "is_generation", "is_of_ranks", "recording_of"]

MANIFEST = "manifest.json"
_NAME_AT = len('{"crc32": "01234567", "name": ')  # where the name of a subrecorder begins in its line
_LONGEST_NAME = 2**20
_SPLIT = re.compile("[\ud800-\udbff][\udc00-\udfff]")
HEAD = -1
"""The number of the first line."""
_scan_text = json.JSONDecoder().raw_decode
is_generation = matches(re.compile(r"generation-[0-9a-f]{32}"))
"""Whether a value is the name of a generation folder."""


@dataclass(frozen=True)
class Head:
    """What a manifest says of all subrecorders.

    Attributes:
        generation: the folder of the files.
        aliases: further names of subrecorders.
        versions: those of the libraries that wrote it.
        step: the step of the clock; None if there was no clock.
        packed: the file that all subrecorders share, with its `bytes` and `sha256`; None if every one has its own.
    """

    generation: str
    aliases: Mapping[str, str]
    versions: Mapping[str, str | None]
    step: int | None = None
    packed: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Manifest(Head):
    """A manifest that was read; what it says of a subrecorder is parsed and checked when it is asked for.

    Attributes:
        where: the name of the file, for errors.
        reducers: the recipes that subrecorders name by number; None if they cannot be believed, and nobody knows them.
        lines: the line of each subrecorder, by its name, in order.
        damaged: why a line cannot be believed, by its number, if such lines were to be left out; `HEAD` is the first one.
        places: by name, the number of its line among all that were written.
    """

    where: str = ""
    reducers: Sequence[Any] | None = ()
    lines: Mapping[str, bytes] = field(default_factory=dict)
    damaged: Mapping[int, str] = field(default_factory=dict)
    places: Mapping[str, int] = field(default_factory=dict)

    def entry(self, name: str) -> Entry:
        """What it says of one subrecorder; raises `CorruptRecordingError` if that is malformed."""
        try:
            facts = {**facts_of(self.lines[name]), **(self.packed or {})}
            reducers = self.reducers
            facts["reducer"] = None if reducers is None else reducers[_index(facts["reducer"], len(reducers))]
            entry = Entry(**facts)
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            what = f"subrecorder {name!r:.200}: {type(error).__name__}: {error}"
            raise CorruptRecordingError(f"{self.where} is malformed: {what}") from error
        check_entry(entry, CorruptRecordingError, self.where)
        return entry


def encode(head: Head, entries: Iterable[Entry]) -> bytes:
    """The bytes of a manifest; raises `StorageError` if a part has the wrong type, or is too deep or too long to be read."""
    entries = tuple(entries)
    recipes: dict[int, int] = {}
    table: dict[str, int] = {}
    lines: dict[str, str] = {}
    try:
        _check_head(head, StorageError, "this recording")
        for entry in entries:
            check_entry(entry, StorageError, "this recording")
            if id(entry.reducer) not in recipes:
                recipes[id(entry.reducer)] = table.setdefault(_dump(entry.reducer), len(table))
            reducer = recipes[id(entry.reducer)]
            facts = {key: value for key, value in vars(entry).items() if value or key not in ("versions", "progress", "placement")}
            facts = {key: value for key, value in facts.items() if head.packed is None or key not in head.packed}
            line = _dump({**facts, "reducer": reducer})[1:]
            if len(line) > MAX_LINE - 30:
                raise StorageError(f"subrecorder {entry.name!r:.200} has too many tensors: they take {len(line)} bytes to name")
            if len(_dump(entry.name)) > _LONGEST_NAME:
                raise StorageError(f"the name {entry.name[:100]!r}... is too long: it takes more than {_LONGEST_NAME} bytes")
            if "\\ud" in line and _SPLIT.search(json.dumps(facts, ensure_ascii=False)):
                raise StorageError(f"subrecorder {entry.name!r:.200} has a character in two halves, which come back as one")
            if entry.name in lines:
                raise StorageError(f"this recording names {entry.name!r:.200} twice")
            lines[entry.name] = sealed_line(line)
        _check_aliases(head, lines, StorageError, "this recording")
        described = {key: getattr(head, key) for key in ("generation", "packed", "step", "versions", "aliases")}
        described["count"] = len(lines)
        about = ", ".join([*(f'"{key}": {_dump(value)}' for key, value in described.items()), f'"reducers": [{", ".join(table)}]'])
    except (TypeError, ValueError, RecursionError) as error:
        raise StorageError(f"this recording cannot be described as data: {error}") from error
    if len(about) > MAX_LINE - 300:
        raise StorageError(f"the reducers and further names take {len(about)} bytes, and {MAX_LINE} can be read back")
    if "\\ud" in about and _SPLIT.search(json.dumps([dict(head.aliases)], ensure_ascii=False)):
        raise StorageError("a further name has a character in two halves, which come back as one")
    rest = f', {about}, "subrecorders": [\n' + ",\n".join(lines.values()) + "\n]}\n"
    return sealed(rest)


_dump = json.JSONEncoder(allow_nan=False).encode


def is_of_ranks(raw: bytes) -> bool:
    """Whether a manifest names manifests of ranks; see `recorders.recordings.storage.ranks_manifest`."""
    return raw.endswith(b', "ranks": [', 0, max(0, raw.find(b"\n")))


def decode(raw: bytes, where: str, *, skip: bool = False) -> Manifest:
    """The manifest in these untrusted bytes.

    Args:
        where: the name of the file, for errors.
        skip: if the bytes are damaged, leave out the lines that are, and name them in `damaged`. Of a first line that is damaged,
            nothing is believed but what other checksums prove: results come back, without reducers, further names and the step.

    Raises:
        NotARecordingError: the bytes are something else.
        SchemaError: a newer version wrote them.
        CorruptRecordingError: they are not what was saved.
    """
    # The checksum comes first: nothing is parsed of a file that was damaged by chance.
    sound = unsealed(raw, where)
    if is_of_ranks(raw):
        raise CorruptRecordingError(f"{where} is malformed: it is of many ranks, where that of one is expected")
    if not sound and not skip:
        raise CorruptRecordingError(f"{where} is damaged: its checksum does not fit its content")
    try:
        first, *lines = raw.split(b"\n")
        if lines[-2:] != [b"]}", b""]:
            raise ValueError("it has no end")
        about = parse(first + b"]}")
        named, places, damaged = _named(lines[:-2], skip=not sound)
        head = Head(**{key: about[key] for key in ("generation", "aliases", "versions", "step", "packed")})
        reducers = about["reducers"]
        if not sound:
            head, reducers = _believed(first, about, head, len(places) + len(damaged), damaged)
        manifest = Manifest(**vars(head), where=where, reducers=reducers, lines=named, damaged=damaged, places=places)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise CorruptRecordingError(f"{where} is malformed: {type(error).__name__}: {error}") from error
    _check_head(manifest, CorruptRecordingError, where)
    if not damaged:
        _check_aliases(manifest, named, CorruptRecordingError, where)
    return manifest


def _believed(first: bytes, about: Mapping[str, Any], head: Head, lines: int, damaged: dict[int, str]) -> tuple[Head, Any]:
    """What may be believed of the first line if the checksum of the whole does not fit; adds to `damaged` what is not."""
    sound = head_is_sealed(first)
    if missing := sound and lines != about["count"]:
        damaged[lines] = f"{lines} lines are there, and {about['count']} were written"
    if head.packed is not None and (missing or not sound):
        # Tensors of the common file are found by the numbers of lines, which may have moved.
        raise ValueError("its first line is damaged, or lines of it are missing, and all subrecorders are in one file")
    if not (sound and damaged):
        damaged[HEAD] = why_head_is_damaged(first)
    return (head, about["reducers"]) if sound else (Head(head.generation, {}, {}, None, head.packed), None)


def _named(lines: list[bytes], *, skip: bool) -> tuple[dict[str, bytes], dict[str, int], dict[int, str]]:
    """The lines and their numbers by name, and why a line is damaged by its number, if it is to be left out."""
    named: dict[str, bytes] = {}
    places: dict[str, int] = {}
    damaged: dict[int, str] = {}
    for number, line in enumerate(line.removesuffix(b",") for line in lines if line):
        try:
            if skip:
                facts_of(line)
            name = _scan_text(line[_NAME_AT : _NAME_AT + _LONGEST_NAME].decode(), 0)[0]
            if not isinstance(name, str) or name in named:
                raise ValueError(f"line {number} names {name!r:.200}, which is no text or was named before")
            named[name], places[name] = line, number
        except ValueError as error:
            if not skip:
                raise
            damaged[number] = str(error)
    return named, places, damaged


def _index(index: Any, length: int) -> int:
    if type(index) is not int or not 0 <= index < length:
        raise ValueError(f"there is no reducer {index!r:.100}")
    return index


def recording_of(path: str) -> str | None:
    """The recording of which a generation folder, a file in one, or a manifest is a part; None if `path` is none of these."""
    for inner in (os.path.abspath(path), os.path.dirname(os.path.abspath(path))):
        root, name = os.path.split(inner)
        if (name == MANIFEST or is_generation(name)) and os.path.isfile(os.path.join(root, MANIFEST)):
            return root
    return None


def _check_aliases(head: Head, names: Iterable[str], error: type[StorageError], where: str) -> None:
    if not set(head.aliases.values()) <= set(names):
        raise error(f"{where} is malformed: an alias names no subrecorder")


def _check_head(head: Head, error: type[StorageError], where: str) -> None:
    """Raises `error` if anything that is not of one subrecorder is invalid."""
    if not is_generation(head.generation):
        raise error(f"{where} is malformed: no generation folder is called {head.generation!r:.200}")
    if head.packed is not None and (not isinstance(head.packed, dict) or head.packed.keys() != {"file", "bytes", "sha256"}):
        raise error(f"{where} is malformed: the packed file is {head.packed!r:.200}")
    if head.step is not None and not is_count(head.step):
        raise error(f"{where} is malformed: the step of the clock is {head.step!r:.200}")
    if not mapping(is_text)(head.aliases):
        raise error(f"{where} is malformed: its aliases are not texts")
    if not mapping(is_text_or_none)(head.versions):
        raise error(f"{where} is malformed: its versions are not texts")
